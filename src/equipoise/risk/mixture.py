"""Weighted sums of risks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.errors import IncompatibleParts, InvalidParameter, is_number, require, require_kind
from equipoise.types import ClientRisk, RiskTraits, RiskValue


@dataclass(frozen=True, init=False)
class Mixture:
    """A weighted sum of risks, Σ_j c_j · risk_j, e.g. a little of the mean and much of the tail.

    Mixture((0.3, Mean()), (0.7, Superquantile(tail=0.2))): value and weights are the same combination of the parts'.

    `terms` are pairs (c_j, risk_j) with coefficients c_j > 0.

    Source: the mean–CVaR objective of the Δ-FL slides (Laguel, Pillutla, Malick, Harchaoui).

    >>> from equipoise.risk import Mean, Superquantile
    >>> mixed = Mixture((0.5, Mean()), (0.5, Superquantile(tail=0.25)))
    >>> risk = mixed(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 0.25))
    >>> risk.value, risk.weights  # ½ · 2.5 + ½ · 4
    (tensor(3.2500), tensor([0.1250, 0.1250, 0.1250, 0.6250]))
    """

    terms: tuple[tuple[float, ClientRisk], ...]

    def __init__(self, *terms: tuple[float, ClientRisk]) -> None:
        require(len(terms) > 0, "terms", "must hold at least one (coefficient, risk) pair", terms)
        for index, term in enumerate(terms):
            if not (isinstance(term, tuple | list) and len(term) == 2 and callable(term[1]) and not isinstance(term[1], type)):
                fix = "E.g. Mixture((0.3, Mean()), (0.7, Superquantile(0.2)))."
                raise InvalidParameter(f"terms[{index}]", "must be a (coefficient, risk) pair", term, fix)
            require_kind(f"terms[{index}]", "risk", term[1])
            good = is_number(term[0]) and 0 < term[0] < math.inf
            require(good, f"terms[{index}]", "must have a positive coefficient", term[0])
            if read(RiskTraits, term[1]).server_step is not None:
                raise IncompatibleParts(
                    f"{term[1]!r} scales the server's step by its own weights, which a sum with other risks cannot do.",
                    "Use it alone, or mix risks whose weights are normalised.",
                )
        object.__setattr__(self, "terms", tuple((float(c), risk) for c, risk in terms))

    @cached_property
    def _traits(self) -> list[RiskTraits]:
        return [read(RiskTraits, risk) for _, risk in self.terms]

    @property
    def needs_losses(self) -> bool:
        """Whether the weights depend on the losses: if those of any term do."""
        return any(term.needs_losses for term in self._traits)

    @property
    def full_participation(self) -> bool:
        """Whether every client must take part in every round: if any term asks for it."""
        return any(term.full_participation for term in self._traits)

    @property
    def averaged(self) -> bool:
        """Whether a run should report the average of its iterates: if any term asks for it."""
        return any(term.averaged for term in self._traits)

    @property
    def unbounded(self) -> bool:
        """Whether some term may give one client nearly all of the weight."""
        return any(term.unbounded for term in self._traits)

    @property
    def keeps_everyone(self) -> bool:
        """Whether all weights are positive: if those of any term are."""
        return any(term.keeps_everyone for term in self._traits)

    @property
    def pure(self) -> bool:
        """Whether calls may come early or twice: if every term allows it."""
        return all(term.pure for term in self._traits)

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """Σ_j c_j · risk_j, with the weights combined alike; the state holds that of each term."""
        states = state if state is not None else (None,) * len(self.terms)
        parts = [risk(losses, base_weights, clients=clients, state=s) for (_, risk), s in zip(self.terms, states, strict=True)]
        coefficients = [c for c, _ in self.terms]
        value = torch.stack([c * p.value for c, p in zip(coefficients, parts, strict=True)]).sum()
        weights = torch.stack([c * p.weights for c, p in zip(coefficients, parts, strict=True)]).sum(0)
        return RiskValue(value, weights, tuple(p.state for p in parts))
