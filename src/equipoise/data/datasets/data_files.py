"""Finds and reads data files: every failure names the file and the reason. No pickle is read."""

from __future__ import annotations

import gzip
import io
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.core.memory import all_memory
from equipoise.core.plain_text import content_of, open_plain, parse_json
from equipoise.core.unpacking import Unpacked, refuse_bomb
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.partition import by_id, to_clients
from equipoise.errors import FileGuard, InvalidData, InvalidParameter

FOLDER_VARIABLE = "EQUIPOISE_DATA"
MOST_TEXT = 1 << 26  # bytes of packed JSON that are taken whatever it was packed to; its values take many times as much


def data_file(folder: PathLike | None, filename: str, content: str) -> Path:
    """The path of a file in `folder`, or in the folder that the environment variable EQUIPOISE_DATA names."""
    chosen = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        raise InvalidData(
            f"{filename} is needed ({content}). Say where it is: folder=…, or set the environment variable {FOLDER_VARIABLE} "
            f"to the folder that holds it."
        )
    path = Path(chosen).expanduser() / filename
    if not path.is_file():
        origin = "folder" if folder is not None else FOLDER_VARIABLE
        raise InvalidData(f"{path} does not exist. {origin} must name a folder that holds {filename}: {content}.")
    return path


def load_arrays(path: PathLike, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file: those in `names`, or all."""
    with (
        FileGuard(path, InvalidData, "cannot be read as arrays without pickles"),
        open_plain(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        chosen = list(entries) if names is None else names
        if missing := [name for name in chosen if name not in entries]:
            raise InvalidData(f"{path}: array {missing[0]!r} is missing; the file holds {', '.join(entries)}.")
        unpacked, memory = sum(entries[name].file_size for name in chosen), all_memory()
        refuse_bomb(path, unpacked, os.stat(path).st_size)
        if unpacked > memory:
            raise ValueError(f"they need {unpacked / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB")
        return {name: read_array(partial(archive.open, entries[name]), entries[name].file_size) for name in chosen}


def read_array(opened: Callable[[], IO[bytes]], size: int) -> NDArray[Any]:
    """The array of a .npy file of some bytes; its header is compared with them before there is room made for it."""
    form = np.lib.format
    with opened() as file:
        version = form.read_magic(file)
        shape, _, kind = (form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0)(file)
        size -= file.tell()
    rows = max(shape[:1], default=0)  # each has a byte or more
    if min(shape, default=0) < 0 or rows > size or (math.prod(shape) * kind.itemsize != size and not kind.hasobject):
        raise ValueError(f"an array of {size} bytes says that it is {kind} of the shape {shape}")
    with opened() as file:
        read: NDArray[Any] = form.read_array(file, allow_pickle=False)
    return read


def load_json(path: PathLike) -> Any:
    """The content of a .json or .json.gz file."""
    with FileGuard(path, InvalidData):
        return parse_json(unpacked_bytes(path))


def unpacked_bytes(path: PathLike) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    with FileGuard(path, InvalidData):
        return _read_packed(path) if str(path).endswith(".gz") else content_of(Path(path))


def _read_packed(path: PathLike) -> bytes:
    """The content of a file packed by gzip; refused as soon as it is too large for what it was packed to."""
    with open_plain(path) as packed, gzip.open(packed) as file:
        return io.BufferedReader(Unpacked(file, path, MOST_TEXT), 1 << 20).read()


def as_tensor(array: NDArray[Any], source: str) -> Tensor:
    """An array of numbers as a tensor: uint8 stays uint8 (images, tokens), other integers become int64, floats float32."""
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array))
    if array.dtype.kind in "iub":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    raise InvalidData(f"{source} must hold numbers, but has type {array.dtype}.")


def targets(array: NDArray[Any], source: str) -> Tensor:
    """Targets as a tensor: classes as int64, numbers as float32. Labels −1 / +1 become classes 0 / 1."""
    y = as_tensor(array, source)
    if y.is_floating_point():
        return y
    return (y + 1) // 2 if set(np.unique(array).tolist()) == {-1, 1} else y.to(torch.int64)


def npz(
    path: PathLike, *, x: str = "x", y: str = "y", client: str = "client", scale: float | None = None, shift: float = 0.0
) -> ClientSet:
    """Clients from any .npz file with inputs (N, …), targets (N, …) and a client id per example (N,), under the names given.

    Bytes stay bytes; with `scale` a model sees x · scale + shift. Labels −1 / +1 become classes 0 / 1. No pickle is read.
    """
    if len({x, y, client}) < 3:
        raise InvalidParameter("x, y, client", "must name three arrays", (x, y, client))
    arrays = load_arrays(path, (x, y, client))
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or not lengths[x]:
        shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InvalidData(f"{path}: arrays must have the same number of rows, at least one; found {shown}.")
    if arrays[client].ndim != 1:
        raise InvalidData(f"{path}: {client!r} must hold one id per example, but has shape {arrays[client].shape}.")
    assignment, ids = by_id(arrays[client])
    inputs, outputs = as_tensor(arrays[x], f"{path}: {x!r}"), targets(arrays[y], f"{path}: {y!r}")
    return to_clients(inputs, outputs, assignment, ids=ids, scale=scale, shift=shift, source=str(path))
