"""Agnostic federated learning: the projection against a quadratic solver, ascents by hand, and clients in any order."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.optimize import minimize

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.risk import Mean, Mixture, Superquantile, WorstCase
from equipoise.risk.worst_case import project_on_simplex


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


points = st.lists(st.floats(-3, 3), min_size=1, max_size=8).map(tensor)


def test_projections_by_hand():
    assert project_on_simplex(tensor([0.2, 0.3, 0.5])).tolist() == pytest.approx([0.2, 0.3, 0.5])  # already there
    assert project_on_simplex(tensor([7.0])).tolist() == [1.0]
    assert project_on_simplex(tensor([2.0, 2.0, 2.0])).tolist() == pytest.approx([1 / 3] * 3)
    # The first alone: τ = 0.9; with the second: τ = (1.9 + 0.95 − 1)/2 = 0.925 < 0.95, so it stays; third: τ > 0.1.
    assert project_on_simplex(tensor([1.9, 0.95, 0.1])).tolist() == pytest.approx([0.975, 0.025, 0.0])
    assert project_on_simplex(tensor([0.0, 1.0, 5.0])).tolist() == [0.0, 0.0, 1.0]


@given(points)
def test_the_projection_is_the_nearest_point(point):
    found = project_on_simplex(point)
    assert float(found.sum()) == pytest.approx(1.0)
    assert bool((found >= 0).all())
    # Optimality: moving towards any corner of the simplex does not come nearer.
    assert float(((point - found) @ (torch.eye(len(point), dtype=torch.float64) - found).T).max()) <= 1e-9
    torch.testing.assert_close(project_on_simplex(found), found)


@given(points.filter(lambda p: len(p) > 1))
def test_the_projection_against_a_quadratic_solver(point):
    target = point.numpy()
    found = minimize(
        lambda w: ((w - target) ** 2).sum(),
        np.full(len(target), 1 / len(target)),
        jac=lambda w: 2 * (w - target),
        bounds=[(0, 1)] * len(target),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert project_on_simplex(point).tolist() == pytest.approx(found.x.tolist(), abs=1e-5)


@given(points, st.sampled_from([-1e3, 0.5, 1e3]))
def test_a_shift_changes_nothing(point, shift):
    torch.testing.assert_close(project_on_simplex(point + shift), project_on_simplex(point), atol=1e-9, rtol=0)


def test_huge_entries():
    assert project_on_simplex(tensor([1e300, 1.0, -1e300])).tolist() == [1.0, 0.0, 0.0]
    assert project_on_simplex(tensor([1e300, 1e300])).tolist() == [0.5, 0.5]
    assert project_on_simplex(tensor([0.5, float("-inf"), 0.5])).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_rounds_by_hand(dtype):
    risk, alpha, ids = WorstCase(step=0.1), tensor([0.6, 0.3, 0.1], dtype), ("a", "b", "c")
    # Round 1: λ is uniform whatever α is. λ + 0.1 F = 1/3 + (0.1, 0.2, 0.3), which sums to 1.6: τ = 0.2.
    first = risk(tensor([1.0, 2.0, 3.0], dtype), alpha, clients=ids)
    assert first.weights.dtype == dtype
    assert float(first.value) == pytest.approx(2.0)
    assert first.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert first.state.weights.tolist() == pytest.approx([7 / 30, 10 / 30, 13 / 30])
    # Round 2: (7, 10, 13)/30 + (0, 0.2, 0.6) = (7, 16, 31)/30. All three: τ = (54/30 − 1)/3 = 8/30 > 7/30, so the first
    # is 0. Two: τ = (47/30 − 1)/2 = 17/60, and 32/60 − 17/60 = 1/4, 62/60 − 17/60 = 3/4.
    second = risk(tensor([0.0, 2.0, 6.0], dtype), alpha, clients=ids, state=first.state)
    assert float(second.value) == pytest.approx((10 * 2 + 13 * 6) / 30)
    assert second.state.weights.dtype == torch.float64
    assert second.state.weights.tolist() == pytest.approx([0.0, 0.25, 0.75], abs=1e-7)
    # Round 3: a client at 0 comes back. (1, 1/4, 3/4): τ = 1/3 > 1/4; two: τ = (7/4 − 1)/2 = 3/8.
    third = risk(tensor([10.0, 0.0, 0.0], dtype), alpha, clients=ids, state=second.state)
    assert third.weights.tolist() == pytest.approx([0.0, 0.25, 0.75], abs=1e-7)
    assert third.state.weights.tolist() == pytest.approx([5 / 8, 0.0, 3 / 8], abs=1e-7)


def test_clients_are_told_by_id():
    risk, alpha = WorstCase(0.1), tensor([1 / 3] * 3)
    state = risk(tensor([1.0, 2.0, 3.0]), alpha, clients=("a", "b", "c")).state
    other = risk(tensor([0.0, 0.0, 0.0]), alpha, clients=("c", "a", "b"), state=state)
    assert other.weights.tolist() == pytest.approx([13 / 30, 7 / 30, 10 / 30])
    again = risk(tensor([0.0, 0.0, 0.0]), alpha, clients=("a", "b", "c"), state=other.state)
    assert again.weights.tolist() == pytest.approx([7 / 30, 10 / 30, 13 / 30])  # zero losses move nothing


def test_without_ids_positions_stand_for_them():
    risk, alpha = WorstCase(0.1), tensor([0.5, 0.5])
    state = risk(tensor([0.0, 2.0]), alpha).state
    assert risk(tensor([0.0, 0.0]), alpha, state=state).weights.tolist() == pytest.approx([0.4, 0.6])


@pytest.mark.parametrize("clients", [("a", "b"), ("a", "b", "d"), ("a", "b", "c", "d"), ("a", "b", "b"), None])
def test_a_round_with_other_clients_is_refused(clients):
    risk = WorstCase()
    state = risk(tensor([1.0, 2.0, 3.0]), tensor([1 / 3] * 3), clients=("a", "b", "c")).state
    count = len(clients) if clients else 3
    with pytest.raises(IncompatibleParts, match=r"every client must take part(.|\n)*sampling\.Full"):
        risk(torch.ones(count), torch.ones(count) / count, clients=clients, state=state)


@pytest.mark.parametrize("losses", [[0.0, 0.0], [1e300, 1e300], [1e300, 0.0], [-5.0, -4.0]])
def test_zero_huge_and_negative_losses(losses):
    risk, state = WorstCase(step=1e9), None
    for _ in range(3):
        result = risk(tensor(losses), tensor([0.5, 0.5]), clients=("a", "b"), state=state)
        state = result.state
        assert torch.isfinite(result.value)
        assert float(state.weights.sum()) == pytest.approx(1.0)
    assert state.weights.tolist() == ([0.5, 0.5] if losses[0] == losses[1] else [float(a == max(losses)) for a in losses])


def test_huge_equal_losses_do_not_swallow_the_mixture():
    risk, alpha = WorstCase(0.1), tensor([0.5, 0.5])
    state = risk(tensor([0.0, 2.0]), alpha).state
    assert risk(tensor([1e300, 1e300]), alpha, state=state).state.weights.tolist() == pytest.approx([0.4, 0.6])


def test_one_client_has_all_the_weight():
    result = WorstCase()(tensor([3.0]), tensor([1.0]), clients=("only",))
    assert (result.weights.tolist(), float(result.value), result.state.weights.tolist()) == ([1.0], 3.0, [1.0])


def test_fixed_losses_end_at_the_worst_client():
    risk, losses, alpha, state = WorstCase(0.1), tensor([1.0, 3.0, 2.0]), tensor([1 / 3] * 3), None
    values = []
    for _ in range(20):
        result = risk(losses, alpha, state=state)
        state = result.state
        values.append(float(result.value))
    assert values == sorted(values)
    assert values[-1] == pytest.approx(float(losses.max()))


@pytest.mark.parametrize("step", [0.0, -1.0, float("inf"), float("nan"), "a", True])
def test_a_bad_step_is_named(step):
    with pytest.raises(InvalidParameter, match="step must be a positive number"):
        WorstCase(step)


def test_a_mixture_asks_for_what_its_parts_ask():
    part = Mixture((0.5, Mean()), (0.5, WorstCase(0.1)))
    assert (part.full_participation, part.averaged, part.needs_losses) == (True, True, True)
    plain = Mixture((0.5, Mean()), (0.5, Superquantile(0.5)))
    assert (plain.full_participation, plain.averaged) == (False, False)
    first = part(tensor([0.0, 2.0]), tensor([0.8, 0.2]), clients=("a", "b"))
    second = part(tensor([0.0, 0.0]), tensor([0.8, 0.2]), clients=("a", "b"), state=first.state)
    assert first.weights.tolist() == pytest.approx([0.65, 0.35])
    assert second.weights.tolist() == pytest.approx([0.6, 0.4])  # λ is (0.4, 0.6) now
