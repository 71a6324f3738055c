"""Aggregators around an aggregator: each update is first mixed with others, which takes the edge off heterogeneous clients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.aggregators.by_coordinate import column_blocks
from equipoise.aggregators.order import nearest_shares
from equipoise.aggregators.robust import Counted, counted, pairs
from equipoise.core.abilities import is_part, read
from equipoise.core.rng import random_bits
from equipoise.errors import InvalidParameter, require_integer, require_kind, require_number
from equipoise.types import Aggregator, AggregatorTraits


def mixed_with_nearest(updates: Tensor, weights: Tensor, share: float) -> Tensor:
    """y_k, the weighted mean of the updates nearest u_k (itself first) up to a weight of 1 − share: (K, D)."""
    squares, slack = pairs(updates)
    squares.fill_diagonal_(-math.inf)  # itself first
    return means_by(nearest_shares(squares, weights, 1.0 - share, slack), updates)


def means_by(shares: Tensor, updates: Tensor) -> Tensor:
    """The means of updates (K, D) under each row of shares (M, K), (M, D).

    Sums are in float64, some coordinates at a time: means that are equal come out equal, whatever the order of clients.
    """
    means, shares = updates.new_empty(len(shares), updates.shape[1]), shares.double() / shares.sum(1, keepdim=True)
    for columns, rows in column_blocks(updates):
        means[:, columns] = (shares @ rows.double().t()).to(updates.dtype)
    return means


@dataclass(frozen=True)
class _Wrapper(ABC):
    """An aggregator of what is made of the finite updates."""

    aggregator: Aggregator  # what combines the mixed updates

    linear: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True  # for buckets, and for the aggregator inside

    def __post_init__(self) -> None:
        require_kind("aggregator", "aggregator", self.aggregator)
        if not is_part(self.aggregator, "__call__", "linear"):
            raise InvalidParameter("aggregator", "must be an aggregator", self.aggregator, "E.g. aggregators.Median().")

    @property
    def needs_losses(self) -> bool:
        """Whether the aggregator inside uses the losses."""
        return read(AggregatorTraits, self.aggregator).needs_losses

    @property
    def keeps_total(self) -> bool:
        """Whether the aggregator inside remembers the total of the round before."""
        return read(AggregatorTraits, self.aggregator).keeps_total

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The total (D,) of what is made of the updates; zeros if no update counts."""
        given = counted(updates, weights, losses, keys)
        if len(given.rows) == 0:
            return updates.new_zeros(updates.shape[1]), state
        mixed = self._mixed(given)
        more = {"keys": mixed.streams} if read(AggregatorTraits, self.aggregator).needs_keys else {}
        return self.aggregator(mixed.rows, mixed.weights, losses=mixed.losses, state=state, **more)

    @abstractmethod
    def _mixed(self, given: Counted) -> Counted:
        """What the aggregator inside gets in the place of one or more updates."""


@dataclass(frozen=True)
class NNM(_Wrapper):
    """Nearest-neighbour mixing: every update becomes the mean of its nearest ones, then `aggregator` combines them.

    y_k is the weighted mean of the updates nearest u_k, itself first, up to a weight of 1 − `share`. While attackers hold at
    most `share` < ½ of the weight, every honest y_k stays within one honest diameter of u_k. With `share` 0 every y_k is the
    weighted mean.

    Source: Allouah et al. 2023 (arXiv 2302.01772); weights are ours.

    >>> from equipoise.aggregators import Median
    >>> updates = torch.tensor([[1.0], [2.0], [3.0], [100.0]])  # means of the nearest three: 2, 2, 2 and 35
    >>> NNM(Median(), share=0.25)(updates, torch.full((4,), 0.25))[0]
    tensor([2.])
    """

    aggregator: Aggregator  # what combines the mixed updates
    share: float = 0.2  # the weight of attackers, in [0, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("share", self.share, "[0, 0.5)", "It is the weight of attackers.")

    def _mixed(self, given: Counted) -> Counted:
        return given._replace(rows=mixed_with_nearest(given.rows, given.weights, self.share), streams=given.keys)


@dataclass(frozen=True)
class Bucketing(_Wrapper):
    """The updates of random buckets of `size` clients are averaged, then `aggregator` combines the means.

    A bucket's mean is weighted, and its weight is the sum of its clients' weights. Buckets are drawn anew in every round. With
    equal weights a median inside bears attackers below 1/(2·size) of the clients; Krum inside counts buckets as clients. With
    `size` 1 nothing changes; with one bucket the total is the weighted mean.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365); weights are ours.

    >>> from equipoise.aggregators import Median
    >>> updates, weights = torch.tensor([[1.0], [2.0], [6.0]]), torch.full((3,), 1 / 3)
    >>> [Bucketing(Median(), size=size)(updates, weights)[0] for size in (1, 3)]  # the median, and the mean
    [tensor([2.]), tensor([3.])]
    """

    aggregator: Aggregator  # what combines the means of the buckets
    size: int = 2  # clients in a bucket

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("size", self.size, 1)

    def _mixed(self, given: Counted) -> Counted:
        order = random_bits(given.keys, 0, 1)[:, 0].argsort(stable=True)
        member = torch.nn.functional.one_hot(order.argsort() // self.size).t().to(given.weights)
        shares, rows, losses = member * given.weights, given.rows, given.losses  # (buckets, K)
        if losses is not None:
            losses = means_by(shares, losses.double().to(rows.device).unsqueeze(1))[:, 0]
        first = given.keys[order][:: self.size]
        return given._replace(rows=means_by(shares, rows), weights=shares.sum(1), losses=losses, streams=first)
