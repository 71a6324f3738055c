"""Columns of whole numbers that look like identifiers of rows: receipts, patients, keys of a database."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.table_column import TableColumn
from equipoise.errors import notify

_MANY_ROWS = 50  # of a table in which whole numbers that never repeat are odd
_DIFFERENT = 0.98  # of the rows, at least, have a number of their own, or are missing
_YEARS, _AGES = (1500, 2200), (2, 120)  # whole numbers that may be years or ages, however few repeat


def tell_of_identifier(column: TableColumn) -> None:
    """Give a notice for a column that looks like identifiers of rows, from which nothing can be learned.

    It holds integers in 50 rows or more, hardly any of them twice, spread evenly between the smallest and the largest, as row
    numbers and random keys are. Counts and amounts gather at some size, or repeat. Numbers that may be years or ages are none.
    """
    count = len(column.values)
    different = column.whole_numbers(np.arange(count)) if count >= _MANY_ROWS else 0
    if different < _MANY_ROWS or different < _DIFFERENT * count:
        return
    values = column.numbers()
    known = np.sort(values[~np.isnan(values)])
    low, high = known[0], known[-1]
    if any(least <= low and high <= most for least, most in (_YEARS, _AGES)) or not _is_even(known):
        return
    each = "one for each row" if different == count else f"in {count} rows"
    text = f"{column} holds {different} different whole numbers from {low:.0f} to {high:.0f}, {each}"
    cure = f"If it is an identifier, leave it out: kinds={{{column.name!r}: 'left out'}}; else kinds={{{column.name!r}:"
    notify(f"{text}. It is used as a number. {cure} 'number'}}.")


def _is_even(ordered: NDArray[np.float64]) -> bool:
    """Whether numbers in order are spread about evenly between the smallest and the largest.

    The largest distance D of their distribution function from the uniform one is at most 0.1, or 1.63/√n if that is more (the
    test of Kolmogorov and Smirnov at one percent). Their variance is at least 0.8 of the uniform one, (b − a)²/12, or 3
    standard errors √(0.8/n) below it if that is less.
    """
    count, spread = len(ordered), ordered[-1] - ordered[0]
    if not 0 < spread < np.inf:  # float64 cannot tell them apart
        return False
    places = (ordered - ordered[0]) / spread
    distance = np.abs(places - np.arange(count) / (count - 1)).max()
    far, narrow = max(0.1, 1.63 / np.sqrt(count)), min(0.8, 1 - 3 * np.sqrt(0.8 / count))
    return bool(distance <= far and 12 * places.var() >= narrow)
