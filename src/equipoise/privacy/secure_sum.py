"""Sums of integers modulo M, of which nobody learns more than the sum; and how vectors of floats become integers.

A client does three things alone: it clips, it rounds to a grid (`quantise`), it adds its share of noise. Then a secure
sum adds the clients' rows up modulo M: the centred residue of the sum, in [−M/2, M/2), and nothing else comes out. In a
simulation that is plain arithmetic with the wraparound of the real thing; over a network it is a masking protocol. Whoever
calls it sees the sum, and has no other way to the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, is_integer, require, require_integer, require_number
from equipoise.privacy.random_source import RandomSource

LARGEST_MODULUS = 1 << 62
EXACT = 1 << 52  # beyond it a float64 has no fraction left to round
_ROUNDINGS = 100


def residues(values: Tensor, modulus: int) -> Tensor:
    """A client's side: its numbers modulo M, in [0, M). A protocol adds its mask, uniform modulo M, to these."""
    if modulus & (modulus - 1) == 0:
        return values & (modulus - 1)  # of a two's complement: the same as the remainder, and faster
    return values.remainder(modulus)


def centred(total: Tensor, modulus: int) -> Tensor:
    """The server's side: the representative in [−M/2, M/2) of a residue, by which negative sums come back as such.

    >>> centred(torch.tensor([0, 3, 4, 7]), 8)
    tensor([ 0,  3, -4, -1])
    """
    half = modulus // 2
    return residues(total + half, modulus) - half


def check_modulus(modulus: object) -> None:
    """Raise InvalidParameter unless the modulus is an integer in 2 … 2^62."""
    good = is_integer(modulus) and 2 <= modulus <= LARGEST_MODULUS  # type: ignore[operator]
    fix = "required_modulus(...) says how large it must be."
    require(good, "modulus", "must be a whole number from 2 to 2^62", modulus, fix)


@dataclass(frozen=True)
class SimulatedSecureSum:
    """The secure sum of a simulation: the arithmetic of a real one, wraparound included, without its cryptography.

    Masks cancel in the sum, so that leaving them out changes nothing in it. Between the clients' residues and the sum there is
    one addition, and nothing reads a single row.
    """

    modulus: int

    def __post_init__(self) -> None:
        check_modulus(self.modulus)

    def sum(self, contributions: Tensor) -> Tensor:
        """The centred sum modulo M, (d,) int64, of the clients' rows (K, d) int64."""
        good = contributions.dtype == torch.int64 and contributions.dim() == 2
        shown = f"{contributions.dtype} of shape {tuple(contributions.shape)}"
        rule = "must be int64 with one row per client (K, d)"
        require(good, "contributions", rule, shown, "quantise(...) makes whole numbers.")
        at_once = ((1 << 63) - 1) // (self.modulus - 1) - 1  # the most residues that, with one more, add up within int64
        rows = residues(contributions, self.modulus)
        total = torch.zeros_like(rows[:0].sum(0))
        for first in range(0, len(rows), at_once):
            total = residues(total + rows[first : first + at_once].sum(0), self.modulus)
        return centred(total, self.modulus)

    def add(self, total: Tensor, row: Tensor) -> Tensor:
        """A centred sum (d,) with one more row (d,) int64 in it."""
        return centred(total + residues(row, self.modulus), self.modulus)  # below 3/2 · 2^62


# ------------------------------------------------------------------------------------------------------ from floats to integers


def check_grid(clip: float, step: float) -> None:
    """Refuse a clip bound or a step that is not a positive number."""
    for name, value in (("clip", clip), ("step", step)):
        require_number(name, value, "(0, ∞)", "clip bounds a client's L2 norm; step is the grid's width.")


def rounded_norm_bound(clip: float, step: float, dimension: int, *, failure: float | None = None) -> float:
    """A bound, in steps, of the L2 norm of a vector of norm ≤ C after stochastic rounding to a grid of step γ: the sensitivity.

    Without `failure` the worst case, C/γ + √D. With a probability β = `failure` the smaller of it and the root of

        (C/γ)² + D/4 + √(2 log 1/β) · (C/γ + √D/2),

    which rounding exceeds with probability at most β (Hoeffding: coordinate i adds 2⌊x_i⌋ + 1 with the probability of its
    fraction, and ‖⌊x⌋ + ½‖ ≤ ‖x‖ + √D/2). `quantise` rounds again when it does, so that the bound always holds.

    Source: Kairouz, Liu and Steinke 2021, the conditional rounding of the distributed discrete Gaussian mechanism.

    >>> rounded_norm_bound(1.0, 0.01, 10_000)
    200.0
    """
    check_grid(clip, step)
    require_integer("dimension", dimension, 1)
    require_number("failure", failure, "(0, 1)", none="the worst case")
    norm, root = clip / step, math.sqrt(dimension)
    worst = norm + root
    if failure is None:
        return worst
    usual = norm**2 + dimension / 4 + math.sqrt(2 * math.log(1 / failure)) * (norm + root / 2)
    return min(worst, math.sqrt(usual))


