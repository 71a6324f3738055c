"""Files that are mapped into memory, and which file a piece of memory is: so that another process can open it by name."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.core.plain_text import open_plain
from equipoise.core.trees import leaves
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.ragged import Ragged

_MAP_NORESERVE = 0x4000  # of Linux; the module mmap has no name for it in all versions of Python
_files: dict[int, MappedFile] = {}  # by the address at which a file begins


class MappedFile(NamedTuple):
    """The first `size` bytes of a file."""

    path: str
    size: int


def map_file(file: Path, size: int) -> Tensor:
    """The first bytes of a file, mapped into memory, (size,) uint8: read when used, and copied if written to."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with open_plain(file) as opened:
        if sys.platform == "linux":  # else Linux refuses private maps larger than memory
            memory = mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
        else:
            memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    address = values.data_ptr()
    _files[address] = MappedFile(str(file.absolute()), size)
    weakref.finalize(memory, _files.pop, address, None)  # another object may lie there afterwards
    return values


def file_of(address: int) -> MappedFile | None:
    """The file that begins at an address of this process's memory; None if none does."""
    return _files.get(address)


_WILL_NEED = 3  # MADV_WILLNEED, on Linux and macOS


class ReadAhead:
    """Tells the system which clients of a store come next. Called in vain where a system cannot be told."""

    def __init__(self, clients: ClientSet) -> None:
        self.starts, self.sizes = clients.starts.numpy(), clients.host_sizes.numpy()
        self.leaves: list[Any] = [*leaves(clients.x), *leaves(clients.y)]
        self.advise: Any = ctypes.CDLL(None).madvise if sys.platform != "win32" else None
        if self.advise is not None:
            self.advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._thread = ThreadPoolExecutor(1, "equipoise-read-ahead")

    def __call__(self, positions: Tensor) -> None:
        """Begin to read the rows of these clients, and go on."""
        if self.advise is not None:
            self._thread.submit(self._advise, positions.numpy())

    def _advise(self, positions: Numbers) -> None:
        first = self.starts[positions]
        last = first + self.sizes[positions]
        for leaf in self.leaves:
            values, begin, end = leaf, first, last
            if isinstance(leaf, Ragged):
                offsets = leaf.offsets.numpy()
                values, begin, end = leaf.values, offsets[first], offsets[last]
            for address, length in pages(values, begin, end):
                self.advise(address, length, _WILL_NEED)


def pages(values: Tensor, first: Numbers, last: Numbers) -> list[tuple[int, int]]:
    """Address and length of the pages that hold rows first[k] … last[k] − 1 of a tensor, neighbours together."""
    row_bytes = values.shape[1:].numel() * values.element_size()
    order = np.argsort(first)
    begin = (values.data_ptr() + first[order] * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    end = values.data_ptr() + last[order] * row_bytes
    apart = np.flatnonzero(begin[1:] > end[:-1] + mmap.PAGESIZE) + 1
    stretches = np.concatenate([[0], apart]), np.concatenate([apart, [len(begin)]]) - 1
    return list(zip(begin[stretches[0]].tolist(), (end[stretches[1]] - begin[stretches[0]]).tolist(), strict=True))
