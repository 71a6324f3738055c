"""The counts behind the benchmark's roofline, by hand and against torch's own counter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise import ClientSet, models

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from roofline import Demand, Rates, demand_of, flops_per_example, slope  # noqa: E402
from workloads import grid_workload  # noqa: E402


def counted(model: nn.Module, x: torch.Tensor) -> int:
    """FLOPs of one forward and backward pass by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return counter.get_total_flops()


def test_flops_by_hand():
    assert flops_per_example(models.Softmax(784, 62)) == 194_432  # 4 · 784 · 62
    # 2 · 921,600 (conv1) + 3 · 6,553,600 (conv2) + 3 · 126,976 (readout)
    assert flops_per_example(models.ConvNet(classes=62)) == 21_884_928
    # two steps after h_0 = 0, three products of 6 × 2, two FLOPs each; then three of 2 × 3
    assert flops_per_example(models.CharGRU(vocabulary=3, embedding=None, hidden=2), 3) == 2 * 3 * 24 + 3 * 12
    # inputs: three steps, twice, 8 × 5; states: two steps, three times, 8 × 2; readout: three times, 2 × 2
    assert flops_per_example(models.EmbeddingLSTM(torch.zeros(7, 5), hidden=2), 3) == 3 * 2 * 80 + 2 * 3 * 32 + 3 * 8


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (models.Softmax(20, 5), torch.rand(4, 20)),
        (models.ConvNet(classes=10), torch.rand(4, 784)),
    ],
)
def test_flops_are_those_of_torch(model, x):
    assert 4 * flops_per_example(model, x.shape[1]) == counted(model, x)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (models.CharGRU(vocabulary=9, embedding=None, hidden=6), 18),
        (models.CharGRU(vocabulary=9, embedding=4, hidden=6, layers=2), 18),
        (models.CharLSTM(vocabulary=9, hidden=6, layers=2), 24),
        (models.EmbeddingLSTM(torch.rand(9, 5), hidden=6), 24),
    ],
)
def test_recurrent_flops_are_those_of_torch_less_the_products_with_a_zero_state(model, rows):
    """The model multiplies h_0 = 0 as well, forward and for the weights, in each layer; that need not be done."""
    needless = model.recurrent.layers * 2 * 2 * rows * 6
    assert 4 * (flops_per_example(model, 7) + needless) == counted(model, torch.randint(9, (4, 7)))


def test_unknown_models_are_refused():
    with pytest.raises(TypeError, match="Bilinear"):
        flops_per_example(nn.Bilinear(2, 2, 2))


def test_bytes_count_examples_in_their_stored_type_and_weights_that_do_not_fit():
    clients = ClientSet(torch.zeros(6, 784, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64),
                        torch.tensor([0, 2, 6]), ("a", "b"), scale=1 / 255)  # fmt: skip
    demand = demand_of(models.Softmax(784, 62), clients)
    assert demand.bytes_per_example == 784 + 8
    assert demand.parameters == 785 * 62
    model = 4 * 785 * 62  # bytes
    assert demand.bytes_moved(examples=6, steps=3, rounds=1, core_bytes=model) == 6 * 792 + 2 * model
    assert demand.bytes_moved(examples=6, steps=3, rounds=1, core_bytes=model - 1) == 6 * 792 + 2 * model + 3 * 2 * model


def test_the_floor_is_the_larger_of_products_and_bytes():
    demand = Demand(flops_per_example=100, bytes_per_example=10, parameters=0)
    assert Rates(flops=50.0, bytes=100.0, core_bytes=0).floor(demand, 3, 1, 1) == (6.0, "products")
    assert Rates(flops=1000.0, bytes=2.0, core_bytes=0).floor(demand, 3, 1, 1) == (15.0, "memory")


def test_slopes_are_exponents():
    sizes = [10, 100, 1000]
    assert slope(sizes, [3 * s**1.5 for s in sizes]) == pytest.approx(1.5)
    assert slope(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0.0)


def test_log_normal_sizes_have_the_mean_and_the_bounds_they_claim():
    workload = grid_workload("linear", 10, "log-normal")
    sizes = workload.client_sizes()
    assert torch.equal(sizes, workload.client_sizes())
    assert float(sizes.double().mean()) == pytest.approx(workload.examples, rel=0.03)
    assert float(sizes.double().log().std()) == pytest.approx(1.0, rel=0.05)
    assert int(sizes.min()) >= 2
    assert int(sizes.max()) <= 10 * workload.examples
