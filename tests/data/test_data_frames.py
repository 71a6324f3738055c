"""One's own tables: pandas, Polars, Arrow, CSV and Parquet become clients, and what is said when they cannot."""

import contextlib
import gzip
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.errors import EquipoiseError, InvalidData, InvalidParameter

ROWS = {
    "hospital": ["a", "a", "b", "b", "c", "c"],
    "age": [30.0, None, 50.0, 70.0, 20.0, 90.0],
    "smoker": [True, False, None, True, False, True],
    "ward": ["east", "west", None, "east", "north", "east"],
    "day": pd.to_datetime(["2026-01-01", "2026-01-03", None, "2026-01-02", "2026-02-01", "2026-01-05"]),
    "ill": ["no", "yes", "no", "yes", "no", "yes"],
}
PANDAS = pd.DataFrame(ROWS)
told = pytest.mark.filterwarnings("ignore:.*holds categories that training did not have")  # by a notice with tests of its own


def load(frame=PANDAS, **options):
    return eq.data.from_frame(frame, **{"client": "hospital", "target": "ill", "test": 0.34, **options})


def refused(words, make, error=InvalidData):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


class Foreign:
    """A table that offers the dataframe interchange and nothing else."""

    def __init__(self, table):
        self.table = table

    def __dataframe__(self, nan_as_null=False, allow_copy=True):
        return self.table.__dataframe__(nan_as_null, allow_copy)


# -------------------------------------------------------------------------------------------------------------- what it becomes


@told
def test_numbers_by_hand():
    """Train on clients a and b: ages 30, 50, 70 known; wards east, west, missing."""
    split = ["train"] * 4 + ["test"] * 2
    data = eq.data.from_frame(
        PANDAS.assign(part=split), client="hospital", target="ill", split="part", columns=["age", "smoker", "ward", "day"]
    )
    assert (data.train.ids, data.test.ids, data.classes) == (("a", "b"), ("c",), 2)
    assert data.schema.feature_names == (
        "age", "age missing", "smoker", "smoker missing", "ward=east", "ward=west", "ward missing", "day", "day missing",
    )  # fmt: skip
    unit = (800 / 3) ** 0.5  # the deviation of 30, 50, 70, whose mean and median are 50
    day = (2 / 3) ** 0.5  # that of the days 0, 2, 1 after the first, whose mean and median are 1
    expected = [
        [-20 / unit, 0, 1, 0, 1, 0, 0, -1 / day, 0],
        [0, 1, 0, 0, 0, 1, 0, 1 / day, 0],
        [0, 0, 1, 1, 0, 0, 1, 0, 1],
        [20 / unit, 0, 1, 0, 1, 0, 0, 0, 0],
    ]
    torch.testing.assert_close(data.train.x, torch.tensor(expected))
    unseen = [[-30 / unit, 0, 0, 0, 0, 0, 0, 30 / day, 0], [40 / unit, 0, 1, 0, 1, 0, 0, 3 / day, 0]]
    torch.testing.assert_close(data.test.x, torch.tensor(unseen))  # the ward north is none of those of training
    assert data.train.y.tolist() == [0, 1, 0, 1]
    assert data.schema.target.classes == ("no", "yes")


@told
def test_many_categories_become_codes():
    data = load(one_hot=1, columns=["ward", "age"], split_by="examples", test=0.0)
    assert data.train.x["codes"].flatten().tolist() == [2, 4, 1, 2, 3, 2]  # 0 other, 1 missing, east, north, west
    assert data.train.x["numbers"].shape == (6, 2)
    new = data.schema.transform({"ward": ["west", "south", None], "age": [50, 50, 50]})
    assert new["codes"].flatten().tolist() == [4, 0, 1]
    alone = load(one_hot=1, columns=["ward"], test=0.0)
    assert list(alone.train.x) == ["codes"]


@pytest.mark.parametrize(
    "make",
    [
        pl.from_pandas,
        lambda frame: pl.from_pandas(frame).with_columns(pl.col("ward").cast(pl.Categorical)),
        lambda frame: frame.astype({"ward": "category", "ill": "category"}),
        lambda frame: frame.set_index(frame["age"] * 3),
        lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
        lambda frame: pa.Table.from_pandas(frame, preserve_index=False).to_reader(),
        lambda frame: pa.concat_tables([pa.Table.from_pandas(part, preserve_index=False) for part in (frame[:2], frame[2:])]),
        lambda frame: Foreign(pa.Table.from_pandas(frame, preserve_index=False)),
        lambda frame: {name: pa.array(frame[name], from_pandas=True) for name in frame},
    ],
)
def test_every_library_gives_the_same(make):
    assert load(make(PANDAS)).fingerprint == load().fingerprint


