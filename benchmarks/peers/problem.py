"""The two workloads that every system runs, in numpy alone: data, initial parameters and the loss that says what was learned.

Sizes are those of `benchmarks/workloads.py`; the worker of Equipoise checks that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Shapes = tuple[tuple[int, ...], ...]

PIXELS, CLASSES, SCALE, LEARNING_RATE = 784, 62, 1 / 255, 0.05


@dataclass(frozen=True)
class Problem:
    title: str
    clients: int
    clients_per_round: int
    examples: int
    batch_size: int
    shapes: Shapes  # of the parameters, in the order and layout of torch
    start_at_zero: bool

    def data(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Pixels (clients, examples, 784) and classes (clients, examples); always the same arrays."""
        return patterned_images(self.clients, self.examples)

    def initial(self) -> list[Array]:
        """Zeros, or U(−1/√fan_in, 1/√fan_in) for weights and their biases alike."""
        if self.start_at_zero:
            return [np.zeros(shape, np.float32) for shape in self.shapes]
        rng, arrays, bound = np.random.default_rng(1), [], 1.0
        for shape in self.shapes:
            if len(shape) > 1:
                bound = float(np.prod(shape[1:])) ** -0.5
            arrays.append(rng.uniform(-bound, bound, shape).astype(np.float32))
        return arrays

    def loss(self, parameters: Sequence[Array], clients: int = 100) -> float:
        """The mean cross-entropy over all examples of the first `clients` clients."""
        x, y = (part[:clients].reshape(-1, *part.shape[2:]) for part in self.data())
        logits = linear_logits if len(self.shapes) == 2 else convnet_logits
        total = 0.0
        for start in range(0, len(x), 100):
            z = logits(parameters, x[start : start + 100].astype(np.float32) * np.float32(SCALE)).astype(np.float64)  # (B, 62)
            z -= z.max(1, keepdims=True)
            total += float((np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), y[start : start + 100]]).sum())
        return total / len(x)

    def cohorts(self, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        """Cohorts without end, each drawn uniformly without replacement, for systems that leave the choice to the user."""
        rng = np.random.default_rng(seed)
        while True:
            yield rng.permutation(self.clients)[: self.clients_per_round]


PROBLEMS = {
    "linear": Problem(
        "linear 784→62, 100 clients per round × 100 examples, batch 10", 1000, 100, 100, 10, ((62, 784), (62,)), True
    ),
    "convnet": Problem(
        "ConvNet, 10 clients per round × 100 examples, batch 16", 200, 10, 100, 16,
        ((32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (62, 1024), (62,)), False,
    ),
}  # fmt: skip


@lru_cache(maxsize=1)
def patterned_images(clients: int, examples: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Each image is the coarse pattern of its class, and noise.

    What is in the images does not change the work; that they can be learned lets the loss tell right work from wrong.
    """
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 2, (CLASSES, 7, 7), dtype=np.uint8)  # in squares of 4 × 4 pixels
    patterns = 192 * coarse.repeat(4, 1).repeat(4, 2).reshape(CLASSES, PIXELS)
    y = rng.integers(0, CLASSES, (clients, examples), dtype=np.int64)
    x = rng.integers(0, 64, (clients, examples, PIXELS), dtype=np.uint8)
    for images, classes in zip(x, y, strict=True):
        images += patterns[classes]
    return x, y


def linear_logits(parameters: Sequence[Array], x: Array) -> Array:
    weight, bias = parameters
    return x @ weight.T + bias


def convnet_logits(parameters: Sequence[Array], x: Array) -> Array:
    first, first_bias, second, second_bias, readout, readout_bias = parameters
    hidden = pooled(convolved(x.reshape(-1, 1, 28, 28), first, first_bias))  # (B, 32, 12, 12)
    hidden = pooled(convolved(hidden, second, second_bias))  # (B, 64, 4, 4)
    return hidden.reshape(len(x), -1) @ readout.T + readout_bias


def convolved(x: Array, weight: Array, bias: Array) -> Array:
    """A convolution without padding: (B, C, H, W) with weights (F, C, k, k) gives (B, F, H − k + 1, W − k + 1)."""
    side = weight.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), axis=(2, 3))  # (B, C, H', W', k, k)
    sums = np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3)))  # (B, H', W', F)
    out: Array = (sums + bias).transpose(0, 3, 1, 2)
    return out


def pooled(x: Array) -> Array:
    """2 × 2 max-pooling and ReLU."""
    b, c, h, w = x.shape
    out: Array = np.maximum(x.reshape(b, c, h // 2, 2, w // 2, 2).max((3, 5)), 0)
    return out


def as_arrays(parameters: Sequence[Any]) -> list[Array]:
    """Tensors of any library as float32 arrays of numpy."""
    return [np.asarray(p, dtype=np.float32) for p in parameters]
