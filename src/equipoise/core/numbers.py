"""A cohort's numbers as NumPy arrays, which are several times faster than tensors for a few hundred numbers."""

from __future__ import annotations

import math
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray[Any, np.dtype[Any]]
# What NumPy raises for a damaged header of an array in a file; besides, OSError.
DAMAGED_ARRAY = (ValueError, TypeError, OverflowError, SyntaxError, TokenError, MemoryError, EOFError)


def numbers(values: Tensor) -> Numbers:
    """The values in float64 on the CPU; a view where they are that already."""
    if values.dtype is torch.float64 and values.device.type == "cpu" and not values.requires_grad:
        return values.numpy()  # `force` takes several times as long, which small rounds would feel
    array: Numbers = values.numpy(force=True).astype(np.float64, copy=False)
    return array


def are_weights(values: Numbers) -> bool:
    """Whether all values and their sum are finite and no value is negative.

    >>> are_weights(np.array([0.0, 2.0])), are_weights(np.array([-1.0, 2.0])), are_weights(np.array([np.inf]))
    (True, False, False)
    """
    return bool(values.min(initial=0.0) >= 0 and math.isfinite(values.sum()))


def has_weight(weights: Any) -> Any:
    """Which weights (K,), an array or a tensor, count: those that are not 0, nor underflow when they are divided by their sum.

    >>> has_weight(np.array([1.0, 0.0, 1e-300, 1e-310]))
    array([ True, False,  True, False])
    """
    return ~(weights <= weights.sum() * np.finfo(np.float64).tiny)


def mass_slack(dtype: torch.dtype, count: int) -> float:
    """Sums of some of `count` weights of this type that differ by less are equal: weights are rounded, and their sums are.

    >>> mass_slack(torch.float64, 10) < 1e-11, mass_slack(torch.float32, 10) > 1e-7
    (True, True)
    """
    return 1e-12 + 2 * torch.finfo(dtype).eps + 4 * count * torch.finfo(torch.float64).eps


def plain_values(values: Any) -> Any:
    """A number, or a list of numbers, of plain Python types: what `tolist` gives for an array, a tensor or a column."""
    return values.tolist() if hasattr(values, "tolist") else values
