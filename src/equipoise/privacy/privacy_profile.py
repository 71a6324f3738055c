"""The privacy profile of a run: the δ that it has at every ε, and not at one δ alone. An audit can refute it anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.privacy.accounting import quiet_dp_accounting
from equipoise.privacy.releases import CohortEvent, FixedSampling, NoSampling, PoissonSampling, Release, fold

Array = NDArray[np.float64]
Counted = Sequence[tuple[CohortEvent, int]]
_INTERVAL, _POINTS = 5e-3, 4000  # the grid of the privacy loss; whatever it is, δ is an upper bound


def privacy_profile(events: Counted, epsilons: Array) -> Array:
    """δ at each ε of all events together, an upper bound; events are as for `epsilon_of`."""
    events = [(event, count) for event, count in events if count > 0]
    unsampled = fold(*(event.multiplier / math.sqrt(count) for event, count in events))
    if unsampled == 0:
        return np.ones_like(epsilons)
    if any(isinstance(event.sampling, FixedSampling) for event, _ in events):  # both bounds hold
        return np.minimum(gaussian_profile(unsampled, epsilons), _fixed_profile(events, epsilons))
    if any(isinstance(event.sampling, PoissonSampling) and event.sampling.rate < 1 for event, _ in events):
        return _sampled_profile(events, epsilons)
    return gaussian_profile(unsampled, epsilons)


def gaussian_profile(multiplier: float, epsilons: Array) -> Array:
    """δ = Φ(1/(2z) − εz) − e^ε Φ(−1/(2z) − εz) of one Gaussian release (Balle and Wang 2018, Theorem 8)."""
    from scipy.stats import norm

    if multiplier == math.inf:
        return np.zeros_like(epsilons)
    half = 0.5 / multiplier
    first = norm.cdf(half - epsilons * multiplier)
    second = np.exp(epsilons + norm.logcdf(-half - epsilons * multiplier))
    delta: Array = np.maximum(first - second, 0.0)
    return delta


def _sampled_profile(events: Counted, epsilons: Array) -> Array:
    whole: Any = None
    reach = max(0.5 / event.multiplier**2 + 10 / event.multiplier for event, _ in events)  # the largest loss of one event
    interval = max(_INTERVAL, reach / _POINTS)
    with quiet_dp_accounting() as dp:
        make = dp.pld.privacy_loss_distribution.from_gaussian_mechanism
        for event, count in events:
            if event.multiplier == math.inf:
                continue
            rate = event.sampling.rate if isinstance(event.sampling, PoissonSampling) else 1.0
            one = make(event.multiplier, value_discretization_interval=interval, sampling_prob=rate).self_compose(count)
            whole = one if whole is None else whole.compose(one)
        return np.asarray(whole.get_delta_for_epsilon(list(epsilons)), dtype=np.float64)


def _fixed_profile(events: Counted, epsilons: Array) -> Array:
    with quiet_dp_accounting() as dp:
        accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        for event, count in events:
            inner: Any = dp.GaussianDpEvent(event.multiplier)
            if isinstance(event.sampling, FixedSampling):
                sampling = event.sampling
                inner = dp.SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, inner)
            accountant.compose(dp.SelfComposedDpEvent(inner, count))
        return np.array([float(accountant.get_delta(float(e))) for e in epsilons])


def with_noise(events: Counted, factor: float) -> list[tuple[CohortEvent, int]]:
    """The events with all noise multiplied by a factor."""
    return [
        (CohortEvent(tuple(Release(r.name, r.multiplier * factor) for r in event.releases), event.sampling), count)
        for event, count in events
    ]


def unsampled_event(multiplier: float) -> CohortEvent:
    """One release that nothing but its noise hides."""
    return CohortEvent((Release("all", multiplier),), NoSampling())
