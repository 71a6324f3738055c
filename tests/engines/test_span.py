"""Linear models in the span of their clients' examples: the same work as with weights."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import equipoise as eq
from equipoise.aggregators import WeightedMean
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator import chunks
from equipoise.engines.simulator.linear_blocks import fits_linear_steps
from equipoise.engines.simulator.linear_span import SpanUpdates
from equipoise.testing import check_engine
from made_clients import make_clients

MODELS = {
    "softmax": lambda: eq.models.Softmax(4, 3),
    "no bias": lambda: eq.models.Softmax(4, 3, bias=False),
    "one score": lambda: eq.models.LinearRegression(4),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Take the path wherever it can do the work, not only where it is the faster one."""

    def fits(task, solver, lr, starts, largest, device):
        return starts.pull is None and not starts.each_its_own and fits_linear_steps(task, solver, lr)

    monkeypatch.setattr(chunks, "fits_span_steps", fits)


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
    check_engine(Simulator(chunk_size=chunk), task=task, data=data, solver=solver, tolerance=1e-8)


def test_sums_need_no_updates_of_single_clients(monkeypatch):
    monkeypatch.setattr(SpanUpdates, "dense", lambda *_: pytest.fail("an update was formed"))
    data = FederatedData(make_clients([5, 9, 12]))
    task = Task.of(eq.models.Softmax(4, 3).double())
    params = torch.randn(task.layout.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cohort = eq.sampling.Full()(0, torch.full((3,), 1 / 3, dtype=torch.float64), clients_per_round=3, seed=0)
    solver, weights = eq.solvers.SGD(lr=0.3, prox=0.1), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    fast = Simulator().start(task, data).summed_update(params, cohort, solver, weights, WeightedMean())
    slow = Loop().start(task, data).summed_update(params, cohort, solver, weights, WeightedMean())
    torch.testing.assert_close(fast.update, slow.update, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.sq_norms, slow.sq_norms, rtol=1e-9, atol=1e-12)
