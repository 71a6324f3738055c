"""What a client keeps between rounds, on its node: in Flower's state of the run, and in a folder if the owner names one.

Two rows are kept: that of the last round which the client took part in, and the one before, so that a server that goes on from
a checkpoint, or tries a round again, finds the row that it knows of.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from equipoise.core.files import write_atomically
from equipoise.core.tensor_files import DamagedFile, read_tensor_file, tensor_file_bytes
from equipoise.engines.flower.transport.messages import FLOATS, BadMessage, array_to_tensor, tensor_to_array

RECORD, OF_SOLVER = "equipoise.own", "equipoise.solver"  # of the client's own model, and of its solver


class KeptRows:
    """The rows of one client in one run; a row is known by 1 + the round that it comes from."""

    def __init__(self, state: RecordDict, run: str, client: str, folder: Path | None = None, record: str = RECORD) -> None:
        self.state, self.run, self.record = state, run, record
        kind = "" if record == RECORD else f" {record}"
        name = hashlib.blake2b(f"{run} {client}{kind}".encode(), digest_size=12).hexdigest()
        self.file = folder / f"{name}.safetensors" if folder is not None else None

    def read(self, since: int, width: int) -> Tensor | None:
        """The row (width,) as it was after the round since − 1; None if this node has it no more."""
        if (array := self._held().get(self._key(since))) is None:
            row = self._saved().get(str(since))
            return row if row is not None and row.shape == (width,) else None
        try:
            return array_to_tensor(array, "row", FLOATS[array.dtype], (width,))
        except (BadMessage, KeyError):
            return None

    def write(self, since: int, after: int, row: Tensor) -> None:
        """Keep the row of a round beside the one that it was made of; drop all others."""
        before = {key: array for key, array in self._held().items() if key == self._key(since)}
        self.state[self.record] = ArrayRecord({**before, self._key(after): tensor_to_array(row)})
        if self.file is not None:
            rows = {key: kept for key, kept in self._saved().items() if key == str(since)}
            rows[str(after)] = row
            write_atomically(self.file, tensor_file_bytes(rows, kind="rows"))

    def _held(self) -> dict[str, Array]:
        """The rows in Flower's state."""
        return dict(self.state.array_records.get(self.record, {}))

    def _key(self, since: int) -> str:
        return f"{self.run} {since}"

    def _saved(self) -> dict[str, Tensor]:
        """The rows in the file of the owner's folder; none where it is damaged."""
        try:
            return read_tensor_file(self.file).tensors if self.file is not None else {}
        except (DamagedFile, OSError):
            return {}
