"""Numbers and dates as people write them, 2.980,44 and 25.09.2024: options that read them, and what messages advise."""

import pandas as pd
import pytest

import equipoise as eq
from equipoise.data.tables.read import csv_files
from equipoise.errors import InvalidData, InvalidParameter

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


def test_a_misspelt_name_in_kinds(tmp_path):
    with pytest.raises(InvalidParameter, match="Did you mean 'price'"):
        load(written(tmp_path), kinds={"prise": "number"})


def test_configurations_have_the_options():
    from equipoise.experiment.catalog import part

    assert {"thousands", "date_format"} <= set(part("data", "csv").parameters)


MIXED = {"client": "shop", "target": "returned", "test": 0.0}


def test_a_comma_may_be_the_delimiter_and_the_decimal_sign(tmp_path):
    frame = pd.DataFrame({"shop": list("abab"), "x": ["1,5", "2,5", "0,25", "3"], "returned": [0, 1, 1, 0]})
    frame.to_csv(tmp_path / "t.csv", index=False)  # pandas quotes cells that hold the delimiter
    data = eq.data.csv(tmp_path / "t.csv", **MIXED, decimal=",")
    assert data.schema.columns[0].kind == "number"
    (tmp_path / "t.csv").write_text("shop,x,returned\na,1,5,0\n")
    with pytest.raises(InvalidData, match="Expected 3 columns"):
        eq.data.csv(tmp_path / "t.csv", **MIXED, decimal=",")
