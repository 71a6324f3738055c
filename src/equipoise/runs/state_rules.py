"""What a part of the user's own may hand from one round to the next: what a checkpoint can keep, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from equipoise.core.abilities import is_of_user
from equipoise.errors import InvalidParameter

IS_KEPT = "a state is made of what a checkpoint keeps: tensors, numbers, text, None, tuples, lists, dictionaries, dataclasses"
NO_LINEAR_STATE = "a linear aggregator has no state: its total is a sum over parts of a cohort, and no call gets a state"
LINEAR_CURE = "Set linear = False, or give the memory to a server optimiser (equipoise.server_opt), e.g. server_opt.Momentum()."
FINITE = "finite inputs give finite numbers"
FINITE_CURE = "Look for the root or logarithm of a negative number, a division by 0, and wrong signs."
SAME_AGAIN = "the same call twice gives the same answer: a part depends on its inputs and its state alone"
SAME_CURE = (
    "Keep nothing in self, in a global variable or in a random generator. A risk, an aggregator or a server optimiser returns "
    "what it remembers as its state; a solver returns it from begin as its memory."
)
STATE_CURE = "Make a new state and return that one, e.g. of dict(state) or state.clone()."
KEPT_CURE = "Write the state as one of these types, e.g. a set as a sorted list."


def copy_cure(argument: str) -> str:
    """What to do in the place of writing to an argument."""
    return f"Work on a copy, e.g. {argument}.clone(), or without methods that end in _."


def unkeepable(state: Any) -> str | None:
    """The type of the first thing in a state that a checkpoint cannot keep; None if it can keep all of it.

    >>> unkeepable({"a": (1, 2.0)}), unkeepable([{1, 2}])
    (None, 'set')
    """
    if state is None or type(state) in (bool, int, float, str) or isinstance(state, Tensor):
        return None
    inside: list[Any]
    if type(state) in (tuple, list):
        inside = list(state)
    elif type(state) is dict:
        inside = [*state.keys(), *state.values()]
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        inside = [getattr(state, each.name) for each in dataclasses.fields(state)]
    else:
        return type(state).__name__
    return next((found for found in map(unkeepable, inside) if found is not None), None)


def refuse_unkeepable(name: str, part: Any, state: Any, method: str) -> None:
    """Refuse a part of the user's own, `name` of a method, whose state a checkpoint cannot keep."""
    found = unkeepable(state)
    if found is not None and is_of_user(part):
        rule = f"of {method!r} must keep the law that {IS_KEPT}"
        fix = f"Found: its state holds a value of type {found}. {KEPT_CURE} See equipoise.testing."
        raise InvalidParameter(name, rule, part, fix)
