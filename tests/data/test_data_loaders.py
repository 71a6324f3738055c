"""Loaders on small files written here: contents, splits, and what malformed files say."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from equipoise.data import (
    adult,
    fashion_mnist,
    femnist,
    from_texts,
    glove,
    imdb,
    mocha,
    npz,
    omniglot,
    shakespeare,
    texts,
    vehicle,
)
from equipoise.data.datasets.data_files import FOLDER_VARIABLE
from equipoise.data.datasets.text import LETTERS, encode_characters, words
from equipoise.errors import InvalidData, InvalidParameter


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def write_json(path, content):
    with gzip.open(path, "wt") as file:
        json.dump(content, file)


# --- npz -----------------------------------------------------------------------------------------------------------------


def test_npz_groups_rows_by_client(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        x=np.arange(8, dtype=np.uint8).reshape(4, 2),
        label=np.array([1, -1, 1, 1], np.int8),
        who=[2, 1, 2, 1],
    )
    clients = npz(tmp_path / "a.npz", y="label", client="who", scale=0.5)
    assert clients.ids == ("1", "2")
    assert clients.x.tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
    assert clients.x.dtype == torch.uint8
    assert clients.y.tolist() == [0, 1, 1, 1]
    assert clients.client("2")[0].tolist() == [[0.0, 0.5], [2.0, 2.5]]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((2, 2)), "y": np.zeros(2)}, ["'client' is missing", "x, y"]),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3), "client": [0, 1]}, ["same number of rows", "y: 3"]),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0), "client": np.zeros(0)}, ["at least one"]),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2), "client": [0, 1]}, ["'x'", "must hold numbers"]),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2), "client": np.zeros((2, 2))}, ["one id per example"]),
        ({"x": np.array([[1.0], [np.nan]]), "y": np.zeros(2), "client": ["p", "q"]}, ["row 1 of x holds NaN"]),
    ],
)
def test_npz_errors(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidData) as caught:
        npz(tmp_path / "a.npz")
    for word in ["a.npz", *words]:
        assert word in str(caught.value)


def test_npz_never_unpickles(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{"evil": 1}, None], dtype=object), y=np.zeros(2), client=np.zeros(2))
    with pytest.raises(InvalidData, match="without pickles"):
        npz(tmp_path / "a.npz")


def test_npz_that_is_none(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"not an archive")
    with pytest.raises(InvalidData, match=r"a.npz"):
        npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros(1000), y=np.zeros(1000), client=np.zeros(1000))
    (tmp_path / "c.npz").write_bytes((tmp_path / "b.npz").read_bytes()[:3000])
    with pytest.raises(InvalidData, match=r"c.npz"):
        npz(tmp_path / "c.npz")
    np.save(tmp_path / "d.npy", np.zeros(3))
    with pytest.raises(InvalidData, match="not a zip file"):
        npz(tmp_path / "d.npy")
    with pytest.raises(InvalidData, match="does not exist"):
        npz(tmp_path / "nowhere.npz")
    with pytest.raises(InvalidParameter):
        npz(tmp_path / "b.npz", x="y")


# --- the folder ----------------------------------------------------------------------------------------------------------


def test_folder_by_argument_variable_or_not_at_all(tmp_path, monkeypatch, rng):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(InvalidData, match="EQUIPOISE_DATA"):
        vehicle()
    with pytest.raises(InvalidData, match=r"vehicle_ditto_train.npz does not exist. folder must"):
        vehicle(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidData, match=r"does not exist. EQUIPOISE_DATA must"):
        vehicle()
    arrays = {"x": rng.normal(size=(60, 100)), "y": np.where(rng.random(60) < 0.5, 1, -1), "user": np.arange(60) % 3}
    np.savez(tmp_path / "vehicle_ditto_train.npz", **arrays)
    data = vehicle()
    assert data.train.ids == data.test.ids == data.validation.ids == ("0", "1", "2")
    assert [int(part.sizes[0]) for part in data.splits.values()] == [16, 2, 2]
    assert data.classes == 2


def test_mocha(tmp_path, rng):
    arrays = {"x": rng.normal(size=(40, 9)), "y": np.where(rng.random(40) < 0.5, 1, -1), "task": np.arange(40) % 2}
    np.savez(tmp_path / "mocha_small.npz", **arrays)
    assert mocha(tmp_path).test.sizes.tolist() == [5, 5]


# --- images --------------------------------------------------------------------------------------------------------------


def test_femnist_keeps_whole_large_writers(tmp_path, rng):
    writer = np.repeat(np.arange(5), [6, 3, 8, 9, 7])
    x = rng.integers(0, 256, (33, 28, 28)).astype(np.uint8)
    x[0, 0, :2] = 0, 255
    arrays = {"x": x, "y": rng.integers(0, 62, 33).astype(np.uint8), "writer": writer.astype(np.uint16)}
    np.savez(
        tmp_path / "femnist_writers.npz", **arrays, writer_id=[f"f{k}" for k in range(5)], writer_kind=np.array([0, 0, 1, 2, 0])
    )
    data = femnist(tmp_path, min_examples=5, test=0.5)
    assert sorted(data.train.ids + data.test.ids) == ["f0", "f2", "f4"]  # f1 is small, f3 has no training part
    assert data.train.x.dtype == torch.uint8
    part = data.train if "f0" in data.train.ids else data.test
    ink, paper = part.client("f0")[0][0, 0, :2].tolist()
    assert (ink, paper) == pytest.approx((1.0, 0.0), abs=1e-6)
    assert torch.equal(part.x[part.rows(part.ids.index("f0"))], torch.from_numpy(x[:6]))
    inside = femnist(tmp_path, min_examples=5, split_by="examples", test=0.2)
    assert inside.train.ids == inside.test.ids == ("f0", "f2", "f4")
    with pytest.raises(InvalidParameter, match="largest client"):
        femnist(tmp_path)


def test_fashion_mnist_pools_filters_and_deals(tmp_path, rng):
    y = np.arange(200) % 10
    x = np.broadcast_to(y[:, None, None], (200, 28, 28)).astype(np.uint8)
    arrays = {"x_train": x[:150], "y_train": y[:150], "x_test": x[150:], "y_test": y[150:]}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays)
    data = fashion_mnist(tmp_path, clients=8, test=0.25)
    assert len(data.train.x) + len(data.test.x) == 200
    assert data.classes == 10
    three = fashion_mnist(tmp_path, clients=4, classes=(6, 0, 2), partition="iid", split_by="examples")
    assert three.classes == 3
    assert three.train.ids == three.test.ids
    for part in three.splits.values():
        assert torch.equal(torch.tensor([6, 0, 2])[part.y], part.x[:, 0, 0].long())
    with pytest.raises(InvalidParameter, match="classes"):
        fashion_mnist(tmp_path, classes=(1, 11))
    with pytest.raises(InvalidParameter, match="Did you mean 'iid'"):
        fashion_mnist(tmp_path, partition="idd")


def test_omniglot(tmp_path, rng):
    arrays = {
        "x28": rng.integers(0, 256, (12, 28, 28)).astype(np.uint8),
        "character": np.repeat(np.arange(6), 2).astype(np.uint16),
    }
    arrays |= {"alphabet": np.repeat([0, 1], 6).astype(np.uint8), "drawer": (np.arange(12) % 2).astype(np.uint8)}
    np.savez(tmp_path / "omniglot_small.npz", **arrays, alphabet_names=["Greek", "Latin"])
    data = omniglot(tmp_path)
    assert sorted(data.train.ids + data.test.ids) == ["Greek/00", "Greek/01", "Latin/00", "Latin/01"]
    assert data.classes == 6


# --- text ----------------------------------------------------------------------------------------------------------------


def test_characters_outside_the_alphabet_are_other():
    assert encode_characters("aZ é\U0001f600\n", LETTERS).tolist() == [0, 51, 52, 52, 52, 52]
    assert encode_characters("", LETTERS).shape == (0,)


def test_words_are_cut_as_in_glove():
    assert words("It's 5pm, don't!") == ["it", "'s", "5", "pm", ",", "do", "n't", "!"]
    assert words("") == []


def roles(*texts_of):
    return {
        "roles": [{"play": "P", "role": f"R{k}", "speeches": [[line] for line in t.split("|")]} for k, t in enumerate(texts_of)]
    }


def test_shakespeare_windows(tmp_path):
    write_json(tmp_path / "shakespeare_roles.json.gz", roles("abcdef|gh", "ABCDEFGHIJ", "short"))
    data = shakespeare(tmp_path, length=4, min_examples=5, test=0.5)
    assert sorted(data.train.ids + data.test.ids) == ["P/R0", "P/R1"]
    assert data.classes == 53
    assert data.train.x.dtype == data.train.y.dtype == torch.uint8
    both = {i: part.client(i) for part in data.splits.values() for i in part.ids}
    x, y = both["P/R0"]
    text = encode_characters("abcdef\ngh", LETTERS).tolist()
    assert x.tolist() == [text[i : i + 4] for i in range(5)]
    assert y.tolist() == text[4:]
    assert len(both["P/R1"][0]) == 6
    every_second = shakespeare(tmp_path, length=4, min_examples=3, step=2)
    assert sorted(int(s) for part in every_second.splits.values() for s in part.sizes) == [3, 3]
    assert shakespeare(tmp_path, length=4, min_examples=1, alphabet_name="leaf").classes == 81


def test_shakespeare_errors(tmp_path):
    path = tmp_path / "shakespeare_roles.json.gz"
    write_json(path, {"roles": [{"play": "P", "role": "R"}]})
    with pytest.raises(InvalidData, match=r"role 0: needs play, role and speeches"):
        shakespeare(tmp_path)
    write_json(path, {"roles": roles("abc")["roles"] * 2})
    with pytest.raises(InvalidData, match="role 1: 'P/R0' appears twice"):
        shakespeare(tmp_path)
    write_json(path, [])
    with pytest.raises(InvalidData, match="'roles' is a list"):
        shakespeare(tmp_path)
    write_json(path, roles("abc"))
    with pytest.raises(InvalidParameter, match="min_examples"):
        shakespeare(tmp_path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InvalidData, match="cannot be read"):
        shakespeare(tmp_path)


def write_glove(folder):
    np.savez(folder / "glove6B_50d_subset.npz", words=["good", "bad"], vectors=np.array([[1, 0], [0, 2]], np.float16))


def test_glove_rows(tmp_path):
    write_glove(tmp_path)
    vectors = glove(tmp_path)
    assert vectors.vocabulary == ("<padding>", "<unknown>", "good", "bad")
    assert vectors.vectors.tolist() == [[0, 0], [0, 0], [1, 0], [0, 2]]
    assert vectors.tokens("Good, BAD", 4).tolist() == [0, 2, 1, 3]
    assert vectors.tokens("good bad good", 2).tolist() == [2, 3]
    assert vectors.mean("good bad thing").tolist() == [0.5, 1.0]
    assert vectors.mean("nothing").tolist() == [0.0, 0.0]


def test_from_texts_groups_and_drops(tmp_path):
    write_glove(tmp_path)
    records = [("b", "good", 1), ("a", "bad", 0), ("b", "bad", 0), ("c", "good good", 1), ("c", "?", 0)]
    clients = from_texts(records, glove(tmp_path), length=2, min_examples=2)
    assert clients.ids == ("b", "c")
    assert clients.x.tolist() == [[0, 2], [0, 3], [2, 2], [0, 1]]
    assert clients.y.tolist() == [1, 0, 1, 0]
    mean = from_texts(records, glove(tmp_path), features="mean")
    assert mean.x.shape == (5, 2)
    with pytest.raises(InvalidParameter, match="min_examples"):
        from_texts(records, glove(tmp_path), min_examples=3)
    with pytest.raises(InvalidParameter, match="features"):
        from_texts(records, glove(tmp_path), features="bag")


def test_texts_by_name(tmp_path):
    write_glove(tmp_path)
    content = [{"product": k % 2, "text": "good" if k % 3 else "bad", "recommended": int(k % 3 > 0)} for k in range(12)]
    write_json(tmp_path / "clothing_reviews_by_product.json.gz", content)
    data = texts("clothing", tmp_path, min_examples=6, length=1)
    assert sorted(data.train.ids + data.test.ids) == ["0", "1"]
    for part in data.splits.values():
        assert torch.equal(part.y, (part.x[:, 0] == 2).long())
    content[4].pop("recommended")
    write_json(tmp_path / "clothing_reviews_by_product.json.gz", content)
    with pytest.raises(InvalidData, match="record 4: KeyError: 'recommended'"):
        texts("clothing", tmp_path)
    with pytest.raises(InvalidParameter, match="name"):
        texts("reviews", tmp_path)


# --- tables --------------------------------------------------------------------------------------------------------------


def test_adult_has_two_clients_and_standardised_numbers(tmp_path, rng):
    rows = 200
    names = ["workclass", "education"]
    arrays = {
        "cat": rng.integers(0, 3, (rows, 2)).astype(np.uint8),
        "num": rng.integers(0, 90, (rows, 2)).astype(np.int32),
        "y": rng.integers(0, 2, rows).astype(np.uint8),
        "is_test": (np.arange(rows) >= 150).astype(np.uint8),
        "cat_names": names,
        "categories__workclass": ["a", "b", "c"],
        "categories__education": ["11th", "Doctorate", "Masters"],
    }
    np.savez(tmp_path / "adult.npz", **arrays)
    data = adult(tmp_path)
    assert data.train.ids == data.test.ids == ("doctorate", "other")
    assert len(data.train.x) == 150
    assert torch.allclose(data.train.x[:, :2].mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(data.train.x[:, :2].std(0, correction=0), torch.ones(2), atol=1e-5)
    doctors = data.train.client("doctorate")[0]
    assert len(doctors) == (arrays["cat"][:150, 1] == 1).sum()
    assert (doctors[:, 5:] == torch.tensor([0.0, 1.0, 0.0])).all()
    assert (data.train.x[:, 2:5].sum(1) == 1).all()
    del arrays["num"]
    np.savez(tmp_path / "adult.npz", **arrays)
    with pytest.raises(InvalidData, match="'num' is missing"):
        adult(tmp_path)


def test_imdb_is_the_dense_matrix(tmp_path):
    dense = np.array([[1, 0, 3], [0, 0, 0], [0, 2, 0]], np.uint8)
    arrays = {"data": dense[dense > 0], "indices": np.array([0, 2, 1], np.uint16), "indptr": np.array([0, 2, 2, 3], np.int32)}
    np.savez(tmp_path / "imdb_bow.npz", **arrays, shape=[3, 3], y=np.array([0, 1, 1], np.uint8), vocab=["the", "a", "film"])
    x, y, vocabulary = imdb(tmp_path, words=3)
    assert x.tolist() == dense.tolist()
    assert y.tolist() == [0, 1, 1]
    assert imdb(tmp_path, words=2)[0].tolist() == dense[:, :2].tolist()
    assert vocabulary == ("the", "a", "film")
    with pytest.raises(InvalidParameter, match="words"):
        imdb(tmp_path, words=4)
