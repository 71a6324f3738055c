"""Steps that a GPU replays, here not captured but with the same buffers; and the grouping of ragged clients."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from taken import everyone

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.cuda import step_buffers
from equipoise.engines.simulator.cuda.graph_capacity import rounded_up
from equipoise.engines.simulator.cuda.step_buffers import StepBuffers
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.engines.simulator.local_rule import LocalRule, steps_one_by_one
from equipoise.engines.simulator.local_work import ChunkWork
from equipoise.personal.pfedme import EnvelopeSteps
from equipoise.solvers.batches import BatchCursor
from equipoise.solvers.prepared import AdjustedSolver
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
    graphs = engine.workers.own.path(StepGraphs.name)
    graphs.obstacle = None  # on a CPU, too, where nothing is captured
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
            cohort = cohort.having(effort=solver.efforts(cohort, data.train.keys[cohort.clients]))
            found, wanted = (e.updates(params, cohort, solver) for e in (engine, Loop().start(task, data)))
            torch.testing.assert_close(found.update, wanted.update, rtol=1e-8, atol=1e-11)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-9, atol=1e-11, equal_nan=True)
            assert engine.paths_taken == ("step graphs",)
        assert graphs.computed >= graphs.useful > 0


@pytest.mark.parametrize(
    ("solver", "own", "reason"),
    [
        (eq.solvers.MAML(), False, "the steps of MAML are not those of SGD with or without plain momentum"),
        (eq.solvers.SGD(), True, "linear models of clients have a path of their own"),
        (eq.solvers.Scaffold().solver, False, None),
        (eq.solvers.SGD(), False, None),
    ],
)
def test_work_of_another_kind_is_left_to_the_general_path(solver, own, reason):
    data = FederatedData(make_clients([7, 20]))
    _, graphs = replaying(Task.of(eq.models.Softmax(4, 3).double()), data)
    assert graphs.supports_rule(LocalRule.of(solver, 0.1, own)) == reason


def test_too_many_batches_for_one_table_are_left_to_others(monkeypatch):
    data, solver = FederatedData(make_clients([7, 20])), eq.solvers.SGD(batch_size=3)
    engine, graphs = replaying(Task.of(eq.models.Softmax(4, 3).double()), data)
    rule, cohort = LocalRule.of(solver, 0.1), everyone(2)
    queue = ClientQueue.of([eq.types.Job(torch.zeros(15), cohort, cohort.weights)], rule, data.train)
    worker = engine.workers.own
    assert graphs.supports(ChunkWork(worker, queue, rule, worker.space)) is None
    monkeypatch.setattr("equipoise.solvers.batches.TABLE", 10)
    assert "too many for one table" in graphs.supports(ChunkWork(worker, queue, rule, worker.space))


@given(st.integers(1, 5000), st.sampled_from([1, 4]))
def test_padding_is_small_and_never_negative(count, least):
    assert count <= rounded_up(count, least) <= max(count + least, 1.07 * count)
    assert rounded_up(count, least) % least == 0
    assert rounded_up(rounded_up(count, least), least) == rounded_up(count, least)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_steps_of_many_clients_are_those_of_each(solver):
    sizes = np.array([1, 4, 9, 10, 11, 40])
    for effort in (None, np.array([0, 1, 2, 1, 0, 5])):
        each = [solver.local_steps(int(n), None if effort is None else int(e)) for n, e in
                zip(sizes, sizes if effort is None else effort, strict=True)]  # fmt: skip
        done = None if effort is None else torch.from_numpy(effort)
        assert LocalRule.of(solver, 0.1).steps_each(sizes, done).tolist() == each
        assert steps_one_by_one(solver, sizes, effort).tolist() == each


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
    assert engine.paths_taken == ("step graphs",)
    assert graphs.computed > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.update, other.update, rtol=1e-8, atol=1e-11)


def small_network():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


PULLS = {
    "none": lambda params, own, rng: None,
    "one number each": lambda params, own, rng: eq.types.Pull(params, torch.rand(len(own), generator=rng, dtype=own.dtype)),
    "one number per parameter": lambda params, own, rng: eq.types.Pull(
        torch.randn(own.shape, generator=rng, dtype=own.dtype), torch.rand(own.shape, generator=rng, dtype=own.dtype)
    ),
}


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("name", ["plain", "momentum and all", "frozen"])
def test_replayed_steps_of_clients_own_models_agree_with_the_loop(name, pull):
    """Ditto, FedPer, FedRep: models of their own, pulled somewhere, or with parameters that stay as they are."""
    data, rng = FederatedData(make_clients([7, 20, 13, 10, 9, 33])), torch.Generator().manual_seed(3)
    task = Task.of(small_network())
    dimension = task.layout.dimension
    kept = torch.arange(dimension) % 3 == 0
    frozen = AdjustedSolver(SOLVERS["plain"], preconditioner=torch.where(kept, 1.0, torch.inf).double())
    solver = SOLVERS.get(name, frozen)
    engine, graphs = replaying(task, data)
    params = torch.randn(dimension, generator=rng, dtype=torch.float64)
    for index, count in enumerate((5, 3, 6)):
        cohort = eq.sampling.Uniform()(index, torch.full((6,), 1 / 6, dtype=torch.float64), clients_per_round=count, seed=4)
        own = torch.randn(len(cohort), dimension, generator=rng, dtype=torch.float64)
        pulled = PULLS[pull](params, own, rng)
        found, wanted = (e.own_steps(own, cohort, solver, pulled) for e in (engine, Loop().start(task, data)))
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)
        assert engine.paths_taken == ("step graphs",)
        if name == "frozen" and pull == "none":
            assert torch.equal(found[:, ~kept], own[:, ~kept])
            assert not torch.equal(found[:, kept], own[:, kept])
    assert graphs.computed >= graphs.useful > 0


def test_buffers_of_two_kinds_of_steps_stay_when_they_take_turns():
    data, rng = FederatedData(make_clients([7, 20, 13])), torch.Generator().manual_seed(3)
    task = Task.of(small_network())
    engine, graphs = replaying(task, data)
    own = torch.randn(3, task.layout.dimension, generator=rng, dtype=torch.float64)
    held = []
    for _ in range(2):
        engine.updates(own[0], everyone(3), SOLVERS["plain"])
        held.append(graphs.buffers)
        engine.own_steps(own, everyone(3), SOLVERS["plain"], eq.types.Pull(own[0], torch.ones(3, dtype=torch.float64)))
        held.append(graphs.buffers)
    assert [each is held[0] for each in held] == [True, False, True, False]
    assert held[1] is held[3]


@pytest.mark.parametrize("dynamic", [False, True], ids=["SCAFFOLD", "FedDyn"])
def test_replayed_steps_by_shifted_gradients_agree_with_the_loop(dynamic):
    data, rng = FederatedData(make_clients([7, 20, 13, 10])), torch.Generator().manual_seed(3)
    task = Task.of(small_network())
    shift, params = torch.randn(2, task.layout.dimension, generator=rng, dtype=torch.float64)
    rows = torch.randn(4, task.layout.dimension, generator=rng, dtype=torch.float64)
    solver = AdjustedSolver(eq.solvers.SGD(lr=0.2, batch_size=4, momentum=0.5), shift=shift, dynamic=dynamic)
    prox = torch.tensor([0.5, 0.1, 0.2, 0.3], dtype=torch.float64) if dynamic else None
    cohort = everyone(4).having(rows=rows, prox=prox)
    engine, _ = replaying(task, data)
    found, wanted = (e.updates(params, cohort, solver) for e in (engine, Loop().start(task, data)))
    assert engine.paths_taken == ("step graphs",)
    torch.testing.assert_close(found.update, wanted.update, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(found.rows.double(), wanted.rows.double(), rtol=1e-8, atol=1e-11)
    summed = engine.summed_update(params, cohort, solver, cohort.weights, eq.aggregators.WeightedMean())
    torch.testing.assert_close(summed.update, cohort.weights @ wanted.update, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(summed.rows.double(), wanted.rows.double(), rtol=1e-8, atol=1e-11)


def test_replayed_steps_by_turns_agree_with_the_loop():
    """Per-FedAvg's four gradients of a batch, and pFedMe's inner steps with the memory that it sends."""
    data, rng = FederatedData(make_clients([7, 20, 13, 10, 9])), torch.Generator().manual_seed(3)
    task = Task.of(small_network())
    params = torch.randn(task.layout.dimension, generator=rng, dtype=torch.float64)
    engine, _ = replaying(task, data)
    loop = Loop().start(task, data)
    for solver in (
        eq.solvers.PerFedAvg(lr=0.3, inner_lr=0.2, batch_size=4, epochs=2),
        EnvelopeSteps(eq.solvers.SGD(lr=0.1, batch_size=4), strength=2.0, inner=3),
    ):
        fresh = torch.zeros(5, 1 + task.layout.dimension) if isinstance(solver, EnvelopeSteps) else None
        for _ in range(2):
            cohort = everyone(5).having(rows=fresh)
            found, wanted = (e.updates(params, cohort, solver) for e in (engine, loop))
            assert engine.paths_taken == ("step graphs",)
            torch.testing.assert_close(found.update, wanted.update, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-8, atol=1e-9)
            if fresh is not None:
                torch.testing.assert_close(found.rows.double(), wanted.rows.double(), rtol=1e-5, atol=1e-6)


class Uncaptured:
    """In place of a captured graph: does again what was captured."""

    def __init__(self, body, trial, trials, pool=None):
        for _ in range(trials):
            trial()
        self.replay = body
        body()


@pytest.fixture
def whole_rounds(monkeypatch):
    """Rounds of one shape as one graph, on a CPU: nothing is captured, and tables come from a cursor."""

    def tables(buffers, plan):
        told = (buffers.keys, buffers.sizes, buffers.steps)
        keys, sizes, steps = (each[: plan.clients].clone() for each in told)
        buffers._tables(BatchCursor(keys, sizes, plan.width, steps))

    answers = []
    monkeypatch.setattr(StepBuffers, "_tables_by_kernels", tables)
    monkeypatch.setattr(step_buffers, "captured", Uncaptured)
    original = StepBuffers.end
    monkeypatch.setattr(StepBuffers, "end", lambda self, plan: answers.append(original(self, plan)) or answers[-1])
    return answers


@pytest.mark.parametrize("sizes", [[12] * 6, [13] * 6], ids=["full batches", "a smaller last batch"])
def test_whole_rounds_agree_with_the_loop(whole_rounds, monkeypatch, sizes):
    data, solver = FederatedData(make_clients(sizes)), eq.solvers.SGD(lr=0.5, batch_size=4, epochs=2)
    task = Task.of(small_network())
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    engine, graphs = replaying(task, data)
    loop, mean = Loop().start(task, data), eq.aggregators.WeightedMean()
    seen = []
    for index in range(5):
        if graphs.buffers is not None:
            graphs.buffers.by_kernels = True
            monkeypatch.setattr(graphs.buffers, "whole_chunk", _latest(graphs.buffers, whole_rounds, seen))
        alpha = torch.full((6,), 1 / 6, dtype=torch.float64)
        cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=4, seed=4)
        found, wanted = (e.summed_update(params, cohort, solver, cohort.weights, mean) for e in (engine, loop))
        torch.testing.assert_close(found.update, wanted.update, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.sq_norms, wanted.sq_norms, rtol=1e-8, atol=1e-11)
    assert len(seen) == 3  # all rounds but the first two were whole


def _latest(buffers, answers, seen):
    """As `whole_chunk`, but with the answer of this call: a graph writes to the same memory again, and a call does not."""

    def whole_chunk(plan):
        if StepBuffers.whole_chunk(buffers, plan) is None:
            return None
        seen.append(plan)
        return answers[-1]

    return whole_chunk
