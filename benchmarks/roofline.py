"""A floor under the time of a round: counted FLOPs and bytes, and the rates at which a machine multiplies and copies.

A round cannot be faster than max(FLOPs / product rate, bytes / copy rate); its share of the roofline is that floor over the
measured time. What is counted:

- FLOPs: the matrix products and convolutions of forward and backward pass, two per multiply-add, for each example once. Biases,
  activations, losses, sampling and the step itself are not counted: they are of lower order. A product that need not be made is
  not counted either (the gradient of the inputs; a one-hot input, which is a lookup; the product with the state h_0 = 0).
- Bytes: each example of the round read once in its stored type, the shared parameters read once, the summed update written
  once. If a client's parameters fit into memory that is private to one core (a CPU core's L2 cache, a GPU multiprocessor's
  shared memory), its local steps are taken to stay there and cost nothing; else every step reads and writes them once.
- Rates: the best of several runs of a large product at the precision and the number of threads of the row, and of a copy
  of a large tensor (bytes read plus bytes written). Both are measured on the same machine, before the rounds.

The last-level cache of a CPU, or the L2 of a GPU, may hold many clients' parameters: where they do not fit into a core's own
memory the counted bytes are therefore an estimate and no strict bound.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equipoise as eq
from equipoise.models.linear import LinearModel

FLOAT_BYTES = 4
DEFAULT_CORE_BYTES = 2**20  # where the machine does not say how large a core's own cache is


@dataclass(frozen=True)
class Demand:
    """What a model asks of a machine, for one example of one local epoch."""

    flops_per_example: int
    bytes_per_example: int
    parameters: int

    def flops(self, examples: float) -> float:
        return self.flops_per_example * examples

    def bytes_moved(self, examples: float, steps: float, rounds: int, core_bytes: int) -> float:
        """Bytes of `rounds` rounds in which all clients together see so many examples in so many local steps."""
        model = FLOAT_BYTES * self.parameters
        stays = model <= core_bytes
        return self.bytes_per_example * examples + 2 * model * rounds + (0 if stays else 2 * model * steps)


@dataclass(frozen=True)
class Rates:
    """What a machine does per second: FLOPs of a large product, bytes of a large copy; and a core's own memory in bytes."""

    flops: float
    bytes: float
    core_bytes: int

    def floor(self, demand: Demand, examples: float, steps: float, rounds: int) -> tuple[float, str]:
        """The least seconds of `rounds` rounds, and what sets it: "products" or "memory"."""
        products = demand.flops(examples) / self.flops
        memory = demand.bytes_moved(examples, steps, rounds, self.core_bytes) / self.bytes
        return (products, "products") if products >= memory else (memory, "memory")


def flops_per_example(model: nn.Module, length: int = 1) -> int:
    """FLOPs of forward and backward pass for one example; `length` is that of a sequence."""
    if isinstance(model, LinearModel):
        return linear_flops(model)
    if isinstance(model, eq.models.ConvNet):
        return convnet_flops(model.readout.out_features)
    if isinstance(model, eq.models.CharGRU | eq.models.CharLSTM | eq.models.EmbeddingLSTM):
        return recurrent_flops(model, length)
    raise TypeError(f"no FLOPs are known for a {type(model).__name__}: write its formula in benchmarks/roofline.py")


def linear_flops(model: LinearModel) -> int:
    """z = W x and ∂W = δ xᵀ for W (C, F): 2·(2CF). The inputs need no gradient."""
    return 4 * model.weight.numel()


def convnet_flops(classes: int) -> int:
    """The ConvNet of equipoise.models. A convolution costs 2 · pixels out · channels out · channels in · 25.

    conv1: 2·24²·32·1·25, twice (forward, weights); conv2: 2·8²·64·32·25, three times (forward, weights, inputs); the linear
    layer: 2·1024·C, three times.
    """
    first, second, readout = 2 * 24**2 * 32 * 25, 2 * 8**2 * 64 * 32 * 25, 2 * 1024 * classes
    return 2 * first + 3 * second + 3 * readout


