"""Methods that use public examples or side information: AdaDPS, DP-R-Pub and PDA-DPMD.

Public examples must not be among the private ones (`set_aside`). They cost no privacy: each step releases one Gaussian about
the private batch, as that of DP-SGD does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from equipoise.errors import IncompatibleParts, InvalidParameter, require, require_integer, require_number
from equipoise.optim.adaptive import DPRMSProp
from equipoise.optim.gradients import ExampleGradients, Query, check_examples
from equipoise.optim.poisson_batches import Examples
from equipoise.optim.private import PrivacyOptions, PrivateOptimizer, Rate, check_lr, rate_at
from equipoise.optim.second_moments import Rule, adagrad, check_adaptive, preconditioner, rmsprop, rule_named


class PublicGradient:
    """ĝ(w): the mean gradient over all public examples, or over `batch_size` of them drawn anew each step."""

    def __init__(
        self, examples: ExampleGradients, public: Examples, batch_size: int | None, generator: torch.Generator
    ) -> None:
        require(isinstance(public, tuple | list) and len(public) == 2, "public", "must be a pair (x, y) of tensors", public)
        self.x, self.y = public
        check_examples(self.x, self.y, "y of public")
        require(len(self.x) > 0, "public", "must hold at least one example", len(self.x))
        require_integer("public_batch_size", batch_size, 1, len(self.x), none="all public examples")
        self._examples, self._batch_size, self._generator = examples, batch_size, generator

    def __call__(self, params: Tensor) -> Tensor:
        """ĝ (D,) at parameters (D,)."""
        if self._batch_size is None:
            return self._examples.mean(params, self.x, self.y)
        order = torch.randperm(len(self.x), generator=self._generator, device=self._generator.device)
        rows = order[: self._batch_size].to(self.x.device)
        return self._examples.mean(params, self.x[rows], self.y[rows])


class AdaDPS(PrivateOptimizer):
    """Precondition each example's gradient by public knowledge A, then clip and add noise: w ← w − lr · g̃ with

        g̃ = (Σ clip(𝒜(g_i), C) + N(0, z² C² I)) / b.

    With `public` = (x, y) the public mean gradient ĝ at the current parameters sets A (and M) by `rule`:
        rule="rmsprop":  v ← β v + (1 − β) ĝ²,  A = √v + ε,  𝒜(g) = g / A
        rule="adagrad":  v ← v + ĝ²,            A = √v + ε,  𝒜(g) = g / A
        rule="adam":     v as rmsprop, M ← β_M M + (1 − β_M) ĝ,  𝒜(g) = (κ g + (1 − κ) M) / A
    with κ = `private_share`; without bias correction. With `side_information` = {parameter name: A} A is fixed before training.
    A is broadcast to the parameter, and other parameters have A = 1: see `token_frequency` and `inverse_tfidf`.

    Since the noise is added after preconditioning, it is spread as A is: coordinates with large gradients carry more of it.
    With A = 1 it is DP-SGD.

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `public` is a pair (x, y) of public examples, and
    `public_batch_size` of them are drawn in each step (None: all). `beta` is β, `beta_mean` is β_M, and `eps` is ε; v and M are
    0 at first.

    Source: Li 2023 (thesis), Algorithm 8 and 6.2; Li et al. 2022 (AdaDPS).

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> known = {"weight": torch.tensor([0.5, 1.0])}
    >>> privacy = {"clip": 1.0, "noise_multiplier": 0.0, "sample_rate": 1.0, "expected_batch_size": 2}
    >>> optimizer = AdaDPS(net, lr=1.0, side_information=known, **privacy)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (½, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # A = (½, 1): the first gradient doubles
    [-0.5, 0.25]
    """

    rules: ClassVar[Mapping[str, Rule]] = {"rmsprop": rmsprop, "adagrad": adagrad, "adam": rmsprop}

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rate,
        public: Examples | None = None,
        public_batch_size: int | None = None,
        side_information: Mapping[str, Tensor] | None = None,
        rule: Literal["rmsprop", "adagrad", "adam"] = "rmsprop",
        beta: float = 0.9,
        beta_mean: float = 0.9,
        private_share: float = 0.9,
        eps: float = 1e-3,
        **privacy: Unpack[PrivacyOptions],
    ) -> None:
        super().__init__(model, **privacy)
        check_lr("lr", lr)
        check_adaptive(beta, eps)
        require_number("beta_mean", beta_mean, "[0, 1)")
        require_number("private_share", private_share, "(0, 1]")
        if (public is None) == (side_information is None):
            raise IncompatibleParts(
                "AdaDPS takes either public examples or side information that is fixed before training.",
                "Give public=(x, y), or side_information={parameter name: A}, and not both.",
            )
        self.lr, self.rule, self.beta, self.eps = lr, rule, beta, eps
        self.beta_mean, self.private_share = beta_mean, private_share
        self._follow = rule_named(rule, self.rules)
        self._scale = None if side_information is None else 1 / self._flat(side_information)
        if public is not None:
            self._generators["public"] = self._generator("public batches")
            self._public = PublicGradient(self._examples, public, public_batch_size, self._generators["public"])
            names = ("second_moment", "mean") if rule == "adam" else ("second_moment",)
            self.memory = {name: self._zeros() for name in names}

    def _flat(self, side_information: Mapping[str, Tensor]) -> Tensor:
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        for name, value in side_information.items():
            require(name in shapes, "side_information", f"must be of parameters among {', '.join(shapes)}", name)
            good = bool(torch.isfinite(value).all()) and bool((value > 0).all())
            require(good, "side_information", "must hold positive, finite numbers", name)
            try:
                value.expand(shapes[name])
            except RuntimeError as error:
                rule = f"must fit parameter {name!r} of shape {tuple(shapes[name])}"
                raise InvalidParameter("side_information", rule, tuple(value.shape)) from error
        like = self._zeros()
        ones = self.layout.unflatten(torch.ones_like(like))
        given = {name: side_information[name].to(like).expand(shapes[name]) for name in side_information}
        return self.layout.flatten({**ones, **given})

    def _queries(self, params: Tensor) -> Sequence[Query]:
        if self._scale is not None:
            return (Query(self.clip, scale=self._scale),)
        gradient = self._public(params)
        v = self._follow(self.memory["second_moment"], gradient, self.beta)
        divisor = preconditioner(v, self.eps)
        if self.rule != "adam":
            self.memory = {"second_moment": v}
            return (Query(self.clip, scale=1 / divisor),)
        mean = self.beta_mean * self.memory["mean"] + (1 - self.beta_mean) * gradient
        self.memory = {"second_moment": v, "mean": mean}
        share = self.private_share
        return (Query(self.clip, scale=share / divisor, shift=(1 - share) * mean / divisor),)

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        return -rate_at(self.lr, self.steps) * released[0]


class DPRPub(DPRMSProp):
    """DP-R-Pub: DP-RMSProp whose second moments come from public gradients, v ← β v + (1 − β) ĝ², w ← w − lr · g̃ / (√v + ε).

    The noise is added *before* preconditioning, unlike AdaDPS: comparing the two shows the effect of the order.

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `public` is a pair (x, y) of public examples, and
    `public_batch_size` of them are drawn in each step (None: all). `beta` is β, and `eps` is ε; v is 0 at first.

    Source: Li 2023 (thesis), 6.4.1.1.

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> privacy = {"clip": 1.0, "noise_multiplier": 0.0, "sample_rate": 1.0, "expected_batch_size": 2}
    >>> optimizer = DPRPub(net, lr=1.0, public=(x, y), beta=0.75, eps=0.125, **privacy)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # ĝ = g̃: √v = ½ · ¼, so ¼/(⅛ + ⅛)
    [-1.0, 1.0]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rate,
        public: Examples,
        public_batch_size: int | None = None,
        beta: float = 0.9,
        eps: float = 1e-3,
        **privacy: Unpack[PrivacyOptions],
    ) -> None:
        super().__init__(model, lr=lr, beta=beta, eps=eps, **privacy)
        self._generators["public"] = self._generator("public batches")
        self._public = PublicGradient(self._examples, public, public_batch_size, self._generators["public"])

    def _queries(self, params: Tensor) -> Sequence[Query]:
        self.memory = {"second_moment": self._second_moment(self.memory["second_moment"], self._public(params))}
        return (Query(self.clip),)

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        return -rate_at(self.lr, self.steps) * released[0] / preconditioner(self.memory["second_moment"], self.eps)


