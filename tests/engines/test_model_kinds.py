"""Models that nobody has tuned for: all paths agree with the loop engine, and share what is frozen."""

import gc
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from taken import everyone
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cuda.client_streams import SideBySide, SideBySideChannelsLast
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.errors import InvalidParameter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo

SMALL = {  # in place of models that take long
    "ResNet-18, GroupNorm": lambda: zoo.ResNet(8, ((8, 1), (16, 2))),
    "ResNet-18, BatchNorm": lambda: zoo.ResNet(8, ((8, 1), (16, 2)), "batch"),
    "LoRA decoder": lambda: zoo.LoRADecoder(32, 2),
    "LeNet, dropout": zoo.LeNetDropout,
}


def doubles(x):
    if isinstance(x, dict):
        return {name: doubles(value) for name, value in x.items()}
    return tuple(map(doubles, x)) if isinstance(x, tuple) else x.double() if x.is_floating_point() else x


def task_and_data(name, sizes=(5, 4, 2)):
    entry, generator = zoo.ZOO[name], torch.Generator().manual_seed(0)
    parts = [entry.data(size, generator) for size in sizes]
    data = FederatedData(ClientSet.pack([(str(i), doubles(x), y) for i, (x, y) in enumerate(parts)]))
    torch.manual_seed(0)
    return try_task(Task.of(SMALL.get(name, entry.model)().double(), loss=zoo.loss_of), data), data


