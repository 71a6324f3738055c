"""Rows that are there several times, and columns that name the client, get a notice; ordinary tables get none."""

import warnings
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import equipoise as eq
from equipoise.data.tables import TableColumn
from equipoise.data.tables.value_hashes import MISSING, value_hashes
from equipoise.errors import EquipoiseNotice

COUNT, CLINICS = 600, 12
DRAW = np.random.default_rng(7)
AGE, WARD = DRAW.integers(20, 90, COUNT), DRAW.choice(list("ABCDE"), COUNT)
FRAME = pd.DataFrame(
    {
        "clinic": [f"c{k % CLINICS}" for k in range(COUNT)],
        "age": AGE,
        "ward": WARD,
        "weight": DRAW.normal(70, 12, COUNT),
        "ill": np.where(DRAW.random(COUNT) < AGE / 120, "yes", "no"),
    }
)
COARSE = FRAME.drop(columns="weight")
ADULT = Path(__file__).parents[2] / "examples" / "adult-by-country.csv"


def load(frame=FRAME, **options):
    return eq.data.from_frame(frame, **{"client": "clinic", "target": "ill", "test": 0.25, **options})


def notices(frame=FRAME, **options):
    """The notices of a table, but for those on categories that training did not have."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(frame, **options)
    return [text for each in told if "that training did not have" not in (text := str(each.message))]


# -------------------------------------------------------------------------------------------------------------- equal rows


def test_copies_are_counted_and_the_split_is_named(tmp_path):
    twice = pd.concat([FRAME, FRAME[24:44]])  # rows 24 to 43: clinics 0 to 11, some twice
    (text,) = notices(twice, split_by="examples")
    counted = "table: 20 of 620 rows equal an earlier row in every column, in 12 of 12 clients"
    assert text.startswith(f"{counted}; the first is row 600, equal to row 24.")
    assert int(twice.duplicated().sum()) == 20  # what pandas says
    assert "Equal rows may be on both sides of the split: the model has then seen test rows, and errors look too low." in text
    assert "If they are copies, drop them, in pandas by frame.drop_duplicates(); if each was observed, keep them." in text
    assert notices(twice.drop_duplicates(), split_by="examples") == []
    (by_clients,) = notices(twice)
    assert "count several times in training and in the error of their client" in by_clients
    assert "both sides" not in by_clients
    twice.to_csv(tmp_path / "t.csv", index=False)
    with pytest.warns(EquipoiseNotice, match=r"the first is row 600 \(counted from 0; line 602 of the file\), equal to row 24"):
        data = eq.data.csv(tmp_path / "t.csv", client="clinic", target="ill")
    assert data.train.examples + data.test.examples == 620  # nothing is left out


def test_columns_that_are_left_out_are_not_compared():
    twice = pd.concat([FRAME, FRAME[:20]]).assign(visit=[f"v{k}" for k in range(COUNT + 20)])
    (text,) = notices(twice, kinds={"visit": "left out"})
    assert "20 of 620 rows equal an earlier row in every column that is used" in text
    assert "frame.drop_duplicates(subset=frame.columns.difference(['visit']))" in text
    assert len(twice.drop_duplicates(subset=twice.columns.difference(["visit"]))) == COUNT
    assert notices(twice, kinds={"visit": "category"}) == []
    parts = pd.concat([FRAME.assign(part="train"), FRAME[:20].assign(part="test")])
    (text,) = notices(parts, split="part", split_by="examples", test=0.2)
    assert "equal an earlier row in every column that is used, in 12 of 12 clients" in text


@pytest.mark.parametrize(("copies", "told"), [(4, 0), (5, 1)])
def test_fewer_than_five_copies_are_no_matter(copies, told):
    assert len(notices(pd.concat([FRAME, FRAME[:copies]]))) == told


def test_missing_values_and_signs_of_zero_are_equal():
    row = np.arange(COUNT)
    odd = FRAME.assign(late=np.where(row < 20, np.nan, row % 7), level=np.where(row < 10, 0.0, 0.5))
    again = odd[:12].assign(level=-0.0)  # of the last two rows it was 0.5
    (text,) = notices(pd.concat([odd, again]))
    assert text.startswith("table: 10 of 612 rows")


def test_a_table_read_with_the_schema_of_another_one():
    data = load()
    with pytest.warns(EquipoiseNotice, match="20 of 620 rows equal an earlier row"):
        load(pd.concat([FRAME, FRAME[:20]]), schema=data.schema)


def test_a_whole_table_that_is_there_twice_or_often():
    adult = pd.read_csv(ADULT)  # whole numbers and categories
    for times in (2, 3, 10):
        (text,) = notices(pd.concat([adult] * times), client="country", target="income")
        assert text.startswith(f"table: {400 * (times - 1):,} of {400 * times:,} rows equal an earlier row in every column")
    assert notices(adult, client="country", target="income") == []


COINCIDENCES = {
    "few values": {f"v{k}": DRAW.choice(list("abc"), COUNT) for k in range(3)},
    "age and ward": {"age": AGE, "ward": WARD},
    "rounded numbers": {"degrees": DRAW.normal(15, 6, COUNT).round(0), "humidity": DRAW.normal(60, 9, COUNT).round(0)},
    "mostly zero": {f"v{k}": np.where(DRAW.random(COUNT) < 0.9, 0, DRAW.integers(1, 10_000, COUNT)) for k in range(2)},
    "mostly healthy": {f"v{k}": (DRAW.random(COUNT) < 0.03).astype(int) for k in range(30)},
    "one name for each number": {"product": AGE, "name": [f"product {k}" for k in AGE]},
}


@pytest.mark.parametrize("columns", COINCIDENCES.values(), ids=list(COINCIDENCES))
@pytest.mark.parametrize("clinics", [2, CLINICS])
def test_rows_that_are_equal_by_chance_get_no_notice(columns, clinics):
    frame = pd.DataFrame({"clinic": [f"c{k}" for k in DRAW.integers(0, clinics, COUNT)], **columns, "ill": FRAME["ill"]})
    assert frame.duplicated().sum() >= 5
    assert notices(frame) == []


# ---------------------------------------------------------------------------------------------------- columns of the client

NUMBER = np.arange(COUNT) % CLINICS
ONE_EACH = "each of its 12 values occurs in one client only, and each client has one."
NAMES = {
    "the client again": ([f"site {k}" for k in NUMBER], ONE_EACH),
    "a number": (47.0 + 0.13 * NUMBER, ONE_EACH),
    "a day": ([date(2024, 1, 1) + timedelta(int(k)) for k in NUMBER], ONE_EACH),
    "two doctors": (
        [f"doctor {k}{'ab'[row % 24 // 12]}" for row, k in enumerate(NUMBER)],
        "each of its 24 values occurs in one client only, and 12 of 12 clients have them.",
    ),
    "some are missing": (
        [None if k % 3 == 0 else f"site {k}" for k in NUMBER],
        "each of its 8 values occurs in one client only, and 8 of 12 clients have one.",
    ),
}


@pytest.mark.parametrize(("values", "words"), NAMES.values(), ids=list(NAMES))
def test_a_column_whose_values_name_the_client(values, words):
    frame = FRAME.assign(site=values)
    (told,) = notices(frame)
    assert told.startswith(f"table: column 'site' names the client: {words} The model can recognise a client by it")
    assert "Leave it out: kinds={'site': 'left out'}; to use it all the same: kinds={'site': '" in told
    kind = told.rpartition("'site': '")[2].partition("'")[0]
    for asked in ("left out", kind):
        assert notices(frame, kinds={"site": asked}) == []
    assert notices(frame, schema=load().schema) == []


ORDINARY = {
    "shared by two clients": [f"region {k // 2}" for k in NUMBER],
    "numbers that do not repeat": DRAW.normal(size=COUNT),
    "many values for each client": [f"street {k} {row // CLINICS % 25}" for row, k in enumerate(NUMBER)],
    "two clients share one value": ["site 1" if row == 0 else f"site {k}" for row, k in enumerate(NUMBER)],
    "mostly missing": [f"site {k}" if row % 24 < 9 and row < 480 else None for row, k in enumerate(NUMBER)],
    "two values": WARD == "A",
}


@pytest.mark.parametrize("values", ORDINARY.values(), ids=list(ORDINARY))
def test_ordinary_columns_do_not_name_the_client(values):
    frame = FRAME.assign(site=values)
    assert notices(frame) == []


def test_small_tables_and_attributes_are_not_judged():
    frame = FRAME.assign(site=[f"site {k}" for k in NUMBER])
    assert notices(frame[:99]) == []
    assert len(notices(frame[:100])) == 1
    assert notices(frame, attributes=["site"]) == []


# ------------------------------------------------------------------------------------------------------------------ numbers

VALUES = {
    "float": pa.array([1.5, -0.0, 0.0, None, float("nan"), 1.5]),
    "half": pa.array(np.array([1.5, -0.0, 0.0, np.nan, np.nan, 1.5], dtype=np.float16)),
    "integer": pa.array([-3, 2**62, 2**62, None, None, -3]),
    "unsigned": pa.array([7, 2**64 - 1, 2**64 - 1, None, None, 7], pa.uint64()),
    "boolean": pa.array([True, False, False, None, None, True]),
    "text": pa.array(["a", "b", "b", None, None, "a"]),
    "category": pa.array(["a", "b", "b", None, None, "a"]).dictionary_encode(),
    "date": pa.array([date(2024, 1, 1), date(1, 1, 1), date(1, 1, 1), None, None, date(2024, 1, 1)]),
    "decimal": pa.array([Decimal("1.5"), Decimal("2.5"), Decimal("2.5"), None, None, Decimal("1.5")]),
    "nothing": pa.nulls(6),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_equal_values_have_equal_numbers(values):
    found = value_hashes(TableColumn("a", pa.chunked_array([values[:2], values[2:]])))
    if values.type == pa.null():
        assert (found == MISSING).all()
        return
    assert found[0] == found[5] != found[1] == found[2]
    assert found[3] == found[4] == MISSING
    assert MISSING not in found[:3]
