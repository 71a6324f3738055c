"""What clients keep for their solver between rounds, such as Adam's moments: one row each, in a file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.personal.store import ClientRows, PendingRows
from equipoise.types import Cohort, LocalWork


class SolverRows:
    """The rows of a run's clients; the file is opened when the run begins or goes on. Every client begins with zeros.

    The state that a round hands to the next are the `places` (n,) of the rows in the file (see personal.store).
    """

    def __init__(self, width: int, clients: int, dtype: torch.dtype) -> None:
        self.first, self.clients = torch.zeros(width, dtype=torch.promote_types(dtype, torch.float32)), clients
        self._rows: ClientRows | None = None

    @property
    def bytes(self) -> int:
        """What the rows of all clients take on the disk, at most: two places for each."""
        return 2 * self.clients * self.first.nbytes

    def begin(self, path: Path | None = None) -> Tensor:
        """The places before the first round; rows go to a new file at `path`, or a temporary one."""
        self._rows = ClientRows(self.first, self.clients, path)
        return torch.zeros(self.clients, dtype=torch.uint8)

    def resume(self, places: Tensor, path: Path | None) -> None:
        """Open the rows of a run that goes on from a checkpoint."""
        self._rows = ClientRows(self.first, self.clients, path, places=places)

    @property
    def file(self) -> ClientRows:
        """The open file."""
        if self._rows is None:
            raise EquipoiseError("The run has not begun: it has no rows of clients yet.")
        return self._rows

    def read(self, places: Tensor, clients: Tensor) -> Tensor:
        """The rows (K, width) of the clients at positions (K,)."""
        return self.file.read(places, clients)

    def given(self, places: Tensor, clients: Tensor) -> Tensor:
        """What the engine is told of the rows of clients at positions (K,): the rows themselves, (K, width)."""
        return self.read(places, clients)

    def change(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """By what the rows of clients at positions (K,) have changed, (K, width), if they are `rows` now."""
        before = self.read(places, clients)
        return rows.to(before.dtype) - before

    def after(self, places: Tensor, workers: Cohort, work: LocalWork) -> PendingRows | Tensor:
        """The rows after a round's work, not yet written. That of a client whose update could not be used stays as it was."""
        if work.rows is None:
            return places
        arrived = torch.from_numpy(work.arrived)
        return PendingRows(places, workers.clients[arrived], work.rows[arrived])

    def write(self, pending: PendingRows | Tensor) -> Tensor:
        """Write the rows of a round that is finished: the places after it."""
        if isinstance(pending, Tensor):
            return pending
        return self.file.write(pending.places, pending.clients, pending.rows)

    def flush(self) -> None:
        """Write the rows to disk, before a checkpoint is written."""
        self.file.flush()

    def on_saved(self, places: Tensor) -> None:
        """A checkpoint with these places was written: rows that only older ones need may be written over."""
        self.file.on_saved(places)
