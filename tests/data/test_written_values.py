"""Numbers and dates as people write them, 2.980,44 and 25.09.2024: options that read them, and what messages advise."""

import pandas as pd
import pytest

import equipoise as eq
from equipoise.data.tables import read_rows
from equipoise.data.tables.csv_files import csv_files
from equipoise.errors import EquipoiseNotice, InvalidData, InvalidParameter

COUNT = 60
PRICES = [1000 * (row % 7) + 37 * row + 0.25 for row in range(COUNT)]  # some above a thousand, some below
DAYS = pd.date_range("2024-01-25", periods=COUNT, freq="6D")


def spelt(number, decimal, thousands):
    """A number with two decimals, as 2.980,44."""
    return f"{number:,.2f}".translate({ord(","): thousands, ord("."): decimal})


def written(tmp_path, decimal=".", thousands="", days="%Y-%m-%d", extra=()):
    frame = pd.DataFrame(
        {
            "shop": [f"s{row % 6}" for row in range(COUNT)],
            "price": [spelt(price, decimal, thousands) for price in PRICES],
            "day": DAYS.strftime(days),
            "returned": ["no", "yes", "no"] * (COUNT // 3),
        }
        | dict(extra)
    )
    frame.to_csv(tmp_path / "shops.csv", index=False, sep=";")
    return tmp_path / "shops.csv"


def load(path, **options):
    return eq.data.csv(path, client="shop", target="returned", delimiter=";", test=0.0, **options)


def message(path, **options):
    with pytest.raises(InvalidData) as refusal:
        load(path, **options)
    return str(refusal.value)


@pytest.mark.parametrize(("decimal", "thousands"), [(",", "."), (".", ","), (".", "'"), (",", " "), (",", "\u202f")])
def test_separators_of_thousands(decimal, thousands, tmp_path):
    expected = load(written(tmp_path))
    given = {"decimal": decimal, "thousands": " " if thousands == "\u202f" else thousands}
    data = load(written(tmp_path, decimal, thousands), **given)
    assert data.schema == expected.schema
    assert data.train.x.equal(expected.train.x)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%m/%d/%Y", "%d.%m.%Y %H:%M"])
def test_formats_of_dates(form, tmp_path):
    expected = load(written(tmp_path))
    data = load(written(tmp_path, days=form), date_format=form)
    assert data.schema.columns[1].kind == "date"
    assert data.train.x.equal(expected.train.x)


def test_a_file_in_pieces_and_a_store_are_read_alike(tmp_path):
    path = written(tmp_path, ",", ".", "%d.%m.%Y", {"count": [f"{1 + row % 5}.000" for row in range(COUNT)]}.items())
    given = {"decimal": ",", "thousands": ".", "date_format": "%d.%m.%Y"}
    files = csv_files(path, client="shop", delimiter=";", encoding="utf-8", missing=(), **given)
    table = files.read()
    assert table.column("price").to_pylist() == PRICES
    assert table.column("count").to_pylist()[:3] == [1000, 2000, 3000]
    assert str(table.schema.field("day").type) == "timestamp[s]"
    eq.data.write_table_store(path, tmp_path / "store", client="shop", target="returned", delimiter=";", test=0.0, **given)
    assert eq.data.open_store(tmp_path / "store").schema == load(path, **given).schema


def test_text_that_is_no_grouped_number_stays_text(tmp_path):
    path = written(tmp_path, extra={"code": [f"{1 + row % 3}.{row % 2}0" for row in range(COUNT)]}.items())
    data = load(path, decimal=",", thousands=".", kinds={"price": "left out", "code": "category"})
    assert data.schema.columns[2].categories == ("1.00", "1.10", "2.00", "2.10", "3.00", "3.10")


def test_messages_name_the_options_that_are_missing_and_no_others(tmp_path):
    path = written(tmp_path, ",", ".")
    assert 'Give decimal=",", thousands=".". Or leave it out' in message(path)
    told = message(path, decimal=",")
    assert 'Give thousands="."' in told
    assert "decimal=" not in told
    assert "'number'" not in told
    assert 'Give thousands="."' in message(path, decimal=",", kinds={"price": "number"})  # and no "use it as a category"
    assert 'Give thousands=","' in message(written(tmp_path, ".", ","))
    path = written(tmp_path, days="%d.%m.%Y")
    assert 'Give date_format="%d.%m.%Y"' in message(path)
    assert 'Give date_format="%d.%m.%Y"' in message(path, kinds={"day": "date"})


def test_a_format_that_reads_no_column_of_dates_is_refused(tmp_path):
    some = [f"{1 + row % 28:02d}.03.2025" for row in range(COUNT)]  # 28 texts, each several times: no identifier
    path = written(tmp_path, days="%w", extra={"born": some}.items())
    told = message(path, date_format="%d/%m/%Y")
    assert "column 'born' is not read by date_format='%d/%m/%Y'. All look like dates; row 0 (counted from 0; line 2" in told
    assert "If they are categories: kinds={'born': 'category'}." in told
    assert 'Give date_format="%d.%m.%Y"' in told
    assert load(path, date_format="%d/%m/%Y", kinds={"born": "category"}).schema.columns[2].kind == "category"
    assert load(path, date_format="%d.%m.%Y").schema.columns[2].kind == "date"
    with pytest.warns(eq.errors.EquipoiseNotice, match=r"Give date_format="):  # no format was given
        load(path)
    path = written(tmp_path, days="%d/%m/%Y", extra={"born": some}.items())
    with pytest.warns(eq.errors.EquipoiseNotice, match=r"'born' is read as text"):  # the format reads another column
        assert load(path, date_format="%d/%m/%Y").schema.columns[1].kind == "date"
    path = written(tmp_path, days="%w", extra={"born": [*some[:-1], "unknown"]}.items())
    with pytest.warns(eq.errors.EquipoiseNotice, match=r"Nearly all are dates, but .*'unknown'"):  # the format is right
        load(path, date_format="%d.%m.%Y")


def test_both_meanings_of_one_comma_are_named(tmp_path):
    path = written(tmp_path, extra={"weight": [f"{1 + row},{row:03d}" for row in range(COUNT)]}.items())
    assert 'Give decimal=",", or thousands=",", whichever is meant.' in message(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thousands": ".."}, "thousands must be one sign"),
        ({"thousands": ","}, "thousands must be one sign, and not that of decimals"),
        ({"thousands": "1"}, "thousands must be one sign"),
        ({"date_format": "day"}, "date_format must be a format of strptime"),
        ({"date_format": "%Y"}, "date_format must be a format of strptime"),
    ],
)
def test_options_that_cannot_be_meant(options, words, tmp_path):
    with pytest.raises(InvalidParameter, match=words):
        load(written(tmp_path), decimal=",", **options)


