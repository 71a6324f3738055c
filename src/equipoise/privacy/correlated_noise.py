"""Noise that is correlated over rounds (DP-FTRL): matrices C, what one client can change, and the noise round by round.

Round t of T adds (C⁻¹Z)_t to the sum of the clipped updates. Z is independent Gaussian noise of deviation z · sens · clip per
number, and C is lower-triangular. All rounds together are one Gaussian release with noise multiplier z, because a client whose
contributions are zeroed changes C · (sums) by at most sens · clip. Its rounds are at least `separation` apart and at most
`participations` (`sampling.MinSeparation` promises both).

Source: Kairouz et al. 2021 (DP-FTRL, arXiv 2103.00039); Choquette-Choo et al. 2023 (banded, arXiv 2306.08153); Dvijotham et al.
2024 and McMahan, Pillutla, Steinke et al. 2024 (BLT, arXiv 2404.16706, 2408.08868).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.errors import InvalidParameter, require, require_integer, require_number

_ROUNDING = 1e-12  # by which coefficients may increase because of rounding


def square_root_coefficients(rounds: int) -> Numbers:
    """The coefficients of the Toeplitz square root of the prefix sum, binomial(2j, j)/4^j; convolved with itself all are 1.

    `rounds` is their number, and the result has the shape (rounds,).

    >>> square_root_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    require_integer("rounds", rounds, 1)
    steps = np.arange(1, rounds)
    found: Numbers = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    return found


def inverse_coefficients(coefficients: Sequence[float] | Numbers) -> Numbers:
    """The coefficients of the inverse of a lower-triangular Toeplitz matrix, as many as are given.

    `coefficients` (T,) are the first column of a lower-triangular Toeplitz matrix.

    >>> inverse_coefficients([1.0, 0.5, 0.0]).tolist()  # 1/(1 + x/2) = 1 − x/2 + x²/4 − …
    [1.0, -0.5, 0.25]
    """
    given = np.asarray(coefficients, dtype=np.float64)
    inverse = np.zeros_like(given)
    inverse[0] = 1 / given[0]
    for t in range(1, len(given)):
        inverse[t] = -(given[1 : t + 1] @ inverse[t - 1 :: -1][:t]) / given[0]
    return inverse


def toeplitz_sensitivity(coefficients: Sequence[float] | Numbers, *, separation: int, participations: int) -> float:
    """What one client can change at most: ‖Σ_j C e_{1 + j·b}‖ for rounds 1, 1 + b, …, at most k of them.

    These rounds are the worst where the coefficients are not negative and do not increase; others are refused.

    `coefficients` (T,) are the first column of a lower-triangular Toeplitz matrix. `separation` b is the least number of rounds
    between two rounds of a client, and `participations` k the most of them.

    >>> round(toeplitz_sensitivity([1.0, 0.5], separation=1, participations=2) ** 2, 9)  # (1, 1½): 1 + 2¼
    3.25
    """
    given = checked_coefficients(coefficients)
    require_integer("separation", separation, 1)
    require_integer("participations", participations, 1)
    changed = np.zeros_like(given)
    for start in range(0, min(len(given), separation * participations), separation):
        changed[start:] += given[: len(given) - start]
    return float(np.linalg.norm(changed))


def checked_coefficients(coefficients: Sequence[float] | Numbers) -> Numbers:
    """The `coefficients` (T,) of a Toeplitz matrix as an array; they must begin above 0, not be negative and not increase.

    >>> checked_coefficients((1, 0.5)).tolist()
    [1.0, 0.5]
    """
    given = np.asarray(coefficients, dtype=np.float64)
    good = given.ndim == 1 and len(given) > 0 and bool(np.isfinite(given).all()) and float(given[0]) > 0
    good = good and bool((given >= 0).all()) and bool((np.diff(given) <= _ROUNDING).all())
    rule = "must be numbers ≥ 0 that do not increase, the first above 0: only then is the worst client known"
    require(good, "coefficients", rule, given.tolist()[:6] if given.ndim == 1 else given.shape)
    return given


