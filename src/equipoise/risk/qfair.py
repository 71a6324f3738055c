"""q-fair federated learning: losses to a power, with a server step that needs no new learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, require_number
from equipoise.risk.tilted import weighed
from equipoise.types import RiskValue

FLOOR = 1e-10  # of a loss, so that powers and their derivatives exist at 0


@dataclass(frozen=True)
class QFair:
    """The q-fair risk Σ α_k F_k^{q+1}/(q+1), with q-FedAvg's dynamic server step.

    q = 0 is FedAvg; a larger q weighs clients with large losses more, α_k F_k^q. With local SGD of one epoch or more this
    is q-FedAvg, with one full-batch step q-FedSGD. The server's step is L Σ α F^q / Σ α h with L = 1/lr and h_k = q
    F_k^{q−1} ‖L u_k‖² + L F_k^q. Relative to the mean update under the weights it is a factor in (0, 1], and the server
    optimiser gets the mean update times this factor: `server_opt.SGD(1.0)` is the published method. Momentum adds up such
    updates, so take lr = 1 − momentum. Adam, Yogi and Adagrad cancel a factor that is the same in all rounds, so tune their
    own lr.

    Source: Li 2023 (thesis), section 4.2, Algorithms 3 and 4; Li, Sanjabi, Beirami, Smith 2020.

    >>> risk = QFair(q=1.0)(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]))
    >>> risk.value, risk.weights  # (½ · 1² + ½ · 3²)/2, and ½ · 1 and ½ · 3
    (tensor(2.5000), tensor([0.5000, 1.5000]))
    """

    q: float = 1.0  # the power of the losses in the weights; 0 is FedAvg

    pure: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True
    keeps_everyone: ClassVar[bool] = True
    needs_ids: ClassVar[bool] = False
    client_form: ClassVar[str] = "loss"

    def __post_init__(self) -> None:
        require_number("q", self.q, "[0, ∞)", "0 is FedAvg; 1 is a usual start.")

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The q-fair risk and its weights α_k F_k^q."""
        if bool((losses < 0).any()):
            fix = "Use Tilted for losses of either sign."
            raise InvalidParameter("losses", "must be ≥ 0 for QFair", float(losses.min()), fix)
        alpha, values = base_weights.double(), weighed(losses, base_weights).double().clamp(min=FLOOR)
        value = (alpha * values.pow(self.q + 1)).sum() / (self.q + 1)
        logs = self.q * values.log() + alpha.log()
        # Powers beyond what the type holds are scaled together: their ratios, all that a round uses, stay right.
        largest = 0.5 * math.log(torch.finfo(base_weights.dtype).max)
        shift = logs.max() - logs.max().clamp(-largest, largest)
        return RiskValue(value.to(losses.dtype), (logs - shift).exp().to(base_weights.dtype), state)

    def client_weight(self, loss: Tensor, base_weight: Tensor, public: Tensor | float) -> Tensor:
        """The weight that a client computes by itself when `public` is a bound B on losses: α (F/B)^q, at most α.

        F is its `loss` (), clipped to [0, B], and α its `base_weight` (). Divided by their sum over clients, these weights are
        those of the risk. q-FedAvg's server step needs the clients' norms; here it is 1.
        """
        shares = (loss.double() / float(public)).clamp(FLOOR, 1.0)
        return (base_weight * shares.pow(self.q)).to(base_weight.dtype)

    def server_step(self, *, losses: Tensor, base_weights: Tensor, weight_sum: Tensor, sq_norms: Tensor, lr: float) -> float:
        """The factor of the server's step: L Σ α F^q / Σ α h = Σ r / Σ r (1 + q s / (lr F)), with r_k ∝ α_k F_k^q.

        `losses` (K,) are F, `base_weights` (K,) are α, and `sq_norms` (K,) are s_k = ‖u_k‖². `lr` is the clients' rate.
        `weight_sum` () is not used.
        """
        values = losses.double().clamp(min=FLOOR)
        shares = torch.softmax(base_weights.double().log() + self.q * values.log(), 0)
        return float(1 / (shares * (1 + self.q * sq_norms.double() / (lr * values))).sum())
