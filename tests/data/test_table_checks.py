"""Checks of tables: what leaks, is copied, names the client or is of the wrong type gets a notice; ordinary tables get none."""

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

COUNT, CLINICS = 600, 12
DRAW = np.random.default_rng(7)
AGE, WARD, NOISE = DRAW.integers(20, 90, COUNT), DRAW.choice(list("ABCDE"), COUNT), DRAW.normal(0, 1, COUNT)
ILL, RIGHT = (AGE - 50) / 15 + NOISE > 0.3, DRAW.random(COUNT) > 0.02  # 2 % of the rows are wrong
FRAME = pd.DataFrame(
    {
        "clinic": [f"c{k % CLINICS}" for k in range(COUNT)],
        "age": AGE,
        "ward": WARD,
        "weight": DRAW.normal(70, 12, COUNT),
        "street": [f"street {k}" for k in DRAW.integers(0, 100, COUNT)],  # many categories, few rows each
        "ill": np.where(ILL, "yes", "no"),
        "cost": 100 * AGE + 300 * NOISE,
    }
)
SICK, COST, COARSE = FRAME.drop(columns="cost"), FRAME.drop(columns="ill"), FRAME[["clinic", "age", "ward", "ill"]]
ADULT = Path(__file__).parents[2] / "examples" / "adult-by-country.csv"


