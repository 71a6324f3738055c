"""Tail measures: order, limits, closed forms and plain searches."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.optimize import minimize_scalar

from equipoise.errors import InvalidParameter
from equipoise.risk.measures import entropic_value_at_risk, superquantile, tilted_value_at_risk, value_at_risk

cases = st.lists(st.tuples(st.floats(-3, 5), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda rows: (
        torch.tensor([r[0] for r in rows], dtype=torch.float64),
        torch.tensor([float(r[1]) for r in rows], dtype=torch.float64),
    )
)
tails = st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.1, 0.01])


@given(cases, tails)
def test_the_order_of_the_measures(case, tail):
    losses, weights = case
    var, cvar, evar, tivar = (
        m(losses, tail, weights) for m in (value_at_risk, superquantile, entropic_value_at_risk, tilted_value_at_risk)
    )
    slack = 1e-6 * (1 + float(losses.abs().max()))
    assert var <= cvar + slack
    assert cvar <= evar + slack
    assert var <= tivar + slack
    assert tivar <= evar + slack
    assert evar <= float(losses.max()) + slack


@given(cases)
def test_tail_one_is_the_mean(case):
    losses, weights = case
    mean = float(losses @ weights / weights.sum())
    assert superquantile(losses, 1.0, weights) == pytest.approx(mean, abs=1e-9)
    assert entropic_value_at_risk(losses, 1.0, weights) == pytest.approx(mean, abs=1e-6)


def test_the_entropic_measure_of_a_gaussian():
    # EVaR of N(0, 1) is √(−2 log α); here on a fine grid of quantiles.
    grid = torch.from_numpy(np.linspace(-8, 8, 4001))
    weights = torch.exp(-grid.square() / 2)
    for tail in (0.5, 0.1, 0.01):
        assert entropic_value_at_risk(grid, tail, weights) == pytest.approx(math.sqrt(-2 * math.log(tail)), abs=1e-3)


@given(cases, st.sampled_from([0.9, 0.5, 0.1]))
def test_the_entropic_measure_against_a_plain_search(case, tail):
    losses, weights = case
    alpha = weights / weights.sum()

    def objective(log_t):
        t = math.exp(log_t)
        return float(torch.logsumexp(alpha.log() + t * losses, 0)) / t - math.log(tail) / t

    found = minimize_scalar(objective, bounds=(-12, 12), method="bounded", options={"xatol": 1e-10}).fun
    assert entropic_value_at_risk(losses, tail, weights) <= found + 1e-6
    assert entropic_value_at_risk(losses, tail, weights) == pytest.approx(min(found, float(losses.max())), abs=1e-4)


def test_two_points_by_hand():
    # Losses 0 and 1 with mass ½ each, α = ½. VaR is 0 (a mass of ½ lies above it), CVaR and EVaR are 1.
    losses = torch.tensor([0.0, 1.0])
    assert value_at_risk(losses, 0.5) == 0.0
    assert superquantile(losses, 0.5) == pytest.approx(1.0)
    assert entropic_value_at_risk(losses, 0.5) == pytest.approx(1.0, abs=1e-6)
    # TiVaR: E e^t − ½ over ½ is e^t for every t, so it is 1 at every t.
    assert tilted_value_at_risk(losses, 0.5) == pytest.approx(1.0, abs=1e-9)


def test_the_floor_of_the_tilted_measure():
    losses = torch.tensor([1.0, 2.0, 4.0])
    values = [tilted_value_at_risk(losses, 0.3, floor=floor) for floor in (1.0, 0.0, -10.0)]
    assert values == sorted(values)  # a looser bound gives a looser measure
    with pytest.raises(InvalidParameter, match="floor must be a lower bound"):
        tilted_value_at_risk(losses, 0.3, floor=1.5)


@pytest.mark.parametrize("measure", [value_at_risk, superquantile, entropic_value_at_risk, tilted_value_at_risk])
def test_huge_equal_and_bad_input(measure):
    assert math.isfinite(measure(torch.tensor([1e6, 0.0, 5e5]), 0.1))
    assert measure(torch.tensor([2.0, 2.0]), 0.3) == pytest.approx(2.0)
    assert measure(torch.tensor([3.0]), 0.3) == pytest.approx(3.0)
    assert measure(torch.tensor([9.0, 1.0]), 0.3, torch.tensor([0.0, 1.0])) == pytest.approx(1.0)
    for bad in (0.0, 1.5, "x"):
        with pytest.raises(InvalidParameter, match="tail must lie in"):
            measure(torch.tensor([1.0]), bad)
    with pytest.raises(InvalidParameter, match="losses must be"):
        measure(torch.tensor([float("nan")]), 0.5)
    with pytest.raises(InvalidParameter, match="weights must be"):
        measure(torch.tensor([1.0, 2.0]), 0.5, torch.tensor([1.0]))
