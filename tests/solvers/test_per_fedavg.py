"""Per-FedAvg: numbers by hand on a line, the exact meta-gradient of a softmax model, and batches that come four times."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import equipoise as eq
from equipoise.core import rng
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import InvalidParameter
from equipoise.sampling import Full
from equipoise.solvers import SGD
from equipoise.solvers.batches import BatchCursor, batches_of, client_batches, cursor_of
from equipoise.solvers.per_fedavg import PerFedAvg
from equipoise.testing import check_engine, check_solver
from made_clients import make_clients

ENGINES = pytest.mark.parametrize("engine", [Loop(), Simulator()], ids=["loop", "simulator"])


def on_a_line(*targets):
    """Clients whose loss is the mean of (w − y)²: one example with x = 1 per target."""
    clients = [(f"c{i}", torch.ones(len(y), 1, dtype=torch.float64), torch.tensor(y)) for i, y in enumerate(targets)]
    return FederatedData(ClientSet.pack((name, x, y.double()) for name, x, y in clients))


def everyone(data, seed=0):
    count = len(data.train)
    return Full()(0, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=count, seed=seed)


@ENGINES
def test_meta_steps_by_hand(engine):
    # ∇F(w) = 2(w − ȳ), so that the bracket is 2(1 − 2α)²(w − ȳ) exactly. With α = ¼ and β = ½ a step goes ¼ of the way to ȳ.
    data = on_a_line([4.0], [6.0, 10.0])
    running = engine.start(Task.of(eq.models.LinearRegression(1, bias=False).double()), data)
    start = torch.zeros(1, dtype=torch.float64)
    solver = PerFedAvg(lr=0.5, inner_lr=0.25, delta=0.125, batch_size=None, epochs=1)
    torch.testing.assert_close(running.updates(start, everyone(data), solver).update.flatten().tolist(), [1.0, 2.0])
    twice = PerFedAvg(lr=0.5, inner_lr=0.25, delta=0.125, batch_size=None, steps=2)
    torch.testing.assert_close(running.updates(start, everyone(data), twice).update.flatten().tolist(), [1.75, 3.5])


@ENGINES
def test_the_direction_is_the_gradient_of_the_loss_after_one_inner_step(engine):
    data = FederatedData(make_clients([7, 4], dtype=torch.float64), classes=3)
    task = Task.of(eq.models.Softmax(4, 3).double())
    params = torch.randn(15, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    solver = PerFedAvg(lr=1.0, inner_lr=0.5, delta=1e-4, batch_size=None)
    update = engine.start(task, data).updates(params, everyone(data), solver).update
    for k in range(2):
        x, y = data.train.inputs(data.train.rows(k), torch.float64), data.train.targets(data.train.rows(k))
        leaf = params.clone().requires_grad_()
        (inner,) = torch.autograd.grad(task.losses(leaf, x, y).mean(), leaf, create_graph=True)
        (expected,) = torch.autograd.grad(task.losses(leaf - 0.5 * inner, x, y).mean(), leaf)
        torch.testing.assert_close(-update[k], expected, rtol=1e-6, atol=1e-8)
        adapted = (leaf - 0.5 * inner).detach().requires_grad_()
        (without_curvature,) = torch.autograd.grad(task.losses(adapted, x, y).mean(), adapted)
        assert (without_curvature - expected).norm() > 0.01 * expected.norm()  # the test can tell the two apart


@ENGINES
def test_all_four_gradients_see_the_same_batch(engine):
    # On single examples y every meta-step goes from w to w + ¼(y − w), as above; on mixed batches it would not.
    data = on_a_line([1.0, 5.0, -7.0])
    running = engine.start(Task.of(eq.models.LinearRegression(1, bias=False).double()), data)
    solver = PerFedAvg(lr=0.5, inner_lr=0.25, delta=0.001, batch_size=1, epochs=2)
    cohort = everyone(data, seed=5)
    key = rng.client_keys(rng.stream_key(5, "batches", 0), data.train.keys[0])
    expected = 0.0
    for batch in client_batches(key, 3, 1, 6):
        expected += 0.25 * (float(data.train.y[batch]) - expected)
    assert float(running.updates(torch.zeros(1, dtype=torch.float64), cohort, solver).update) == pytest.approx(
        expected, rel=1e-9
    )


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch=st.one_of(st.none(), st.integers(1, 40)),
    steps=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    repeats=st.integers(1, 4),
)
def test_repeated_batches(sizes, batch, steps, repeats):
    steps = torch.tensor(steps[: len(sizes)])
    order = steps.argsort(descending=True, stable=True)
    steps, sizes = steps[order], torch.tensor(sizes)[order]
    keys = rng.client_keys(rng.stream_key(0, "batches"), torch.arange(len(sizes)))
    cursor = BatchCursor(keys, sizes, batch, steps * repeats, repeats)
    seen = [[] for _ in sizes]
    for step, active in enumerate(cursor.active):
        rows, shares = cursor.batch(step, torch.float64)
        for k in range(active):
            seen[k].append(rows[k][shares[k] > 0].tolist())
    for k, size in enumerate(sizes.tolist()):
        once = [b.tolist() for b in client_batches(keys[k], size, batch, int(steps[k]))]
        expected = [b for b in once for _ in range(repeats)]
        assert seen[k] == expected
        assert [b.tolist() for b in client_batches(keys[k], size, batch, repeats * int(steps[k]), repeats)] == expected


def test_engines_ask_for_four_of_each():
    solver, key = PerFedAvg(batch_size=2), rng.client_keys(rng.stream_key(0, "batches"), torch.tensor(1))
    plain = [b.tolist() for b in batches_of(solver, key, 5, 12)]
    assert plain[0:4] == [plain[0]] * 4
    assert sorted(plain[0] + plain[4] + plain[8]) == [0, 1, 2, 3, 4]
    cursor = cursor_of(solver, key.reshape(1), torch.tensor([5]), torch.tensor([12]))
    assert [cursor.batch(step, torch.float64)[0][0].tolist() for step in range(12)] == plain
    assert cursor_of(SGD(), key.reshape(1), torch.tensor([5]), torch.tensor([1])).repeats == 1


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=7),
    batch=st.sampled_from([None, 1, 3, 10]),
    length=st.sampled_from([{"epochs": 2}, {"steps": 3}, {"epochs": 0}]),
    chunk=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 2**40),
)
def test_simulator_and_loop_agree(sizes, batch, length, chunk, seed):
    data = FederatedData(make_clients(sizes, dtype=torch.float64, seed=seed % 1000), classes=3)
    task = Task.of(eq.models.Softmax(4, 3).double())
    check_engine(Simulator(chunk_size=chunk), task=task, data=data, solver=PerFedAvg(batch_size=batch, **length), seed=seed)


def test_laws_and_lengths():
    check_solver(PerFedAvg())
    assert PerFedAvg(batch_size=10, epochs=2).local_steps(25) == 4 * 6
    assert PerFedAvg(batch_size=10, epochs=2).local_steps(25, 1) == 4 * 3
    assert PerFedAvg(batch_size=None, epochs=2).local_steps(25) == 4 * 2
    assert PerFedAvg(steps=5).local_steps(1000) == 4 * 5
    assert PerFedAvg(steps=5).local_steps(1000, 2) == 4 * 2
    assert PerFedAvg(steps=0).local_steps(1000) == 0


@pytest.mark.parametrize(
    "bad",
    [{"lr": 0}, {"inner_lr": -1}, {"delta": 0.0}, {"delta": float("inf")}, {"batch_size": 0}, {"epochs": -1}, {"steps": 1.5},
     {"steps": 3, "epochs": 2}],
)  # fmt: skip
def test_refusals(bad):
    with pytest.raises(InvalidParameter):
        PerFedAvg(**bad)


def test_a_run_that_serves_adapted_models():
    # Two clients, at 0 and 8: the shared model goes to the middle, and one inner step of ¼ halves the distance to each.
    data = on_a_line([0.0], [8.0])
    inner = SGD(lr=0.25, batch_size=None)
    algorithm = eq.Algorithm(
        solver=PerFedAvg(lr=0.5, inner_lr=0.25, batch_size=None),
        sampler=Full(),
        personal=eq.personal.Finetuning(epochs=1, solver=inner),
    )
    model = eq.models.LinearRegression(1, bias=False).double()
    result = eq.train(model, data, algorithm, rounds=60, seed=0, progress=False)
    assert float(result.params) == pytest.approx(4.0, abs=1e-6)
    assert result.personal.params(["c0", "c1"]).flatten().tolist() == pytest.approx([2.0, 6.0], abs=1e-6)
