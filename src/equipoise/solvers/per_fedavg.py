"""Per-FedAvg: local steps towards a model that becomes good for a client after one gradient step of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import require_integer, require_number
from equipoise.solvers.local_optimizer import check_local_work

GRADIENTS = 4  # of one meta-step: at w, at w − αg, at w + δg′ and at w − δg′


@dataclass(frozen=True)
class PerFedAvg:
    """Local SGD on the loss after one gradient step, F_k(w − α∇F_k(w)), with the Hessian by a difference of gradients.

    A meta-step is w ← w − β[g′ − α(∇F(w + δg′) − ∇F(w − δg′))/(2δ)] with g′ = ∇F(w − α∇F(w)): `lr` is β, `inner_lr` α and
    `delta` δ. The bracket is (I − α∇²F(w))g′ up to O(δ²), the gradient of the loss after the inner step. The published method
    draws three batches for it; here all four gradients are taken on one, since the difference of gradients on two batches,
    divided by 2δ, would be mostly noise. For the same reason they share the masks of dropout. `epochs` (or `steps`) counts
    meta-steps, each of which costs four gradients; the losses seen at work are means over all four points.

    The model learned this way is to be adapted: serve it by a personalisation of one inner step or epoch, as in
    Algorithm(solver=PerFedAvg(inner_lr=0.05), personal=personal.Finetuning(epochs=1, solver=SGD(lr=0.05))).

    Source: Fallah, Mokhtari, Ozdaglar 2020 (Per-FedAvg, HF); Li 2023 (thesis), sections 5.3.4 and 5.6.2.
    """

    lr: float = 0.1
    inner_lr: float = 0.1
    delta: float = 0.001
    batch_size: int | None = 10
    epochs: int = 1
    steps: int | None = None

    repeats: ClassVar[int] = GRADIENTS  # every batch is used for that many steps of the engine
    numbered: ClassVar[bool] = True  # a step is told its number, and so which gradient it is given
    by_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("lr", "inner_lr", "delta"):
            require_number(name, getattr(self, name), "(0, ∞)")
        require_integer("batch_size", self.batch_size, 1, none="all examples")
        check_local_work(self.epochs, self.steps)

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """Four times the meta-steps of a client with `size` examples; `effort` counts epochs (or meta-steps)."""
        full = self.epochs if self.steps is None else self.steps
        done = full if effort is None else min(effort, full)
        per_epoch = 1 if self.steps is not None or self.batch_size is None else -(-size // self.batch_size)
        return GRADIENTS * done * per_epoch

    def learning_rate(self, round_index: int) -> float:
        """β, the same in every round."""
        return self.lr

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The w of the meta-step, and what is known of its direction."""
        return torch.zeros_like(weights), torch.zeros_like(weights)

    def step(
        self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float, number: Any = 1
    ) -> None:
        """Take one of the four gradients, and go where the next one is to be taken; `number` counts steps from 1 on."""
        turn = (number - 1) % GRADIENTS
        if not isinstance(turn, Tensor):  # clients at work together are at the same one
            self._take(int(turn), weights, gradient, *memory, lr)
            return
        written, before = (weights, *memory), [value.clone() for value in (weights, *memory)]
        for one in range(GRADIENTS):
            after = [value.clone() for value in before]
            self._take(one, after[0], gradient, *after[1:], lr)
            for value, new in zip(written, after, strict=True):
                value.copy_(torch.where(turn == one, new, value))

    def _take(self, turn: int, weights: Tensor, gradient: Tensor, start: Tensor, direction: Tensor, lr: float) -> None:
        curvature = self.inner_lr / (2 * self.delta)
        match turn:
            case 0:  # ∇F(w)
                start.copy_(weights)
                weights.add_(gradient, alpha=-self.inner_lr)
            case 1:  # g′
                direction.copy_(gradient)
                torch.add(start, gradient, alpha=self.delta, out=weights)
            case 2:  # ∇F(w + δg′)
                torch.sub(start, direction, alpha=self.delta, out=weights)
                direction.sub_(gradient, alpha=curvature)
            case _:  # ∇F(w − δg′)
                direction.add_(gradient, alpha=curvature)
                torch.sub(start, direction, alpha=lr, out=weights)
