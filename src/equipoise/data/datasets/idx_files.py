"""MNIST's own file format: idx files of unsigned bytes, plain or packed by gzip."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.data.datasets.data_files import data_file, unpacked_bytes
from equipoise.errors import FileGuard, InvalidData

UNSIGNED_BYTES = 8  # the code of the only type that MNIST and its relatives use


def find_idx(folder: PathLike | None, name: str, content: str) -> Path:
    """The idx file `name` of a folder, or that name with .gz if only this is there."""
    if folder is not None and not (Path(folder).expanduser() / name).exists():
        packed = Path(folder).expanduser() / f"{name}.gz"
        if packed.exists():
            return packed
    return data_file(folder, name, content)


def load_idx(path: PathLike) -> Tensor:
    """The array of unsigned bytes in an idx file."""
    content = unpacked_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise InvalidData(f"{path}: is no idx file; it must begin with two zero bytes.")
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTES:
        raise InvalidData(f"{path}: holds numbers of type {kind:#x}; only unsigned bytes (0x8) are read.")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise InvalidData(f"{path}: ends inside its header.")
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    if len(content) - start != math.prod(shape):
        raise InvalidData(f"{path}: its header says {' × '.join(map(str, shape))} bytes, but {len(content) - start} follow.")
    with FileGuard(path, InvalidData):
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def mnist_images(folder: PathLike | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MNIST's 60,000 training and 10,000 test images (N, 28, 28) uint8, with labels (N,) int64: x, y, test x, test y.

    The folder holds the four usual files, train-images-idx3-ubyte and so on, plain or with .gz.
    """
    parts = []
    for part in ("train", "t10k"):
        names = {kind: f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")}
        x, y = (load_idx(find_idx(folder, name, "MNIST in its usual idx files")) for name in names.values())
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise InvalidData(f"{folder}: {names['images-idx3']} and {names['labels-idx1']} must hold one label per image.")
        parts += [x, y.long()]
    return parts[0], parts[1], parts[2], parts[3]
