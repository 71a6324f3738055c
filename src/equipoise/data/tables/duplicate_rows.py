"""Rows that are there several times: a file that was exported twice, a join that multiplied rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.data.clients.client_set import prefix
from equipoise.data.clients.splits import How
from equipoise.data.tables.csv_reading import places_of
from equipoise.data.tables.table_column import TableColumn
from equipoise.data.tables.value_hashes import mixed, value_hashes
from equipoise.errors import notify

_FEWEST = 5  # copies that are spoken of
_MANY_VALUES = 30  # of a column by which rows can be told apart
_MOSTLY = 0.75  # of the pairs of rows that agree in a part of the columns agree in all of them if they are copies
_NOT_BY_CHANCE = 20.0  # times as often as any two rows agree in a column, copies do if all else is equal
_COMMON = 20  # rows that agree are a common case if there are more of them, and tell nothing about copies
_CELLS = 20_000_000  # of the table that are sorted at most


def tell_of_duplicates(
    table: Any, names: Sequence[str], owners: NDArray[np.int64], left_out: Sequence[str], split_by: How, source: str
) -> None:
    """Give a notice if rows of a table are copies of others: equal in the client and in the columns `names`.

    Equal rows of a table with few values in each column are ordinary, and get none: there, many more rows agree in all columns
    but one. Fewer than five copies get none either. `owners` (N,) are the clients as numbers, and `left_out` are columns that
    are not compared.
    """
    columns = {name: _salted(table, name, place, source) for place, name in enumerate(names, start=1)}
    client = mixed(owners.astype(np.uint64))
    rows = client.copy()
    for values in columns.values():
        rows += values
    order = np.argsort(rows, kind="stable")
    again = np.concatenate([[False], np.diff(rows[order]) == 0])  # equal to the row before, which is earlier in the table
    copies = int(again.sum())
    if copies < _FEWEST or not EqualRows.of(rows, order, again).are_copies({"": client, **columns}):
        return
    later = np.sort(order[again])
    first, equal = int(later[0]), int((rows == rows[later[0]]).argmax())
    having, places = len(np.unique(owners[later])), places_of(table)
    compared = "every column" if not left_out else "every column that is used"
    text = (
        f"{prefix(source)}{copies:,} of {len(rows):,} rows equal an earlier row in {compared}, in {having:,} of "
        f"{len(np.unique(owners)):,} clients; the first is {places.words(first)}, equal to row {places.row(equal)}"
    )
    subset = f"subset=frame.columns.difference({list(left_out)!r})" if left_out else ""
    cure = f"If they are copies, drop them, in pandas by frame.drop_duplicates({subset}); if each was observed, keep them."
    sides = "Equal rows count several times in training and in the error of their client"
    if split_by == "examples":
        sides = "Equal rows may be on both sides of the split: the model has then seen test rows, and errors look too low"
    notify(f"{text}. {sides}. {cure}")


def _salted(table: Any, name: str, place: int, source: str) -> NDArray[np.uint64]:
    """The values of a column as numbers that do not equal those of another column."""
    return mixed(value_hashes(TableColumn.of(table, name, source)), salt=place)


@dataclass(frozen=True, eq=False)
class EqualRows:
    """Groups of rows of a table that are equal in all columns."""

    rows: NDArray[np.uint64]  # (N,) the sum of the values of all columns
    first: NDArray[np.int64]  # (G,) the first row of each group of two or more
    size: NDArray[np.int64]  # (G,) how many rows the group has

    @classmethod
    def of(cls, rows: NDArray[np.uint64], order: NDArray[np.int64], again: NDArray[np.bool_]) -> EqualRows:
        """The groups by an order that sorts the rows, in which `again` marks those that equal the row before."""
        begin = np.flatnonzero(~again)
        size = np.diff(np.append(begin, len(rows)))
        return cls(rows, order[begin[size > 1]], size[size > 1])

    def are_copies(self, columns: Mapping[str, NDArray[np.uint64]]) -> bool:
        """Whether the groups are copies, and no coincidence.

        They are if rows that agree in a column of many values mostly agree in all columns; then values of this column hardly
        repeat. They also are if rows that agree in all columns but one agree in this one, too: mostly, or twenty times as often
        as any two rows do, whichever column it is.
        """
        looked_at = list(columns)[: max(2, _CELLS // len(self.rows))]
        counts = {name: _counts(columns[name])[1] for name in looked_at}
        many = [name for name in looked_at if name and len(counts[name]) >= _MANY_VALUES]
        if any(self._hold_together(columns[name]) for name in many):
            return True
        chance = {name: _pairs(counts[name]) / _pairs(np.array([len(self.rows)])) for name in looked_at}
        fewest_first = sorted(looked_at, key=lambda name: chance[name])
        return bool(many) and all(self._hold_together(self.rows - columns[name], chance[name]) for name in fewest_first)

    def _hold_together(self, key: NDArray[np.uint64], chance: float = 1.0) -> bool:
        """Whether rows of the same key (N,) are equal rows mostly, or twenty times as often as by chance.

        Keys that more than twenty rows have are left out of account.
        """
        values, counts = _counts(key)
        rare = counts[np.searchsorted(values, key[self.first])] <= _COMMON
        if int((self.size[rare] - 1).sum()) < _FEWEST:
            return False
        return _pairs(self.size[rare]) >= min(_MOSTLY, _NOT_BY_CHANCE * chance) * _pairs(counts[counts <= _COMMON])


def _counts(key: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The different values in order, and how often each is there."""
    ordered = np.sort(key)  # np.unique hashes, which takes longer
    begin = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return ordered[begin], np.diff(np.append(begin, len(ordered)))


def _pairs(sizes: NDArray[np.int64]) -> float:
    """How many pairs of rows there are in groups of these sizes."""
    return float((sizes.astype(np.float64) * (sizes - 1)).sum()) / 2