def test_files_give_the_same(tmp_path):
    PANDAS.to_csv(tmp_path / "visits.csv", index=False)
    options = {"client": "hospital", "target": "ill", "test": 0.34}
    data = eq.data.csv(tmp_path / "visits.csv", **options)
    assert (data.name, data.fingerprint) == ("visits", load().fingerprint)
    (tmp_path / "visits.csv.gz").write_bytes(gzip.compress((tmp_path / "visits.csv").read_bytes()))
    assert eq.data.csv(tmp_path / "visits.csv.gz", **options).fingerprint == data.fingerprint
    text = (tmp_path / "visits.csv").read_text().replace(",,", ",?,").replace(",", ";").replace("north", "nörth")
    (tmp_path / "other.csv").write_bytes(text.encode("latin-1"))
    again = eq.data.csv(tmp_path / "other.csv", delimiter=";", encoding="latin-1", missing=["?"], **options)
    assert again.fingerprint == data.fingerprint
    PANDAS.to_parquet(tmp_path / "visits.parquet")
    assert eq.data.parquet(tmp_path / "visits.parquet", **options).fingerprint == data.fingerprint
    PANDAS.to_parquet(tmp_path / "folder", partition_cols=["hospital"])
    whole = eq.data.parquet(tmp_path / "folder", **options)
    assert (whole.name, whole.fingerprint) == ("folder", data.fingerprint)


def test_types_of_a_csv_come_from_all_its_rows(tmp_path):
    """Arrow reads types from the first megabyte, and would refuse 0.5 in the last row."""
    lines = "\n".join(f"{row % 7},{row},{row % 2}" for row in range(200_000))
    (tmp_path / "long.csv").write_text(f"who,x,y\n{lines}\n3,0.5,1\n")
    data = eq.data.csv(tmp_path / "long.csv", client="who", target="y", test=0.0)
    assert data.train.examples == 200_001


@told
@pytest.mark.filterwarnings("ignore:.*clients without an example for")
def test_splits():
    inside = load(split_by="examples", test=0.5, classes=["no", "yes"])
    assert inside.train.ids == inside.test.ids == ("a", "b", "c")
    nothing = load(test=0.0)
    assert nothing.test is None
    same = eq.data.from_arrays(np.arange(6), np.arange(6.0), ROWS["hospital"], test=0.34, seed=3)
    assert load(seed=3).train.ids == same.train.ids  # as for arrays
    parts = ["train", "validation", "train", "train", "train", "test"]
    own = load(PANDAS.assign(part=parts), split="part", split_by="examples", test=0.2)
    assert [(name, each.examples) for name, each in own.splits.items()] == [("train", 4), ("validation", 1), ("test", 1)]
    assert "part" not in [rule.name for rule in own.schema.columns]


def test_small_clients_can_be_left_out(tmp_path):
    frame = pd.DataFrame({"who": [*"aabbbccccd"], "age": range(10), "ill": [*"xyxyxyxyxz"], "town": [*"LLMMMNNNNO"]})
    found = eq.data.from_frame(
        frame, client="who", target="ill", columns=["age"], test=0.4, min_examples=3, attributes=["town"]
    )
    assert sorted((*found.train.ids, *found.test.ids)) == ["b", "c"]
    assert found.train.examples + found.test.examples == 7
    assert found.schema.target.classes == ("x", "y")  # the class z of client d is unknown
    assert found.attributes["town"].keys() == {"b", "c"}
    named = frame.assign(who=frame["who"].astype("category"))
    again = eq.data.from_frame(named, client="who", target="ill", columns=["age"], test=0.4, min_examples=3)
    assert torch.equal(again.train.x, found.train.x)
    frame.to_csv(tmp_path / "t.csv", index=False)
    read = eq.data.csv(tmp_path / "t.csv", client="who", target="ill", columns=["age"], test=0.4, min_examples=3)
    assert torch.equal(read.train.x, found.train.x)
    with pytest.raises(InvalidParameter, match=r"min_examples leaves no client, but is 5\. The largest client in table has 4"):
        eq.data.from_frame(frame, client="who", target="ill", min_examples=5)
    with pytest.raises(InvalidParameter, match="min_examples must be a whole number of at least 1"):
        eq.data.from_frame(frame, client="who", target="ill", min_examples=0)


