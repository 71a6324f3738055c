"""What arrives from clients: updates as attacks make them, and which of them can be used at all."""

from __future__ import annotations

import torch
from torch import Tensor

ABSURD = 1e9  # an update this many times longer than the model (or than 1) is a fault, not a step


def longest_square(params: Tensor) -> float:
    """The squared length beyond which an update of these parameters is absurd."""
    square = float(torch.dot(params, params))
    if not square < 1e30:  # of large numbers of float32 only float64 knows
        square = float(params.double().square().sum())
    return ABSURD**2 * max(1.0, square)


def usable(sq_norms: Tensor, losses: Tensor, params: Tensor) -> Tensor:
    """Which updates, by squared norm (K,), may be aggregated: finite, of sane length, made at a finite loss (or by no step)."""
    return usable_within(sq_norms, losses, longest_square(params))


def usable_within(sq_norms: Tensor, losses: Tensor, longest: Tensor | float) -> Tensor:
    """The same with the squared length beyond which an update is absurd, or that of each one (K,)."""
    return (sq_norms <= longest) & (torch.isfinite(losses) | (sq_norms == 0))  # NaN compares as False


def marked(sq_norms: Tensor, good: Tensor) -> Tensor:
    """Squared norms with infinity for the updates that cannot be used, so that the round knows them."""
    return torch.where(good, sq_norms, torch.inf)
