import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from equipoise.errors import InvalidData, InvalidParameter
from equipoise.privacy.accounting import epsilon_of, gaussian_epsilon
from equipoise.privacy.audit import (
    audit,
    chance_bounds,
    epsilon_from_chances,
    gaussian_sum_scores,
    log_likelihood_ratio,
    mu_from_chances,
    one_by_one,
)
from equipoise.privacy.releases import CohortEvent, PoissonSampling, Release


def claim(noise, delta, rate=1.0, rounds=1):
    return epsilon_of([(CohortEvent((Release("update", noise),), PoissonSampling(rate)), rounds)], delta)


# (noise, δ, rate, rounds, dimension)
MECHANISMS = [(1.0, 1e-5, 1.0, 1, 4), (2.0, 1e-2, 1.0, 1, 3), (1.0, 1e-3, 0.3, 1, 2), (2.0, 1e-3, 0.5, 10, 1)]


@pytest.mark.parametrize(("noise", "delta", "rate", "rounds", "dimension"), MECHANISMS)
def test_honest_mechanisms_are_not_refuted(noise, delta, rate, rounds, dimension):
    claimed = claim(noise, delta, rate, rounds)
    scores = gaussian_sum_scores(noise_multiplier=noise, sampling_rate=rate, rounds=rounds, dimension=dimension)
    bounds = [audit(scores, delta=delta, runs=10_000, seed=seed).lower_bound for seed in range(20)]
    refuted = sum(bound > claimed for bound in bounds)
    assert refuted <= binom.ppf(0.999, 20, 0.05)  # each audit may be wrong with chance 0.05; in fact none is
    assert np.mean(bounds) > 0.4 * claimed  # and it is no empty promise


@pytest.mark.parametrize(("noise", "delta", "rate", "rounds", "dimension"), MECHANISMS)
def test_halved_noise_is_caught(noise, delta, rate, rounds, dimension):
    scores = gaussian_sum_scores(noise_multiplier=noise / 2, sampling_rate=rate, rounds=rounds, dimension=dimension)
    found = audit(scores, delta=delta, runs=100_000)
    assert found.exceeds(claim(noise, delta, rate, rounds))
    assert found.lower_bound < claim(noise / 2, delta, rate, rounds)  # what it really is


@pytest.mark.parametrize(("noise", "delta", "rate", "rounds", "dimension"), MECHANISMS)
def test_missing_clipping_is_caught(noise, delta, rate, rounds, dimension):
    build = {"noise_multiplier": noise, "sampling_rate": rate, "rounds": rounds, "dimension": dimension, "canary_norm": 3.0}
    claimed = claim(noise, delta, rate, rounds)
    assert audit(gaussian_sum_scores(clipping=False, **build), delta=delta, runs=50_000).exceeds(claimed)
    assert not audit(gaussian_sum_scores(clipping=True, **build), delta=delta, runs=50_000).exceeds(claimed)


def test_sampling_that_was_claimed_but_not_done_is_caught():
    claimed = claim(1.0, 1e-3, rate=0.1, rounds=5)
    assert audit(gaussian_sum_scores(noise_multiplier=1.0, rounds=5, dimension=1), delta=1e-3, runs=50_000).exceeds(claimed)


def test_a_gaussian_claim_is_tested_sharply():
    claimed = gaussian_epsilon(1.0, 1e-5)
    honest = [
        audit(gaussian_sum_scores(noise_multiplier=1.0, dimension=2), delta=1e-5, runs=20_000, seed=s, assume="gaussian")
        for s in range(30)
    ]
    assert sum(found.exceeds(claimed) for found in honest) <= binom.ppf(0.999, 30, 0.05)
    assert np.mean([found.lower_bound for found in honest]) > 0.85 * claimed
    weak = gaussian_sum_scores(noise_multiplier=0.9, dimension=2)  # a tenth too little
    assert audit(weak, delta=1e-5, runs=100_000, assume="gaussian").exceeds(claimed)
    assert not audit(weak, delta=1e-5, runs=100_000).exceeds(claimed)


@pytest.mark.parametrize("flip", [False, True])
def test_randomised_response_is_found_at_its_epsilon(flip):
    # A truthful answer with chance 3/4: exactly log 3, δ = 0; flipped, the canary makes the score smaller.
    def scores(present, runs, seed):
        truthful = np.random.default_rng(seed).random(runs) < 0.75
        return (truthful == (present != flip)).astype(float)

    bounds = [audit(scores, delta=0.0, runs=50_000, seed=seed).lower_bound for seed in range(20)]
    assert sum(bound > math.log(3) for bound in bounds) <= binom.ppf(0.999, 20, 0.05)
    assert np.mean(bounds) == pytest.approx(math.log(3), abs=0.06)


def test_both_directions_are_seen():
    # Absent: never positive. Present: positive with chance 1/2. Only P(positive | present) is unbounded against the other.
    def rare(present, runs, seed):
        return (np.random.default_rng(seed).random(runs) < 0.5).astype(float) * present

    found = audit(rare, delta=0.0, runs=20_000)
    assert (found.side, found.likelier) == ("at least", "present")
    assert found.lower_bound > 6
    found = audit(lambda present, runs, seed: rare(not present, runs, seed), delta=0.0, runs=20_000)
    assert (found.side, found.likelier) == ("at least", "absent")
    assert found.lower_bound > 6
    found = audit(lambda present, runs, seed: -rare(present, runs, seed), delta=0.0, runs=20_000)
    assert (found.side, found.likelier) == ("below", "present")


