"""Which data sets have clients in common: what runs on them reveal about such a client adds up.

Two splits of one table are two data sets with the same clients. A ledger therefore has the marks of the clients of each run,
short hashes of their ids beside the name of the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from equipoise.privacy.ledger import LedgerEntry

if TYPE_CHECKING:
    from torch import Tensor

MOST_MARKS = 256  # data sets that share a twentieth of their clients have a mark in common, but for a chance of 2 · 10⁻⁶


def client_marks(keys: Tensor) -> tuple[str, ...]:
    """The marks of clients by their keys (n,) int64: the smallest keys, so that sets with clients in common share some."""
    return tuple(f"{key & (2**64 - 1):016x}" for key in sorted(set(keys.tolist()))[:MOST_MARKS])


def marks_in(entries: Iterable[LedgerEntry]) -> list[tuple[list[str], set[tuple[str, ...]]]]:
    """The data sets of a ledger, each with the marks of its clients."""
    return [
        ([entry.data], {("client", str(entry.value), mark) for mark in entry.cohort or ()})
        for entry in entries
        if entry.kind == "clients"
    ]


def join_data(marked: Iterable[tuple[Iterable[str], set[tuple[str, ...]]]]) -> dict[str, str]:
    """For data sets that share a mark: one name for all of them, by data set.

    >>> join_data([(["a"], {("x",)}), (["b"], {("x",), ("y",)}), (["c"], {("z",)})])
    {'a': 'a, b', 'b': 'a, b', 'c': 'c'}
    """
    groups: list[tuple[dict[str, None], set[tuple[str, ...]]]] = []
    for names, marks in marked:
        ids = dict.fromkeys(names)
        together = [group for group in groups if group[1] & marks or group[0].keys() & ids.keys()]
        groups = [group for group in groups if group not in together]
        whole = dict.fromkeys([*(name for group in together for name in group[0]), *ids])
        groups.append((whole, marks.union(*(group[1] for group in together))))
    return {name: ", ".join(names) for names, _ in groups for name in names}