def notices(frame=SICK, target="ill", **options):
    """The notices of a table, but for those on categories that training did not have."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        eq.data.from_frame(frame, **{"client": "clinic", "target": target, "test": 0.25, **options})
    return [text for each in told if "that training did not have" not in (text := str(each.message))]


def test_ordinary_tables_get_no_notice():
    assert notices() == notices(COST, "cost") == notices(SICK.assign(late=SICK["age"].where(NOISE > -1))) == []
    assert notices(SICK.assign(rare=np.where(np.arange(COUNT) % 59 == 0, "x", "y")), "rare") == []  # 98 % are of one class
    assert notices(pd.read_csv(ADULT), "income", client="country") == []


# ------------------------------------------------------------------------------------------------------------ leaking answers

LEAKS = {
    "a category": np.where(ILL == RIGHT, "treated", "sent home"),
    "a number": np.where(ILL == RIGHT, 10.0, 1.0) + DRAW.random(COUNT),
    "a flag": ILL == RIGHT,
    "missing values": np.where(ILL == RIGHT, DRAW.random(COUNT), np.nan),
    "a date": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.where(ILL == RIGHT, 100, 0), unit="D"),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=list(LEAKS))
def test_a_column_that_gives_the_class_away(leak):
    (text,) = notices(SICK.assign(leak=leak))
    assert "'leak'" in text
    assert "'ill'" in text
    assert notices(SICK.assign(leak=leak), kinds={"leak": "left out"}) == []
    assert notices(SICK.assign(leak=leak)[:150], kinds={"street": "left out"}) == []  # too few to judge


def test_a_column_that_gives_the_number_away():
    (text,) = notices(COST.assign(leak=1.2 * COST["cost"] + 20), "cost")
    assert "'leak'" in text
    groups = COST.assign(leak=[f"g{k}" for k in AGE // 10], cost=AGE // 10 + NOISE / 100)
    assert any("'leak'" in each for each in notices(groups.drop(columns="age"), "cost", target_kind="number"))


# -------------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(("copies", "told"), [(4, 0), (5, 1), (20, 1)])
def test_five_copies_or_more_are_counted(copies, told):
    texts = notices(pd.concat([SICK, SICK[:copies]]))
    assert len(texts) == told
    for text in texts:
        assert f"{copies} of {COUNT + copies}, e.g. row {COUNT} and row 0" in text


def test_columns_that_are_left_out_are_not_compared():
    twice = pd.concat([SICK, SICK[:20]]).assign(visit=[f"v{k}" for k in range(COUNT + 20)])
    assert len(notices(twice, kinds={"visit": "left out"})) == 1
    assert notices(twice, kinds={"visit": "category"}) == []


def test_missing_values_and_signs_of_zero_are_equal():
    row = np.arange(COUNT)
    odd = SICK.assign(late=np.where(row < 20, np.nan, row % 7), level=np.where(row < 10, 0.0, 0.5))
    (text,) = notices(pd.concat([odd, odd[:12].assign(level=-0.0)]))  # of the last two rows it was 0.5
    assert "10 of 612" in text


def test_a_whole_table_that_is_there_twice_or_often():
    adult = pd.read_csv(ADULT)  # whole numbers and categories
    for times in (2, 3, 10):
        (text,) = notices(pd.concat([adult] * times), "income", client="country")
        assert f"{400 * (times - 1)} of {400 * times}" in text


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
    clinic = [f"c{k}" for k in DRAW.integers(0, clinics, COUNT)]
    frame = pd.DataFrame({"clinic": clinic, **columns, "ill": DRAW.choice(["yes", "no"], COUNT)})
    assert frame.duplicated().sum() >= 5
    assert notices(frame) == []


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
}


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_equal_values_have_equal_codes(values):
    found = TableColumn("a", pa.chunked_array([values[:2], values[2:]])).codes()
    assert found[0] == found[5] != found[1] == found[2] >= 0
    assert found[3] == found[4] == -1


# ----------------------------------------------------------------------------------------------------- columns of the client

NUMBER = np.arange(COUNT) % CLINICS
NAMES = {
    "the client again": ([f"site {k}" for k in NUMBER], 12),
    "a number": (47.0 + 0.13 * NUMBER, 12),
    "a day": ([date(2024, 1, 1) + timedelta(int(k)) for k in NUMBER], 12),
    "two doctors": ([f"doctor {k}{'ab'[row % 24 // 12]}" for row, k in enumerate(NUMBER)], 24),
    "some are missing": ([None if k % 3 == 0 else f"site {k}" for k in NUMBER], 8),
}
ORDINARY = {
    "in two clients": [f"site {max(k, 1)}" for k in NUMBER],
    "each row its own": AGE + np.arange(COUNT) / 1000,
    "mostly missing": [f"site {k}" if row % 24 < 9 and row < 480 else None for row, k in enumerate(NUMBER)],
    "two values": WARD == "A",
}


@pytest.mark.parametrize(("values", "different"), NAMES.values(), ids=list(NAMES))
def test_a_column_whose_values_name_the_client(values, different):
    frame = COARSE.assign(site=values)
    (text,) = notices(frame)
    assert "column 'site' names the client" in text
    assert f"its {different} values" in text
    assert notices(frame, kinds={"site": "left out"}) == notices(frame[:99]) == []


@pytest.mark.parametrize("values", ORDINARY.values(), ids=list(ORDINARY))
def test_ordinary_columns_do_not_name_the_client(values):
    assert notices(SICK.assign(site=values)) == []


# ------------------------------------------------------------------------------------------------------------- wrong types

ROW = np.arange(COUNT)
MISREAD = {
    "a comma": [f"{row % 7},5" for row in ROW],
    "per cent": [f"{row % 9}%" for row in ROW],
    "days": [f"{row % 11 + 1:02d}/03/2020" for row in ROW],
    "names of months": [f"{row % 28 + 1} Jan 2024" for row in ROW],
    "one day": ["oops" if row == 9 else f"2020-01-{row % 9 + 1:02d}" for row in ROW],
    "one text": ["oops" if row == 41 else str(row % 13) for row in ROW],
    "a frequent sign": ["?" if row % 3 == 0 else str(row % 13) for row in ROW],
    "many numbers": [f"{row % 20}" for row in ROW],
}
TEXT = {
    "few numbers": [str(row % 3) for row in ROW],
    "codes": [f"A{row % 20}" for row in ROW],
    "sizes": [["S", "M", "L", "10"][row % 4] for row in ROW],
}


@pytest.mark.parametrize("cells", MISREAD.values(), ids=list(MISREAD))
def test_numbers_and_dates_as_text_get_a_notice(cells):
    (text,) = notices(COARSE.assign(a=cells))
    assert "column 'a' is read as text" in text
    assert notices(COARSE.assign(a=cells), kinds={"a": "category"}) == []


@pytest.mark.parametrize("cells", TEXT.values(), ids=list(TEXT))
def test_other_text_is_quiet(cells):
    assert notices(COARSE.assign(a=cells)) == []


def test_a_class_that_hardly_a_row_has_gets_a_notice():
    frame = COARSE.assign(ill=["unknown" if row < 2 else "no" if row % 2 else "yes" for row in ROW])
    (text,) = notices(frame, classes=0)
    assert "'unknown': 2" in text
    assert notices(frame, target_kind="classes") == notices(frame, classes=["no", "unknown", "yes"]) == []


def test_a_target_of_many_whole_numbers_gets_a_notice():
    (text,) = notices(SICK.assign(ill=ROW % 15))
    assert "target_kind" in text
