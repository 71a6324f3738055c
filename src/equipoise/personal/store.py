"""What clients keep between rounds: one row of numbers each, in a file that is mapped into memory.

Only the rows in use are in memory, so that ten thousand clients with large models need no more of it than a cohort. Each client
has two places in the file. The one that the last checkpoint knows is never written to: a run that is killed between two
checkpoints and resumed finds every row as it was at the checkpoint. Places that were never written take no room on most disks.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import EquipoiseError, NotWritten


class ClientRows:
    """Rows (n, width) of n clients in a `.npy` file of shape (2, n, width); without a path, in a temporary file.

    `places` (n,) says where the row of each client is: 0 nowhere (it has `first`, what all clients begin with), 1 or 2. It
    belongs to the state of a run and to its checkpoints; this object holds the file and which places are saved.
    """

    def __init__(self, first: Tensor, clients: int, path: Path | None = None, *, places: Tensor | None = None) -> None:
        self.first = first.detach().cpu()
        self.saved = torch.zeros(clients, dtype=torch.uint8) if places is None else places.clone()
        self.path = path if path is not None else self._temporary_file()
        kind = np.dtype(np.float64 if first.dtype == torch.float64 else np.float32)
        shape = (2, clients, len(first))
        try:
            if places is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.unlink(missing_ok=True)  # an earlier run's models may still be looked at
                self._file = np.lib.format.open_memmap(self.path, mode="w+", dtype=kind, shape=shape)
            else:
                self._file = np.lib.format.open_memmap(self.path, mode="r+")
        except (OSError, ValueError) as failure:
            raise NotWritten(f"The models of clients cannot be kept in {self.path}: {failure}.") from failure
        if self._file.shape != shape or self._file.dtype != kind:
            raise EquipoiseError(f"{self.path} holds rows of shape {self._file.shape}, and this run needs {shape}. Start anew.")

    def _temporary_file(self) -> Path:
        """A file in a new folder that is removed with this object. (TemporaryDirectory would warn when that happens.)"""
        folder = tempfile.mkdtemp(prefix="equipoise-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "rows.npy"

    def read(self, places: Tensor, clients: Tensor) -> Tensor:
        """The rows (K, width) of the clients at positions (K,)."""
        rows = self.first.expand(len(clients), -1).clone()
        at = places[clients].long()
        here = at.nonzero().flatten()
        if len(here):
            rows[here] = torch.from_numpy(self._file[(at[here] - 1).numpy(), clients[here].cpu().numpy()]).to(rows.dtype)
        return rows

    def write(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """Write rows (K, width) of the clients at positions (K,); the places afterwards. Saved places stay as they are."""
        after = places.clone()
        values = rows.detach().cpu().to(torch.float64 if self._file.dtype == np.float64 else torch.float32).numpy()
        for value, k in zip(values, clients.tolist(), strict=True):
            now, saved = int(places[k]), int(self.saved[k])
            place = now if now and now != saved else (2 if saved == 1 else 1)
            self._file[place - 1, k] = value
            after[k] = place
        return after

    def flush(self) -> None:
        """Bring to the disk what was written; called before a checkpoint that refers to it is."""
        self._file.flush()

    def on_saved(self, places: Tensor) -> None:
        """A checkpoint with these places is on the disk: they are not written to until the next one is."""
        self.saved = places.clone()
