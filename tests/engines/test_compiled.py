"""Softmax regression in C: as the loop engine does it, for every processor's vectors, and never where it cannot be."""

import subprocess
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from taken import everyone, paths_of
from torch import nn

import equipoise as eq
from equipoise.aggregators import NormClip, WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator import calibration, client_queue
from equipoise.engines.simulator.assignments import Assignment
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cpu import c_library as compiling
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmax, CompiledSoftmaxPath, group_edges
from equipoise.engines.simulator.cpu.compiled_softmax import library as compiled_library
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import Workplace
from equipoise.runs.checkpoint import read_checkpoint
from equipoise.solvers import SGD, batches
from equipoise.testing import check_engine
from equipoise.types import Job, Pull
from made_clients import make_clients

pytestmark = pytest.mark.skipif(
    compiling.library("softmax") is None, reason="this machine has no C compiler that works ($CC, or cc)"
)


NAME = CompiledSoftmaxPath.name


@dataclass(frozen=True)
class Compiled:
    """The simulator with its choice made: compiled code, with this many threads."""

    chunk: int = 100
    threads: int = 2
    able: bool = True  # to do the work of the model

    def start(self, task, data):
        engine = Simulator().start(task, data)
        engine.use(Choice(self.chunk, self.threads, path=NAME))
        assert (engine.compiled.obstacle is None) == self.able, "it would test something else"
        return engine


def raw_clients(made, seed=1):
    """The same clients with bytes as inputs."""
    raw = torch.randint(0, 256, made.x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return ClientSet(raw, made.y.to(torch.uint8), made.offsets, made.ids, scale=-1 / 255, shift=0.75)


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    features=st.sampled_from([1, 4, 15, 16, 17, 40]),
    classes=st.sampled_from([2, 3, 15, 16, 17, 31, 33, 62]),
    batch=st.one_of(st.none(), st.integers(1, 30)),
    epochs=st.integers(0, 3),
    prox=st.sampled_from([0.0, 0.4]),
    decay=st.sampled_from([0.0, 0.2]),
    bias=st.booleans(),
    raw=st.booleans(),
    straggling=st.sampled_from([0.0, 0.5]),
    engine=st.builds(Compiled, st.integers(1, 8), st.integers(1, 4)),
)
def test_it_agrees_with_the_loop(sizes, features, classes, batch, epochs, prox, decay, bias, raw, straggling, engine):
    made = make_clients(sizes, features=features, classes=classes)
    data = FederatedData(raw_clients(made) if raw else made)
    task = Task.of(eq.models.Softmax(features, classes, bias=bias))
    solver = SGD(
        lr=0.05,
        batch_size=batch,
        epochs=epochs,
        prox=prox,
        weight_decay=decay,
        straggler_share=straggling,
        stragglers="keep" if epochs > 1 else "drop",
    )
    check_engine(engine, task=task, data=data, solver=solver, tolerance=2e-5)
    assert paths_of(engine, task, data, solver) == ((NAME,) if epochs else ())


def emnist_like(clients=6, examples=35):
    generator = torch.Generator().manual_seed(0)
    triples = [
        (
            f"writer {i}",
            torch.randint(0, 256, (examples + i, 28, 28), dtype=torch.uint8, generator=generator),
            torch.randint(0, 62, (examples + i,), generator=generator),
        )
        for i in range(clients)
    ]
    return FederatedData(ClientSet.pack(triples, scale=1 / 255))


