"""The superquantile: the mean loss of the worst tail of clients, and its smooth forms.

Losses F (K,), base weights α (K,) that sum to 1, tail θ in (0, 1]. All arithmetic is in float64,
relative to one of the losses where exponentials or small differences appear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.errors import IncompatibleParts, is_number, require
from equipoise.risk.tilted import tilted
from equipoise.types import RiskValue


def tail_quantile(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """The weighted (1 − θ)-quantile: the smallest loss with a mass of at most θ strictly above it; no interpolation.

    With K equal weights and ascending losses this is number max(1, K − ⌊θK⌋). The comparison allows the rounding error of
    the masses, so that θK = 3 computed as 2.9999… or 3.0000…1 picks the same client.

    >>> tail_quantile(torch.tensor([1., 2., 3., 4.]), torch.full((4,), 0.25), 0.5)
    tensor(2.)
    """
    ascending, order = torch.sort(losses)
    alpha = base_weights[order].double()
    alpha = alpha / alpha.sum()
    mass_above = alpha.flip(0).cumsum(0).flip(0) - alpha  # of all later ones in the order
    # Rounding of the weights themselves, and of adding them up in float64.
    slack = tail * torch.finfo(base_weights.dtype).eps + 4 * len(losses) * torch.finfo(torch.float64).eps
    # Among equal losses the first in the order has the others' mass "above" it; taking the value makes that harmless,
    # because a later equal one has less above it and the same value.
    return ascending[int((mass_above <= tail + slack).nonzero()[0])]


def exact_weights(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """The maximiser of Σ π_k F_k over 0 ≤ π_k ≤ α_k/θ, Σ π_k = 1.

    Clients above the quantile are filled to α_k/θ; those at it share what is left in proportion to α. Source: Pillutla et
    al. 2023, (5)–(7); Laguel et al. 2020, Proposition 2.

    >>> exact_weights(torch.tensor([3., 1., 2.]), torch.full((3,), 1 / 3), 0.5)
    tensor([0.6667, 0.0000, 0.3333])
    """
    alpha = base_weights.double() / base_weights.double().sum()
    quantile = tail_quantile(losses, base_weights, tail)
    above, level = losses > quantile, losses == quantile
    weights = torch.where(above, alpha / tail, 0.0)
    left = (1.0 - weights.sum()).clamp(min=0.0)
    weights = weights + torch.where(level, alpha / alpha[level].sum().clamp(min=1e-300) * left, 0.0)
    return (weights / weights.sum()).to(base_weights.dtype)


def threshold_weights(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """Base weights of the clients at or above the quantile, renormalised.

    Source: Pillutla et al. 2023, Algorithm 1 and (10). When θK is a whole number it keeps one client more than the exact
    weights do: the papers' claim that the two then agree is an erratum.
    """
    kept = torch.where(losses >= tail_quantile(losses, base_weights, tail), base_weights.double(), 0.0)
    return (kept / kept.sum()).to(base_weights.dtype)


def kl_smoothed(losses: Tensor, base_weights: Tensor, tail: float, nu: float) -> tuple[Tensor, Tensor]:
    """Value and weights of max Σ π_k F_k − ν Σ π_k log(π_k/α_k) over the same box.

    Water-filling: π_k = α_k · min(1/θ, e^{(F_k − c)/ν}) with c such that they sum to 1: the j largest losses reach their cap,
    and the rest share what these leave in proportion to α e^{F/ν}. The right j is the smallest at which no other client
    exceeds its cap; more capped clients leave less for the rest, so it is found by bisection.
    Source: Pillutla et al. 2023, (14)–(15). As θ → 0 this is the tilted risk with tilt 1/ν.
    """
    descending, order = torch.sort(losses.double(), descending=True)
    alpha = base_weights[order].double()
    alpha = alpha / alpha.sum()
    left = 1.0 - (alpha.cumsum(0) - alpha) / tail  # what the first j clients at their cap leave, j = 0 … K − 1
    cap = -math.log(tail)

    def log_ratio(j: int) -> Tensor:  # log(π/α) of the clients from j on; relative to F_j, so that nothing is lost
        relative = (descending[j:] - descending[j]) / nu
        return relative - torch.logsumexp(alpha[j:].log() + relative, 0) + left[j].log()

    low, high = 0, int((left > 1e-12).sum())  # `high` itself means that every client before it is capped
    while low < high:
        middle = (low + high) // 2
        if log_ratio(middle)[0] <= cap:
            high = middle
        else:
            low = middle + 1
    ratio = torch.full_like(descending, cap)
    if low < len(ratio):
        ratio[low:] = log_ratio(low) if left[low] > 1e-12 else -math.inf
    ordered = alpha * ratio.clamp(max=cap).exp()
    ordered = ordered / ordered.sum()
    if low == 0:  # nobody at the cap: the tilted risk, whose form keeps its digits for large ν
        value = tilted(descending, alpha, 1 / nu)[0]
    else:
        value = (ordered * (descending - torch.where(ordered > 0, nu * ratio, 0.0))).sum()
    return value, torch.empty_like(ordered).scatter_(0, order, ordered)


def huber_smoothed(losses: Tensor, base_weights: Tensor, tail: float, nu: float) -> tuple[Tensor, Tensor]:
    """Value and weights of min_η η + (1/θ) Σ α_k g_ν(F_k − η).

    g_ν(ρ) is ν/2 for ρ ≤ 0, ρ²/(2ν) + ν/2 up to ν, and ρ beyond; the weights are (α_k/θ) clip((F_k − η*)/ν, 0, 1). They sum
    to 1 at η*: a decreasing, piecewise linear function of η with kinks at F_k and F_k − ν, so η* is found exactly.
    Source: Laguel et al. 2020, (5)–(7).
    """
    alpha = base_weights.double() / base_weights.double().sum()
    top = losses.double().max()
    shifted = losses.double() - top
    if nu <= 1e-9 * float(-shifted.min()):  # smoothing below what float64 resolves: the limit itself
        weights = exact_weights(losses, alpha, tail)
        return top + (weights * shifted).sum(), weights

    def mass(eta: Tensor) -> Tensor:
        return (alpha * ((shifted - eta) / nu).clamp(0.0, 1.0)).sum()

    kinks = torch.cat([shifted, shifted - nu]).sort().values  # the mass falls from 1 to 0 along them
    low, high = 0, len(kinks) - 1  # the last kink whose mass reaches θ, by bisection; the first one's is 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if mass(kinks[middle]) >= tail * (1 - 1e-12) else (low, middle - 1)
    left, right = kinks[low], kinks[min(low + 1, len(kinks) - 1)]
    mass_left, mass_right = mass(left), mass(right)
    step = torch.where(mass_left > mass_right, (mass_left - tail) / (mass_left - mass_right), 0.0)
    eta = left + (right - left) * step.clamp(0.0, 1.0)
    rho = shifted - eta
    inside = rho.square() / (2 * nu) + nu / 2
    smooth = torch.where(rho <= 0, nu / 2, torch.where(rho >= nu, rho, inside))
    weights = alpha / tail * (rho / nu).clamp(0.0, 1.0)
    return top + eta + (alpha * smooth).sum() / tail, weights / weights.sum()


@dataclass(frozen=True)
class Superquantile:
    """The mean loss of the worst tail of clients (CVaR), which Δ-FL minimises.

    `tail` θ in (0, 1]: 1 is the mean over clients, towards 0 it is the worst client. `rule="exact"` (the default) weighs
    the client at the quantile fractionally and is the gradient of the superquantile; `rule="threshold"` keeps every
    client at or above the quantile. `smoothing="kl"` or `"huber"` with strength `nu` > 0 makes the objective smooth.

    Value: max Σ π_k F_k over 0 ≤ π_k ≤ α_k/θ, Σ π = 1; weights: the maximising π.

    Source: Pillutla et al. 2023, (5)–(7), (14)–(15), Algorithms 1 and 3; Laguel et al. 2020, (5)–(7), Algorithm 2.
    """

    tail: float = 0.5
    rule: Literal["exact", "threshold"] | None = None
    smoothing: Literal["kl", "huber"] | None = None
    nu: float | None = None

    def __post_init__(self) -> None:
        require(
            is_number(self.tail) and 0 < self.tail <= 1,
            "tail",
            "must lie in (0, 1]",
            self.tail,
            "0.5 trains on the worse half of the clients; 1.0 is FedAvg.",
        )
        require(self.rule in (None, "exact", "threshold"), "rule", 'must be "exact", "threshold" or None', self.rule)
        require(self.smoothing in (None, "kl", "huber"), "smoothing", 'must be None, "kl" or "huber"', self.smoothing)
        if self.smoothing is None:
            require(self.nu is None, "nu", "is the strength of smoothing and needs one", self.nu, 'Add smoothing="kl".')
        else:
            require(
                is_number(self.nu) and 0 < (self.nu or 0) < math.inf,
                "nu",
                "must be a positive number when smoothing",
                self.nu,
                "Start with a tenth of a typical client loss.",
            )
            if self.rule == "threshold":
                raise IncompatibleParts(
                    f'smoothing="{self.smoothing}" gives every client a weight between 0 and its cap, but rule="threshold" '
                    "keeps a client whole or not at all.",
                    'Use rule="exact", or drop smoothing.',
                )

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        if self.smoothing is not None and self.nu is not None:
            smooth = kl_smoothed if self.smoothing == "kl" else huber_smoothed
            value, weights = smooth(losses, base_weights, self.tail, self.nu)
            return RiskValue(value.to(losses.dtype), weights.to(base_weights.dtype), state)
        rule = threshold_weights if self.rule == "threshold" else exact_weights
        weights = rule(losses, base_weights, self.tail)
        return RiskValue((weights.double() * losses.double()).sum().to(losses.dtype), weights, state)
