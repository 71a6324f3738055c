"""The contracts of client risks, and of the sources that Δ-FL takes quantiles from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from equipoise.types.own_claims import OWN
from equipoise.types.round_values import RiskValue

if TYPE_CHECKING:
    from equipoise.privacy.private_quantile import PrivateQuantile
    from equipoise.privacy.secure_histogram import SecureHistogram


class ClientRisk(Protocol):
    """Law: weights are the (sub)gradient of the value; permutation-equivariant; finite for any finite losses."""

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The risk of losses (K,) under base weights (K,), of clients with these ids, given the state of the round before."""


@dataclass(frozen=True, eq=False)
class RiskTraits:
    """What a risk may offer."""

    needs_losses: bool = True  # whether the weights depend on the losses
    needs_ids: bool = field(default=True, metadata=OWN)  # whether it asks who the clients are
    keeps_base_weights: bool = field(default=False, metadata=OWN)  # the weights are the base weights, the state never changes
    full_participation: bool = False  # whether every client must take part in every round
    averaged: bool = False  # whether a run should report the mean of its iterates
    pure: bool = field(default=False, metadata=OWN)  # calls may come early or twice: nothing is noted outside the state
    unbounded: bool = field(default=False, metadata=OWN)  # a client that lies about its loss may get nearly all of the weight
    keeps_everyone: bool = field(default=False, metadata=OWN)  # all weights are positive, whatever the losses are
    # (*, losses, base_weights, weight_sum, sq_norms, lr): scales the server's step
    server_step: Callable[..., float] | None = None
    # (loss, base_weight, public): what a client finds alone
    client_weight: Callable[[Tensor, Tensor, Any], Tensor] | None = None
    # what weights need under secure sums: nothing, a quantile, a loss bound, or sums of losses over public groups
    client_form: Literal["base", "filter", "loss", "groups"] | None = None
    tracked: bool = False  # whether the server follows the risk's value from the losses
    tail: float = 1.0  # the share of clients that a filter keeps
    filters: bool = False  # whether clients are kept whole or not at all
    eta_every: int = 1  # rounds in which a filter uses one quantile
    quantile: QuantileSource | None = None  # where it takes the quantile of the losses from; None: it needs none
    groups: Mapping[str, str] | Callable[[str], str] | None = None  # the group of each client
    group_of: Callable[[str], str] | None = None  # the group of a client, by its id
    step: float | None = None  # of a mixture over clients
    terms: Sequence[tuple[float, ClientRisk]] = ()  # of a sum of risks


class QuantileSource(Protocol):
    """Where Δ-FL takes the cohort's quantile from. Law: a finite number, between the smallest and the largest loss up to the
    source's own tolerance.
    """

    @property
    def reads_losses(self) -> bool:
        """Whether the server sees each loss; if not, clients filter themselves by the quantile that is released."""

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The weighted (1 − tail)-quantile, or what is released in its place: ()."""


@dataclass(frozen=True, eq=False)
class QuantileTraits:
    """What a source of quantiles may offer."""

    reads_losses: bool = True  # whether the server sees each loss
    exact: bool = field(default=False, metadata=OWN)  # the quantile is read off the losses
    calibrated: Callable[..., PrivateQuantile] | None = None  # its noise is set by a privacy budget
    iterations: int | None = None  # of secure sums that find the quantile
    histogram: SecureHistogram | None = None  # counts of losses in bins, by secure sums
    tolerance: float = 0.0  # how far outside of the losses the quantile may lie, as a share of their range
