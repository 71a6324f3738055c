"""Chunks and processes chosen by measuring: once, kept, and never against what was asked for."""

import json

import pytest
import torch

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Simulator
from equipoise.engines.simulator import calibration
from equipoise.engines.simulator.calibration import Choice, SpeedMeasurement
from equipoise.engines.simulator.workers import threads
from equipoise.runs.checkpoint import read_checkpoint
from made_clients import make_clients


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})
    monkeypatch.setattr(calibration, "_WORTH", 0.0)
    return tmp_path / "equipoise" / "calibration.json"


def worked(choice=None, sizes=(5, 9, 12, 3, 8, 20), model=None):
    data = FederatedData(make_clients(list(sizes)))
    engine = (choice or Simulator()).start(Task.of(model or eq.models.Softmax(4, 3).double()), data)
    alpha = torch.full((len(sizes),), 1 / len(sizes), dtype=torch.float64)
    cohort = eq.sampling.Full()(0, alpha, clients_per_round=len(sizes), seed=0)
    params = torch.zeros(engine.task.layout.dimension, dtype=torch.float64)
    return engine, engine.summed_update(params, cohort, eq.solvers.SGD(batch_size=4), cohort.weights, WeightedMean())


def test_a_choice_is_made_once_and_kept_for_the_next_process(cache, monkeypatch):
    engine, _ = worked()
    assert engine.choice.chunk_size is not None
    assert engine.choice.workers is not None
    (stored,) = json.loads(cache.read_text()).values()
    assert SpeedMeasurement.of(stored).choice == engine.choice
    assert SpeedMeasurement.of(stored).seconds == engine.measurement.seconds
    assert len(stored["tried"]) > 1
    monkeypatch.setattr(calibration, "_measured", lambda *_: pytest.fail("measured again"))
    assert worked()[0].choice == engine.choice  # known in this process
    calibration._known.clear()
    assert worked()[0].choice == engine.choice  # read from the file


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": 3}', '{"a": {"chunks": 1}}'])
def test_a_damaged_file_is_made_anew(cache, content):
    cache.parent.mkdir()
    cache.write_text(content)
    engine, _ = worked()
    assert engine.choice.chunk_size is not None
    assert SpeedMeasurement.of(list(json.loads(cache.read_text()).values())[-1]).choice == engine.choice


def test_a_folder_that_cannot_be_written_does_not_matter(cache):
    cache.parent.parent.joinpath("equipoise").write_text("a file where the folder should be")
    assert worked()[0].choice.chunk_size is not None


def test_what_is_asked_for_is_used(cache):
    assert worked(Simulator(chunk_size=2))[0].choice.chunk_size == 2
    assert worked(Simulator(chunk_size=64, compiled=False), sizes=[6] * 150)[0].choice.chunk_size == 64
    assert worked(Simulator(workers=2))[0].choice.workers == 2
    assert worked(Simulator(chunk_size=3, workers=1))[0].choice == Choice(3, 1)


