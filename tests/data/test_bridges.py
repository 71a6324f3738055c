"""Data sets of other libraries become clients: Hugging Face datasets, Flower partitions, torch Datasets, folders."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import equipoise as eq
from equipoise.errors import IncompatibleParts, InvalidData, InvalidParameter

datasets = pytest.importorskip("datasets")
COLUMNS = {
    "site": ["b", "a", "b", "a", "c", "c"],
    "input_ids": [[1, 2], [3], [4, 5, 6], [1], [2, 2], [3]],
    "attention_mask": [[1, 1], [1], [1, 1, 1], [1], [1, 1], [1]],
    "length": [2.0, 1.0, 3.0, 1.0, 2.0, 1.0],
    "label": [0, 1, 1, 0, 1, 0],
}


def test_a_dataset_with_a_client_column():
    rows = datasets.Dataset.from_dict(COLUMNS)
    data = eq.data.from_hugging_face(rows, client="site", x="length", y="label", test=0.0)
    assert data.train.ids == ("a", "b", "c")
    assert data.train.client("b")[0].tolist() == [2.0, 3.0]
    assert data.train.client("b")[1].tolist() == [0, 1]
    tokens = eq.data.from_hugging_face(rows, client="site", x=["input_ids", "attention_mask"], y="label", test=0.0)
    x, _ = tokens.train.client("b")
    assert x["input_ids"][:, :3].tolist() == [[1, 2, 0], [4, 5, 6]]
    assert x["attention_mask"][:, :3].tolist() == [[1, 1, 0], [1, 1, 1]]
    labels = eq.data.from_hugging_face(rows, client="site", x=["input_ids", "length"], y="attention_mask", test=0.0)
    assert labels.train.client("a")[1][:, :2].tolist() == [[1, -100], [1, -100]]


def test_a_dict_of_datasets_and_images():
    picture = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    part = datasets.Dataset.from_dict({"image": [picture, picture], "label": [0, 1]}, features=features)
    data = eq.data.from_hugging_face({"p": part, "q": part}, x="image", y="label", test=0.5, scale=1 / 255)
    x, y = data.train.client(at=0)
    assert x.shape == (2, 3, 2, 3)
    torch.testing.assert_close(x[0, 1] * 255, torch.from_numpy(picture[..., 1]).float())
    assert y.tolist() == [0, 1]


def test_partitions_of_flower_datasets():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = partitioners.IidPartitioner(num_partitions=3)
    partitioner.dataset = datasets.Dataset.from_dict(COLUMNS)
    data = eq.data.from_partitions(partitioner, x="length", y="label", test=0.0)
    assert data.train.ids == ("0", "1", "2")
    assert data.train.sizes.tolist() == [2, 2, 2]
    natural = partitioners.NaturalIdPartitioner(partition_by="site")
    natural.dataset = partitioner.dataset
    assert len(eq.data.from_partitions(natural, x="length", y="label", test=0.0).train) == 3
    with pytest.raises(InvalidData, match="has no partitions"):
        eq.data.from_partitions([], x="length", y="label")


class Noisy(Dataset):
    def __init__(self, inputs, noise):
        self.inputs, self.noise = inputs, noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return self.inputs[i] + self.noise * torch.randn(2), i % 2


def noisy(noise):
    generator = torch.Generator().manual_seed(0)
    return {str(k): Noisy(torch.randn(5, 2, generator=generator), noise) for k in range(3)}


def test_random_augmentation_is_not_frozen():
    with pytest.raises(InvalidData, match=r"random augmentation.*each_visit=True"):
        eq.data.from_datasets(noisy(0.5), test=0.0)
    plain = eq.data.from_datasets(noisy(0.0), test=0.0)
    assert isinstance(plain.train.x, torch.Tensor)
    data = eq.data.from_datasets(noisy(0.5), each_visit=True, test=0.0)
    with pytest.raises(IncompatibleParts, match='engine="loop"'):
        eq.train(nn.Linear(2, 2), data, rounds=1, clients_per_round=2)
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    options = {"rounds": 2, "clients_per_round": 2, "engine": "loop", "seed": 0}
    first, second = eq.train(model, data, **options), eq.train(model, data, **options)
    assert torch.equal(first.params, second.params)
    assert torch.equal(first.clients.loss, second.clients.loss)
    none = eq.train(model, eq.data.from_datasets(noisy(0.0), each_visit=True, test=0.0), **options)
    packed = eq.train(model, plain, **options)
    assert torch.equal(none.params, packed.params)
    assert not torch.equal(first.params, packed.params)


def test_folders(tmp_path):
    for client, count in (("a", 2), ("b", 1)):
        (tmp_path / client).mkdir()
        for k in range(count):
            np.save(tmp_path / client / f"{k:03}.npy", np.full(3, k, dtype=np.float32))
            (tmp_path / client / f"{k:03}.cls").write_text(f"{k}\n")
    data = eq.data.from_folders(tmp_path, test=0.0)
    assert data.train.client("a")[0].tolist() == [[0.0] * 3, [1.0] * 3]
    assert data.train.client("a")[1].tolist() == [0, 1]
    (tmp_path / "a" / "000.cls").unlink()
    with pytest.raises(InvalidData, match="example '000' has only one of the two"):
        eq.data.from_folders(tmp_path)
    (tmp_path / "a" / "000.cls").write_text("cat")
    with pytest.raises(InvalidData, match="cls holds no number"):
        eq.data.from_folders(tmp_path)
    with pytest.raises(InvalidData, match="is no folder"):
        eq.data.from_folders(tmp_path / "none")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda d: eq.data.from_hugging_face(d, x="length", y="label"), InvalidParameter, "client must name the column"),
        (lambda d: eq.data.from_hugging_face(d, client="sight", x="length", y="label"), InvalidData, "Did you mean 'site'?"),
        (lambda d: eq.data.from_hugging_face([1], client="site", x="length", y="label"), InvalidData, "but is list"),
        (lambda d: eq.data.from_hugging_face(d, client="site", x="site", y="label"), InvalidData, "x holds <U"),
        (lambda d: eq.data.from_datasets({"a": iter([])}), InvalidData, "must have a length"),
    ],
)
def test_what_does_not_fit_is_named(call, error, words):
    with pytest.raises(error) as caught:
        call(datasets.Dataset.from_dict(COLUMNS))
    assert words in str(caught.value)


def split_rows(sites):
    columns = {"site": sites, "a": [float(k) for k in range(len(sites))], "y": [k % 2 for k in range(len(sites))]}
    return datasets.Dataset.from_dict(columns)


def test_a_dict_of_splits_keeps_them_and_uses_the_client_column():
    both = datasets.DatasetDict({"train": split_rows(["p", "p", "q", "q"]), "test": split_rows(["r", "r"])})
    data = eq.data.from_hugging_face(both, client="site", x="a", y="y")
    assert (data.train.ids, data.validation, data.test.ids) == (("p", "q"), None, ("r",))
    assert data.train.client("q")[0].tolist() == [2.0, 3.0]
    one = datasets.DatasetDict({"train": both["train"]})
    assert eq.data.from_hugging_face(one, client="site", x="a", y="y", test=0.5).train.ids in (("p",), ("q",))
    with pytest.raises(InvalidParameter, match=r"client must name the column.*since 'train', 'test' are splits and no clients"):
        eq.data.from_hugging_face(both, x="a", y="y")
    with pytest.raises(InvalidParameter, match="options must be left away: the dataset has its own splits"):
        eq.data.from_hugging_face(both, client="site", x="a", y="y", test=0.5)
    with pytest.raises(InvalidParameter, match=r"client must be left away with Datasets by client id.*The dict has 'p', 'q'"):
        eq.data.from_hugging_face({"p": both["train"], "q": both["test"]}, client="site", x="a", y="y")
    with pytest.raises(InvalidParameter, match='must have the split "train"'):
        eq.data.from_hugging_face({"validation": both["train"], "test": both["test"]}, client="site", x="a", y="y")
    strange = both["test"].map(lambda row: {"y": row["y"] + 1})
    with pytest.raises(InvalidData, match="test has the class 2, which no training client has"):
        eq.data.from_hugging_face({"train": both["train"], "test": strange}, client="site", x="a", y="y")


def test_class_labels_say_how_many_classes_there_are():
    labels = datasets.ClassLabel(names=["a", "b", "c"])
    rows = split_rows(["p", "p", "q", "q"]).cast_column("y", labels)
    assert eq.data.from_hugging_face(rows, client="site", x="a", y="y", test=0.0).classes == 3
    assert eq.data.from_hugging_face(rows, client="site", x="a", y="y", test=0.0, classes=5).classes == 5
    parts = {"p": rows, "q": rows}
    assert eq.data.from_hugging_face(parts, x="a", y="y", test=0.0).classes == 3
    only = {"p": rows.select([0, 2]), "q": rows.select([1, 3])}
    with pytest.raises(InvalidData, match=r"which no training client has.*classes=3"):
        eq.data.from_hugging_face(only, x="a", y="y", test=0.5)


def test_random_transforms_of_datasets_are_not_frozen():
    rows = split_rows(["p", "p", "q", "q"])
    noisy_rows = rows.with_transform(lambda batch: batch | {"a": [torch.randn(2) for _ in next(iter(batch.values()))]})
    with pytest.raises(InvalidData, match=r"column 'a', row 0 differs whenever it is read.*reset_format"):
        eq.data.from_hugging_face({"p": noisy_rows, "q": noisy_rows}, x="a", y="y")
    fixed = rows.with_transform(lambda batch: {key: [float(v == v) for v in values] for key, values in batch.items()})
    assert len(eq.data.from_hugging_face({"p": fixed, "q": fixed}, x="a", y="a", test=0.0).train) == 2
    assert len(eq.data.from_hugging_face(rows.with_format("torch"), client="site", x="a", y="y", test=0.0).train) == 2


def images(*pictures):
    features = datasets.Features({"image": datasets.Image(), "y": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": list(pictures), "y": [0] * len(pictures)}, features=features)


def test_images_of_palettes_and_of_several_kinds():
    pillow = pytest.importorskip("PIL.Image")
    red = pillow.new("RGB", (2, 2), (255, 0, 0))
    data = eq.data.from_hugging_face({"p": images(red.convert("P")), "q": images(red)}, x="image", y="y", test=0.0)
    assert data.train.client("p")[0][0, :, 0, 0].tolist() == data.train.client("q")[0][0, :, 0, 0].tolist() == [255, 0, 0]
    for other in (pillow.new("RGB", (3, 2)), red.convert("L")):
        with pytest.raises(InvalidData, match=r"client 'p': column 'image', row 1 is an image of another mode"):
            eq.data.from_hugging_face({"p": images(red, other)}, x="image", y="y")


def test_missing_values_of_datasets_are_named():
    rows = datasets.Dataset.from_dict({"a": [[1.0], None, [2.0]], "b": [[1, 2], [3, None], [4]], "y": [0, 1, 0]})
    with pytest.raises(InvalidData, match="client 'p': column 'a', row 1 lacks a value"):
        eq.data.from_hugging_face({"p": rows}, x="a", y="y")
    with pytest.raises(InvalidData, match=r"client 'p': column 'b', row 1 lacks a value"):
        eq.data.from_hugging_face({"p": rows}, x="b", y="y")
    even = datasets.Dataset.from_dict({"a": [[1.0, None, 2.0], [1.0, 2.0, 3.0]], "y": [0, 1]})
    with pytest.raises(InvalidData, match=r"client 'p': column 'a', row 0 lacks a value"):
        eq.data.from_hugging_face({"p": even}, x="a", y="y")


def test_partitions_keep_natural_ids_and_need_their_data():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    natural = partitioners.NaturalIdPartitioner(partition_by="site")
    natural.dataset = datasets.Dataset.from_dict(COLUMNS)
    data = eq.data.from_partitions(natural, x="length", y="label", test=0.0)
    assert sorted(data.train.ids) == ["a", "b", "c"]
    assert data.train.client("b")[0].tolist() == [2.0, 3.0]
    with pytest.raises(InvalidData, match=r"partitions cannot be read: .*partitioner\.dataset = …"):
        eq.data.from_partitions(partitioners.IidPartitioner(num_partitions=3), x="length", y="label")


def test_hidden_folders_are_no_clients_and_broken_arrays_are_named(tmp_path):
    for folder in (".git", "__MACOSX", "a"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "a" / "0.npy", np.ones(2))
    (tmp_path / "a" / "0.cls").write_text("0")
    assert eq.data.from_folders(tmp_path, test=0.0).train.ids == ("a",)
    for content in ((tmp_path / "a" / "0.npy").read_bytes()[:-3], b"no array"):
        (tmp_path / "a" / "0.npy").write_bytes(content)
        with pytest.raises(InvalidData, match=r"0\.npy holds no array of numbers") as caught:
            eq.data.from_folders(tmp_path)
        assert "pickle" not in str(caught.value)
