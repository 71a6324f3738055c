"""Dissimilarity and inexactness by hand: on a line F_k(w) = (w − x_k)², ∇F_k(w) = 2(w − x_k)."""

import math

import pytest
import torch

import equipoise as eq
from equipoise import heterogeneity
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.heterogeneity import Dissimilarity, Heterogeneity, dissimilarity, dissimilarity_of, inexactness
from equipoise.sampling import Full
from equipoise.solvers import SGD


def points(*centres):
    clients = [(f"c{i}", torch.tensor([[float(c)]], dtype=torch.float64)) for i, c in enumerate(centres)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clients))


def at(value):
    model = eq.models.MeanEstimator(1).double()
    with torch.no_grad():
        model.point.fill_(value)
    return model


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_dissimilarity_by_hand(engine):
    # At w = 1 the gradients of clients at 0 and 4 are 2 and −6: mean −2, mean square 20, variance 16, B = √(20/4).
    found = dissimilarity(at(1.0), points(0, 4), engine=engine)
    assert found == Dissimilarity(pytest.approx(16.0), pytest.approx(math.sqrt(5)))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 2**24])
@pytest.mark.parametrize("far", [0.0, 1e3, 1e6])
def test_gradients_that_are_nearly_equal_have_a_variance_in_float32(far, at_once, engine, monkeypatch):
    """Of clients at far, far + ½, …, far + 2 the gradients at 0 are exact in float32: 4 times the variance ½ of the points."""
    monkeypatch.setattr(heterogeneity, "_AT_ONCE", at_once)
    clients = [(f"c{i}", torch.tensor([[far + i / 2]])) for i in range(5)]
    found = dissimilarity(
        eq.models.MeanEstimator(1), FederatedData(ClientSet.pack((n, x, x) for n, x in clients)), engine=engine
    )
    assert found.variance == pytest.approx(2.0, rel=1e-9)
    assert found.ratio**2 - 1 == pytest.approx(2.0 / (2 * (far + 1)) ** 2, rel=1e-3, abs=1e-15)


def test_a_client_without_base_weight_counts_for_nothing():
    engine, weights = eq.engines.Loop().start(Task.of(at(0.0)), points(0, 9, 4)), torch.tensor([0.5, 0.0, 0.5])
    assert dissimilarity_of(engine, torch.ones(1, dtype=torch.float64), weights) == Dissimilarity(16.0, math.sqrt(5))


def test_equal_clients_are_not_dissimilar_and_a_stationary_point_has_no_ratio():
    same = dissimilarity(at(1.0), points(3, 3, 3))
    assert (same.variance, same.ratio) == (pytest.approx(0.0, abs=1e-12), pytest.approx(1.0))
    assert dissimilarity(at(2.0), points(0, 4)).ratio == math.inf
    assert dissimilarity(at(3.0), points(3, 3)) == Dissimilarity(0.0, 1.0)


@pytest.mark.parametrize("engine", [eq.engines.Loop(), eq.engines.Simulator()], ids=repr)
@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_inexactness_by_hand(engine, mu):
    # h(w) = (w − x)² + (μ/2) w² from 0, ∇h = 2(w − x) + μw. Steps of 0.1: w1 = 0.2x, w2 = w1 − 0.1(2(w1 − x) + μ w1).
    data, task = points(1, 5), Task.of(at(0.0))
    cohort = Full()(0, torch.full((2,), 0.5, dtype=torch.float64), clients_per_round=2, seed=0)
    running = engine.start(task, data)
    found = inexactness(running, torch.zeros(1, dtype=torch.float64), cohort, SGD(lr=0.1, batch_size=None, steps=2, prox=mu))
    w1 = 0.2
    w2 = w1 - 0.1 * (2 * (w1 - 1) + mu * w1)
    expected = abs(2 * (w2 - 1) + mu * w2) / 2  # the same ratio for both clients
    assert found.tolist() == pytest.approx([expected, expected])


def test_no_work_is_inexact_to_the_full_and_an_exact_solution_not_at_all():
    data, task = points(1, 5), Task.of(at(0.0))
    cohort = Full()(0, torch.full((2,), 0.5, dtype=torch.float64), clients_per_round=2, seed=0)
    running, start = eq.engines.Simulator().start(task, data), torch.zeros(1, dtype=torch.float64)
    assert inexactness(running, start, cohort, SGD(steps=0)).tolist() == [1.0, 1.0]
    assert inexactness(running, start, cohort, SGD(lr=0.5, batch_size=None, steps=1)).tolist() == pytest.approx([0.0, 0.0])


def test_the_observer_measures_at_evaluations(ragged):
    watch = Heterogeneity()
    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=4, clients_per_round=3, evaluate_every=2, observers=[watch])
    assert list(watch.rounds) == [2, 4]
    final = dissimilarity(result.model, ragged)
    assert watch.rounds[4].variance == pytest.approx(final.variance, rel=1e-5)
    assert all(evaluation.params is None for evaluation in result.history.evaluations)
    eq.testing.check_observer(Heterogeneity())
