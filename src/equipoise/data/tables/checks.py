"""Checks of tables that matter to the model that comes out; what is only odd is not looked at.

Types that are wrong, missing cells, columns that name the client, rows and answers that leak, and classes or categories that
are rare or new. Each is one notice or refusal with the column and its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.column import Kind, TableColumn, number_of_text, shown_names, sorted_names
from equipoise.errors import InvalidData, notify

_ODD_SHARE = 0.8  # of cells of text that are numbers, from which on a column should be one
_NUMBER_OR_DATE = re.compile(r"[-+−$€£ ]*\d[\d.,' :/T-]*[%$€£]?|\d+[ -][A-Za-z]{3,9}[ -]\d{4}")
_FEWEST_ROWS = 100  # of a table whose columns are compared with clients
_PER_CLIENT = 10  # values of a client, on average at most, that may name it
_FEWEST_ANSWERS, _MOST_ANSWERS = 200, 20_000  # training rows in which an answer that leaks is looked for
_BINS, _MOST_CLASSES = 64, 50
_LEFT, _TRIVIAL, _EXPLAINED = 0.1, 0.05, 0.999  # share of the trivial error, the least trivial error, share of the variance
_FEWEST_COPIES, _MANY_VALUES, _NOT_BY_CHANCE = 5, 30, 20.0
_RARE_ROWS, _RARE_SHARE = 10, 0.005  # a class with fewer than both gets a notice
_counts: ContextVar[dict[str, tuple[int, int]] | None] = ContextVar("counts of missing cells", default=None)


def tell_of_numbers_as_text(column: TableColumn, codes: NDArray[np.int64], names: Sequence[str], option: str) -> None:
    """Give a notice of text that is nearly all numbers or dates: it would be categories.

    `codes` and `names` are `column.names()`. Up to sixteen different numbers are ordinary categories.
    """
    fits = np.array([_NUMBER_OR_DATE.fullmatch(name.strip()) is not None for name in names], dtype=bool)
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    share = float(counts[fits].sum() / max(counts.sum(), 1))
    few = len(names) <= 16 and all(_is_number(name, column.reading or {}) for name in names)
    if few or not fits.any() or max(share, fits.mean()) < _ODD_SHARE:
        return
    other = next((f", {column.place(codes == k)} {names[k]!r}" for k in np.flatnonzero(~fits).tolist()), "")
    notify(
        f"{column} is read as text, but {share:.0%} of its cells look like numbers or dates{other}. Repair the others, name "
        f"how they are written (missing, decimal, thousands, date_format of data.csv), or say what they are: {option}."
    )


def _is_number(text: str, reading: Mapping[str, Any]) -> bool:
    try:
        return bool(np.isfinite(number_of_text(text, reading)))
    except ValueError:
        return False


def refuse_missing(*cells: tuple[TableColumn, str, NDArray[Any]]) -> None:
    """Refuse missing cells of columns, in one message: each column with its role and where (N,) its cells are missing."""
    found = [each for each in cells if each[2].any()]
    if found:
        told = "; ".join(
            f"column {column.name!r}, the {role}, is missing: {missing.sum()} rows, first {column.place(missing)}"
            for column, role, missing in found
        )
        names = [column.name for column, _, _ in found]
        raise InvalidData(f"{prefix(found[0][0].source)}{told}. Drop these rows, in pandas: frame.dropna(subset={names}).")


@contextmanager
def counting_missing() -> Iterator[dict[str, tuple[int, int]]]:
    """Count, by column, the missing cells and all cells of the tables that a schema reads meanwhile.

    Missing cells are filled in, so that inputs do not show them.
    """
    counts: dict[str, tuple[int, int]] = {}
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def count_missing(column: TableColumn) -> None:
    """Count the missing cells of a column, where somebody asks for it."""
    if (counts := _counts.get()) is not None:
        missing, (gaps, cells) = column.missing(), counts.get(column.name, (0, 0))
        counts[column.name] = gaps + int(missing.sum()), cells + len(missing)


def tell_of_client_name(column: TableColumn, owners: NDArray[np.int64]) -> None:
    """Give a notice if each value of a column is of one client (N,) only, and clients have few: it names the client.

    Continuous numbers hardly repeat, and values of ordinary categories occur in several clients.
    """
    if len(owners) < _FEWEST_ROWS:
        return
    some = owners < 20  # most columns are told to be ordinary by a few clients
    for rows in (some, np.ones(len(owners), dtype=bool)):
        codes = replace(column, values=column.values.filter(rows)).codes()
        known, by = codes[codes >= 0], owners[rows][codes >= 0]
        different, clients = len(np.unique(known)), len(np.unique(by))
        pairs = len(np.unique(known * (int(owners.max()) + 1) + by))
        if pairs > different or different > _PER_CLIENT * clients:
            return
    if clients > 1 and 2 * len(known) >= len(owners) and len(known) >= 2 * different:
        notify(
            f"{column} names the client: each of its {different} values occurs in one client only. The model may learn "
            f"each client by heart; leave it out: kinds={{{column.name!r}: 'left out'}}."
        )


@dataclass(frozen=True, eq=False)
class AnswerCheck:
    """Looks whether one column alone predicts the target: fitted on every second of the training rows, tried on the others."""

    target: str
    rows: NDArray[np.int64]  # of the table, training rows alone
    answers: NDArray[np.float64]  # (N,) the numbers of classes, or the numbers to predict
    classes: int  # 0: a number

    @classmethod
    def of(cls, target: TableColumn, kind: str, rows: NDArray[np.int64]) -> AnswerCheck | None:
        """The check for a target of classes or of numbers; None where there are too few rows or too many classes."""
        if len(rows) < _FEWEST_ANSWERS:
            return None
        sample = rows[np.linspace(0, len(rows) - 1, min(_MOST_ANSWERS, len(rows))).astype(np.int64)]
        taken = replace(target, values=target.values.take(sample))
        if kind == "number":
            dates = taken.as_dates()
            return cls(target.name, sample, dates.numbers_of_kind("date" if dates.type_kind == "date" else "number"), 0)
        codes, names = taken.names()
        return cls(target.name, sample, codes.astype(np.float64), len(names)) if 1 < len(names) <= _MOST_CLASSES else None

    def tell_of(self, column: TableColumn, kind: Kind) -> None:
        """Give a notice if the column alone leaves at most a tenth of the error, or explains 99.9 % of the variance."""
        taken = replace(column, values=column.values.take(self.rows))
        numbers = None if kind == "category" else taken.numbers_of_kind(kind)
        if numbers is None:
            groups = taken.names()[0] + 1
        else:
            known = np.unique(numbers[::2][~np.isnan(numbers[::2])])
            edges = known if len(known) <= _BINS else np.quantile(known, np.linspace(0, 1, _BINS + 1))
            groups = np.where(np.isnan(numbers), 0, np.searchsorted(edges, numbers) + 1)
        if self._left(groups) <= _LEFT if self.classes else self._explained(groups, numbers) >= _EXPLAINED:
            notify(
                f"{column} alone tells the target {self.target!r} almost without fail. If it is known only after the answer, "
                f"leave it out: kinds={{{column.name!r}: 'left out'}}."
            )

    def _left(self, groups: NDArray[np.int64]) -> float:
        """The error of the most frequent class of each group, as a share of that of the most frequent class."""
        fit, tried, y = slice(0, None, 2), slice(1, None, 2), self.answers.astype(np.int64)
        if (groups.max() + 1) * self.classes > _MOST_ANSWERS * _MOST_CLASSES:
            return 1.0
        usual = np.bincount(y[fit], minlength=self.classes).argmax()
        counts = np.zeros((groups.max() + 1, self.classes), dtype=np.int64)
        np.add.at(counts, (groups[fit], y[fit]), 1)
        answer = np.where(counts.any(1), counts.argmax(1), usual)
        trivial = float((y[tried] != usual).mean())
        return 1.0 if trivial < _TRIVIAL else float((answer[groups[tried]] != y[tried]).mean()) / trivial

    def _explained(self, groups: NDArray[np.int64], numbers: NDArray[np.float64] | None) -> float:
        """The share of the variance that a straight line, or the mean of each group, explains."""
        fit, tried, y = slice(0, None, 2), slice(1, None, 2), self.answers
        if numbers is not None:
            known = ~np.isnan(numbers)
            x, z = numbers[known], y[known]
            varied = 2 * known.sum() > len(y) and np.ptp(x) > 0 and np.ptp(z) > 0
            return float(np.corrcoef(x / np.abs(x).max(), z / np.abs(z).max())[0, 1] ** 2) if varied else 0.0
        count = np.bincount(groups[fit], minlength=groups.max() + 1)
        total = np.bincount(groups[fit], weights=y[fit], minlength=groups.max() + 1)
        predicted = np.where(count > 0, total / np.maximum(count, 1), y[fit].mean())[groups]
        spread = float(y[tried].var())
        return 1 - float(((predicted - y)[tried] ** 2).mean()) / spread if spread else 0.0


def tell_of_copies(table: Any, names: Sequence[str], owners: NDArray[np.int64], source: str) -> None:
    """Give a notice if rows equal an earlier row in their client (N,) and in all columns `names`, more often than by chance.

    Equal rows of a table with few values in each column are ordinary, and so are fewer than five.
    """
    every = len(owners) * (len(owners) - 1) / 2
    rows, chance, most = np.zeros(len(owners), dtype=np.uint64), 1.0, 0
    seen: set[tuple[int, float]] = set()
    for place, name in enumerate(["", *names]):
        codes = TableColumn.of(table, name, source).codes() if place else owners
        counts = np.bincount(codes + 1)
        agree = float((counts * (counts - 1.0)).sum()) / 2 / every
        if (int((counts > 0).sum()), agree) not in seen:  # one name for each number adds nothing
            chance *= agree
        seen.add((int((counts > 0).sum()), agree))
        most = max(most, int((counts > 0).sum()) if place else 0)
        rows += _mixed(codes.astype(np.uint64), place)
    _, first, group, counts = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
    copies, pairs = len(rows) - len(counts), float((counts * (counts - 1.0)).sum()) / 2
    if copies < _FEWEST_COPIES or most < _MANY_VALUES or pairs <= _NOT_BY_CHANCE * chance * every:
        return
    later = int(np.flatnonzero(first[group] != np.arange(len(rows)))[0])
    column = TableColumn.of(table, names[0], source)
    notify(
        f"{prefix(source)}rows that equal an earlier row: {copies} of {len(rows)}, e.g. row {column.row(later)} and row "
        f"{column.row(int(first[group[later]]))}. A split may put them on both sides; drop them unless each was observed, in "
        "pandas: frame.drop_duplicates()."
    )


def _mixed(bits: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Numbers (N,) with their bits mixed: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), another one for each salt."""
    z = bits + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def tell_of_rare_classes(target: str, classes: Sequence[str], codes: Any, source: str) -> None:
    """Give a notice of classes that hardly a row has, by the classes (N,) of all rows: such a class may be a mistake."""
    counts = np.bincount(codes, minlength=len(classes))
    rare = [f"{name!r}: {n}" for name, n in zip(classes, counts, strict=True) if n < min(_RARE_ROWS, _RARE_SHARE * len(codes))]
    if rare:
        text = f"{prefix(source)}column {target!r}, the target, has rare classes in {len(codes)} rows: {shown_names(rare)}"
        notify(f"{text}. Repair or drop these rows, or accept the classes: target_kind='classes'.")


def tell_of_unseen(unseen: Mapping[str, set[str]], source: str) -> None:
    """A notice for each column with categories that training did not have, which names them."""
    for name, categories in unseen.items():
        listed = shown_names([repr(each) for each in sorted_names(list(categories))])
        cure = "The model takes them for unknown; repair them, or train on rows that have them."
        notify(f"{prefix(source)}column {name!r} holds categories that training did not have: {listed}. {cure}")
