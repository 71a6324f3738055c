"""Which client updates can be used: those that are finite, of a sane length, and made at a finite loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from equipoise.types import LocalWork

ABSURD = 1e9  # an update this many times longer than the model (or than 1) is a fault, not a step


def longest_square(params: Tensor) -> float:
    """The squared length beyond which an update of these parameters is absurd."""
    square = float(torch.dot(params, params))
    if not square < 1e30:  # of large numbers of float32 only float64 knows
        square = float(params.double().square().sum())
    return ABSURD**2 * max(1.0, square)


def usable(sq_norms: Tensor, losses: Tensor, longest: Tensor | float) -> Tensor:
    """Which updates, by squared norm (K,), may be aggregated: finite, of sane length, made at a finite loss (or by no step).

    `longest` is the squared length beyond which an update is absurd: of all of them, or of each (K,).
    """
    return (sq_norms <= longest) & (torch.isfinite(losses) | (sq_norms == 0))  # NaN compares as False


def checked_norms(sq_norms: Tensor, losses: Tensor, longest: Tensor | float) -> Tensor:
    """The squared norms (K,), with infinity for the updates that cannot be used: so the round knows them."""
    return torch.where(usable(sq_norms, losses, longest), sq_norms, torch.inf)


def as_local_work(updates: Tensor, params: Tensor, losses: Tensor | None = None, *, carried: Tensor | None = None) -> LocalWork:
    """Client updates (K, D) that the solver did not make, as local work from `params`; losses (K,) are those at the start.

    `carried` (K, C) are the carried values that clients send beside them.
    """
    sq_norms = updates.double().square().sum(1).cpu()
    losses = torch.zeros_like(sq_norms) if losses is None else losses
    work = LocalWork(updates, checked_norms(sq_norms, losses, longest_square(params)), losses)
    return work if carried is None else with_carried(work, carried)


def with_carried(work: LocalWork, carried: Tensor) -> LocalWork:
    """Local work of clients, one by one, with their carried values (K, C); where these are infinite the update is left out."""
    lost = torch.isinf(carried).any(1)
    return replace(work, sq_norms=torch.where(lost, torch.inf, work.sq_norms), carried=carried)
