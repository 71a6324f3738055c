"""One's own data: arrays, dictionaries, Datasets, and what is said when they do not fit."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import equipoise as eq
from equipoise.data.clients.arrays import client_of_rows, rows_by_client
from equipoise.errors import EquipoiseNotice, InvalidData, InvalidParameter

X = np.arange(24, dtype=np.float64).reshape(12, 2)
Y = np.array([0, 1, 2] * 4)
OWNERS = np.array([7, 7, 7, 8, 8, 8, 9, 9, 9, 10, 10, 10])


class Broken:
    def __len__(self):
        return 2

    def __getitem__(self, i):
        if i == 1:
            raise OSError("gone")
        return torch.zeros(2), 0


def test_arrays_with_a_client_per_row():
    data = eq.data.from_arrays(X, Y, OWNERS, test=0.25)
    assert len(data.train) == 3
    assert len(data.test) == 1
    assert data.train.x.dtype == torch.float32
    assert (data.features, data.classes) == (2, 3)
    both = {**{i: data.train.client(i) for i in data.train.ids}, **{i: data.test.client(i) for i in data.test.ids}}
    assert sorted(both) == ["10", "7", "8", "9"]
    torch.testing.assert_close(both["8"][0], torch.tensor(X[3:6]).float())
    assert both["8"][1].tolist() == [0, 1, 2]


def test_lists_tensors_and_rows_in_any_order():
    order = np.random.default_rng(0).permutation(12)
    mixed = eq.data.from_arrays(torch.tensor(X[order]), Y[order].tolist(), [str(c) for c in OWNERS[order]], test=0.0)
    assert mixed.test is None
    x, y = mixed.train.client("9")
    assert sorted(zip(x[:, 0].tolist(), y.tolist(), strict=True)) == [(12.0, 0), (14.0, 1), (16.0, 2)]


def test_split_inside_clients_and_raw_pixels():
    pixels = np.full((12, 4), 255, dtype=np.uint8)
    data = eq.data.from_arrays(pixels, Y, OWNERS, split_by="examples", test=0.34, scale=1 / 255)
    assert data.train.ids == data.test.ids
    assert data.train.x.dtype == torch.uint8
    assert float(data.train.client(at=0)[0].max()) == pytest.approx(1.0)


def test_a_dictionary_and_datasets_give_the_same():
    pairs = {str(c): (X[c == OWNERS], Y[c == OWNERS]) for c in (7, 8, 9, 10)}
    first = eq.data.from_dict(pairs, test=0.5)
    sets = {i: TensorDataset(torch.tensor(x).float(), torch.tensor(y)) for i, (x, y) in pairs.items()}
    second = eq.data.from_datasets(sets, test=0.5)
    assert first.train.ids == second.train.ids
    assert torch.equal(first.train.x, second.train.x)
    assert torch.equal(first.test.y, second.test.y)
    result = eq.train(eq.models.Softmax(2, 3), first, rounds=2, clients_per_round=2)
    assert len(result.clients) == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.data.from_arrays(X, Y[:-1], OWNERS), "the numbers of rows differ (x 12, y 11, client 12)"),
        (lambda: eq.data.from_arrays([["a"]], [0], [0]), "x holds <U"),
        (lambda: eq.data.from_arrays([[1.0], [1.0, 2.0]], [0, 1], [0, 1]), "x must be an array of numbers"),
        (lambda: eq.data.from_dict({"a": X}), "client 'a' must be a pair (x, y)"),
        (lambda: eq.data.from_dict({"a": (X, Y[:3]), "b": (X, Y)}), "client 'a' has 12 inputs but 3 targets"),
        (lambda: eq.data.from_datasets({"a": TensorDataset(torch.empty(0, 2), torch.empty(0))}), "client 'a' has no example"),
        (
            lambda: eq.data.from_dict({"a": (X, Y), "b": (X[:, :1], Y)}),
            "client 'b' has inputs and targets of shapes (1,) and ()",
        ),
        (lambda: eq.data.from_dict({"a": (1.0, 0)}), "client 'a': y must have one row per example"),
        (lambda: eq.data.from_arrays(X[:2], Y[:2], [1.0, float("nan")]), "client, row 1 is missing"),
        (lambda: eq.data.from_datasets({"a": [1.0, 2.0]}), "must be pairs (x, y)"),
        (lambda: eq.data.from_arrays(np.where(X == 8, np.nan, X), Y, OWNERS), "x, row 4, column 0 holds nan"),
        (lambda: eq.ClientSet(X, Y, [0, 12], (7,)), "client ids must be text, found 7. Use str(id)"),
        (lambda: eq.ClientSet(X, Y, [0, 12], (None,)), "found None."),
        (lambda: eq.data.from_arrays({"u": {"v": X}}, Y, OWNERS), "x['u'] is a dict, but trees have one level"),
        (lambda: eq.data.from_arrays((X, (X, X)), Y, OWNERS), "x[1] is a tuple, but trees have one level"),
        (lambda: eq.data.from_arrays((X, X[:5]), Y, OWNERS), "the numbers of rows differ (x[0] 12, x[1] 5, y 12, client 12)"),
        (lambda: eq.data.from_arrays({"a b": X}, Y, OWNERS), "x has the key 'a b', but a model is called as model(**x)"),
        (lambda: eq.data.from_arrays(X[:2], Y[:2], [1.0, np.inf]), "client, row 1 is infinite"),
        (lambda: eq.data.from_arrays(X[:2], Y[:2], ["a", np.float32(np.inf)]), "client, row 1 is infinite"),
        (lambda: eq.data.from_arrays(X[:2], Y[:2], ["a", ""]), "client, row 1 is empty text"),
        (lambda: eq.data.from_arrays(X, np.where(np.arange(12) == 5, -100, Y), OWNERS[::-1]), "row 5 of y has no target"),
        (lambda: eq.data.from_datasets({"a": Broken()}), "client 'a': example 1 of its Dataset cannot be read: OSError: gone"),
    ],
)
def test_bad_data_are_named(make, words):
    with pytest.raises(InvalidData) as caught:
        make()
    assert words in str(caught.value)


def test_ids_may_be_a_list_and_a_refusal_never_prints_them_all():
    names = [f"client {k}" for k in range(12)]
    assert eq.ClientSet(X, Y, list(range(13)), names).ids == tuple(names)
    with pytest.raises(InvalidData) as caught:
        eq.ClientSet(X, Y, list(range(13)), dict.fromkeys(names))
    assert str(caught.value) == "client ids must be a list or tuple of text, found dict. [EQ301]"
    with pytest.raises(InvalidData) as caught:
        eq.ClientSet(X, Y, [0, 12], (tuple(range(1000)),))
    assert len(str(caught.value)) < 150


def test_what_is_no_client_set_is_refused_with_the_way():
    with pytest.raises(InvalidParameter, match="from_arrays"):
        eq.FederatedData(X, Y)
    with pytest.raises(InvalidParameter, match="split_by must be"):
        eq.data.from_arrays(X, Y, OWNERS, split_by="rows")
    with pytest.raises(InvalidParameter, match="clients must map client ids"):
        eq.data.from_dict([])
    clients = eq.data.from_arrays(X, Y, OWNERS, test=0.0).train
    with pytest.raises(InvalidParameter, match="positions must name"):
        clients.take([4])
    with pytest.raises(InvalidParameter, match="must be one of the 4 client ids"):
        clients.client("nobody")
    assert clients.take(torch.tensor([False, True, False, True])).ids == ("7", "9")


def test_targets_of_another_kind_are_refused():
    numbers = eq.ClientSet.pack([("t", X, Y.astype(np.float32))])
    with pytest.raises(InvalidData, match=r"targets of test are torch\.float32, those of train torch\.int64"):
        eq.FederatedData(eq.ClientSet.pack([("a", X, Y)]), test=numbers)


FRAME = pd.DataFrame(X, columns=["age", "weight"])


@pytest.mark.parametrize(
    ("x", "y", "client"),
    [
        (FRAME, pd.Series(Y), pd.Series(OWNERS)),
        (FRAME.set_index(FRAME["age"] + 100), pd.Series(Y, index=range(50, 62)), pd.Categorical(OWNERS)),
        (FRAME.astype("Int64"), pd.Series(Y, dtype="Int64"), pd.Series(OWNERS, dtype="string")),
        (pl.from_pandas(FRAME), pl.Series(Y), pl.Series(OWNERS.astype(str))),
        (pl.from_pandas(FRAME), pl.Series(Y), pl.Series(OWNERS.astype(str)).cast(pl.Categorical)),
        (pa.table(FRAME), pa.array(Y), pa.chunked_array([OWNERS[:5], OWNERS[5:]])),
    ],
)
def test_frames_of_numbers_are_arrays(x, y, client):
    wanted = eq.data.from_arrays(X, Y, OWNERS)
    assert eq.data.from_arrays(x, y, client).fingerprint == wanted.fingerprint


def test_columns_after_dropna():
    frame = FRAME.assign(age=FRAME["age"].where(FRAME["age"] != 8), y=Y, client=OWNERS).dropna()
    data = eq.data.from_arrays(frame[["age", "weight"]], frame["y"], frame["client"], test=0.0)
    assert data.train.examples == 11
    single = eq.data.from_arrays(frame["age"], frame["y"], frame["client"], test=0.0)
    assert single.train.x.shape == (11,)


@pytest.mark.parametrize("make", [lambda frame: frame, pl.from_pandas, pa.Table.from_pandas])
def test_columns_of_frames_are_named(make):
    def refusal(x, y=Y, client=OWNERS):
        with pytest.raises(InvalidData) as caught:
            eq.data.from_arrays(make(x), y, client)
        return str(caught.value)

    assert "x, row 0, column 'ward' holds 'east', which is no number" in refusal(FRAME.assign(ward="east"))
    gap = FRAME.assign(weight=FRAME["weight"].where(FRAME["weight"] != 9))
    assert "x, row 4, column 'weight' holds nan" in refusal(gap)
    assert "y, row 0 holds 'a', which is no number." in refusal(FRAME, pd.Series(["a"] * 12))
    for missing in (None, pd.NA, float("nan")):
        clients = pd.Series([*OWNERS[:-1], missing], dtype=object)
        assert "client, row 11 is missing" in refusal(FRAME, Y, clients)
    assert "client, row 3 is missing" in refusal(FRAME, Y, pl.Series([1, 2, 3, None] * 3))


def test_a_class_that_training_lacks_is_refused_unless_it_is_named():
    x, y, owners = np.zeros((6, 1), dtype=np.float32), [0, 0, 1, 1, 2, 2], ["a", "a", "b", "b", "c", "c"]
    with pytest.raises(InvalidData, match=r"test has the class \d, which no training client has.*classes=3"):
        eq.data.from_arrays(x, y, owners, test=0.3)
    assert eq.data.from_arrays(x, y, owners, test=0.3, classes=3).classes == 3


def test_a_small_dictionary_says_that_half_of_it_is_kept_apart():
    with pytest.warns(EquipoiseNotice, match=r"test=0.2 keeps 1 of 2 clients, which are not trained on"):
        eq.data.from_dict({"a": (X, Y), "b": (X, Y)})


@pytest.mark.parametrize("y", [np.where(np.arange(12) == 5, 10**6, Y), 5000 + Y, 1000 * np.arange(12)])
def test_integers_that_are_hardly_classes_are_refused_unless_they_are_named(y):
    row, highest = int(y.argmax()), int(y.max())
    with pytest.raises(InvalidData, match=rf"row {row} of y is {highest}, but.*return_inverse.*classes={highest + 1}"):
        eq.data.from_arrays(X, y, OWNERS)
    assert eq.data.from_arrays(X, y, OWNERS, classes=highest + 1, test=0.0).classes == highest + 1
    assert eq.data.from_arrays(X, y.astype(float), OWNERS, test=0.0).classes == 0
    with pytest.raises(InvalidData, match=rf"client 'b', row {row} is {highest}, but"):
        eq.data.from_dict({"a": (X, Y), "b": (X, y)})


@pytest.mark.parametrize("highest", [100, 900, 999])
def test_a_class_far_above_the_others_is_told(highest):
    y = np.where(np.arange(12) == 5, highest, Y)
    found = len(set(y.tolist()))
    words = rf"is {highest}, but y has {found} different integers.*give classes={highest + 1}"
    with pytest.warns(EquipoiseNotice, match=f"row 5 of y {words}"):
        assert eq.data.from_arrays(X, y, OWNERS, test=0.0).classes == highest + 1
    with pytest.warns(EquipoiseNotice, match=f"client 'b', row 5 {words}"):
        eq.data.from_dict({"a": (X, Y), "b": (X, y)}, test=0.0)
    assert eq.data.from_arrays(X, y, OWNERS, test=0.0, classes=highest + 1).classes == highest + 1
    assert eq.data.from_arrays(X, np.where(np.arange(12) == 5, 99, Y), OWNERS, test=0.0).classes == 100


def test_many_classes_and_few_high_ones_are_classes():
    many = np.arange(1500)
    assert eq.data.from_arrays(many[:, None].astype(float), many, many % 2, test=0.0).classes == 1500
    spread = np.arange(12) * 90
    assert eq.data.from_arrays(X, spread, OWNERS, test=0.0).classes == 991
    with pytest.raises(InvalidParameter, match="ignore_index must be an integer, but is None"):
        eq.data.from_arrays(X, Y, OWNERS, ignore_index=None)


def test_rows_are_those_of_the_users_own_array():
    x = X.astype(np.float32).copy()
    x[7, 1] = np.nan
    with pytest.raises(InvalidData, match="x, row 7, column 1 holds nan"):
        eq.data.from_arrays(x, Y, OWNERS[::-1])
    with pytest.raises(InvalidData, match=r"x\['b'\], row 7, column 1"):
        eq.data.from_arrays({"a": X, "b": x}, Y, OWNERS)
    for bad, words in ((X + 1j, "complex"), (X.astype(str), "x holds <U"), (X.astype("datetime64[s]"), "datetime64")):
        with pytest.raises(InvalidData, match=words):
            eq.data.from_arrays(bad, Y, OWNERS)
    with pytest.raises(InvalidData, match="Did you swap y and client"):
        eq.data.from_arrays(X, [f"site-{k}" for k in OWNERS], Y)
    with pytest.raises(InvalidData, match="one id per row"):
        eq.data.from_arrays(X, Y, np.zeros((12, 2)))
    for missing in (None, float("nan")):
        with pytest.raises(InvalidData, match="client, row 2 is missing"):
            eq.data.from_arrays(X[:3], Y[:3], [1, 2, missing])
    same = eq.data.from_arrays(X[:4], Y[:4], [1, 1.0, "1", 2], test=0.0, classes=3)
    assert same.train.ids == ("1", "2")


@given(
    rows=st.lists(st.integers(0, 70_000) | st.integers(2**40, 2**40 + 3), min_size=1, max_size=60),
    text=st.booleans(),
    grouped=st.booleans(),
)
@settings(deadline=None)
def test_clients_of_rows_by_any_way_are_the_distinct_ones(rows, text, grouped):
    rows = sorted(rows) if grouped else rows
    which, names = client_of_rows(np.array(list(map(str, rows))) if text else np.array(rows))
    assert [names[k] for k in which] == list(map(str, rows))
    assert list(names) == sorted({str(row) for row in rows})
    spread = which * 70_001 % 100_003  # more than 16 bits
    order, sizes = rows_by_client(spread, 100_003)
    assert order.tolist() == sorted(range(len(rows)), key=lambda k: spread[k])
    assert int(sizes.sum()) == len(rows)


# -------------------------------------------------------------------------------------------------- values that nobody expects


def test_whole_labels_of_objects_are_classes():
    found = eq.data.from_arrays(X, np.array([int(each) for each in Y], dtype=object), OWNERS)
    assert found.fingerprint == eq.data.from_arrays(X, Y, OWNERS).fingerprint


def test_long_doubles_are_numbers():
    found = eq.data.from_arrays(np.asarray(X, dtype=np.longdouble), Y, OWNERS)
    assert found.fingerprint == eq.data.from_arrays(X, Y, OWNERS).fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": lambda y: np.ma.masked_array(y, np.arange(len(y)) == 1)}, "y, row 1 is masked"),
        ({"x": lambda x: np.where(np.arange(len(x))[:, None] == 2, 1e300, x)}, r"x, row 2 holds 1e\+300, beyond .* float32"),
        ({"y": lambda y: np.where(np.arange(len(y)) == 1, 2**64 - 100, y.astype(np.uint64))}, "y holds whole numbers of 2⁶³"),
        ({"y": lambda y: np.array([2**70, *y[1:]], dtype=object)}, "too large"),
        ({"client": lambda who: np.array(["\udc80", *map(str, who[1:])], dtype=object)}, "no Unicode text"),
    ],
    ids=["masked", "beyond float32", "unsigned", "huge label", "surrogate"],
)
def test_a_value_that_would_become_another_is_refused(change, words):
    given = {"x": np.asarray(X, dtype=np.float64), "y": np.asarray(Y), "client": np.asarray(OWNERS)}
    ((name, changed),) = change.items()
    with pytest.raises(InvalidData, match=words):
        eq.data.from_arrays(**(given | {name: changed(given[name])}))


def per_client(sizes):
    return [np.ones((size, 2)) for size in sizes], [np.arange(size) % 2 for size in sizes]


def test_lists_of_clients_are_told_of_from_dict():
    hint = r"write data\.from_dict\({id: \(x, y\), …}\)"
    with pytest.raises(InvalidData, match=hint):
        eq.data.from_arrays(*per_client([5, 6, 7]), range(3))
    with pytest.raises(InvalidData, match=hint):
        eq.data.from_arrays(*[[torch.tensor(each) for each in part] for part in per_client([5, 6, 7])], range(3))
    with pytest.warns(EquipoiseNotice, match=f"every client has exactly one example.*{hint}"):
        eq.data.from_arrays(*per_client([4] * 4), range(4), test=0.25)
    eq.data.from_arrays(*per_client([4, 4]), range(2), test=0.5)  # notices are errors here
    with pytest.raises(InvalidData) as caught:
        eq.data.from_arrays([[1.0], [2.0, 3.0]], [0, 1], range(2))
    assert "from_dict" not in str(caught.value)
    with pytest.raises(InvalidParameter, match=r"Write dict\(enumerate\(…\)\)"):
        eq.data.from_dict(list(zip(*per_client([3, 4]), strict=True)))


SECONDS = 1700000000.25 + 60.0 * np.arange(12)  # float32 rounds them to multiples of 128


@pytest.mark.parametrize(
    ("x", "y", "named"),
    [
        (np.stack([np.arange(12) / 7, SECONDS], axis=1), Y, "x, column 1"),
        (pd.DataFrame({"age": np.arange(12) / 7, "seen": SECONDS}), Y, "x, column 'seen'"),
        ({"seen": SECONDS}, Y, r"x\['seen'\]"),
        (X, SECONDS, "y"),
        (np.stack([SECONDS] * 5, axis=1), Y, "x, column 0, x, column 1, x, column 2, …"),
        ([[16777217.0], [16777216.0]] * 6, Y, "x, column 0"),
    ],
    ids=["column", "named column", "leaf", "target", "many", "collapsed"],
)
def test_rounding_to_float32_that_blurs_a_column_is_told(x, y, named):
    with pytest.warns(EquipoiseNotice, match=rf"^visits: float32 rounds away.*: {named}\. Sub"):
        eq.data.from_arrays(x, y, OWNERS, split_by="examples", name="visits")
    if isinstance(x, np.ndarray):
        rows = {str(owner): (x[owner == OWNERS], y[owner == OWNERS]) for owner in np.unique(OWNERS)}
        with pytest.warns(EquipoiseNotice, match=rf"{named}\. Subtract"):
            eq.data.from_dict(rows, split_by="examples")


def test_ordinary_rounding_to_float32_is_not_told():
    wide = 1700000000.25 + 86400.0 * np.arange(12)  # days: rounding to 128 s is small beside them
    x = np.stack([np.full(12, 0.1), np.arange(12) / 10, np.full(12, SECONDS[0]), wide, 1 + 1e-15 * np.arange(12)], axis=1)
    eq.data.from_arrays(x, wide, OWNERS, split_by="examples")  # notices are errors here
    pairs = {str(owner): (wide[owner == OWNERS][:, None], Y[:3]) for owner in np.unique(OWNERS)}
    eq.data.from_dict(pairs, split_by="examples")
    eq.data.from_arrays(X.astype(np.float32), SECONDS.astype(np.float32), OWNERS, split_by="examples")  # rounded by the user


def test_a_numeric_target_of_a_table_that_float32_blurs_is_told():
    frame = pd.DataFrame({"client": OWNERS, "age": np.arange(12) / 7, "end": SECONDS})
    with pytest.warns(EquipoiseNotice, match=r"column 'end': float32 rounds away.*: the target\."):
        eq.data.from_frame(frame, client="client", target="end", split_by="examples")