def banded_sensitivity(matrix: Numbers, *, separation: int, participations: int) -> float:
    """What one client can change at most, for a lower-triangular matrix (T, T) with at most `separation` bands.

    Then the columns of two rounds of one client share no row, and the rounds whose columns are the longest together are the
    worst. Matrices with more bands are refused.

    `matrix` (T, T) is C. `separation` b is the least number of rounds between two rounds of a client, and `participations` k
    the most of them.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153).

    >>> banded_sensitivity(toeplitz_matrix([3.0, 4.0, 0.0]), separation=2, participations=1)  # √(3² + 4²)
    5.0
    """
    given = np.asarray(matrix, dtype=np.float64)
    require_integer("separation", separation, 1)
    require_integer("participations", participations, 1)
    square = given.ndim == 2 and given.shape[0] == given.shape[1] and bool(np.isfinite(given).all())
    require(square and not np.triu(given, 1).any(), "matrix", "must be square, finite and lower-triangular", given.shape)
    bands = int(max((row - column for row, column in np.argwhere(given)), default=0)) + 1
    rule, fix = f"must be at least the number of bands, {bands}", "Use fewer bands, or let rounds of a client be further apart."
    require(bands <= separation, "separation", rule, separation, fix)
    norms, most = (given**2).sum(0), np.zeros(len(given) + separation)  # most[t]: of columns from t on, squared
    for _ in range(min(participations, -(-len(given) // separation))):
        taken = norms + most[separation:]
        most[: len(given)] = np.maximum.accumulate(taken[::-1])[::-1]
    return math.sqrt(most[0])


def toeplitz_matrix(coefficients: Sequence[float] | Numbers) -> Numbers:
    """The lower-triangular Toeplitz matrix (T, T) with `coefficients` (T,) down its first column.

    >>> toeplitz_matrix([1.0, 0.5]).tolist()
    [[1.0, 0.0], [0.5, 1.0]]
    """
    given = np.asarray(coefficients, dtype=np.float64)
    rows, columns = np.indices((len(given), len(given)))
    found: Numbers = np.where(rows >= columns, given[np.abs(rows - columns)], 0.0)
    return found


def largest_prefix_variance(coefficients: Sequence[float] | Numbers) -> float:
    """The largest variance of the noise in a sum of rounds 1 … t, for Z of variance 1: the largest row norm² of A C⁻¹.

    `coefficients` (T,) are those of C; A is the prefix sum, the lower-triangular matrix of ones.

    >>> largest_prefix_variance([1.0, 0.5])  # C⁻¹ = (1, −½); rows (1), (½, 1)
    1.25
    """
    return float(np.square(np.cumsum(inverse_coefficients(coefficients))).sum())


@dataclass(frozen=True)
class BLT:
    """A buffered linear Toeplitz matrix: coefficients 1, then Σ_i ω_i d_i^(j − 1), and noise from as many buffers as pairs.

    `decays` are d in [0, 1), `scales` ω ≥ 0 with a sum of at most 1, so that the coefficients do not increase. No pair is the
    identity: independent noise.

    Source: Dvijotham et al. 2024 (arXiv 2404.16706); McMahan et al. 2024 (arXiv 2408.08868).

    >>> BLT(decays=(0.5,), scales=(0.5,)).coefficients(4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """

    decays: tuple[float, ...] = ()  # d_i in [0, 1)
    scales: tuple[float, ...] = ()  # ω_i ≥ 0, with a sum of at most 1

    def __post_init__(self) -> None:
        for name in ("decays", "scales"):
            given: Any = getattr(self, name)
            require(isinstance(given, tuple | list), name, "must be a list of numbers", given)
            for value in given:
                require_number(name, value, "[0, 1)" if name == "decays" else "[0, ∞)")
            object.__setattr__(self, name, tuple(float(value) for value in given))
        same = len(self.decays) == len(self.scales)
        require(same, "scales", "must be as many as decays", (len(self.scales), len(self.decays)))
        require(sum(self.scales) <= 1 + _ROUNDING, "scales", "must have a sum of at most 1", sum(self.scales))

    def coefficients(self, rounds: int) -> Numbers:
        """The first `rounds` coefficients of C, (rounds,)."""
        require_integer("rounds", rounds, 1)
        powers = np.arange(rounds - 1)
        rest = sum((w * d**powers for d, w in zip(self.decays, self.scales, strict=True)), np.zeros(rounds - 1))
        found: Numbers = np.concatenate([[1.0], rest])
        return found

    def sensitivity(self, rounds: int, *, separation: int, participations: int) -> float:
        """The most that one client can change in a run of `rounds` rounds.

        `separation` b is the least number of rounds between two rounds of a client, and `participations` k the most of them.
        """
        given = self.coefficients(rounds)
        return toeplitz_sensitivity(given, separation=separation, participations=participations)

    def begin(self, independent: Tensor) -> Tensor:
        """The buffers M (pairs, D) before the first round, all 0, for noise like `independent` (D,)."""
        return independent.new_zeros(len(self.decays), *independent.shape)

    def step(self, independent: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The noise (D,) of a round, z − Σ_i ω_i M_i, and the next buffers d_i M_i + noise.

        `independent` (D,) is the noise z, and `buffers` (pairs, D) are M.
        """
        weights = torch.tensor(self.scales, dtype=independent.dtype, device=independent.device)
        decays = torch.tensor(self.decays, dtype=independent.dtype, device=independent.device)
        noise = independent - torch.tensordot(weights, buffers, dims=1) if len(self.decays) else independent
        shape = (-1, *[1] * independent.dim())
        return noise, decays.view(shape) * buffers + noise if len(self.decays) else buffers


@dataclass(frozen=True)
class Banded:
    """A Toeplitz matrix C with few bands: `bands` are its coefficients c_0 > 0, c_1, …, all others are 0.

    The noise of a round remembers that of as many rounds before as there are further bands. With at most `separation` bands,
    the rounds of one client share no row of C.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153).

    >>> matrix = Banded(bands=(3.0, 4.0))
    >>> matrix.coefficients(3).tolist(), matrix.sensitivity(3, separation=2, participations=1)  # √(3² + 4²)
    ([3.0, 4.0, 0.0], 5.0)
    """

    bands: tuple[float, ...] = (1.0,)  # c_0 > 0, c_1, …, all ≥ 0

    def __post_init__(self) -> None:
        given: Any = self.bands
        good = isinstance(given, tuple | list) and len(given) > 0
        require(good, "bands", "must be a list of one or more numbers", given, "E.g. (1.0, 0.5, 0.375).")
        for value in given:
            require_number("bands", value, "[0, ∞)")
        require(given[0] > 0, "bands", "must begin above 0", given)
        object.__setattr__(self, "bands", tuple(float(value) for value in given))

    def coefficients(self, rounds: int) -> Numbers:
        """The first `rounds` coefficients of C, (rounds,)."""
        require_integer("rounds", rounds, 1)
        found: Numbers = np.pad(np.array(self.bands[:rounds]), (0, max(0, rounds - len(self.bands))))
        return found

    def sensitivity(self, rounds: int, *, separation: int, participations: int) -> float:
        """The most that one client can change in a run of exactly `rounds` rounds: √(Σ_j Σ_i c_i²) over its columns j.

        The columns share no row, and the end of the run cuts off the last of them, so that the earliest rounds are the worst.
        `separation` b is the least number of rounds between two rounds of a client, and `participations` k the most of them.
        """
        rule, fix = f"must be at least the number of bands, {len(self.bands)}", "Give fewer bands, or raise the separation."
        require(len(self.bands) <= separation, "separation", rule, separation, fix)
        require_integer("participations", participations, 1)
        given, starts = self.coefficients(rounds), range(0, min(rounds, separation * participations), separation)
        return float(np.linalg.norm([np.linalg.norm(given[: rounds - start]) for start in starts]))

    def begin(self, independent: Tensor) -> Tensor:
        """The noise of the rounds before the first one, (bands − 1, D), all 0, for noise like `independent` (D,)."""
        return independent.new_zeros(len(self.bands) - 1, *independent.shape)

    def step(self, independent: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The noise (D,) of a round, (z − Σ_j c_j noise_{t−j})/c_0, and the next buffers.

        `independent` (D,) is the noise z, and `buffers` (bands − 1, D) are the noise of earlier rounds, the latest first.
        """
        rest = torch.tensor(self.bands[1:], dtype=independent.dtype, device=independent.device)
        noise = (independent - torch.tensordot(rest, buffers, dims=1) if len(rest) else independent) / self.bands[0]
        return noise, torch.cat([noise.unsqueeze(0), buffers[:-1]]) if len(rest) else buffers


def loss_of(coefficients: Sequence[float] | Numbers, *, separation: int, participations: int) -> float:
    """sens² · largest prefix variance: the variance of prefix sums at a fixed privacy. Smaller is better.

    `coefficients` (T,) are the first column of a lower-triangular Toeplitz matrix. `separation` b is the least number of rounds
    between two rounds of a client, and `participations` k the most of them.

    Source: McMahan et al. 2024 (arXiv 2408.08868).

    >>> [round(loss_of(c, separation=2, participations=1), 9) for c in ([1.0, 0.5], [1.0, 0.0])]
    [1.5625, 2.0]
    """
    sensitivity = toeplitz_sensitivity(coefficients, separation=separation, participations=participations)
    return sensitivity**2 * largest_prefix_variance(coefficients)


def fit_blt(rounds: int, *, pairs: int = 2, separation: int = 1, participations: int = 1) -> BLT:
    """The BLT with `pairs` pairs whose `loss_of` is the smallest found from several starts; never worse than no pairs.

    `rounds` is the length of the run. `separation` b is the least number of rounds between two rounds of a client, and
    `participations` k the most of them.

    Needs scipy.

    Source: McMahan et al. 2024 (arXiv 2408.08868), who minimise the same loss by gradients.

    >>> fit_blt(10, pairs=0)  # no pairs: independent noise
    BLT(decays=(), scales=())
    """
    from scipy.optimize import minimize

    require_integer("rounds", rounds, 1)
    require_integer("pairs", pairs, 0)

    def blt_at(point: Numbers) -> BLT:
        with np.errstate(over="ignore"):  # far out, exp is infinite and the decay 0, as it should be
            decays = 1 / (1 + np.exp(-point[:pairs]))
        shares = np.exp(point[pairs:] - np.logaddexp.reduce(np.append(point[pairs:], 0.0)))  # with one more they sum to 1
        return BLT(tuple(np.clip(decays, 0.0, 1 - 1e-9)), tuple(shares))

    def loss(point: Numbers) -> float:
        return loss_of(blt_at(point).coefficients(rounds), separation=separation, participations=participations)

    best, smallest = BLT(), loss_of(BLT().coefficients(rounds), separation=separation, participations=participations)
    for reach in (0.5, 1.0, 2.0) if pairs else ():
        decays = 1 - np.geomspace(0.5, 0.5 / max(2.0, rounds) ** reach, pairs)
        start = np.concatenate([np.log(decays / (1 - decays)), np.zeros(pairs)])
        found = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 400 * pairs, "xatol": 1e-6, "fatol": 1e-10})
        if found.fun < smallest:
            best, smallest = blt_at(found.x), float(found.fun)
    return best


def correlated_noise(inverse: Numbers, independent: Tensor) -> Tensor:
    """C⁻¹Z for the whole run, (T, D), computed at once; `BLT.step` and `Banded.step` give the same, round by round.

    `inverse` is C⁻¹ (T, T), or its Toeplitz coefficients (T,), and `independent` (T, D) is Z.

    >>> correlated_noise(np.array([1.0, -0.5]), torch.tensor([[1.0], [1.0]])).tolist()  # 1, and −½ · 1 + 1
    [[1.0], [0.5]]
    """
    given = np.asarray(inverse)
    if given.ndim not in (1, 2) or len(given) != len(independent):
        raise InvalidParameter(
            "inverse", f"must have a row or a coefficient for each of {len(independent)} rounds", given.shape
        )
    matrix = toeplitz_matrix(given) if given.ndim == 1 else given
    noise: Tensor = torch.tensordot(torch.from_numpy(matrix).to(independent), independent, dims=1)
    return noise
