"""Clients that a GPU trains side by side, here not captured but with the same slots; and the choice between paths."""

import pytest
import torch
from test_step_graphs import SOLVERS
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cuda.client_streams import SideBySide
from equipoise.engines.simulator.engine import SimulatorEngine
from made_clients import make_clients


def side_by_side(task, data, chunk=None):
    engine = SimulatorEngine(task, data, torch.device("cpu"), Choice(chunk or 100, 1))
    path = engine.workers.own.path(SideBySide.name)
    path.obstacle = None  # on a CPU, too, where nothing is captured
    engine.use(Choice(path=SideBySide.name))
    return engine, path


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("model", [network, normalised])
@pytest.mark.parametrize("name", SOLVERS)
def test_clients_side_by_side_agree_with_the_loop(name, model):
    data, solver = FederatedData(make_clients([9, 20, 13, 10, 9, 33])), SOLVERS[name]
    task = try_task(Task.of(model()), data)
    params = task.read_model()
    for chunk, most in ((None, 8), (None, 4), (2, 8), (None, 1)):
        engine, path = side_by_side(task, data, chunk)
        path.most = most
        for index, clients in enumerate((5, 3, 6)):  # slots are used again, and grow
            alpha = torch.full((6,), 1 / 6, dtype=torch.float64)
            cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=clients, seed=4)
            cohort = cohort.having(effort=solver.efforts(cohort, data.train.keys[cohort.clients]))
            found, wanted = (e.updates(params, cohort, solver) for e in (engine, Loop().start(task, data)))
            torch.testing.assert_close(found.update, wanted.update, rtol=1e-8, atol=1e-11)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-9, atol=1e-11, equal_nan=True)
            if task.carried.size:
                torch.testing.assert_close(found.carried, wanted.carried, rtol=1e-9, atol=1e-11, equal_nan=True)
            if not task.mixes or solver.batch_size is not None:
                assert engine.paths_taken == ("side by side",)


def test_batches_of_many_sizes_that_may_not_be_padded_are_left_to_others():
    data, solver = FederatedData(make_clients([5, 6, 7, 8, 9])), eq.solvers.SGD(lr=0.1, batch_size=None)
    engine, _ = side_by_side(try_task(Task.of(normalised()), data), data)
    assert "batches of more than 4 sizes" in engine.explain(eq.Algorithm(solver=solver))
