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
    """Whether all values are finite and none is negative.

    >>> are_weights(np.array([0.0, 2.0])), are_weights(np.array([-1.0, 2.0])), are_weights(np.array([np.inf]))
    (True, False, False)
    """
    return bool(values.min(initial=0.0) >= 0 and (math.isfinite(values.sum()) or np.isfinite(values).all()))


def plain_values(values: Any) -> Any:
    """A number, or a list of numbers, of plain Python types: what `tolist` gives for an array, a tensor or a column."""
    return values.tolist() if hasattr(values, "tolist") else values
