"""LEAF folders: what is read, and that malformed files fail with file, user and reason."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from equipoise.data import WordVectors, leaf
from equipoise.data.datasets.text import LEAF_CHARACTERS
from equipoise.errors import InvalidData, InvalidParameter


def write(root, train, test=None):
    for name, content in (("train", train), ("test", test)):
        if content is not None:
            (root / name).mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (root / name / f"all_data_{name}.json").write_text(text)
    return root


def shard(user_data):
    return {"users": list(user_data), "num_samples": [len(d["y"]) for d in user_data.values()], "user_data": user_data}


IMAGES = {
    "f01": {"x": [[0.0, 0.5, 1.0, 1.0], [1.0, 1.0, 0.0, 0.25]], "y": [3, 61]},
    "f02": {"x": [[1, 1, 1, 1]], "y": [0]},
}


def test_numbers(tmp_path):
    data = leaf(write(tmp_path / "femnist", shard(IMAGES), shard({"f01": {"x": [[0, 0, 0, 1]], "y": [7]}})), shape=(2, 2))
    assert data.name == "femnist"
    assert data.train.ids == ("f01", "f02")
    assert data.test.ids == ("f01",)
    assert data.train.x.shape == (3, 2, 2)
    assert data.train.x.dtype == torch.float32
    assert data.train.client("f01")[1].tolist() == [3, 61]
    assert data.classes == 62


def test_several_shards_and_the_data_subfolder(tmp_path):
    root = write(tmp_path / "femnist" / "data", shard(IMAGES))
    (root / "train" / "other.json").write_text(json.dumps(shard({"f03": {"x": [[1, 2, 3, 4]], "y": [1]}})))
    data = leaf(tmp_path / "femnist")
    assert data.train.ids == ("f01", "f02", "f03")
    assert data.test is None
    assert data.name == "femnist"


def test_small_users_leave_both_parts(tmp_path):
    both = shard(IMAGES)
    data = leaf(write(tmp_path, both, both), min_examples=2)
    assert data.train.ids == data.test.ids == ("f01",)


def test_characters(tmp_path):
    data = leaf(write(tmp_path, shard({"HAMLET": {"x": ["To b", "o be"], "y": ["e", "é"]}})))
    assert data.train.x.dtype == torch.uint8
    assert data.train.x[0].tolist() == [LEAF_CHARACTERS.index(c) for c in "To b"]
    assert data.train.y.tolist() == [LEAF_CHARACTERS.index("e"), 80]
    assert data.classes == 81
    letters = leaf(tmp_path, alphabet="letters")
    assert letters.classes == 53
    assert letters.train.x[0].tolist() == [26 + 19, 14, 52, 1]


def test_digit_characters_are_characters(tmp_path):
    data = leaf(write(tmp_path, shard({"HENRY": {"x": ["Act ", "ct 1"], "y": ["1", "0"]}})))
    assert data.train.y.tolist() == [LEAF_CHARACTERS.index("1"), LEAF_CHARACTERS.index("0")]


TWEETS = {
    "amy": {
        "x": [["1", "Mon", "NO_QUERY", "amy", "good day!", "t"], ["2", "Tue", "NO_QUERY", "amy", "zzz", "t"]],
        "y": [1, "0"],
    }
}


def test_texts_as_words(tmp_path):
    vectors = WordVectors(("<padding>", "<unknown>", "good", "day", "!"), torch.eye(5))
    data = leaf(write(tmp_path, shard(TWEETS)), vectors=vectors, length=4)
    assert data.train.x.tolist() == [[0, 2, 3, 4], [0, 0, 0, 1]]
    assert data.train.y.tolist() == [1, 0]
    assert data.classes == 2


def test_texts_as_characters(tmp_path):
    data = leaf(write(tmp_path, shard(TWEETS)), length=4, alphabet="letters")
    assert data.train.x.tolist() == [[6, 14, 14, 3], [25, 25, 25, 52]]


def broken(change):
    content = copy.deepcopy(shard(IMAGES))
    change(content)
    return content


def set_path(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("users"), ["'users'"]),
        (drop("num_samples"), ["'num_samples'"]),
        (drop("user_data"), ["user_data"]),
        (drop("user_data", "f02"), ["'f02'"]),
        (drop("user_data", "f02", "x"), ["'f02'", "x and y"]),
        (drop("user_data", "f02", "y"), ["'f02'", "x and y"]),
        (set_path("num_samples", value=[2]), ["num_samples"]),
        (set_path("num_samples", 0, value=5), ["'f01'", "num_samples says 5", "2 examples"]),
        (set_path("num_samples", 0, value="2"), ["'f01'", "num_samples says '2'"]),
        (set_path("users", 1, value="f01"), ["more than once"]),
        (set_path("user_data", "f01", "y", value=[1]), ["'f01'", "one length"]),
        (set_path("user_data", "f01", "x", 1, value=[1.0, 2.0]), ["'f01'", "row 1", "equally many"]),
        (set_path("user_data", "f01", "x", 1, value=[1.0, 2.0, None, 3.0]), ["'f01'", "row 1"]),
        (set_path("user_data", "f01", "x", 1, 2, value=float("nan")), ["'f01'", "row 1", "NaN"]),
        (set_path("user_data", "f01", "y", 1, value=float("inf")), ["'f01'", "row 1", "infinity"]),
        (set_path("user_data", "f01", "y", 1, value="three"), ["'f01'", "y must hold"]),
        (set_path("user_data", "f01", "y", 1, value=None), ["'f01'", "y must hold"]),
        (set_path("user_data", "f02", "x", 0, value=[1.0, 2.0]), ["'f02'", "shapes or types", "'f01'"]),
        (set_path("user_data", "f02", value=[1, 2]), ["'f02'", "x and y"]),
        (set_path("user_data", value=[]), ["user_data"]),
    ],
)
def test_malformed_files_name_file_user_and_reason(tmp_path, change, words):
    root = write(tmp_path, broken(change))
    with pytest.raises(InvalidData) as caught:
        leaf(root)
    for word in ["all_data_train.json", *words]:
        assert word in str(caught.value)


def test_invalid_json(tmp_path):
    with pytest.raises(InvalidData, match=r"all_data_train.json cannot be read: it is not valid JSON"):
        leaf(write(tmp_path, '{"users": ['))
    with pytest.raises(InvalidData, match="must be a JSON object"):
        leaf(write(tmp_path, "[1, 2]"))


def test_wrong_utf8(tmp_path):
    root = write(tmp_path, "{}")
    (root / "train" / "all_data_train.json").write_bytes(b'{"users": ["\xff"]}')
    with pytest.raises(InvalidData, match="cannot be read"):
        leaf(root)


def test_a_user_in_two_files(tmp_path):
    root = write(tmp_path, shard(IMAGES))
    (root / "train" / "more.json").write_text(json.dumps(shard({"f02": IMAGES["f02"]})))
    with pytest.raises(InvalidData, match=r"more.json, user 'f02': appears in all_data_train.json too"):
        leaf(root)


def test_strings_of_two_lengths_and_short_tweets(tmp_path):
    with pytest.raises(InvalidData, match="'a', row 1: has 3 characters, row 0 has 2"):
        leaf(write(tmp_path, shard({"a": {"x": ["ab", "abc"], "y": ["c", "d"]}})))
    with pytest.raises(InvalidData, match="'a', row 0: entry 4 of x"):
        leaf(write(tmp_path, shard({"a": {"x": [["1", "text"]], "y": [1]}})))


def test_folders_that_are_not_leafs(tmp_path):
    with pytest.raises(InvalidData, match="subfolders train and test"):
        leaf(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(InvalidData, match=r"no \*.json"):
        leaf(tmp_path)
    write(tmp_path, shard(IMAGES))
    with pytest.raises(InvalidData, match="no user has 9 examples"):
        leaf(tmp_path, min_examples=9)
    with pytest.raises(InvalidData, match=r"do not fill shape \(3, 3\)"):
        leaf(tmp_path, shape=(3, 3))
    with pytest.raises(InvalidParameter, match="alphabet"):
        leaf(tmp_path, alphabet="aa")
