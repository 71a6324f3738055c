"""Shares of the values nearest a point, up to a mass: what MeaMed, nearest-neighbour mixing and Bulyan average over."""

from __future__ import annotations

import torch
from torch import Tensor

_SLACK = 1e-12  # masses this close are equal: weights are rounded


def nearest_shares(distances: Tensor, weights: Tensor, mass: float, tie: Tensor | float = 0.0) -> Tensor:
    """The part of each weight (…, K) that belongs to the nearest values up to a total weight of `mass`, (…, K).

    Values are taken by rising distance (…, K). Those at the border count with one common fraction of their weights, so that
    the order of clients does not matter; distances that differ by at most `tie` are equal.
    """
    ordered, order = distances.sort(dim=-1)
    taken = weights.expand_as(distances).gather(-1, order).cumsum(-1)
    place = (taken < mass - _SLACK).sum(-1, keepdim=True).clamp(max=distances.shape[-1] - 1)
    border = ordered.gather(-1, place)
    inside = torch.where(distances < border - tie, weights, 0.0)
    edge = torch.where((distances - border).abs() <= tie, weights, 0.0)
    edge = torch.where(distances == border, weights, edge)  # infinite distances, too
    rest = (mass - inside.sum(-1, keepdim=True)).clamp(min=0.0)
    return inside + edge * (rest / edge.sum(-1, keepdim=True)).clamp(max=1.0)
