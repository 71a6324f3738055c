"""The first-order solvers: one step by hand, the minimum they reach, sampling laws, and annealing."""

import math

import pytest
import torch

from equipoise.errors import InvalidParameter
from equipoise.tilted import (
    annealed,
    batch_descent,
    group_probabilities,
    hierarchical_stochastic_descent,
    stochastic_descent,
    tilted_loss,
    tilted_weights,
)

POINTS = torch.tensor([[1.0, 1.0], [1.2, 0.8], [0.9, 1.1], [1.1, 1.3], [4.0, 3.0]], dtype=torch.float64)
GROUPS = ["a", "a", "b", "b", "b"]
ZERO = torch.zeros(2, dtype=torch.float64)


def losses(theta):
    return 0.5 * (POINTS - theta).square().sum(1)


def some(theta, index):
    return 0.5 * (POINTS[index] - theta).square().sum(1)


def minimum(tilt, groups=None, inner=0.0, start=ZERO):
    """By another optimiser on the loss function."""
    theta = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=200, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = tilted_loss(losses(theta), tilt, groups, inner_tilt=inner if groups else ())
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return theta.detach()


@pytest.mark.parametrize("tilt", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_one_batch_step_by_hand(tilt, groups):
    # Algorithms 13 and 15: θ − η Σ w_i ∇f_i.
    inner = -1.0 if groups else ()
    found = batch_descent(losses, ZERO, tilt, groups=groups, inner_tilt=inner, lr=0.3, steps=1, anneal=0.0)
    weights = tilted_weights(losses(ZERO), tilt, groups, inner_tilt=inner)
    torch.testing.assert_close(found.parameters, ZERO - 0.3 * (weights[:, None] * (ZERO - POINTS)).sum(0))
    assert float(found.values[0]) == pytest.approx(float(tilted_loss(losses(ZERO), tilt, groups, inner_tilt=inner)))


@pytest.mark.parametrize(("tilt", "inner"), [(1.0, 0.0), (1.0, -0.5), (0.5, 2.0)])
def test_batch_descent_reaches_the_minimum(tilt, inner):
    plain = batch_descent(losses, ZERO, tilt, lr=0.3, steps=300)
    torch.testing.assert_close(plain.parameters, minimum(tilt), atol=1e-4, rtol=0)
    grouped = batch_descent(losses, ZERO, tilt, groups=GROUPS, inner_tilt=inner, lr=0.3, steps=300)
    torch.testing.assert_close(grouped.parameters, minimum(tilt, GROUPS, inner, start=ZERO), atol=1e-4, rtol=0)
    deep = batch_descent(losses, ZERO, tilt, groups=[GROUPS, GROUPS], inner_tilt=(7.0, inner), lr=0.3, steps=300)
    torch.testing.assert_close(deep.parameters, grouped.parameters, atol=1e-6, rtol=0)


def test_negative_tilts_by_annealing():
    # From the outlier, the tilt itself would stay there; annealing first goes to the mean and then to the four.
    start = POINTS[-1]
    stuck = batch_descent(losses, start, -10.0, lr=0.2, steps=200, anneal=0.0).parameters
    found = batch_descent(losses, start, -10.0, lr=0.2, steps=300).parameters
    assert float((stuck - POINTS[-1]).norm()) < 0.1
    assert float((found - POINTS[:4].mean(0)).norm()) < 0.3
    assert [annealed(-2.0, p) for p in (-1, 0, 0.5, 1, 3)] == [0.0, 0.0, -1.0, -2.0, -2.0]


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("tilt", [0.5, -0.5])
def test_stochastic_descent_reaches_the_minimum(tilt, batches):
    target = minimum(tilt)
    rate = lambda step: 0.2 / (1 + 0.01 * step)  # noqa: E731
    # With two batches the steps have no bound, so it starts near enough for losses that differ little.
    found = stochastic_descent(some, ZERO + 1.5, 5, tilt, lr=rate, steps=800, batch_size=5, rho=0.1, batches=batches, seed=1)
    assert float((found.parameters - target).norm()) < 0.25
    exact = float(tilted_loss(losses(target), tilt))
    assert float(found.values[-200:].mean()) == pytest.approx(exact, rel=0.3)


def test_a_stochastic_step_by_hand():
    # Algorithm 14: with one example in the data, every batch is it; R stays f(θ₀), and the next weight is e^{t(f(θ₁) − R)}.
    point = torch.tensor([2.0], dtype=torch.float64)

    def loss(theta, index):
        return (point[index] - theta).square()

    t, lr, rho = 0.5, 0.1, 0.3
    found = stochastic_descent(loss, torch.zeros(1, dtype=torch.float64), 1, t, lr=lr, steps=2, rho=rho)
    first = 0 + lr * 2 * 2.0  # f = 4, R = 4: weight 1
    f = (2 - first) ** 2
    tracked = math.log((1 - rho) * math.exp(t * 4) + rho * math.exp(t * f)) / t
    second = first + lr * 2 * (2 - first) * math.exp(t * (f - tracked))
    assert float(found.parameters[0]) == pytest.approx(second)
    assert found.values.tolist() == pytest.approx([4.0, tracked])


def test_the_same_seed_is_the_same_path():
    runs = [stochastic_descent(some, ZERO, 5, 1.0, steps=20, seed=s).parameters for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_groups_are_drawn_by_size_and_risk():
    risks, sizes = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([10, 1, 5])
    expected = sizes * torch.exp(1.5 * risks)
    torch.testing.assert_close(group_probabilities(risks, sizes, 1.5), expected / expected.sum())
    torch.testing.assert_close(group_probabilities(1e6 * risks, sizes, 200.0), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize(("tilt", "inner"), [(2.0, 0.0), (-1.0, 0.0), (1.0, -0.5)])
def test_hierarchical_stochastic_descent_reaches_the_minimum(tilt, inner):
    target = batch_descent(losses, ZERO, tilt, groups=GROUPS, inner_tilt=inner, lr=0.3, steps=300).parameters
    rate = lambda step: 0.3 / (1 + 0.01 * step)  # noqa: E731
    found = hierarchical_stochastic_descent(
        some, ZERO, GROUPS, tilt, inner_tilt=inner, lr=rate, steps=800, batch_size=5, rho=0.2, seed=1
    )
    assert float((found.parameters - target).norm()) < 0.25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.0}, "lr must be"),
        ({"steps": 0}, "steps must be"),
        ({"anneal": 2.0}, "anneal must be a share"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"rho": 0.0}, "rho must lie"),
        ({"batches": 3}, "batches must be 1 or 2"),
        ({"tilt": float("inf")}, "tilt must be"),
        ({"size": 0}, "size must be"),
    ],
)
def test_mistakes_are_named(change, words):
    with pytest.raises(InvalidParameter, match=words):
        stochastic_descent(**{"losses": some, "start": ZERO, "size": 5, "tilt": 1.0, **change})


def test_one_level_of_groups_only():
    with pytest.raises(InvalidParameter, match="groups must be one vector"):
        hierarchical_stochastic_descent(some, ZERO, torch.zeros(5, 2), 1.0)
