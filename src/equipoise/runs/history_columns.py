"""Reports of rounds as columns: numbers in tensors, all else in JSON, so that a history of a million rounds is a small file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.types import RoundReport


def packed_reports(reports: Sequence[RoundReport], tensors: dict[str, Tensor], name: str) -> dict[str, Any]:
    """Reports as JSON, field by field; columns of numbers go to `tensors` under names that begin with `name`."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(RoundReport):
        values = [getattr(report, field.name) for report in reports]
        kinds = set(map(type, values))
        if kinds == {float} or (kinds == {int} and all(abs(value) < 2**63 for value in values)):
            key = f"{name}.{field.name}"
            tensors[key] = torch.tensor(values, dtype=torch.float64 if kinds == {float} else torch.int64)
            columns[field.name] = {"tensor": key}
        else:  # most reports say the same: nobody rejected, the same name
            usual = values[0] if values else None
            columns[field.name] = {"usual": usual, "others": [[i, v] for i, v in enumerate(values) if v != usual]}
    return columns


def unpacked_reports(columns: dict[str, Any], tensors: dict[str, Tensor]) -> list[RoundReport]:
    """The reports that `packed_reports` made columns of; there are as many as rounds in the tensor that numbers them."""
    numbers = columns["round"].get("tensor")
    count, values = 0 if numbers is None else len(tensors[numbers]), {}
    for name, column in columns.items():
        if "tensor" in column:
            values[name] = tensors[column["tensor"]].tolist()
        else:
            values[name] = [column["usual"]] * count
            for place, value in column["others"]:
                values[name][place] = value
            if count and not all(_fits(value, _TYPES[name]) for value in (column["usual"], *dict(column["others"]).values())):
                raise ValueError(f"its reports have wrong values of {name}")
    if any(len(column) != count for column in values.values()):
        raise ValueError("its reports have columns of different lengths")
    return [RoundReport(**dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True)]


_TYPES = {field.name: str(field.type) for field in dataclasses.fields(RoundReport)}


def _fits(value: Any, kind: str) -> bool:
    """Whether a value that was parsed can be a field of this type, as the class writes it."""
    wanted: Any = {"t": list, "d": dict, "s": str, "L": str}.get(kind[0], int | float)
    listed = not isinstance(value, list) or all(isinstance(each, str | list) for each in value)
    return "None" in kind if value is None else isinstance(value, wanted) and listed