def test_ids_of_clients():
    ids = pd.Series([1, 1.0, "1", 2, Decimal(2), "2"], dtype=object).map(str).replace({"1.0": "1"})
    assert load(PANDAS.assign(hospital=ids), test=0.0).train.ids == ("1", "2")
    for values in ([1, 1, 1, 2, 2, 2], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], pd.Categorical([1, 1, 1, 2, 2, 2])):
        assert load(PANDAS.assign(hospital=values), test=0.0).train.ids == ("1", "2")
    for missing in (None, float("nan"), pd.NA, pd.NaT):
        frame = PANDAS.assign(hospital=pd.Series([1, 2, 3, missing, 4, 5], dtype=object))
        refused("table: column 'hospital', the client, is missing: 1 rows, first row 3. ", lambda frame=frame: load(frame))
    frame = PANDAS.assign(hospital=["a", "a", " ", "b", "b", "b"])
    refused("the client, is missing: 1 rows, first row 2", lambda: load(frame))


@pytest.mark.parametrize("min_examples", [1, 3])
@pytest.mark.parametrize("split_by", ["clients", "examples"])
@pytest.mark.filterwarnings("ignore:.*clients without an example for")
def test_the_rows_of_the_table_that_each_client_is_tested_on(split_by, min_examples):
    """Every row is in one split, under its own client, and its numbers are those of the example."""
    who = np.array([0, *np.random.default_rng(1).permutation(np.repeat(np.arange(1, 8), 7)), 0])  # client 0 has two rows
    frame = pd.DataFrame({"who": who, "x": np.random.default_rng(2).normal(size=len(who)), "y": np.arange(len(who)) % 2})
    options = {"split_by": split_by, "validation": 0.2, "test": 0.3, "min_examples": min_examples}
    data = eq.data.from_frame(frame, client="who", target="y", **options)
    seen = []
    for split, clients in data.splits.items():
        rows = data.table_rows(split)
        assert tuple(rows) == tuple(clients.ids)
        for client, of in rows.items():
            assert (frame["who"].iloc[of] == int(client)).all()
        inside = np.concatenate(list(rows.values()))
        assert torch.equal(data.schema.transform(frame.iloc[inside]), clients.x)
        assert torch.equal(torch.from_numpy(frame["y"].to_numpy()[inside]), clients.y)
        seen += inside.tolist()
    kept = [row for row in range(len(who)) if min_examples == 1 or who[row] != 0]
    assert sorted(seen) == kept
    with pytest.raises(InvalidParameter, match="split must be one of train, validation, test, but is 'tst'"):
        data.table_rows("tst")
    with pytest.raises(InvalidParameter, match=r"split=… of data\.from_frame names a column"):
        eq.data.digits(clients=4).table_rows()


def test_missing_clients_and_targets_are_told_of_in_one_message(tmp_path):
    frame = PANDAS.assign(hospital=["a", None, "b", None, "b", "b"], ill=["no", "yes", "no", "yes", None, "yes"])
    both = "'hospital', the client, is missing: 2 rows, first row 1; column 'ill', the target, is missing: 1 rows, first row 4"
    refused(both, lambda: load(frame))
    cleaned = frame.dropna(subset=["hospital", "ill"])  # as the message says
    assert load(cleaned, test=0.0).train.sizes.tolist() == [1, 2]
    frame.to_csv(tmp_path / "both.csv", index=False)
    refused(both, lambda: eq.data.csv(tmp_path / "both.csv", client="hospital", target="ill"))
    blank = frame.assign(ill=["no", "yes", "no", "yes", " ", "yes"])
    refused(both, lambda: load(blank))


