"""The error that every check raises, and the comparisons that checks share."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError


class LawBroken(EquipoiseError, AssertionError):
    """A part breaks a law of its contract."""


def hold(condition: Tensor | bool, part: object, law: str, numbers: object = "") -> None:
    """Raise LawBroken with the part, the law and the numbers that break it, unless `condition` is true."""
    if not condition:
        raise LawBroken(f"{part!r} breaks the law: {law}." + (f" Found: {numbers}" if numbers != "" else ""))


def agree(part: object, law: str, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Raise LawBroken with the largest difference unless two tensors are equal, bit for bit or as `close` has it."""
    hold(found.shape == expected.shape, part, law, f"another shape, {tuple(found.shape)} for {tuple(expected.shape)}")
    same = close(found, expected, tolerance) if tolerance else torch.equal(found, expected)
    hold(same, part, law, f"differences up to {float((found - expected).abs().max()):g}" if found.numel() else "")


@contextmanager
def without_error(part: object, law: str, case: str = "") -> Iterator[None]:
    """Raise LawBroken in place of another error of the block, which is the cause."""
    try:
        yield
    except LawBroken:
        raise
    except Exception as failure:
        raise LawBroken(f"{part!r} breaks the law: {law}. Found: {case}{failure!r}") from failure


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape and differ by at most `tolerance` times max(1, largest |b|)."""
    scale = max(1.0, float(b.abs().max()) if b.numel() else 1.0)
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= tolerance * scale).all())


def equal_values(a: Any, b: Any) -> bool:
    """Whether two states hold equal values, tensors bit for bit; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_form = a.shape == b.shape and a.dtype == b.dtype
        return same_form and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal_values, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(equal_values(getattr(a, each.name), getattr(b, each.name)) for each in fields(a))
    return bool(a == b) or bool(a != a and b != b)


@contextmanager
def unchanged(part: object, action: str, **values: Any) -> Iterator[None]:
    """Raise LawBroken if one of the named values is another after the block than before it: an argument was written to."""
    before = copy.deepcopy(values)
    yield
    for name, value in values.items():
        hold(equal_values(value, before[name]), part, f"{action} does not write to the {name} it is given")


def is_finite(values: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())
