"""Sources of the quantile: by sums over clients only, against the one by sorting."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise import privacy
from equipoise.errors import InvalidParameter
from equipoise.privacy import Exact, SecureSums
from equipoise.risk import Superquantile
from equipoise.risk.quantile_sources import quantile_by_sums, sum_over_clients, tail_quantile


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def deviation(losses, alpha):
    return float(alpha @ (losses - alpha @ losses).abs())


cohorts = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9)), min_size=1, max_size=30).map(
    lambda rows: (tensor([r[0] / 10 for r in rows]), tensor([r[1] for r in rows]) / sum(r[1] for r in rows))
)
tails = st.sampled_from([0.9, 0.5, 1 / 3, 0.2, 0.05])


def test_one_iteration_by_hand():
    # Losses 0, 1, 5 with α = ⅓: mean 2, mean deviation 2, 3β = ½, 1, ⅓, so Σβ = 11/18 and Σβx = 8/9.
    losses, alpha = tensor([0.0, 1.0, 5.0]), tensor([1 / 3] * 3)
    # θ = ½ adds nothing: (8/9)/(11/18) = 16/11. θ = ¼ adds 2 · ¾ − 1 = ½: (8/9 + 1/2)/(11/18) = 25/11. Less ε = 0.01 · 2.
    for tail, expected in ((0.5, 16 / 11), (0.25, 25 / 11)):
        found = quantile_by_sums(losses, alpha, tail, iterations=1, tolerance=0.01)
        assert float(found) == pytest.approx(expected - 0.02)


@given(cohorts, tails)
@settings(max_examples=60)
def test_converges_to_the_weighted_quantile(case, tail):
    losses, alpha = case
    exact = tail_quantile(losses, alpha, tail)
    above, at_least = float(alpha[losses > exact].sum()), float(alpha[losses >= exact].sum())
    slack = 1e-4 * deviation(losses, alpha)
    released = float(SecureSums(iterations=1000)(losses, alpha, tail))
    if above < tail - 0.02 and at_least > tail + 0.02:  # unique by a margin: within ε, and released lower by ε
        assert float(exact) - 2.01 * slack - 1e-9 <= released <= float(exact) + 1e-3 * slack + 1e-9
    # In any case the right mass is found: about θ at or above what was released, and no more than that well above it.
    assert float(alpha[losses >= released].sum()) >= tail - 0.02
    assert float(alpha[losses > released + 2.01 * slack + 1e-9].sum()) <= tail + 0.02


@pytest.mark.parametrize("count", [10, 100, 1000])
@pytest.mark.parametrize("tail", [0.8, 0.5, 0.2, 0.1])
def test_the_defaults_do_on_typical_cohorts(count, tail):
    gen = torch.Generator().manual_seed(count)
    normal = torch.randn(count, generator=gen, dtype=torch.float64)
    uniform = torch.rand(count, generator=gen, dtype=torch.float64)
    for losses in (uniform, normal.exp(), (2 * normal).exp(), uniform ** (-1 / 1.5)):
        for alpha in (torch.ones_like(losses), (torch.randn(count, generator=gen, dtype=torch.float64)).exp()):
            alpha = alpha / alpha.sum()
            released = SecureSums()(losses, alpha, tail)
            slack = 2.01e-4 * deviation(losses, alpha)
            assert float(alpha[losses >= released].sum()) >= tail - 0.015
            assert float(alpha[losses > released + slack].sum()) <= tail + 0.015


@given(cohorts, tails, st.sampled_from([1e-30, 1e-3, 1e6, 1e250]))
@settings(max_examples=30)
def test_the_scale_of_the_losses_does_not_matter(case, tail, scale):
    losses, alpha = case
    plain, scaled = SecureSums()(losses, alpha, tail), SecureSums()(scale * losses, alpha, tail)
    assert float(scaled) / scale == pytest.approx(float(plain), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 0.7, 1e-30, 1e30, -2.3])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_equal_losses_are_all_kept(dtype, level, count):
    losses = torch.full((count,), level, dtype=dtype)
    for tail in (1.0, 0.5, 0.001):
        released = SecureSums()(losses, torch.full((count,), 1 / count, dtype=dtype), tail)
        assert float(released) == pytest.approx(float(losses[0]), rel=1e-9)
        assert bool((losses.double() >= released).all())


def test_only_sums_over_clients_are_used():
    seen = []

    def secure_sum(contributions):
        seen.append(tuple(contributions.shape))
        return sum_over_clients(contributions)

    losses, alpha = tensor([3.0, 1.0, 2.0, 9.0, 4.0]), tensor([0.2] * 5)
    found = quantile_by_sums(losses, alpha, 0.5, iterations=4, tolerance=1e-3, secure_sum=secure_sum)
    assert seen == [(5, 2), (5,), *[(5, 2)] * 4, (5,)]
    assert torch.equal(found, SecureSums(iterations=4, tolerance=1e-3)(losses, alpha, 0.5))

    # Two sites that add up their own clients first find the same, up to rounding.
    def in_two_halves(contributions):
        return sum_over_clients(torch.stack([contributions[:2].sum(0), contributions[2:].sum(0)]))

    halves = quantile_by_sums(losses, alpha, 0.5, iterations=4, tolerance=1e-3, secure_sum=in_two_halves)
    torch.testing.assert_close(halves, found)


def test_a_gigantic_loss_makes_the_slack_large_and_nothing_worse():
    losses, alpha = tensor([1e300, 1.0, 0.0]), tensor([1 / 3] * 3)
    released = SecureSums()(losses, alpha, 0.5)
    assert torch.isfinite(released)
    assert float(released) <= 1.0


def test_sources_say_whether_losses_are_read():
    assert Exact().reads_losses
    assert not SecureSums().reads_losses
    assert float(Exact()(tensor([1.0, 2.0, 3.0, 4.0]), tensor([0.25] * 4), 0.5)) == 2.0
    assert {"Exact", "SecureSums"} <= set(privacy.__all__)
    assert "NOT differential privacy" in SecureSums.__doc__


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"iterations": 0}, "iterations must be a whole number of at least 1"),
        ({"iterations": 1.5}, "iterations must be a whole number of at least 1"),
        ({"tolerance": 0.0}, r"tolerance must lie in \(0, 1\)"),
        ({"tolerance": "a"}, r"tolerance must lie in \(0, 1\)"),
    ],
)
def test_bad_parameters_are_named(wrong, words):
    with pytest.raises(InvalidParameter, match=words):
        SecureSums(**wrong)


@pytest.mark.parametrize("count", [5, 8, 20, 50])
@pytest.mark.parametrize("tail", [0.001, 0.01, 0.02])
def test_tiny_tails_keep_somebody(count, tail):
    losses = torch.ones(count, dtype=torch.float64)
    losses[0] = 0
    alpha = torch.full((count,), 1 / count, dtype=torch.float64)
    kept = Superquantile(tail, quantile=SecureSums())(losses, alpha).weights
    assert float(kept.sum()) == pytest.approx(1.0)
    assert kept[0] == 0
