"""Whether two objects are the same but for the values of trained parameters, so that one engine serves both."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.params import ParameterLayout


def same_part(first: object, second: object) -> bool:
    """Whether two parts of algorithms are one and the same, or equal; parts that cannot be compared are not."""
    if first is second:
        return True
    try:
        return type(first) is type(second) and bool(first == second)
    except (RuntimeError, ValueError, TypeError):  # a part that holds tensors or arrays
        return False


def same_but_for_training(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models differ at most in the values of their trained parameters.

    Types, options, buffers and frozen parameters must be the same. What cannot be compared counts as different, so that True
    can be relied on: with the same trained parameters both models compute the same.
    """
    if first is second:
        return True
    try:
        return ParameterLayout.of(first) == ParameterLayout.of(second) and _equal_attributes(first, second, set())
    except (ValueError, TypeError, RuntimeError, AttributeError):  # attributes may be anything, such as empty closures
        return False


def _equal_attributes(a: Any, b: Any, met: set[tuple[int, int]]) -> bool:
    """Whether two attributes are the same; `met` has the pairs on the way here, for models that refer to themselves."""
    if a is b or (id(a), id(b)) in met:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):  # tuples are made on the way, and an id means something only while its object lives
        return len(a) == len(b) and all(_equal_attributes(x, y, met) for x, y in zip(a, b, strict=True))
    met.add((id(a), id(b)))
    if isinstance(a, Tensor):
        trained = isinstance(a, nn.Parameter) and a.requires_grad and b.requires_grad
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and (trained or torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal_attributes(a[key], b[key], met) for key in a)
    if (inner := _contents(a)) is not None:
        return _equal_attributes(inner, _contents(b), met)
    return same_part(a, b)


def _contents(value: Any) -> tuple[Any, ...] | None:
    """The values that make up a function, a method or a plain object; None for values that define equality themselves."""
    if isinstance(value, FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    compares_itself = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
    return None if compares_itself or isinstance(value, type) or not hasattr(value, "__dict__") else (vars(value),)
