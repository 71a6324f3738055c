"""Risks as stages of a round: the losses that somebody wants, and what a risk in the open makes of them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.core.abilities import named_part, solver_traits
from equipoise.core.numbers import are_weights, numbers
from equipoise.errors import InvalidParameter
from equipoise.types import ClientRisk, Cohort
from equipoise.types.round_contracts import UNKNOWN, Ask, Kept, Stage, View, Weights


class Losses(Stage):
    """Somebody wants the losses of the cohort at the round's model, or after the first steps of a solver that adapts."""

    pure = True

    def cohort(self, view: View) -> Generator[Ask, Tensor, Cohort]:
        """The cohort with each client's mean loss over its training data."""
        none = torch.zeros(0, dtype=torch.float64)
        return view.cohort.having(losses=(yield self.question(view)) if len(view.cohort) else none)

    def question(self, view: View) -> Ask:
        """What clients are asked."""
        return Ask("loss", view.state.model, view.cohort, view.rule if solver_traits(view.rule).adapts else None)

    def tell(self, view: View) -> Mapping[str, Any]:
        """The objective, where it is known."""
        return {"risk": float(view.weights.value)}


class TailShare(Stage):
    """A tail that is found by bins of losses: which share of the cohort is in it."""

    pure = True

    def tell(self, view: View) -> Mapping[str, Any]:
        """The share, by weights."""
        return {"tail_share": float((view.weights.each > 0).double().mean())} if len(view.cohort) else {}


@dataclass(frozen=True, eq=False)
class OpenRisk(Stage):
    """The weights of a risk whose losses the server sees. A risk that needs no losses gets zeros."""

    risk: ClientRisk
    traits: Any  # the risk's `RiskTraits`

    name: ClassVar[str] = "risk"

    @property
    def pure(self) -> Any:
        """Whether the risk notes nothing outside its state."""
        return self.traits.pure

    def weights(self, view: View) -> Weights | Kept:
        """The gradient of the risk in the losses."""
        cohort, state = view.cohort, view.state.risk
        if not len(cohort) or (view.losses is None and self.traits.keeps_base_weights):  # the answer is known
            return Weights(UNKNOWN, cohort.weights)
        ids = view.run.data.train.ids_at(cohort.clients) if self.traits.needs_ids else None
        given = view.losses if view.losses is not None else torch.zeros_like(cohort.weights)
        with named_part("risk", self.risk):
            risk = self.risk(given, cohort.weights, clients=ids, state=state)
        if risk.weights.shape != cohort.weights.shape or not are_weights(numbers(risk.weights)):
            rule = "finite weights ≥ 0, one per client"
            smallest = ", ".join(f"{weight:.4g}" for weight in risk.weights.flatten().sort().values[:3].tolist())
            fix = f"Found {risk.weights.numel()}, the smallest {smallest}. See equipoise.testing.check_risk."
            raise InvalidParameter("risk", f"must give {len(cohort)} {rule}", self.risk, fix)
        return Kept(Weights(risk.value, risk.weights), risk.state)


@dataclass(frozen=True, eq=False)
class ScaledStep(Stage):
    """A risk that scales the server's step (q-FFL): by what it makes of losses and norms of the updates that arrived."""

    traits: Any  # the risk's `RiskTraits`
    linear: bool

    place: ClassVar[str] = "rescale"

    def total(self, view: View) -> Tensor | None:
        """The total times the factor."""
        if view.answer is None or view.total is None:
            return None
        arrived = torch.isfinite(view.answer.sq_norms)  # the others are left out of the step as they are of the total
        sq_norms, base = view.answer.sq_norms[arrived], view.workers.weights[arrived]
        losses = view.workers.columns.get("losses")
        if not self.linear:  # or one huge update stalls the run
            sq_norms = sq_norms.clamp(max=float(sq_norms.median()))
        lr, weight_sum = view.rule.learning_rate(view.cohort.round), view.weights.each.sum()
        seen = None if losses is None else losses[arrived]
        factor = self.traits.server_step(losses=seen, base_weights=base, weight_sum=weight_sum, sq_norms=sq_norms, lr=lr)
        return view.total if float(factor) == 1.0 else view.total * float(factor)