def test_targets():
    def target(values, **options):
        data = load(PANDAS.assign(ill=values), test=0.0, **options)
        return data.schema.target.kind, data.schema.target.classes, data.train.y.tolist()

    assert target([3, 10, 3, 10, 9, 9]) == ("classes", ("3", "9", "10"), [0, 2, 0, 2, 1, 1])
    assert target([True, False] * 3) == ("classes", ("False", "True"), [1, 0] * 3)
    assert target([0.5, 1.5, 2.5, 0.0, 1.0, 2.0]) == ("number", (), [0.5, 1.5, 2.5, 0.0, 1.0, 2.0])
    assert target([1.0, 0.0] * 3, target_kind="classes") == ("classes", ("0", "1"), [1, 0] * 3)
    assert target([1, 0] * 3, target_kind="number") == ("number", (), [1.0, 0.0] * 3)
    assert target([1, 0] * 3, classes=4) == ("classes", ("0", "1", "2", "3"), [1, 0] * 3)
    assert target(["yes", "no"] * 3, classes=["yes", "no"]) == ("classes", ("yes", "no"), [0, 1] * 3)
    days = pd.to_datetime(["1970-01-02 00:00"] * 5 + ["1970-01-03 12:00"])
    assert target(days) == ("number", (), [1.0] * 5 + [2.5])


def test_a_given_schema_reads_another_table(tmp_path):
    first = load()
    loaded = eq.data.Schema.load(first.schema.save(tmp_path / "schema.json"))
    assert loaded == first.schema
    other = load(PANDAS[["ill", "day", "ward", "smoker", "age", "hospital"]].assign(extra=1), schema=loaded)
    assert other.fingerprint == first.fingerprint
    assert other.schema is loaded
    numbers = loaded.transform(PANDAS.drop(columns=["ill", "hospital"]))
    assert torch.equal(numbers[[0, 1]], first.splits["train" if "a" in first.train.ids else "test"].client("a")[0])


def test_the_schema_stays_through_changes_and_is_no_part_of_the_fingerprint():
    from dataclasses import replace

    data = load()
    assert replace(data, name="other").schema is data.schema
    assert replace(data, schema=None).fingerprint == data.fingerprint
    attacked = eq.attacks.apply(data, eq.attacks.LabelPoisoning(share=0.5, seed=1))
    assert attacked.schema is data.schema


