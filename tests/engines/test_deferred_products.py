"""Gradients that are products are subtracted from the parameters as they are multiplied: which ones, and that it is right."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.cuda.deferred_products import DeferredProducts, ProductsSeen
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.engine import SimulatorEngine
from made_clients import make_clients


class Tied(nn.Module):
    """One matrix, used twice: its gradient is a sum of products."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Shared(nn.Module):
    """The gradient of a part of the matrix is a product, that of the whole is not."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(7, 4) / 2)

    def forward(self, x):
        return torch.tanh(x @ self.matrix[:4].T) @ self.matrix[4:].T


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


MODELS = {  # how many gradients are products
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), 2),
    "tied": (Tied, 1),
    "two halves": (Shared, 0),
    "weight norm": (normed, 0),
    "one row": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3)), None),
}


@pytest.mark.parametrize(("make", "products"), MODELS.values(), ids=MODELS)
def test_products_that_are_gradients(make, products):
    torch.manual_seed(0)
    data, solver = FederatedData(make_clients([12, 13, 12, 20])), eq.solvers.SGD(lr=0.5, batch_size=4, epochs=2)
    task = Task.of(make().double())
    engine = SimulatorEngine(task, data, torch.device("cpu"), Choice(None, 1))
    graphs = engine.workers.own.path(StepGraphs.name)
    graphs.obstacle = None
    params = task.read_model()
    for index in range(2):
        cohort = eq.sampling.Full()(index, torch.full((4,), 0.25, dtype=torch.float64), clients_per_round=4, seed=2)
        found, wanted = (e.updates(params, cohort, solver) for e in (engine, Loop().start(task, data)))
        torch.testing.assert_close(found.update, wanted.update, rtol=1e-9, atol=1e-12)
        assert engine.paths_taken == ("step graphs",)
    if products is not None:
        assert {len(numbers) for numbers in graphs.buffers.products.values()} == {products}


def products_of(read):
    """The numbers of products that are taken for gradients if `read` sees them."""
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with ProductsSeen() as seen:
        product = torch.bmm(left, right)
        gradient = read(product)
    return seen.gradients({"w": gradient})


def test_a_product_that_something_reads_is_not_left_out():
    assert products_of(lambda product: product.transpose(1, 2)) == {0}
    assert products_of(lambda product: product + 1) == frozenset()
    assert products_of(lambda product: (product.sum(), product)[1]) == frozenset()
    assert products_of(lambda product: product.mul_(2)) == frozenset()


def test_one_product_for_two_parameters_is_not_left_out():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with ProductsSeen() as seen:
        product = torch.bmm(left, right)
    assert seen.gradients({"w": product, "v": product}) == frozenset()


def test_what_was_left_out_is_subtracted():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    start = torch.randn(2, 5, 3)
    for weight in (start.clone(), start.transpose(1, 2).contiguous().transpose(1, 2)):  # another order in memory, and the same
        with DeferredProducts(frozenset([0])) as deferred:
            gradient = torch.bmm(left, right).transpose(1, 2)
        others = deferred.subtract({"w": weight}, {"w": gradient})
        assert others == (["w"] if weight.is_contiguous() else [])
        if others:
            weight -= gradient
        torch.testing.assert_close(weight, start - torch.bmm(left, right).transpose(1, 2))


def test_a_product_that_was_left_out_by_mistake_is_not_ignored():
    with DeferredProducts(frozenset([0])) as deferred:
        torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    with pytest.raises(RuntimeError, match="is not a gradient"):
        deferred.subtract({"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 3)})
