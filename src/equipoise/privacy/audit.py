"""A privacy audit: a lower bound on ε from what an adversary manages, to hold against what the accountant claims.

A canary, one client made to stand out, is present or absent; from what is released the adversary computes a score. If the
mechanism is (ε, δ)-differentially private, then for every set A of scores

    P(A | present) ≤ e^ε P(A | absent) + δ    and the same with the two worlds exchanged,

so ε ≥ log((p − δ)/q) for the chances p, q of A in the two worlds. The set is "score at least a threshold", or "below" it. Half
of the runs choose threshold, side and direction; the other half, which nobody has looked at, gives Clopper–Pearson bounds, p
from below and q from above, each at half of 1 − confidence. So the bound exceeds the true ε with probability at most
1 − confidence, whatever the mechanism is; one that exceeds the *claimed* ε shows that the claim, or the code, is wrong. A bound
below the claim proves nothing: perhaps the canary was weak. Sources: Jagielski, Ullman, Oprea 2020; Nasr et al. 2021.

`assume="gaussian"` is sharper: it tests the claim that the mechanism is as private as one Gaussian release (μ-GDP, Dong, Roth,
Su 2022): then Φ⁻¹(p) − Φ⁻¹(q) ≤ μ = 1/z for every set, and the bound on μ is turned into ε at δ (Nasr et al. 2023). It is for
releases without sampling: for a sampled one it may exceed an honest claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.core.rng import generator, stream_key
from equipoise.errors import InvalidData, require, require_integer, require_number
from equipoise.privacy.accounting import gaussian_epsilon

Array = NDArray[np.float64]
Scores = Callable[[bool, int, int], Array]  # scores(present, runs, seed) -> (runs,): one score per independent run
_THRESHOLDS = 400  # tried on the first half of the runs
_CHUNK = 1 << 22  # numbers held at once


@dataclass(frozen=True)
class AuditResult:
    """What an audit found: with `confidence`, ε at `delta` is at least `lower_bound`.

    The set A was "score at least (or below) `threshold`"; `chance` and `chance_other` are its bounded chances in the world in
    which it is the likelier (`likelier`) and in the other one. `runs` counts each world.
    """

    lower_bound: float
    delta: float
    confidence: float
    runs: int
    threshold: float
    side: Literal["at least", "below"]
    likelier: Literal["present", "absent"]
    chance: float
    chance_other: float

    def exceeds(self, claimed: float) -> bool:
        """Whether the audit refutes that ε is at most `claimed`."""
        return self.lower_bound > claimed

    def __str__(self) -> str:
        return (
            f"ε ≥ {self.lower_bound:.4g} at δ = {self.delta:.4g} with confidence {self.confidence:.4g} "
            f"({self.runs} runs in each world; a score {self.side} {self.threshold:.4g} has chance ≥ {self.chance:.3g} with "
            f"the canary {self.likelier}, ≤ {self.chance_other:.3g} otherwise)"
        )


def chance_bounds(hits: Array, runs: int, error: float) -> tuple[Array, Array]:
    """Clopper–Pearson: (lower, upper) bounds on a chance from `hits` out of `runs`, each wrong with probability ≤ `error`."""
    from scipy.stats import beta

    hits = np.asarray(hits, dtype=np.float64)
    with np.errstate(all="ignore"):
        lower = np.where(hits > 0, beta.ppf(error, hits, runs - hits + 1), 0.0)
        upper = np.where(hits < runs, beta.ppf(1 - error, hits + 1, runs - hits), 1.0)
    return lower, upper


def epsilon_from_chances(likelier: Array, other: Array, delta: float) -> Array:
    """max(0, log((p − δ)/q)): what (ε, δ)-privacy needs at least, for a set with chances p and q."""
    with np.errstate(all="ignore"):
        bound: Array = np.maximum(np.log(np.maximum(likelier - delta, 0.0)) - np.log(other), 0.0)
    return bound


def mu_from_chances(likelier: Array, other: Array) -> Array:
    """max(0, Φ⁻¹(p) − Φ⁻¹(q)): the least μ for which a mechanism with these chances is μ-GDP."""
    from scipy.stats import norm

    with np.errstate(all="ignore"):
        bound: Array = np.maximum(np.nan_to_num(norm.ppf(likelier) - norm.ppf(other), nan=0.0), 0.0)
    return bound


def _draw_scores(scores: Scores, present: bool, runs: int, seed: int, part: str) -> Array:
    world = "present" if present else "absent"
    values = np.asarray(scores(present, runs, stream_key(seed, f"audit {world} {part}") >> 1), dtype=np.float64)
    if values.shape != (runs,) or np.isnan(values).any():
        raise InvalidData(f"The mechanism must give {runs} scores, none of them NaN; it gave an array of shape {values.shape}.")
    return values


def _count_hits(values: Array, thresholds: Array, below: bool) -> Array:
    under = np.searchsorted(np.sort(values), thresholds, side="left").astype(np.float64)
    return under if below else len(values) - under


def _candidates(one: Array, other: Array) -> Array:
    """Thresholds at the tails of both worlds as well as in between: order statistics whose ranks grow geometrically."""
    ranks = np.unique(np.geomspace(1, len(one), _THRESHOLDS // 4).astype(np.int64)) - 1
    return np.unique(np.concatenate([np.sort(v)[place] for v in (one, other) for place in (ranks, len(one) - 1 - ranks)]))


def audit(
    scores: Scores, *, delta: float, runs: int = 100_000, seed: int = 0, confidence: float = 0.95,
    assume: Literal["nothing", "gaussian"] = "nothing",
) -> AuditResult:  # fmt: skip
    """A lower bound on ε at `delta` from `runs` runs with the canary and as many without.

    `scores(present, runs, seed)` returns `runs` scores of independent runs, determined by the seed; `one_by_one` makes it from
    a mechanism that runs once. More runs give a tighter bound: ε much above log(runs / 10) cannot be seen at small δ.
    """
    require_number("delta", delta, "[0, 1)")
    require_integer("runs", runs, 100)
    require_number("confidence", confidence, "(0, 1)")
    require(assume in ("nothing", "gaussian"), "assume", "must be 'nothing' or 'gaussian'", assume)
    error, half = (1 - confidence) / 2, runs // 2

    def strength(likelier: Array, other: Array) -> Array:
        return mu_from_chances(likelier, other) if assume == "gaussian" else epsilon_from_chances(likelier, other, delta)

    first = {present: _draw_scores(scores, present, half, seed, "choose") for present in (True, False)}
    thresholds = _candidates(first[True], first[False])
    best = (-1.0, 0.0, False, True)  # strength, threshold, below, present is likelier
    for below in (False, True):  # bounds of a tenth of the error, so that a lucky threshold far out does not win
        bounds = {w: chance_bounds(_count_hits(first[w], thresholds, below), half, error / 10) for w in (True, False)}
        for world in (True, False):
            strengths = strength(bounds[world][0], bounds[not world][1])
            place = int(strengths.argmax())
            best = max(best, (float(strengths[place]), float(thresholds[place]), below, world))
    _, threshold, below, world = best

    rest = runs - half
    hits = {w: _count_hits(_draw_scores(scores, w, rest, seed, "judge"), np.array([threshold]), below) for w in (True, False)}
    lower, upper = chance_bounds(hits[world], rest, error)[0], chance_bounds(hits[not world], rest, error)[1]
    bound = float(strength(lower, upper)[0])
    if assume == "gaussian":
        bound = gaussian_epsilon(1 / bound, delta) if bound > 0 else 0.0
    return AuditResult(
        bound, delta, confidence, runs, threshold, "below" if below else "at least", "present" if world else "absent",
        float(lower[0]), float(upper[0]),
    )  # fmt: skip


def one_by_one(mechanism: Callable[[bool, int], float]) -> Scores:
    """`scores` from a mechanism(present, seed) that runs once, such as a whole federated round; each run has its own seed."""

    def scores(present: bool, runs: int, seed: int) -> Array:
        return np.array([mechanism(present, stream_key(seed, "audit run", run) >> 1) for run in range(runs)], dtype=np.float64)

    return scores


# --------------------------------------------------------------------------------------------------- a mechanism to be audited


def log_likelihood_ratio(released: Array, noise_multiplier: float, sampling_rate: float) -> Array:
    """The logarithm of (1 − q) + q e^{(2x − 1)/(2z²)}: the best score of x, 1 with chance q or 0, plus noise z."""
    gain = (2 * released - 1) / (2 * noise_multiplier**2)
    if sampling_rate == 1:
        return gain
    return np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + gain)


def gaussian_sum_scores(
    *, noise_multiplier: float, clip: float = 1.0, dimension: int = 16, sampling_rate: float = 1.0, rounds: int = 1,
    canary_norm: float | None = None, clipping: bool = True,
) -> Scores:  # fmt: skip
    """The scores of a clipped noisy sum, over rounds with Poisson cohorts; what the others sent is known and taken off.

    The canary sends an update of norm `canary_norm` (default: ten times the clip) in a fixed direction; the adversary knows the
    direction, takes the inner product of the release with it, which for Gaussian noise loses nothing, and adds the log
    likelihood ratios of the rounds. `clipping=False` is a mechanism with the mistake that an audit must find.
    """
    for name, value in (("noise_multiplier", noise_multiplier), ("clip", clip)):
        require_number(name, value, "(0, ∞)")
    for name, count in (("dimension", dimension), ("rounds", rounds)):
        require_integer(name, count, 1)
    require_number("sampling_rate", sampling_rate, "(0, 1]")
    update = np.full(dimension, (10 * clip if canary_norm is None else canary_norm) / math.sqrt(dimension))
    direction = np.full(dimension, 1 / math.sqrt(dimension))
    norm = float(np.linalg.norm(update))
    sent = update * min(1.0, clip / norm) if clipping and norm > 0 else update  # (D,)

    def scores(present: bool, runs: int, seed: int) -> Array:
        draw = generator(seed, "audit noise")
        total = np.empty(runs)
        size = max(1, _CHUNK // (dimension * rounds))
        for start in range(0, runs, size):
            count = min(size, runs - start)
            release = draw.standard_normal((count, rounds, dimension)) * (noise_multiplier * clip)
            if present:
                release += (draw.random((count, rounds, 1)) < sampling_rate) * sent
            along = release @ direction / clip  # (count, rounds)
            total[start : start + count] = log_likelihood_ratio(along, noise_multiplier, sampling_rate).sum(1)
        return total

    return scores
