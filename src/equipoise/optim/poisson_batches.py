"""Poisson batches: each example enters each batch by its own coin, which is the sampling that the accountant assumes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import generator
from equipoise.errors import is_integer, require, require_integer, require_number
from equipoise.optim.gradients import check_examples
from equipoise.privacy.random_source import SystemSource, uniforms

Examples = tuple[Tensor, Tensor]


def poisson_rows(examples: int, sample_rate: float, *, seed: int, step: int) -> Tensor:
    """The rows of the batch of one step, each of 0 … examples − 1 with probability `sample_rate`: a function of (seed, step).

    The size is drawn first, binomial, and then that many different rows: the same law as one coin per example.
    """
    source = generator(seed, "poisson batch", step)
    size = int(source.binomial(examples, sample_rate))
    return torch.from_numpy(source.choice(examples, size, replace=False, shuffle=False))


def system_rows(examples: int, sample_rate: float) -> Tensor:
    """The rows of one batch, each of 0 … examples − 1 by a coin of the operating system with probability `sample_rate`."""
    return torch.from_numpy(np.flatnonzero(uniforms(examples, SystemSource()) < sample_rate))


def poisson_batches(
    x: Tensor, y: Tensor, *, sample_rate: float, steps: int, seed: int | None = None, start: int = 0
) -> Iterator[Examples]:
    """`steps` batches of (x (B, …), y (B, …)), from step `start` on; a batch may be empty and its noise must still be released.

    The batch of a step is a function of (seed, step); without a seed the batches are secret and cannot be drawn again.

    `x` (N, …) are the inputs and `y` (N, …) the targets. `sample_rate` is the probability of each example. `seed` is a whole
    number, or None.

    Source: the sampling that differential privacy accounts for (Mironov, Talwar, Zhang 2019).

    >>> x, y = torch.zeros(10, 2), torch.zeros(10)
    >>> [len(rows) for rows, _ in poisson_batches(x, y, sample_rate=1.0, steps=3)]
    [10, 10, 10]
    """
    check_examples(x, y)
    require_number("sample_rate", sample_rate, "(0, 1]")
    require(len(x) > 0, "x", "must hold at least one example", len(x))
    require_integer("steps", steps, 0)
    require_integer("start", start, 0)
    require(seed is None or is_integer(seed), "seed", "must be a whole number, or None for coins that nobody knows", seed)

    def draw() -> Iterator[Examples]:
        for step in range(start, start + steps):
            rows = system_rows(len(x), sample_rate) if seed is None else poisson_rows(len(x), sample_rate, seed=seed, step=step)
            yield x.index_select(0, rows.to(x.device)), y.index_select(0, rows.to(y.device))

    return draw()


def set_aside(x: Tensor, y: Tensor, *, examples: int, seed: int) -> tuple[Examples, Examples]:
    """(public, private): `examples` of them drawn at random become public and leave the private set.

    Public examples get no protection: take examples whose owners agreed to this.

    `x` (N, …) are the inputs, `y` (N, …) the targets, and `seed` decides the draw.

    Source: Li 2023 (thesis), 6.4.1.1, where 1 % of the training set stands for public data.

    >>> public, private = set_aside(torch.arange(5.0), torch.zeros(5), examples=2, seed=0)
    >>> len(public[0]), len(private[0]), float(public[0].sum() + private[0].sum())  # 0 + 1 + 2 + 3 + 4
    (2, 3, 10.0)
    """
    check_examples(x, y)
    require_integer("examples", examples, 1, len(x) - 1)
    require(is_integer(seed), "seed", "must be a whole number", seed)
    order = torch.from_numpy(generator(int(seed), "public examples").permutation(len(x)))
    public, private = order[:examples].sort().values, order[examples:].sort().values
    return (x[public.to(x.device)], y[public.to(y.device)]), (x[private.to(x.device)], y[private.to(y.device)])
