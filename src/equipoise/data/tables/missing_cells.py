"""Cells of a table that are missing: the refusal of rows without client or target, and a count of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from numpy.typing import NDArray

from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.table_column import TableColumn
from equipoise.errors import InvalidData


def refuse_missing(*cells: tuple[TableColumn, str, NDArray[Any]]) -> None:
    """Refuse missing cells of columns, in one message: each column with its role and where (N,) its cells are missing."""
    found = [each for each in cells if each[2].any()]
    if not found:
        return
    told, rows, kept = [], 0, []
    absent: list[str] = []
    for column, role, missing in found:
        count = int(missing.sum())
        rows += count
        what = f"{str(column).removeprefix(prefix(column.source))}, the {role}, is missing in {column.place(missing)}"
        told.append(what + (f" and {count - 1} more" if count > 1 else ""))
        if column.is_text and not column.values.null_count:
            kept.append(f"frame[frame[{column.name!r}].str.strip() != '']")
        else:
            absent.append(column.name)
    ways = [f"frame.dropna(subset={absent})", *kept] if absent else kept
    drop = "Drop these rows" if rows > 1 else "Drop this row"
    text = f"{prefix(found[0][0].source)}{', and '.join(told)}. {drop}: {' and '.join(ways)} in pandas, or in the file."
    raise InvalidData(f"{text} Or name the client there." if any(role == "client" for _, role, _ in found) else text)


_counts: ContextVar[dict[str, tuple[int, int]] | None] = ContextVar("counts of missing cells", default=None)


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
