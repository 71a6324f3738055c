"""CSV files as people have them: messages name the line and the cell, and codes such as 01234 keep their zero."""

import gzip
import re
import warnings

import numpy as np
import pandas as pd
import pytest

import equipoise as eq
from equipoise.data.tables.leading_zeros import may_begin_with_zero
from equipoise.data.tables.row_places import record_lines
from equipoise.data.tables.written_values import decimal_signs, number_of_text
from equipoise.errors import EquipoiseNotice, InvalidData, InvalidParameter

COUNT = 60
BOTH = {"client": "shop", "target": "y"}


def written(path, header, rows):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def message(path, **options):
    with pytest.raises(InvalidData) as refusal:
        eq.data.csv(path, **BOTH, **options)
    return str(refusal.value)


def german(place=None, cell=""):
    """Rows with decimal commas; the target in one of them is another cell."""
    rows = [f"s{row % 6};{row % 7},5;{row % 11},25" for row in range(COUNT)]
    if place is not None:
        rows[place] = f"s1;0,5;{cell}"
    return rows


# -------------------------------------------------------------------------------------------------------------- rows and lines


def test_a_bad_target_names_its_own_row_and_cell(tmp_path):
    path = written(tmp_path / "t.csv", "shop;x;y", german(37, "12,3x"))
    words = "row 37 (counted from 0; line 39 of the file) holds '12,3x'"
    said = message(path, delimiter=";", decimal=",", target_kind="number")
    assert words in said
    assert "kinds=" not in said  # which does not name the target
    assert "or drop the row. If the target is a class: target_kind='classes'" in said
    with pytest.warns(EquipoiseNotice, match=re.escape(words)):  # few different texts, which may be classes
        eq.data.csv(path, **BOTH, delimiter=";", decimal=",")


def test_the_line_counts_blank_lines_and_text_over_several_lines(tmp_path):
    rows = [f's{row % 6},"a\nb","{row}.5"' for row in range(30)]  # two lines each
    rows[3:3] = ["", ""]
    rows[20] = 's1,"a\nb",bad'
    path = written(tmp_path / "t.csv", "shop,note,y", rows)
    lines = path.read_text().split("\n")
    said = message(path, target_kind="number", kinds={"note": "left out"})
    assert "row 18 (counted from 0; line 40 of the file) holds 'bad'" in said
    assert lines[39:41] == ['s1,"a', 'b",bad']
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write(path.read_text())
    assert "line 40 of the file" in message(tmp_path / "t.csv.gz", target_kind="number", kinds={"note": "left out"})


def test_lines_of_records(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'a,b\r\n\r\n1,"x\r\n\r\ny"\r\n2,3\r\n')
    assert list(record_lines(str(path), ",", "utf-8")) == [1, 3, 6]