def recurrent_flops(model: eq.models.CharGRU | eq.models.CharLSTM | eq.models.EmbeddingLSTM, length: int) -> int:
    """A recurrent network with G gates of H units on T steps (G = 3 for a GRU, 4 for an LSTM), C classes.

    Each layer: the recurrent product 2·GH·H three times (forward, weights, state) in T − 1 steps, for h_0 = 0; the input
    product 2·GH·E in T steps: three times, but twice for constant word vectors, and never for one-hot characters. Once for
    all: the linear layer 2·HC, three times.
    """
    recurrent = model.recurrent
    rows, hidden = recurrent.cell.gates * recurrent.hidden, recurrent.hidden
    one_hot = getattr(model, "embedding", None) is None and isinstance(model, eq.models.CharGRU | eq.models.CharLSTM)
    entry = 0 if one_hot else 2 if isinstance(model, eq.models.EmbeddingLSTM) else 3
    flops = entry * length * 2 * rows * recurrent.inputs + 3 * 2 * hidden * model.readout.out_features
    for layer in range(recurrent.layers):
        flops += 3 * (length - 1) * 2 * rows * hidden
        flops += 0 if layer == 0 else 3 * length * 2 * rows * hidden
    return flops


def demand_of(model: nn.Module, clients: eq.ClientSet) -> Demand:
    """The demand of a model on the examples of a client set."""
    shape = clients.x.shape[1:]
    flops = flops_per_example(model, shape[0] if len(shape) else 1)
    stored = sum(values[0].numel() * values.element_size() for values in (clients.x, clients.y))
    return Demand(flops, stored, sum(p.numel() for p in model.parameters() if p.requires_grad))


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The least-squares slope of log time over log size: time grows as size^slope."""
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(t) for t in times]).slope


def measured_rates(device: str, precision: str | None = None, *, quick: bool = False) -> Rates:
    """The rates of this machine at torch's present number of threads; a precision is "float32", "tf32" or "bf16"."""
    return Rates(product_rate(device, precision, quick=quick), copy_rate(device, quick=quick), core_memory(device))


def product_rate(device: str, precision: str | None, *, quick: bool = False) -> float:
    """FLOPs per second of a large square product of random matrices."""
    size = (512 if quick else 2048) if device == "cpu" else (2048 if quick else 8192)
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if precision == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
    out = torch.empty_like(left)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * size**3 / best_time(lambda: torch.mm(left, right, out=out), device)
    finally:
        torch.set_float32_matmul_precision(before)


def copy_rate(device: str, *, quick: bool = False) -> float:
    """Bytes read plus bytes written per second by a copy of a tensor that no cache holds."""
    numbers = 2**23 if quick else 2**27 if device == "cpu" else 2**30
    source = torch.ones(numbers, device=device)  # zeros might be pages that nobody has written yet
    target = torch.ones_like(source)
    return 2 * source.nbytes / best_time(lambda: target.copy_(source), device)


def best_time(work: Callable[[], Any], device: str, repeats: int = 8) -> float:
    """The shortest time of one call: what the machine can do when nothing disturbs it."""
    inner = 1 if device == "cpu" else 5  # launches are asynchronous: several between two waits
    times = []
    for turn in range(repeats + 2):
        wait(device)
        began = time.perf_counter()
        for _ in range(inner):
            work()
        wait(device)
        if turn > 1:
            times.append((time.perf_counter() - began) / inner)
    return min(times)


def wait(device: str) -> None:
    """Until a GPU has done what it was given; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def core_memory(device: str) -> int:
    """Bytes of the memory that one core has for itself: a CPU core's L2 cache, a GPU multiprocessor's shared memory."""
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        return int(getattr(properties, "shared_memory_per_block_optin", DEFAULT_CORE_BYTES // 8))
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
    except OSError:
        return DEFAULT_CORE_BYTES
    return int(text.removesuffix("K")) * 1024 if text.endswith("K") else DEFAULT_CORE_BYTES
