"""AdaDPS among clients: gradients divided by side information."""

import pytest
import torch

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.solvers import SGD, AdaDPS
from equipoise.solvers.prepared import RoundContext
from made_clients import make_clients


def prepared(solver, engine, params, cohort):
    context = RoundContext(params, cohort, cohort.weights, lambda purpose: cohort, engine.task.layout)
    return solver.prepare(context, None)[0]


def work(engine_choice, solver, data, task):
    engine = engine_choice.start(task, data)
    params = task.layout.read(task.module) + 0.1
    n = len(data.train)
    cohort = eq.sampling.Full()(0, torch.full((n,), 1 / n, dtype=torch.float64), clients_per_round=n, seed=0)
    chosen = prepared(solver, engine, params, cohort) if hasattr(solver, "prepare") else solver
    return engine.updates(params, cohort, chosen).update


def test_a_full_step_is_the_gradient_over_a_and_the_engines_agree():
    data, task = FederatedData(make_clients([5, 8, 3])), Task.of(eq.models.Softmax(4, 3).double())
    scale = torch.tensor([1.0, 0.5, 2.0, 0.1])
    plain = SGD(lr=0.3, batch_size=None)
    solver = AdaDPS({"weight": scale}, plain)
    found = [work(engine, solver, data, task) for engine in (Loop(), Simulator())]
    torch.testing.assert_close(found[0], found[1])
    expected = task.layout.unflatten(work(Loop(), plain, data, task))
    shaped = task.layout.unflatten(found[0])
    torch.testing.assert_close(shaped["weight"], expected["weight"] / scale.double())
    torch.testing.assert_close(shaped["bias"], expected["bias"])


def test_ones_change_nothing_over_several_steps():
    data, task = FederatedData(make_clients([5, 8, 3])), Task.of(eq.models.Softmax(4, 3).double())
    plain = SGD(lr=0.3, batch_size=2, epochs=2, weight_decay=0.1)
    for engine in (Loop(), Simulator()):
        with_ones = work(engine, AdaDPS({"bias": torch.ones(3)}, plain), data, task)
        torch.testing.assert_close(with_ones, work(engine, plain, data, task))


def test_it_goes_with_differential_privacy_and_others_that_look_around_do_not():
    privacy = eq.privacy.GaussianMechanism(clip=1.0, noise_multiplier=1.0)
    eq.Algorithm(solver=AdaDPS({"weight": torch.ones(4)}), privacy=privacy)
    with pytest.raises(IncompatibleParts, match="AdaptiveProx"):
        eq.Algorithm(solver=eq.solvers.AdaptiveProx(), privacy=privacy)


def test_what_does_not_fit_is_refused():
    data, task = FederatedData(make_clients([5, 8])), Task.of(eq.models.Softmax(4, 3))
    with pytest.raises(InvalidParameter, match="positive"):
        AdaDPS({"weight": torch.zeros(4)})
    for solver in (SGD, eq.solvers.MAML(), None):
        with pytest.raises(InvalidParameter, match=r"solver must be a solvers\.SGD"):
            AdaDPS({"weight": torch.ones(4)}, solver)
    with pytest.raises(InvalidParameter, match="weight, bias"):
        work(Loop(), AdaDPS({"wieght": torch.ones(4)}), data, task)
    with pytest.raises(InvalidParameter, match="broadcast"):
        work(Loop(), AdaDPS({"weight": torch.ones(5)}), data, task)
