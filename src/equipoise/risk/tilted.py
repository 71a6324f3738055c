"""Tilted risk: an exponential mean that leans towards the clients with large losses, or away from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import require, require_number
from equipoise.types import RiskValue


def weighed(losses: Tensor, base_weights: Tensor) -> Tensor:
    """The losses (K,), in place of those without a weight the least of the others: no rule then leans on such a loss.

    >>> weighed(torch.tensor([9.0, 2.0, 3.0]), torch.tensor([0.0, 0.5, 0.5]))
    tensor([2., 2., 3.])
    """
    counts = base_weights > 0
    return losses if bool(counts.all()) or not bool(counts.any()) else torch.where(counts, losses, losses[counts].min())


def tilted(losses: Tensor, base_weights: Tensor, tilt: float) -> tuple[Tensor, Tensor]:
    """(1/t) log Σ α_k e^{t F_k} and its gradient α_k e^{t F_k} / Σ, both float64; t = 0 is the mean.

    Relative to the loss that dominates (the largest for t > 0, the smallest for t < 0) no exponent is positive, so nothing
    overflows; and log1p keeps the digits as t → 0, where the sum of exponentials differs little from 1.
    """
    alpha = base_weights.double() / base_weights.double().sum()
    values = weighed(losses, base_weights).double()
    if tilt == 0:
        return alpha @ values, alpha
    top = values.max() if tilt > 0 else values.min()
    exponents = tilt * (values - top)
    small = alpha @ torch.expm1(exponents)  # Σ α e^x − 1, in (−1, 0]
    log_sum = torch.log1p(small) if small > -0.5 else torch.logsumexp(alpha.log() + exponents, 0)
    return top + log_sum / tilt, torch.softmax(alpha.log() + exponents, 0)


@dataclass(frozen=True)
class Tilted:
    """The tilted risk (1/t) log Σ α_k e^{t F_k}: t > 0 leans towards clients with large losses, t < 0 away from them.

    t = 0 is the mean, t → ∞ the worst client, t → −∞ the best. Use t > 0 for fairness, t < 0 against corrupted clients.
    `tracked=True` normalises by a risk tracked over rounds instead of the cohort's own R_S,
    R ← (1/t) log((1 − ρ) e^{tR} + ρ e^{tR_S}), started at the first R_S; the server then steps by e^{t(R_S − R)}, at most 1/ρ.

    Source: Li 2023 (thesis), chapter 7, section 7.7.2.2 and Algorithm 16; Pillutla et al. 2023, section 6 (baseline).

    >>> risk = Tilted(tilt=1.0)(torch.tensor([1.0, 3.0]).log(), torch.tensor([0.5, 0.5]))
    >>> round(float(risk.value.exp()), 4), [round(w, 4) for w in risk.weights.tolist()]  # ½ · 1 + ½ · 3; weights as 1 : 3
    (2.0, [0.25, 0.75])
    """

    tilt: float = 1.0  # t, in units of 1/loss
    tracked: bool = False  # normalise by a risk tracked over rounds
    rho: float = 0.5  # ρ in (0, 1]: the share of the newest cohort

    pure: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True
    keeps_everyone: ClassVar[bool] = True
    needs_ids: ClassVar[bool] = False
    client_form: ClassVar[str] = "loss"

    def __post_init__(self) -> None:
        require_number("tilt", self.tilt, "(-∞, ∞)", "Positive for fairness, negative for robustness; 0 is the mean.")
        require(not self.tracked or self.tilt != 0, "tracked", "needs a tilt other than 0", self.tracked)
        require_number("rho", self.rho, "(0, 1]")

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The tilted risk and its weights ∝ α_k e^{tF_k}; the state is what the server tracks."""
        value, weights = tilted(losses, base_weights, self.tilt)
        if not self.tracked:
            return RiskValue(value.to(losses.dtype), weights.to(base_weights.dtype), state)
        before = value if state is None else state
        mixed = torch.tensor([self.rho, 1 - self.rho], dtype=torch.float64, device=value.device).log()
        # t(R − R_S) at the new R; its exponential is never formed, only that of its negative, which is at most 1/ρ.
        change = torch.logsumexp(mixed + torch.stack([torch.zeros_like(value), self.tilt * (before - value)]), 0)
        weights = weights * torch.exp(-change)
        return RiskValue(value.to(losses.dtype), weights.to(base_weights.dtype), value + change / self.tilt)

    def client_weight(self, loss: Tensor, base_weight: Tensor, public: Tensor | float) -> Tensor:
        """The weight that a client computes by itself when `public` is a bound B on losses: α e^{t(F − B)}, at most α.

        F is its `loss` (), clipped to [0, B], and α its `base_weight` (). For t < 0 the weight is α e^{tF}. Divided by their
        sum over clients, these weights are those of the risk.
        """
        clipped = loss.double().clamp(0.0, float(public))
        largest = float(public) if self.tilt > 0 else 0.0
        return (base_weight * torch.exp(self.tilt * (clipped - largest))).to(base_weight.dtype)

    @property
    def server_step(self) -> Callable[..., float] | None:
        """When tracked: the sum of the weights, which the round divides by, is the server's step."""
        return _sum_of_weights if self.tracked else None


def _sum_of_weights(*, weight_sum: Tensor, **_: Any) -> float:
    return float(weight_sum)
