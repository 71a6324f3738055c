"""Tables as people have them: what is refused, what is done with a notice, and what simply works."""

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
from equipoise.data.tables.column import number_of_text
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


# --------------------------------------------------------------------------------------------------------------- Parquet files


def test_two_columns_of_one_name_in_a_parquet_file(tmp_path):
    twice = pa.Table.from_arrays([pa.array([1, 2])] * 3, names=["c", "a", "a"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(InvalidData, match=r"two columns are called 'a'. Rename one of them"):
        eq.data.parquet(tmp_path / "t.parquet", **BOTH)


# --------------------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("y", [1, "yes", 1.5, True])
def test_constant_targets_are_refused(y):
    with pytest.raises(InvalidData, match=r"'y', the target, is always .* among training clients, so that there is nothing to"):
        load(FRAME.assign(y=y))


def test_targets_that_float32_cannot_tell_apart_are_refused():
    with pytest.raises(InvalidData, match=r"holds numbers near 0 that float32 cannot tell apart. Shift or scale it"):
        load(FRAME.assign(y=ROW * 1e-170))


def test_a_constant_class_is_allowed_where_classes_are_named():
    assert load(FRAME.assign(y=1), classes=["0", "1"]).classes == 2


# ---------------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("values", [1e6 + 1e-5 * ROW, ROW * 1e-170, ROW * 1e-300])
def test_small_differences_are_scaled(values):
    data = load(FRAME.assign(a=values))
    assert kind_of(data) == ("number", "scaled")
    scaled = data.train.x[:, 0].double()
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-4)
    assert float(scaled.std(correction=0)) == pytest.approx(1, abs=1e-4)


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


def test_the_cure_for_a_text_among_numbers_works(tmp_path):
    cells = ["oops" if row == 41 else str(row % 13) for row in ROW]
    assert kind_of(as_csv(tmp_path, FRAME.assign(a=cells), missing=["oops"], kinds={"a": "number"})) == ("number", "scaled")
    assert kind_of(as_csv(tmp_path, FRAME.assign(a=cells), missing=["oops"])) == ("number", "scaled")


def test_categories_of_a_table_in_pieces_get_one_notice(tmp_path):
    frame = FRAME.assign(a=[f"only {row % 6}" for row in ROW]).sort_values("c")  # each client has a category of its own
    frame.to_csv(tmp_path / "t.csv", index=False)
    for memory in (0, 1e9):
        with pytest.warns(EquipoiseNotice, match="column 'a' holds categories that training did not have: 'only ") as told:
            eq.data.write_table_store(tmp_path / "t.csv", tmp_path / f"s{memory}", **BOTH, memory=memory, test=0.3)
        assert len(told) == 1


def test_clients_without_an_example_to_test_on_get_a_notice():
    frame = FRAME.assign(c=["small" if row == 0 else name for row, name in enumerate(FRAME["c"])])
    words = r"table: clients without an example for test: 'small' \(1 of 7\)\. "
    with pytest.warns(EquipoiseNotice, match=words + r"Give them more, or leave them out: min_examples=3\.$"):
        load(frame, split_by="examples", test=0.2)
    load(frame, split_by="examples", test=0.2, min_examples=3)  # quiet, as the notice says
    load(frame[1:], split_by="examples", test=0.2)  # quiet
    load(frame, split_by="examples", test=0.0)
    arrays = frame["a"].to_numpy()[:, None], frame["y"].to_numpy(), frame["c"].to_numpy()
    with pytest.warns(EquipoiseNotice, match=r"arrays: clients without an example for test: 'small' \(1 of 7\)"):
        eq.data.from_arrays(*arrays, split_by="examples", test=0.2)
    marked = frame.assign(part=["test" if row % 5 == 1 else "train" for row in ROW])
    with pytest.warns(EquipoiseNotice, match="'small'"):
        eq.data.from_frame(marked, **BOTH, split="part", split_by="examples")


def test_decimal_commas(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",")
    data = eq.data.csv(tmp_path / "t.csv", **BOTH, delimiter=";", decimal=",", test=0.0)
    assert data.fingerprint == load().fingerprint
    with pytest.raises(InvalidParameter, match=r'decimal must be "." or ","'):
        eq.data.csv(tmp_path / "t.csv", **BOTH, decimal=";")


# ----------------------------------------------------------------------------------------------------------------------- files


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


def test_folders_keep_their_leading_zero(tmp_path):
    frame = pd.DataFrame({"shop": range(COUNT), "x": np.arange(COUNT) % 9, "y": np.arange(COUNT) % 2}).assign(
        region=["01", "10"] * 30
    )
    frame.to_parquet(tmp_path / "parts", partition_cols=["region"])
    data = eq.data.parquet(tmp_path / "parts", client="shop", target="y")
    assert data.schema.columns[-1].categories == ("01", "10")


def test_the_client_007_through_training_tables_report_and_predictions(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

    monkeypatch.chdir(tmp_path)
    rows = [f"{('007', '7', '08')[row % 3]},{row % 9},{row % 2}" for row in range(90)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["shop,x,y", *rows]) + "\n")
    data = eq.data.csv(path, client="shop", target="y", split_by="examples")
    algorithm = eq.Algorithm(personal=eq.personal.Ditto(strength=0.5))
    result = eq.train(eq.models.Tabular(data.schema), data, algorithm, rounds=1, clients_per_round=2, progress=False)
    assert {"007", "7", "08"} == set(result.clients["client"])
    assert result.personal.model("007") is not None
    result.report("report.html")
    assert "007" in (tmp_path / "report.html").read_text()
    result.clients.to_csv("clients.csv")
    assert "007" in (tmp_path / "clients.csv").read_text()
    result.save("run")
    assert "007" in eq.ClientTable.from_parquet("run/clients.parquet")["client"]
    done = CliRunner().invoke(app, ["predict", "run", "t.csv", "--keep", "shop", "--out", "out.csv"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith('"007",')


# -------------------------------------------------------------------------------------------------------- what is refused


def coded(code, make):
    """The message of a refusal, which has this code."""
    with pytest.raises(InvalidData) as refusal:
        make()
    assert str(refusal.value).endswith(f"[{code}]")
    return str(refusal.value)


def test_whole_floating_targets_are_asked_about():
    frame = FRAME.assign(y=(ROW % 3).astype(float))
    assert "target_kind" in coded("EQ302", lambda: load(frame))
    assert load(frame, target_kind="classes").classes == 3
    assert load(frame, target_kind="number").schema.target.kind == "number"
    assert load(frame, classes=3).classes == 3


def test_parquet_files_of_one_folder(tmp_path):
    odd = FRAME[30:].assign(a=FRAME["a"][30:].astype("float32"), new=ROW[30:])
    with pytest.warns(EquipoiseNotice, match="column 'new' is not in 1 of 2 files"):
        data = eq.data.parquet(folder_of(tmp_path, a=FRAME[:30], b=odd), **BOTH, test=0.0)
    assert data.train.examples == COUNT
    assert data.schema.columns[-1].indicator
    FRAME.assign(a="text").to_parquet(tmp_path / "parts" / "c.parquet", index=False)
    assert "Give each one type" in coded("EQ303", lambda: eq.data.parquet(tmp_path / "parts", **BOTH))
    (tmp_path / "parts" / "c.parquet").write_bytes((tmp_path / "parts" / "a.parquet").read_bytes()[:-9])
    assert "c.parquet: is no complete Parquet file" in coded("EQ303", lambda: eq.data.parquet(tmp_path / "parts", **BOTH))


def test_files_of_other_kinds(tmp_path):
    file = tmp_path / "t.csv"
    for content in (
        b"PK\x03\x04....",
        b"PAR1\x15...",
        b"c;a;y\n1;2;3\n",
        "c,a\u00e9,y\n1,2,3\n".encode("latin-1"),
        b"c,a,y\n1,2\n",
    ):
        file.write_bytes(content)
        assert str(file) in coded("EQ303", lambda: eq.data.csv(file, **BOTH))
    FRAME.to_csv(tmp_path / "t.csv.gz", index=False)
    assert eq.data.csv(tmp_path / "t.csv.gz", **BOTH, test=0.0).train.x.equal(load().train.x)
    FRAME.to_csv(file, index=False, encoding="utf-16")
    assert eq.data.csv(file, **BOTH, encoding="utf-16", test=0.0).train.x.equal(load().train.x)


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_text_is_missing_in_a_frame_as_in_a_file(tmp_path, blank):
    cells = [blank if row % 10 == 0 else f"t{row % 3}" for row in ROW]
    made = as_csv(tmp_path, FRAME.assign(a=cells)), load(FRAME.assign(a=cells))
    assert made[0].schema.columns == made[1].schema.columns
    assert made[0].schema.columns[0].indicator
    coded("EQ302", lambda: load(FRAME.assign(y=blank)))
    coded("EQ302", lambda: load(FRAME.assign(c=cells)))


def test_a_client_called_na(tmp_path):
    frame = FRAME.assign(c=["NA" if row < 9 else "k" for row in ROW])
    assert as_csv(tmp_path, frame).train.ids == ("NA", "k")
    assert "the client" in coded("EQ302", lambda: as_csv(tmp_path, frame, missing=["NA"]))
    ordered = eq.data.write_table_store(tmp_path / "t.csv", tmp_path / "store", **BOTH, memory=0, test=0.0)
    assert list(eq.data.open_store(ordered).train.ids) == ["NA", "k"]


def test_the_index_that_pandas_saves_is_left_out(tmp_path):
    for name in ("", "Unnamed: 0", "__index_level_0__"):
        frame = FRAME.copy()
        frame.insert(0, name, ROW)
        with pytest.warns(EquipoiseNotice, match="index of a saved table"):
            data = load(frame)
        assert data.features == load().features
        assert load(frame, kinds={name: "number"}).features == load().features + 1
    later = FRAME.assign(**{"": ROW})  # a column without a name is an index only if it is the first
    assert load(later).features == load().features + 1


@pytest.mark.parametrize(
    "values",
    [
        [1j] * COUNT,
        ["a\ud800"] * COUNT,
        [date(2024, 1, 1), datetime(2024, 1, 1, 10)] * 30,
        [1, "x"] * 30,
        [[1, 2]] * COUNT,
        [2**70] * COUNT,
        [float("inf")] * COUNT,
        [1e308, -1e308] * 30,
    ],
    ids=["complex", "no Unicode", "dates and moments", "mixed", "lists", "beyond 64 bits", "infinite", "beyond float64"],
)
def test_columns_that_cannot_be_used_are_named(values):
    frame = FRAME.assign(a=pd.Series(values, dtype=object if not isinstance(values[0], float) else None))
    assert "column 'a'" in coded("EQ302", lambda: load(frame))


def test_columns_that_need_a_decision_are_in_one_message():
    frame = FRAME.assign(a=1, text=[f"text {row}" for row in ROW], late=None)
    said = coded("EQ302", lambda: load(frame))
    assert all(f"column '{name}'" in said for name in ("a", "text", "late"))


def test_numbers_by_the_options_of_their_file():
    for text, reading, number in (
        ("1,5", {"decimal": ","}, 1.5),
        ("-2.980,44", {"decimal": ",", "thousands": "."}, -2980.44),
        ("1\u202f234.5", {"decimal": ".", "thousands": " "}, 1234.5),
        ("\u22125", {}, -5.0),
        ("2,5e3", {"decimal": ","}, 2500.0),
        (",5", {"decimal": ","}, 0.5),
    ):
        assert number_of_text(text, reading) == number
    for text, reading in (
        ("1.5", {"decimal": ","}),
        ("12.34", {"decimal": ",", "thousands": "."}),
        ("1_000", {}),
        ("\u0661", {}),
    ):
        with pytest.raises(ValueError, match="no number"):
            number_of_text(text, reading)


def test_rows_that_min_examples_leaves_out_are_counted():
    frame = FRAME.assign(y=["" if row == 9 else "xz"[row % 2] for row in ROW])
    frame = pd.concat([FRAME[:1].assign(c="small", y="x"), frame])
    assert "row 10" in coded("EQ302", lambda: load(frame, min_examples=2))
