"""The mean of the clients' losses: what FedAvg minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise.risk.tilted import weighed
from equipoise.types import RiskValue


@dataclass(frozen=True)
class Mean:
    """The weighted mean of the clients' losses, Σ α_k F_k: the objective of FedAvg.

    Its weights are the base weights whatever the losses are, so no round has to compute them.

    Source: McMahan et al. 2017; Pillutla et al. 2023, section 3.2; Li 2023 (thesis), section 3.2.1.

    >>> import torch
    >>> risk = Mean()(torch.tensor([1.0, 2.0, 100.0]), torch.tensor([0.5, 0.25, 0.25]))
    >>> risk.value, risk.weights  # 0.5 + 0.5 + 25
    (tensor(26.), tensor([0.5000, 0.2500, 0.2500]))
    """

    needs_losses: ClassVar[bool] = False
    keeps_base_weights: ClassVar[bool] = True
    pure: ClassVar[bool] = True
    keeps_everyone: ClassVar[bool] = True
    client_form: ClassVar[str] = "base"

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The mean Σ α_k F_k; its weights are α."""
        return RiskValue((base_weights * weighed(losses, base_weights)).sum(), base_weights, state)

    def client_weight(self, loss: Tensor, base_weight: Tensor, public: Any = None) -> Tensor:
        """The weight that a client computes by itself: its `base_weight` (). Its `loss` () and `public` are not used."""
        return base_weight
