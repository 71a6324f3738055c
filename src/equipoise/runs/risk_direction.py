"""Whether a risk favours clients that fare well: legal, but seldom meant, so that it is said of risks of the user's own."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.core.abilities import is_of_user
from equipoise.errors import notify, shown

_LOSSES = (0.3, 0.6, 0.9, 1.4, 2.2)


def favours_low_losses(risk: Any, ids: tuple[str, ...] | None = None) -> bool:
    """Whether no weight of a cohort with equal base weights is above that of a lower loss, and the last is below the first."""
    losses = torch.tensor(_LOSSES[: len(ids) if ids else None], dtype=torch.float64)
    names = ids or tuple(f"client-{i}" for i in range(len(losses)))
    base = torch.full_like(losses, 1 / len(losses))
    try:
        weights = risk(losses, base, clients=names, state=None).weights
    except Exception:  # the run raises it again, where it belongs
        return False
    gains = weights.diff()
    return bool((gains <= 1e-12).all()) and float(weights[-1]) < (1 - 1e-6) * float(weights[0])


def tell_of_low_losses(risk: Any, ids: tuple[str, ...] | None = None) -> None:
    """Give a notice if a risk of the user's own gives less weight to a higher loss; that of the library is documented."""
    if is_of_user(risk) and favours_low_losses(risk, ids):
        notify(
            f"The weights of {shown(risk)} fall as losses rise: clients with a high loss count less, those with a low loss "
            "count more. If you want to help clients with a high loss, look for a wrong sign, e.g. softmax(-losses) in place "
            "of softmax(losses)."
        )
