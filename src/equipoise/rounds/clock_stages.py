"""What a simulated clock adds to a round: factors of staleness, and weights that clients find at the model of their start."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import Diverged
from equipoise.privacy.private_sums import client_weights, mean_loss
from equipoise.types import RiskTraits
from equipoise.types.round_contracts import UNKNOWN, Ask, Fold, Map, Stage, View, Weights


@dataclass(frozen=True, eq=False)
class Stale(Stage):
    """Updates of clients that began long ago weigh less."""

    linear: bool  # whether their sum is streamed in the open: then their weights are multiplied, else the updates

    def fold(self, view: View) -> Fold | None:
        """The fold with the factors."""
        if view.fold is None:
            return None
        factors = {"by": view.workers.columns["factor"]}
        return view.fold.plus(Map("weigh", "factor", factors) if self.linear else Map("normalise", "scale", factors))


@dataclass(frozen=True, eq=False)
class WeightsAtStart(Stage):
    """The weights that clients find alone at the model that they began with: α_k, or by their loss and a public bound."""

    traits: RiskTraits
    bound: float | None

    name: ClassVar[str] = "risk"

    def weights(self, view: View) -> Generator[Ask, Tensor, Weights]:
        """The weights of the buffer."""
        cohort = view.cohort
        if not self.traits.needs_losses or self.bound is None:
            return Weights(UNKNOWN, cohort.weights)
        losses = yield Ask("loss", view.state.model, cohort)
        if not bool(torch.isfinite(losses).any()):
            raise Diverged(cohort.round, view.run.data.train.ids_at(cohort.clients), "loss")
        weights = client_weights(self.traits, losses, cohort.weights, self.bound)
        return Weights(mean_loss(losses.nan_to_num(), weights), weights)
