"""Reads a client's own examples, from CSV or npz, as the arrays that a family's models take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.signature import Signature
from equipoise.data.datasets.data_files import load_arrays
from equipoise.data.tables import Schema, read_csv
from equipoise.errors import InvalidData

TARGETS = ("y", "target", "label")
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "#N/A", "n/a", "-nan", "-NaN", "<NA>")


def read_examples(path: Path, signature: Signature, classes: Sequence[str], schema: Schema | None) -> list[NDArray[Any]]:
    """Inputs, and then targets, in the order of the signature. What does not fit is refused with file, column and row."""
    if len(signature.targets) != 1:
        raise InvalidData("The examples of these models have several targets, which no file of examples can hold.")
    if not path.is_file():
        raise InvalidData(f"{path} does not exist. Name a CSV or npz file with labelled examples of your own.")
    if path.suffix.lower() == ".npz":
        if schema is not None:
            raise InvalidData(f"{path}: these models take the columns of a table. Give a CSV file.")
        x, y = _from_npz(path, signature)
    elif schema is not None:
        table = read_csv(path, client="", delimiter=",", decimal=".", encoding="utf8", missing=MISSING)
        tree = schema.transform(table, str(path))
        given = tree if isinstance(tree, dict) else {"x": tree}
        x = [given[spec.name].numpy() for spec in signature.inputs]
        y = schema.targets(table, str(path)).numpy()
    else:
        if not signature.plain:
            raise InvalidData("The inputs of these models are not rows of numbers. Give an npz file with arrays x and y.")
        x, y = _from_csv(path, signature, classes)
    return _checked(path, signature, x, y)


def _from_npz(path: Path, signature: Signature) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    arrays = load_arrays(path, [*(spec.name for spec in signature.inputs), "y"])
    found = []
    for spec in signature.inputs:
        array = arrays[spec.name]
        if array.dtype.kind not in "iufb":
            raise InvalidData(f"{path}: {spec.name} must hold numbers, but is of type {array.dtype}.")
        if spec.scale is not None and array.dtype.kind in "iu":
            array = array * spec.scale + spec.shift
        found.append(array)
    return found, arrays["y"]


def _from_csv(path: Path, signature: Signature, classes: Sequence[str]) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file, strict=True) if row]
    except (OSError, ValueError, csv.Error) as failure:
        raise InvalidData(f"{path} is no CSV file: {failure}.") from failure
    if len(rows) < 2:
        raise InvalidData(f"{path} holds no examples: it needs a row of names and then a row for each example.")
    odd = next((place for place, row in enumerate(rows) if len(row) != len(rows[0])), None)
    if odd is not None:
        raise InvalidData(f"{path}: row {odd} has {len(rows[odd])} columns, but the first has {len(rows[0])}.")
    bare = all(_number(text) is not None for text in rows[0])
    names = [f"column {k}" for k in range(len(rows[0]))] if bare else [name.strip() for name in rows[0]]
    body = rows if bare else rows[1:]
    lower = [name.lower() for name in names]
    target = next((lower.index(name) for name in TARGETS if name in lower), len(names) - 1)
    inputs = [k for k, name in enumerate(lower) if k != target and name != "client"]
    spec = signature.inputs[0]
    if len(inputs) != spec.features:
        raise InvalidData(
            f"{path} has {len(inputs)} columns beside the target {names[target]!r}, but the models take {spec.features}."
        )

    def number(row: int, column: int) -> float:
        value = _number(body[row][column])
        if value is None:
            raise InvalidData(
                f"{path}: column {names[column]!r}, row {row} holds {body[row][column][:40]!r}, which is no number."
            )
        return value

    x = np.array([[number(row, column) for column in inputs] for row in range(len(body))])
    if spec.scale is not None and bool((x == np.round(x)).all()):
        x = x * spec.scale + spec.shift
    place = {name: code for code, name in enumerate(classes)}
    y = [place.get(row[target].strip()) for row in body]
    labels = np.array([number(row, target) if code is None else code for row, code in enumerate(y)])
    return [x.reshape(len(body), *spec.shape)], labels


def _number(text: str) -> float | None:
    try:
        value = float(text) if "_" not in text else None
    except ValueError:
        return None
    return value if value is not None and np.isfinite(value) else None


def _checked(path: Path, signature: Signature, x: list[NDArray[Any]], y: NDArray[Any]) -> list[NDArray[Any]]:
    """Arrays in the types and shapes of the signature."""
    ready = []
    for spec, array in zip(signature.inputs, x, strict=True):
        if not spec.takes(array.shape):
            raise InvalidData(f"{path}: {spec.name} must be of shape {spec.batch_shape}, but is {array.shape}.")
        if not np.isfinite(array).all():
            raise InvalidData(f"{path}: {spec.name} holds NaN or infinity. Repair or drop that example.")
        if spec.dtype == "int64" and bool((array != np.round(array)).any()):
            raise InvalidData(f"{path}: {spec.name} must hold whole numbers.")
        ready.append(np.ascontiguousarray(array.astype({"bfloat16": "float32"}.get(spec.dtype, spec.dtype))))
    rows = len(ready[0])
    if y.shape[:1] != (rows,) or any(len(array) != rows for array in ready) or not rows:
        raise InvalidData(f"{path}: there must be a target for each of {rows} examples; y is of shape {y.shape}.")
    (target,) = signature.targets
    if not target.takes(y.shape) or y.dtype.kind not in "iufb" or not np.isfinite(y).all():
        words = f"{path}: targets must be numbers of shape {target.batch_shape}, but are {y.dtype} of shape {y.shape}."
        raise InvalidData(words)
    if target.dtype == "int64":
        odd = (y != np.round(y)) | ((y < 0) | (y >= signature.classes) if signature.classes and not target.shape else False)
        if odd.any():
            row = int(np.argmax(odd.reshape(rows, -1).any(1)))
            found = float(y.reshape(rows, -1)[row][odd.reshape(rows, -1)[row]][0])
            allowed = f"a class from 0 to {signature.classes - 1}" if signature.classes else "a whole number"
            raise InvalidData(f"{path}: the target in row {row} is {found:g}, but must be {allowed}.")
    return [*ready, np.ascontiguousarray(y.astype(target.dtype))]
