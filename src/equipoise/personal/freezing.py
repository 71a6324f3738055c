"""Solvers of a user's own beside phases of a split model: they must leave parameters alone that get no gradient."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.core.abilities import solver_traits
from equipoise.runs.tried_calls import copied

_STEPS = 5
_CURE = (
    "Without a gradient its step must leave weights alone that are where the round began (weights == anchor) if the memory is "
    "as `begin` gives it: leave out weight decay and constants. Otherwise use solvers.SGD(…), or train all parameters together."
)


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
