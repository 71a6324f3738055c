"""Clients that a network has lost take no further part in a round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from equipoise.types import Cohort
from equipoise.types.round_contracts import Stage, View


@dataclass(frozen=True, eq=False)
class Present(Stage):
    """The cohort without clients that were lost so far, their base weights shared out among the others."""

    network: Any

    def cohort(self, view: View) -> Cohort | None:
        """Those who are left."""
        gone = self.network.gone(view.cohort)
        if not bool(gone.any()):
            return None
        left = view.cohort.take(~gone)
        return replace(left, weights=left.weights / left.weights.sum())
