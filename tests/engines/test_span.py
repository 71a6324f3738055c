"""Linear models in the span of their clients' examples: the same work as with weights."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from taken import everyone, paths_of

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.linear_span import ExampleSpan, SpanUpdates
from equipoise.engines.simulator.workers import threads
from equipoise.testing import check_engine
from made_clients import make_clients

MODELS = {
    "softmax": lambda: eq.models.Softmax(4, 3),
    "no bias": lambda: eq.models.Softmax(4, 3, bias=False),
    "one score": lambda: eq.models.LinearRegression(4),
}


@dataclass(frozen=True)
class InSpan:
    """The simulator, told to take this path wherever it can do the work, not only where it is the faster one."""

    chunk: int = 10

    def start(self, task, data):
        engine = Simulator().start(task, data)
        engine.use(Choice(self.chunk, 1, path=ExampleSpan.name))
        return engine


@pytest.mark.parametrize("model", MODELS)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch=st.one_of(st.none(), st.integers(1, 8)),
    epochs=st.integers(0, 3),
    prox=st.sampled_from([0.0, 0.4]),
    decay=st.sampled_from([0.0, 0.2]),
    chunk=st.integers(1, 6),
)
def test_it_agrees_with_the_loop(model, sizes, batch, epochs, prox, decay, chunk):
    task = Task.of(MODELS[model]().double())
    solver = eq.solvers.SGD(lr=0.2, batch_size=batch, epochs=epochs, prox=prox, weight_decay=decay)
    data = FederatedData(make_clients(sizes))
    check_engine(InSpan(chunk), task=task, data=data, solver=solver, tolerance=1e-8)
    assert paths_of(InSpan(chunk), task, data, solver) == ((ExampleSpan.name,) if epochs else ())


def test_sums_need_no_updates_of_single_clients(monkeypatch):
    monkeypatch.setattr(SpanUpdates, "dense", lambda *_: pytest.fail("an update was formed"))
    data = FederatedData(make_clients([5, 9, 12]))
    task = Task.of(eq.models.Softmax(4, 3).double())
    params = torch.randn(task.layout.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cohort, engine = everyone(3), InSpan().start(task, data)
    solver, weights = eq.solvers.SGD(lr=0.3, prox=0.1), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    fast = engine.summed_update(params, cohort, solver, weights, WeightedMean())
    assert engine.paths_taken == (ExampleSpan.name,)
    slow = Loop().start(task, data).summed_update(params, cohort, solver, weights, WeightedMean())
    torch.testing.assert_close(fast.update, slow.update, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.sq_norms, slow.sq_norms, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("epochs", "examples", "path"), [(1, 100, "linear blocks"), (5, 100, "example span"), (1, 10, "example span")]
)
def test_it_is_taken_where_it_is_faster(epochs, examples, path):
    """Several passes, or few examples: measured on a CPU with one thread."""
    data = FederatedData(make_clients([examples] * 3, features=20, classes=40))
    task = Task.of(eq.models.Softmax(20, 40))
    engine, cohort = Simulator(chunk_size=3, workers=1).start(task, data), everyone(3)
    solver = eq.solvers.SGD(lr=0.1, batch_size=10, epochs=epochs)
    with threads(1):
        engine.summed_update(torch.zeros(task.layout.dimension), cohort, solver, cohort.weights, WeightedMean())
        assert engine.paths_taken == (path,)
        assert f"{path}  " in engine.explain(eq.Algorithm(solver=solver))