def required_modulus(
    clip: float, step: float, contributors: int, *, sigma: float = 0.0, dimension: int = 1, failure: float = 1e-9
) -> int:
    """The smallest power of two that sums of clipped vectors with noise do not leave, but with probability `failure`.

    A coordinate of a client is at most ⌈C/γ⌉ steps in size, also after rounding. The noise of m clients, N_Z(0, σ²) each (σ in
    steps), is sub-Gaussian with variance mσ², so that in none of D coordinates it exceeds √(2mσ² log(2D/β)):
    M ≥ 2 + 2m⌈C/γ⌉ + 2√(2mσ² log(2D/β)). A sum that wraps around costs accuracy, not privacy.
    """
    check_grid(clip, step)
    for name, value in (("contributors", contributors), ("dimension", dimension)):
        require_integer(name, value, 1)
    require_number("sigma", sigma, "[0, ∞)")
    require_number("failure", failure, "(0, 1)")
    noise = math.sqrt(2 * contributors * sigma**2 * math.log(2 * dimension / failure))
    modulus = power_of_two_above(2 + 2 * contributors * math.ceil(clip / step) + 2 * noise)
    if modulus > LARGEST_MODULUS:
        fix = f"A step of {step * (modulus / LARGEST_MODULUS):.3g} or more fits."
        raise InvalidParameter("step", "must leave the sum room in 62 bits", step, fix)
    return modulus


def power_of_two_above(bound: float) -> int:
    """The smallest power of two that is at least `bound`: the modulus that a given number of bits pays for."""
    return 1 << max(1, (math.ceil(bound) - 1).bit_length())


def quantise(
    values: Tensor, *, step: float, source: RandomSource, norm_bound: float | None = None, modulus: int | None = None
) -> Tensor:
    """The rows of `values` (K, D), in steps, each coordinate rounded up or down so that its mean is kept: (K, D) int64.

    x/γ becomes ⌊x/γ⌋ + 1 with the probability of its fraction, else ⌊x/γ⌋, each coordinate by itself; the probability is that
    of float64, to 53 bits. A row whose norm exceeds `norm_bound` (in steps, see `rounded_norm_bound`) is rounded again as a
    whole: the check is on the integers that are sent, so that the sensitivity is that bound whatever the floats did.
    With a bound for failure β this happens to a row with probability ≤ β, and shifts the mean by no more than that.
    `modulus` refuses a row that is too large to be told from another modulo M.

    Each row is rounded by its client alone; the batch of clients is a simulation's.
    """
    check_grid(1.0, step)
    good = values.is_floating_point() and values.dim() == 2
    shown = f"{values.dtype} of shape {tuple(values.shape)}"
    require(good, "values", "must be floats with one row per client (K, D)", shown)
    limit = EXACT if modulus is None else min(EXACT, (modulus - 1) // 2)
    rounded = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    for row, whole in zip(values, rounded, strict=True):  # row by row: it stays in the cache, and memory for one row is enough
        _round_row(row.double() / step, whole, limit, norm_bound, source)
    return rounded


def _round_row(scaled: Tensor, whole: Tensor, limit: int, norm_bound: float | None, source: RandomSource) -> None:
    """Fill `whole` (D,) int64 with a stochastic rounding of `scaled` (D,) float64."""
    largest = float(scaled.abs().max()) if len(scaled) else 0.0
    if not (largest < math.inf and math.ceil(largest) <= limit):  # NaN is not below infinity
        rule = f"must be finite and within ±{limit} steps: half of the modulus, and never more than 2^52"
        fix = "Clip the update first, take a larger step, or a larger modulus."
        raise InvalidParameter("values / step", rule, largest, fix)
    below = scaled.floor()
    chance = scaled - below
    for _ in range(_ROUNDINGS):
        draws = (source.words(len(scaled)) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # uniform on multiples of 2^−53
        whole.copy_(below + (torch.from_numpy(draws).to(scaled.device) < chance))
        if norm_bound is None or norm_is_within(whole, norm_bound):
            return
    rule = f"must have a norm that rounds to at most {norm_bound:.6g} steps"
    fix = "Clip rows to the norm that rounded_norm_bound(clip, step, dimension) was asked for."
    raise InvalidParameter("values", rule, float(scaled.norm()), fix)


def norm_is_within(whole: Tensor, bound: float) -> bool:
    """Whether Σ x_i² ≤ bound² for integers (D,): in integers where they hold the sum, else in floats to the safe side."""
    size = float(whole.abs().max()) if len(whole) else 0.0
    if size**2 * len(whole) < 2.0**62:
        return int(whole.square().sum()) <= bound**2
    return float(whole.double().square().sum()) <= bound**2 * (1 - 1e-9)