def test_its_error_against_double_precision_is_that_of_single_precision():
    data, solver, cohort = emnist_like(), SGD(lr=0.05, batch_size=10, epochs=2), everyone(6)
    task, exact = Task.of(eq.models.Softmax(784, 62)), Task.of(eq.models.Softmax(784, 62).double())
    params = 0.05 * torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(1))
    found = Compiled().start(task, data).summed_update(params, cohort, solver, cohort.weights, WeightedMean())
    true = Loop().start(exact, data).summed_update(params.double(), cohort, solver, cohort.weights, WeightedMean())
    assert float((found.update - true.update).norm() / true.update.norm()) < 3e-6
    torch.testing.assert_close(found.losses, true.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.sq_norms, true.sq_norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", [1e-4, 0.3, 0.5, 1e4])
@pytest.mark.parametrize("clients", [1, 6])
def test_clipped_updates_are_summed_without_being_kept(clip, clients, monkeypatch):
    """0.3 and 0.5 lie among the norms: some updates are clipped, and others are not."""
    data, solver, cohort = emnist_like(clients), SGD(lr=0.05, batch_size=10, epochs=2), everyone(clients)
    task, exact = Task.of(eq.models.Softmax(784, 62)), Task.of(eq.models.Softmax(784, 62).double())
    params = 0.05 * torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(0.2, 1.0, clients, dtype=torch.float64)
    true = Loop().start(exact, data).summed_update(params.double(), cohort, solver, weights, NormClip(clip))
    monkeypatch.setattr(Assignment, "sent", None)  # which would make the updates of single clients
    found = Compiled().start(task, data).summed_update(params, cohort, solver, weights, NormClip(clip))
    assert float((found.update - true.update).norm() / true.update.norm()) < 3e-6
    torch.testing.assert_close(found.sq_norms, true.sq_norms, rtol=1e-5, atol=0)
    if clip == 1e-4:
        assert float(found.update.norm()) <= clip * float(weights.sum())


def test_one_client_whose_update_is_not_finite_is_left_out_of_a_clipped_sum():
    data, solver, cohort = emnist_like(), SGD(lr=0.05, batch_size=10), everyone(6)
    spoilt = replace(data, train=replace(data.train, x=data.train.x.float() / 255, scale=None))
    spoilt.train.x[spoilt.train.offsets[2] : spoilt.train.offsets[3]] = 1e30
    task = Task.of(eq.models.Softmax(784, 62))
    params = task.layout.read(task.module)
    found, true = (
        engine.start(task, spoilt).summed_update(params, cohort, solver, cohort.weights, NormClip(0.3))
        for engine in (Compiled(), Loop())
    )
    assert torch.isfinite(found.sq_norms).tolist() == [True, True, False, True, True, True]
    torch.testing.assert_close(found.update, true.update, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_the_same_bits_come_out_whoever_is_faster(threads):
    data, solver, cohort = emnist_like(), SGD(lr=0.05, batch_size=7), everyone(6)
    task = Task.of(eq.models.Softmax(784, 62))
    params = task.layout.read(task.module)
    engine = Compiled(threads=threads).start(task, data)
    first, *others = (
        engine.summed_update(params, cohort, solver, cohort.weights, WeightedMean()).update.clone() for _ in range(5)
    )
    assert all(torch.equal(first, other) for other in others)
    each = engine.updates(params, cohort, solver).update
    torch.testing.assert_close(first, (cohort.weights.float().unsqueeze(1) * each).sum(0), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_it_is_right_with_the_vectors_of_other_processors(processor, monkeypatch, tmp_path):
    if processor == "x86-64-v4" and "avx512f" not in compiling._processor():
        pytest.skip("this processor has no AVX-512")
    if "avx2" not in compiling._processor():
        pytest.skip("this processor has no AVX2")
    flags = tuple(f"-march={processor}" if flag.startswith("-march") else flag for flag in compiling._FLAGS)
    monkeypatch.setattr(compiling, "_FLAGS", flags)
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    compiling.library.cache_clear()
    try:
        lanes = {"x86-64": 4, "x86-64-v3": 8, "x86-64-v4": 16}[processor]
        assert compiled_library("softmax").lanes() == lanes
        for features, classes, batch in ((17, 33, 30), (40, 8, 7), (5, 3, None), (16, 64, 12), (3, 20, 13)):
            task = Task.of(eq.models.Softmax(features, classes))
            data = FederatedData(make_clients([40, 31, 7, 1], features=features, classes=classes))
            check_engine(Compiled(), task=task, data=data, solver=SGD(lr=0.1, batch_size=batch, prox=0.2), tolerance=2e-5)
    finally:
        compiling.library.cache_clear()


@given(strengths=st.lists(st.floats(0, 4), min_size=4, max_size=4), shared=st.booleans(), decay=st.sampled_from([0.0, 0.3]))
def test_models_of_their_own_are_pulled_towards_their_anchors(strengths, shared, decay):
    task, data, cohort = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([5, 9, 2, 7])), everyone(4)
    generator = torch.Generator().manual_seed(0)
    models, anchors = (torch.randn(4, task.layout.dimension, generator=generator) for _ in range(2))
    pull = Pull(anchors[0] if shared else anchors, torch.tensor(strengths))
    solver = SGD(lr=0.1, batch_size=4, weight_decay=decay, epochs=2)
    for chunk in (2, 100):
        found = Compiled(chunk).start(task, data).own_steps(models, cohort, solver, pull)
        torch.testing.assert_close(
            found, Loop().start(task, data).own_steps(models, cohort, solver, pull), rtol=1e-4, atol=1e-5
        )


def test_outputs_far_apart_lose_nothing():
    # Scores that differ by thousands: probabilities are 0 or 1, and a loss is the difference of two scores.
    task, data, cohort = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([9, 8])), everyone(2)
    params = 3000 * torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(2))
    solver = SGD(lr=0.1, batch_size=4)
    found = Compiled().start(task, data).updates(params, cohort, solver)
    expected = Loop().start(task, data).updates(params, cohort, solver)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.update, expected.update, rtol=1e-4, atol=2e-3)  # the last bit of a weight is 2⁻¹²


