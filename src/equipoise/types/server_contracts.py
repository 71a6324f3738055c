"""The contracts of the server's parts: aggregators, server optimisers, and the averaging of iterates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from equipoise.types.own_claims import OWN


class Aggregator(Protocol):
    """Law: permutation-invariant, also where clients are tied; the total is finite for any positive weights, however small.

    If linear, the total is the sum of the totals over chunks under the same weights. A linear aggregator is therefore applied
    chunk by chunk, or client by client; it has no state and gets no losses.
    """

    @property
    def linear(self) -> bool:
        """Whether totals over chunks of a cohort add up to the total over the cohort."""

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """The total (D,) of updates (K, D) under weights (K,) that sum to 1, and the next state."""


@dataclass(frozen=True, eq=False)
class AggregatorTraits:
    """What an aggregator may offer."""

    linear: bool = False  # whether totals over chunks of a cohort add up to the total over the cohort
    needs_losses: bool = False  # whether it is called with losses=(K,), the clients' mean losses
    needs_keys: bool = False  # whether it is called with keys=(K,), a random stream of each client in this round, e.g. for ties
    weighted_sum: bool = field(default=False, metadata=OWN)  # the total is Σ weights · updates and nothing else
    clips_to: float | None = field(default=None, metadata=OWN)  # the total is Σ weights · updates clipped to this norm
    picks_one: bool = field(default=False, metadata=OWN)  # the total is one client's update, whatever the positive weights are
    picks_large_loss: bool = field(default=False, metadata=OWN)  # the total is the update of a client with a large loss
    normalises: Aggregator | None = None  # gets updates that the round has divided by the length of their steps (FedNova)
    around: Aggregator | None = None  # linear, applied to updates minus the last total, which is public and then added again
    steps: float | None = None  # a public number in the place of the cohort's mean length of steps
    keeps_total: bool = False  # whether its state is the total of the round before (centred clipping)


class ServerOptimizer(Protocol):
    """Turns the aggregated update into the next parameters. Law: a zero update from a fresh state changes nothing."""

    def begin(self, params: Tensor) -> Any:
        """The state before the first round, at w^0."""

    def step(self, params: Tensor, total: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The next parameters (D,) and the next state."""


@dataclass(frozen=True, eq=False)
class ServerTraits:
    """What a server optimiser may offer."""

    linear_rate: float | None = field(default=None, metadata=OWN)  # γ, if the step is w + γ · total


class Averaging(Protocol):
    """Which point a run reports and serves, given its iterates w^0, w^1, …; training itself is not changed."""

    def begin(self, params: Tensor) -> Any:
        """The state before the first round, at w^0."""

    def update(self, params: Tensor, state: Any) -> Any:
        """The state after a round that ended at `params`."""

    def iterate(self, params: Tensor, state: Any) -> Tensor:
        """The point to report after that round."""
