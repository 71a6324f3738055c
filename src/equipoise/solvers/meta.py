"""Meta-learning: clients adapt the model to themselves first, and the server learns a model that adapts well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from equipoise.errors import require_integer, require_number
from equipoise.solvers.sgd import SGD


@dataclass(frozen=True)
class MAML:
    """Inner steps on one part of a client's data, then a step from w^t along the gradient of the rest at the adapted model.

    Every round splits a client's examples at random into D (the share `support`) and D′. The client adapts,
    w_k = w^t − η∇F_k(w^t; D) with η = `inner_lr` (`inner_steps` times), and sends u_k = −lr ∇F_k(w_k; D′), the first-order
    form, as published. Risks see the adapted loss F_k(w_k; D′); with QFair(q) this is q-MAML, with Mean (q = 0) MAML.
    A run's reports show adapted losses. Its final evaluation has, for every training client, the model that it is served, after
    `inner_steps` on all of its training examples ("own"), and the model as it is ("shared"); unseen clients have the latter.

    Source: Li 2023 (thesis), section 4.3.5 and Algorithm 5; Finn, Abbeel, Levine 2017.
    """

    lr: float = 0.1  # the rate of the last step, which is sent
    inner_lr: float = 0.1
    inner_steps: int = 1
    support: float = 0.5

    adapts: ClassVar[bool] = True  # its losses are those after the inner steps
    batch_size: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for name in ("lr", "inner_lr"):
            require_number(name, getattr(self, name), "(0, ∞)")
        require_integer("inner_steps", self.inner_steps, 1)
        require_number("support", self.support, "(0, 1)")

    @property
    def adaptation(self) -> SGD:
        """The inner steps, on all of a client's training examples."""
        return SGD(lr=self.inner_lr, batch_size=None, steps=self.inner_steps)

    @property
    def split(self) -> float:
        """The share of a client's examples that all steps but the last see."""
        return self.support

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """The inner steps and the outer one, whatever the size of the client."""
        return self.inner_steps + 1

    def learning_rate(self, round_index: int) -> float:
        """The rate of the outer step, the same in every round."""
        return self.lr

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """No memory is kept between steps."""
        return ()

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """An inner step."""
        weights.add_(gradient, alpha=-self.inner_lr)

    def finish(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """The outer step: from the server's model, along the gradient at the adapted one."""
        weights.copy_(anchor).add_(gradient, alpha=-lr)
