"""The programs of `models.CharGRU` on a GPU: in Triton's interpreter against the loop; visits against the cursor's batches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.core.task import Task
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.cuda.gru_clients import (
    GruClients,
    GruShape,
    Visits,
    example_losses,
    local_updates,
    why_not_gru,
    why_not_on_device,
)
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkWork, Worker, Workplace
from equipoise.engines.simulator.precision import Precision
from equipoise.solvers.batches import BatchCursor
from equipoise.types import Job

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VOCABULARY, HIDDEN, TIMES = 11, 16, 3
TF32 = Precision("tf32")


def model(**options):
    return eq.models.CharGRU(**{"vocabulary": VOCABULARY, "embedding": None, "hidden": HIDDEN, **options})


def roles(sizes=(5, 23, 10, 1, 3), seed=0):
    """Clients of some sizes; the last is a test client."""
    generator, count = torch.Generator().manual_seed(seed), sum(sizes)
    x = torch.randint(0, VOCABULARY, (count, TIMES), generator=generator).to(torch.uint8)
    y = torch.randint(0, VOCABULARY, (count,), generator=generator)
    return eq.data.from_arrays(x.numpy(), y.numpy(), [f"role {i}" for i, size in enumerate(sizes) for _ in range(size)])


def cohort_of(data):
    count = len(data.train)
    return eq.sampling.Full()(3, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=1, seed=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
def test_visits_are_the_batches_of_the_cursor(sizes, batch, epochs, seed):
    sizes = torch.tensor(sorted(sizes, reverse=True))
    steps = epochs * (-(-sizes // batch))
    keys = torch.randint(0, 2**62, (len(sizes),), generator=torch.Generator().manual_seed(seed))
    cursor = BatchCursor(keys, sizes, batch, steps)
    first = sizes.cumsum(0) - sizes
    visits = Visits.of(cursor, first)
    for step, working in enumerate(cursor.active):
        places, shares = cursor.batch(step, torch.float64)
        for client in range(working):
            size = int(sizes[client])
            epoch, number = divmod(step, -(-size // batch))
            begin = int(visits.begins[client]) + epoch * size + number * batch
            count = min(batch, size - number * batch)
            assert visits.rows[begin : begin + count].tolist() == (places[client, :count] + first[client]).tolist()
            assert int((shares[client] > 0).sum()) == count


def test_models_are_turned_and_turned_back():
    shape, task = GruShape(VOCABULARY, 4, HIDDEN), Task.of(model(classes=4))
    assert GruShape.of(task) == shape
    models = torch.stack([task.read_model(), 2 * task.read_model()])
    turned = shape.turned(models)
    matrix = task.layout.unflatten(models)["recurrent.weight_ih_l0"]
    assert torch.equal(turned[:, : matrix[0].numel()].view(2, VOCABULARY, 3 * HIDDEN), matrix.transpose(1, 2))
    assert torch.equal(turned[:, matrix[0].numel() :], models[:, matrix[0].numel() :])
    assert torch.equal(shape.turned_back(turned), models)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (eq.models.CharLSTM(vocabulary=5, hidden=16), "CharLSTM is not models.CharGRU"),
        (model(embedding=4), "an embedding, padding or several layers"),
        (model(layers=2), "an embedding, padding or several layers"),
        (model(padding=0), "an embedding, padding or several layers"),
        (model(hidden=24), "24 hidden units"),
        (model(vocabulary=129), "more than 128"),
        (model().double(), "float32"),
    ],
)
def test_other_models_go_other_ways(module, reason):
    assert reason in str(why_not_gru(Task.of(module)))


def test_changed_models_go_other_ways():
    frozen, hooked = model(), model()
    frozen.readout.bias.requires_grad_(False)
    hooked.readout.register_forward_hook(lambda *given: None)
    for changed in (frozen, hooked):
        assert "changed, have hooks, or are frozen" in str(why_not_gru(Task.of(changed)))
    assert why_not_gru(Task.of(model())) is None


def test_precision_device_and_rules_decide():
    data, task = roles(), Task.of(model())
    assert 'precision="tf32"' in str(why_not_on_device(task, data.train, Precision("float32")))
    assert "CUDA" in str(why_not_on_device(task, data.train, TF32))
    path = GruClients(Workplace(task, data, data.train, TF32))
    path.obstacle = None

    def why_not(pull="none", **options):
        solver = eq.solvers.SGD(lr=0.1, **options)
        return path.supports_rule(LocalRule.of(solver, 0.1, pull=pull))

    assert why_not(batch_size=16) is None
    assert why_not(batch_size=32, prox=0.1, weight_decay=0.1) is None
    assert "more than 32" in why_not(batch_size=33)
    assert "momentum" in why_not(batch_size=16, momentum=0.9)
    assert "pulled" in why_not(batch_size=16, pull="one number per client")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="it starts the tests below")
def test_programs_by_the_interpreter():
    """Programs are imported after TRITON_INTERPRET is set, so in a process of their own."""
    command = [sys.executable, "-m", "pytest", __file__, "-k", "agree"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout, run.stdout


@pytest.mark.skipif(not INTERPRETED, reason="test_programs_by_the_interpreter runs it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("pull", [{}, {"prox": 0.3, "weight_decay": 0.05}])
def test_updates_agree_with_the_loop(pull):
    data, solver = roles(), eq.solvers.SGD(lr=0.5, batch_size=9, epochs=2, **pull)
    exact, task, cohort = Task.of(model().double()), Task.of(model()), cohort_of(data)
    wanted = eq.engines.Loop().start(exact, data).updates(exact.read_model(), cohort, solver)
    worker, rule = Worker(Workplace(task, data, data.train)), LocalRule.of(solver, solver.learning_rate(3))
    queue = ClientQueue.of([Job(task.read_model(), cohort, cohort.weights)], rule, data.train)
    updates, seen = local_updates(ChunkWork(worker, queue, rule, worker.space), data.train, GruShape.of(task))
    for place, update, loss in zip(queue.places.tolist(), updates.double(), seen / queue.steps, strict=True):
        difference = (update - wanted.update[place]).norm() / wanted.update[place].norm()
        assert difference < 1e-3  # factors have 10 bits
        assert float(loss) == pytest.approx(float(wanted.losses[place]), rel=1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="test_programs_by_the_interpreter runs it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_losses_agree_with_the_model():
    data, task = roles(), Task.of(model())
    models = torch.stack([task.read_model(), 2 * task.read_model()])
    rows = torch.cat([torch.arange(0, 20), torch.arange(10, 33)])
    found = example_losses(models, data.train, rows, [20, 23], GruShape.of(task))
    x, y = data.train.x.long(), data.train.y
    wanted = torch.cat([task.losses(models[0], x[:20], y[:20]), task.losses(models[1], x[10:33], y[10:33])])
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    strange = data.train.x.clone()
    strange[0, 1] = VOCABULARY  # outside the vocabulary
    outside = example_losses(models[:1], eq.data.ClientSet.trusted(**{**vars(data.train), "x": strange}), rows[:20], [20],
                             GruShape.of(task))  # fmt: skip
    assert torch.isnan(outside).tolist() == [True] + [False] * 19
