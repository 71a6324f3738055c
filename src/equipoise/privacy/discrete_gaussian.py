"""The discrete Gaussian N_Z(0, σ²): integers k with probability ∝ exp(−k²/(2σ²)), sampled exactly and in bulk.

Every decision compares integers, and the only randomness is uniform bits, so that the law of the samples is the stated one and
not a rounding of it: Canonne, Kamath and Steinke 2020, Algorithms 1 to 3. The arithmetic of the variance, a rational
number whatever its denominator, is done in Python's integers, once for each size of candidate; the arithmetic of candidates is
done in arrays of 64-bit integers, within bounds that rule out overflow. The time taken depends on what is drawn: this is no
defence against an observer with a stopwatch next to the client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from numbers import Rational, Real

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import is_integer, is_number, require
from equipoise.privacy.random_source import RandomSource

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_GRID = 24  # bits of the coarse part of an exponent; the rest, below 2^−24, is looked at only when it can matter
_CHUNK = 1 << 16  # candidates at a time: their arrays stay in the cache
_TABLE = 1 << 16  # largest table of exponents that is kept
_LARGEST = 1 << 60  # of σ²: then candidates fit in 64 bits


# --------------------------------------------------------------------------------------------------- coins with a rational bias


def _draw_32_bits(source: RandomSource, count: int) -> Ints:
    """`count` uniform numbers of 32 bits."""
    return source.words((count + 1) // 2).view(np.uint32)[:count].astype(np.int64)


def _bernoulli(numerator: Ints | int, denominator: int, count: int, source: RandomSource) -> Flags:
    """`count` coins that show 1 with probability exactly numerator/denominator, each numerator in 0 … denominator.

    A uniform real number is compared to the fraction, its binary digits w at a time. With the first w digits u it is below
    the fraction for sure if numerator · 2^w − u · denominator ≥ denominator, and above if this is ≤ 0; in between, which has a
    probability below 2^−w, the same question is asked of the next digits with that number in the numerator's place.
    """
    digits = min(32, 62 - denominator.bit_length())  # so that all products stay below 2^62
    if digits < 1:
        many = np.broadcast_to(np.asarray(numerator), (count,)).tolist()
        return np.fromiter((_bernoulli_one(n, denominator, source) for n in many), dtype=np.bool_, count=count)
    drawn = _draw_32_bits(source, count)
    if digits < 32:
        drawn >>= 32 - digits
    drawn *= -denominator
    drawn += numerator << digits
    sure = drawn >= denominator
    open_ = drawn > 0
    if np.count_nonzero(open_) != np.count_nonzero(sure):
        undecided = np.flatnonzero(open_ & ~sure)
        sure[undecided] = _bernoulli(drawn[undecided], denominator, len(undecided), source)
    return sure


def _bernoulli_one(numerator: int, denominator: int, source: RandomSource) -> bool:
    """One coin with probability numerator/denominator, for integers of any size: compares 64 binary digits at a time."""
    while 0 < numerator < denominator:
        numerator = (numerator << 64) - int(source.words(1)[0]) * denominator
    return numerator > 0


# ------------------------------------------------------------------------------------------ coins with bias e^−γ, by the series


def _bernoulli_exp(numerator: Ints, denominator: int, source: RandomSource) -> Flags:
    """Coins with probability e^−γ, γ = numerator/denominator in [0, 1].

    Toss coins of bias γ/1, γ/2, γ/3, … until one fails; the number of the one that fails is odd with probability
    1 − γ + γ²/2! − … = e^−γ. Source: Canonne et al. 2020, Algorithm 1.
    """
    again = _bernoulli(numerator, denominator, len(numerator), source)
    result = ~again
    alive, k = np.flatnonzero(again), 1
    while len(alive):
        k += 1
        again = _bernoulli(numerator[alive], denominator * k, len(alive), source)
        if k % 2:
            result[alive[~again]] = True
        alive = alive[again]
    return result


def _bernoulli_exp_minus_one(count: int, source: RandomSource) -> Flags:
    """Coins with probability 1/e: the series of `_bernoulli_exp` at γ = 1, whose first coin never fails."""
    result = np.zeros(count, dtype=np.bool_)
    alive, k = np.flatnonzero(_bernoulli(1, 2, count, source)), 2
    while len(alive):
        k += 1
        again = _bernoulli(1, k, len(alive), source)
        if k % 2:
            result[alive[~again]] = True
        alive = alive[again]
    return result


def _bernoulli_exp_tiny(rest: int, denominator: int, source: RandomSource) -> bool:
    """One coin with probability e^−γ, γ = rest/(denominator · 2^_GRID), given that a uniform number begins with _GRID zeros.

    That number belongs to the first coin of the series, of bias γ: given its first digits, it is a coin of bias γ · 2^_GRID.
    """
    if not _bernoulli_one(rest, denominator, source):
        return True
    k = 2
    while _bernoulli_one(rest, (denominator * k) << _GRID, source):
        k += 1
    return k % 2 == 1


# ---------------------------------------------------------------------------------------------- Laplace, and what is kept of it


def _discrete_laplace(scale: int, count: int, source: RandomSource) -> tuple[Ints, Flags]:
    """About `count` tries at P(k) ∝ e^(−|k|/scale): the sizes |k| and signs of those that succeed, independent of each other.

    |k| = U + scale · V with U in 0 … scale − 1, kept with probability e^(−U/scale), and V geometric with ratio 1/e; a zero
    with a minus sign is dropped, or zero would count twice. Source: Canonne et al. 2020, Algorithm 2.
    """
    if scale == 1:
        size = np.zeros(count, dtype=np.int64)
    else:
        product = _draw_32_bits(source, count) * scale  # a uniform number below `scale` is the high half …
        size = product >> 32
        fair = (product & 0xFFFFFFFF) >= (1 << 32) % scale  # … if those that would be met once too often are left out
        if not fair.all():
            size = size[fair]
        size = size[_bernoulli_exp(size, scale, source)]
    alive = np.arange(len(size))
    while len(alive):
        alive = alive[_bernoulli_exp_minus_one(len(alive), source)]
        size[alive] += scale
    bits = np.unpackbits(source.words((len(size) + 63) // 64).view(np.uint8), count=len(size))
    negative = bits.view(np.bool_)
    kept = (size > 0) | ~negative
    return size[kept], negative[kept]


class _Exponents:
    """γ = (y − σ²/t)²/(2σ²) for given sizes y, exactly: whole + (coarse + rest/denominator) / 2^_GRID."""

    def __init__(self, sizes: Sequence[int], variance: Fraction, scale: int) -> None:
        n, d = variance.numerator, variance.denominator
        self.denominator = 2 * n * d * scale * scale
        parts = [divmod((y * scale * d - n) ** 2, self.denominator) for y in sizes]
        fine = [divmod(left << _GRID, self.denominator) for _, left in parts]
        # 2^62 stands for anything above it: the difference shows after 2^62 coins of bias 1/e in a row.
        self.whole = np.array([min(whole, 1 << 62) for whole, _ in parts], dtype=np.int64)
        self.coarse = np.array([coarse for coarse, _ in fine], dtype=np.int64)
        self.rest = [rest for _, rest in fine]
        self.exact = not any(self.rest)

    def kept(self, place: Ints, source: RandomSource) -> Flags:
        """Coins with probability e^−γ for the sizes at these places of the table."""
        result = _bernoulli_exp(self.coarse[place], 1 << _GRID, source)
        alive = np.flatnonzero(result)
        left = self.whole[place[alive]]
        while len(alive):
            now = np.flatnonzero(left > 0)
            if not len(now):
                break
            lost = now[~_bernoulli_exp_minus_one(len(now), source)]
            result[alive[lost]] = False
            left[now] -= 1
            left[lost] = 0
        if not self.exact:
            alive = np.flatnonzero(result)
            for one in alive[_draw_32_bits(source, len(alive)) >> (32 - _GRID) == 0].tolist():
                result[one] = _bernoulli_exp_tiny(self.rest[place[one]], self.denominator, source)
        return result


@lru_cache(maxsize=16)
def _small_exponents(variance: Fraction, scale: int, grid: int) -> _Exponents:
    """The table for all sizes below 16 t; a candidate is larger with probability e^−16. `grid` is part of the cache's key."""
    return _Exponents(range(16 * scale), variance, scale)


