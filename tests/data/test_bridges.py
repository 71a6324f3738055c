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
    with pytest.raises(InvalidData, match="000.cls cannot be read"):
        eq.data.from_folders(tmp_path)
    with pytest.raises(InvalidData, match="is no folder"):
        eq.data.from_folders(tmp_path / "none")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda d: eq.data.from_hugging_face(d, x="length", y="label"), InvalidParameter, "client must name the column"),
        (lambda d: eq.data.from_hugging_face(d, client="sight", x="length", y="label"), InvalidData, "Did you mean 'site'?"),
        (lambda d: eq.data.from_hugging_face([1], client="site", x="length", y="label"), InvalidData, "but is list"),
        (lambda d: eq.data.from_hugging_face(d, client="site", x="site", y="label"), InvalidData, "x holds text"),
        (lambda d: eq.data.from_datasets({"a": iter([])}), InvalidData, "must have a length"),
    ],
)
def test_what_does_not_fit_is_named(call, error, words):
    with pytest.raises(error) as caught:
        call(datasets.Dataset.from_dict(COLUMNS))
    assert words in str(caught.value)
