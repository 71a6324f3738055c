"""What a round releases about its clients, how its cohort was drawn, and how much noise there is: the events of an accountant.

A noise multiplier z is the standard deviation of the noise on a sum over the sensitivity of that sum (see privacy.accounting).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.errors import IncompatibleParts, require, require_integer, require_number


def check_delta(delta: float) -> None:
    """Raise InvalidParameter unless δ lies strictly between 0 and 1."""
    require_number("delta", delta, "(0, 1)", "A usual choice is below one over the number of clients.")


@dataclass(frozen=True)
class NoSampling:
    """Every client in every round: nothing is hidden by chance."""


@dataclass(frozen=True)
class PoissonSampling:
    """Every client independently with probability `rate`; neighbours differ by one client more or less.

    `by_nodes`: each node keeps its coin to itself, so that not even the server knows who takes part.
    """

    rate: float  # the probability of each client, in (0, 1]
    by_nodes: bool = False  # whether nodes draw by themselves

    def __post_init__(self) -> None:
        require_number("sampling_rate", self.rate, "(0, 1]")


@dataclass(frozen=True)
class FixedSampling:
    """`cohort` clients out of `population`, without replacement; neighbours differ in one client's data.

    Multipliers must count in units of the doubled sensitivity: noise of standard deviation z · 2C on the sum of updates.
    """

    cohort: int  # clients drawn
    population: int  # clients drawn from

    def __post_init__(self) -> None:
        require_integer("population", self.population, 1)
        require_integer("cohort", self.cohort, 1, self.population)


Sampling = NoSampling | PoissonSampling | FixedSampling


def adjacency_of(samplings: Iterable[Sampling]) -> str:
    """How neighbouring data sets differ, for the ε of all that was released by cohorts of these kinds."""
    return "replace one client" if any(isinstance(each, FixedSampling) for each in samplings) else "zero out one client"


def sampling_of(*, sampling_rate: float | None = None, cohort: int | None = None, population: int | None = None) -> Sampling:
    """Poisson for a rate, fixed for a cohort out of a population, none if neither is given."""
    sizes = [size for size in (cohort, population) if size is not None]
    if len(sizes) == 1 or (sizes and sampling_rate is not None):
        fix = "Give the rate for Poisson cohorts, or both sizes for cohorts of fixed size."
        raise IncompatibleParts("A sampling rate, or a cohort size and the population it is drawn from, not a mixture.", fix)
    if cohort is not None and population is not None:
        return FixedSampling(cohort, population)
    return NoSampling() if sampling_rate is None else PoissonSampling(sampling_rate)


@dataclass(frozen=True)
class Release:
    """One noisy sum: its name, and its noise multiplier z = noise / sensitivity. Infinite costs nothing, 0 everything."""

    name: str  # what is released, e.g. "update"
    multiplier: float  # z ≥ 0, noise over sensitivity

    def __post_init__(self) -> None:
        require_number(f"the noise multiplier of {self.name!r}", self.multiplier, "[0, ∞]")


@dataclass(frozen=True)
class CohortEvent:
    """All that is released from one cohort, and how the cohort was drawn.

    >>> event = CohortEvent((Release("quantile", 5.0), Release("update", 5.0)), NoSampling())
    >>> round(event.multiplier, 4)  # (1/25 + 1/25)^(−½) = 5/√2
    3.5355
    """

    releases: tuple[Release, ...]  # the noisy sums about one cohort
    sampling: Sampling  # how the cohort was drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))

    @property
    def multiplier(self) -> float:
        """The multiplier of the one Gaussian that equals all releases together."""
        return fold(*(release.multiplier for release in self.releases))


PlainRounds = tuple[float | Sequence[float], float | tuple[int, int] | None, int]  # noise multipliers, sampling, how many


def counted(item: Any) -> tuple[CohortEvent, int]:
    """An event and how often: as it is given, or rounds in plain numbers (noise multiplier, sampling, rounds).

    The sampling is a rate for Poisson cohorts, a pair (cohort, population) for cohorts of fixed size, or None for everyone.
    Several noise multipliers are of releases about one cohort.

    >>> counted(((5.0, 5.0), 0.1, 20))[0].sampling, round(counted(((5.0, 5.0), 0.1, 20))[0].multiplier, 4)
    (PoissonSampling(rate=0.1, by_nodes=False), 3.5355)
    """
    first, *more = item if isinstance(item, tuple | list) else (item, 1)
    if isinstance(first, CohortEvent) and len(more) == 1:
        return first, more[0]
    rule, fix = "must hold triples (noise multiplier, sampling, rounds)", "E.g. [(1.1, 0.01, 1000)]: 1000 rounds at rate 0.01."
    fixed = len(more) == 2 and isinstance(more[0], tuple | list)
    require(len(more) == 2 and (not fixed or len(more[0]) == 2), "events", rule, item, fix)
    sampling = FixedSampling(*more[0]) if fixed else sampling_of(sampling_rate=more[0])
    several = first if isinstance(first, tuple | list) else (first,)
    return CohortEvent(tuple(Release("given", z) for z in several), sampling), more[1]


def fold(*multipliers: float) -> float:
    """(Σ z_i^{−2})^{−1/2}: Gaussian releases from the same clients are one Gaussian release with this multiplier."""
    if any(z == 0 for z in multipliers):
        return 0.0
    total = math.fsum(z**-2 for z in multipliers)
    return total**-0.5 if total > 0 else math.inf


def split(multiplier: float, ratio: float) -> tuple[float, float]:
    """Multipliers (of the quantile, of the update) that fold to `multiplier`; the quantile costs `ratio` times the update.

    Costs are in zCDP, ρ = 1/(2z²): ρ_q = r ρ_u and ρ_q + ρ_u = 1/(2z²). Source: Pillutla et al. 2023, Algorithm 4.
    """
    require_number("multiplier", multiplier, "[0, ∞]")
    require_number("quantile_ratio", ratio, "(0, ∞)")
    return multiplier * math.sqrt((1 + ratio) / ratio), multiplier * math.sqrt(1 + ratio)


def remaining(multiplier: float, taken: float) -> float:
    """The multiplier of one more release, so that with one of multiplier `taken` it folds to `multiplier`."""
    rule = f"must exceed {multiplier:.4g}, the multiplier of the whole round"
    require(taken > multiplier, "taken", rule, taken, "Give this release more noise, or the run a larger budget.")
    return (multiplier**-2 - taken**-2) ** -0.5 if multiplier > 0 else 0.0
