"""The discrete Gaussian against its mass function, its coins against hand-fed bits, and the sources of randomness."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

from equipoise.errors import InvalidParameter
from equipoise.privacy import discrete_gaussian as module
from equipoise.privacy.discrete_gaussian import (
    concentrated_epsilon,
    sample_discrete_gaussian,
    share_excess,
)
from equipoise.privacy.random_source import Seeded, SystemSource


class Fed:
    """A source that gives out the 32-bit numbers it was fed, two to a word."""

    def __init__(self, *halves):
        self.halves = list(halves)

    def words(self, count):
        taken, self.halves = self.halves[: 2 * count], self.halves[2 * count :]
        return np.array(taken + [0] * (2 * count - len(taken)), dtype=np.uint32).view(np.uint64)


def mass(sigma2, reach):
    """P(−reach … reach) by the definition, in exact order of summation."""
    weights = [math.exp(-k * k / (2 * float(sigma2))) for k in range(-reach, reach + 1)]
    total = math.fsum(weights)
    return np.array([w / total for w in weights])


def p_value(draws, sigma2):
    """Chi-square of the draws against the mass function; cells with fewer than 10 expected are put together."""
    reach = math.ceil(12 * math.sqrt(float(sigma2))) + 2
    expected = mass(sigma2, reach) * len(draws)
    seen = np.bincount(draws.numpy() + reach, minlength=2 * reach + 1).astype(float)
    rare = expected < 10
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    if expected[-1] < 10:
        seen, expected = (np.append(x[:-2], x[-2:].sum()) for x in (seen, expected))
    return stats.chisquare(seen, expected * (seen.sum() / expected.sum())).pvalue


VARIANCES = [0.25, 1, 4, 100, Fraction(7, 3), 12.3456, 0.08]


@pytest.mark.parametrize("sigma2", VARIANCES)
def test_follows_the_mass_function(sigma2):
    draws = sample_discrete_gaussian(sigma2, 1_000_000, source=Seeded(1, "chi-square"))
    assert draws.dtype == torch.int64
    assert p_value(draws, sigma2) > 1e-3


def test_the_chi_square_tells_a_rounded_gaussian_apart():
    rounded = torch.tensor(np.random.default_rng(0).normal(0, 1, 200_000)).round().long()
    assert p_value(rounded, 1) < 1e-9


@pytest.mark.parametrize("sigma2", [0.25, 1, Fraction(7, 3), 100, 10**6, 10**9, 2**60])
def test_mean_and_variance(sigma2):
    count = 100_000
    draws = sample_discrete_gaussian(sigma2, count, source=Seeded(2, "moments")).double() / math.sqrt(sigma2)
    reach = math.ceil(12 * math.sqrt(float(sigma2)))
    if sigma2 <= 100:
        k = np.arange(-reach, reach + 1)
        variance = float((mass(sigma2, reach) * k**2).sum()) / float(sigma2)
    else:
        variance = 1.0
    assert abs(float(draws.mean())) < 4.5 * math.sqrt(variance / count)
    assert float(draws.square().mean()) == pytest.approx(variance, abs=4.5 * variance * math.sqrt(3 / count))


def test_large_variances_are_normal_in_shape():
    draws = sample_discrete_gaussian(10**9, 50_000, source=Seeded(3, "shape")).double().numpy() / 10**4.5
    assert stats.kstest(draws, "norm").pvalue > 1e-3


def test_from_sigma_one_on_the_variance_is_the_parameter():
    # The claim of the docstring, by the mass function: less than σ², by at most a part in 10^6.
    variance = float((mass(1, 40) * np.arange(-40, 41) ** 2).sum())
    assert 1 - 1e-6 < variance < 1


def test_draws_are_independent_and_symmetric():
    count = 200_000
    draws = sample_discrete_gaussian(4, count, source=Seeded(4, "independent")).double()
    sizes = draws.square() - draws.square().mean()
    for lag in (1, 2, 3, 7, 64):
        for x in (draws, sizes):
            correlation = float((x[lag:] * x[:-lag]).mean() / x.square().mean())
            assert abs(correlation) < 4.5 / math.sqrt(count)
    signs = draws.sign()
    assert abs(float(signs.sum())) < 4.5 * math.sqrt(float(signs.abs().sum()))
    # The sign says nothing about the size.
    assert float(draws[signs > 0].mean()) == pytest.approx(-float(draws[signs < 0].mean()), rel=0.02)


def test_a_pure_function_of_seed_purpose_and_round():
    def draw(*key):
        return sample_discrete_gaussian(9, 1000, source=Seeded(*key))

    base = draw(5, "quantile", 3)
    assert torch.equal(base, draw(5, "quantile", 3))
    for other in ((6, "quantile", 3), (5, "update", 3), (5, "quantile", 4)):
        assert abs(float(np.corrcoef(base, draw(*other))[0, 1])) < 0.15
    source = Seeded(5, "quantile", 3)  # a stream: asking again goes on, and never repeats
    first, second = (sample_discrete_gaussian(9, 1000, source=source) for _ in range(2))
    assert torch.equal(first, base)
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.15


def test_the_operating_systems_source():
    words = SystemSource().words(4096)
    assert words.dtype == np.uint64
    assert words.shape == (4096,)
    ones = int(np.unpackbits(words.view(np.uint8)).sum())
    assert abs(ones - 4096 * 32) < 6 * math.sqrt(4096 * 16)
    draws = sample_discrete_gaussian(100, 20_000, source=SystemSource()).double()
    assert float(draws.var()) == pytest.approx(100, rel=0.08)  # 8 standard errors


@pytest.mark.parametrize("seeded", [Seeded(0, "bits"), Seeded(2**70, "bits", 10**6)])
def test_seeded_words_are_uniform(seeded):
    bits = np.unpackbits(seeded.words(50_000).view(np.uint8)).reshape(-1, 64)
    assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / math.sqrt(50_000)


@pytest.mark.parametrize("sigma2", [0, 0.0, Fraction(0)])
def test_no_variance_gives_zeros_and_takes_no_randomness(sigma2):
    assert torch.equal(sample_discrete_gaussian(sigma2, (2, 3), source=None), torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(("size", "shape"), [(0, (0,)), (5, (5,)), ((2, 3), (2, 3)), ([4], (4,)), ((), ()), ((3, 0), (3, 0))])
def test_shapes(size, shape):
    assert sample_discrete_gaussian(4, size, source=Seeded(0, "shape")).shape == shape


def test_tiny_variances_are_zero_nearly_always():
    assert int(sample_discrete_gaussian(1e-9, 10_000, source=Seeded(0, "tiny")).abs().sum()) == 0
    assert int(sample_discrete_gaussian(5e-324, 100, source=Seeded(0, "tiny")).abs().sum()) == 0


@pytest.mark.parametrize("sigma2", [-1, math.nan, math.inf, True, "4", None, 2.0**61])
def test_refuses_what_is_no_variance(sigma2):
    with pytest.raises(InvalidParameter, match="sigma2"):
        sample_discrete_gaussian(sigma2, 3, source=Seeded(0, "x"))


@pytest.mark.parametrize("size", [-1, 2.5, (3, -1), "3", None])
def test_refuses_what_is_no_size(size):
    with pytest.raises(InvalidParameter, match="size"):
        sample_discrete_gaussian(4, size, source=Seeded(0, "x"))


def test_refuses_what_is_no_seed():
    for wrong in (("0", "x", 0), (0, 1, 0), (0, "x", -1)):
        with pytest.raises(InvalidParameter):
            Seeded(*wrong)


# ------------------------------------------------------------------------------------------------------------- exactness inside


def test_a_coin_decides_by_its_first_digits_and_asks_for_more_at_a_tie():
    third = 2**32 // 3  # the first 32 digits of one third; what is left of it is one third again

    def toss(*halves):
        return bool(module._bernoulli(1, 3, 1, Fed(*halves))[0])

    assert toss(third - 1)
    assert not toss(third + 1)
    assert toss(third, 0, third - 1)  # a word holds two numbers, the second is not used here
    assert not toss(third, 0, third + 1)
    assert toss(third, 0, third, 0, third - 1)


def test_coins_that_are_certain():
    source = Seeded(0, "coins")
    assert module._bernoulli(7, 7, 1000, source).all()
    assert not module._bernoulli(0, 7, 1000, source).any()
    assert all(module._bernoulli_one(7, 7, source) for _ in range(10))


@pytest.mark.parametrize("denominator", [2, 3, 1000, 2**31 + 11, 2**40 + 1, 2**61 - 1, 2**62 - 1])
def test_coins_have_the_bias_they_are_given(denominator):
    count = 20_000 if denominator < 2**61 else 4000  # the last one is tossed in Python's integers
    numerators = np.array([denominator // 5, denominator // 2, denominator - denominator // 5])
    for numerator in numerators:
        heads = int(module._bernoulli(np.full(count, numerator), denominator, count, Seeded(1, f"{denominator}")).sum())
        p = int(numerator) / denominator
        assert abs(heads - p * count) <= 4.5 * math.sqrt(p * (1 - p) * count)


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(9, 11), Fraction(1)])
def test_exponential_coins(gamma):
    count, source = 100_000, Seeded(2, f"exp {gamma}")
    p = math.exp(-gamma)
    heads = int(module._bernoulli_exp(np.full(count, gamma.numerator), gamma.denominator, source).sum())
    assert abs(heads - p * count) <= 4.5 * math.sqrt(p * (1 - p) * count)
    if gamma == 1:
        heads = int(module._bernoulli_exp_minus_one(count, source).sum())
        assert abs(heads - p * count) <= 4.5 * math.sqrt(p * (1 - p) * count)


@given(
    st.one_of(st.fractions(min_value=Fraction(1, 10**6), max_value=10**9), st.floats(1e-6, 1e9).map(Fraction)),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
)
@settings(max_examples=100)
def test_exponents_are_exact(variance, sizes):
    scale = math.isqrt(math.floor(variance)) + 1
    table = module._Exponents(sizes, variance, scale)
    for place, y in enumerate(sizes):
        gamma = (y - variance / scale) ** 2 / (2 * variance)
        rest = Fraction(table.rest[place], table.denominator)
        assert 0 <= rest < 1
        assert 0 <= table.coarse[place] < 1 << module._GRID
        if gamma < 2**62:
            assert int(table.whole[place]) + (int(table.coarse[place]) + rest) / (1 << module._GRID) == gamma


@pytest.mark.parametrize(("grid", "table"), [(1, 1 << 16), (2, 0), (24, 0)])
@pytest.mark.parametrize("sigma2", [1, 12.3456])
def test_paths_that_are_rarely_taken(monkeypatch, grid, table, sigma2):
    # With a coarse grid the exact remainder of an exponent matters often; without a table sizes are looked up one by one.
    monkeypatch.setattr(module, "_GRID", grid)
    monkeypatch.setattr(module, "_TABLE", table)
    draws = sample_discrete_gaussian(sigma2, 30_000, source=Seeded(7, f"rare {grid} {table}"))
    assert p_value(draws, sigma2) > 1e-3


# ------------------------------------------------------------------------------------------------------ privacy of a sum


def test_excess_of_shares_by_hand():
    assert share_excess(1.0, 1) == 0  # one share is a discrete Gaussian
    assert share_excess(1.0, 3) == pytest.approx(10 * (math.exp(-(math.pi**2)) + math.exp(-4 * math.pi**2 / 3)))
    assert share_excess(1.0, 3) > 10 * 2 * math.exp(-2 * math.pi**2)  # the bound printed with it does not hold


def test_concentrated_epsilon_by_hand():
    assert concentrated_epsilon(3.0, 2.0, 100, 62) == pytest.approx(3 / 20, rel=1e-12)
    excess = 10 * math.exp(-(math.pi**2) * 0.25)  # σ = ½, two shares: far from a Gaussian
    both = (math.sqrt(9 / 0.5 + excess * 10 / 2), 3 / math.sqrt(0.5) + excess * math.sqrt(10))
    assert concentrated_epsilon(3.0, 0.5, 2, 10) == pytest.approx(min(both))
    assert concentrated_epsilon(0.001, 0.5, 2, 10) == pytest.approx(min(math.sqrt(2e-6 + 5 * excess), 10))
    assert concentrated_epsilon(1.0, 0.0, 10, 5) == math.inf
    with pytest.raises(InvalidParameter, match="sigma"):
        concentrated_epsilon(1.0, 0.4, 10, 5)


@pytest.mark.parametrize("contributors", [2, 5])
def test_the_bound_covers_the_divergence_of_a_sum(contributors):
    # Rényi divergences of a sum of shares from itself moved by S, computed from its mass function, against αε²/2.
    sigma, shift = 0.6, 1
    total = np.array([1.0])
    for _ in range(contributors):
        total = np.convolve(total, mass(sigma**2, 12))
    p, q = total[shift:], total[:-shift]
    inside = (p > 1e-150) & (q > 1e-150)  # beyond, the ends that were cut off show
    log_p, log_q = np.log(p[inside]), np.log(q[inside])
    epsilon = concentrated_epsilon(float(shift), sigma, contributors, 1)
    for alpha in (1.5, 2, 8):
        divergence = math.log(float(np.exp(alpha * log_p + (1 - alpha) * log_q).sum())) / (alpha - 1)
        assert divergence <= alpha * epsilon**2 / 2
        assert divergence == pytest.approx(alpha * (shift / sigma) ** 2 / contributors / 2, rel=0.2)  # about a Gaussian's
