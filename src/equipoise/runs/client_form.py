"""The law of a risk's client-side form: the weight that a client finds alone, from its own loss and a public bound."""

from __future__ import annotations

import math
from typing import Any

import torch

from equipoise.core.abilities import read
from equipoise.types import RiskTraits

WITHIN = (
    "client_weight gives finite weights between 0 and the base weight, whatever the loss is: noise is made for these limits"
)
ALONE = "the client_weight of a client does not depend on other clients"
IN_PROPORTION = "for losses from 0 to the bound, client_weight is in proportion to the weights of the risk"
DIVIDE_CURE = "Divide by the weight at the bound `public`, and count a larger loss as the bound: loss.clamp(0, public)."
_LOSSES = (0.05, 0.3, 0.7, 1.0)  # shares of the bound


def broken_client_form(risk: Any, bound: float) -> tuple[str, str, str] | None:
    """The first law that the client-side form of a risk breaks, what was found, and the cure; None if it breaks none.

    Only a form by the loss is looked at: forms by a quantile or by groups belong to the library.
    """
    traits = read(RiskTraits, risk)
    if traits.client_form != "loss" or traits.client_weight is None:
        return None
    losses = bound * torch.tensor(_LOSSES, dtype=torch.float64)
    base = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    anything = torch.tensor([-5.0, 0.0, bound, 2 * bound + 1, 1e30, math.inf], dtype=torch.float64)
    for loss in anything:
        weight = traits.client_weight(loss.reshape(1), torch.ones(1, dtype=torch.float64), bound)
        if not bool(((weight >= 0) & (weight <= 1 + 1e-9)).all()):
            shown = f"a loss of {float(loss):g} with the base weight 1 and the bound {bound:g} gives {weight.tolist()}"
            return WITHIN, shown, DIVIDE_CURE
    together = traits.client_weight(losses, base, bound)
    alone = torch.cat([traits.client_weight(losses[k : k + 1], base[k : k + 1], bound) for k in range(len(losses))])
    if together.shape != base.shape or not torch.allclose(together, alone, rtol=1e-6, atol=1e-12):
        return ALONE, f"{together.tolist()} together, {alone.tolist()} alone", "Use no mean, sum or maximum over clients."
    weights = risk(losses, base, clients=tuple("abcd"), state=None).weights
    found, expected = together / together.sum(), weights / weights.sum()
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
        shown = f"shares {found.tolist()} by client_weight, {expected.tolist()} by the risk, for losses {losses.tolist()}"
        return IN_PROPORTION, shown, ""
    return None
