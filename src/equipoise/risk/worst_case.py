"""Agnostic federated learning: a mixture of clients that moves towards those with the largest losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import IncompatibleParts, require_number
from equipoise.types import RiskValue


def project_on_simplex(point: Tensor) -> Tensor:
    """The nearest point with entries ≥ 0 that sum to 1, in float64: max(v_k − τ, 0) with τ such that they do.

    With v sorted downwards, the first j entries stay positive as long as v_j > (v_1 + … + v_j − 1)/j, which is τ at the last
    such j. Shifting all entries alike changes nothing, so the largest is made 0; then τ ≥ −1, and entries below −1 end at 0
    whatever they are, so huge ones do no harm.

    >>> project_on_simplex(torch.tensor([0.5, 1.1, -3.0], dtype=torch.float64))
    tensor([0.2000, 0.8000, 0.0000], dtype=torch.float64)
    """
    shifted = (point.double() - point.double().max()).clamp(min=-1.0)
    descending = shifted.sort(descending=True).values
    levels = (descending.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=torch.float64, device=point.device)
    positive = int((descending > levels).sum())  # at least 1: the first is 0 > −1
    return (shifted - levels[positive - 1]).clamp(min=0.0)


@dataclass(frozen=True, eq=False)
class ClientMixture:
    """Weights λ over clients that sum to 1, float64, and whose they are: ids, or positions where no ids were given."""

    clients: tuple[Any, ...]
    weights: Tensor

    def of(self, clients: tuple[Any, ...]) -> Tensor:
        """The weights in the order of `clients`, who must be the same ones."""
        if clients == self.clients:
            return self.weights
        places = {client: place for place, client in enumerate(self.clients)}
        if len(clients) != len(places) or set(clients) != set(places):
            raise IncompatibleParts(
                f"WorstCase moves a mixture over all clients, so every client must take part in every round; it holds "
                f"{len(places)} clients, and this round has {len(clients)}, not all the same.",
                "Use sampler=sampling.Full().",
            )
        return self.weights[torch.tensor([places[client] for client in clients], device=self.weights.device)]


@dataclass(frozen=True)
class WorstCase:
    """The worst mixture of clients, found by ascent (AFL): clients with large losses gain weight from round to round.

    Value Σ λ_k F_k and weights λ, the mixture of this round, over all clients; the state returned holds the next one,
    λ ← Proj(λ + step · F) on the simplex. λ starts uniform, whatever the base weights are. Every client takes part in every
    round, and a run reports the running average of its models. `step` is in units of 1/loss: 0.1 and 0.01 are the thesis's.

    Source: Li 2023 (thesis), sections 4.3.3 and 4.6.2; Mohri, Sivek, Suresh 2019, Agnostic Federated Learning.

    >>> risk = WorstCase(step=0.1)(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]))
    >>> risk.value, [round(share, 4) for share in risk.state.weights.tolist()]  # (0.6, 0.8), moved back to a sum of 1
    (tensor(2.), [0.4, 0.6])
    """

    unbounded: ClassVar[bool] = True
    full_participation: ClassVar[bool] = True
    averaged: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    step: float = 0.1  # how fast the mixture moves, in units of 1/loss

    def __post_init__(self) -> None:
        require_number("step", self.step, "(0, ∞)", "Start with 0.1.")

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """Σ λ_k F_k with the weights λ of this round; the state is the mixture of the next."""
        ids = tuple(clients) if clients is not None else tuple(range(len(losses)))
        values = losses.double()
        mixture = torch.full_like(values, 1 / len(values)) if state is None else state.of(ids).to(values.device)
        ascended = mixture + self.step * (values - values.max())  # relative, so that huge losses do not swallow the mixture
        following = ClientMixture(ids, project_on_simplex(ascended))
        return RiskValue((mixture @ values).to(losses.dtype), mixture.to(base_weights.dtype), following)
