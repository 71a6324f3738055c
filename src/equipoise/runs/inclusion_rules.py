"""What a cohort may state as the inclusion of its clients: the probability with which each enters a cohort of the round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.types import Cohort

INCLUSION = "inclusion is one probability per client of the cohort, above 0 and at most 1, or None where it is not known"
INCLUSION_CURE = "If it has no closed form, write Cohort(…, inclusion=None)."


def wrong_inclusion(cohort: Cohort) -> str:
    """What is wrong with the form of a cohort's inclusion; empty if nothing is."""
    stated: Any = cohort.inclusion
    if stated is None:
        return ""
    if not isinstance(stated, Tensor):
        return f"a value of type {type(stated).__name__}"
    if stated.shape != cohort.clients.shape:
        return f"the shape {tuple(stated.shape)} for {len(cohort)} clients"
    values = stated.double()
    wrong = ~(torch.isfinite(values) & (values > 0) & (values <= 1 + 1e-6))
    return f"{float(values[wrong][0]):.4g}" if bool(wrong.any()) else ""
