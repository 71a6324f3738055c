"""What a client keeps between rounds, on its node: in Flower's state of the run, and in a folder if the owner names one.

Two rows are kept: that of the last round which the client took part in, and the one before, so that a server that goes on from
a checkpoint, or tries a round again, finds the row that it knows of.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.files import write_atomically
from equipoise.engines.flower.transport.messages import BadMessage, array_of, tensor_of

if TYPE_CHECKING:
    from flwr.app import RecordDict

RECORD = "equipoise.own"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KeptRows:
    """The rows of one client in one run; a row is known by 1 + the round that it comes from."""

    def __init__(self, state: RecordDict, run: str, client: str, folder: Path | None = None) -> None:
        self.state, self.run = state, run
        name = hashlib.blake2b(f"{run} {client}".encode(), digest_size=12).hexdigest()
        self.file = folder / f"{name}.safetensors" if folder is not None else None

    def read(self, since: int, width: int) -> Tensor | None:
        """The row (width,) as it was after the round since − 1; None if this node has it no more."""
        record = self.state.get(RECORD)
        array = record.get(self._key(since)) if record is not None else None
        if array is not None:
            try:
                return tensor_of(array, "row", _DTYPES[array.dtype], (width,))  # type: ignore[union-attr]
            except (BadMessage, KeyError):
                return None
        return self._from_file(since, width)

    def write(self, since: int, after: int, row: Tensor) -> None:
        """Keep the row of a round beside the one that it was made of; drop all others."""
        from flwr.app import ArrayRecord

        record = self.state.get(RECORD)
        before = record.get(self._key(since)) if record is not None else None
        rows = {self._key(since): before} if before is not None and since != after else {}
        self.state[RECORD] = ArrayRecord({**rows, self._key(after): array_of(row)})
        if self.file is not None:
            self._to_file(since, after, row)

    def _key(self, since: int) -> str:
        return f"{self.run} {since}"

    def _from_file(self, since: int, width: int) -> Tensor | None:
        found = self._saved().get(str(since))
        return found if found is not None and found.shape == (width,) else None

    def _saved(self) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        if self.file is None or not self.file.exists():
            return {}
        try:
            found: dict[str, Tensor] = load(self.file.read_bytes())
        except (SafetensorError, OSError):
            return {}
        return found

    def _to_file(self, since: int, after: int, row: Tensor) -> None:
        from safetensors.torch import save

        if self.file is None:
            return
        rows = {key: value for key, value in self._saved().items() if key == str(since)}
        rows[str(after)] = row.detach().cpu().clone().contiguous()
        write_atomically(self.file, save(rows))