def test_nothing_is_found_where_nothing_leaks():
    def noise(present, runs, seed):
        return np.random.default_rng(seed).standard_normal(runs)

    assert all(audit(noise, delta=1e-5, runs=2000, seed=seed).lower_bound < 0.1 for seed in range(20))
    constant = audit(lambda present, runs, seed: np.zeros(runs), delta=1e-5, runs=100)
    assert constant.lower_bound == 0


def test_delta_alone_does_not_count():
    # With chance 0.05 the client is published: (0, 0.05)-private, though no ε is finite at a smaller δ.
    def publishes(present, runs, seed):
        return (np.random.default_rng(seed).random(runs) < 0.05).astype(float) * present

    assert audit(publishes, delta=0.05, runs=20_000).lower_bound < 0.1
    assert audit(publishes, delta=0.001, runs=20_000).lower_bound > 4


def test_a_mechanism_that_runs_once_is_repeated_with_seeds_of_its_own():
    seeds = set()

    def mechanism(present, seed):
        seeds.add((present, seed))
        return np.random.default_rng(seed).normal(5.0 * present)

    found = audit(one_by_one(mechanism), delta=1e-3, runs=400)
    assert len(seeds) == 800
    assert found.lower_bound > 2
    assert found == audit(one_by_one(mechanism), delta=1e-3, runs=400)
    assert found != audit(one_by_one(mechanism), delta=1e-3, runs=400, seed=1)


# ----------------------------------------------------------------------------------------------------------------- the pieces


@given(hits=st.integers(0, 50), error=st.sampled_from([0.025, 0.1]))
def test_chance_bounds_are_where_the_binomial_tail_has_the_error(hits, error):
    lower, upper = (float(bound) for bound in chance_bounds(np.array(hits), 50, error))
    assert lower <= hits / 50 <= upper
    if hits > 0:
        assert binom.sf(hits - 1, 50, lower) == pytest.approx(error, rel=1e-6)
    else:
        assert lower == 0
    if hits < 50:
        assert binom.cdf(hits, 50, upper) == pytest.approx(error, rel=1e-6)
    else:
        assert upper == 1


def test_bounds_from_chances_by_hand():
    p, q = np.array([0.5, 0.1, 1e-6]), np.array([0.1, 0.5, 0.1])
    assert epsilon_from_chances(p, q, 0.01) == pytest.approx([math.log(4.9), 0.0, 0.0])
    # Φ(1) = 0.841345, Φ(−2) = 0.0227501
    assert mu_from_chances(np.array([0.841344746, 0.0]), np.array([0.022750132, 0.5])) == pytest.approx([3.0, 0.0], abs=1e-6)


@given(x=st.floats(-5, 5), z=st.floats(0.3, 5), q=st.floats(0.01, 1))
def test_the_score_is_the_ratio_of_the_densities(x, z, q):
    def density(mean):
        return math.exp(-((x - mean) ** 2) / (2 * z * z))

    ratio = math.log(((1 - q) * density(0) + q * density(1)) / density(0))
    assert float(log_likelihood_ratio(np.array(x), z, q)) == pytest.approx(ratio, rel=1e-6, abs=1e-9)


def test_scores_have_the_law_of_a_clipped_noisy_sum():
    # One round, no sampling: the score is (2x − 1)/(2z²) with x ~ N(1 or 0, z²), whatever clip, dimension and canary norm.
    for clip, dimension in ((1.0, 1), (0.3, 50)):
        scores = gaussian_sum_scores(noise_multiplier=2.0, clip=clip, dimension=dimension)
        for present in (True, False):
            x = scores(present, 20_000, 5) * 4 + 0.5
            assert x.mean() == pytest.approx(float(present), abs=4 * 2 / math.sqrt(20_000))
            assert x.std() == pytest.approx(2.0, rel=0.03)
    short = gaussian_sum_scores(noise_multiplier=2.0, canary_norm=0.5)(True, 20_000, 5) * 4 + 0.5
    assert short.mean() == pytest.approx(0.5, abs=4 * 2 / math.sqrt(20_000))  # a short update is not stretched


def test_wrong_audits_are_refused():
    good = gaussian_sum_scores(noise_multiplier=1.0)
    for change, message in [
        ({"delta": 1.0}, "delta"),
        ({"runs": 10}, "runs"),
        ({"confidence": 1.0}, "confidence"),
        ({"assume": "laplace"}, "assume"),
    ]:
        with pytest.raises(InvalidParameter, match=message):
            audit(good, **({"delta": 1e-5, "runs": 1000} | change))
    for change in ({"noise_multiplier": 0.0}, {"clip": -1.0}, {"dimension": 0}, {"rounds": 0}, {"sampling_rate": 0.0}):
        with pytest.raises(InvalidParameter, match=next(iter(change))):
            gaussian_sum_scores(**({"noise_multiplier": 1.0} | change))
    with pytest.raises(InvalidData, match="none of them NaN"):
        audit(lambda present, runs, seed: np.full(runs, np.nan), delta=1e-5, runs=100)
    with pytest.raises(InvalidData, match="shape"):
        audit(lambda present, runs, seed: np.zeros(3), delta=1e-5, runs=100)
