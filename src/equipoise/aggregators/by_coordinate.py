"""Medians and trimmed means of every coordinate, some coordinates at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_BLOCK = 2**19  # numbers looked at together


def column_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some coordinates at a time, and their values with a row per coordinate (B, K): a few megabytes, which a cache holds."""
    width = max(1, _BLOCK // max(1, len(updates)))
    for start in range(0, updates.shape[1], width):
        columns = slice(start, start + width)
        yield columns, updates[:, columns].t().contiguous()


def sorted_rows(rows: Tensor) -> Tensor:
    """Rows (B, K), each in rising order. NumPy's sort is an order of magnitude faster than torch's on a CPU."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.sort(dim=1).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=1))


def order_of_rows(rows: Tensor) -> Tensor:
    """The places (B, K) of each row's values in rising order."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.argsort(dim=1)
    return torch.from_numpy(np.argsort(rows.numpy(), axis=1))


def coordinate_median(updates: Tensor, weights: Tensor) -> Tensor:
    """The weighted median of each coordinate, (D,): half of the weight is at or below it, half at or above.

    Where exactly half of the weight is below, the mean of the two middle values. With equal weights the ordinary median.
    """
    count, median = len(updates), torch.empty_like(updates[0])
    equal = bool((weights == weights[0]).all())
    for columns, rows in column_blocks(updates):
        if equal:
            ordered = sorted_rows(rows)
            low, high = ordered[:, (count - 1) // 2], ordered[:, count // 2]
        else:
            order = order_of_rows(rows)
            mass = weights[order].cumsum(1)
            slack = 1e-12
            first = (mass < 0.5 - slack).sum(1, keepdim=True)  # the first whose mass reaches one half
            second = (mass < 0.5 + slack).sum(1, keepdim=True).clamp(max=count - 1)
            low, high = (rows.gather(1, order.gather(1, place))[:, 0] for place in (first, second))
        median[columns] = torch.where(low == high, low, low / 2 + high / 2)  # halves first: a sum may overflow
    return median


def trimmed_mean(updates: Tensor, weights: Tensor, fraction: float) -> Tensor:
    """The weighted mean of each coordinate without the lowest and the highest `fraction` of the weight, (D,).

    A value on the border of what is cut counts with the part of its weight inside.
    """
    mean = torch.empty_like(updates[0])
    equal = bool((weights == weights[0]).all())
    for columns, rows in column_blocks(updates):
        if equal:  # then who is where does not matter
            ordered, own = sorted_rows(rows), weights.unsqueeze(0)
        else:
            order = order_of_rows(rows)
            ordered, own = rows.gather(1, order), weights[order]
        above = own.cumsum(1)
        below = above - own
        inside = above.clamp_(fraction, 1 - fraction).sub_(below.clamp_(fraction, 1 - fraction))
        mean[columns] = ((ordered * inside).sum(1) / inside.sum(1)).to(updates.dtype)
    return mean
