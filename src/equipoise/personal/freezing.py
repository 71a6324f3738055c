"""Solvers beside phases of a split model: they must leave parameters alone that get no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.runs.tried_calls import copied
from equipoise.types import LocalSolver

_STEPS = 5
_PLAIN: dict[str, Any] = {  # options beyond the step of SgdRule, as they are if nobody gives them
    "nesterov": False, "dampening": 0.0, "clip_norm": None, "local_schedule": None, "rates": {}, "state": "fresh",
}  # fmt: skip
_CURE = (
    "Without a gradient its step must leave weights alone that are where the round began (weights == anchor) if the memory is "
    "as `begin` gives it: leave out weight decay and constants. Otherwise use solvers.SGD(…), or train all parameters together."
)


def further_options(solver: LocalSolver) -> str:
    """The options without which a solver would be plain SGD, with the step of `SgdRule`, in words; empty if there are none.

    >>> from equipoise.solvers import SGD
    >>> further_options(SGD(clip_norm=1.0, rates={"head.*": 0.1})), further_options(SGD(momentum=0.9))
    ('clip_norm and rates', '')
    """
    if is_of_user(solver) or solver_traits(solver).sgd is not None:
        return ""
    given = {name: usual for name, usual in _PLAIN.items() if vars(solver).get(name, usual) != usual}
    plain = given and solver_traits(replace(cast(Any, solver), **given)).sgd is not None
    return " and ".join(given) if plain else ""


def unfit_for_freezing(solver: Any) -> tuple[str, str] | None:
    """Why a solver cannot train a part of a model alone, and the cure; None if it can.

    The engine gives frozen parameters a gradient of 0, and a phase begins at the anchor with a fresh memory. A step acts on
    each number alone, so that a few steps without a gradient show what becomes of frozen parameters.
    """
    traits, options = solver_traits(solver), "Leave this option out, or train all parameters together."
    if traits.numbered:
        return "is told the number of its steps, which such phases do not count", "Write a step without `number`."
    if traits.clip_norm is not None:
        return "clips the norm of the whole gradient, also of what is frozen", options
    if traits.keeps is not None:
        return "keeps a memory between rounds, which such phases do not", options
    start = torch.linspace(-2.0, 2.0, 9)
    try:
        own, weights = copied(solver), start.clone()
        memory = own.begin(weights)
        for _ in range(_STEPS):
            own.step(weights, torch.zeros_like(weights), memory, anchor=start.clone(), lr=0.1)
    except Exception as failure:
        return f"raises {failure!r} in a step without a gradient", _CURE
    if not torch.equal(weights, start):
        return f"moves them without a gradient, by up to {float((weights - start).abs().max()):.3g} in {_STEPS} steps", _CURE
    return None
