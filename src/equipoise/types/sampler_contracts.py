"""The contract of samplers, which draw the cohort of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from equipoise.types.own_claims import OWN
from equipoise.types.round_values import Cohort


class Sampler(Protocol):
    """Law: positions are distinct and in range, weights positive and summing to 1; a pure function of (seed, round)."""

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The cohort of a round, of clients with base weights `alpha` (n,)."""


@dataclass(frozen=True, eq=False)
class SamplerTraits:
    """What a sampler, or an averaging rule, may offer."""

    everyone: bool = False  # whether all clients take part in every round
    independent: bool = False  # whether each client takes part by a coin of its own (Poisson)
    by_nodes: bool = False  # whether that coin is the node's secret, and all nodes answer alike (NodePoisson)
    by_weight: bool = False  # whether clients are drawn by their base weights
    accounted: bool = field(default=False, metadata=OWN)  # whether the privacy accountant knows these cohorts
    share: float = 1.0  # of clients_per_round that is drawn
    separation: int | None = field(default=None, metadata=OWN)  # rounds of a client are at least so far apart; None: any
    pure: bool = field(default=False, metadata=OWN)  # calls may come early or twice
    buffered: Any = None  # the rule by which clients come and go on a simulated clock (FedBuff), where there are no cohorts
