"""Tables as people have them: what is refused, what is done with a notice, and what simply works."""

import gzip
import warnings
from dataclasses import replace
from datetime import date, datetime

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import equipoise as eq
from equipoise.errors import EquipoiseNotice, InvalidData, InvalidParameter
from equipoise.experiment.folder import read_record

COUNT = 60
ROW = np.arange(COUNT)
FRAME = pd.DataFrame(
    {"c": [f"k{row % 6}" for row in ROW], "a": np.sin(ROW), "b": np.cos(ROW), "y": [(row // 2) % 2 for row in ROW]}
)
BOTH = {"client": "c", "target": "y"}


def load(frame=FRAME, **options):
    return eq.data.from_frame(frame, **{**BOTH, "test": 0.0, **options})


def kind_of(data, name="a"):
    return next((rule.kind, rule.becomes) for rule in data.schema.columns if rule.name == name)


def as_csv(tmp_path, frame, **options):
    frame.to_csv(tmp_path / "t.csv", index=False)
    return eq.data.csv(tmp_path / "t.csv", **{**BOTH, "test": 0.0, **options})


def folder_of(tmp_path, **frames):
    (tmp_path / "parts").mkdir()
    for name, frame in frames.items():
        frame.to_parquet(tmp_path / "parts" / f"{name}.parquet", index=False)
    return tmp_path / "parts"


# --------------------------------------------------------------------------------------------------------------------- clients

IDS = ["007", "7", "7.0", "01", "1", "12345678901234567890", "12345678901234567891", "a", "b", "1.5"]
DISTINCT = ("007", "01", "1", "1.5", "12345678901234567890", "12345678901234567891", "7", "a", "b")


def test_clients_of_a_csv_file_are_text_as_it_stands(tmp_path):
    frame = FRAME.assign(c=[IDS[row // 6] for row in ROW])
    assert as_csv(tmp_path, frame).train.ids == DISTINCT
    numbers = frame.assign(c=[float(row // 6) for row in ROW])  # written as 0.0, 1.0, …
    assert as_csv(tmp_path, numbers).train.ids == tuple(map(str, range(10)))
    frame[18:].sort_values("c", kind="stable").to_csv(tmp_path / "sorted.csv", index=False)  # without 7.0, in pieces
    for memory in (0, 1e9):
        store = eq.data.write_table_store(tmp_path / "sorted.csv", tmp_path / f"s{memory}", **BOTH, memory=memory, test=0.0)
        assert set(eq.data.open_store(store).train.ids) == set(DISTINCT) - {"007", "7"}


def test_clients_of_folders_are_text(tmp_path):
    frame = FRAME.assign(c=[("01", "1", "2")[row % 3] for row in ROW], year=2020 + ROW % 2)
    frame.to_parquet(tmp_path / "parts", partition_cols=["c", "year"])
    data = eq.data.parquet(tmp_path / "parts", **BOTH, test=0.0)
    assert data.train.ids == ("01", "1", "2")
    assert kind_of(data, "year") == ("category", "one-hot")  # as before


def test_a_client_called_na(tmp_path):
    frame = FRAME.assign(c=[("DE", "NA", "ZA")[row // 20] for row in ROW])
    with pytest.warns(
        EquipoiseNotice, match=r"column 'c', row 20 \(.*line 22 of the file\) holds \"NA\", which is taken for a client"
    ):
        assert as_csv(tmp_path, frame).train.ids == ("DE", "NA", "ZA")
    with pytest.raises(InvalidData, match="the client, is missing in row 20"):
        as_csv(tmp_path, frame, missing=["NA"])
    with pytest.raises(InvalidData, match="the client, is missing in row 40"):
        as_csv(tmp_path, frame.replace("ZA", "nan").replace("NA", "N"))
    (tmp_path / "files").mkdir()
    for part, rows in (("a", frame[:30]), ("b", frame[30:])):
        rows.to_csv(tmp_path / "files" / f"{part}.csv", index=False)
    for memory in (0, 1e9):
        with pytest.warns(EquipoiseNotice, match="taken for a client"):
            store = eq.data.write_table_store(tmp_path / "files", tmp_path / f"s{memory}", **BOTH, memory=memory, test=0.0)
        assert sorted(eq.data.open_store(store).train.ids) == ["DE", "NA", "ZA"]


def test_numbers_and_text_in_one_column_of_clients():
    mixed = pd.Series([1, 1.0, "1", 2, "z", 2.5] * 10, dtype=object)
    assert load(FRAME.assign(c=mixed)).train.ids == ("1", "2", "2.5", "z")
    with pytest.raises(InvalidData, match="the client, is missing in row 1"):
        load(FRAME.assign(c=pd.Series([1, None, "1"] * 20, dtype=object)))
    with pytest.raises(InvalidData, match="column 'c' cannot be read"):
        load(FRAME.assign(c=pd.Series([1, "1", b"1"] * 20, dtype=object)))
    with pytest.raises(InvalidData, match="'c', the client, is infinite in row 3"):
        load(FRAME.assign(c=np.where(ROW == 3, np.inf, 1.0)))


# --------------------------------------------------------------------------------------------------------------- Parquet files


def test_a_column_that_some_parquet_files_lack(tmp_path):
    path = folder_of(tmp_path, a=FRAME[:30].assign(v=ROW[:30]), b=FRAME[30:].assign(w=ROW[30:]))
    with pytest.warns(EquipoiseNotice) as told:
        data = eq.data.parquet(path, **BOTH, test=0.0)
    assert kind_of(data, "v") == kind_of(data, "w") == ("number", "scaled")
    texts = " ".join(str(each.message) for each in told)
    assert f"column 'v' is there in {path}/a.parquet, but not in {path}/b.parquet, whose rows count as missing" in texts
    assert f"column 'w' is there in {path}/b.parquet, but not in {path}/a.parquet, whose rows count as missing" in texts


def test_parquet_files_with_types_that_fit_together(tmp_path):
    first = FRAME[:30].assign(empty=None, number=ROW[:30])
    path = folder_of(tmp_path, a=first, b=FRAME[30:].assign(empty=ROW[30:], number=ROW[30:] + 0.5))
    (path / "README.txt").write_text("daily files")
    (path / "._a.parquet").write_text("of macOS")
    data = eq.data.parquet(path, **BOTH, test=0.0)
    whole = FRAME.assign(empty=[None] * 30 + list(range(30, 60)), number=ROW + np.where(ROW < 30, 0, 0.5))
    assert data.schema == load(whole).schema
    store = eq.data.write_table_store(path, tmp_path / "store", **BOTH, test=0.0)
    assert eq.data.open_store(store).schema == data.schema
    FRAME[30:].assign(empty="x", a=1, number=1).to_parquet(path / "c.parquet")  # of a, integers do no harm
    with pytest.raises(InvalidData, match=r"c.parquet: column 'empty' holds .*string, but int64 in .*a.parquet. Give it one"):
        eq.data.parquet(path, **BOTH)


def test_two_columns_of_one_name_in_a_parquet_file(tmp_path):
    twice = pa.Table.from_arrays([pa.array([1, 2])] * 3, names=["c", "a", "a"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(InvalidData, match=r"two columns are called 'a'. Rename one of them"):
        eq.data.parquet(tmp_path / "t.parquet", **BOTH)


# --------------------------------------------------------------------------------------------------------------------- targets


def test_whole_floating_targets_are_asked_about():
    """Dropping a missing class leaves floating numbers."""
    gap = FRAME.assign(y=FRAME["y"].where(ROW != 7))
    with pytest.raises(InvalidData, match=r"missing in row 7\. Drop this row"):
        load(gap)
    left = gap.dropna(subset=["y"])
    with pytest.raises(InvalidData, match=r'whole numbers 0, 1, though as floating .* target_kind="number" or target_kind="cl'):
        load(left)
    assert load(left, target_kind="classes").schema.target.classes == ("0", "1")
    assert load(left, classes=2).classes == 2
    assert load(left, target_kind="number").classes == 0
    assert load(FRAME.assign(y=ROW * 1.0)).classes == 0  # many


@pytest.mark.parametrize("y", [1, "yes", 1.5, True])
def test_constant_targets_are_refused(y):
    with pytest.raises(InvalidData, match=r"'y', the target, is always .* among training clients, so that there is nothing to"):
        load(FRAME.assign(y=y))


def test_targets_that_float32_cannot_tell_apart_are_refused():
    with pytest.raises(InvalidData, match=r"holds numbers near 0 that float32 cannot tell apart. Shift or scale it"):
        load(FRAME.assign(y=ROW * 1e-170))


def test_a_constant_class_is_allowed_where_classes_are_named():
    assert load(FRAME.assign(y=1), classes=["0", "1"]).classes == 2


def test_prices_are_told_of_target_kind():
    with pytest.raises(InvalidData, match=r'holds 43 different whole numbers\. .*target_kind="number"'):
        load(FRAME.assign(y=1000 + ROW % 43))
    part = ["train"] * 30 + ["test"] * 30
    frame = FRAME.assign(p=part, y=np.where(ROW < 30, ROW % 9, 10), c=ROW // 10)
    with pytest.raises(InvalidData, match=r'the class \'10\', which .* to predict, write target_kind="number"'):
        load(frame, split="p", test=0.2)


# ---------------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("values", [1e6 + 1e-5 * ROW, ROW * 1e-170, ROW * 1e-300])
def test_small_differences_are_scaled(values):
    data = load(FRAME.assign(a=values))
    assert kind_of(data) == ("number", "scaled")
    scaled = data.train.x[:, 0].double()
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-4)
    assert float(scaled.std(correction=0)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("values", [2**60 + ROW, np.where(ROW % 2, 0.3, 0.1 * 3)])
def test_differences_beyond_float64_are_named(values):
    with pytest.warns(EquipoiseNotice, match="column 'a' holds one value up to the rounding of float64 .* Subtract a constant"):
        data = load(FRAME.assign(a=values))
    assert data.schema.columns[0].note == "one value up to the rounding of float64 among training clients"


MISREAD = [
    (
        [f"1,{row % 12:03d}" for row in ROW],
        r"All look like numbers; row 0 holds '1,000'\. Read the file again: .* decimal=\",\", or thousands=\",\", whichever",
    ),
    ([f"{row % 9}%" for row in ROW], "All look like numbers; row 0 holds '0%'"),
    ([f"{row % 7},5" for row in ROW], "row 0 holds '0,5'. Read the file again: data.csv or pandas.read_csv with decimal=\",\""),
    (
        [f"{row % 12 + 1:02d}/03/2020" for row in ROW],
        r"row 0 holds '01/03/2020'. Convert it first: pandas.to_datetime\(frame\['a'\], format=\"%d/%m/%Y\" or \"%m/%d/%Y\"\)",
    ),
    (
        ["2020/01/01" if row == 9 else f"2020-01-{row % 9 + 1:02d}" for row in ROW],
        "All look like dates; row 9 holds '2020/01/01'. Write them as 2026-11-16, and write kinds={'a': 'date'}",
    ),
    (
        [f"0{row % 20}" for row in ROW],
        "All are numbers: write kinds={'a': 'number'}. If they are categories: kinds={'a': 'categ",
    ),
    (["oops" if row == 41 else str(row % 13) for row in ROW], "Nearly all are numbers, but row 41 holds 'oops'. Repair it"),
    (
        ["?" if row % 3 == 0 else "n.k." if row == 7 else str(row % 13) for row in ROW],  # frequent, but only two texts
        r"Most are numbers, but row 0 holds '\?', and other rows 'n.k.'. Repair it, or make it missing "
        r"\(missing=\['\?', 'n.k.'\] for a CSV file\), and write kinds={'a': 'number'}",
    ),
]


@pytest.mark.parametrize(("cells", "words"), MISREAD)
def test_numbers_and_dates_as_text_get_a_notice(cells, words):
    with pytest.warns(EquipoiseNotice, match=words.replace("{", r"\{")):
        assert kind_of(load(FRAME.assign(a=cells)))[0] == "category"
    assert kind_of(load(FRAME.assign(a=cells), kinds={"a": "category"}))[0] == "category"  # said, and quiet


DAY = np.datetime64("2020-01-01")
WRITTEN = {  # dates and times as a CSV file may hold them
    "dates": [str(DAY + row) for row in ROW],
    "with gaps": [None if row % 7 == 0 else str(DAY + row) for row in ROW],
    "moments": [f"{DAY + row} 10:30:0{row % 9}" for row in ROW],
    "dates and moments": [f"{DAY + row}T10:30:00" if row % 2 else str(DAY + row) for row in ROW],
    "zones": [f"{DAY + row}T10:30:00+02:00" for row in ROW],
    "times of the day": [f"{row % 24:02d}:30" for row in ROW],
}


@pytest.mark.parametrize("cells", WRITTEN.values(), ids=WRITTEN)
def test_dates_as_text_are_dates_in_a_frame_as_in_a_file(tmp_path, cells):
    frame = FRAME.assign(a=cells)
    of_file, of_frame = as_csv(tmp_path, frame), load(pd.read_csv(tmp_path / "t.csv"))
    assert kind_of(of_frame) == kind_of(of_file) == ("date", "scaled")
    assert of_frame.schema == of_file.schema
    assert of_frame.fingerprint == replace(of_file, name="table").fingerprint
    assert of_frame.schema.transform(frame[3:4]).equal(
        of_file.schema.transform(pa.table({"a": cells[3:4], "b": frame["b"][3:4]}))
    )
    assert kind_of(load(frame, kinds={"a": "category"}))[0] == "category"


def test_dates_as_text_in_the_target():
    frame = FRAME.assign(y=WRITTEN["dates"])
    data = load(frame)
    assert data.schema.target.kind == load(frame, target_kind="number").schema.target.kind == "number"
    assert data.schema.target.mean == pytest.approx((DAY - np.datetime64("1970-01-01")).astype(int) + ROW.mean())
    assert load(frame, target_kind="classes").classes == COUNT


@pytest.mark.parametrize("odd", ["", " ", "NA", "n/a", "NaN", "NaT", "None", "null", "<NA>"])
def test_blanks_and_na_among_dates_are_missing_in_a_frame_as_in_a_file(tmp_path, odd):
    cells = [odd if row % 10 == 0 else str(DAY + row) for row in ROW]
    frame = FRAME.assign(a=cells)
    made = [as_csv(tmp_path, frame), load(frame), load(pl.from_pandas(frame))]
    assert {kind_of(data) for data in made} == {("date", "scaled")}
    assert made[0].schema == made[1].schema == made[2].schema
    assert made[0].schema.columns[0].indicator  # of what is missing
    made += [load(FRAME.assign(a=[None if cell == odd else cell for cell in cells]))]  # as an owner would write it
    assert len({replace(data, name="table").fingerprint for data in made}) == 1
    schema, first = made[0].schema, FRAME[:1].assign(a=odd)  # a single row that is missing
    assert schema.transform(first).equal(schema.transform(FRAME[:1].assign(a=pd.Series([None], dtype=object))))
    frame.sort_values("c", kind="stable").to_csv(tmp_path / "t.csv", index=False)
    store = eq.data.write_table_store(tmp_path / "t.csv", tmp_path / "store", **BOTH, memory=0, test=0.0)
    assert eq.data.open_store(store).schema.columns[0].kind == "date"


def test_na_among_numbers_as_text_is_missing_where_numbers_are_asked_for(tmp_path):
    cells = ["NA" if row % 10 == 0 else " " if row == 1 else str(row) for row in ROW]
    asked = load(FRAME.assign(a=cells), kinds={"a": "number"})
    expected = load(FRAME.assign(a=[np.nan if not cell.isdecimal() else float(cell) for cell in cells]))
    assert asked.fingerprint == expected.fingerprint


def test_other_text_keeps_dates_text():
    for odd in ("-", 'say "when"', "a\nb"):
        cells = [odd if row % 10 == 0 else f"2020-01-0{row % 3 + 1}" for row in ROW]
        with pytest.warns(EquipoiseNotice, match="Nearly all are dates, but row 0"):
            assert kind_of(load(FRAME.assign(a=cells)))[0] == "category"


def test_notices_point_at_the_line_of_the_user(tmp_path):
    frame = FRAME.assign(a=["oops" if row == 41 else str(row % 13) for row in ROW], c=[f"k{row % 5}" for row in ROW])
    frame.loc[0, ["c", "a"]] = ["NA", "only here"]
    frame = frame.assign(part=["test" if row == 0 else "train" for row in ROW])
    frame.to_csv(tmp_path / "t.csv", index=False)
    path = folder_of(tmp_path, a=frame[:30], b=frame[30:].assign(new=ROW[30:]))
    marked = {**BOTH, "split": "part"}
    for make in (
        lambda: eq.data.from_frame(frame, **marked),
        lambda: eq.data.csv(tmp_path / "t.csv", **marked),
        lambda: eq.data.parquet(path, **marked),
        lambda: eq.data.from_frame(frame, **BOTH, split_by="examples"),
        lambda: eq.data.from_arrays(np.ones((60, 1)), ROW % 2, frame["c"], split_by="examples"),
        lambda: eq.data.from_arrays(np.ones((60, 1)), ROW % 2, frame["c"], test=0.01),
        lambda: eq.data.write_table_store(tmp_path / "t.csv", tmp_path / "store", **BOTH, columns=["a"]),
        lambda: load(FRAME.assign(a=["x", "y"] * 30)).schema.transform(FRAME.assign(a="new")),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make()
        assert {each.filename for each in told} <= {__file__}, [(each.filename, str(each.message)) for each in told]
        assert told


@pytest.mark.parametrize(
    "cells",
    [[str(row % 5) for row in ROW], [f"10.0.0.{row % 9}" for row in ROW], ["a1", "2b", "3"] * 20, ["1.2.3", "1.2.4"] * 30],
)
def test_other_text_is_quiet(cells):
    assert kind_of(load(FRAME.assign(a=cells))) == ("category", "one-hot")
    assert kind_of(load(FRAME.assign(a=pd.Categorical([f"{row % 9}%" for row in ROW])))) == ("category", "one-hot")


def test_the_cure_for_a_text_among_numbers_works(tmp_path):
    cells = ["oops" if row == 41 else str(row % 13) for row in ROW]
    assert kind_of(as_csv(tmp_path, FRAME.assign(a=cells), missing=["oops"], kinds={"a": "number"})) == ("number", "scaled")
    assert kind_of(as_csv(tmp_path, FRAME.assign(a=cells), missing=["oops"])) == ("number", "scaled")


def test_a_text_among_the_numbers_of_the_target_gets_a_notice(tmp_path):
    frame = FRAME.assign(y=["oops" if row == 41 else f"{row / 7 % 4:.1f}" for row in ROW])
    words = r"the target, is read as text.* row 41 \(.*line 43 of the file\) holds 'oops'.*.* target_kind='classes'\."
    with pytest.warns(EquipoiseNotice, match=words):
        assert as_csv(tmp_path, frame).schema.target.kind == "classes"
    assert as_csv(tmp_path, frame, target_kind="classes").schema.target.kind == "classes"  # said, and quiet
    assert as_csv(tmp_path, frame.drop(index=41)).schema.target.kind == "number"


@pytest.mark.parametrize(("one_hot", "model_sees"), [(16, 0.0), (1, 0)])
def test_categories_that_training_did_not_have_get_a_notice(one_hot, model_sees):
    frame = FRAME.assign(a=["xyz"[row % 3] for row in ROW], part=["test" if row % 6 == 5 else "train" for row in ROW])
    frame.loc[[5, 11], "a"] = ["new", "odd"]
    words = (
        r"table: column 'a' holds categories that training did not have: 'new', 'odd'\. The model takes them for unknown\. Rep"
    )
    with pytest.warns(EquipoiseNotice, match=words) as told:
        data = eq.data.from_frame(frame, **BOTH, split="part", one_hot=one_hot)
    assert len(told) == 1
    with pytest.warns(EquipoiseNotice, match="column 'a' holds categories that training did not have: 'w'"):
        inputs = data.schema.transform({"a": ["w", "x", None], "b": [0.0, 0.0, 0.0]})
    values = inputs["codes"][0] if isinstance(inputs, dict) else inputs[0, :3]
    assert (values == model_sees).all()
    data.schema.transform({"a": ["z", "x", None], "b": [0.0, 0.0, 0.0]})  # quiet


def test_categories_of_a_table_in_pieces_get_one_notice(tmp_path):
    frame = FRAME.assign(a=[f"only {row % 6}" for row in ROW]).sort_values("c")  # each client has a category of its own
    frame.to_csv(tmp_path / "t.csv", index=False)
    for memory in (0, 1e9):
        with pytest.warns(EquipoiseNotice, match="column 'a' holds categories that training did not have: 'only ") as told:
            eq.data.write_table_store(tmp_path / "t.csv", tmp_path / f"s{memory}", **BOTH, memory=memory, test=0.3)
        assert len(told) == 1


def test_clients_without_an_example_to_test_on_get_a_notice():
    frame = FRAME.assign(c=["small" if row == 0 else name for row, name in enumerate(FRAME["c"])])
    words = r"table: clients without an example to test on: 'small' \(1 of 7\)\. .* At test=0.2 a client needs 3 examples\. "
    with pytest.warns(EquipoiseNotice, match=words + r"Give them more, or leave them out: min_examples=3\.$"):
        load(frame, split_by="examples", test=0.2)
    load(frame, split_by="examples", test=0.2, min_examples=3)  # quiet, as the notice says
    load(frame[1:], split_by="examples", test=0.2)  # quiet
    load(frame, split_by="examples", test=0.0)
    arrays = frame["a"].to_numpy()[:, None], frame["y"].to_numpy(), frame["c"].to_numpy()
    with pytest.warns(EquipoiseNotice, match=r"arrays: clients without an example to test on: 'small' \(1 of 7\)"):
        eq.data.from_arrays(*arrays, split_by="examples", test=0.2)
    marked = frame.assign(part=["test" if row % 5 == 1 else "train" for row in ROW])
    with pytest.warns(EquipoiseNotice, match="'small' .* Mark examples of theirs for the test"):
        eq.data.from_frame(marked, **BOTH, split="part", split_by="examples")


def test_clients_without_an_example_to_validate_on_get_a_notice():
    frame = FRAME.assign(c=[f"small {row // 3}" if row < 18 else "large" for row in ROW])  # six of three examples each
    words = (
        r"table: clients without an example to validate on: 'small 0', 'small 1', 'small 2', 'small 3', 'small 4' … "
        r"\(6 of 7\)\. .*chosen by validation.* At validation=0.1, test=0.2 a client needs 5 examples\. .* min_examples=5\."
    )
    with pytest.warns(EquipoiseNotice, match=words) as told:
        load(frame, split_by="examples", validation=0.1, test=0.2)
    assert len(told) == 1  # all have one to test on
    load(frame, split_by="examples", validation=0.1, test=0.2, min_examples=5)  # quiet
    load(frame.assign(c=["a", "b"] * (len(frame) // 2)), split_by="examples", validation=0.1, test=0.2)  # quiet
    marked = frame.assign(part=["validation" if row == 20 else "test" if row % 3 else "train" for row in ROW])
    with pytest.warns(EquipoiseNotice, match="to validate on: .* Mark examples of theirs for the validation"):
        eq.data.from_frame(marked, **BOTH, split="part", split_by="examples")


def test_identifiers_of_a_small_table_are_refused():
    with pytest.raises(InvalidData, match=r"'a' holds 60 different texts in 60 rows. Is it an identifier"):
        load(FRAME.assign(a=[f"person {row}" for row in ROW]))
    with pytest.raises(InvalidData, match=r"60 different texts in 60 rows. All look like numbers; row 0 holds '1,000'"):
        load(FRAME.assign(a=[f"1,{row:03d}" for row in ROW]))


KEYS = np.random.default_rng(0)


@pytest.mark.parametrize(
    "values",
    [
        ROW,
        1000 + ROW[::-1],
        7 + 2 * ROW - ROW % 2,
        3 * ROW,
        KEYS.permutation(COUNT),
        100_000 + KEYS.choice(900_000, COUNT, replace=False),  # random keys, with wide gaps
        KEYS.integers(0, 2**63 - 1, COUNT),
        np.where(ROW == 9, 100, 100 + ROW),  # one of them twice
        pd.array([None, *range(1, COUNT)], dtype="Int64"),
    ],
    ids=["from 0", "down", "gaps", "by 3", "shuffled", "random", "64 bits", "twice", "missing"],
)
def test_identifiers_of_rows_get_a_notice(values):
    frame = FRAME.assign(receipt_id=values)
    words = (
        r"column 'receipt_id' holds (60|59) different whole numbers from \d+ to \d+, (one for each row|in 60 rows)\. It is used"
        r" as a number\. If "
        r"it is an identifier, leave it out: kinds=\{'receipt_id': 'left out'\}; else kinds=\{'receipt_id': 'number'\}\."
    )
    with pytest.warns(EquipoiseNotice, match=words) as told:
        assert kind_of(load(frame), "receipt_id") == ("number", "scaled")
    assert len(told) == 1
    for kind in ("left out", "number"):
        load(frame, kinds={"receipt_id": kind})  # said, and quiet


@pytest.mark.parametrize(
    "values",
    [
        ROW * 1.0,  # floating numbers
        ROW // 2,  # repeated
        ROW**2,
        1960 + ROW,  # a year for each row
        ROW[::-1] + 18,  # an age for each row
        KEYS.poisson(40, COUNT),
        np.exp(KEYS.normal(10, 1, COUNT)).astype(int),  # inhabitants of towns
        KEYS.normal(250_000, 30_000, COUNT).astype(int),  # cells in a drop of blood
        pd.array([None] * 5 + list(range(5, COUNT)), dtype="Int64"),
    ],
    ids=["floating", "repeated", "squares", "years", "ages", "counts", "inhabitants", "cells", "missing"],
)
def test_measurements_are_no_identifiers(values):
    assert kind_of(load(FRAME.assign(v=values)), "v") == ("number", "scaled")
    assert kind_of(load(FRAME[:40].assign(v=ROW[:40])), "v") == ("number", "scaled")  # few rows


def test_decimal_commas(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",")
    data = eq.data.csv(tmp_path / "t.csv", **BOTH, delimiter=";", decimal=",", test=0.0)
    assert data.fingerprint == load().fingerprint
    with pytest.raises(InvalidParameter, match=r'decimal must be "." or ","'):
        eq.data.csv(tmp_path / "t.csv", **BOTH, decimal=";")


def test_the_index_that_pandas_saves_is_left_out(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv")
    with pytest.warns(
        EquipoiseNotice, match="column '' is taken for the index of a table that was saved with it, and left out"
    ):
        data = eq.data.csv(tmp_path / "t.csv", **BOTH, test=0.0)
    assert data.schema.feature_names == ("a", "b")
    asked = eq.data.csv(tmp_path / "t.csv", **BOTH, test=0.0, kinds={"": "number"})
    assert asked.schema.feature_names == ("", "a", "b")
    FRAME.sample(frac=1, random_state=0).to_parquet(tmp_path / "t.parquet")  # its index is a column
    again = pd.read_csv(tmp_path / "t.csv")  # as "Unnamed: 0"
    for make in (lambda: eq.data.parquet(tmp_path / "t.parquet", **BOTH), lambda: load(again)):
        with pytest.warns(EquipoiseNotice, match="taken for the index"):
            assert make().schema.feature_names == ("a", "b")


def test_columns_of_unusual_types():
    sparse = FRAME.assign(a=pd.arrays.SparseArray(FRAME["a"]))
    assert load(sparse).fingerprint == load().fingerprint
    for values, words in (
        (FRAME["a"] + 1j, r"row 0 holds the complex number .*Give real and imaginary parts as two columns"),
        (
            pd.Series([2**70 + int(row) for row in ROW], dtype=object),
            r"row 0 holds 1180591620717411303424, beyond 64 bits\. .*ast",
        ),
        (
            pd.Series([1, "x"] * 30, dtype=object),
            r"row 1 holds 'x', but row 0 holds 1\. .*to_numeric.* for numbers, astype\(str\) f",
        ),
    ):
        with pytest.raises(InvalidData, match=f"column 'a' cannot be read: {words}"):
            load(FRAME.assign(a=values))
    wide = pl.from_pandas(FRAME).with_columns(pl.col("y").cast(pl.Int128).alias("wide"))
    with pytest.raises(InvalidData, match=r"column 'wide' holds Int128, which cannot be read: .* Cast it"):
        load(wide)


def test_a_category_called_missing_is_quoted():
    schema = load(FRAME.assign(a=["missing", "x", None] * 20)).schema
    assert "'missing', x, missing" in schema.describe()


# ----------------------------------------------------------------------------------------------------------------------- files


def test_files_of_other_kinds(tmp_path):
    text = FRAME.to_csv(index=False)
    path = tmp_path / "t.csv"

    def read(content, **options):
        path.write_bytes(content)
        return eq.data.csv(path, **BOTH, test=0.0, **options)

    assert read(text.replace("a,b", "PK,PAR1", 1).encode()).schema.feature_names == ("PK", "PAR1")
    assert read(gzip.compress(text.encode())).fingerprint == load().fingerprint
    assert read(text.encode("utf-16"), encoding="utf-16").fingerprint == load().fingerprint
    for content, words in (
        (text.encode("utf-16"), 'is text in UTF-16, not in utf-8. Write encoding="utf-16"'),
        (b"PK\x03\x04...", "is a ZIP archive or an Excel file. Save it as CSV"),
        (b"PAR1\x15...", "is a Parquet file. Use data.parquet"),
    ):
        with pytest.raises(InvalidData, match=words):
            read(content)
        with pytest.raises(InvalidData, match=words):
            eq.data.write_table_store(path, tmp_path / "store", **BOTH, memory=0)
    for make in (eq.data.csv, eq.data.parquet):
        with pytest.raises(InvalidParameter, match=r"of this computer, but is 'https://x/y.csv'. Download it first"):
            make("https://x/y.csv", **BOTH)


def test_unknown_options_are_named(tmp_path):
    with pytest.raises(InvalidParameter, match=r"options must be those of data.csv and .* 'sep'. Write delimiter=';'"):
        as_csv(tmp_path, FRAME, sep=";")
    with pytest.raises(InvalidParameter, match="Did you mean 'test'"):
        eq.data.parquet(tmp_path / "t.parquet", **BOTH, tset=0.3)


# --------------------------------------------------------------------------------------------------------------------- privacy


def test_epsilon_says_that_the_schema_is_not_covered(tmp_path):
    data = load()
    private = eq.privacy.DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, method="rdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        result = eq.train(
            eq.models.Tabular(data.schema, hidden=()),
            data,
            algorithm=eq.Algorithm(privacy=private),
            rounds=2,
            clients_per_round=3,
        )
    words = "statistics in the table&#x27;s schema are not covered by ε"
    assert words.replace("&#x27;", "'") in str(result.epsilon)
    assert words in result.report(tmp_path / "report.html").read_text(encoding="utf-8")
    result.save(tmp_path / "run")
    assert str(read_record(tmp_path / "run").epsilon) == str(result.epsilon)


def test_times_of_day_and_dates_are_not_mixed_and_an_empty_column_of_dates_is_taken():
    rows = {"site": [f"s{k % 4}" for k in range(40)], "y": [k % 2 for k in range(40)], "x": [0.1 * k for k in range(40)]}
    texts = {"d": [f"2024-05-{1 + k % 28:02}" for k in range(40)], "t": [f"{k % 24:02}:30" for k in range(40)]}
    schema = eq.data.from_frame(pd.DataFrame(rows | texts), client="site", target="y", split_by="examples", test=0.2).schema
    new = {"x": [0.0], "d": ["2024-05-05"], "t": ["10:30"]}
    schema.transform(pd.DataFrame(new))
    schema.transform(pd.DataFrame(new | {"d": [float("nan")]}))  # as pandas reads an empty column
    with pytest.raises(InvalidData, match="'d' holds times of day, but training had dates"):
        schema.transform(pd.DataFrame(new | {"d": ["10:30"]}))
    with pytest.raises(InvalidData, match="'t' holds dates, but training had times of day"):
        schema.transform(pd.DataFrame(new | {"t": ["2024-05-05"]}))


# ---------------------------------------------------------------------------------------------------------------- odd tables


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_text_is_missing_in_a_frame_as_in_a_file(tmp_path, blank):
    frame = FRAME.assign(a=[blank if row % 4 == 0 else "uv"[row % 2] for row in ROW])
    data = load(frame)
    assert data.schema == as_csv(tmp_path, frame).schema
    assert data.schema.columns[0].categories == ("u", "v")
    assert data.schema.columns[0].indicator
    for column in ("a", "y"):
        with pytest.raises(InvalidData, match=r"all missing|the target, is missing in row 0 and 59 more"):
            load(FRAME.assign(**{column: blank}))
    with pytest.raises(InvalidData, match=r"'y', the target, is missing in row 0 and 14 more.*str.strip\(\) != ''"):
        load(frame.assign(y=frame["a"]))


def test_a_column_of_text_that_is_all_missing_is_named():
    with pytest.raises(InvalidData, match=r"'z' \(all missing\)"):
        load(FRAME.assign(z=pd.array([None] * COUNT, dtype="string")))


def test_periods_and_intervals_of_pandas():
    months = pd.period_range("2020-01", periods=COUNT, freq="M")
    assert load(FRAME.assign(a=months)).fingerprint == load(FRAME.assign(a=months.to_timestamp())).fingerprint
    cut = pd.cut(np.sin(ROW), [-1, 0, 0.5, 1])
    for values in (cut, pd.Series(cut).astype(pd.IntervalDtype())):
        data = load(FRAME.assign(a=values, c=values, y=values))
        assert data.schema.columns[0].categories == data.schema.target.classes == data.train.ids
        assert len(data.train) == 3
    few = months[:3].repeat(20).astype("category")
    assert load(FRAME.assign(a=few)).schema.columns[0].categories == ("2020-01", "2020-02", "2020-03")


def test_true_and_false_as_text_are_booleans_where_these_are_asked_for():
    cells = ["True" if row % 3 else "false" for row in ROW]
    asked = load(FRAME.assign(a=cells), kinds={"a": "boolean"})
    assert asked.fingerprint == load(FRAME.assign(a=ROW % 3 > 0)).fingerprint
    with pytest.raises(InvalidData, match="row 0 holds 'maybe'"):
        load(FRAME.assign(a=["maybe", "true"] * 30), kinds={"a": "boolean"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: load(client=None), "client must be the name of a column, but is None. A name is text"),
        (lambda: load(client=0), "client must be the name of a column, but is 0"),
        (lambda: load(target=None), "target must be the name of a column, but is None"),
        (lambda: load(columns=[None]), "columns must be the name of a column, but is None"),
        (lambda: load(classes=True), "classes must be the names of all classes"),
        (lambda: eq.data.Schema.fit(FRAME, target=None), "target must be the name of a column"),
        (lambda: eq.data.Schema.fit(FRAME, target="y", client="c", rows=[100]), "rows must be rows of table"),
        (lambda: eq.data.Schema.fit(FRAME, target="y", client="c", rows=np.zeros(60, bool)), "rows must be at least one row"),
        (lambda: eq.data.Schema.load(None), "path must name a file"),
        (lambda: load(FRAME.assign(c="only"), test=0.2), 'split_by="examples"'),
        (lambda: load(FRAME.assign(c=ROW), test=0.2, split_by="examples"), "All clients have one example"),
        (lambda: eq.data.from_dict({"a": ([], []), "b": ([[1.0]], [0])}), "client 'a' has no example"),
        (
            lambda: load(FRAME.assign(a=pd.Series(["\ud800" if row == 4 else "x" for row in ROW], dtype=object))),
            "column 'a' cannot be read: row 4 holds text that is no Unicode",
        ),
        (
            lambda: load(FRAME.assign(c=pd.Series(["\ud800" if row == 4 else "x" for row in ROW], dtype=object))),
            "column 'c' cannot be read: row 4 holds text that is no Unicode",
        ),
        (
            lambda: load(FRAME.assign(a=pd.Series([date(2020, 1, 1), datetime(2020, 1, 2, 13)] * 30, dtype=object))),
            r"row 1 holds datetime.*pd.to_datetime\(frame\['a'\], utc=True\)",
        ),
    ],
)
def test_odd_tables_and_options_are_refused_with_what_to_write(make, words):
    with pytest.raises((InvalidData, InvalidParameter), match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": None}, "client must be the name of a column"),
        ({"missing": [-99]}, r"missing must be a list of texts, but is \[-99\]. E.g. missing="),
        ({"missing": None}, "missing must be a list of texts"),
        ({"encoding": None}, "encoding must be the name of an encoding"),
    ],
)
def test_odd_options_of_files_are_refused(tmp_path, options, words):
    with pytest.raises(InvalidParameter, match=words):
        as_csv(tmp_path, FRAME, **options)
    with pytest.raises(InvalidParameter, match=words):
        eq.data.write_table_store(tmp_path / "t.csv", tmp_path / "store", memory=0, **{**BOTH, **options})


SIMILAR = {
    "clients": ({"c": ["A ", "A", "b"] * 20}, "column 'c' holds 'A' and 'A ', which look alike. They are two clients"),
    "accents": ({"c": ["caf\u00e9", "cafe\u0301", "b"] * 20}, r"'cafe\\u0301' and 'caf\\xe9', which look alike"),
    "categories": ({"a": ["u", " u", "v"] * 20}, "column 'a' holds ' u' and 'u', which look alike. They are two categories"),
    "capitals of clients": ({"c": ["Klinik Köln", "klinik köln", "b"] * 20}, "holds 'Klinik Köln' and 'klinik köln', which"),
    "capitals of categories": (
        {"a": ["Innere", "innere", "v"] * 20},
        "'Innere' and 'innere', which look alike. They are two ca",
    ),
    "classes": ({"y": ["yes", "Yes", "no"] * 20}, "column 'y' holds 'Yes' and 'yes', which look alike. They are two classes"),
}


@pytest.mark.parametrize(("columns", "words"), SIMILAR.values(), ids=SIMILAR)
def test_names_that_look_alike_get_a_notice(columns, words):
    with pytest.warns(EquipoiseNotice, match=words) as told:
        load(FRAME.assign(**columns))
    assert len(told) == 1
    load(FRAME.assign(c=["a b", "ab", "c"] * 20, a=["m", "n", "f"] * 20))


@pytest.mark.parametrize(
    ("names", "more", "line"),
    [
        (["K 1", "k 1", "K 1 ", "K 2", "k 2", "b"], "2 more such names: 6 names would be 3", ".str.strip().str.casefold()"),
        (["K 1", "K  1", "k 1"], "1 more such names: 3 names would be 1", '.str.split().str.join(" ").str.casefold()'),
    ],
)
def test_names_that_look_alike_are_counted(names, more, line):
    whose = (names * 30)[: len(FRAME)]
    with pytest.warns(EquipoiseNotice, match="which look alike, and") as told:
        load(FRAME.assign(c=whose))
    text = str(told[0].message)
    assert f"{more} after {line}." in text
    assert f"write them alike, e.g. frame['c'] = frame['c']{line}." in text
    assert pd.DataFrame({"c": whose}).eval("c").pipe(lambda s: eval(f"s{line}")).nunique() == int(more.split()[-1])  # noqa: S307


def test_a_target_of_many_whole_numbers_gets_a_notice():
    days = FRAME.assign(y=[row * 7 % 22 for row in range(len(FRAME))])
    said = r"holds 22 different whole numbers, 0 … 21, which are taken for classes .* target_kind=\"number\""
    with pytest.warns(EquipoiseNotice, match=said):
        assert load(days).classes == 22
    assert load(days, target_kind="classes").classes == 22  # without a notice
    assert not load(days, target_kind="number").classes
    assert load(FRAME.assign(y=[row % 10 for row in range(len(FRAME))])).classes == 10
