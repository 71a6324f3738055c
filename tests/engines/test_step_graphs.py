"""Steps that a GPU replays, here not captured but with the same buffers; and the grouping of ragged clients."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.chunks import steps_of
from equipoise.engines.simulator.cuda.client_graph import padded
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.engines.simulator.precision import FULL
from made_clients import make_clients

SOLVERS = {
    "plain": eq.solvers.SGD(lr=0.5),
    "momentum": eq.solvers.SGD(lr=0.2, batch_size=4, epochs=3, momentum=0.9),
    "FedProx and decay": eq.solvers.SGD(lr=0.5, batch_size=4, steps=7, weight_decay=0.1, prox=0.3),
    "momentum and all": eq.solvers.SGD(lr=0.1, batch_size=3, steps=5, momentum=0.5, weight_decay=0.1, prox=0.3),
    "full batch": eq.solvers.SGD(lr=0.5, batch_size=None, epochs=2),
    "stragglers": eq.solvers.SGD(lr=0.5, batch_size=4, epochs=3, straggler_share=0.5),
}


def replaying(task, data, chunk=None):
    engine = SimulatorEngine(task, data, torch.device("cpu"), Choice(chunk, 1))
    graphs = StepGraphs(engine.workers.own, stacked_gradients, FULL)
    graphs.possible = True
    engine.workers.own = replace(engine.workers.own, graphs=graphs)
    return engine, graphs


@pytest.mark.parametrize("name", SOLVERS)
def test_replayed_steps_agree_with_the_loop(name):
    data = FederatedData(make_clients([7, 20, 13, 10, 9, 33]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    task, solver = Task.of(model), SOLVERS[name]
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for chunk in (None, 2):
        engine, graphs = replaying(task, data, chunk)
        for index, clients in enumerate((5, 3, 6)):  # buffers are used again, and grow
            alpha = torch.full((6,), 1 / 6, dtype=torch.float64)
            cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=clients, seed=4)
            cohort = replace(cohort, effort=solver.efforts(cohort, data.train.keys[cohort.clients]))
            found, wanted = (e.updates(params, cohort, solver) for e in (engine, Loop().start(task, data)))
            torch.testing.assert_close(found.update, wanted.update, rtol=1e-8, atol=1e-11)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-9, atol=1e-11, equal_nan=True)
        assert graphs.computed >= graphs.useful > 0


def test_work_of_another_kind_is_left_to_the_general_path():
    data = FederatedData(make_clients([7, 20]))
    task = Task.of(eq.models.Softmax(4, 3).double())
    _, graphs = replaying(task, data)
    engine, _ = replaying(task, data)
    orders = engine._orders([eq.types.Job(torch.zeros(15), _everyone(2), _everyone(2).weights)], eq.solvers.MAML())
    starts = orders[0].queue.starts()
    assert not graphs.fit(eq.solvers.MAML(), starts, object())
    assert not graphs.fit(eq.solvers.SGD(), replace(starts, each_its_own=True), object())


def _everyone(count):
    alpha = torch.full((count,), 1 / count, dtype=torch.float64)
    return eq.sampling.Full()(0, alpha, clients_per_round=count, seed=0)


@given(st.integers(1, 5000), st.sampled_from([1, 4]))
def test_padding_is_small_and_never_negative(count, least):
    assert count <= padded(count, least) <= max(count + least, 1.07 * count)
    assert padded(count, least) % least == 0
    assert padded(padded(count, least), least) == padded(count, least)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_steps_of_many_clients_are_those_of_each(solver):
    sizes = np.array([1, 4, 9, 10, 11, 40])
    for effort in (None, np.array([0, 1, 2, 1, 0, 5])):
        each = [solver.local_steps(int(n), None if effort is None else int(e)) for n, e in
                zip(sizes, sizes if effort is None else effort, strict=True)]  # fmt: skip
        assert steps_of(solver, sizes, effort).tolist() == each


def test_several_models_in_one_replayed_chunk():
    data = FederatedData(make_clients([7, 20, 13, 10, 9, 33]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    task, solver = Task.of(model), SOLVERS["FedProx and decay"]
    engine, graphs = replaying(task, data)
    alpha, generator = torch.full((6,), 1 / 6, dtype=torch.float64), torch.Generator().manual_seed(1)
    jobs = []
    for seed in range(3):
        cohort = eq.sampling.Uniform()(0, alpha, clients_per_round=2 + seed, seed=seed)
        jobs.append(
            eq.types.Job(torch.randn(task.layout.dimension, generator=generator, dtype=torch.float64), cohort, cohort.weights)
        )
    found = engine.summed_updates(jobs, solver, eq.aggregators.WeightedMean())
    wanted = Loop().start(task, data).summed_updates(jobs, solver, eq.aggregators.WeightedMean())
    assert graphs.computed > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.update, other.update, rtol=1e-8, atol=1e-11)
