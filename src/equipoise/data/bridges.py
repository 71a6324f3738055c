"""Data sets of other libraries: Hugging Face `datasets`, partitions of `flwr_datasets`, and a folder per client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.abilities import is_part
from equipoise.data.arrays import first_line
from equipoise.data.clients import FederatedData
from equipoise.data.convert import from_arrays, from_dict
from equipoise.data.file_access import PathLike
from equipoise.data.ragged import Ragged
from equipoise.errors import InvalidData, require, unknown_name

Columns = str | Sequence[str]


def from_hugging_face(
    dataset: Any, *, x: Columns, y: Columns, client: str | None = None, pad: float = 0, **options: Any
) -> FederatedData:
    """A Hugging Face Dataset with a column that names the `client` of each row, or a dict of Datasets by client id.

    `x` and `y` name columns: one becomes a tensor, several become a dict by their names. Columns of sequences of different
    lengths become `Ragged` (padded with `pad`, targets with −100); an `attention_mask` column beside them is left out, because
    it is made anew. Images become (channels, height, width) of uint8: give `scale=1/255`. Other options as in `from_arrays`.
    """
    if isinstance(dataset, Mapping):
        pairs = {owner: _read_dataset(each, x, y, pad, f"client {owner!r}") for owner, each in dataset.items()}
        return from_dict(pairs, **options)
    require(client is not None, "client", "must name the column with each row's client", client)
    inputs, targets = _read_dataset(dataset, x, y, pad, "the dataset")
    return from_arrays(inputs, targets, _column(dataset, str(client), "the dataset"), **options)


def from_partitions(partitions: Any, *, x: Columns, y: Columns, split: str = "train", **options: Any) -> FederatedData:
    """The partitions of a `flwr_datasets` partitioner, or of a FederatedDataset's split, as clients "0", "1", …

    Columns and options as in `from_hugging_face`.
    """
    partitioner = partitions
    if is_part(partitions, "partitioners"):
        known = dict(partitions.partitioners)
        require(split in known, "split", f"must be one of {', '.join(map(repr, known))}", split)
        partitioner = known[split]
        partitions.load_partition(0, split)  # gives the partitioner its data
    if not is_part(partitioner, "num_partitions", "load_partition"):
        raise InvalidData(
            f"{type(partitions).__name__} has no partitions: give a partitioner or FederatedDataset of flwr_datasets."
        )
    parts = {str(k): partitioner.load_partition(k) for k in range(partitioner.num_partitions)}
    return from_hugging_face({k: part for k, part in parts.items() if len(part)}, x=x, y=y, **options)


def _read_dataset(dataset: Any, x: Columns, y: Columns, pad: float, where: str) -> tuple[Any, Any]:
    return _tree(dataset, x, pad, where), _tree(dataset, y, -100, where)


def _tree(dataset: Any, columns: Columns, pad: float, where: str) -> Any:
    """One column as an array or a dict with one sequence; several as a dict."""
    if isinstance(columns, str):
        leaf = _leaf(dataset, columns, pad, where)
        return {columns: leaf} if isinstance(leaf, Ragged) and leaf.mask is not None else leaf
    read = {name: _leaf(dataset, name, pad, where) for name in columns}
    masks = {leaf.mask for leaf in read.values() if isinstance(leaf, Ragged)}
    return {name: leaf for name, leaf in read.items() if name not in masks}


def _leaf(dataset: Any, name: str, pad: float, where: str) -> Any:
    values = _column(dataset, name, where)
    if len(values) and isinstance(values[0], list | np.ndarray) and len({np.shape(value)[:1] for value in values}) > 1:
        return Ragged.of([np.asarray(value) for value in values], pad=pad, mask=None if pad == -100 else "attention_mask")
    if len(values) and is_part(values[0], "convert", "getbands"):  # a PIL image
        pictures = np.stack([np.asarray(picture) for picture in values])
        return pictures[:, None] if pictures.ndim == 3 else np.moveaxis(pictures, -1, 1)
    return values if isinstance(values, np.ndarray) else np.asarray(values)


def _column(dataset: Any, name: str, where: str) -> Any:
    if not is_part(dataset, "column_names", "__getitem__"):
        raise InvalidData(f"{where} must be a Dataset of Hugging Face `datasets`, but is {type(dataset).__name__}.")
    if name not in dataset.column_names:
        raise InvalidData(f"{where} has no column {name!r}. {unknown_name('column', name, dataset.column_names)}")
    try:
        return list(dataset[name])
    except Exception as failure:  # decoders of other libraries raise anything
        raise InvalidData(f"{where}: column {name!r} cannot be read: {first_line(failure)}.") from failure


def from_folders(path: PathLike, *, x: str = "npy", y: str = "cls", **options: Any) -> FederatedData:
    """A folder with one folder per client, whose files are examples: KEY.npy holds the input of example KEY, KEY.cls its class.

    `x` and `y` are the endings of the files: "npy" for arrays, "cls" or "txt" for a number as text. Options as in `from_dict`.
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidData(f"{root} is no folder with one folder per client.")
    clients = sorted(folder for folder in root.iterdir() if folder.is_dir())
    if not clients:
        raise InvalidData(f"{root} holds no folder: every client needs one of its own.")
    return from_dict({folder.name: _read_folder(folder, x, y) for folder in clients}, **{"name": root.name, **options})


def _read_folder(folder: Path, x: str, y: str) -> tuple[Any, Any]:
    inputs, targets = (sorted(folder.glob(f"*.{ending}")) for ending in (x, y))
    keys, labels = {file.stem for file in inputs}, {file.stem for file in targets}
    if not inputs or keys != labels:
        odd = sorted(keys ^ labels)
        what = f"example {odd[0]!r} has only one of the two" if odd else "there is none"
        raise InvalidData(f"{folder}: every example needs a file .{x} and a file .{y}; {what}.")
    return _stack(inputs), _stack(targets)


def _stack(files: Iterable[Path]) -> Any:
    read = []
    for file in files:
        try:
            read.append(np.load(file, allow_pickle=False) if file.suffix == ".npy" else _number(file.read_text()))
        except (ValueError, OSError, EOFError) as failure:
            raise InvalidData(f"{file} cannot be read: {first_line(failure)}.") from failure
    if len({np.shape(each) for each in read}) > 1:
        raise InvalidData(
            f"{next(iter(files)).parent}: the examples have different shapes. Pad them, or use from_dict with Ragged."
        )
    return np.stack(read)


def _number(text: str) -> int | float:
    return float(text) if any(sign in text for sign in ".eE") else int(text)