def test_a_ragged_line_is_counted_as_people_count(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('shop,x,y\na,"1\n2",0\n\nb,1,2,3\n')
    assert "line 5: Expected 3 columns, got 4" in message(path)


def test_rows_that_min_examples_leaves_out_are_counted(tmp_path):
    rows = [f"s{row % 3},{row}.5" for row in range(30)]
    rows[0:0] = ["rare,1.0"]
    rows[11] = "s1,bad"
    frame = pd.DataFrame([row.split(",") for row in rows], columns=["shop", "y"]).assign(x=range(31))
    with pytest.raises(InvalidData, match="row 11 holds 'bad'"):
        eq.data.from_frame(frame, **BOTH, min_examples=2, target_kind="number", kinds={"x": "number"})
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = message(tmp_path / "t.csv", min_examples=2, target_kind="number", kinds={"x": "number"})
    assert "row 11 (counted from 0; line 13 of the file) holds 'bad'" in said


def test_the_line_of_one_of_several_files(tmp_path):
    (tmp_path / "parts").mkdir()
    rows = [f"s{row // 10},{row / 8},{row % 3}.5" for row in range(COUNT)]
    rows[45] = "s4,0.5,bad"
    for part in range(2):
        written(tmp_path / "parts" / f"{part}.csv", "shop,x,y", rows[30 * part : 30 * part + 30])
    for memory in (0, 1e9):
        with pytest.raises(InvalidData) as refusal:
            eq.data.write_table_store(
                tmp_path / "parts", tmp_path / f"{memory}.store", **BOTH, memory=memory, target_kind="number"
            )
        assert f"row 45 (counted from 0; line 17 of {tmp_path / 'parts' / '1.csv'}) holds 'bad'" in str(refusal.value)


# ------------------------------------------------------------------------------------------------------------------- decimals


@pytest.mark.parametrize("options", [{}, {"decimal": ","}, {"kinds": {"x": "number"}}])
def test_two_decimal_signs_in_one_column(options, tmp_path):
    cells = [f"{row},5" if row % 4 == 0 else f"{row}.5" for row in range(COUNT)]
    path = written(tmp_path / "t.csv", "shop;x;y", [f"s{row % 6};{cells[row]};{row % 2}" for row in range(COUNT)])
    said = message(path, delimiter=";", **options)
    assert "a decimal comma in 15 cells (first in row 0 (counted from 0; line 2 of the file): '0,5')" in said
    assert "a decimal point in 45 cells (first in row 1 (counted from 0; line 3 of the file): '1.5')" in said
    assert 'Write all of them with a point, or all of them with a comma and give decimal=",".' in said
    frame = pd.DataFrame({"shop": [f"s{row % 6}" for row in range(COUNT)], "x": cells, "y": [row % 2 for row in range(COUNT)]})
    with pytest.raises(InvalidData, match=r"first in row 1: '1\.5'.*frame\['x'\]\.str\.replace\(',', '\.'\)\.astype\(float\)"):
        eq.data.from_frame(frame, **BOTH)


def test_signs_that_may_group_thousands_say_nothing():
    assert decimal_signs(["1,000", "12.345", "1.234.567"]) == {}
    assert decimal_signs(["1.234,5", "0,125", "1234.567"]) == {"comma": ["1.234,5", "0,125"], "point": ["1234.567"]}


@pytest.mark.parametrize(
    ("text", "spelling", "number"),
    [
        ("1,5", {"decimal": ","}, 1.5),
        ("-2.980,44", {"decimal": ",", "thousands": "."}, -2980.44),
        ("1\u202f234.5", {"decimal": ".", "thousands": " "}, 1234.5),
        ("\u22125", None, -5.0),
        ("2,5e3", {"decimal": ","}, 2500.0),
        (",5", {"decimal": ","}, 0.5),
        ("1.5", {"decimal": ","}, None),
        ("12.34", {"decimal": ",", "thousands": "."}, None),
        ("1_000", None, None),
        ("\u0661", None, None),
    ],
)
def test_numbers_by_the_options_of_their_file(text, spelling, number):
    if number is None:
        with pytest.raises(ValueError, match="no number"):
            number_of_text(text, spelling)
    else:
        assert number_of_text(text, spelling) == number


# -------------------------------------------------------------------------------------------------------------- leading zeros

CODES = ["01234", "02345", "98765", "10115"]


def postcodes(path, cells=CODES, target=("0", "1")):
    rows = [f"{row % 6:03},{cells[row % len(cells)]},0.{row % 7},{target[row % len(target)]}" for row in range(COUNT)]
    return written(path, "shop,zip,x,y", rows)


@pytest.mark.parametrize(
    "cells", [CODES, ["1", "01", "10"], ["", "007", "7"], ["01.10", "01.1", "2"], ["00000000000000000000123", "5"]]
)
def test_codes_keep_their_leading_zero(cells, tmp_path):
    path = postcodes(tmp_path / "t.csv", cells)
    odd = next(cell for cell in cells if cell.startswith("0"))
    with pytest.warns(EquipoiseNotice, match=f"holds '{odd}', which begins with 0.*kinds={{'zip': 'number'}}"):
        data = eq.data.csv(path, **BOTH)
    assert set(data.schema.columns[0].categories) == {cell for cell in cells if cell}
    numbers = eq.data.csv(path, **BOTH, kinds={"zip": "number"})
    known = [cells[row % len(cells)] for row in range(COUNT) if f"{row % 6:03}" in numbers.train.ids]
    assert numbers.schema.columns[0].mean == pytest.approx(np.mean([float(cell) for cell in known if cell]))
    for memory in (0, 1e9):  # in pieces, and whole
        sorted_path = tmp_path / "sorted.csv"
        lines = path.read_text().splitlines()
        sorted_path.write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
        options = {**BOTH, "memory": memory, "test": 0.0, "kinds": {"zip": "category"}}
        store = eq.data.open_store(eq.data.write_table_store(sorted_path, tmp_path / f"{memory}.store", **options))
        assert set(store.schema.columns[0].categories) == {cell for cell in cells if cell}
        assert store.train.ids[0] == "000"


def test_plain_numbers_stay_numbers(tmp_path):
    for name, cells in (("a", ["0", "5", "10"]), ("b", ["0.5", "-0.25", "0"]), ("c", ["0e1", "0.0", "100"])):
        data = eq.data.csv(postcodes(tmp_path / f"{name}.csv", cells), **BOTH)
        assert data.schema.columns[0].kind == "number"


def test_targets_and_attributes_keep_their_leading_zero(tmp_path):
    path = postcodes(tmp_path / "t.csv", ["0.5", "0.25"], target=("01", "02", "10"))
    data = eq.data.csv(path, **BOTH, target_kind="classes")
    assert data.schema.target.classes == ("01", "02", "10")
    path = written(tmp_path / "r.csv", "shop,region,x,y", [f"{k % 6:03},0{k % 6 % 2},{k % 9},{k % 2}" for k in range(COUNT)])
    assert eq.data.csv(path, **BOTH, attributes=["region"]).attributes["region"]["001"] == "01"


def test_thousands_make_no_numbers_of_codes(tmp_path):
    rows = [f"s{row % 6};{CODES[row % 4]};1.00{row % 9},5;{row % 2}" for row in range(COUNT)]
    path = written(tmp_path / "t.csv", "shop;zip;x;y", rows)
    data = eq.data.csv(path, **BOTH, delimiter=";", decimal=",", thousands=".", kinds={"zip": "category"})
    assert data.schema.columns[0].categories == ("01234", "02345", "10115", "98765")
    assert data.schema.columns[1].kind == "number"


def test_folders_keep_their_leading_zero(tmp_path):
    frame = pd.DataFrame({"shop": range(COUNT), "x": np.arange(COUNT) % 9, "y": np.arange(COUNT) % 2}).assign(
        region=["01", "10"] * 30
    )
    frame.to_parquet(tmp_path / "parts", partition_cols=["region"])
    data = eq.data.parquet(tmp_path / "parts", **BOTH)
    assert data.schema.columns[-1].categories == ("01", "10")


def test_text_of_frames_keeps_its_leading_zero(tmp_path):
    frame = pd.read_csv(postcodes(tmp_path / "t.csv"), dtype={"zip": str, "shop": str})
    import polars as pl
    import pyarrow as pa

    for table in (frame, pl.from_pandas(frame), pa.Table.from_pandas(frame)):
        data = eq.data.from_frame(table, **BOTH)
        assert data.schema.columns[0].categories == ("01234", "02345", "10115", "98765")
        assert "001" in data.train.ids + data.test.ids


def test_cells_that_may_begin_with_zero():
    for found in (b"a\n01", b'a,"01"', b"a, 05,", b"a\r\n00"):
        assert may_begin_with_zero(found, ",", "utf-8")
    for plain in (b"a\n0,0.5,10,100\n2020-01-01,x01\n", b"", b"0", b"a,0"):
        assert not may_begin_with_zero(plain, ",", "utf-8")
    assert may_begin_with_zero("a".encode("utf-16"), ",", "utf-16")


def test_the_client_007_through_training_tables_report_and_predictions(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

    monkeypatch.chdir(tmp_path)
    rows = [f"{('007', '7', '08')[row % 3]},{row % 9},{row % 2}" for row in range(90)]
    path = written(tmp_path / "t.csv", "shop,x,y", rows)
    data = eq.data.csv(path, **BOTH, split_by="examples")
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


# ----------------------------------------------------------------------------------------------------------- odd rows and cells


def lines_of(cells, target=("no", "yes")):
    return [f"s{row % 6},{cells[row % len(cells)]},{row % 7},{target[row * 7 % 3 % len(target)]}" for row in range(COUNT)]


def told_of(path, **options):
    with pytest.warns(EquipoiseNotice) as found:
        data = eq.data.csv(path, **BOTH, **options)
    return data, "\n".join(str(each.message) for each in found)


def test_a_row_of_totals_gets_a_notice(tmp_path):
    rows = lines_of(["1.5", "2.5"])
    path = written(tmp_path / "t.csv", "shop,a,x,y", [*rows, "Total,120,180,yes"])
    _, said = told_of(path)
    assert "row 60 (counted from 0; line 62 of the file) is the only row of 'Total', and the last" in said
    assert "Delete it if it is a total" in said
    eq.data.csv(written(tmp_path / "m.csv", "shop,a,x,y", ["Total,1,2,yes", *rows]), **BOTH)  # no notice: not the last


def test_titles_above_the_header_and_short_lines(tmp_path):
    path = written(tmp_path / "t.csv", "Sales of 2026\n\nshop,a,x,y", lines_of(["1.5", "2.5"]))
    assert "line 3: Expected 1 columns, got 4: shop,a,x,y. The header has 1 column. Repair the line; titles" in message(path)


def test_signs_for_missing_numbers_are_named_even_if_they_are_frequent(tmp_path):
    cells = [f"{row}.5" if row % 3 == 0 else "-" if row % 3 == 1 else "n.a." for row in range(30)]
    path = written(tmp_path / "t.csv", "shop,a,x,y", lines_of(cells))
    _, said = told_of(path)
    assert "Many are numbers, but row 1 (counted from 0; line 3 of the file) holds '-', and other rows 'n.a.'" in said
    assert "missing=['-', 'n.a.']" in said
    assert eq.data.csv(path, **BOTH, missing=["-", "n.a."]).schema.columns[0].kind == "number"


def test_a_sign_for_a_missing_answer_gets_a_notice(tmp_path):
    path = written(tmp_path / "t.csv", "shop,a,x,y", lines_of(["1.5", "2.5"], target=("lo", "-", "hi")))
    data, said = told_of(path)
    assert "the target, row 1 (counted from 0; line 3 of the file) holds '-', which is taken for a class" in said
    assert data.schema.target.classes == ("-", "hi", "lo")
    eq.data.csv(path, **BOTH, target_kind="classes")  # said, and quiet


@pytest.mark.parametrize(
    ("write", "form"), [("{} Jan 2024", "%d %b %Y"), ("{}-Jan-2024", "%d-%b-%Y"), ("{} January 2024", "%d %B %Y")]
)
def test_dates_with_names_of_months(write, form, tmp_path):
    path = written(tmp_path / "t.csv", "shop,a,x,y", lines_of([write.format(day) for day in range(1, 21)]))
    _, said = told_of(path)
    assert f'holds {write.format(1)!r}. Give date_format="{form}"' in said
    assert eq.data.csv(path, **BOTH, date_format=form).schema.columns[0].kind == "date"


def test_a_column_without_a_name_is_an_index_only_if_it_is_the_first(tmp_path):
    path = written(tmp_path / "t.csv", "shop,,x,y", lines_of(["1", "2", "3"]))
    assert eq.data.csv(path, **BOTH).schema.columns[0].becomes == "scaled"


@pytest.mark.parametrize("header", ["who,age,ill", " Who,AGE ,ill"])
@pytest.mark.parametrize("reader", ["csv", "frame", "store at once", "store in pieces"])
def test_a_header_among_the_rows_is_refused(tmp_path, header, reader):
    rows = [f"c{row // 10},{row},{'yes' if row % 3 else 'no'}" for row in range(60)]
    path = tmp_path / "joined.csv"
    path.write_text("\n".join(["who,age,ill", *rows[:30], header, *rows[30:]]) + "\n")
    names = {"client": "who", "target": "ill"}
    line = r"row 30 \(counted from 0; line 32 of the file\) repeats the header\. Delete it"
    readers = {
        "csv": lambda: eq.data.csv(path, **names),
        "frame": lambda: eq.data.from_frame(pd.read_csv(path), **names),
        "store at once": lambda: eq.data.write_table_store(path, tmp_path / "store", **names),
        "store in pieces": lambda: eq.data.write_table_store(path, tmp_path / "store", memory=0, **names),
    }
    with pytest.raises(InvalidData, match="row 30 repeats the header" if reader == "frame" else line):
        readers[reader]()


def test_a_row_that_names_only_some_columns_is_no_header():
    frame = {"who": ["who", "who", "b", "b"], "a": ["a", "c", "c", "a"], "ill": ["no", "yes", "no", "yes"]}
    assert len(eq.data.from_frame(frame, client="who", target="ill", test=0.5).train) == 1


def test_a_class_that_hardly_a_row_has_gets_a_notice():
    """7 of 2000 rows are 0.35 %; 10 rows, or 7 of 1000, are not told."""

    def table(count, rare):
        answers = ["maybe"] * rare + ["yes", "no"] * ((count - rare) // 2) + ["no"] * ((count - rare) % 2)
        whose = [f"c{row % 10}" for row in range(count)]
        return {"who": whose, "age": [float(row * 7919 % 1009) / 3 for row in range(count)], "ill": answers}

    names = {"client": "who", "target": "ill", "split_by": "examples", "test": 0.5}
    with pytest.warns(EquipoiseNotice, match=r"column 'ill', the target: class 'maybe' has 7 of 2000 rows\. If"):
        eq.data.from_frame(table(2000, 7), **names)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquipoiseNotice)
        eq.data.from_frame(table(2000, 10), **names)
        eq.data.from_frame(table(1000, 7), **names)
        eq.data.from_frame(table(2000, 7), **names, target_kind="classes")


def test_a_column_that_is_unknown_is_named_once_with_the_nearest_one(tmp_path):
    path = written(tmp_path / "t.csv", "shop,crp,y", [f"s{row % 4},{row},{row % 2}" for row in range(40)])
    with pytest.raises(InvalidParameter, match="Did you mean 'crp'"):
        eq.data.csv(path, client="shop", target="y", decimal={"CRP": ","})
    with pytest.raises(InvalidParameter) as refusal:
        eq.data.csv(path, client="shopp", target="y")
    assert str(refusal.value).count("'shopp'") == 1
    assert "Did you mean 'shop'? Allowed: crp, shop, y." in str(refusal.value)