def _draw_samples(variance: Fraction, scale: int, tries: int, source: RandomSource) -> Ints:
    """The samples of N_Z(0, σ²) that `tries` candidates give, about half as many. Source: Canonne et al. 2020, Algorithm 3."""
    size, negative = _discrete_laplace(scale, tries, source)
    if not len(size):
        return size
    if 16 * scale <= _TABLE and size.max() < 16 * scale:
        table, place = _small_exponents(variance, scale, _GRID), size
    else:
        distinct, inverse = np.unique(size, return_inverse=True)
        table, place = _Exponents(distinct.tolist(), variance, scale), inverse.astype(np.int64)
    kept = table.kept(place, source)
    size, negative = size[kept], negative[kept]
    return np.where(negative, -size, size)


# ----------------------------------------------------------------------------------------------------------------------- public


def as_variance(sigma2: object) -> Fraction:
    """σ² as an exact fraction: integers and fractions as they are, a float as the fraction that its bits stand for."""
    good = is_number(sigma2) and not (isinstance(sigma2, Real) and not math.isfinite(sigma2))
    require(good, "sigma2", "must be a finite number ≥ 0", sigma2, "It is the variance parameter σ², not σ.")
    if isinstance(sigma2, Rational):
        value = Fraction(int(sigma2.numerator), int(sigma2.denominator))
    else:
        value = Fraction(float(sigma2))  # type: ignore[arg-type]
    require(0 <= value <= _LARGEST, "sigma2", "must lie in [0, 2^60]", sigma2, "It is the variance parameter σ², not σ.")
    return value


