"""Newton's method where slopes have kinks, and the second derivatives of risks that it needs."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.tilted import superquantile_loss
from equipoise.tilted.convex import Objective
from equipoise.tilted.hierarchy import hierarchy
from equipoise.tilted.newton import refine_minimum, search_along, solve_newton_step


def kinked(matrix, bounds):
    """½ Σ max(0, a_i·x − b_i)² + 5e-5 ‖x‖², with both derivatives."""

    def function(point):
        over = (matrix @ point - bounds).clamp(min=0)
        return float(over @ over / 2 + 5e-5 * point @ point), matrix.T @ over + 1e-4 * point

    def hessian(point):
        active = matrix[matrix @ point > bounds]
        return lambda direction: active.T @ (active @ direction) + 1e-4 * direction

    return function, hessian


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_newton_with_kinks(seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(40, 12, dtype=torch.float64, generator=generator)
    function, hessian = kinked(matrix, -torch.rand(40, dtype=torch.float64, generator=generator))
    start = torch.randn(12, dtype=torch.float64, generator=generator)
    point, steps, size = refine_minimum(function, hessian, start, 100)
    assert size == float(function(point)[1].abs().max()) < 1e-13
    assert steps < 40
    assert refine_minimum(function, hessian, start, 0)[1:] == (0, float(function(start)[1].abs().max()))


def test_newton_steps_keep_to_directions_with_curvature():
    gradient = torch.tensor([2.0, 0.0, 1e-20], dtype=torch.float64)
    diagonal = torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)
    step, curvature = solve_newton_step(lambda d: diagonal * d, gradient)
    torch.testing.assert_close(step, torch.tensor([-0.5, 0.0, 0.0], dtype=torch.float64))
    assert curvature == pytest.approx(4.0)
    assert not solve_newton_step(lambda d: -d, gradient)[0].any()


def test_lengths_of_steps():
    def function(point):  # x², and from 1 on fifty times as steep
        x = float(point)
        return (x * x, 2 * point) if x < 1 else (100 * (x - 1) + 1, torch.full_like(point, 100.0))

    start, ahead = torch.tensor([-0.8], dtype=torch.float64), torch.tensor([1.6], dtype=torch.float64)
    assert search_along(function, start, ahead / 2, -1.28, 0.64)[:2] == (1.0, 0.0)  # to the minimum
    length, value, gradient = search_along(function, start, 2 * ahead, -5.12, 0.64)  # to 2.4, beyond the kink
    assert abs(-0.8 + 3.2 * length) <= 0.3 * 0.8
    assert (value, gradient) == function(start + 2 * length * ahead)
    assert search_along(function, start, -ahead, 2.56, 0.64)[0] == 0.0  # uphill


@pytest.mark.parametrize(
    ("tilts", "tail", "grouped"),
    [((2.0,), None, False), ((-1.0,), None, False), ((0.5, -1.0), None, True), ((0.0,), 0.4, False), ((1.5, 0.0), 0.6, True)],
)
def test_second_derivatives_of_risks(tilts, tail, grouped):
    generator = torch.Generator().manual_seed(3)
    losses, change = torch.rand(2, 20, dtype=torch.float64, generator=generator)
    masses = torch.rand(20, dtype=torch.float64, generator=generator) + 0.1
    risk = Objective(masses / masses.sum(), hierarchy(torch.arange(20) % 5 if grouped else None, 20), tilts, tail)
    level, width = (0.3, 1e-7) if tail else (1.0, 1e-5)
    expected = (risk(losses + width * change, level)[1] - risk(losses - width * change, level)[1]) / (2 * width)
    torch.testing.assert_close(risk.differentiate_weights(losses, level)(change), expected, rtol=1e-5, atol=1e-8)
    assert not risk.differentiate_weights(losses, 0.0)(change).any()


def test_the_smoothed_superquantile_is_quadratic_between_kinks():
    # θ = 1/2 of four losses: the two in the middle are inside, with weights (η* = 1.9) of (α/θ)(F − η*)/ν = 0.05 and 0.45.
    losses = torch.tensor([1.0, 2.0, 2.8, 5.0], dtype=torch.float64, requires_grad=True)
    (weights,) = torch.autograd.grad(superquantile_loss(losses, 0.5, nu=1.0), losses, create_graph=True)
    torch.testing.assert_close(weights.detach(), torch.tensor([0.0, 0.05, 0.45, 0.5], dtype=torch.float64))
    (row,) = torch.autograd.grad(weights[1], losses)
    torch.testing.assert_close(row, torch.tensor([0.0, 0.25, -0.25, 0.0], dtype=torch.float64))
