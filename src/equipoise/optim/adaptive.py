"""DP-SGD, and adaptive optimisers that use its noisy gradient g̃ in place of the gradient.

Each step releases g̃ only, so that all cost as much privacy as DP-SGD. Their weak point: where the noise is larger than the
gradient, the second moments are those of the noise (thesis, Figure 6.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor, nn

from equipoise.errors import is_number, require
from equipoise.optim.private import PrivacyOptions, PrivateOptimizer, Rate, check_lr, rate_at
from equipoise.optim.second_moments import adagrad, check_adaptive, preconditioner, rmsprop


class DPSGD(PrivateOptimizer):
    """w ← w − lr · g̃ with g̃ = (Σ clip(g_i, C) + N(0, z² C² I)) / b.

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step.

    Source: Abadi et al. 2016, Algorithm 1.

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2), torch.eye(2), torch.tensor([0, 1])
    >>> optimizer = DPSGD(net, lr=1.0, clip=1.0, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=2)
    >>> for batch in optimizer.batches(x, y, steps=1):
    ...     optimizer.step(*batch)
    >>> net.weight
    Parameter containing:
    tensor([-0.2500,  0.2500], requires_grad=True)
    """

    def __init__(self, model: nn.Module, *, lr: Rate, **privacy: Unpack[PrivacyOptions]) -> None:
        super().__init__(model, **privacy)
        check_lr("lr", lr)
        self.lr = lr

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        return -rate_at(self.lr, self.steps) * released[0]


class DPAdam(PrivateOptimizer):
    """m ← β₁ m + (1 − β₁) g̃, v ← β₂ v + (1 − β₂) g̃², w ← w − lr · m̂ / (√v̂ + ε) with m̂ = m / (1 − β₁^t), v̂ = v / (1 − β₂^t).

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `betas` are (β₁, β₂), and `eps` is ε; m and v are
    0 at first, and t is the number of the step, from 1 on.

    Source: Li 2023 (thesis), Algorithm 9; Zhou et al. 2020.

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> optimizer = DPAdam(net, lr=1.0, clip=1.0, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=2)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # the first step of Adam has the length lr
    [-1.0, 1.0]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **privacy: Unpack[PrivacyOptions],
    ) -> None:
        super().__init__(model, **privacy)
        check_lr("lr", lr)
        good = len(betas) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
        require(good, "betas", "must be two numbers in [0, 1)", betas)
        check_adaptive(betas[1], eps)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.memory = {"mean": self._zeros(), "second_moment": self._zeros()}

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        (first, second), t = self.betas, self.steps + 1
        mean = first * self.memory["mean"] + (1 - first) * released[0]
        v = rmsprop(self.memory["second_moment"], released[0], second)
        self.memory = {"mean": mean, "second_moment": v}
        step = rate_at(self.lr, self.steps) / (1 - first**t)
        return -step * mean / preconditioner(v / (1 - second**t), self.eps)


class DPRMSProp(PrivateOptimizer):
    """v ← β v + (1 − β) g̃², w ← w − lr · g̃ / (√v + ε).

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `beta` is β, and `eps` is ε; v is 0 at first.

    Source: Li 2023 (thesis), 6.4.1 and 6.10.1; ε near the size of √v decides how adaptive it is (6.13.2).

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> privacy = {"clip": 1.0, "noise_multiplier": 0.0, "sample_rate": 1.0, "expected_batch_size": 2}
    >>> optimizer = DPRMSProp(net, lr=1.0, beta=0.75, eps=0.125, **privacy)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # √v = ½ · ¼, so ¼/(⅛ + ⅛)
    [-1.0, 1.0]
    """

    def __init__(
        self, model: nn.Module, *, lr: Rate, beta: float = 0.9, eps: float = 1e-3, **privacy: Unpack[PrivacyOptions]
    ) -> None:
        super().__init__(model, **privacy)
        check_lr("lr", lr)
        check_adaptive(beta, eps)
        self.lr, self.beta, self.eps = lr, beta, eps
        self.memory = {"second_moment": self._zeros()}

    def _second_moment(self, v: Tensor, gradient: Tensor) -> Tensor:
        return rmsprop(v, gradient, self.beta)

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        v = self._second_moment(self.memory["second_moment"], released[0])
        self.memory = {"second_moment": v}
        return -rate_at(self.lr, self.steps) * released[0] / preconditioner(v, self.eps)


class DPAdaGrad(DPRMSProp):
    """v ← v + g̃², w ← w − lr · g̃ / (√v + ε).

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `eps` is ε; v is 0 at first.

    Source: Li 2023 (thesis), 6.7.1 and 6.13.3.

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> optimizer = DPAdaGrad(net, lr=1.0, eps=0.25, clip=1.0, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=2)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # √v = ¼, so ¼/(¼ + ¼)
    [-0.5, 0.5]
    """

    def __init__(self, model: nn.Module, *, lr: Rate, eps: float = 1e-3, **privacy: Unpack[PrivacyOptions]) -> None:
        super().__init__(model, lr=lr, beta=0.0, eps=eps, **privacy)

    def _second_moment(self, v: Tensor, gradient: Tensor) -> Tensor:
        return adagrad(v, gradient)
