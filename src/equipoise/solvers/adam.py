"""Local Adam and AdamW: steps scaled by running moments of the gradient."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from equipoise.errors import require_number
from equipoise.solvers.local_optimizer import LocalOptimizer


@dataclass(frozen=True, repr=False)
class Adam(LocalOptimizer):
    """Local Adam: m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², w ← w − γ m̂/(√v̂ + ε), with m̂, v̂ corrected for their start at 0.

    `lr` is γ, `beta1` and `beta2` are β₁ and β₂, `epsilon` is ε. At the t-th step m̂ = m/(1 − β₁^t) and v̂ = v/(1 − β₂^t),
    as in torch.optim.Adam; t starts again at 1 in every round, or with state="kept" counts all steps of a client. g = ∇F(w)
    + λw + μ(w − w^t) with `weight_decay` λ and `prox` μ. `clip_norm` bounds ∇F(w) at every local step; `schedule` and
    `local_schedule` change the rate over rounds and over local steps, `rates` that of parameters by name. `straggler_share`
    and `stragglers` are those of SGD. `state="kept"` stores 2D + 1 numbers per client.

    Source: Kingma, Ba 2015; the formulas of torch.optim.Adam.
    """

    lr: float = 1e-3
    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    numbered = True  # `step` is told its number
    local_steps_each = LocalOptimizer.local_steps_each  # a claim of this class, which subclasses do not inherit

    def __post_init__(self) -> None:
        check_moments(self.beta1, self.beta2, self.epsilon)
        super().__post_init__()

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The first and the second moment of the gradient."""
        return torch.zeros_like(weights), torch.zeros_like(weights)

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        *,
        anchor: Tensor,
        lr: float,
        number: float | Tensor,
    ) -> None:
        """One step in place, the `number`-th from 1 on: one number, or one per client that broadcasts to `weights` (K, …)."""
        if self.prox:
            gradient = (weights - anchor).mul_(self.prox).add_(gradient)
        if self.weight_decay:
            gradient = gradient.add(weights, alpha=self.weight_decay)
        move_by_moments(self, weights, gradient, memory, lr, number)


@dataclass(frozen=True, repr=False)
class AdamW(LocalOptimizer):
    """Local Adam whose weight decay is apart from the moments: w ← (1 − γλ)w − γ m̂/(√v̂ + ε), m and v of g without λw.

    `lr` is γ, `weight_decay` λ, `beta1` and `beta2` are β₁ and β₂, `epsilon` is ε, as in torch.optim.AdamW. The proximal term
    is part of the local objective, so that g = ∇F(w) + μ(w − w^t) with `prox` μ. All other options are those of Adam.

    `schedule` and `local_schedule` change the rate over rounds and over local steps, `rates` that of parameters by name.
    `clip_norm` bounds ∇F(w) at every local step. `straggler_share` and `stragglers` are those of SGD. `state` is "fresh", or
    "kept" if a client keeps its moments between rounds.

    Source: Loshchilov, Hutter 2019; the formulas of torch.optim.AdamW.
    """

    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    numbered = True  # `step` is told its number
    local_steps_each = LocalOptimizer.local_steps_each  # a claim of this class, which subclasses do not inherit

    def __post_init__(self) -> None:
        check_moments(self.beta1, self.beta2, self.epsilon)
        super().__post_init__()

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The first and the second moment of the gradient."""
        return torch.zeros_like(weights), torch.zeros_like(weights)

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memory: tuple[Tensor, ...],
        *,
        anchor: Tensor,
        lr: float,
        number: float | Tensor,
    ) -> None:
        """One step in place, the `number`-th from 1 on: one number, or one per client that broadcasts to `weights` (K, …)."""
        if self.prox:
            gradient = (weights - anchor).mul_(self.prox).add_(gradient)
        if self.weight_decay:
            weights.mul_(1 - lr * self.weight_decay)
        move_by_moments(self, weights, gradient, memory, lr, number)


def check_moments(beta1: float, beta2: float, epsilon: float) -> None:
    """Raise InvalidParameter unless the decay of both moments is a share, and ε positive."""
    require_number("beta1", beta1, "[0, 1)")
    require_number("beta2", beta2, "[0, 1)")
    require_number("epsilon", epsilon, "(0, ∞)")


def move_by_moments(
    rule: Adam | AdamW, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], lr: float, number: float | Tensor
) -> None:
    """Update the moments by a gradient, and step along the corrected mean over the root of the corrected square, in place."""
    mean, square = memory
    mean.lerp_(gradient, 1 - rule.beta1)
    square.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    first, second = (unbiased_share(beta, number, weights) for beta in (rule.beta1, rule.beta2))
    size = square.sqrt().div_(second**0.5).add_(rule.epsilon)
    weights.sub_(mean.div(size).mul_(lr / first))


def unbiased_share(beta: float, number: float | Tensor, like: Tensor) -> float | Tensor:
    """1 − β^t, found in the precision of the number t (float64) and given in that of the weights."""
    share = 1 - beta**number
    return share.to(like.dtype) if isinstance(share, Tensor) else share
