"""Finds and reads data files: every failure names the file and the reason. No pickle is read."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.numbers import DAMAGED_ARRAY
from equipoise.data.clients import ClientSet
from equipoise.data.partition import by_id, to_clients
from equipoise.errors import InvalidData, InvalidParameter

FOLDER_VARIABLE = "EQUIPOISE_DATA"
PathLike = str | os.PathLike[str]
MOST_UNPACKED = 2**30  # bytes of a packed file that are taken whatever it was packed to
PACKED_AT_MOST = 100  # times that data shrink when they are packed


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
    try:
        # The file is opened here, since np.load leaves it open when the archive turns out to be broken.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InvalidData(f"{path}: must be an .npz archive of named arrays, but is a single array.")
            _refuse_bomb(path, sum(entry.file_size for entry in archive.zip.infolist()), os.fstat(file.fileno()).st_size)
            chosen = archive.files if names is None else names
            if missing := [name for name in chosen if name not in archive.files]:
                raise InvalidData(f"{path}: array {missing[0]!r} is missing; the file holds {', '.join(archive.files)}.")
            return {name: archive[name] for name in chosen}
    except FileNotFoundError as error:
        raise InvalidData(f"{path} does not exist.") from error
    except InvalidData:
        raise
    except MemoryError as error:
        raise InvalidData(f"{path}: its arrays need more memory than there is: {error}") from error
    except (OSError, *DAMAGED_ARRAY, zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError) as error:
        raise InvalidData(f"{path}: cannot be read as arrays without pickles: {error}") from error


def _refuse_bomb(path: PathLike, unpacked: int, packed: int) -> None:
    """Refuse a packed file that would fill the memory when it is unpacked: data are not a hundred times as large as packed."""
    if unpacked > MOST_UNPACKED and unpacked > PACKED_AT_MOST * packed:
        raise InvalidData(
            f"{path}: {packed / 1e6:.1f} MB unpack to {unpacked / 1e9:.1f} GB or more, which no real data do. Unpack the file "
            "yourself if you trust it."
        )


def load_json(path: PathLike) -> Any:
    """The content of a .json or .json.gz file."""
    try:
        return json.loads(_read_packed(path) if str(path).endswith(".gz") else Path(path).read_bytes())
    except FileNotFoundError as error:
        raise InvalidData(f"{path} does not exist.") from error
    except InvalidData:
        raise
    except json.JSONDecodeError as error:
        raise InvalidData(f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, RecursionError, MemoryError, ValueError) as error:
        raise InvalidData(f"{path}: cannot be read: {error}") from error


def unpacked_bytes(path: PathLike) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    try:
        return _read_packed(path) if str(path).endswith(".gz") else Path(path).read_bytes()
    except FileNotFoundError as error:
        raise InvalidData(f"{path} does not exist.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData(f"{path}: cannot be read: {error}") from error


def _read_packed(path: PathLike) -> bytes:
    """The content of a file packed by gzip; refused as soon as it is too large for what it was packed to."""
    packed, found = os.stat(path).st_size, bytearray()
    with gzip.open(path, "rb") as file:
        while part := file.read(1 << 24):
            found += part
            _refuse_bomb(path, len(found), packed)
    return bytes(found)


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
