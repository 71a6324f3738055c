"""Medians and trimmed means of every coordinate, some coordinates at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import mass_slack

_BLOCK = 2**17  # numbers looked at together on a CPU: about a megabyte with what is made of them, which a cache holds
_DEVICE_BLOCK = 2**24  # on a GPU, where starting work on a small block takes longer than the work
_LEFT_OVER = 1e-9  # of the weight


def column_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some coordinates at a time, and their values with a row per coordinate (B, K)."""
    width = max(1, (_BLOCK if updates.device.type == "cpu" else _DEVICE_BLOCK) // max(1, len(updates)))
    for start in range(0, updates.shape[1], width):
        columns = slice(start, start + width)
        yield columns, updates[:, columns].t().contiguous()


def sorted_rows(rows: Tensor) -> Tensor:
    """Rows (B, K), each in rising order. NumPy's sort is an order of magnitude faster than torch's on a CPU."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.sort(dim=1).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=1))


def sorted_with_weights(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, K), each in rising order, and the weights (B, K) of the clients that the values are from.

    On a CPU a float32 and its client become one integer, in the order of the floats: sorting those is many times faster
    than finding an order and gathering by it.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or rows.shape[1] > 2**16:
        order = rows.argsort(dim=1)
        return rows.gather(1, order), weights[order]
    bits = rows.numpy().view(np.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats have their bits in falling order; its own inverse
    keys = bits.astype(np.int64)
    keys <<= 16
    keys |= np.arange(rows.shape[1])
    keys.sort(axis=1)
    own = weights.numpy()[keys & 0xFFFF]
    bits = (keys >> 16).astype(np.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return torch.from_numpy(bits.view(np.float32)), torch.from_numpy(own)


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
            ordered, own = sorted_with_weights(rows, weights)
            mass, slack = own.double().cumsum(1), mass_slack(weights.dtype, count)
            first = (mass < 0.5 - slack).sum(1, keepdim=True)  # the first whose mass reaches one half
            second = (mass < 0.5 + slack).sum(1, keepdim=True).clamp(max=count - 1)
            low, high = (ordered.gather(1, place)[:, 0] for place in (first, second))
        median[columns] = torch.where(low == high, low, low / 2 + high / 2)  # halves first: a sum may overflow
    return median


def trimmed_mean(updates: Tensor, weights: Tensor, fraction: float) -> Tensor:
    """The weighted mean of each coordinate without the lowest and the highest `fraction` of the weight, (D,).

    A value on the border of what is cut counts with the part of its weight inside.
    """
    mean = torch.empty_like(updates[0])
    if bool((weights == weights[0]).all()):  # then who is where does not matter
        inside = weight_inside(weights, fraction)
        kept = inside.nonzero().flatten()
        ranks = slice(int(kept[0]), int(kept[-1]) + 1)
        for columns, rows in column_blocks(updates):
            mean[columns] = (sorted_rows(rows)[:, ranks].double() @ inside[ranks] / inside.sum()).to(updates.dtype)
        return mean
    for columns, rows in column_blocks(updates):
        ordered, own = sorted_with_weights(rows, weights)
        inside = weight_inside(own, fraction)
        mean[columns] = (torch.linalg.vecdot(ordered.to(inside.dtype), inside) / inside.sum(1)).to(updates.dtype)
    return mean


def weight_inside(weights: Tensor, fraction: float) -> Tensor:
    """The part of each weight (…, K) that lies between the lowest and the highest `fraction` of all.

    A part below `_LEFT_OVER` is rounding, and none: so the bound holds also for attackers with exactly that fraction.
    """
    # At most half of the mean part inside: something is kept, however little there is.
    left_over = min(_LEFT_OVER + mass_slack(weights.dtype, weights.shape[-1]), (0.5 - fraction) / weights.shape[-1])
    weights = weights.double()
    above = weights.cumsum(-1)
    below = above - weights
    inside = above.clamp_(fraction, 1 - fraction).sub_(below.clamp_(fraction, 1 - fraction))
    return inside.masked_fill_(inside < left_over, 0.0)
