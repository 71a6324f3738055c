"""What trials of a user's parts share: a copy of a part, a call that may fail, and a comparison of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor


def copied(part: Any) -> Any:
    """A copy of a part or value; the thing itself if it holds what cannot be copied, such as an open file."""
    try:
        return copy.deepcopy(part)
    except Exception:
        return part


def or_none(call: Callable[[], Any]) -> Any:
    """What a call gives; None if it raises an error."""
    try:
        return call()
    except Exception:
        return None


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    """Whether two tensors have one shape and differ by at most `tolerance` times max(1, largest expected number)."""
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    return found.shape == expected.shape and bool(((found.double() - expected.double()).abs() <= tolerance * scale).all())
