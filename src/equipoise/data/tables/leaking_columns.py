"""Columns that give the answer away: a receipt of the return beside "returned", a code that is made of the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.column_kinds import numbers_of_kind
from equipoise.data.tables.table_column import Kind, TableColumn
from equipoise.errors import notify

_FEWEST, _MOST = 200, 20_000  # training rows that are looked at
_SHARE = 0.1  # of the trivial error, at most, is left by a column that gives the answer away
_TRIVIAL = 0.05  # the least trivial error beside which that is odd
_EXPLAINED = 0.999  # of the variance of a number
_MOST_CLASSES = 50


@dataclass(frozen=True, eq=False)
class AnswerCheck:
    """Looks whether one column alone predicts the target: fitted on every second of the training rows, tried on the others.

    A category is looked up, a number of a class is split at one threshold, and a number of a number is a straight line. A
    notice names a column that leaves at most a tenth of the error of the most frequent class, or explains 99.9 % of the
    variance. Fewer than 200 training rows, or more than 50 classes, are not looked at.
    """

    target: str
    rows: NDArray[np.int64]  # of the table, training rows alone
    answers: NDArray[np.float64]  # (N,) the numbers of classes, or the numbers to predict
    classes: int  # 0: a number

    @classmethod
    def of(cls, target: TableColumn, kind: str, rows: NDArray[np.int64]) -> AnswerCheck | None:
        """The check for a target of classes or of numbers; None where there are too few rows or too many classes."""
        if len(rows) < _FEWEST:
            return None
        sample = rows[np.linspace(0, len(rows) - 1, min(_MOST, len(rows))).astype(np.int64)]
        taken = replace(target, values=target.values.take(sample))
        if kind == "number":
            dates = taken.as_dates()
            values = numbers_of_kind(dates, "date" if dates.type_kind == "date" else "number")
            return cls(target.name, sample, values, 0)
        codes, names = taken.names()
        return cls(target.name, sample, codes.astype(np.float64), len(names)) if 1 < len(names) <= _MOST_CLASSES else None

    def tell_of(self, column: TableColumn, kind: Kind) -> None:
        """Give a notice if the column alone predicts the target."""
        taken = replace(column, values=column.values.take(self.rows))
        groups: NDArray[np.int64] | None = None
        if kind == "category":
            codes, names = taken.names()
            groups, numbers = codes + 1, codes.astype(np.float64)
            if (len(names) + 1) * max(1, self.classes) > _MOST * _MOST_CLASSES:
                return
        else:
            numbers = numbers_of_kind(taken, kind)
        found = self._classes_told(groups, numbers) if self.classes else self._numbers_told(groups, numbers)
        if found:
            say = f"kinds={{{column.name!r}: "
            cure = f"Is it known only after the answer? Then leave it out: {say}'left out'}}; else {say}{kind!r}}}."
            notify(f"{column} alone tells the target {self.target!r} almost without fail: {found}. {cure}")

    def _classes_told(self, groups: NDArray[np.int64] | None, numbers: NDArray[np.float64]) -> str:
        fit, tried = slice(0, None, 2), slice(1, None, 2)
        y = self.answers.astype(np.int64)
        usual = np.bincount(y[fit], minlength=self.classes).argmax()
        trivial = float((y[tried] != usual).mean())
        if trivial < _TRIVIAL:
            return ""
        if groups is None:  # below the threshold, above it, missing
            groups = np.where(np.isnan(numbers), 2, numbers > self._threshold(numbers[fit], y[fit])).astype(np.int64)
        counts = np.zeros((groups.max() + 1, self.classes), dtype=np.int64)
        np.add.at(counts, (groups[fit], y[fit]), 1)
        answer = np.where(counts.any(1), counts.argmax(1), usual)
        error = float((answer[groups[tried]] != y[tried]).mean())
        told = f"{error:.1%} of rows are wrong, against {trivial:.1%} with the most frequent class"
        return told if error <= _SHARE * trivial else ""

    def _threshold(self, numbers: NDArray[np.float64], y: NDArray[np.int64]) -> float:
        """The threshold with the fewest errors, if the most frequent class on each side is the answer there."""
        known = ~np.isnan(numbers)
        order = np.argsort(numbers[known], kind="stable")
        x, hot = numbers[known][order], np.eye(self.classes, dtype=np.int64)[y[known][order]]
        below = hot.cumsum(0)
        right = below.max(1, initial=0) + (below[-1:] - below).max(1, initial=0)
        ends = np.flatnonzero(np.diff(x))  # where a value is followed by a larger one
        return float((x[best] + x[best + 1]) / 2) if len(ends) and (best := ends[right[ends].argmax()]) >= 0 else np.inf

    def _numbers_told(self, groups: NDArray[np.int64] | None, numbers: NDArray[np.float64]) -> str:
        fit, tried, y = slice(0, None, 2), slice(1, None, 2), self.answers
        spread = float(y[tried].var())
        if spread == 0:
            return ""
        if groups is None:
            known = ~np.isnan(numbers)
            x = (numbers - numbers[known].mean()) / (numbers[known].std() or 1.0) if known.any() else numbers
            both = known & (np.arange(len(y)) % 2 == 0)
            if both.sum() < 2:
                return ""
            slope, level = np.polyfit(x[both], y[both], 1)
            predicted = np.where(known, slope * x + level, y[fit].mean())
        else:
            count = np.bincount(groups[fit], minlength=groups.max() + 1)
            total = np.bincount(groups[fit], weights=y[fit], minlength=groups.max() + 1)
            predicted = np.where(count > 0, total / np.maximum(count, 1), y[fit].mean())[groups]
        explained = 1 - float(((predicted - y)[tried] ** 2).mean()) / spread
        return f"it explains {explained:.2%} of the variance" if explained >= _EXPLAINED else ""
