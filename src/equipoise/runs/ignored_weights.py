"""Notices of a risk without an effect: an aggregator that ignores weights sees only which clients have the weight 0.

The library's own risks say whether they leave clients out, and are refused beside Krum and k-loss if they do not (`Algorithm`).
Of a risk of the user's own this is found by a trial on a few losses, so that it is told and not refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user
from equipoise.errors import notify
from equipoise.errors import shown as shown_part
from equipoise.runs.tried_calls import close, copied, or_none

_CLIENTS = 12  # of a tried cohort
_ROUNDS = 4  # that a risk with a state is tried for
_SCALES = (0.01, 1.0, 10.0)  # of tried losses; far larger ones make weights underflow to 0


def tell_of_weights(algorithm: Algorithm, clients: Sequence[str]) -> None:
    """Give a notice where an aggregator makes nothing of the risk's weights, and one of the two is the user's own."""
    risk, part = algorithm.traits.risk, algorithm.aggregator
    if not risk.needs_losses or risk.server_step is not None:
        return
    if is_of_user(part) and ignores_weights(part):
        notify(
            f"{shown_part(part)} ignores the weights of clients: its total is the same whoever has most of the weight. "
            f"{shown_part(algorithm.risk)} then acts only through clients that it gives the weight 0, which take no part. Use "
            "the weights, e.g. weights.to(updates.dtype) @ updates."
        )
    elif algorithm.traits.aggregator.picks_one and is_of_user(algorithm.risk):
        large = algorithm.traits.aggregator.picks_large_loss
        if weighs_without_leaving_out(algorithm.risk, tuple(clients[:_CLIENTS]), large):
            who = "a client with a loss above the median" if large else "any client"
            notify(
                f"{shown_part(part)} takes one client's update as it is, whatever its weight, and {shown_part(algorithm.risk)} "
                f"did not give {who} the weight 0 at the losses that were tried: such a risk has no effect. Use an aggregator "
                "that uses weights, e.g. aggregators.Median() or MultiKrum(…), or a risk that leaves clients out."
            )


def ignores_weights(aggregator: Any, clients: int = _CLIENTS) -> bool:
    """Whether the total of different updates is the same whoever has nearly all of the weight."""
    updates = torch.randn(clients, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses, totals = torch.linspace(0.5, 1.5, clients, dtype=torch.float64), []
    for heavy in range(3):
        weights = torch.full((clients,), 0.1 / (clients - 1), dtype=torch.float64)
        weights[heavy] = 0.9
        answer = or_none(lambda own=weights: copied(aggregator)(updates.clone(), own, losses=losses, state=None))  # type: ignore[misc]
        if answer is None:
            return False
        totals.append(answer[0])
    return all(close(each, totals[0]) for each in totals[1:])


def weighs_without_leaving_out(risk: Any, ids: tuple[str, ...], large: bool = False) -> bool:
    """Whether a risk weighs some tried losses otherwise than by base weights, and gives no client the weight 0.

    With `large` only clients with a loss above the median count. False if a call raises an error: the run shows it.
    """
    if len(ids) < 2:
        return False
    base, weighs = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64), False
    for losses in _tried_losses(len(ids)):
        mine, state = copied(risk), None
        for _ in range(_ROUNDS):
            result = or_none(lambda: mine(losses.clone(), base.clone(), clients=ids, state=state))  # noqa: B023
            weights = or_none(lambda: result.weights)  # noqa: B023
            if not isinstance(weights, Tensor) or weights.shape != base.shape:
                return False
            counted = weights[losses > losses.median()] if large else weights
            if bool((counted == 0).any()):
                return False
            weighs = weighs or not close(weights / weights.sum(), base)
            state = result.state
    return weighs


def _tried_losses(count: int) -> list[Tensor]:
    """Losses of a cohort: spread evenly, and with one client unlike all others, at several scales."""
    even = torch.linspace(0.1, 3.0, count, dtype=torch.float64)
    high, low = torch.full_like(even, 0.1), torch.ones_like(even)
    high[0], low[0] = 1.0, 0.1
    return [scale * losses for scale in _SCALES for losses in (even, high, low)]
