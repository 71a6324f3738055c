"""Columns that name the client: a site's code, its postcode, the height of a weather station."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.table_column import Kind, TableColumn
from equipoise.data.tables.value_hashes import MISSING, mixed, value_hashes
from equipoise.errors import notify

_FEW_VALUES = 10.0  # of a client, on average, at most
_FEWEST_ROWS = 100  # of a table that is judged
_FIRST_CLIENTS, _FIRST_ROWS = 20, 50_000  # that are looked at before all rows are


@dataclass(frozen=True, eq=False)
class ClientNameCheck:
    """Looks whether the values of a column name the client: each occurs in one client only, and clients have few of them.

    A client has ten values at most, on average, each value is in two rows or more, on average, and at least half of the rows
    have one. Continuous numbers hardly repeat, and values of ordinary categories occur in several clients.
    """

    owners: NDArray[np.int64]  # (N,) the client of each row
    first: NDArray[np.int64]  # rows of a few clients, by which most columns are told to be ordinary

    @classmethod
    def of(cls, owners: NDArray[np.int64]) -> ClientNameCheck | None:
        """The check for a table whose rows belong to these clients; None for one client, or fewer than 100 rows."""
        clients = int(owners.max()) + 1
        if clients < 2 or len(owners) < _FEWEST_ROWS:
            return None
        some = np.linspace(0, clients - 1, min(clients, _FIRST_CLIENTS)).astype(np.int64)
        rows = np.flatnonzero(np.isin(owners, some))
        return cls(owners, rows[np.linspace(0, len(rows) - 1, min(len(rows), _FIRST_ROWS)).astype(np.int64)])

    def tell_of(self, column: TableColumn, kind: Kind) -> None:
        """Give a notice if the values of the column name the client."""
        values = value_hashes(column)
        if self._found(values[self.first], self.owners[self.first], whole=False) is None:
            return
        if (found := self._found(values, self.owners, whole=True)) is None:
            return
        different, clients = found
        every = int(self.owners.max()) + 1
        having = "each client has" if different == clients == every else f"{clients:,} of {every:,} clients have"
        each = f"each of its {different:,} values occurs in one client only, and {having} "
        each += "one" if different == clients else "them"
        say = f"kinds={{{column.name!r}: "
        notify(
            f"{column} names the client: {each}. The model can recognise a client by it, and may learn each client by heart, "
            f"which is no help for new clients. Leave it out: {say}'left out'}}; to use it all the same: {say}{kind!r}}}."
        )

    @staticmethod
    def _found(values: NDArray[np.uint64], owners: NDArray[np.int64], *, whole: bool) -> tuple[int, int] | None:
        """The number of values and of clients that have them, if the values name the client; None if they do not."""
        known = values != MISSING
        if whole and 2 * int(known.sum()) < len(values):
            return None
        held, by = values[known], owners[known]
        different, clients = len(np.unique(held)), len(np.unique(by))
        if different > _FEW_VALUES * clients or len(np.unique(mixed(held) + mixed(by.astype(np.uint64), salt=1))) > different:
            return None
        if whole and (clients < 2 or len(held) < 2 * different):
            return None
        return different, clients