def test_an_update_that_cannot_be_used_is_left_out_of_a_sum():
    task, made = Task.of(eq.models.Softmax(4, 3)), make_clients([4, 4, 4])
    x = made.x.clone()
    x[4:8] = 3e38
    data, cohort = FederatedData(ClientSet(x, made.y, made.offsets, made.ids)), everyone(3)
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(1))
    solver = SGD(lr=0.1, batch_size=2)
    fast, slow = (
        engine.start(task, data).summed_update(params, cohort, solver, cohort.weights, WeightedMean())
        for engine in (Compiled(), Loop())
    )
    assert torch.isinf(fast.sq_norms).tolist() == torch.isinf(slow.sq_norms).tolist() == [False, True, False]
    torch.testing.assert_close(fast.update, slow.update)


def test_a_tiny_step_has_a_norm():
    task, data, cohort = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([4, 4, 4])), everyone(3)
    params = torch.zeros(task.layout.dimension)
    engine = Compiled().start(task, data)
    found = engine.summed_update(params, cohort, SGD(lr=1e-30, batch_size=2), cohort.weights, WeightedMean())
    assert bool(((found.sq_norms > 0) & (found.sq_norms < 1e-50)).all())


class Hooked(eq.models.Softmax):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "case",
    [
        "double",
        "one score",
        "another loss",
        "a forward pass of its own",
        "numbers as targets",
        "half",
        "network",
        "unknown class",
    ],
)
def test_other_work_is_left_to_others(case):
    made = make_clients([6, 5, 4])
    model, options = eq.models.Softmax(4, 3), {}
    match case:
        case "double":
            model = model.double()
        case "one score":
            model, made = eq.models.LinearRegression(4), replace(made, y=made.y.float())
        case "another loss":
            options = {
                "loss": lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)
            }
        case "a forward pass of its own":
            model = Hooked(4, 3)
        case "numbers as targets":
            made = replace(made, y=nn.functional.one_hot(made.y, 3).float())
            options = {"error": lambda outputs, y: (outputs.argmax(1) != y.argmax(1)).float()}
        case "half":
            made = replace(made, x=made.x.half())
        case "network":
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        case "unknown class":  # the loss of torch refuses it, with its own words
            made = replace(made, y=made.y + 1)
    task = Task.of(model, **options)
    assert CompiledSoftmax(task, made).obstacle is not None
    if case not in ("unknown class", "half"):
        engine = Compiled(2, 1, able=False)  # a checkpoint of another time may say so
        check_engine(engine, task=task, data=FederatedData(made), tolerance=1e-4)
        assert NAME not in paths_of(engine, task, FederatedData(made), SGD())


def test_momentum_and_other_solvers_are_left_to_others():
    task, made = Task.of(eq.models.Softmax(4, 3)), make_clients([6, 5, 4])
    path = CompiledSoftmaxPath(Workplace(task, FederatedData(made), made))
    assert path.supports_rule(LocalRule.of(SGD(), 0.1)) is None
    assert path.supports_rule(LocalRule.of(SGD(momentum=0.9), 0.1)) == "SGD has momentum"
    assert "weight decay" in path.supports_rule(LocalRule.of(SGD(weight_decay=0.5), 2.0))
    reason = path.supports_rule(LocalRule.of(eq.solvers.MAML(), 0.1))
    assert reason is not None
    assert reason.startswith("the steps of MAML are not those of SGD")
    for solver in (SGD(momentum=0.9), eq.solvers.MAML(lr=0.1, inner_lr=0.1), eq.solvers.FedDane(SGD(lr=0.1, batch_size=3))):
        check_engine(Compiled(2), task=task, data=FederatedData(made), solver=solver, tolerance=1e-4)


