"""Where the quantile of the cohort's losses comes from: read off the losses, or found by sums over clients only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers, mass_slack, numbers
from equipoise.errors import require_integer, require_number

_RESCUES = 60
ROUNDING = 1e-12  # relative error allowed to a mean of losses in float64


def tail_quantile(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """The weighted (1 − θ)-quantile: the smallest loss with a mass of at most θ strictly above it; no interpolation.

    With K equal weights and ascending losses this is number max(1, K − ⌊θK⌋). The comparison allows the rounding error of
    the masses, so that θK = 3 computed as 2.9999… or 3.0000…1 picks the same client.

    >>> tail_quantile(torch.tensor([1., 2., 3., 4.]), torch.full((4,), 0.25), 0.5)
    tensor(2.)
    """
    values, alpha = numbers(losses), numbers(base_weights)
    return losses[int(tail_quantile_index(values, alpha / alpha.sum(), tail, base_weights.dtype))]


def tail_quantile_index(losses: Numbers, alpha: Numbers, tail: float, given: torch.dtype) -> np.intp:
    """The index of the weighted (1 − θ)-quantile among the losses; weights α sum to 1 and had the dtype `given` before."""
    order = losses.argsort()
    ordered = alpha[order]
    mass_above = ordered[::-1].cumsum()[::-1] - ordered  # of all later ones in the order
    # Among equal losses the first in the order has the others' mass "above" it; taking the value makes that harmless,
    # because a later equal one has less above it and the same value.
    place: np.intp = order[(mass_above <= tail + mass_slack(given, len(losses))).argmax()]
    return place


def sum_over_clients(contributions: Tensor) -> Tensor:
    """The sum of what each client contributes, (K, …) → (…): in a simulation a plain sum, over a network a secure one."""
    return contributions.sum(0)


def quantile_by_sums(
    losses: Tensor,
    base_weights: Tensor,
    tail: float,
    *,
    iterations: int,
    tolerance: float,
    secure_sum: Callable[[Tensor], Tensor] = sum_over_clients,
) -> Tensor:
    """The weighted (1 − θ)-quantile less ε, in float64, from sums over clients and nothing else.

    μ ← (Σ β_k x_k + (1 − 2θ) Σ α_k) / Σ β_k with β_k = α_k / max(|x_k − μ|, ε), started at the mean, where ε is
    `tolerance` × the mean absolute deviation. All is done on (x_k − mean) / deviation, which changes nothing but the range of
    the numbers. Each call of `secure_sum` takes one row per client; the rows are computed by the clients, the rest is public.
    """
    alpha, values = base_weights.double(), losses.double()
    sums = secure_sum(torch.stack([alpha, alpha * values], 1))  # (2,)
    alpha, mean = alpha / sums[0], sums[1] / sums[0]
    deviation = secure_sum(alpha * (values - mean).abs())
    relative = (values - mean) / torch.where(deviation > 0, deviation, 1.0)
    place = torch.zeros_like(mean)
    for _ in range(iterations):
        beta = alpha / (relative - place).abs().clamp(min=tolerance)
        sums = secure_sum(torch.stack([beta * relative, beta], 1))
        place = (sums[0] + (1 - 2 * tail)) / sums[1]
    released = mean + deviation * (place - tolerance) - ROUNDING * mean.abs()
    step = tolerance * deviation
    for _ in range(_RESCUES):  # with a tiny tail μ approaches the largest loss so slowly that it may still lie above it
        if float(secure_sum(alpha * (values >= released))) > 0:
            break
        released, step = released - step, 2 * step
    return released


@dataclass(frozen=True)
class Exact:
    """The quantile read off the losses, which the server sees one by one.

    Source: Pillutla et al. 2023, Algorithm 1.

    >>> Exact()(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 0.25), 0.5)
    tensor(2.)
    """

    reads_losses: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The weighted (1 − tail)-quantile of losses (K,): one of them, ()."""
        return tail_quantile(losses, base_weights, tail)


@dataclass(frozen=True)
class SecureSums:
    """The quantile by sums over clients, which a secure sum can compute without showing anybody a single loss.

    This hides losses from sight, but it is NOT differential privacy: the sums and the quantile itself are released as they
    are, and they depend on every client.

    Majorisation–minimisation, one secure sum of two numbers per iteration. What is released is μ − ε, with ε = `tolerance`
    × the mean absolute deviation of the losses, so that the client at the quantile still finds itself at or above it; it
    may lie that much below the smallest loss. Losses whose difference is below ε count as equal. One very large loss makes
    ε large, and then more clients are kept.

    The iteration is μ ← (Σ β_k F_k + (1 − 2θ) Σ α_k)/Σ β_k with β_k = α_k / max(|F_k − μ|, ε), started at the mean.

    Measured with the defaults on 10 to 1000 clients (uniform, lognormal, Pareto, two clusters, an outlier; equal and unequal
    weights; tails from 0.05 to 1): the mass beyond μ is within 0.015 of the tail in all cohorts; where the quantile is unique
    and the tail below 1, μ comes within ε of it in nine of ten or more. With 100 iterations the mass is within 0.03, with 50
    within 0.05. If μ still lies above every loss, which only tiny tails bring about, it is lowered until somebody is kept.

    Source: Laguel et al. 2020, appendix B.1, (17), with 2τ − 1 for the misprinted 2q − 1 and with ε, without which the
    iteration stops at any loss that it hits.

    >>> found = SecureSums()(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.full((5,), 0.2), 0.5)
    >>> round(float(found), 2)  # the median, 3, less ε
    3.0
    """

    reads_losses: ClassVar[bool] = False

    iterations: int = 200  # the number of steps, each with one secure sum
    tolerance: float = 1e-4  # ε as a share of the mean absolute deviation of the losses

    def __post_init__(self) -> None:
        require_integer("iterations", self.iterations, 1, fix="200 is enough for most cohorts.")
        require_number("tolerance", self.tolerance, "(0, 1)", "It is a share of the spread of the losses: try 1e-4.")

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The weighted (1 − tail)-quantile less ε, () float64, found by sums over clients."""
        return quantile_by_sums(losses, base_weights, tail, iterations=self.iterations, tolerance=self.tolerance)
