"""What trials of a user's parts share: a copy of a part, a call that may fail, and comparisons of numbers and states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
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


def same_state(state: Any, before: Any, tolerance: float = 0.0) -> bool:
    """Whether a state holds what it held; compared as a checkpoint writes it, its tensors up to a tolerance."""
    written: tuple[list[Tensor], list[Tensor]] = ([], [])
    texts = [repr(_flat(each, tensors)) for each, tensors in zip((state, before), written, strict=True)]
    pairs = ((one.nan_to_num(), other.nan_to_num()) for one, other in zip(*written, strict=False))
    return texts[0] == texts[1] and all(torch.equal(*each) or (tolerance > 0 and close(*each, tolerance)) for each in pairs)


def _flat(value: Any, tensors: list[Tensor]) -> Any:
    """A state with numbers in the place of its tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (len(tensors), tuple(value.shape), str(value.dtype))
    if isinstance(value, tuple | list):
        return [_flat(each, tensors) for each in value]
    if isinstance(value, dict):
        return [(key, _flat(each, tensors)) for key, each in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [_flat(getattr(value, each.name), tensors) for each in fields(value)]
    return value
