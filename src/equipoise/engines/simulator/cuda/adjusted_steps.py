"""What captured steps of SGD take beside the gradient of the loss: a pull, a shift, a scale, or a solver with turns of its own.

All of it lies in memory with fixed places, which is filled before the steps of a chunk, so that the graphs of steps stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.params import ParameterLayout
from equipoise.engines.simulator.local_rule import LocalRule, PullKind
from equipoise.engines.simulator.local_work import ChunkWork
from equipoise.solvers.client_steps import memory_of
from equipoise.types import LocalSolver


@dataclass(frozen=True)
class StepKind:
    """What steps need beside SGD's own terms."""

    pull: PullKind = "none"
    scaled: bool = False  # gradients are divided by one vector
    shifted: bool = False  # a vector of each client's own is added to its gradients
    turns: LocalSolver | None = None  # a solver whose steps go by turns, in place of SGD
    lr: float | None = None  # of such a solver

    @classmethod
    def of(cls, rule: LocalRule) -> StepKind:
        """The kind of steps that a rule takes."""
        traits = rule.traits
        turns = rule.solver if traits.by_turns else None
        shifted, lr = traits.shift is not None, rule.lr if traits.by_turns else None
        return cls(rule.pull, traits.preconditioner is not None, shifted, turns, lr)

    @property
    def is_plain(self) -> bool:
        """Whether steps need nothing."""
        return self == StepKind()


class GradientAdjustments:
    """The pull, the scale and the shifts of the clients of a chunk."""

    def __init__(self, layout: ParameterLayout, kind: StepKind, clients: int, like: Tensor) -> None:
        self.kind, wide = kind, layout.dimension
        self.anchor = like.new_zeros(clients if kind.pull != "none" else 0, wide)
        self.strength = like.new_zeros(clients, wide if kind.pull == "one number per parameter" else 1)
        self.scale = like.new_ones(wide if kind.scaled else 0)
        self.shift = like.new_zeros(clients if kind.shifted else 0, wide)
        self._anchors = layout.unflatten(self.anchor) if len(self.anchor) else {}
        self._strengths = layout.unflatten(self.strength) if self.strength.shape[1] == wide else {}
        self._scales = layout.unflatten(self.scale) if len(self.scale) else {}
        self._shifts = layout.unflatten(self.shift) if len(self.shift) else {}

    def load(self, work: ChunkWork) -> None:
        """Put a chunk's values in place."""
        count, traits, pull = len(work.chunk), work.rule.traits, work.starts.pull
        if pull is not None:
            self.anchor[:count] = pull.anchor
            self.strength[:count] = pull.strength.unsqueeze(1) if pull.strength.dim() == 1 else pull.strength
        if traits.preconditioner is not None:
            self.scale.copy_(traits.preconditioner)
        if traits.shift is not None:
            own = 0.0 if work.chunk.rows is None else work.chunk.rows.to(self.shift)
            self.shift[:count] = traits.shift - own

    def adjusted(self, name: str, gradient: Tensor, value: Tensor) -> Tensor:
        """The gradient (k, …) of a parameter with the value (k, …) as a step is to see it."""
        k = len(gradient)
        if self._scales:
            gradient = gradient / self._scales[name]
        if self._shifts:
            gradient = gradient + self._shifts[name][:k]
        if self._anchors:
            each = (
                self.strength[:k].view(-1, *(1,) * (gradient.dim() - 1)) if not self._strengths else self._strengths[name][:k]
            )
            gradient = torch.addcmul(gradient, each, value - self._anchors[name][:k])
        return gradient


class TurnMemory:
    """The memory of a solver by turns, for the clients of a chunk."""

    def __init__(self, solver: LocalSolver, weights: Mapping[str, Tensor]) -> None:
        self.solver = solver
        self.named = {name: solver.begin(value) for name, value in weights.items()}

    def load(self, work: ChunkWork, layout: ParameterLayout) -> None:
        """The memory before the first step: what clients have kept, or nothing."""
        for slots in self.named.values():
            for held in slots:
                held.zero_()
        if work.chunk.rows is not None:
            for slot, flat in enumerate(memory_of(work.chunk.rows, layout.dimension)[0]):
                for name, values in layout.unflatten(flat).items():
                    self.named[name][slot][: len(values)] = values

    def step(self, turn: int, lr: float, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], starts: Any) -> None:
        """The step of a turn, counted from 0, of the first clients."""
        for name, gradient in gradients.items():
            k = len(gradient)
            memory = tuple(each[:k] for each in self.named[name])
            self.solver.step(weights[name], gradient, memory, anchor=starts[name][:k], lr=lr, number=turn + 1)  # type: ignore[call-arg]

    def rows(self, work: ChunkWork, layout: ParameterLayout) -> Tensor | None:
        """What each client keeps, (k, M · D + 1); None if they keep nothing."""
        if work.chunk.rows is None:
            return None
        after, count, wide = work.chunk.rows.clone(), len(work.chunk), layout.dimension
        for slot in range((after.shape[1] - 1) // wide):
            for name, values in layout.unflatten(after[:, slot * wide : (slot + 1) * wide]).items():
                values.copy_(self.named[name][slot][:count])
        after[:, -1] += work.chunk.steps.to(after)
        return after
