"""Measures of the upper tail of a loss vector: VaR, CVaR (superquantile), EVaR and TiVaR, each `(losses, tail, weights=None)`.

With tail α they bound the (1 − α)-quantile from above ever more loosely: VaR ≤ CVaR ≤ EVaR and VaR ≤ TiVaR ≤ EVaR. Source: Li
2023 (thesis), section 7.4, (7.61)–(7.65). Exponentials are of differences to the largest loss, so nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, is_number, require, require_number
from equipoise.risk.superquantile import exact_weights, tail_quantile


def _checked(losses: Tensor, tail: float, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses in float64 with positive weight, and weights that sum to 1."""
    losses = torch.as_tensor(losses).double()
    if losses.dim() != 1 or len(losses) == 0 or not bool(torch.isfinite(losses).all()):
        raise InvalidParameter("losses", "must be a vector of finite numbers, at least one", tuple(losses.shape))
    require_number("tail", tail, "(0, 1]")
    if weights is None:
        return losses, torch.full_like(losses, 1 / len(losses))
    alpha = torch.as_tensor(weights).double()
    good = alpha.shape == losses.shape and bool((alpha >= 0).all()) and float(alpha.sum()) > 0
    require(good, "weights", f"must be {len(losses)} numbers ≥ 0 with a positive sum", tuple(alpha.shape))
    return losses[alpha > 0], (alpha / alpha.sum())[alpha > 0]


def value_at_risk(losses: Tensor, tail: float, weights: Tensor | None = None) -> float:
    """VaR: the weighted (1 − α)-quantile, without interpolation: the smallest loss with a weight of at most α above it.

    `losses` (K,) are finite numbers, `tail` is α in (0, 1], and `weights` (K,) are the clients' weights, equal by default.

    Source: Li 2023 (thesis), section 7.4.1.

    >>> value_at_risk(torch.arange(1.0, 11.0), 0.1)
    9.0
    >>> value_at_risk(torch.tensor([1.0, 2.0, 100.0]), 0.5, torch.tensor([0.2, 0.2, 0.6]))  # more than half is at 100
    100.0
    """
    values, alpha = _checked(losses, tail, weights)
    return float(tail_quantile(values, alpha, tail))


def superquantile(losses: Tensor, tail: float, weights: Tensor | None = None) -> float:
    """CVaR: the mean of the worst share α, min_γ γ + (1/α) E(F − γ)₊.

    `losses` (K,) are finite numbers, `tail` is α in (0, 1], and `weights` (K,) are the clients' weights, equal by default.

    Source: Li 2023 (thesis), (7.61).

    >>> superquantile(torch.arange(1.0, 11.0), 0.2)  # (9 + 10)/2
    9.5
    >>> superquantile(torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.5)
    3.5
    """
    values, alpha = _checked(losses, tail, weights)
    return float(exact_weights(values, alpha, tail) @ values)


def entropic_value_at_risk(losses: Tensor, tail: float, weights: Tensor | None = None) -> float:
    """EVaR: min over t > 0 of R_t − (1/t) log α, with the tilted risk R_t = (1/t) log E e^{tF}.

    `losses` (K,) are finite numbers, `tail` is α in (0, 1], and `weights` (K,) are the clients' weights, equal by default.

    In s = 1/t the function is s log(E e^{F/s} / α). It is convex, so the root of its derivative is found by bisection. If the
    largest loss has a weight of at least α, the derivative is ≥ 0 down to s = 0, and EVaR is that loss. With α = 1 it is the
    mean.

    Source: Li 2023 (thesis), (7.62).

    >>> losses = torch.tensor([0.0, 1.0])
    >>> round(entropic_value_at_risk(losses, 0.5), 4), round(entropic_value_at_risk(losses, 1.0), 4)
    (1.0, 0.5)
    """
    values, alpha = _checked(losses, tail, weights)
    top, spread = values.max(), float(values.max() - values.min())
    if spread == 0:
        return float(top)
    below = values - top
    logs = alpha.log() - math.log(tail)

    def derivative(s: float) -> float:
        return float(torch.logsumexp(logs + below / s, 0) - torch.softmax(logs + below / s, 0) @ below / s)

    low, high = math.log(1e-9 * spread), math.log(1e9 * spread)  # of s
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if derivative(math.exp(middle)) > 0 else (middle, high)
    s = math.exp(high)
    if s > spread:  # towards the mean, as α → 1: the form that keeps its digits there
        return float(top) + s * (float(torch.log1p(alpha @ torch.expm1(below / s))) - math.log(tail))
    return float(top) + s * float(torch.logsumexp(logs + below / s, 0))


def tilted_value_at_risk(losses: Tensor, tail: float, weights: Tensor | None = None, *, floor: float | None = None) -> float:
    """TiVaR: min over real t of floor + (1/t) log[(E e^{t(F − floor)} − (1 − α)) / α]₊.

    `losses` (K,) are finite numbers, `tail` is α in (0, 1], and `weights` (K,) are the clients' weights, equal by default.
    `floor` is a lower bound of the losses, by default the smallest loss. At t → 0 the function has the limit floor + (mean −
    floor)/α. It need not be convex in t. So the minimum is searched on a logarithmic grid of both signs and refined around the
    best point.

    Source: Li 2023 (thesis), (7.63) and (7.64).

    >>> round(tilted_value_at_risk(torch.tensor([0.0, 1.0]), 0.5), 4)  # (1/t) log(½ e^t / ½) = 1 for every t
    1.0
    >>> round(tilted_value_at_risk(torch.tensor([0.0, 0.0, 0.0, 1.0]), 0.5), 3)  # (1/t) log((1 + e^t)/2) → 0 as t → −∞
    0.0
    """
    values, alpha = _checked(losses, tail, weights)
    lowest = float(values.min())
    floor = lowest if floor is None else floor
    require(is_number(floor) and floor <= lowest, "floor", f"must be a lower bound of the losses, at most {lowest:g}", floor)
    gaps = values - floor
    widest = float(gaps.max())
    if widest == 0:
        return float(floor)

    def objective(t: float) -> float:
        if t > 0:  # log(E e^{tG} − (1 − α)) relative to the largest exponent
            top = t * widest
            inner = alpha @ torch.exp(t * gaps - top) - (1 - tail) * math.exp(-top)
            return (top + math.log(max(float(inner), 1e-300)) - math.log(tail)) / t
        ratio = float(alpha @ torch.expm1(t * gaps) + tail) / tail  # (E e^{tG} − 1 + α)/α
        # A difference that is mostly rounding would be a wrong number; without such t the minimum is a bound still.
        return math.log(ratio) / t if ratio > 1e-6 else math.inf

    best = min(widest, float(alpha @ gaps) / tail)  # t → ∞ and t → 0
    scales = torch.logspace(-4, 5, 181, dtype=torch.float64).tolist()
    for sign in (1.0, -1.0):
        grid = [sign * scale / widest for scale in scales]
        heights = [objective(t) for t in grid]
        place = min(range(len(grid)), key=heights.__getitem__)
        around = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        best = min(best, heights[place], _golden(objective, *around))
    return float(floor) + best


def _golden(function: Callable[[float], float], a: float, b: float) -> float:
    """The smallest value found by golden-section search between a and b."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = min(a, b), max(a, b)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(100):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return min(at_left, at_right)
