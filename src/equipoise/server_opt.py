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
    """w ← w + lr · Δ, with the aggregated update Δ; lr = 1 is plain averaging.

    Source: McMahan et al. 2017 (lr = 1); Reddi et al. 2021 (others).

    >>> SGD(lr=0.5).step(torch.tensor([1.0]), torch.tensor([2.0]), None)[0]  # 1 + 0.5 · 2
    tensor([2.])
    """

    lr: float = 1.0  # the server's learning rate; 1 is plain averaging

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")

    @property
    def linear_rate(self) -> float:
        """γ of the step w + γ · total."""
        return self.lr

    def begin(self, params: Tensor) -> None:
        """There is no state before the first round, at `params` (D,)."""

    def step(self, params: Tensor, total: Tensor, state: None) -> tuple[Tensor, None]:
        """The next parameters (D,) and the next state, from `params` w (D,), the update `total` Δ (D,) and `state` None."""
        return torch.add(params, total, alpha=self.lr), None


@dataclass(frozen=True)
class Momentum:
    """v ← momentum · v + Δ, w ← w + lr · v (FedAvgM), with the aggregated update Δ and v = 0 at first.

    Source: Hsu, Qi, Brown 2019.

    >>> server, w, delta = Momentum(lr=1.0, momentum=0.5), torch.tensor([0.0]), torch.tensor([1.0])
    >>> w, v = server.step(w, delta, server.begin(w))  # v = 1, w = 1
    >>> server.step(w, delta, v)  # w = 1 + 1.5, v = 0.5 · 1 + 1
    (tensor([2.5000]), tensor([1.5000]))
    """

    lr: float = 1.0  # the server's learning rate
    momentum: float = 0.9  # the share of the velocity that stays, in [0, 1)

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_number("momentum", self.momentum, "[0, 1)")

    def begin(self, params: Tensor) -> Tensor:
        """The velocity v = 0, (D,), before the first round, at `params` (D,)."""
        return torch.zeros_like(params)

    def step(self, params: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next parameters (D,) and the next state, from `params` w (D,), the update `total` Δ (D,) and `state` v."""
        velocity = self.momentum * state + total
        return params + self.lr * velocity, velocity


@dataclass(frozen=True)
class _Adaptive(ABC):
    """m ← β1 m + (1 − β1) Δ, v by the rule of the class, w ← w + lr · m / (√v + ε)."""

    lr: float = 0.01  # the server's learning rate
    beta1: float = 0.9  # β1 in [0, 1): how slowly m forgets
    epsilon: float = 1e-3  # ε > 0: keeps steps short where updates are small

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_number("beta1", self.beta1, "[0, 1)")
        require_number("epsilon", self.epsilon, "(0, ∞)")

    def begin(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments (m, v) = (0, ε²), (D,) and (D,), before the first round, at `params` (D,)."""
        return torch.zeros_like(params), torch.full_like(params, self.epsilon**2)

    @abstractmethod
    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor: ...

    def step(self, params: Tensor, total: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The next parameters (D,) and the next state, from `params` w (D,), the update `total` Δ (D,) and `state` (m, v)."""
        m = self.beta1 * state[0] + (1 - self.beta1) * total
        v = self._second_moment(state[1], total)
        return params + self.lr * m / (v.sqrt() + self.epsilon), (m, v)


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: m ← β1 m + (1 − β1) Δ, v ← v + Δ², w ← w + lr · m / (√v + ε).

    Δ is the aggregated update, and all operations are by coordinate. The first m is 0 and the first v is ε². There is no bias
    correction.

    Source: Reddi et al. 2021, Algorithm 2.

    >>> server, w = Adagrad(lr=2.0, epsilon=3.0), torch.tensor([0.0])
    >>> server.step(w, torch.tensor([4.0]), server.begin(w))[0]  # v = 9 + 16, so 2 · 4 / (5 + 3)
    tensor([1.])
    """

    beta1: float = 0.0  # β1 in [0, 1): how slowly m forgets; 0: m = Δ

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        return v + total.square()


@dataclass(frozen=True)
class _Forgetting(_Adaptive):
    """An adaptive optimiser whose second moments forget earlier updates at the rate 1 − β2."""

    beta2: float = 0.99  # β2 in [0, 1): how slowly v forgets

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("beta2", self.beta2, "[0, 1)")


@dataclass(frozen=True)
class Adam(_Forgetting):
    """FedAdam: m ← β1 m + (1 − β1) Δ, v ← β2 v + (1 − β2) Δ², w ← w + lr · m / (√v + ε).

    Δ is the aggregated update, and all operations are by coordinate. The first m is 0 and the first v is ε². There is no bias
    correction.

    Source: Reddi et al. 2021, Algorithm 2.

    >>> server, w = Adam(lr=6.0, beta1=0.5, beta2=0.5, epsilon=1.0), torch.tensor([0.0])
    >>> server.step(w, torch.tensor([7.0]), server.begin(w))[0]  # m = 3.5, v = 0.5 + 24.5, so 6 · 3.5 / (5 + 1)
    tensor([3.5000])
    """

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * total.square()


@dataclass(frozen=True)
class Yogi(_Forgetting):
    """FedYogi: m ← β1 m + (1 − β1) Δ, v ← v − (1 − β2) Δ² sign(v − Δ²), w ← w + lr · m / (√v + ε).

    Δ is the aggregated update, and all operations are by coordinate. The first m is 0 and the first v is ε². There is no bias
    correction.

    Source: Reddi et al. 2021, Algorithm 2.

    >>> server, w = Yogi(lr=1.0, beta1=0.5, beta2=0.5, epsilon=1.0), torch.tensor([0.0])
    >>> server.step(w, torch.tensor([4.0]), server.begin(w))[0]  # m = 2, v = 1 + 8, so 2 / (3 + 1)
    tensor([0.5000])
    """

    def _second_moment(self, v: Tensor, total: Tensor) -> Tensor:
        squared = total.square()
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
