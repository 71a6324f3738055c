"""Who comes first, and who is inside a mass: ties go by key or are shared, so that the order of clients does not matter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import mass_slack

_TIE = 1e-6  # scores that differ by less, relatively, are equal: updates and losses are rounded to float32


def levels(scores: Tensor, slack: Tensor | float = 0.0) -> Tensor:
    """The level of each score (K,), from 0 for the smallest; scores that rounding tells apart have one level, int64 on the CPU.

    That is a relative difference, or one of `slack`, a number or the rounding of each score (K,).
    """
    ordered, order = scores.double().cpu().sort()
    slack = torch.as_tensor(slack, dtype=torch.float64).cpu().expand(len(scores))[order]
    apart = ordered.diff(prepend=ordered[:1]) > (_TIE * ordered.abs() + slack).roll(1)  # by the rounding of the smaller one
    return torch.empty_like(order).scatter_(0, order, apart.cumsum(0))


def ranked(scores: Tensor, keys: Tensor, slack: Tensor | float = 0.0) -> Tensor:
    """Places (K,) by rising score, those of one level by rising key: the same clients whatever their order is.

    >>> ranked(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([9, 8, 7])).tolist()
    [1, 2, 0]
    """
    return torch.from_numpy(np.lexsort((keys.cpu().numpy(), levels(scores, slack).numpy())))


def nearest_shares(distances: Tensor, weights: Tensor, mass: float, tie: Tensor | float = 0.0) -> Tensor:
    """The part of each weight (…, K) that belongs to the nearest values up to a total weight of `mass`, (…, K) float64.

    Values are taken by rising distance (…, K). Those at the border count with one common fraction of their weights, so that
    the order of clients does not matter; distances that differ by at most `tie` are equal.
    """
    slack, weights = mass_slack(weights.dtype, weights.shape[-1]), weights.double()
    ordered, order = distances.sort(dim=-1)
    taken = weights.expand_as(distances).gather(-1, order).cumsum(-1)
    place = (taken < mass - slack).sum(-1, keepdim=True).clamp(max=distances.shape[-1] - 1)
    border = ordered.gather(-1, place)
    inside = torch.where(distances < border - tie, weights, 0.0)
    edge = torch.where((distances - border).abs() <= tie, weights, 0.0)
    edge = torch.where(distances == border, weights, edge)  # infinite distances, too
    rest = (mass - inside.sum(-1, keepdim=True)).clamp(min=0.0)
    return inside + edge * (rest / edge.sum(-1, keepdim=True)).clamp(max=1.0)
