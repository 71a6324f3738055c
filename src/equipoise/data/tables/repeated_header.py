"""A header that stands among the rows of a table, as in files that were joined line by line."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.row_places import RowPlaces
from equipoise.errors import InvalidData


def refuse_repeated_header(pieces: Iterable[Any], client: str, source: str, places: RowPlaces) -> None:
    """Refuse a row whose cells are the names of their columns, but for capitals and spaces at their ends.

    `pieces` are Arrow tables or record batches, one after the other. A header among the rows makes every column text, so that
    a table with a column of another type is not looked at.
    """
    from pyarrow import compute
    from pyarrow.types import is_large_string, is_string

    before = 0
    for piece in pieces:
        if not all(is_string(each) or is_large_string(each) for each in piece.schema.types):
            return

        def repeats(name: str, piece: Any = piece) -> Any:
            plain = compute.utf8_lower(compute.utf8_trim_whitespace(piece.column(name)))
            return compute.fill_null(compute.equal(plain, name.strip().lower()), not name.strip())

        found = repeats(client)
        if compute.any(found).as_py():
            found = reduce(compute.and_, (repeats(name) for name in piece.schema.names), found)
            row = compute.index(found, True).as_py()
            if row >= 0:
                cure = "Delete it. Two files that were joined line by line have their header twice."
                raise InvalidData(f"{prefix(source)}{places.words(before + row)} repeats the header. {cure}")
        before += piece.num_rows