def test_new_rows_are_never_told_to_change_kinds(tmp_path):
    schema = load(written(tmp_path)).schema
    cures = {"2.980,44": 'with decimal=",", thousands="."', "dear": "Training had numbers there. Write it as 1005.5"}
    for bad, words in cures.items():
        with pytest.raises(InvalidData) as refusal:
            schema.transform({"price": [bad], "day": ["2024-01-01"]})
        assert words in str(refusal.value)
        assert "kinds" not in str(refusal.value)
    with pytest.raises(InvalidData) as refusal:
        schema.transform({"price": [[1.0]], "day": ["2024-01-01"]})
    assert "kinds" not in str(refusal.value)


def test_all_columns_that_need_a_decision_are_in_one_message(tmp_path):
    extra = {"order": [f"A-{row}" for row in range(COUNT)], "country": ["AT"] * COUNT}
    told = message(written(tmp_path, ",", ".", extra=extra.items()))
    assert "3 things are to be decided:\n  1. column 'price'" in told
    assert "\n  2. column 'order' holds 60 different texts" in told
    assert "\n  3. columns tell no example from another: 'country' (always 'AT')" in told
    assert told.count("[EQ302]") == 1


def test_a_misspelt_name_in_kinds(tmp_path):
    with pytest.raises(InvalidParameter, match="Did you mean 'price'"):
        load(written(tmp_path), kinds={"prise": "number"})


def test_odd_texts_among_grouped_numbers(tmp_path):
    path = written(tmp_path, ",", ".")
    path.write_text(path.read_text().replace("1.037,25", "unknown"))
    assert "but row 1 (counted from 0; line 3 of the file) holds 'unknown'. Repair it, or make it missing" in message(
        path, decimal=","
    )
    assert 'Give thousands="."' in message(path, decimal=",")
    data = load(path, decimal=",", thousands=".", missing=["unknown"])
    assert data.schema.columns[0].indicator


def test_configurations_have_the_options():
    from equipoise.experiment.catalog import part

    assert {"thousands", "date_format"} <= set(part("data", "csv").parameters)