def test_many_more_clients_are_measured_again_if_the_largest_chunk_was_best(cache, monkeypatch):
    asked = []

    def measured(task):
        asked.append((len(task.queue), torch.get_num_threads()))
        return SpeedMeasurement(Choice(-(-len(task.queue) // 2), 2))

    monkeypatch.setattr(calibration, "_measured", measured)
    data = FederatedData(make_clients([6] * 40))
    with threads(2):
        engine = Simulator().start(Task.of(eq.models.Softmax(4, 3).double()), data)
        params = torch.zeros(engine.task.layout.dimension, dtype=torch.float64)
        for clients in (5, 7, 10, 40, 30, 5):
            alpha = torch.full((40,), 1 / 40, dtype=torch.float64)
            cohort = eq.sampling.Uniform()(0, alpha, clients_per_round=clients, seed=0)
            with engine.round_context():
                engine.summed_update(params, cohort, eq.solvers.SGD(batch_size=4), cohort.weights, WeightedMean())
    assert asked == [(5, 2), (40, 2)]
    engine.workers.stop()
    assert not Choice().serves(1)
    assert Choice(3, 2).serves(1000)  # given, not measured
    assert Choice(3, 2, clients=10).serves(1000)  # larger chunks were slower
    assert not Choice(5, 2, clients=10).serves(21)


def test_little_work_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_measured", lambda *_: pytest.fail("measured"))
    assert worked()[0].choice.workers == 1


class Identity(torch.autograd.Function):
    """An autograd function of the older kind, which torch cannot batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class CannotBeBatched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3).double()

    def forward(self, x):
        return Identity.apply(self.layer(x))


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_work_of_a_model_that_cannot_be_batched_is_measured_by_its_time(cache, monkeypatch):
    """It may be little by its parameters: each operation takes its time."""
    monkeypatch.setattr(calibration, "_WORTH", float("inf"))
    assert worked(model=CannotBeBatched())[0].measurement.seconds == {}
    monkeypatch.setattr(calibration, "_WORTH_SECONDS", 0.0)
    engine, _ = worked(model=CannotBeBatched())
    assert {choice.path for choice in engine.measurement.seconds} == {"recorded steps"}


def test_the_choice_is_kept_with_a_run(cache, ragged, tmp_path, monkeypatch):
    options = {"clients_per_round": 5, "checkpoint": tmp_path / "run.safetensors"}
    monkeypatch.setattr(calibration, "_measured", lambda *_: SpeedMeasurement(Choice(2, 1)))
    whole = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, clients_per_round=5)
    eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, **options)
    assert read_checkpoint(options["checkpoint"]).choice == {"chunk_size": 2, "workers": 1, "clients": 5, "path": None}
    calibration._known.clear()
    cache.unlink()
    monkeypatch.setattr(calibration, "_measured", lambda *_: SpeedMeasurement(Choice(5, 1)))  # the machine is busier now
    resumed = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, **options)
    assert torch.equal(resumed.params, whole.params)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"workers": 2, "device": "cuda"}, "workers must be left alone on a GPU"),
        ({"precision": "half"}, "precision must be one of"),
        ({"compiled": "yes"}, "compiled must be True or False"),
        ({"precision": "tf32"}, "precision is for a GPU"),
    ],
)
def test_what_makes_no_sense_is_refused(options, rule):
    with pytest.raises(eq.errors.InvalidParameter, match=rule):
        Simulator(**options)


def test_a_choice_that_is_slow_once_is_not_given_up():
    # Of three choices the best was disturbed in its first turn, and an equally good one in all but its third.
    fast, second, slow = Choice(8, 1), Choice(4, 1), Choice(1, 1)
    best = {fast: 2.5, second: 1.1, slow: 4.0}
    times = {fast: [0.9, 1.0, 1.0, 1.0], second: [1.1, 0.95, 1.1, 1.1], slow: []}
    calibration.more_turns(best, lambda choice: times[choice].pop(0), clients=1)
    assert best == {fast: 0.9, second: 0.95, slow: 4.0}


@pytest.mark.parametrize(("seconds", "clients", "turns"), [(0.01, 10, 4), (0.3, 10, 1), (0.3, 1000, 4), (0.5, 1000, 3)])
def test_turns_end_after_a_while_or_a_round(seconds, clients, turns, monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

    def measure(choice):
        asked.append(choice)
        now[0] += seconds
        return seconds / 10  # of ten clients

    calibration.more_turns({Choice(1, 1): seconds / 10, Choice(2, 1): seconds / 10}, measure, clients)
    assert len(asked) == 2 * turns


@pytest.mark.parametrize("slow", [1, 5, 20])
def test_chunks_grow_while_a_turn_is_short(cache, monkeypatch, slow):
    # A call has an overhead of ten clients: larger chunks are faster, up to what may be tried.
    tried = {}

    def seconds(task, workers, choice, count):
        tried[choice.chunk_size] = count
        return 1e-3 * slow * (1 + 10 / choice.chunk_size)

    monkeypatch.setattr(calibration, "_seconds", seconds)
    engine, _ = worked(Simulator(compiled=False, workers=2), sizes=[6] * 150)
    assert engine.choice.chunk_size == {1: 75, 5: 32, 20: 4}[slow]
    assert all(count >= 2 * chunk for chunk, count in tried.items())
