"""The memory of a solver for many clients at once: fresh in every round, or kept by each client since its last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.core.params import ParameterLayout
from equipoise.solvers.client_steps import memory_of
from equipoise.types import LocalSolver


class StackedMemory:
    """The solver's memory of many clients in a round, and how many steps they have taken.

    Clients that keep their memory begin with rows (k, M · D + 1) of rounds before, and end with the rows for the next one.
    """

    def __init__(self, solver: LocalSolver, layout: ParameterLayout, rows: Tensor | None) -> None:
        self.solver, self.numbered, self.layout, self.kept = solver, solver_traits(solver).numbered, layout, rows
        self.number = 0  # steps taken in this round by those still at work
        self.before = None if rows is None else rows[:, -1].double()  # steps of rounds before, (k,)
        self.taken = None if rows is None else torch.zeros_like(rows[:, -1])  # steps of this round, (k,)
        self.named: dict[str, tuple[Tensor, ...]] = {}

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """The memory before the first step of clients with these weights (k, …)."""
        self.named = {name: self.solver.begin(value) for name, value in weights.items()}
        if self.kept is not None:
            for slot, flat in enumerate(memory_of(self.kept, self.layout.dimension)[0]):
                for name, values in self.layout.unflatten(flat).items():
                    held = self.named[name][slot]
                    held.copy_(values[: len(held)])

    def count_step(self, clients: int) -> None:
        """The first `clients` take another step."""
        self.number += 1
        if self.taken is not None:
            self.taken[:clients] += 1

    def of(self, name: str, clients: int) -> tuple[Tensor, ...]:
        """The memory of one parameter of the first clients."""
        return tuple(each[:clients] for each in self.named[name])

    def told(self, like: Tensor) -> dict[str, Any]:
        """The number of the step, for a solver that wants to know it: one for all clients, or one each that broadcasts."""
        if not self.numbered:
            return {}
        if self.before is None:
            return {"number": self.number}
        return {"number": (self.before[: len(like)] + self.number).view(-1, *(1,) * (like.dim() - 1))}

    def rows(self) -> Tensor | None:
        """What each client keeps until its next round, (k, M · D + 1); None if they keep nothing."""
        if self.kept is None or self.before is None or self.taken is None:
            return None
        after, dimension = self.kept.clone(), self.layout.dimension
        for slot in range((after.shape[1] - 1) // dimension):
            for name, values in self.layout.unflatten(after[:, slot * dimension : (slot + 1) * dimension]).items():
                held = self.named[name][slot] if self.named else values[:0]
                values[: len(held)] = held
        after[:, -1] = self.before + self.taken
        return after