def test_a_notice_about_few_different_texts_names_the_option(tmp_path):
    path = written(tmp_path, extra={"price": [f"{1 + row % 5},5" for row in range(COUNT)]}.items())
    with pytest.warns(EquipoiseNotice, match='Give decimal=","'):
        load(path)


# ------------------------------------------------------------------------------------------------- signs that differ by column


def mixed_file(tmp_path, delimiter):
    """A file whose column `price` has decimal commas, quoted if the delimiter is one, and whose column `weight` has points."""
    price = [f"{row % 9 + 0.25 * (row % 4):.2f}".replace(".", ",") for row in range(COUNT)]
    weight = [f"{row % 13 + 0.1 * (row % 10):.1f}" for row in range(COUNT)]
    shop = [f"s{row % 6}" for row in range(COUNT)]
    frame = pd.DataFrame({"shop": shop, "price": price, "weight": weight, "returned": ["no", "yes", "no"] * (COUNT // 3)})
    frame.to_csv(tmp_path / "mixed.csv", index=False, sep=delimiter)
    return tmp_path / "mixed.csv"


MIXED = {"client": "shop", "target": "returned", "test": 0.0}


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_decimal_sign_for_some_columns(delimiter, tmp_path):
    path = mixed_file(tmp_path, delimiter)
    data = eq.data.csv(path, **MIXED, delimiter=delimiter, decimal={"price": ","})
    assert [rule.kind for rule in data.schema.columns] == ["number", "number"]
    frame = pd.read_csv(path, sep=delimiter)
    frame["price"] = frame["price"].str.replace(",", ".").astype(float)
    assert data.train.x.equal(eq.data.from_frame(frame, **MIXED).train.x)
    read_again = eq.data.Schema.from_json(data.schema.to_json())
    assert dict(read_again.reading)["decimal"] == {"price": ","}
    new = tmp_path / "new.csv"
    new.write_text(delimiter.join(["price", "weight"]) + "\n" + delimiter.join(['"1,234"', "2.5"]) + "\n")  # 1.234, no 1234
    expected = data.schema.transform(pd.DataFrame({"price": [1.234], "weight": [2.5]}))
    assert read_again.transform(read_rows(new, read_again, dict(read_again.reading))).equal(expected)


def test_a_decimal_sign_for_some_columns_in_pieces(tmp_path):
    path = mixed_file(tmp_path, ",")
    options = {"client": "shop", "delimiter": ",", "encoding": "utf-8", "missing": (), "decimal": {"price": ","}}
    table = csv_files(path, **options).read()
    assert [str(table.schema.field(name).type) for name in ("price", "weight")] == ["double", "double"]


def test_a_comma_may_be_the_delimiter_and_the_decimal_sign(tmp_path):
    frame = pd.DataFrame({"shop": list("abab"), "x": ["1,5", "2,5", "0,25", "3"], "returned": [0, 1, 1, 0]})
    frame.to_csv(tmp_path / "t.csv", index=False)  # pandas quotes cells that hold the delimiter
    data = eq.data.csv(tmp_path / "t.csv", **MIXED, decimal=",")
    assert data.schema.columns[0].kind == "number"
    (tmp_path / "t.csv").write_text("shop,x,returned\na,1,5,0\n")
    with pytest.raises(InvalidData, match="Expected 3 columns"):
        eq.data.csv(tmp_path / "t.csv", **MIXED, decimal=",")


def test_messages_advise_a_sign_that_can_be_given(tmp_path):
    path = mixed_file(tmp_path, ",")
    by_column = 'Give decimal=",", or decimal={"price": ","} if other columns have a point.'
    with pytest.raises(InvalidData) as refusal:
        eq.data.csv(path, **MIXED, kinds={"price": "number"})
    assert by_column in str(refusal.value)
    with pytest.raises(InvalidData) as refusal:
        eq.data.csv(path, **MIXED, decimal=",", kinds={"weight": "number"})
    assert 'Name the columns with a comma instead, as in decimal={"NAME": ","}' in str(refusal.value)
    with pytest.raises(InvalidParameter, match=r"decimal must name columns of the file, but is 'prize'\. Did you mean 'price'"):
        eq.data.csv(path, **MIXED, decimal={"prize": ","})
    with pytest.raises(InvalidParameter, match=r'decimal must be "\." or ","'):
        eq.data.csv(path, **MIXED, decimal={"price": ";"})
