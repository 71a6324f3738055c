"""FedNova: updates divided by what their local steps add up to, so that clients with more steps do not pull harder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise.aggregators.weighted_mean import WeightedMean
from equipoise.core.abilities import is_part, read
from equipoise.errors import require, require_kind, require_number
from equipoise.types import Aggregator, AggregatorTraits


@dataclass(frozen=True)
class FedNova:
    """Normalised averaging: total = ā Σ π_k u_k/a_k with ā = Σ π_k a_k, a_k the length of client k's local steps.

    a_k is what the solver's own steps, in units of the rate, add up to under a gradient of 1: τ_k for plain SGD,
    (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) with momentum ρ, (1 − (1 − ημ)^τ)/(ημ) with a proximal term μ; weight decay belongs to the
    gradient. With FedAvg the model ends nearer to clients that take more steps, which this removes to first order in the
    rate. With equal steps it is FedAvg, for every solver (the authors' code scales by Σ π τ where there is a proximal term).

    `aggregator` gets the updates u_k ā/a_k: the weighted mean, or a robust one. `steps` is a public number in the place of ā,
    which differential privacy needs: clipping then acts on u_k · steps/a_k.

    Source: Wang et al. 2020 (FedNova, arXiv 2007.07481).

    >>> from equipoise.aggregators import Median
    >>> FedNova(Median()).normalises  # a round normalises the updates, and this aggregator combines them
    Median()
    """

    aggregator: Aggregator = field(default_factory=WeightedMean)  # what combines the normalised updates
    steps: float | None = None  # a public number in place of ā; None: the mean ā of the cohort

    def __post_init__(self) -> None:
        require_kind("aggregator", "aggregator", self.aggregator)
        good = is_part(self.aggregator, "__call__", "linear") and read(AggregatorTraits, self.aggregator).normalises is None
        require(good, "aggregator", "must be another aggregator", self.aggregator, "E.g. aggregators.Median().")
        require_number("steps", self.steps, "(0, ∞)", none="the cohort's own mean")

    @property
    def linear(self) -> bool:
        """Whether the aggregator inside is."""
        return self.aggregator.linear

    @property
    def normalises(self) -> Aggregator:
        """The aggregator of the normalised updates."""
        return self.aggregator

    @property
    def needs_losses(self) -> bool:
        """Whether the aggregator inside uses the losses."""
        return read(AggregatorTraits, self.aggregator).needs_losses

    @property
    def needs_keys(self) -> bool:
        """Whether the aggregator inside asks for random streams of the clients."""
        return read(AggregatorTraits, self.aggregator).needs_keys

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None, **more: Any
    ) -> tuple[Tensor, Any]:
        """What the aggregator inside makes of updates that the round has normalised, (D,)."""
        return self.aggregator(updates, weights, losses=losses, state=state, **more)
