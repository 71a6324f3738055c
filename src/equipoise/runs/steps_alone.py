"""What the steps of a solver do on their own, without clients: the cases that trials and checks of solvers look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.solvers.local_optimizer import LocalOptimizer

BEGIN_CURE = "Write `begin`: it gets the weights, and returns e.g. (torch.zeros_like(weights),)."
_STRONG = {"momentum": 0.9, "weight_decay": 1e3, "prox": 1e3}  # options of SGD that a step of one's own may forget


def is_memory(memory: object, weights: Tensor) -> bool:
    """Whether what a solver's `begin` returned for parameters is a tuple of tensors of their shape."""
    return isinstance(memory, tuple) and all(isinstance(each, Tensor) and each.shape == weights.shape for each in memory)


def step_call(told: Any) -> str:
    """How a solver's step is called; `told` holds the number of the step if the solver is told it."""
    return f"step(weights, gradient, memory, anchor=…, lr=…{', number=…' * bool(told)})"


def some_steps(solver: Any, lr: float = 0.1) -> tuple[Tensor, Tensor]:
    """The parameters of a client before and after a few steps."""
    traits, gen = solver_traits(solver), torch.Generator().manual_seed(1)
    weights, anchor = torch.randn(2, 8, generator=gen)
    before, memory = weights.clone(), solver.begin(weights)
    for number in range(1, 1 + max(3, traits.repeats)):
        told = {"number": number} if traits.numbered else {}
        solver.step(weights, torch.randn(8, generator=gen), memory, anchor=anchor, lr=lr, **told)
    return before, weights


def failure_without_memory(solver: Any) -> str:
    """The error of steps that look for a memory where `begin` returns none; empty if there is no such error."""
    if solver.begin(torch.zeros(8)):
        return ""
    try:
        some_steps(solver)
    except IndexError as failure:
        return f"the memory is empty, and a step gives {failure!r}"
    except Exception:
        return ""  # another error, which is shown where it happens
    return ""


def _steps_downhill(solver: Any, memory: tuple[Tensor, ...], weights: Tensor, lr: float = 1e-4) -> set[int]:
    """A few steps on ½‖w‖², from an anchor where the weights are now; the places in memory that were not 0 after some step."""
    traits, anchor = solver_traits(solver), weights.clone()
    used: set[int] = set()
    for number in range(1, 1 + max(5, traits.repeats)):
        told = {"number": number} if traits.numbered else {}
        solver.step(weights, weights.clone(), memory, anchor=anchor, lr=lr, **told)
        used |= {place for place, each in enumerate(memory) if bool((each != 0).any())}
    return used


def convex_losses(solver: Any) -> tuple[float, float]:
    """½‖w‖² of a client before and after a few small steps along its gradient w; proximal term and decay point there, too."""
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
    before = float(weights.square().sum() / 2)
    _steps_downhill(solver, solver.begin(weights), weights)
    return before, float(weights.square().sum() / 2)


def lost_memories(solver: Any) -> list[int]:
    """Places in the memory, from 0, of tensors that begin at zero, that steps use and that no step changes: they are lost."""
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    memory = solver.begin(weights.clone())
    plain = weights.clone()
    used = _steps_downhill(solver, memory, plain, 0.1)  # Lookahead empties its memory again every few steps
    found = []
    for place in range(len(memory)):
        if place in used or bool((solver.begin(weights.clone())[place] != 0).any()):
            continue
        other, moved = solver.begin(weights.clone()), weights.clone()
        other[place].copy_(torch.linspace(-3.0, 3.0, 8, dtype=torch.float64))
        _steps_downhill(solver, other, moved, 0.1)
        if not torch.equal(moved, plain):
            found.append(place)
    return found


def _with_option(solver: Any, name: str, value: float) -> Any:
    return replace(solver, **{name: value})


def ignored_options(solver: Any) -> list[str]:
    """Options of SGD and Adam that are set and that a `step` of the user's own does not use, as "name=value"."""
    kind: Any = type(solver)
    if not issubclass(kind, LocalOptimizer) or not is_of_user(kind.step):
        return []
    found, given = [], vars(solver)
    if torch.equal(some_steps(solver, 0.1)[1], some_steps(solver, 0.2)[1]):
        found.append("lr")
    for name, strong in _STRONG.items():
        value = given.get(name, 0.0)
        if not value:
            continue
        try:
            with_it, without = (some_steps(_with_option(solver, name, size))[1] for size in (strong, 0.0))
        except Exception:  # noqa: S112 — an option that another one or the step needs
            continue
        if torch.equal(with_it, without):
            found.append(f"{name}={value:g}")
    return found
