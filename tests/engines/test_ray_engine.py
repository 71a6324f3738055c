"""The Ray engine on a real cluster of two nodes: the same results as the simulator, the same bits for any number of workers."""

import math
from dataclasses import replace

import pytest
import torch
from taken import everyone
from torch import nn

import equipoise as eq
from equipoise import aggregators, attacks, personal, privacy, risk, solvers
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Ray, Simulator
from equipoise.engines.cluster import pieces
from equipoise.engines.cluster.pieces import PieceSize
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cpu import c_library
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmaxPath
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.testing import check_engine
from made_clients import make_clients

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("small_pieces"),
    pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice"),
]
SIZES = [1, 2, 3, 7, 10, 11, 20, 25, 4, 9, 6, 13]
SGD = solvers.SGD(lr=0.3, batch_size=4)


@pytest.fixture(scope="module")
def data():
    return made_data()


def made_data(dtype=torch.float32):
    unseen = make_clients([5, 9, 14, 3], seed=1, prefix="unseen", dtype=dtype)
    return FederatedData(make_clients(SIZES, dtype=dtype), test=unseen, classes=3, name="ragged")


def trained(data, engine, algorithm, model=None, **options):
    options = {"rounds": 3, "clients_per_round": 8, "seed": 2} | options
    return eq.train(model or eq.models.Softmax(4, 3), data, algorithm, engine=engine, progress=False, **options)


def numbers(result):
    """All that a result says in numbers."""
    found = {"params": result.params.double(), "losses": torch.tensor([report.loss for report in result.history.rounds])}
    for column in result.clients.columns:
        if torch.is_tensor(result.clients[column]):
            found[column] = result.clients[column].double()
    if result.carried is not None:
        found["carried"] = result.carried.double()
    return found


