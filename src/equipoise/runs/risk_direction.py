"""Whether a risk favours clients that fare well: legal, but seldom meant, so that it is said of risks of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user
from equipoise.errors import notify, shown

_LOSSES = (0.3, 0.6, 0.9, 1.4, 2.2)
_ROUNDS = 6  # with the same losses, after which a memory of earlier losses shows


def favours_low_losses(risk: Any, ids: tuple[str, ...] | None = None) -> int:
    """The first round in which no weight is above that of a lower loss, and the last is below the first; 0 if there is none.

    Base weights are equal, and clients have the same losses in every round, so that the state of a risk knows who fares badly.
    After the first round only the last counts: a memory may take a few rounds to follow.
    """
    losses = torch.tensor(_LOSSES[: len(ids) if ids else None], dtype=torch.float64)
    names = ids or tuple(f"client-{i}" for i in range(len(losses)))
    base, state = torch.full_like(losses, 1 / len(losses)), None
    try:
        for number in range(1, _ROUNDS + 1):
            result = risk(losses.clone(), base.clone(), clients=names, state=state)
            weights, state = result.weights, result.state
            if number in (1, _ROUNDS) and _falls(weights):
                return number
    except Exception:  # the run raises it again, where it belongs
        return 0
    return 0


def _falls(weights: Tensor) -> bool:
    return bool((weights.diff() <= 1e-12).all()) and float(weights[-1]) < (1 - 1e-6) * float(weights[0])


def tell_of_low_losses(risk: Any, ids: tuple[str, ...] | None = None) -> None:
    """Give a notice if a risk of the user's own gives less weight to a higher loss; that of the library is documented."""
    if not is_of_user(risk) or not (number := favours_low_losses(risk, ids)):
        return
    if number == 1:
        notify(
            f"The weights of {shown(risk)} fall as losses rise: clients with a high loss count less, those with a low loss "
            "count more. If you want to help clients with a high loss, look for a wrong sign, e.g. softmax(-losses) in place "
            "of softmax(losses)."
        )
    else:
        notify(
            f"The weights of {shown(risk)} fall as losses of earlier rounds rise: of clients whose losses stay the same, those "
            f"with a high loss count less in round {number}, and those with a low loss count more. If you want to help clients "
            "with a high loss, look for a wrong sign where the state is used, e.g. 1 - past in place of 1 + past."
        )
