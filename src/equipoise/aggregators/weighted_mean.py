"""The weighted mean of updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor


def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    """Σ_k weights_k · updates_k: (K, D) and (K,) give (D,)."""
    return weights.to(updates) @ updates


@dataclass(frozen=True)
class WeightedMean:
    """The weighted mean of the clients' updates, Σ_k π_k u_k, with the weights of the risk.

    It is linear, so updates are added up as they come and never held all at once.

    Source: McMahan et al. 2017 (FedAvg).

    >>> import torch
    >>> WeightedMean()(torch.tensor([[1.0], [2.0], [100.0]]), torch.tensor([0.5, 0.25, 0.25]))[0]  # 0.5 + 0.5 + 25
    tensor([26.])
    """

    linear: ClassVar[bool] = True
    weighted_sum: ClassVar[bool] = True

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """Σ_k weights_k · updates_k over those with a weight, (D,); the state as it is."""
        if not bool((counts := weights != 0).all()):  # 0 times NaN would be NaN
            updates, weights = updates[counts.to(updates.device)], weights[counts]
        return weighted_mean(updates, weights), state
