"""Files that are mapped into memory, and which file a piece of memory is: so that another process can open it by name."""

from __future__ import annotations

import mmap
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.plain_text import open_plain

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
