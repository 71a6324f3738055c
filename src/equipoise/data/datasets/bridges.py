"""Data sets of other libraries: Hugging Face `datasets`, partitions of `flwr_datasets`, and a folder per client."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.abilities import is_part
from equipoise.core.files import PathLike
from equipoise.core.plain_text import content_of
from equipoise.data.clients.arrays import client_name, first_line
from equipoise.data.clients.convert import from_arrays, from_dict, pack_rows, refuse_untrained_classes
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.ragged import Ragged
from equipoise.data.datasets.data_files import read_array
from equipoise.errors import FileGuard, InvalidData, require, unknown_name

Columns = str | Sequence[str]
_SPLITS = "train", "validation", "test"
_READ_TWICE = 4  # examples of every column, to find random augmentation


def from_hugging_face(
    dataset: Any, *, x: Columns, y: Columns, client: str | None = None, pad: float = 0, **options: Any
) -> FederatedData:
    """A Hugging Face Dataset with a column that names the `client` of each row, or a dict of Datasets by client id.

    With `client`, a dict holds the splits "train", "validation" and "test", as `datasets.load_dataset` gives them. `x` and
    `y` name columns: one becomes a tensor, several become a dict by their names. Columns of sequences of different lengths
    become `Ragged` (padded with `pad`, targets with −100); an `attention_mask` column beside them is left out, because
    Equipoise makes its own mask. Images become (channels, height, width) of uint8: give `scale=1/255`. A `ClassLabel` says
    how many classes there are. Other options as in `from_arrays`.

    `dataset` is the Dataset, the dict of splits, or the dict of Datasets by client id.
    """
    parts = dict(dataset) if isinstance(dataset, Mapping) else {"the dataset": dataset}
    asked = options.get("classes", 0)
    options["classes"] = asked or max((_class_labels(each, y) for each in parts.values()), default=0)
    splits = isinstance(dataset, Mapping) and len(parts) > 0 and set(parts) <= set(_SPLITS)
    if isinstance(dataset, Mapping) and not splits:
        rule = f"must be left away with Datasets by client id, or these must be splits ({', '.join(_SPLITS)})"
        require(client is None, "client", rule, client, f"The dict has {', '.join(map(repr, list(parts)[:5]))}.")
        pairs = {owner: _pair(each, x, y, pad, f"client {owner!r}") for owner, each in parts.items()}
        data = from_dict(pairs, **options)
    else:
        which = f", since {', '.join(map(repr, parts))} are splits and no clients" if splits else ""
        require(client is not None, "client", f"must name the column with each row's client{which}", client)
        rows = {name: (*_pair(each, x, y, pad, name), _column(each, str(client), name)) for name, each in parts.items()}
        data = from_arrays(*next(iter(rows.values())), **options) if len(rows) == 1 else _given_splits(rows, **options)
    if not asked:
        refuse_untrained_classes(data)
    return data


def _given_splits(
    rows: dict[str, tuple[Any, Any, Any]], /, *, name: str = "datasets", classes: int, ignore_index: int = -100, **options: Any
) -> FederatedData:
    """Data with the splits that they came with."""
    taken = [key for key in options if key not in ("scale", "shift")]
    require(
        not taken, "options", "must be left away: the dataset has its own splits", taken, "Give one split to split it anew."
    )
    require("train" in rows, "dataset", 'must have the split "train"', ", ".join(rows))
    known: dict[str, Any] = {"classes": classes, "ignore_index": ignore_index}
    given: dict[str, Any] = options | known
    sets = {split: pack_rows(x, y, owner, name=f"{name}, {split}", **given) for split, (x, y, owner) in rows.items()}
    return FederatedData(sets["train"], sets.get("validation"), sets.get("test"), name, **known)


def _class_labels(dataset: Any, column: Columns) -> int:
    """The number of classes that a Dataset says a column has; 0 if it says nothing."""
    if not isinstance(column, str) or not is_part(dataset, "features") or column not in (dataset.features or {}):
        return 0
    feature = dataset.features[column]
    while is_part(feature, "feature"):  # of a list
        feature = feature.feature
    return int(feature.num_classes) if is_part(feature, "num_classes") else 0


def from_partitions(partitions: Any, *, x: Columns, y: Columns, split: str = "train", **options: Any) -> FederatedData:
    """The partitions of a `flwr_datasets` partitioner, or of a FederatedDataset's split, as clients "0", "1", …

    Partitions by natural ids keep these ids. Columns and options as in `from_hugging_face`.

    `partitions` is the partitioner or the FederatedDataset; of the latter `split` names the split.
    """
    partitioner = partitions
    if is_part(partitions, "partitioners"):
        known = dict(partitions.partitioners)
        require(split in known, "split", f"must be one of {', '.join(map(repr, known))}", split)
        partitioner = known[split]
    elif not is_part(partitions, "num_partitions", "load_partition"):
        raise InvalidData(
            f"{type(partitions).__name__} has no partitions: give a partitioner or FederatedDataset of flwr_datasets."
        )
    try:
        if partitioner is not partitions:
            partitions.load_partition(0, split)  # gives the partitioner its data
        parts = {k: partitioner.load_partition(k) for k in range(partitioner.num_partitions)}
    except Exception as failure:  # of another library
        raise InvalidData(
            f"partitions cannot be read: {first_line(failure)}. A partitioner needs its data: partitioner.dataset = …, or give "
            "the FederatedDataset that has it."
        ) from failure
    ids = dict(partitioner.partition_id_to_natural_id) if is_part(partitioner, "partition_id_to_natural_id") else {}
    named: dict[str, Any] = {}
    for k, part in parts.items():
        name = client_name(ids.get(k, k))
        if len(part) and name is None:
            raise InvalidData(f"partition {k} has the id {ids.get(k)!r}, which names no client. Drop or name its rows.")
        if name is not None and len(part):
            named[name] = part
    return from_hugging_face(named, x=x, y=y, **options)


def _pair(dataset: Any, x: Columns, y: Columns, pad: float, where: str) -> tuple[Any, Any]:
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
    for row, value in enumerate(values):
        if _lacks_value(value):
            raise InvalidData(f"{where}: column {name!r}, row {row} lacks a value. Drop or fill it: dataset.filter(…).")
    _refuse_random(dataset, name, where, values)
    if len(values) and is_part(values[0], "convert", "getbands"):  # a PIL image
        return _pictures(values, f"{where}: column {name!r}")
    try:
        if len(values) and np.ndim(values[0]) and len({np.shape(value)[:1] for value in values}) > 1:
            return Ragged.of([np.asarray(value) for value in values], pad=pad, mask=None if pad == -100 else "attention_mask")
        return np.asarray(values)
    except (TypeError, ValueError, InvalidData) as failure:
        raise InvalidData(f"{where}: column {name!r} cannot be packed: {first_line(failure)}.") from failure


def _lacks_value(value: Any) -> bool:
    """Whether a cell is empty, or a list with an empty place."""
    return any(map(_lacks_value, value)) if isinstance(value, list) else value is None


def _pictures(values: Sequence[Any], where: str) -> Any:
    """PIL images as (N, channels, height, width); colours of a palette become red, green and blue."""
    images = [each.convert("RGBA" if "transparency" in each.info else "RGB") if each.mode == "P" else each for each in values]
    for row, image in enumerate(images):
        if (image.mode, image.size) != (images[0].mode, images[0].size):
            raise InvalidData(f"{where}, row {row} is an image of another mode or size than row 0. Convert them to one first.")
    pictures = np.stack([np.asarray(image) for image in images])
    return pictures[:, None] if pictures.ndim == 3 else np.moveaxis(pictures, -1, 1)


def _refuse_random(dataset: Any, name: str, where: str, values: Sequence[Any]) -> None:
    """Refuse a column that reads otherwise when it is read again, because packing would freeze it."""
    count = min(_READ_TWICE, len(values))
    again = _column(dataset.select(range(count)), name, where) if is_part(dataset, "select") else values[:count]
    for row, pair in enumerate(zip(values[:count], again, strict=True)):
        try:
            first, second = map(np.asarray, pair)
        except ValueError:  # lists in lists, which are refused later
            return
        if first.dtype != object and (first.shape != second.shape or first.tobytes() != second.tobytes()):
            raise InvalidData(
                f"{where}: column {name!r}, row {row} differs whenever it is read (random augmentation), and would be frozen. "
                'Call dataset.reset_format(), or give data.from_datasets({id: Dataset}, each_visit=True) for engine="loop".'
            )


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
    hidden = ".", "__"  # .git, .ipynb_checkpoints, __MACOSX, …
    clients = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith(hidden))
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
        what = "array of numbers that numpy.save wrote; it may be cut" if file.suffix == ".npy" else "number as text"
        with FileGuard(file, InvalidData, f"holds no {what}", "Write it again."):
            content = content_of(file)
            read.append(
                read_array(partial(io.BytesIO, content), len(content)) if file.suffix == ".npy" else _number(content.decode())
            )
    if len({np.shape(each) for each in read}) > 1:
        raise InvalidData(
            f"{next(iter(files)).parent}: the examples have different shapes. Pad them, or use from_dict with Ragged."
        )
    return np.stack(read)


def _number(text: str) -> int | float:
    return float(text) if any(sign in text for sign in ".eE") else int(text)