class PDADPMD(PrivateOptimizer):
    """PDA-DPMD, the public loss as mirror map, in its first-order form: w ← w − lr · (κ g̃ + (1 − κ) ĝ).

    g̃ is DP-SGD's noisy gradient, ĝ the public one, κ = `private_share` a number in [0, 1] or a function of the step, such as
    `cosine_share(steps)`, which leans on the public gradient towards the end. With κ = 1 it is DP-SGD.

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `public` is a pair (x, y) of public examples, and
    `public_batch_size` of them are drawn in each step (None: all).

    Source: Amid et al. 2022 (Public data-assisted mirror descent), the approximation that Li 2023 (thesis), 6.4.1.1 uses.

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> first = (x[:1], y[:1])
    >>> privacy = {"clip": 1.0, "noise_multiplier": 0.0, "sample_rate": 1.0, "expected_batch_size": 2}
    >>> optimizer = PDADPMD(net, lr=1.0, public=first, private_share=0.5, **privacy)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> [round(w, 3) for w in net.weight.tolist()]  # ĝ = (½, 0)
    [-0.375, 0.125]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rate,
        public: Examples,
        private_share: float | Callable[[int], float],
        public_batch_size: int | None = None,
        **privacy: Unpack[PrivacyOptions],
    ) -> None:
        super().__init__(model, **privacy)
        check_lr("lr", lr)
        if not callable(private_share):
            require_number("private_share", private_share, "[0, 1]", "Or give a function of the step.")
        self.lr, self.private_share = lr, private_share
        self._generators["public"] = self._generator("public batches")
        self._public = PublicGradient(self._examples, public, public_batch_size, self._generators["public"])
        self._latest = self._zeros()

    def _queries(self, params: Tensor) -> Sequence[Query]:
        self._latest = self._public(params)
        return (Query(self.clip),)

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        share = rate_at(self.private_share, self.steps)
        return -rate_at(self.lr, self.steps) * (share * released[0] + (1 - share) * self._latest)


def cosine_share(steps: int) -> Callable[[int], float]:
    """κ_t = cos(π t / (2 · `steps`)), from 1 at the first step down to 0, where it stays.

    >>> [round(cosine_share(3)(t), 3) for t in range(5)]
    [1.0, 0.866, 0.5, 0.0, 0.0]
    """
    require_integer("steps", steps, 1)
    return lambda t: max(0.0, math.cos(math.pi / 2 * min(t / steps, 1.0)))
