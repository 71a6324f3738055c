"""What clients keep between rounds: one row of numbers each, in a file that is mapped into memory.

Only the rows in use are in memory, so that ten thousand clients with large models need no more of it than a cohort. Each client
has two places in the file. The one that the last checkpoint knows is never written to: a run that is killed between two
checkpoints and resumed finds every row as it was at the checkpoint. Places that were never written take no room on most disks.
Behind the rows the file has a checksum of each (CRC-32): a row that is not what was written is refused.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import DurableFile, make_folder, remove, sync_folder
from equipoise.core.numbers import DAMAGED_ARRAY
from equipoise.core.plain_text import open_plain
from equipoise.errors import EquipoiseError, NotWritten

_CHECKSUM = np.dtype("<u4")


def _described(path: Path) -> tuple[tuple[tuple[int, ...], bool, np.dtype[Any]], int]:
    """Shape, order and type of the array in an `.npy` file, and where its numbers begin."""
    with open_plain(path) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it is no array of version 1")
        return np.lib.format.read_array_header_1_0(file), file.tell()


class PendingRows(NamedTuple):
    """Rows of clients that a finished round writes: where all rows were before it, whose they are, and the rows."""

    places: Tensor  # (n,) uint8
    clients: Tensor  # (K,) positions
    rows: Tensor  # (K, width)


class ClientRows:
    """Rows (n, width) of n clients in a `.npy` file of shape (2, n, width); without a path, in a temporary file.

    `places` (n,) says where the row of each client is: 0 nowhere (it has `first`, what all clients begin with), 1 or 2. It
    belongs to the state of a run and to its checkpoints; this object holds the file and which places are saved.
    """

    def __init__(self, first: Tensor, clients: int, path: Path | None = None, *, places: Tensor | None = None) -> None:
        if places is not None and (places.shape != (clients,) or places.dtype != torch.uint8 or bool((places > 2).any())):
            raise EquipoiseError(f"{path} is not said to hold rows of {clients} clients. Start anew.")
        self.first = first.detach().cpu()
        self.saved = torch.zeros(clients, dtype=torch.uint8) if places is None else places.clone()
        self.path = path if path is not None else self._temporary_file()
        kind = np.dtype(np.float64 if first.dtype == torch.float64 else np.float32)
        shape = (2, clients, len(first))
        try:
            if places is None:
                make_folder(self.path.parent)
                remove(self.path)  # an earlier run's models may still be looked at
                self._written = self._new_file(kind, shape)
            found, self._begin = _described(self.path)
        except (OSError, *DAMAGED_ARRAY) as failure:
            if places is not None and isinstance(failure, FileNotFoundError):
                lost = f"{self.path}, which holds what clients keep between rounds, is missing"
                fix = "Copy it there together with the checkpoint, or delete the checkpoint to start anew."
                raise EquipoiseError(f"{lost}. {fix}") from failure
            reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else failure
            raise NotWritten(f"The rows of clients cannot be kept in {self.path}: {reason}.") from failure
        if found != (shape, False, kind):
            raise EquipoiseError(f"{self.path} holds rows of shape {found[0]}, and this run needs {shape}. Start anew.")
        self._row_bytes, length = kind.itemsize * len(first), self.path.stat().st_size
        self._behind = self._begin + self._row_bytes * 2 * clients
        if length < self._behind + _CHECKSUM.itemsize * 2 * clients:
            raise EquipoiseError(f"{self.path} is damaged: it is shorter than it was. Bring back a copy, or start anew.")
        if places is not None:
            try:
                self._written = DurableFile(self.path, length)
            except OSError as failure:
                raise self._not_written(failure) from failure
        weakref.finalize(self, self._written.close)
        self._rows: np.ndarray[Any, np.dtype[Any]] = np.memmap(self.path, kind, "r", self._begin, shape)
        for k, place in enumerate(() if places is None else places.tolist()):
            if place:
                self._checked_row(place, k)

    def _new_file(self, kind: np.dtype[Any], shape: tuple[int, ...]) -> DurableFile:
        """A file of rows and checksums; only its header is written."""
        header = io.BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        file = DurableFile(self.path)
        file.truncate(len(header.getvalue()) + kind.itemsize * int(np.prod(shape)) + _CHECKSUM.itemsize * 2 * shape[1])
        file.write_at(0, header.getvalue())
        file.sync()
        sync_folder(self.path.parent)
        return file

    def _checked_row(self, place: int, k: int) -> np.ndarray[Any, np.dtype[Any]]:
        row: np.ndarray[Any, np.dtype[Any]] = self._rows[place - 1, k]
        stored = self._written.read_at(self._checksum_at(place, k), _CHECKSUM.itemsize)
        if stored != np.array(zlib.crc32(row.tobytes()), _CHECKSUM).tobytes():
            raise EquipoiseError(
                f"{self.path} is damaged: what client number {k} keeps is not what was written (its checksum differs). "
                "Bring back a copy of the file, or start anew."
            )
        return row

    def _checksum_at(self, place: int, k: int) -> int:
        return self._behind + _CHECKSUM.itemsize * ((place - 1) * len(self.saved) + k)

    def _write_checksum(self, place: int, k: int, checksum: int) -> None:
        self._written.write_at(self._checksum_at(place, k), np.array(checksum, _CHECKSUM).tobytes())

    def _temporary_file(self) -> Path:
        """A file in a new folder that is removed with this object. (TemporaryDirectory would warn when that happens.)"""
        try:
            folder = tempfile.mkdtemp(prefix="equipoise-")
        except OSError as failure:
            why = f"{failure.strerror}. Make room there, or set TMPDIR to another folder."
            raise NotWritten(f"The rows of clients cannot be kept in a temporary folder: {why}") from failure
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "rows.npy"

    def read(self, places: Tensor, clients: Tensor) -> Tensor:
        """The rows (K, width) of the clients at positions (K,)."""
        rows = self.first.expand(len(clients), -1).clone()
        for i, (place, k) in enumerate(zip(places[clients].tolist(), clients.tolist(), strict=True)):
            if place:
                rows[i] = torch.from_numpy(self._checked_row(place, k).copy()).to(rows.dtype)
        return rows

    def write(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """Write rows (K, width) of the clients at positions (K,); the places afterwards. Saved places stay as they are."""
        after = places.clone()
        values = rows.detach().cpu().to(torch.float64 if self._rows.dtype == np.float64 else torch.float32).numpy()
        for value, k in zip(values, clients.tolist(), strict=True):
            now, saved = int(places[k]), int(self.saved[k])
            place = now if now and now != saved else (2 if saved == 1 else 1)
            content = value.tobytes()
            try:
                self._written.write_at(self._begin + self._row_bytes * ((place - 1) * len(self.saved) + k), content)
                self._write_checksum(place, k, zlib.crc32(content))
            except OSError as failure:
                raise self._not_written(failure) from failure
            after[k] = place
        return after

    def flush(self) -> None:
        """Bring to the disk what was written; called before a checkpoint that refers to it is."""
        try:
            self._written.sync()
        except OSError as failure:
            raise self._not_written(failure) from failure

    def _not_written(self, failure: OSError) -> NotWritten:
        return NotWritten(f"The rows of clients cannot be kept in {self.path}: {failure.strerror}.")

    def on_saved(self, places: Tensor) -> None:
        """A checkpoint with these places is on the disk: they are not written to until the next one is."""
        self.saved = places.clone()
