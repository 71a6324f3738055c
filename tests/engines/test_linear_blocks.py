"""Linear models by their weights: blocks of a few clients, tight loops, and sums that keep no client's update."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from taken import paths_of

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator import linear_blocks as linear
from equipoise.engines.simulator.linear_blocks import LinearWork
from equipoise.engines.simulator.linear_span import ExampleSpan
from equipoise.testing import check_engine
from equipoise.types import Job
from made_clients import make_clients

MODELS = {
    "softmax": lambda: eq.models.Softmax(4, 3),
    "no bias": lambda: eq.models.Softmax(4, 3, bias=False),
    "one score": lambda: eq.models.LinearRegression(4),
}


@pytest.fixture(autouse=True)
def by_weights(monkeypatch):
    """Not in the span of the examples; and blocks of two clients, so that there are several and the last may be smaller."""
    monkeypatch.setattr(ExampleSpan, "supports_rule", lambda *_: "this is a test of another path")
    monkeypatch.setattr(linear, "_BLOCK_BYTES", 2 * 3 * 16 * 8)


def by_blocks(task, data, **options):
    """The sums of updates by the simulator, which must have taken the path that this file tests."""

    def sums(*asked):
        engine = Simulator(**options).start(task, data)
        found = engine.summed_updates(*asked, WeightedMean())
        assert engine.paths_taken == ("linear blocks",)
        return found

    return sums


def job(task, count, seed=0, round=0):
    generator = torch.Generator().manual_seed(seed)
    params = torch.randn(task.layout.dimension, dtype=torch.float64, generator=generator)
    weights = torch.rand(count, dtype=torch.float64, generator=generator)
    cohort = eq.sampling.Full()(round, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=count, seed=0)
    return Job(params, cohort, weights)


@pytest.mark.parametrize("model", MODELS)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    batch=st.one_of(st.none(), st.integers(1, 8)),
    epochs=st.integers(0, 3),
    prox=st.sampled_from([0.0, 0.4]),
    decay=st.sampled_from([0.0, 0.2]),
    chunk=st.integers(1, 7),
)
def test_it_agrees_with_the_loop(model, sizes, batch, epochs, prox, decay, chunk):
    task = Task.of(MODELS[model]().double())
    solver = eq.solvers.SGD(lr=0.2, batch_size=batch, epochs=epochs, prox=prox, weight_decay=decay)
    engine, data = Simulator(chunk_size=chunk), FederatedData(make_clients(sizes))
    check_engine(engine, task=task, data=data, solver=solver, tolerance=1e-8)
    assert paths_of(engine, task, data, solver) == (("linear blocks",) if epochs else ())


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=7), batch=st.integers(1, 5), epochs=st.integers(1, 2))
def test_sums_of_several_models_agree_with_the_loop(sizes, batch, epochs):
    task, data = Task.of(eq.models.Softmax(4, 3).double()), FederatedData(make_clients(sizes))
    jobs = [job(task, len(sizes), seed) for seed in range(3)]
    solver = eq.solvers.SGD(lr=0.2, batch_size=batch, epochs=epochs)
    fast = by_blocks(task, data)(jobs, solver)
    slow = Loop().start(task, data).summed_updates(jobs, solver, WeightedMean())
    for found, expected in zip(fast, slow, strict=True):
        torch.testing.assert_close(found.update, expected.update, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.sq_norms, expected.sq_norms, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=1e-11)


def test_sums_keep_no_updates_and_full_batches_take_the_tight_loop(monkeypatch):
    monkeypatch.setattr(LinearWork, "updates", lambda *_: pytest.fail("updates were kept"))
    monkeypatch.setattr(LinearWork, "_steps", lambda *_: pytest.fail("a full batch took the general path"))
    task, data = Task.of(eq.models.Softmax(4, 3).double()), FederatedData(make_clients([6, 6, 6, 6, 6]))
    one, solver = job(task, 5), eq.solvers.SGD(lr=0.3, batch_size=3, epochs=2)
    fast = by_blocks(task, data)([one], solver)[0]
    slow = Loop().start(task, data).summed_updates([one], solver, WeightedMean())[0]
    torch.testing.assert_close(fast.update, slow.update, rtol=1e-9, atol=1e-11)


def test_an_update_that_cannot_be_used_is_left_out_of_a_sum():
    # The second client's inputs are so large that its model is not finite after a step; the others' sum is as without it.
    task = Task.of(eq.models.LinearRegression(4).double())
    good = make_clients([4, 4, 4])
    x = good.x.double()
    x[4:8] = 1e200
    clients = ClientSet(x, good.y.double(), good.offsets, good.ids)
    one, solver = job(task, 3), eq.solvers.SGD(lr=0.1, batch_size=2)
    fast = by_blocks(task, FederatedData(clients))([one], solver)[0]
    slow = Loop().start(task, FederatedData(clients)).summed_updates([one], solver, WeightedMean())[0]
    assert torch.isinf(fast.sq_norms).tolist() == torch.isinf(slow.sq_norms).tolist() == [False, True, False]
    torch.testing.assert_close(fast.update, slow.update)


def test_a_client_that_does_not_move_has_the_norm_zero_and_a_tiny_step_has_its_own():
    # Squares of single precision end near 1e-38: a step of 1e-30 has a norm, and a step of nothing has none.
    task, data = Task.of(eq.models.Softmax(4, 3)), FederatedData(make_clients([4, 4, 4]))
    cohort = job(task, 3)
    params = torch.zeros(task.layout.dimension)
    one = Job(params, cohort.cohort, cohort.weights)
    for lr in (1e-30, 1e-3):
        found = by_blocks(task, data)([one], eq.solvers.SGD(lr=lr, batch_size=2))[0]
        assert bool((found.sq_norms > 0).all())
        assert bool((found.sq_norms < 4 * (100 * lr) ** 2).all())


def test_raw_bytes_with_a_scale_and_a_shift_are_seen_as_by_the_loop():
    made = make_clients([7, 8, 5])
    raw = torch.randint(0, 256, made.x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    clients = ClientSet(raw, made.y, made.offsets, made.ids, scale=1 / 255, shift=-0.5)
    task = Task.of(eq.models.Softmax(4, 3).double())
    solver = eq.solvers.SGD(lr=0.3, batch_size=3, epochs=2)
    check_engine(Simulator(), task=task, data=FederatedData(clients), solver=solver, tolerance=1e-8)
    assert paths_of(Simulator(), task, FederatedData(clients), solver) == ("linear blocks",)


@given(block=st.integers(1, 6), sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6), batch=st.integers(1, 4))
def test_the_size_of_a_block_changes_nothing(block, sizes, batch):
    task, data = Task.of(eq.models.Softmax(4, 3).double()), FederatedData(make_clients(sizes))
    one, solver = job(task, 6), eq.solvers.SGD(lr=0.3, batch_size=batch, epochs=2)
    before = linear._BLOCK_BYTES
    try:
        found = []
        for size in (block, 100):
            linear._BLOCK_BYTES = size * 3 * 16 * 8
            found.append(by_blocks(task, data)([one], solver)[0])
    finally:
        linear._BLOCK_BYTES = before
    torch.testing.assert_close(found[0].update, found[1].update, rtol=1e-12, atol=1e-13)