def test_many_seeds_together_are_the_same_as_alone(ragged):
    task, count = Task.of(eq.models.Softmax(4, 3)), len(ragged.train)
    jobs = [
        Job(torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(i)), everyone(count), torch.rand(count))
        for i in range(3)
    ]
    engine, loop, solver = Compiled().start(task, ragged), Loop().start(task, ragged), SGD(lr=0.1, batch_size=3)
    for found, expected in zip(
        engine.summed_updates(jobs, solver, WeightedMean()), loop.summed_updates(jobs, solver, WeightedMean()), strict=True
    ):
        torch.testing.assert_close(found.update, expected.update, rtol=1e-4, atol=1e-6)


@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=60).map(lambda s: sorted(s, reverse=True)),
    models=st.integers(1, 3),
    threads=st.integers(1, 8),
)
def test_groups_cover_every_client_once_and_never_mix_models(steps, models, threads):
    owners = sorted(i % models for i in range(len(steps)))
    edges = group_edges(steps, owners, threads).tolist()
    assert edges[0] == 0
    assert edges[-1] == len(steps)
    assert all(a < b and len(set(owners[a:b])) == 1 for a, b in pairwise(edges))


# Who has no compiler, or a bad one


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})
    monkeypatch.setattr(calibration, "_WORTH", 0.0)
    compiling.library.cache_clear()
    yield tmp_path
    compiling.library.cache_clear()


def one_round(simulator, sizes=(5, 9, 12, 3, 8, 20)):
    task, data, cohort = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients(list(sizes))), everyone(len(sizes))
    engine = simulator.start(task, data)
    params, solver = torch.zeros(task.layout.dimension), SGD(lr=0.1, batch_size=4)
    return engine, engine.summed_update(params, cohort, solver, cohort.weights, WeightedMean()).update


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler", "/bin/true"])
def test_without_a_working_compiler_the_work_is_done_by_torch(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert compiling.library("softmax") is None
    engine, found = one_round(Simulator())
    assert engine.choice.path is None
    assert NAME not in engine.paths_taken
    torch.testing.assert_close(found, one_round(Loop())[1])


def test_a_compiler_that_does_not_come_back_is_given_up(fresh, monkeypatch):
    def never(command, **options):
        assert options["timeout"] <= 120
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", never)
    assert compiling.library("softmax") is None


def test_it_is_compiled_once_and_kept(fresh, monkeypatch):
    assert compiling.library("softmax") is not None
    (kept,) = (fresh / "equipoise").glob("softmax-*.so")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    compiling.library.cache_clear()
    assert compiling.library("softmax")._name == str(kept)


def test_a_folder_that_cannot_be_written_does_not_matter(fresh):
    (fresh / "equipoise").write_text("a file where the folder should be")
    assert compiling.library("softmax") is not None


def test_a_damaged_file_does_not_matter(fresh):
    compiling.library("softmax")
    (kept,) = (fresh / "equipoise").glob("softmax-*.so")
    compiling.library.cache_clear()
    kept.unlink()  # not overwritten: it is loaded
    kept.write_bytes(b"no library")
    assert compiling.library("softmax") is not None
    assert kept.stat().st_size > 1000


def fastest(monkeypatch, compiled):
    """Seconds as they are where compiled code is the fastest, or the slowest."""
    monkeypatch.setattr(calibration, "_seconds", lambda _, __, choice, ___: 1.0 if (choice.path == NAME) == compiled else 2.0)


def test_it_is_used_if_it_is_the_fastest_and_allowed(fresh, monkeypatch):
    fastest(monkeypatch, True)
    engine, found = one_round(Simulator())
    assert engine.choice.path == NAME
    assert engine.paths_taken == (NAME,)
    assert engine.waste == 0.0
    torch.testing.assert_close(found, one_round(Loop())[1])
    assert one_round(Simulator(compiled=False))[0].choice.path is None
    unmeasured = one_round(Simulator(chunk_size=2, workers=1))[0]
    assert unmeasured.choice.path is None
    assert NAME not in unmeasured.paths_taken
    fastest(monkeypatch, False)
    calibration._known.clear()
    (fresh / "equipoise" / "calibration.json").unlink()
    assert one_round(Simulator())[0].choice.path is None


def test_it_is_not_used_if_it_is_wrong(fresh, monkeypatch):
    fastest(monkeypatch, True)
    right = CompiledSoftmax.train
    monkeypatch.setattr(
        CompiledSoftmax, "train", lambda self, work, weights: (1.01 * right(self, work, weights)[0], torch.zeros(2))
    )
    assert one_round(Simulator())[0].choice.path is None


def test_a_run_is_resumed_with_it(fresh, ragged, tmp_path, monkeypatch):
    options = {"clients_per_round": 5, "checkpoint": tmp_path / "run.safetensors"}
    fastest(monkeypatch, True)
    whole = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, clients_per_round=5)
    eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, **options)
    assert read_checkpoint(options["checkpoint"]).choice["path"] == NAME
    monkeypatch.setattr(calibration, "_measured", lambda *_: pytest.fail("measured again"))
    calibration._known.clear()
    resumed = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, **options)
    assert torch.equal(resumed.params, whole.params)


