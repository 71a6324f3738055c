"""The local steps of one client, and what all engines must do alike: clipping, numbers of steps, and kept memory.

Where clients keep the memory of their optimiser between rounds, a row holds the memory tensors of a client one after another, D
numbers each, and then the number of steps that the client has taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.core.params import ParameterLayout
from equipoise.solvers.local_optimizer import rates_by_name
from equipoise.types import LocalSolver


def memory_of(rows: Tensor, dimension: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Of rows (…, M · D + 1) the memory, M tensors (…, D), and the steps taken (…,) in float64."""
    starts = range(0, rows.shape[-1] - 1, dimension)
    return tuple(rows[..., i : i + dimension].clone() for i in starts), rows[..., -1].double()


def rows_of(memory: Sequence[Tensor], steps: Tensor) -> Tensor:
    """The rows (…, M · D + 1) of M memory tensors (…, D) and the steps taken (…,), in float32 or better."""
    whole = torch.cat([*memory], dim=-1)
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    return torch.cat([whole, steps.unsqueeze(-1).to(whole)], dim=-1)


def clip_factors(sq_norms: Tensor, bound: float) -> Tensor:
    """By what gradients with these squared L2 norms are scaled: bound / (norm + 10⁻⁶), at most 1.

    This is what torch.nn.utils.clip_grad_norm_ does.
    """
    return (bound / (sq_norms.sqrt() + 1e-6)).clamp(max=1.0)


class ClientSteps:
    """One client at work in a round: its weights (D,), the memory of its solver, and how many steps it has taken."""

    def __init__(
        self, solver: LocalSolver, layout: ParameterLayout, params: Tensor, round_index: int, row: Tensor | None = None
    ) -> None:
        self.solver, self.traits, self.layout = solver, solver_traits(solver), layout
        self.params, self.weights = params, params.clone()
        self.lr, self.rates = solver.learning_rate(round_index), rates_by_name(self.traits.rates, layout.names)
        self.number, self.before, self.kept = 0, 0, row is not None  # steps of this round, and of rounds before
        self.memory = solver.begin(self.weights)
        if row is not None:
            memory, before = memory_of(row.to(params.device), len(params))
            self.memory, self.before = tuple(each.to(params.dtype) for each in memory), int(before)

    def clipped(self, gradient: Tensor) -> Tensor:
        """The gradient of the loss (D,), scaled down to `clip_norm` if the solver has one."""
        bound = self.traits.clip_norm
        return gradient if bound is None else gradient * clip_factors(gradient.square().sum(), bound)

    def take(self, gradient: Tensor, *, last: bool) -> None:
        """Take the next step along a gradient (D,), in place; a solver with a `finish` takes that as the last one."""
        step: Any = self.traits.finish if self.traits.finish is not None and last else self.solver.step
        lr = self.lr if self.traits.step_factor is None else self.lr * float(self.traits.step_factor(self.number))
        self.number += 1
        told = {"number": self.before + self.number} if self.traits.numbered else {}
        if not self.rates:
            step(self.weights, gradient, self.memory, anchor=self.params, lr=lr, **told)
            return
        named = [self.layout.unflatten(each) for each in (self.weights, gradient, self.params, *self.memory)]
        for name, rate in self.rates.items():
            weights, along, anchor, *memory = (each[name] for each in named)
            step(weights, along, tuple(memory), anchor=anchor, lr=lr * rate, **told)

    def row(self) -> Tensor | None:
        """What the client keeps until its next round, (M · D + 1,); None if it keeps nothing."""
        return rows_of(self.memory, torch.tensor(self.before + self.number)) if self.kept else None
