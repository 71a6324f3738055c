"""Centred clipping: updates are clipped around the last total, not around zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise.aggregators.robust import NormClip, clipped_mean, counted, update_norms, weighted_quantile
from equipoise.errors import require_integer, require_number
from equipoise.types import Aggregator


@dataclass(frozen=True)
class CentredClipping:
    """v ← v + Σ π_k clip(u_k − v, τ), `iterations` times, from the total of the round before; v is the total.

    `radius` is τ; None is the weighted median of ‖u_k − v‖. With a fixed τ, attackers with weight β move v by at most
    iterations · β · τ from where it is if they send v itself, whatever β is. The published guarantee assumes that clients send
    momentum over rounds: solvers.SGD(steps=1, momentum=0.9, dampening=0.9, state="kept"). With a fixed τ and one iteration each
    client can clip its own update around v, which is public: then it goes with secure sums, in simulations.

    Source: Karimireddy, He, Jaggi 2021 (arXiv 2012.10333); weights are ours.

    >>> import torch
    >>> aggregator = CentredClipping(radius=1.0, iterations=1)
    >>> updates, weights = torch.tensor([[0.5], [10.0]]), torch.tensor([0.5, 0.5])
    >>> total, state = aggregator(updates, weights)  # from v = 0: (0.5 + 1)/2
    >>> total, aggregator(updates, weights, state=state)[0]  # then 0.75 + (−0.25 + 1)/2
    (tensor([0.7500]), tensor([1.1250]))
    """

    radius: float | None = None  # τ, the largest distance from v; None: the weighted median distance
    iterations: int = 3  # steps in each round

    linear: ClassVar[bool] = False
    keeps_total: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_number("radius", self.radius, "(0, ∞)", none="the median distance")
        require_integer("iterations", self.iterations, 1)

    @property
    def around(self) -> Aggregator | None:
        """What each client does alone with u_k − v, where that is all: a fixed radius, and one iteration."""
        return NormClip(self.radius) if self.radius is not None and self.iterations == 1 else None

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """The total (D,), which is also the next state; the last total if no update counts."""
        given = counted(updates, weights)
        total = updates.new_zeros(updates.shape[1]) if state is None else state.to(updates)
        for _ in range(self.iterations if len(given.rows) else 0):
            away, radius = given.rows - total, self.radius
            if radius is None:
                radius = float(weighted_quantile(update_norms(away), given.weights, 0.5))
            total = total + clipped_mean(away, given.weights, radius)
        return total, total
