"""What trials of a user's parts share: a copy of a part, a call that may fail, comparisons, and what a state is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user
from equipoise.errors import InvalidParameter


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
    inside = parts_of(value)
    return value if inside is None else [_flat(each, tensors) for each in inside]


def parts_of(value: Any) -> list[Any] | None:
    """What a tuple, a list, a dictionary or a dataclass holds; None of any other value."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)]
    return None


def unkeepable(state: Any) -> str | None:
    """The type of the first thing in a state that a checkpoint cannot keep; None if it can keep all of it.

    >>> unkeepable({"a": (1, 2.0)}), unkeepable([{1, 2}])
    (None, 'set')
    """
    if state is None or type(state) in (bool, int, float, str) or isinstance(state, Tensor):
        return None
    inside = parts_of(state) if is_dataclass(state) or type(state) in (tuple, list, dict) else None
    return type(state).__name__ if inside is None else next(filter(None, map(unkeepable, inside)), None)


def refuse_unkeepable(name: str, part: Any, state: Any, method: str) -> None:
    """Refuse a part of the user's own, `name` of a method, whose state a checkpoint cannot keep."""
    found = unkeepable(state)
    if found is not None and is_of_user(part):
        rule = f"of {method!r} must have a state of tensors, numbers, text, None, tuples, lists, dictionaries or dataclasses"
        raise InvalidParameter(name, rule, part, f"Its state holds a value of type {found}. Write it as one of these.")
