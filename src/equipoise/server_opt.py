"""Server optimisers: how the aggregated update moves the parameters. The update plays the part of a negative gradient.

The adaptive ones follow Reddi et al. 2021 (Adaptive Federated Optimization), Algorithm 2: no bias correction, second
moments started at ε², and ε added to their root.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import require_number


@dataclass(frozen=True)
class SGD:
    """w ← w + lr · Δ; lr = 1 is plain averaging.

    Source: McMahan et al. 2017 (lr = 1); Reddi et al. 2021 (others).
    """

    lr: float = 1.0

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")

    @property
    def linear_rate(self) -> float:
        """γ of the step w + γ · total."""
        return self.lr

    def begin(self, params: Tensor) -> None:
        """There is no state."""

    def step(self, params: Tensor, total: Tensor, state: None) -> tuple[Tensor, None]:
        """The next parameters (D,) and the next state."""
        return torch.add(params, total, alpha=self.lr), None


@dataclass(frozen=True)
class Momentum:
    """v ← momentum · v + Δ, w ← w + lr · v (FedAvgM).

    Source: Hsu, Qi, Brown 2019.
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_number("momentum", self.momentum, "[0, 1)")

    def begin(self, params: Tensor) -> Tensor:
        """The state before the first round, at w^0."""
        return torch.zeros_like(params)

    def step(self, params: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next parameters (D,) and the next state."""
        velocity = self.momentum * state + total
        return params + self.lr * velocity, velocity


@dataclass(frozen=True)
class _Adaptive(ABC):
    """m ← β1 m + (1 − β1) Δ, v by the rule of the class, w ← w + lr · m / (√v + ε)."""

    lr: float = 0.01
    beta1: float = 0.9
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_number("beta1", self.beta1, "[0, 1)")
        require_number("epsilon", self.epsilon, "(0, ∞)")

    def begin(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments before the first round, (D,) and (D,)."""
        return torch.zeros_like(params), torch.full_like(params, self.epsilon**2)

    @abstractmethod
    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor: ...

    def step(self, params: Tensor, total: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The next parameters (D,) and the next moments."""
        m = self.beta1 * state[0] + (1 - self.beta1) * total
        v = self._second_moment(state[1], total)
        return params + self.lr * m / (v.sqrt() + self.epsilon), (m, v)


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v ← v + Δ².

    Source: Reddi et al. 2021, Algorithm 2.
    """

    beta1: float = 0.0

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        return v + total.square()


@dataclass(frozen=True)
class _Forgetting(_Adaptive):
    """An adaptive optimiser whose second moments forget earlier updates at the rate 1 − β2."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("beta2", self.beta2, "[0, 1)")


@dataclass(frozen=True)
class Adam(_Forgetting):
    """FedAdam: v ← β2 v + (1 − β2) Δ².

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * total.square()


@dataclass(frozen=True)
class Yogi(_Forgetting):
    """FedYogi: v ← v − (1 − β2) Δ² sign(v − Δ²).

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        squared = total.square()
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
