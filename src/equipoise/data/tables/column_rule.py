"""The rule of one input column of a table: which numbers or codes its values become, fitted on training rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.column_kinds import numbers_of_kind
from equipoise.data.tables.table_column import Kind, TableColumn, shown_names, sorted_names
from equipoise.errors import InvalidData, notify, require

_CALENDAR = 700_000  # days from 1970 that Python's dates hold in either direction
OTHER, MISSING = 0, 1  # codes of an embedded column; its categories follow

AS_ASKED = "as asked"  # the note of a column that the user leaves out

Becomes = Literal["scaled", "one-hot", "codes", "left out"]


@dataclass(frozen=True)
class ColumnRule:
    """How one column is encoded.

    A number or date x becomes (x − mean) / deviation, a boolean 0 or 1; missing ones are taken for the median. Categories
    become one number each ("one-hot"), or one integer code in all ("codes"). `indicator` adds a number that is 1 where the
    value is missing.
    """

    name: str  # of the column
    kind: Kind  # what its values are
    becomes: Becomes  # how they are encoded
    mean: float = 0.0  # over training rows
    deviation: float = 1.0  # over training rows; 0: the column was constant in training, and becomes 0
    median: float = 0.0  # stands for missing numbers
    indicator: bool = False  # whether a further number says which values are missing
    categories: tuple[str, ...] = ()  # in the order of their numbers or codes
    note: str = ""  # why it is left out

    def __post_init__(self) -> None:
        numbers = (self.mean, self.deviation, self.median)
        require(bool(np.isfinite(numbers).all()), f"column {self.name!r}", "must have finite mean, deviation, median", numbers)
        require(self.deviation >= 0, f"column {self.name!r}", "must have a deviation ≥ 0", self.deviation)
        once = len(set(self.categories)) == len(self.categories)
        require(once, f"column {self.name!r}", "must name each category once", self.categories)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the numbers that the column becomes."""
        if self.becomes not in ("scaled", "one-hot"):
            return ()
        values = (self.name,) if self.becomes == "scaled" else tuple(f"{self.name}={each}" for each in self.categories)
        return (*values, f"{self.name} missing") if self.indicator else values

    @property
    def codes(self) -> int:
        """The number of codes of a column that becomes codes: its categories, "other" and "missing"."""
        return len(self.categories) + 2

    @classmethod
    def fit(cls, column: TableColumn, kind: Kind, rows: NDArray[np.int64], one_hot: int) -> ColumnRule:
        """The rule for a column by its values in the training rows; `one_hot` is the most categories that become one-hot."""
        if kind == "category":
            codes, names = column.names()
            seen = np.unique(codes[rows])
            categories = sorted_names([names[code] for code in seen if code >= 0])
            gaps = bool((seen < 0).any())
            if len(categories) + gaps < 2:
                return cls(column.name, kind, "left out", note="one value among training clients")
            few = len(categories) <= one_hot
            return cls(column.name, kind, "one-hot" if few else "codes", categories=categories, indicator=few and gaps)
        values = numbers_of_kind(column, kind)[rows]
        known = values[~np.isnan(values)]
        gaps = len(known) < len(values)
        if not len(known):
            return cls(column.name, kind, "left out", note="all missing among training clients")
        with np.errstate(over="ignore"):
            spread = known.max() - known.min()
        constant = spread <= 8 * np.finfo(np.float64).eps * np.abs(known).max()  # up to rounding
        note = "one value among training clients"
        if constant and (spread > 0 or column.whole_numbers(rows) > 1):
            note = "one value up to the rounding of float64 among training clients"
            text = f"{column} holds {note}, around {known[0]:.17g}, and tells no example from another"
            notify(f"{text}. Subtract a constant from it first, or leave it out.")
        if constant and not gaps:
            return cls(column.name, kind, "left out", note=note)
        median = float(np.median(known))
        if kind == "boolean":
            return cls(column.name, kind, "scaled", median=float(median >= 0.5), indicator=gaps)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(known.mean()), float(known.std())
        if not np.isfinite([mean, deviation]).all():
            raise InvalidData(
                f"{column} holds numbers as large as {np.abs(known).max():g}. Take their logarithm, or repair them."
            )
        if deviation < 1e-140:  # whose square underflows
            deviation = float(spread * (known / spread).std()) if spread > 0 else 0.0
        return cls(column.name, kind, "scaled", mean, 0.0 if constant else deviation, median, gaps)

    def columns_of(self, column: TableColumn) -> tuple[list[NDArray[np.float32]], set[str]]:
        """The numbers (N,) that the values become, one array per feature, and the categories that training did not have."""
        if self.becomes == "one-hot":
            codes, unseen = self.codes_of(column)
            hot = [codes == MISSING + 1 + k for k in range(len(self.categories))]
            return [each.astype(np.float32) for each in (*hot, *([codes == MISSING] if self.indicator else []))], unseen
        values = numbers_of_kind(column, self.kind)
        gaps = np.isnan(values)
        if self.kind == "date":
            self._refuse_mix(column, values[~gaps])
        filled = np.where(gaps, self.median, values)
        with np.errstate(over="ignore"):
            scaled = ((filled - self.mean) / self.deviation if self.deviation else filled * 0).astype(np.float32)
        if (far := ~np.isfinite(scaled)).any():
            found = f"{column.place(far)} holds {values[far][0]:g}"
            raise InvalidData(f"{column}, {found}, too far from the mean {self.mean:g} of training. Repair it.")
        return ([scaled, gaps.astype(np.float32)] if self.indicator else [scaled]), set()

    def _refuse_mix(self, column: TableColumn, days: NDArray[np.float64]) -> None:
        """Refuse times of day where training had dates, and dates where it had times of day, which as days lie in [0, 1)."""
        times = 0 <= self.median < 1
        if times and not ((days >= 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds dates, but training had times of day. Repair it.")
        if not times and len(days) and ((days > 0) & (days < 1)).all():
            raise InvalidData(f"{column} holds times of day, but training had dates. Write dates as 2026-11-16.")

    def codes_of(self, column: TableColumn) -> tuple[NDArray[np.int64], set[str]]:
        """The codes (N,) of the values, and the categories that training did not have.

        Code 0 stands for these, 1 for a missing value, and the categories of training follow.
        """
        places, names = column.names()
        known = {name: code for code, name in enumerate(self.categories, MISSING + 1)}
        return np.array([MISSING, *(known.get(name, OTHER) for name in names)])[places + 1], set(names).difference(known)

    @property
    def _is_day(self) -> bool:
        """Whether values are days since 1970-01-01 that a calendar has; times of day lie in [0, 1)."""
        return self.kind == "date" and not 0 <= self.median < 1 and abs(self.mean) < _CALENDAR and abs(self.median) < _CALENDAR

    def _shown(self, value: float) -> str:
        """A number of the column as text; a date as people write it."""
        return f"{date(1970, 1, 1) + timedelta(days=value)}" if self._is_day else f"{value:g}"

    def describe(self) -> tuple[str, str, str, str]:
        """The rule in four texts: the column's name, its kind, what it becomes, and the numbers of training that it goes by."""
        if self.becomes == "left out":
            return self.name, "–" if self.note == AS_ASKED else self.kind, "left out", self.note  # nobody looked at its values
        listed = shown_names([repr(each) if each in ("missing", "other") else each for each in self.categories])
        if self.becomes == "codes":
            return self.name, self.kind, f"codes 0 … {self.codes - 1}", f"0 other, 1 missing, {listed}"
        count = len(self.features)
        becomes = f"{count} number{'s' if count > 1 else ''}"
        if self.becomes == "one-hot":
            return self.name, self.kind, becomes, listed + (", missing" if self.indicator else "; missing: all 0")
        filled = f"missing: {self._shown(self.median)}" + (" and an indicator" if self.indicator else "")
        days = " days" if self._is_day else ""
        scale = "" if self.kind == "boolean" else f"mean {self._shown(self.mean)}, deviation {self.deviation:g}{days}; "
        return self.name, self.kind, becomes, scale + filled