def test_tables_need_neither_pandas_nor_polars_and_nothing_is_imported_before(tmp_path):
    PANDAS.to_csv(tmp_path / "visits.csv", index=False)
    code = """
import sys, equipoise as eq
assert not {"pandas", "polars", "pyarrow"} & set(sys.modules)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("pandas", "polars"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
eq.data.csv(sys.argv[1], client="hospital", target="ill", test=0.0)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "visits.csv")], check=True)


# -------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: load(client="hospitl"), "but is 'hospitl'. Did you mean 'hospital'?"),
        (lambda: load(target="sick"), "target must name a column of table, but is 'sick'"),
        (lambda: load(target="hospital"), "target must be another column than client, but is 'hospital'"),
        (lambda: load(columns=["age", "wrd"]), "columns must name a column of table, but is 'wrd'. Did you"),
        (lambda: load(columns=["age", "ill"]), "columns must be another column than target"),
        (lambda: load(columns="age"), "columns must be a list of names"),
        (lambda: load(client=3), "client must be the name of a column, but is 3"),
        (lambda: load(kinds={"agee": "number"}), "kinds must name input columns"),
        (lambda: load(kinds={"age": "numeric"}), "kinds['age'] must be one of number, boolean, category, date, left out"),
        (lambda: load(kinds=["age"]), "kinds must map names"),
        (lambda: load(one_hot=-1), "one_hot must be a whole number of at least 0"),
        (lambda: load(target_kind="class"), 'target_kind must be "classes" or "number"'),
        (lambda: load(classes="yes"), "classes must be the names of all classes"),
        (lambda: load(classes=["a", "a"]), "classes must name each class once"),
        (lambda: load(split_by="rows"), 'split_by must be "clients" or "examples"'),
        (lambda: load(PANDAS.assign(p="train"), split="p", split_by="rows", test=0.2), 'split_by must be "clients" or'),
        (lambda: load(split="age", test=0.5), "validation, test must be left out where split='age' names the parts"),
        (lambda: load(schema=load().schema, columns=["age"]), "columns must not be given together with schema, but is"),
        (lambda: load(schema=load().schema, one_hot=3), "one_hot must not be given together with schema"),
        (lambda: load(schema=load().schema, target="ward"), "target must be that of the schema, 'ill'"),
        (lambda: load(schema={"age": 1}), "schema must be a Schema"),
        (lambda: load([1, 2]), "frame must be a pandas, Polars or Arrow table, but is 'list'"),
        (lambda: load(np.zeros((3, 2))), "Arrays: data.from_arrays"),
        (lambda: load(pl.from_pandas(PANDAS).lazy()), "A lazy table: give frame.collect()"),
        (lambda: load("patients.csv"), "A file: data.csv and data.parquet take its path"),
    ],
)
def test_wrong_parameters_are_named(make, words):
    refused(words, make, InvalidParameter)


NESTED = pa.table({**{k: pa.array(v, from_pandas=True) for k, v in PANDAS.items()}, "tags": [["x"]] * 6})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: load(PANDAS[:0]), "the table has 0 rows and 6 columns"),
        (lambda: load(pd.DataFrame(index=range(3))), "the table has 0 rows and 0 columns"),
        (lambda: load(PANDAS.set_axis(["age", "age", "c", "d", "hospital", "ill"], axis=1)), "two columns are called 'age'"),
        (lambda: load(NESTED), "column 'tags' holds list<"),
        (lambda: load(PANDAS.assign(blob=[b"x"] * 6)), "column 'blob' holds binary"),
        (
            lambda: load(PANDAS.assign(odd=[1, 2, "x", 4, 5, 6])),
            "column 'odd' cannot be read: ",
        ),
        (
            lambda: load(PANDAS.assign(zero=0, none=None)),
            "2 things are to be decided:\n  1. column 'zero' tells no example from another",
        ),
        (lambda: load(PANDAS.assign(age=[1, 2, np.inf, 3, 4, 5])), "column 'age', row 2 holds inf"),
        (lambda: load(PANDAS.assign(age=[1, 2, 3e200, 1e200, -2e200, 5])), "column 'age' holds numbers as large as"),
        (
            lambda: load(PANDAS.assign(ill=["a", None, "b", None, "a", "a"])),
            "'ill', the target, is missing: 2 rows, first row 1",
        ),
        (
            lambda: load(PANDAS.assign(ill=[1.0, 2.0, np.nan, 1.0, 1.5, 1.0])),
            "'ill', the target, is missing: 1 rows, first row 2",
        ),
        (lambda: load(PANDAS.assign(ill=[1.0, 2.0, 1e39, 1.0, 1.5, 1.0])), "'ill', the target, row 2 holds 1e+39, which"),
        (lambda: load(PANDAS.assign(ill=None)), "'ill', the target, is missing: 6 rows, first row 0"),
        (lambda: load(classes=["no", "maybe"]), "row 1 holds the class 'yes', which is none of those of training (no, maybe)"),
        (lambda: load(columns=[]), "no column is left as an input"),
        (lambda: load(kinds={"ward": "number"}), "column 'ward', row 0 holds 'east', which is no number"),
        (lambda: load(kinds={"ward": "date"}), "row 0 holds 'east', which is no date"),
        (lambda: load(kinds={"age": "date"}), "column 'age' holds double, but dates are expected"),
        (lambda: load(kinds={"day": "number"}), "column 'day' holds dates (timestamp[us]), but numbers are expected"),
        (lambda: load(kinds={"age": "boolean"}), "column 'age', row 0 holds 30, but must be true or false"),
        (
            lambda: load(PANDAS.assign(p=["train"] * 5 + ["tset"]), split="p", test=0.2),
            "column 'p', row 5 holds 'tset', but must",
        ),
        (lambda: load(PANDAS.assign(p=["train"] * 5 + [None]), split="p", test=0.2), "column 'p', row 5 holds None, but must"),
        (lambda: load(PANDAS.assign(p="test"), split="p", test=0.2), "column 'p' names no row 'train'"),
        (
            lambda: load(PANDAS.assign(p=["train"] * 3 + ["test"] * 3), split="p", test=0.2),
            "client 'b' is in train (row 2) and in test (row 3). Put all rows of a client in one part",
        ),
        (
            lambda: load(
                PANDAS.assign(ill=["a", "b", "a", "b", "a", "c"], p=["train"] * 4 + ["test"] * 2), split="p", test=0.2
            ),
            "row 5 holds the class 'c', which is none of those of training (a, b).",
        ),
    ],
)
def test_bad_tables_are_named(make, words):
    refused(words, make)


def test_identifiers_and_counts_are_not_taken_for_categories():
    frame = pd.DataFrame(
        {"c": ["a", "b"] * 75, "name": [f"person {i}" for i in range(150)], "x": range(150), "y": [0, 1, 1] * 50}
    )
    words, known = "'name' holds 150 different texts in 150 rows", {"x": "number"}
    refused(words, lambda: load(frame, client="c", target="y", kinds=known))
    out = load(frame, client="c", target="y", kinds={"name": "left out", "x": "number"})
    assert out.schema.feature_names == ("x",)
    forced = load(frame, client="c", target="y", kinds={"name": "category", "x": "number"}, test=0.0)
    assert forced.schema.embedded == {"name": 152}
    options = {"client": "c", "target": "x", "kinds": {"name": "left out"}}
    refused("'x' holds 150 different whole numbers", lambda: load(frame, **options, test=0.0))
    assert load(frame, **options, target_kind="number").train.y.dtype == torch.float32


@told
def test_a_column_that_training_clients_do_not_vary_is_left_out():
    """Whether it varies depends on the split, so that refusing it would stop some seeds of a study and not others."""
    frame = PANDAS.assign(
        part=["train"] * 4 + ["test"] * 2, x=[0, 0, 0, 0, 5, 6], w=["u"] * 4 + ["v"] * 2, z=[None] * 4 + [1, 2]
    )
    data = load(frame, split="part", test=0.2)
    notes = {rule.name: rule.note for rule in data.schema.columns if rule.becomes == "left out"}
    assert notes == {
        "x": "one value among training clients",
        "w": "one value among training clients",
        "z": "all missing among training clients",
    }


def test_a_constant_with_gaps_becomes_an_indicator():
    """Known values are one number in training: its weight is never trained, so that other numbers must not reach it."""
    data = load(
        PANDAS.assign(part=["train"] * 4 + ["test"] * 2, x=[3, None, 3, 3, 1e9, 3]), split="part", columns=["x"], test=0.2
    )
    assert data.train.x.tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    assert data.test.x.tolist() == [[0, 0], [0, 0]]


def test_schemas_refuse_tables_that_do_not_fit():
    schema = load().schema
    refused("table: column 'ward' of the schema is missing; the table has hospital, age", lambda: schema.transform(
        PANDAS.drop(columns="ward")))  # fmt: skip
    refused("column 'age', row 0 holds 'old', which is no number", lambda: schema.transform(PANDAS.assign(age="old")))
    refused("column 'day' holds int64, but dates are expected", lambda: schema.transform(PANDAS.assign(day=3)))
    refused("column 'smoker', row 0 holds 2, but must be true", lambda: schema.transform(PANDAS.assign(smoker=2)))
    refused("column 'age', row 0 holds 1e+300, too far from the mean", lambda: schema.transform(PANDAS.assign(age=1e300)))
    refused("column 'ill', row 0 holds the class 'hm'", lambda: schema.targets(PANDAS.assign(ill="hm")))
    refused("column 'ill' of the schema is missing", lambda: schema.targets(PANDAS.drop(columns="ill")))
    same = schema.transform(PANDAS.assign(age=PANDAS["age"].map(str), day=PANDAS["day"].map(str).replace("NaT", None)))
    assert torch.equal(same, schema.transform(PANDAS))  # text that holds what is expected
    empty = schema.transform(PANDAS.assign(ward=None, age=None, day=None, smoker=None))
    assert len(empty.unique(dim=0)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as CSV: Empty CSV file"),
        (b"c,x,y\n", "the table has 0 rows and 3 columns"),
        (b"c,x,y\n1,2,0\n1,2\n", "cannot be read as CSV: record 3: Expected 3 columns, got 2: 1,2"),
        (b"c,x,y\n1,2,0\n1,2,3,4\n", "record 3: Expected 3 columns, got 4"),
        (b"c,x,x\n1,2,0\n", "two columns are called 'x'"),
        (b"c,x,y\n1,caf\xe9,0\n", "column 'x' is not text in utf-8. Name its encoding, e.g. encoding=\"latin-1\""),
        (b"c,caf\xe9,y\n1,2,0\n", "it is not text in utf-8"),
        (b"c;x;y\n1;2;0\n", "has the single column 'c;x;y'. Did you mean delimiter=';'?"),
        (b"c;x;y\n1;2,5;0\n", "has the single column 'c;x;y'. Did you mean delimiter=';'?"),  # with decimal commas
    ],
)
def test_bad_csv_files_are_named(tmp_path, content, words):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    refused(words, lambda: eq.data.csv(path, client="c", target="y"))


def test_files_that_are_not_there_or_broken(tmp_path):
    options = {"client": "hospital", "target": "ill"}
    for read in (eq.data.csv, eq.data.parquet):
        refused("nowhere does not exist", lambda read=read: read(tmp_path / "nowhere", **options))
        refused("path must name a file", lambda read=read: read(3, **options), InvalidParameter)
    refused("holds no file *.parquet", lambda: eq.data.parquet(tmp_path, **options))
    refused("holds no file *.csv", lambda: eq.data.csv(tmp_path, **options))
    PANDAS.to_csv(tmp_path / "visits.csv", index=False)
    refused(
        "must be an encoding", lambda: eq.data.csv(tmp_path / "visits.csv", encoding="latin-77", **options), InvalidParameter
    )
    refused("must be one character", lambda: eq.data.csv(tmp_path / "visits.csv", delimiter="ab", **options), InvalidParameter)
    refused("must be a list of texts", lambda: eq.data.csv(tmp_path / "visits.csv", missing="?", **options), InvalidParameter)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress((tmp_path / "visits.csv").read_bytes())[:-20])
    refused("cut.csv.gz cannot be read as CSV", lambda: eq.data.csv(tmp_path / "cut.csv.gz", **options))


def test_a_parquet_file_that_was_cut_or_damaged(tmp_path):
    options = {"client": "hospital", "target": "ill"}
    folder = tmp_path / "parts"
    folder.mkdir()
    pq.write_table(pa.Table.from_pandas(PANDAS), folder / "one.parquet", write_page_checksum=True)
    whole = (folder / "one.parquet").read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        (folder / "two.parquet").write_bytes(whole[:length])
        refused("two.parquet: is no complete Parquet file", lambda: eq.data.parquet(folder, **options))
    (folder / "two.parquet").unlink()
    for place in range(4, len(whole), 37):  # no damage raises anything of Arrow's
        (folder / "one.parquet").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(EquipoiseError):
            eq.data.parquet(folder, **options)


# ------------------------------------------------------------------------------------------------------------------------ laws

quiet = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")

CELLS = {
    "number": st.none() | st.integers(-1000, 1000),
    "float": st.none() | st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
    "boolean": st.none() | st.booleans(),
    "text": st.none() | st.sampled_from(["", "a", "b", "ä", "1", "1.0", "long text"]),
    "date": st.none() | st.dates(),
    "moment": st.none() | st.datetimes(),
}


@st.composite
def tables(draw):
    count = draw(st.integers(8, 12))
    columns = {
        name: draw(st.lists(cell, min_size=count, max_size=count)) for name, cell in CELLS.items() if draw(st.booleans())
    }
    columns["id"] = [float(k % 5) for k in range(count)]  # at least one column that can be used
    columns["who"] = [str(k % 4) for k in range(count)]
    columns["y"] = [k % 2 for k in range(count)]
    return columns


def read(columns, **options):
    same = {name: {"None" if cell == "" else str(cell) for cell in cells} for name, cells in columns.items()}  # blank: missing
    constant = {name: "left out" for name, cells in same.items() if len(cells) == 1}
    kinds = {name: kind for name, kind in constant.items() if name not in ("who", "y")}
    return eq.data.from_frame(columns, client="who", target="y", kinds=kinds, split_by="examples", **options)


@quiet
@given(tables(), st.integers(0, 3))
def test_law_what_test_examples_hold_does_not_change_the_schema(columns, one_hot):
    data = read(columns, test=0.5, one_hot=one_hot, classes=2)
    kept = load_rows(columns, data)
    assert eq.data.Schema.fit(
        {name: [cells[row] for row in kept] for name, cells in columns.items()} | {"anchor": list(range(len(kept)))},
        target="y", client="who", one_hot=one_hot, classes=2,
        columns=[rule.name for rule in data.schema.columns if rule.becomes != "left out"],
    ).columns == tuple(rule for rule in data.schema.columns if rule.becomes != "left out")  # fmt: skip


def load_rows(columns, data):
    """The rows of the table that are in training: the same split of the row numbers."""
    count = len(columns["y"])
    same = eq.data.from_arrays(np.arange(count), columns["y"], columns["who"], split_by="examples", test=0.5)
    assert same.train.examples == data.train.examples
    return same.train.x.flatten().tolist()


@quiet
@given(tables(), st.integers(0, 3))
def test_law_saved_schemas_transform_alike(columns, one_hot):
    schema = read(columns, test=0.0, one_hot=one_hot).schema
    again = eq.data.Schema.from_json(schema.to_json())
    assert again == schema
    assert again.describe() == schema.describe()
    first, second = (
        [leaf.tolist() for leaf in (x.values() if isinstance(x, dict) else [x])]
        for x in (schema.transform(columns), again.transform(columns))
    )
    assert first == second


@quiet
@given(tables(), st.randoms(use_true_random=False))
def test_law_the_order_of_rows_and_columns_does_not_matter(columns, random):
    order = list(range(len(columns["y"])))
    random.shuffle(order)
    names = list(columns)
    random.shuffle(names)
    mixed = {name: [columns[name][row] for row in order] for name in names}
    first, second = read(columns, test=0.0).schema, read(mixed, test=0.0).schema
    assert {rule.name: (rule.kind, rule.becomes, rule.categories, rule.median, rule.indicator) for rule in first.columns} == {
        rule.name: (rule.kind, rule.becomes, rule.categories, rule.median, rule.indicator) for rule in second.columns
    }
    for a, b in zip(sorted(first.columns, key=str), sorted(second.columns, key=str), strict=True):
        assert (a.mean, a.deviation) == pytest.approx((b.mean, b.deviation), rel=1e-9)


@quiet
@given(tables())
def test_law_numbers_of_training_have_mean_0_and_deviation_1(columns):
    data = read(columns, test=0.0, one_hot=0)
    numbers = data.train.x["numbers"] if isinstance(data.train.x, dict) else data.train.x
    names = data.schema.feature_names
    for rule in data.schema.columns:
        if rule.becomes == "scaled" and rule.kind != "boolean" and rule.deviation > 1e-3:
            values = numbers[:, names.index(rule.name)].double()
            if rule.indicator:
                values = values[numbers[:, names.index(f"{rule.name} missing")] == 0]
            assert float(values.mean()) == pytest.approx(0, abs=1e-3)
            assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-3)


ODD = (
    st.sampled_from([None, pd.NA, pd.NaT, b"x", Decimal("1.5"), 1 + 2j, [], [1], {"a": 1}, "1", "2026-01-01", "nan", "train"])
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.booleans()
    | st.dates()
)
ODD_TABLES = st.dictionaries(st.sampled_from(["who", "y", "a", "b"]), st.lists(ODD, min_size=3, max_size=3), max_size=4)
FITTED = eq.data.Schema.fit({"a": [1, 2, 3], "b": ["u", "v", "v"], "y": [0, 1, 0]}, target="y")


@quiet
@given(ODD_TABLES, st.booleans())
def test_law_no_table_raises_anything_but_our_errors(columns, of_pandas):
    frame = pd.DataFrame({name: pd.Series(cells, dtype=object) for name, cells in columns.items()}) if of_pandas else columns
    for read_it in (
        lambda: eq.data.from_frame(frame, client="who", target="y", test=0.34),
        lambda: eq.data.from_frame(frame, client="who", target="y", kinds=dict.fromkeys(set(columns) & {"a", "b"}, "category")),
        lambda: FITTED.transform(frame),
        lambda: FITTED.targets(frame),
    ):
        with contextlib.suppress(EquipoiseError):
            read_it()


def test_a_polars_frame_of_many_rows_with_text_is_read():
    count = 300  # enough to look for columns that give the answer away
    frame = pl.DataFrame(
        {
            "ward": [f"a ward with a long name, number {row % 6}" for row in range(count)],
            "day": ["" if row % 50 == 0 else f"2024-01-{1 + row % 28:02d}" for row in range(count)],
            "town": [f"a town with a long name, number {row % 5}" for row in range(count)],
            "ill": [("no", "yes")[row * row % 11 < 5] for row in range(count)],
        }
    )
    found, expected = (eq.data.from_frame(each, client="ward", target="ill").schema for each in (frame, frame.to_pandas()))
    assert found == expected
    assert {rule.name: rule.kind for rule in found.columns} == {"day": "date", "town": "category"}
