"""Who comes first, and who is inside a mass: ties go by key or are shared, so that the order of clients does not matter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import mass_slack


def rounding(dtype: torch.dtype) -> float:
    """By which share of its size a number of this type may be off, after the few sums that engines make in their own order."""
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float64).eps)


def levels(scores: Tensor, slack: Tensor) -> Tensor:
    """The level of each score (K,), from 0 for the smallest, int64 on the CPU.

    Scores have one level if rounding may tell them apart, by `slack` (K,) each.
    """
    ordered, order = scores.double().cpu().sort()
    own = slack.double().cpu()[order].masked_fill(~torch.isfinite(ordered), 0.0)
    apart = ordered - own > (ordered + own).roll(1)
    apart[:1] = False
    return torch.empty_like(order).scatter_(0, order, apart.cumsum(0))


def ranked(scores: Tensor, keys: Tensor, slack: Tensor) -> Tensor:
    """Places (K,) by rising score, those of one level by rising key: the same clients whatever their order is.

    >>> ranked(torch.tensor([2.0, 1.0, 2.1]), torch.tensor([9, 8, 7]), torch.full((3,), 0.1)).tolist()
    [1, 2, 0]
    """
    return torch.from_numpy(np.lexsort((keys.cpu().numpy(), levels(scores, slack).numpy())))


def nearest_shares(distances: Tensor, weights: Tensor, mass: float, slack: Tensor) -> Tensor:
    """The part of each weight (…, K) that belongs to the nearest values up to a total weight of `mass`, (…, K) float64.

    Values are taken by rising distance (…, K). Those at the border count with one common fraction of their weights, so that
    the order of clients does not matter; rounding may tell equal distances apart, by `slack` (…, K) each.
    """
    least, weights = mass - mass_slack(weights.dtype, weights.shape[-1]), weights.double()
    ordered, order = distances.sort(dim=-1)
    taken = weights.expand_as(distances).gather(-1, order).cumsum(-1)
    place = (taken < least).sum(-1, keepdim=True).clamp(max=distances.shape[-1] - 1)
    border = ordered.gather(-1, place)
    slack = slack + slack.gather(-1, order.gather(-1, place))
    inside = torch.where(distances < border - slack, weights, 0.0)
    edge = torch.where((distances == border) | ((distances - border).abs() <= slack), weights, 0.0)  # both may be infinite
    rest = (mass - inside.sum(-1, keepdim=True)).clamp(min=0.0)
    return inside + edge * (rest / edge.sum(-1, keepdim=True)).clamp(max=1.0)