def test_a_chunk_is_no_larger_than_its_batches_can_be_made_at_once(monkeypatch):
    monkeypatch.setattr(batches, "TABLE", 100)
    monkeypatch.setattr(client_queue, "TABLE", 100)
    used = []
    right = CompiledSoftmax.train
    monkeypatch.setattr(CompiledSoftmax, "train", lambda self, *a: used.append(len(a[0].chunk)) or right(self, *a))
    data = FederatedData(make_clients([120, 90, 30, 30, 20, 10, 9, 8, 7, 6]))
    task = Task.of(eq.models.Softmax(4, 3))
    check_engine(Compiled(), task=task, data=data, solver=SGD(lr=0.05, batch_size=5), tolerance=2e-5)
    assert max(used) > 2
    assert 1 in used


# Losses and errors


def test_losses_and_errors_of_all_splits_are_those_of_the_loop(ragged, monkeypatch):
    data = replace(ragged, validation=make_clients([100, 3, 49, 48, 47], seed=5, prefix="later"))
    task = Task.of(eq.models.Softmax(4, 3))
    engine, loop = Compiled().start(task, data), Loop().start(task, data)
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(type(engine.scoring), "shared_means", lambda *_, **__: pytest.fail("by torch"))
    for clients in data.splits.values():
        for found, expected in zip(engine.evaluate(params, clients), loop.evaluate(params, clients), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    cohort = replace(everyone(8), clients=torch.tensor([3, 3, 0, 7, 1, 2, 6, 5]))
    models = [params, -params, torch.zeros_like(params)]
    torch.testing.assert_close(engine.losses_of(models, cohort), loop.losses_of(models, cohort), rtol=1e-6, atol=1e-7)


def test_equal_outputs_are_the_first_class_and_a_lost_model_has_no_loss():
    task, data = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([30, 20]))
    engine = Compiled().start(task, data)
    losses, errors = engine.evaluate(torch.zeros(task.layout.dimension), data.train)
    torch.testing.assert_close(losses, torch.full((2,), 3.0, dtype=torch.float64).log())
    wrong = [float((data.train.y[rows] != 0).double().mean()) for rows in (slice(0, 30), slice(30, 50))]
    torch.testing.assert_close(errors, torch.tensor(wrong, dtype=torch.float64))
    assert bool(torch.isnan(engine.evaluate(torch.full((task.layout.dimension,), torch.nan), data.train)[0]).all())
    assert not bool(torch.isfinite(engine.evaluate(torch.full((task.layout.dimension,), torch.inf), data.train)[0]).any())


def test_an_error_of_ones_own_and_data_from_elsewhere_are_left_to_torch():
    def half_an_error(outputs, y):
        return 0.5 * (outputs.argmax(1) != y).float()

    data, other = FederatedData(make_clients([30, 20])), make_clients([7, 9], seed=4)
    for error, clients in ((half_an_error, data.train), (None, other)):
        task = Task.of(eq.models.Softmax(4, 3), error=error)
        params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(3))
        found, expected = (e.start(task, data).evaluate(params, clients) for e in (Compiled(), Loop()))
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-6, atol=1e-7)


def test_torchs_default_type_does_not_matter():
    task, data = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([9, 5, 7]))
    try:
        torch.set_default_dtype(torch.float64)
        check_engine(Compiled(), task=task, data=data, solver=SGD(lr=0.05, batch_size=4, prox=0.5), tolerance=2e-5)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["every second number", "float64"])
def test_parameters_that_are_not_as_c_wants_them(kind):
    task, data = Task.of(eq.models.Softmax(784, 62)), emnist_like()
    engine = Compiled().start(task, data)
    params = torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(3))
    other = params.double() if kind == "float64" else torch.stack([params, torch.full_like(params, 9.0)], 1)[:, 0]
    assert other.dtype != params.dtype or not other.is_contiguous()
    for found, expected in zip(engine.evaluate(other, data.train), engine.evaluate(params, data.train), strict=True):
        assert torch.equal(found, expected)