def sample_discrete_gaussian(sigma2: int | float | Fraction, size: int | Sequence[int], *, source: RandomSource) -> Tensor:
    """Independent draws of N_Z(0, σ²) as an int64 tensor of shape `size`, exact: no floating-point number decides anything.

    P(k) ∝ exp(−k²/(2σ²)) over the integers; for σ ≥ 1 the variance is σ² less at most a part in 10^6, for smaller σ less.
    σ² is taken as the rational number it is, a float too: 0.1 is 3602879701896397/2^55. σ² = 0 gives zeros. The draws are a
    pure function of σ², the size and the words of the source.

    `sigma2` is σ², `size` is a length or a shape, and `source` gives the random words.

    Source: Canonne, Kamath and Steinke 2020, Algorithms 1 to 3, with t = ⌊σ⌋ + 1.

    >>> from equipoise.privacy.random_source import Seeded
    >>> sample_discrete_gaussian(4, 3, source=Seeded(0, "example")).dtype
    torch.int64
    >>> sample_discrete_gaussian(0, (2, 2), source=Seeded(0, "example")).tolist()
    [[0, 0], [0, 0]]
    """
    variance = as_variance(sigma2)
    shape: tuple[int, ...] = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else (size,)
    good = all(is_integer(length) and length >= 0 for length in shape)
    require(good, "size", "must be a whole number ≥ 0, or several", size)
    count = math.prod(shape)
    drawn = np.zeros(count, dtype=np.int64)
    if variance > 0:
        scale, done = math.isqrt(variance.numerator // variance.denominator) + 1, 0
        while done < count:
            tries = min(_CHUNK, int(2.2 * (count - done)) + 64)  # about 0.48 of them succeed
            samples = _draw_samples(variance, scale, tries, source)[: count - done]
            drawn[done : done + len(samples)] = samples
            done += len(samples)
    return torch.from_numpy(drawn.reshape(shape))


def share_excess(sigma: float, contributors: int) -> float:
    """ψ = 10 Σ_{i=1}^{m'−1} exp(−2π²σ² i/(i+1)): how far the sum of m' discrete Gaussians may be from one of variance m'σ².

    Always the sum itself: the bound 10 (m' − 1) e^(−2π²σ²) printed with it is false, as i/(i+1) < 1.
    Source: Pillutla et al. 2023, Theorem 6 and Lemma 18; Kairouz, Liu and Steinke 2021, Corollary 12.
    """
    i = np.arange(1, contributors, dtype=np.float64)
    return 10 * float(np.exp(-2 * math.pi**2 * sigma**2 * i / (i + 1)).sum())


def concentrated_epsilon(sensitivity: float, sigma: float, contributors: int, dimension: int) -> float:
    """ε such that a sum of integer vectors of `dimension` d, with noise N_Z(0, σ²) from each of m' clients, is ½ε²-zCDP.

    ε = min(√(S²/(m'σ²) + ψ d/2), S/(√m' σ) + ψ √d) with S the L2 sensitivity of the sum. This is concentrated differential
    privacy: not the ε of (ε, δ), but the inverse of a Gaussian noise multiplier. m' is the fewest clients whose
    noise is in the sum; the same number of shares is assumed with and without the client in question. Zero noise costs ∞.

    Source: Pillutla et al. 2023, Lemma 18; Kairouz, Liu and Steinke 2021.
    """
    if sigma == 0:
        return math.inf if sensitivity > 0 else 0.0
    require(sigma >= 0.5, "sigma", "must be at least 0.5 for the bound on sums of discrete Gaussians", sigma,
            "Enlarge both sigma and the scale of what is summed.")  # fmt: skip
    excess = share_excess(sigma, contributors)
    ratio = sensitivity / (math.sqrt(contributors) * sigma)
    return min(math.sqrt(ratio**2 + excess * dimension / 2), ratio + excess * math.sqrt(dimension))
