"""A round of softmax regression as a GPU takes it, against the loop: on a GPU, or without one in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core import dropout
from equipoise.core.rng import name_key, signed
from equipoise.core.task import Task
from equipoise.engines import Loop
from equipoise.engines.simulator.batched_steps import stacked_gradients
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.cuda import linear_round_graph, linear_rounds
from equipoise.engines.simulator.cuda.linear_rounds import LinearRounds
from equipoise.engines.simulator.cuda.step_buffers import StepBuffers, StepShape
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import Workplace
from equipoise.rounds.ahead import Ahead as RoundsAhead
from equipoise.rounds.driver_choice import choose_driver
from equipoise.runs.setup import set_up
from equipoise.solvers.batches import cursor_of
from equipoise.types import SgdRule

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
on_a_device = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="no CUDA device: `test_interpreted` runs it")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # by the interpreter
SIZES = [7, 20, 13, 10, 9]
SOLVERS = {
    "one epoch": eq.solvers.SGD(lr=0.5),
    "three epochs": eq.solvers.SGD(lr=0.5, batch_size=4, epochs=3),
    "FedProx and decay": eq.solvers.SGD(lr=0.5, batch_size=4, steps=7, weight_decay=0.1, prox=0.3),
    "full batch": eq.solvers.SGD(lr=0.5, batch_size=None, epochs=2),
}


@pytest.mark.skipif(DEVICE.type == "cuda" or INTERPRETED, reason="the tests below run as they are")
@pytest.mark.long
def test_interpreted():
    command = [sys.executable, "-m", "pytest", __file__]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "failed" not in run.stdout


def clients(sizes=SIZES):
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (sum(sizes), 12), generator=gen, dtype=torch.uint8)
    y = torch.randint(0, 5, (sum(sizes),), generator=gen)
    ids = tuple(f"client {i}" for i in range(len(sizes)))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return eq.FederatedData(eq.ClientSet(x, y, offsets, ids, scale=1 / 255), classes=5)


def graphs_of(data, bias=True):
    task = Task.of(eq.models.Softmax(12, 5, bias=bias))
    found = LinearRounds(Workplace(task.to(DEVICE), data, data.train.to(DEVICE)))
    found.obstacle = None  # in the interpreter, too
    return found


def rule_of(solver):
    """The rule of round 3, of which `job` draws cohorts."""
    return LocalRule.of(solver, solver.learning_rate(3))


def job(data, seed, clients_per_round, bias=True):
    dimension = Task.of(eq.models.Softmax(12, 5, bias=bias)).layout.dimension
    gen = torch.Generator().manual_seed(seed)
    alpha = torch.full((len(data.train),), 1 / len(data.train), dtype=torch.float64)
    cohort = eq.sampling.Uniform()(3, alpha, clients_per_round=clients_per_round, seed=seed)
    weights = torch.rand(clients_per_round, generator=gen, dtype=torch.float64)
    return eq.types.Job(0.3 * torch.randn(dimension, generator=gen), cohort, weights)


def compare(data, jobs, solver, bias=True):
    graphs = graphs_of(data, bias)
    moved = [eq.types.Job(j.params.to(DEVICE), j.cohort, j.weights) for j in jobs]
    found = [graphs.sums(moved, rule_of(solver)) for _ in range(4)][-1]  # from the third use on captured, on a GPU
    oracle = Loop().start(Task.of(eq.models.Softmax(12, 5, bias=bias).double()), data)
    for one, asked in zip(found, jobs, strict=True):
        wanted = oracle.summed_update(asked.params.double(), asked.cohort, solver, asked.weights, WeightedMean())
        torch.testing.assert_close(one.update.cpu().double(), wanted.update, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.sq_norms, wanted.sq_norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(one.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    return graphs


@on_a_device
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SOLVERS)
def test_one_model(name, bias):
    data = clients()
    compare(data, [job(data, 1, 5, bias)], SOLVERS[name], bias)


@on_a_device
@pytest.mark.parametrize("kind", ["numbers", "bytes with a shift"])
def test_what_tensor_cores_cannot_multiply_exactly(kind):
    data = clients()
    held = data.train
    if kind == "numbers":
        x = torch.randn(held.x.shape, generator=torch.Generator().manual_seed(4))
        made = eq.ClientSet(x, held.y, held.offsets, held.ids)
    else:
        made = replace(held, shift=-0.5)
    data = eq.FederatedData(made, classes=5)
    graphs = compare(data, [job(data, 1, 5)], SOLVERS["FedProx and decay"])
    assert {graph.parts for same in graphs.graphs.values() for graph in same} == {1}
    bytes_ = compare(clients(), [job(clients(), 1, 5)], SOLVERS["one epoch"])
    assert {graph.parts for same in bytes_.graphs.values() for graph in same} == {2}


@on_a_device
def test_several_models_are_one_graph_where_clients_are_alike():
    data = clients([8] * 6)
    graphs = compare(data, [job(data, seed, 2 + seed) for seed in range(3)], SOLVERS["three epochs"])
    (shape,) = graphs.graphs
    assert shape.models == 3


@pytest.mark.parametrize("models", [2, 3, 5, 17])
@on_a_device
def test_long_sums_are_made_of_several_products(models, monkeypatch):
    monkeypatch.setattr(linear_round_graph, "_LONG_SUM", 1)
    data = clients([8] * 6)
    compare(data, [job(data, seed, 2 + seed % 4) for seed in range(models)], SOLVERS["one epoch"])


@on_a_device
def test_several_models_of_ragged_clients():
    data = clients()
    compare(data, [job(data, seed, 2 + seed) for seed in range(3)], SOLVERS["FedProx and decay"])


@on_a_device
def test_clients_that_do_not_fit_at_once_are_several_graphs(monkeypatch):
    monkeypatch.setattr(linear_rounds, "_BYTES", 4 * 20 * (12 + 20))
    data = clients()
    graphs = compare(data, [job(data, 1, 5)], SOLVERS["FedProx and decay"])
    assert sum(len(same) for same in graphs.graphs.values()) > 1


@on_a_device
def test_a_cohort_with_fewer_examples_leaves_nothing_of_the_last_one():
    data, solver = clients([20, 20, 2, 2, 3]), SOLVERS["one epoch"]
    graphs = graphs_of(data)
    alpha = torch.full((5,), 0.2, dtype=torch.float64)
    everyone = eq.sampling.Full()(0, alpha, clients_per_round=5, seed=0)
    graphs._shape = lambda *given, found=graphs._shape: replace(found(*given), clients=5, rows=48)
    for kept in ([0, 1], [2, 3, 4]):
        cohort = everyone.take(torch.tensor([i in kept for i in range(5)]))
        params, weights = 0.3 * torch.randn(65, generator=torch.Generator().manual_seed(1)), torch.ones(len(kept)).double()
        found = graphs.sums([eq.types.Job(params.to(DEVICE), cohort, weights)], rule_of(solver))[0]
        oracle = Loop().start(Task.of(eq.models.Softmax(12, 5).double()), data)
        wanted = oracle.summed_update(params.double(), cohort, solver, weights, WeightedMean())
        torch.testing.assert_close(found.update.cpu().double(), wanted.update, rtol=1e-4, atol=1e-6)
    assert len(graphs.graphs) == 1


@pytest.mark.parametrize("per_round", [100, 1000])
def test_little_is_padded_on_log_normal_sizes_and_few_graphs_serve_all_cohorts(per_round):
    draw = np.random.default_rng(0).lognormal(np.log(100) - 0.5, 1.0, 3000)
    graphs = graphs_of(clients(np.clip(draw, 2, 1000).astype(int).tolist()))
    alpha, shapes = torch.full((3000,), 1 / 3000, dtype=torch.float64), set()
    for seed in range(40):
        cohort = eq.sampling.Uniform()(seed, alpha, clients_per_round=per_round, seed=0)
        sizes = graphs.sizes[cohort.clients.numpy()]
        parts = graphs._parts(0, eq.types.Job(torch.zeros(65), cohort, cohort.weights), sizes, rule_of(SOLVERS["one epoch"]))
        shape = graphs._shape(parts, rule_of(SOLVERS["one epoch"]))
        assert len(parts) == 1
        assert 1 - sizes.sum() / shape.rows < 0.2
        shapes.add(shape)
    assert len(shapes) <= 12


@on_a_device
def test_an_update_that_cannot_be_used_is_left_to_another_path():
    data = clients()
    wild = job(data, 1, 5)
    wild.params.mul_(1e38)
    assert graphs_of(data).sums([wild], rule_of(SOLVERS["one epoch"])) is None
    assert graphs_of(data).sums([job(data, 1, 5)], rule_of(eq.solvers.SGD(steps=0))) is None
    assert graphs_of(data).sums([job(data, 1, 5)], rule_of(eq.solvers.MAML())) is None


@on_a_device
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [SIZES, [8] * 6, [130, 3, 70]])
@pytest.mark.parametrize("kind", ["bytes", "numbers"])
def test_losses(kind, sizes, bias):
    data = clients(sizes)
    if kind == "numbers":
        given = data.train
        data = eq.FederatedData(eq.ClientSet(given.x / 255, given.y, given.offsets, given.ids), classes=5)
    graphs = graphs_of(data, bias)
    jobs = [job(data, seed, 2 + seed % 2, bias) for seed in range(4)]
    moved = [replace(j, params=j.params.to(DEVICE)) for j in jobs]
    for _ in range(2):
        found = [graphs.losses(moved[:1]) for _ in range(4)][-1] + graphs.losses(moved[1:])  # captured, and not yet
    oracle = Loop().start(Task.of(eq.models.Softmax(12, 5, bias=bias).double()), data)
    for one, asked in zip(found, jobs, strict=True):
        wanted = oracle.losses(asked.params.double(), asked.cohort)
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


@on_a_device
def test_losses_that_do_not_fit_are_left_to_others(monkeypatch):
    data = clients()
    monkeypatch.setattr(linear_rounds, "_LOSS_BYTES", 1000)
    assert graphs_of(data).losses([job(data, 1, 5)]) is None


@on_a_device
def test_parameters_that_were_changed_in_place_are_copied_again():
    data = clients()
    graphs, asked = graphs_of(data), job(data, 1, 5)
    params = asked.params.to(DEVICE)
    before = graphs.losses([replace(asked, params=params)])[0]
    params.zero_()
    after = graphs.losses([replace(asked, params=params)])[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, torch.full((5,), np.log(5.0), dtype=torch.float64), rtol=1e-6, atol=0)


DELTA = {"risk": eq.risk.Superquantile(0.5), "server": eq.server_opt.SGD(lr=0.7)}


class ByGraphs:
    """Starts the simulator with its graphs, in the interpreter, too."""

    def start(self, task, data):
        self.engine = eq.engines.Simulator(device=DEVICE.type).start(task, data)
        self.engine.linear_rounds.obstacle = None
        return self.engine


def rounds_in_a_row(data, solver, early, count=5, seeds=(0,), **parts):
    algorithm = eq.Algorithm(solver=solver, **parts)
    setting = set_up(
        eq.models.Softmax(12, 5), data, algorithm, rounds=count, clients_per_round=4, seed=0, loss=None, error=None,
        engine=ByGraphs(),
    )  # fmt: skip
    settings = [replace(setting, seed=seed) for seed in seeds]
    driver = choose_driver(settings)
    assert isinstance(driver, RoundsAhead)
    driver.possible = early
    states, reports = [one.begin() for one in settings], []
    for _ in range(count):
        states, found = zip(*driver(states), strict=True)
        assert setting.engine.paths_taken == (LinearRounds.name,) or any(report.rejected for report in found)
        reports.append([replace(report, seconds=0.0) for report in found])
    return states, reports, setting.engine.linear_rounds


@on_a_device
@pytest.mark.parametrize(
    ("sizes", "solver", "options"),
    [
        (SIZES, "three epochs", {}),
        ([8] * 6, "three epochs", {}),
        (SIZES, "three epochs", DELTA),
        ([8] * 6, "three epochs", DELTA),
        ([8] * 6, "one epoch", {"seeds": (0, 3), "count": 3}),
        ([5] * 6, "one epoch", {"seeds": (0, 3), "count": 3} | DELTA),
    ],
)
def test_rounds_begun_early_have_the_same_bits(sizes, solver, options):
    found, wanted = (rounds_in_a_row(clients(sizes), SOLVERS[solver], early, **options) for early in (True, False))
    for one, other in zip(found[0], wanted[0], strict=True):
        assert torch.equal(one.params, other.params)
    assert found[1] == wanted[1]
    assert all(shape.server is not None for shape in found[2].graphs)


@on_a_device
def test_a_round_begun_early_that_has_to_be_run_again():
    clean = clients()
    x = clean.train.x.float()
    x[: SIZES[0]] *= 1e30  # the first client's examples
    data = eq.FederatedData(eq.ClientSet(x, clean.train.y, clean.train.offsets, clean.train.ids), classes=5)
    found, wanted = (rounds_in_a_row(data, SOLVERS["one epoch"], early) for early in (True, False))
    assert {report.rejected for (report,) in found[1]} == {(), ("client 0",)}
    assert torch.equal(found[0][0].params, wanted[0][0].params)
    assert found[1] == wanted[1]


@on_a_device
def test_parameters_are_copied_only_if_they_are_not_there_yet():
    data = clients()
    graphs, asked, solver = graphs_of(data), job(data, 1, 5), SOLVERS["one epoch"]
    start = asked.params.to(DEVICE)
    first = graphs.begin([replace(asked, params=start)], rule_of(solver), 1.0)
    second = graphs.begin([replace(asked, params=first.params[0])], rule_of(solver), 1.0)
    again = graphs.begin([replace(asked, params=start)], rule_of(solver), 1.0)
    assert len({id(graph) for one in (first, second, again) for graph in one.graphs}) == 3  # nobody's results are lost
    assert torch.equal(first.params[0], again.params[0])
    assert not torch.equal(first.params[0], second.params[0])
    (work,) = first.collected()
    torch.testing.assert_close(first.params[0], start + work.update, rtol=0, atol=0)
    del first, second, again, work
    assert graphs.bytes_under_way == 0


@on_a_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [eq.solvers.SGD(batch_size=4, epochs=3), eq.solvers.SGD(batch_size=5, steps=7),
                                    eq.solvers.SGD(batch_size=None, epochs=2), eq.solvers.SGD(batch_size=100)])  # fmt: skip
@pytest.mark.parametrize("sizes", [SIZES, [8] * 6, [150, 4, 1]])
def test_tables_of_batches(sizes, solver, dtype):
    data = clients(sizes)
    task = Task.of(eq.models.Softmax(12, 5).to(dtype))
    place = Workplace(task.to(DEVICE), data, data.train.to(DEVICE))
    queue = ClientQueue.of([job(data, 1, len(sizes))], rule_of(solver), place.clients)
    cursor = cursor_of(solver, queue.keys, queue.sizes, queue.steps)
    first = place.clients.offsets[queue.clients.to(DEVICE)]
    shape = StepShape(len(sizes) + 2, len(cursor.active) + 3, cursor.width, True, SgdRule(0.0, 0.0, 0.0))
    plain, by_kernels = (StepBuffers(place, shape, stacked_gradients, drops=False) for _ in range(2))
    for buffers in (plain, by_kernels):
        buffers.load(queue.starts(), cursor.steps, cursor.sizes, cursor.keys, first, 0.3, None)
    plain._tables(cursor)
    for table in (by_kernels.rows, by_kernels.shares, by_kernels.rates):
        table.fill_(1)  # of an earlier round
    by_kernels._tables_by_kernels(by_kernels.plan(cursor, whole_batches=solver.batch_size is None))
    count = len(cursor.active)
    torch.testing.assert_close(by_kernels.shares[:count], plain.shares[:count], rtol=1e-7, atol=0)
    assert torch.equal(by_kernels.rates[:count], plain.rates[:count])
    used = plain.shares[:count] > 0
    assert torch.equal(by_kernels.rows[:count][used], plain.rows[:count][used])
    assert int(by_kernels.rows[:count].min()) >= 0
    assert int(by_kernels.rows[:count].max()) < sum(sizes)


@on_a_device
@pytest.mark.parametrize("shape", [(5,), (3, 10), (2, 3, 13), (2, 4, 5, 6)])
def test_masks_of_dropout_by_a_kernel(shape):
    from equipoise.engines.simulator.cuda.kernels.dropout_masks import draw_masks

    keys = torch.tensor([3, -(2**61) - 7, 2**62 + 5])
    factors, call = [dropout.factor(place) for place in range(4)], signed(name_key("call 3"))
    masks = draw_masks(keys.to(DEVICE), call, shape, factors, 40_000 - 32_768).cpu()
    column = torch.stack([keys + 1, keys]).to(DEVICE).t()[:, 1]  # keys that do not follow on each other in memory
    assert torch.equal(draw_masks(column, call, shape, factors, 40_000 - 32_768).cpu(), masks)
    assert torch.equal(masks, torch.stack([dropout.kept(key, 3, shape, 40_000) for key in keys]))


@on_a_device
@pytest.mark.parametrize("server", [eq.server_opt.SGD(lr=0.7), eq.server_opt.Momentum()])
@pytest.mark.parametrize("risk", [eq.risk.Mean(), eq.risk.Superquantile(0.5), eq.risk.QFair(1.0)])
def test_several_seeds_are_the_runs_one_by_one(risk, server):
    data, algorithm = clients(), eq.Algorithm(risk=risk, solver=SOLVERS["one epoch"], server=server)
    common = {"rounds": 4, "clients_per_round": 3, "progress": False}
    engine = ByGraphs()
    together = eq.train_many(eq.models.Softmax(12, 5), data, algorithm, seeds=3, engine=engine, **common).results["run"]
    in_graphs = any(shape.server is not None for shape in engine.engine.linear_rounds.graphs)
    assert in_graphs == (type(server) is eq.server_opt.SGD and not isinstance(risk, eq.risk.QFair))
    for seed, found in enumerate(together):
        wanted = eq.train(eq.models.Softmax(12, 5), data, algorithm, seed=seed, engine="loop", **common)
        torch.testing.assert_close(found.params.cpu(), wanted.params, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(found.history.rounds, wanted.history.rounds, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
            assert mine.tail_loss == pytest.approx(theirs.tail_loss, rel=1e-4)