def assert_close(result, expected, tolerance=2e-4):
    expected = numbers(expected)
    for name, values in numbers(result).items():
        torch.testing.assert_close(values, expected[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


def assert_equal_bits(result, other):
    other = numbers(other)
    for name, values in numbers(result).items():
        assert torch.equal(values.nan_to_num(nan=-7.0), other[name].nan_to_num(nan=-7.0)), name


def test_the_law_of_engines(cluster):
    check_engine(Ray())


def test_the_law_of_engines_with_whole_cohorts_as_one_piece(cluster, monkeypatch):
    monkeypatch.setitem(pieces.TRAINING, "cpu", PieceSize(math.inf, 2))
    check_engine(Ray(workers=1))


NORMED = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
# Every part of the catalogue is in test_ray_catalogue.py, which takes minutes.
KINDS = {
    "FedAvg": (eq.Algorithm(solver=SGD), {}),
    "Δ-FL": (eq.Algorithm(risk=risk.Superquantile(0.5), solver=SGD), {}),
    "median": (eq.Algorithm(aggregator=aggregators.Median(), solver=SGD), {}),
    "Adam, kept": (eq.Algorithm(solver=solvers.Adam(lr=0.05, batch_size=4, state="kept")), {}),
    "Ditto": (eq.Algorithm(personal=personal.Ditto(0.5), solver=SGD), {}),
    "central noise": (
        eq.Algorithm(solver=SGD, privacy=privacy.DifferentialPrivacy(
            None, delta=1e-2, clip=0.5, noise_multiplier=0.7, noise_seed=0)), {},
    ),
    "secure sums": (eq.Algorithm(solver=SGD, privacy=privacy.SecureAggregation()), {}),
    "secure sums, Δ-FL": (
        eq.Algorithm(
            solver=SGD, risk=risk.Superquantile(0.5, quantile=privacy.SecureSums()), privacy=privacy.SecureAggregation()
        ), {},
    ),
    "batch norm": (eq.Algorithm(solver=SGD), {"model": NORMED}),
    "metrics": (eq.Algorithm(solver=SGD), {"metrics": {"f1": eq.metrics.macro_f1}, "evaluate_clients": 3}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_algorithm_agrees_with_the_simulator(cluster, data, kind):
    algorithm, options = KINDS[kind]
    on_ray = trained(data, Ray(), algorithm, **options)
    assert_close(on_ray, trained(data, "simulator", algorithm, **options))
    assert_equal_bits(on_ray, trained(data, Ray(workers=1), algorithm, **options))


@pytest.mark.parametrize("attack", [attacks.ModelReplacement(0.3), attacks.ALIE(0.3)], ids=["single", "colluding"])
def test_attacks_know_the_whole_cohort(cluster, data, attack):
    attacked = attacks.apply(data, attack)
    for aggregator in (aggregators.WeightedMean(), aggregators.Median()):
        algorithm = eq.Algorithm(solver=SGD, aggregator=aggregator)
        assert_close(trained(attacked, Ray(), algorithm), trained(attacked, "simulator", algorithm))


def test_families_and_several_runs(cluster, data):
    options = {"rounds": 2, "clients_per_round": 8, "seed": 1, "progress": False}
    given = (eq.models.Softmax(4, 3), data, eq.Algorithm(solver=SGD))
    family, expected = (eq.train_family(*given, tails=[1.0, 0.5], engine=e, **options) for e in (Ray(), "simulator"))
    for name, result in family.results.items():
        assert_close(result, expected.results[name])
    both = {"mean": eq.Algorithm(solver=SGD), "tail": eq.Algorithm(risk=risk.Superquantile(0.5), solver=SGD)}
    del options["seed"]
    several, wanted = (
        eq.train_many(eq.models.Softmax(4, 3), data, both, seeds=2, engine=e, **options) for e in (Ray(), "simulator")
    )
    for method in both:
        for result, other in zip(several.results[method], wanted.results[method], strict=True):
            assert_close(result, other)


def test_data_of_a_store_are_opened_by_the_workers(cluster, tmp_path):
    clients = make_clients([3 + k % 9 for k in range(30)])
    eq.data.write_store(clients, tmp_path / "store")
    data = eq.data.open_store(tmp_path / "store")
    from equipoise.engines.cluster.packing import pack

    small = pack(data)
    examples = clients.x.nbytes
    assert not any(memoryview(each).nbytes == examples for each in small.buffers)  # the inputs stay in their file
    algorithm = eq.Algorithm(solver=SGD)
    assert_close(trained(data, Ray(), algorithm), trained(data, "simulator", algorithm))


def test_one_measured_choice_holds_for_all_workers(cluster, monkeypatch, tmp_path):
    """Work that is worth a measurement: the choice is kept in the checkpoint, and decides the bits, not the workers."""
    monkeypatch.setitem(pieces.TRAINING, "cpu", PieceSize(4e7, 6))
    data = FederatedData(make_clients([40 + k % 7 for k in range(32)], features=200, classes=20), classes=20, name="wide")
    model, options = nn.Sequential(nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 20)), {"clients_per_round": 32, "rounds": 2}
    algorithm = eq.Algorithm(solver=replace(SGD, epochs=8))
    seen = {}

    class Choices(eq.observers.Observer):
        def on_start(self, run):
            self.engine = run.setting.engine

        def on_end(self):
            seen["choice"] = self.engine.measured.read()

    both = trained(data, Ray(), algorithm, model, observers=[Choices()], checkpoint=tmp_path / "run.ckpt", **options)
    assert seen["choice"]["chunk_size"] is not None
    longer = {**options, "rounds": 4}
    resumed = trained(data, Ray(workers=1), algorithm, model, checkpoint=tmp_path / "run.ckpt", **longer)
    assert len(resumed.history.rounds) == 4
    assert_equal_bits(both, trained(data, Ray(workers=1), algorithm, model, **options))


@pytest.mark.skipif(c_library.library("softmax") is None, reason="this machine has no C compiler that works ($CC, or cc)")
def test_pieces_that_compiled_code_does_in_one_call_have_the_bits_of_pieces_alone(cluster, data):
    task, cohort = Task.of(eq.models.Softmax(4, 3)), everyone(len(SIZES))
    choice, params = Choice(100, 1, len(SIZES), CompiledSoftmaxPath.name), torch.ones(15)
    here = Simulator(workers=1).start(task, data)
    here.use(choice)
    found = {}
    for workers in (1, 2):
        engine = Ray(workers=workers).start(task, data)
        engine.use(choice)
        found[workers] = engine.summed_update(params, cohort, SGD, cohort.weights, aggregators.WeightedMean())
    job = engine._cut(cohort, LocalRule.of(SGD, 0.3))
    assert len(job) == 4

    def alone(number):
        piece = cohort.take(job.places(number, number + 1))
        return here.summed_update(params, piece, SGD, piece.weights, aggregators.WeightedMean()).update

    expected = pieces.add_pieces((0, 4), alone, torch.add)
    assert here.paths_taken == (CompiledSoftmaxPath.name,)
    assert torch.equal(found[1].update, expected)
    assert torch.equal(found[2].update, expected)
    assert torch.equal(found[1].sq_norms, found[2].sq_norms)


def test_without_ray_the_engine_says_how_to_get_it(data, monkeypatch):
    import sys

    from equipoise.errors import EquipoiseError

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EquipoiseError, match=r'pip install "equipoise\[ray\]"'):
        trained(data, "ray", eq.Algorithm())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1"),
        ({"per_worker": {"cpus": 1}}, "per_worker must map"),
        ({"per_worker": {"num_cpus": 0}}, "per_worker must ask for a positive number"),
        ({"device": "cuda", "per_worker": {"num_cpus": 1}}, "no worker asks for one"),
        ({"patience": 0.0}, "patience"),
        ({"address": ""}, "address must be text"),
    ],
)
def test_what_cannot_be_is_refused(given, words):
    from equipoise.errors import InvalidParameter

    with pytest.raises(InvalidParameter, match=words):
        Ray(**given)


def test_parameters_that_are_not_trained_count_as_work(cluster, monkeypatch):
    """138 examples count: batches of 4 of these sizes have room for 126, and each client has one more. 35 of 126 learn."""
    from equipoise.testing.small_run import draw_everyone

    monkeypatch.setitem(pieces.TRAINING, "cpu", PieceSize(1000.0, 1))
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 8).requires_grad_(False), nn.Linear(8, 3).requires_grad_(False))
    data = made_data()
    engine = Ray(workers=1).start(Task.of(model), data)
    job = engine._cut(draw_everyone(data, 0), LocalRule.of(SGD, 0.3))
    trained_ones, all_of_them = 4 * 7 + 7, 4 * 7 + 7 + 7 * 8 + 8 + 8 * 3 + 3
    assert (engine.dimension, job.costs.sum()) == (trained_ones, 138 * all_of_them)
    assert len(job) == 8  # 17.4 by cost, 12 by clients; by the trained parameters it would be 4.8


def test_pieces_have_similar_cost_and_lose_nobody():
    """64 clients of cost 1 … 64 in 8 pieces: the mean is 2080 / 8 = 260, and no piece is further from it than one client."""
    import numpy as np

    job = pieces.cut_job(np.arange(1.0, 65.0), PieceSize(260.0, 6), reorder=True)
    assert len(job) == 8
    assert sorted(job.places(0, 8).tolist()) == list(range(64))
    assert abs(job.costs - 260.0).max() <= 64.0
    assert job.costs.sum() == 2080.0
