"""A column that gives the answer away gets a notice, and ordinary columns get none; identifiers are no targets."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import equipoise as eq
from equipoise.errors import EquipoiseNotice, InvalidData

COUNT = 600
DRAW = np.random.default_rng(5)
AGE, NOISE = DRAW.normal(50, 15, COUNT), DRAW.normal(0, 1, COUNT)
ILL = (AGE - 50) / 15 + NOISE > 0.3
RIGHT = DRAW.random(COUNT) > 0.02  # 2 % of the rows are wrong
FRAME = pd.DataFrame(
    {
        "clinic": [f"c{k % 12}" for k in range(COUNT)],
        "age": AGE,
        "ward": DRAW.choice(list("ABCDE"), COUNT),
        "street": [f"street {k % 200}" for k in range(COUNT)],  # many categories, few rows each
        "ill": np.where(ILL, "yes", "no"),
        "cost": 100 * AGE + 300 * NOISE,
    }
)


def load(frame=FRAME, target="ill", **options):
    return eq.data.from_frame(frame, client="clinic", target=target, test=0.25, **options)


LEAKS = {
    "a category": np.where(ILL == RIGHT, "treated", "sent home"),
    "a number": np.where(ILL == RIGHT, 10.0, 1.0) + DRAW.random(COUNT),
    "a flag": ILL == RIGHT,
    "missing values": np.where(ILL == RIGHT, DRAW.random(COUNT), np.nan),
    "a date": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.where(ILL == RIGHT, 100, 0), unit="D"),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=list(LEAKS))
def test_a_column_that_gives_the_class_away(leak):
    frame = FRAME.drop(columns="cost").assign(leak=leak)
    with pytest.warns(EquipoiseNotice, match="column 'leak' alone tells the target 'ill' almost without fail: .*against"):
        load(frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(frame, kinds={"leak": "left out"})


def test_a_column_that_gives_the_number_away():
    frame = FRAME.drop(columns="ill").assign(leak=1.2 * FRAME["cost"] + 20)
    with pytest.warns(EquipoiseNotice, match="column 'leak' alone tells the target 'cost' .* explains 100.00% of the variance"):
        load(frame, "cost")


def test_ordinary_tables_get_no_notice():
    load()
    load(target="cost")
    load(FRAME.assign(late=FRAME["age"].where(NOISE > -1)))
    load(FRAME.assign(rare=np.where(np.arange(COUNT) % 59 == 0, "x", "y")), "rare")  # 98 % are of one class
    table = Path(__file__).parents[2] / "examples" / "adult-by-country.csv"
    eq.data.csv(table, client="country", target="income", test=0.25)


def test_small_tables_are_not_judged():
    load(FRAME.assign(leak=ILL)[:150], kinds={"street": "left out"})


def test_text_that_identifies_rows_is_no_target():
    frame = FRAME.assign(receipt=[f"R-{7 * k}" for k in range(COUNT)])
    with pytest.raises(InvalidData, match=r"the target, holds 600 different texts in 600 rows\. Is it an identifier"):
        load(frame, "receipt")
    with pytest.raises(InvalidData, match="name all: classes="):
        load(frame, "receipt", target_kind="classes")
