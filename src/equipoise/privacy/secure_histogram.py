"""The quantile of the clients' losses from an exact histogram, which secure sums find without showing anybody a single loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, is_integer, require, require_number
from equipoise.privacy.private_quantile import LARGEST_BINS, bin_edges

_SLACK = 1e-9  # of θm, which has rounding errors


@dataclass(frozen=True)
class SecureHistogram:
    """The quantile of the cohort's losses, rounded down to one of `bins` equal bins of [0, `bound`], from counts alone.

    Each client counts itself in the bin of its loss (losses above `bound` count as `bound`), and a secure sum adds the counts
    up. The lower edge of the bin that holds the quantile is released: clients at or above it are kept. That is the tail of
    `Exact()`, and with it all further clients of that bin.

    This is NOT differential privacy. The server learns how many clients have a loss in each bin: the losses of the cohort
    to the width of a bin, without names. Two cohorts that differ in one client show that client's bin. The weights of
    clients must be equal, also in the sum of updates. Otherwise the total weight of the tail would reveal which clients are
    in it.

    Source: ours; the bins are those of Pillutla et al. 2023, Algorithm 2.

    >>> source = SecureHistogram(bound=1.0, bins=4)  # the median counts as 0.3, in the bin from 0.25
    >>> float(source(torch.tensor([0.1, 0.3, 0.6, 0.9]), torch.full((4,), 0.25), 0.5))
    0.25
    """

    reads_losses: ClassVar[bool] = False

    bound: float  # losses above it count as equal to it
    bins: int = 64  # how many bins divide [0, bound]

    def __post_init__(self) -> None:
        require_number("bound", self.bound, "(0, ∞)", "Losses above it count as equal: a high typical loss.")
        good = is_integer(self.bins) and 2 <= self.bins <= LARGEST_BINS
        rule, fix = f"must be a whole number from 2 to {LARGEST_BINS}", "More bins tell more of the losses."
        require(good, "bins", rule, self.bins, fix)

    @property
    def histogram(self) -> SecureHistogram:
        """What counts the losses, as protections ask for it."""
        return self

    def rows(self, losses: Tensor) -> Tensor:
        """What each client counts: 1 in the bin of its loss, (K, bins) int64. A loss that is no number is in no bin.

        `losses` (K,) are the clients' losses.
        """
        edges = bin_edges(self.bound, self.bins)[1:-1].to(losses.device)
        counted = ~losses.isnan()
        place = torch.bucketize(torch.where(counted, losses.double(), 0.0).clamp(0.0, self.bound), edges, right=True)
        return torch.nn.functional.one_hot(place, self.bins) * counted.unsqueeze(1)

    def edge(self, counts: Tensor, tail: float) -> Tensor:
        """The lower edge of the bin that holds the (1 − `tail`)-quantile, () float64, from `counts` (bins,)."""
        above = counts.sum() - counts.cumsum(0)
        first = int((above <= (tail + _SLACK) * counts.sum()).nonzero()[0])
        return bin_edges(self.bound, self.bins)[first]

    def kept(self, counts: Tensor, edge: Tensor | float) -> int:
        """How many clients lie at or above `edge`, by `counts` (bins,).

        >>> SecureHistogram(bound=1.0, bins=4).kept(torch.tensor([1, 1, 1, 1]), 0.25)
        3
        """
        first = int((bin_edges(self.bound, self.bins)[:-1] >= float(edge)).nonzero()[0])
        return int(counts[first:].sum())

    def mean(self, counts: Tensor) -> float:
        """The mean loss as far as `counts` (bins,) tell it: each client at the middle of its bin.

        >>> SecureHistogram(bound=1.0, bins=4).mean(torch.tensor([1, 1, 0, 0]))  # (0.125 + 0.375)/2
        0.25
        """
        edges = bin_edges(self.bound, self.bins)
        return float(counts.double() @ (edges[1:] + edges[:-1]) / 2 / counts.sum())

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The (1 − tail)-quantile of losses (K,) under equal base weights, rounded down to an edge; weight 0 counts nobody."""
        require_equal_weights(base_weights, "a histogram")
        counts = (self.rows(losses) * (base_weights > 0).unsqueeze(1)).sum(0)
        return self.edge(counts.cpu(), tail).to(losses.device)


def require_equal_weights(base_weights: Tensor, what: str) -> None:
    """Refuse weights (K,) that differ between the clients that count."""
    weights = base_weights[base_weights > 0]
    if len(weights) and bool((weights - weights[0]).abs().max() > 1e-6 * weights[0].abs()):
        rule, fix = f"must be equal within a cohort under {what}", "Use uniform weights: a client counts once."
        raise InvalidParameter("base_weights", rule, (float(weights.min()), float(weights.max())), fix)
