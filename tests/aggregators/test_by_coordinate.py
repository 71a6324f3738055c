"""The fast ways of the robust rules against slow ones: over the borders of blocks, by products instead of differences."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import Bounds, LinearConstraint, minimize

from equipoise import aggregators as agg
from equipoise.aggregators import by_coordinate, robust
from equipoise.aggregators.by_coordinate import coordinate_median, trimmed_mean
from equipoise.aggregators.robust import geometric_median, gram_matrix, krum_scores, min_norm_weights, pairs, update_norms


def drawn(clients, width, seed, dtype=torch.float32):
    """Updates with ties in them, and weights that differ."""
    gen = torch.Generator().manual_seed(seed)
    updates = (torch.randn(clients, width, generator=gen, dtype=dtype) * 4).round() / 4
    weights = torch.rand(clients, generator=gen, dtype=torch.float64) + 0.05
    return updates, weights / weights.sum()


def slow_median(values, weights):
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(weights[order])
    low = values[order][np.flatnonzero(mass >= 0.5 - 1e-12)[0]]
    high = values[order][np.flatnonzero(mass >= 0.5 + 1e-12)[0]]
    return (low + high) / 2


def slow_trimmed(values, weights, fraction):
    order = np.argsort(values, kind="stable")
    total = below = 0.0
    for value, weight in zip(values[order], weights[order], strict=True):
        above = below + weight
        total += value * (min(max(above, fraction), 1 - fraction) - min(max(below, fraction), 1 - fraction))
        below = above
    return total / (1 - 2 * fraction)


@settings(max_examples=30)
@given(
    clients=st.integers(1, 12), width=st.integers(1, 40), seed=st.integers(0, 10**6), block=st.sampled_from([1, 7, 24, 10**6]),
    equal=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64]), fraction=st.sampled_from([0.0, 0.1, 0.3, 0.49]),
)  # fmt: skip
def test_medians_and_trimmed_means_of_each_coordinate(clients, width, seed, block, equal, dtype, fraction):
    updates, weights = drawn(clients, width, seed, dtype)
    weights = torch.full_like(weights, 1 / clients) if equal else weights
    usual = by_coordinate._BLOCK
    by_coordinate._BLOCK = block
    try:
        median, trimmed = coordinate_median(updates, weights), trimmed_mean(updates, weights, fraction)
    finally:
        by_coordinate._BLOCK = usual
    columns = updates.t().double().numpy()
    torch.testing.assert_close(median.double(), torch.tensor([slow_median(c, weights.numpy()) for c in columns]).double())
    expected = torch.tensor([slow_trimmed(c, weights.numpy(), fraction) for c in columns]).double()
    torch.testing.assert_close(trimmed.double(), expected, rtol=1e-5, atol=1e-6)
    assert median.dtype == trimmed.dtype == dtype


def test_numbers_that_numpy_does_not_sort():
    updates, weights = drawn(7, 30, 0)
    for w in (weights, torch.full_like(weights, 1 / 7)):
        torch.testing.assert_close(
            coordinate_median(updates.bfloat16(), w).float(), coordinate_median(updates, w), rtol=0.01, atol=0.01
        )


def test_the_median_of_the_largest_numbers_is_finite():
    updates = torch.full((4, 3), 3e38)
    assert agg.Median()(updates, torch.full((4,), 0.25))[0].equal(updates[0])


@pytest.mark.parametrize("block", [50, 10**6])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_krum_by_products_is_krum_by_differences(block, scale, monkeypatch):
    monkeypatch.setattr(robust, "_BLOCK", block)
    updates, _ = drawn(15, 60, 3)
    updates = 100 + scale * updates  # a large common part, which cancels
    updates[2] = 1e30  # and somebody far away
    slow = torch.cdist(updates.double(), updates.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    slow.fill_diagonal_(torch.inf)
    for malicious in (0, 3, 6):
        expected = slow.sort(dim=1).values[:, : 15 - malicious - 2].sum(1)
        for rows, precision in ((updates, 1e-5), (updates.double(), 1e-9)):
            scores, _ = krum_scores(*pairs(rows), 15 - malicious - 2)
            torch.testing.assert_close(scores, expected, rtol=precision, atol=0)


@settings(max_examples=25)
@given(clients=st.integers(1, 12), seed=st.integers(0, 10**6), far=st.sampled_from([1.0, 1e6, 1e30, 1e200]))
def test_the_geometric_median_is_that_of_plain_iterations(clients, seed, far):
    updates, weights = drawn(clients, 9, seed, torch.float64)
    updates = updates + 0.01 * torch.randn(updates.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    light = weights < 0.3 / clients  # those who are far hold little weight
    updates[light] *= far
    point = coordinate_median(updates, weights)
    floor = 1e-3 * float(robust.weighted_quantile(update_norms(updates - point), weights, 0.5)) or 1e-12
    for _ in range(50):
        beta = weights / (updates - point).norm(dim=1).clamp(min=floor)  # infinite from 1e154 on: no share
        point = (beta / beta.sum()) @ updates
    found = geometric_median(updates, weights, iterations=50, smoothing=1e-3)
    size = float(updates[~light].abs().max()) if bool((~light).any()) else 1.0
    torch.testing.assert_close(found, point, rtol=1e-4, atol=1e-4 * size)


@settings(max_examples=25)
@given(
    clients=st.integers(2, 14), width=st.integers(1, 20), seed=st.integers(0, 10**6), epsilon=st.sampled_from([0.01, 0.1, 1.0])
)
def test_the_shortest_vector_is_that_of_another_solver(clients, width, seed, epsilon):
    updates, weights = drawn(clients, width, seed, torch.float64)
    updates = torch.nn.functional.normalize(updates + 0.1, dim=1)
    found = min_norm_weights(updates, weights, epsilon).numpy()
    gram, start = (updates @ updates.t()).numpy(), weights.numpy()
    low, high = np.maximum(start - epsilon, 0), np.minimum(start + epsilon, 1)
    other = minimize(
        lambda w: w @ gram @ w, start, jac=lambda w: 2 * gram @ w, bounds=Bounds(low, high), method="SLSQP",
        constraints=LinearConstraint(np.ones(clients), 1.0, 1.0), options={"ftol": 1e-12, "maxiter": 500},
    ).x  # fmt: skip
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    assert bool((found >= low - 1e-8).all())
    assert bool((found <= high + 1e-8).all())
    assert found @ gram @ found <= other @ gram @ other + 1e-7


def test_products_over_blocks(monkeypatch):
    monkeypatch.setattr(robust, "_BLOCK", 20)
    updates, _ = drawn(6, 31, 1)
    centre = updates[3]
    torch.testing.assert_close(gram_matrix(updates), updates.double() @ updates.double().t())
    moved = (updates - centre).double()
    torch.testing.assert_close(gram_matrix(updates, centre), moved @ moved.t())