def results(engine, task, solver, clients):
    cohort, params = everyone(clients), task.read_model()
    work = engine.updates(params, cohort, solver)
    yield work.update
    yield work.losses
    yield from () if work.carried is None else (work.carried,)
    yield engine.summed_update(params, cohort, solver, cohort.weights, eq.aggregators.WeightedMean()).update
    yield engine.losses(params, cohort)
    yield from engine.evaluate(params, engine.data.train)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_path_agrees_with_the_loop(name):
    task, data = task_and_data(name)
    solver = eq.solvers.SGD(lr=0.05, batch_size=2)
    wanted = list(results(Loop().start(task, data), task, solver, 3))
    engine = Simulator(chunk_size=2, workers=1).start(task, data)
    assert engine.unvectorised is None
    carried = task.carried.size > 0  # which step graphs leave to others
    captured = (SideBySide.name, SideBySideChannelsLast.name, *(() if carried else (StepGraphs.name,)))
    for path in ("batched autograd", "one by one", "recorded steps", *captured):
        if path in captured:
            engine.workers.own.path(path).obstacle = None  # on a CPU, too, where nothing is captured
        engine.use(Choice(path=path))
        engine.workers.own.candidates(engine._rule(solver, 0), None)  # forgets who was asked
        for found, expected in zip(results(engine, task, solver, 3), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
        assert engine.paths_taken == (path,)


@pytest.mark.parametrize("name", ["MLP, dropout", "tabular", "Transformer, dropout"])
def test_masks_of_dropout_do_not_depend_on_chunks_workers_or_path(name):
    task, data = task_and_data(name, (7, 5, 4, 2))
    solver, cohort, params = eq.solvers.SGD(lr=0.05, batch_size=3, epochs=2), everyone(4), task.read_model()
    wanted = Loop().start(task, data).updates(params, cohort, solver).update
    for chunk, workers, path in ((1, 1, None), (3, 1, None), (2, 2, None), (4, 2, "one by one"), (4, 2, "recorded steps")):
        engine = Simulator(chunk_size=chunk, workers=workers).start(task, data)
        engine.use(Choice(path=path))
        found = engine.updates(params, cohort, solver).update
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        engine.workers.stop()
    other_round = Loop().start(task, data).updates(params, replace(cohort, round=1), solver).update
    assert not torch.allclose(other_round, wanted)


class Flattened(nn.Module):
    """Time comes first, so that the place of an example in the flattened tensor depends on how many there are."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        steps = x.transpose(0, 1)  # (T, B, 3)
        return self.head(nn.functional.dropout(steps.reshape(-1, 3), 0.5, self.training).view(steps.shape).mean(0))


def test_a_model_whose_masks_depend_on_padding_is_never_padded():
    generator = torch.Generator().manual_seed(0)
    triples = [(str(n), torch.randn(n, 4, 3, generator=generator).double(), torch.arange(n) % 2) for n in (5, 4, 3)]
    data = FederatedData(ClientSet.pack(triples))
    task = Task.of(Flattened().double())
    with pytest.warns(eq.errors.EquipoiseNotice, match="whose masks may depend on padding"):
        engine = Simulator().start(task, data)
    solver, cohort, params = eq.solvers.SGD(lr=0.5, batch_size=3), everyone(3), task.read_model()
    found, wanted = (each.updates(params, cohort, solver).update for each in (engine, Loop().start(task, data)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_frozen_parameters_are_shared_by_all_clients(monkeypatch):
    """Memory of a chunk of adapters: what clients train, and their activations, but no copy of what is frozen."""
    clients = 12
    monkeypatch.setitem(SMALL, "LoRA decoder", lambda: zoo.LoRADecoder(160, 2))
    task, data = task_and_data("LoRA decoder", (1,) * clients)
    adapters = task.layout.dimension
    frozen = sum(p.numel() for p in task.module.parameters()) - adapters
    solver, mean = eq.solvers.SGD(batch_size=1), eq.aggregators.WeightedMean()
    peaks = {}
    for count, path in ((1, "one by one"), (clients, "batched autograd")):
        engine = Simulator(chunk_size=count, workers=1).start(task, data)
        engine.use(Choice(path=path))
        cohort = everyone(clients).take(torch.arange(count))
        gc.collect()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine.summed_update(task.read_model(), cohort, solver, cohort.weights, mean)
        peaks[path] = peak_bytes(profile)
        assert engine.paths_taken == (path,)
    activations = peaks["one by one"]  # one client's, with its adapters
    bound = 8 * (frozen + clients * adapters * 3) + clients * activations
    assert peaks["batched autograd"] < bound
    assert bound < peaks["batched autograd"] + 8 * (clients - 1) * frozen  # a copy for each client would be too much


def peak_bytes(profile):
    """The most memory that was allocated at once."""
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_float32_trial_is_not_fooled_by_rounding():
    """A deep network whose float32 gradients differ by rounding in a batch is batched all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())), nn.Linear(16, 3)
    )
    data = FederatedData(ClientSet.pack([(str(i), 1e3 * torch.randn(6, 16), torch.arange(6) % 3) for i in range(2)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Simulator().start(Task.of(model), data)
    assert engine.trial.exact
    assert engine.trial.difference < 1e-9
    assert "float64" in engine.explain()


def test_explain_says_how_a_model_is_trained():
    _, data = task_and_data("tabular")
    text = eq.explain(
        zoo.Tabular().double(), data, eq.Algorithm(solver=eq.solvers.AdamW(lr=1e-3, clip_norm=1.0)), loss=zoo.loss_of
    )
    assert "batched autograd      taken" in text
    assert "batched and plain gradients differ by" in text


def test_explain_takes_the_options_of_a_run():
    _, data = task_and_data("tabular")
    refused = []

    def error(outputs, targets):
        refused.append(len(targets))
        return zoo.loss_of(outputs, targets)

    options = {
        "loss": zoo.loss_of, "error": error, "metrics": {}, "seed": 3, "clients_per_round": 2, "rounds": 5, "progress": False,
        "evaluate_every": 2, "name": "mine",
    }  # fmt: skip
    text = eq.explain(lambda seed: zoo.Tabular(), lambda seed: data, eq.Algorithm(), **options)
    assert text.startswith("Local work: Tabular")
    assert refused  # the error was tried
    with pytest.raises(InvalidParameter, match=r"eval_every must be an option of train.*Did you mean 'evaluate_every'"):
        eq.explain(zoo.Tabular(), data, loss=zoo.loss_of, eval_every=2)
