"""DP²: delayed preconditioners, made of averages of gradients that were already released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from equipoise.errors import IncompatibleParts, require, require_integer
from equipoise.optim.gradients import Query
from equipoise.optim.private import PrivacyOptions, PrivateOptimizer, Rate, check_clip, check_lr, rate_at
from equipoise.optim.second_moments import Rule, adagrad, check_adaptive, preconditioner, rmsprop, rule_named, yogi

Variant = Literal["delayed", "extra_query", "noise_first"]


class DP2(PrivateOptimizer):
    """DP²: s₁ steps of DP-SGD, whose noisy gradients are averaged to G/s₁ and update v, then s₂ steps preconditioned by √v + ε.

    With t counted from 0 and phase = t mod (s₁ + s₂):
        phase < s₁:  g̃ = (Σ clip(g_i, C) + N(0, z² C² I)) / b,        w ← w − lr · g̃,  G ← G + g̃
        phase = s₁:  v ← rule(v, G / s₁),  G ← 0, before the step
        phase ≥ s₁:  g̃ = (Σ clip(g_i / (√v + ε), C₂) + N(0, z² C₂² I)) / b,  w ← w − lr_adaptive · g̃
    with v = 0 at first, C = `clip`, C₂ = `clip_adaptive`, s₁ = `delay`, s₂ = `delay_adaptive` (equal to s₁ if not given), and
        rule="rmsprop":  v ← β v + (1 − β) h²
        rule="adagrad":  v ← v + h²
        rule="yogi":     v ← v + (1 − β) sign(h² − v) h²   (h = G / s₁; the thesis prints another sign, see `rules.yogi`)
    The average of s₁ gradients has 1/s₁ of the noise's variance, and it is made of what was released: every step costs one
    Gaussian, as in DP-SGD. `noise_multiplier=0, clip=math.inf` is the method without privacy (6.8.1).

    Two weaker variants of the thesis's ablation (6.10.3):
        variant="noise_first": noise before preconditioning, g̃ = ((Σ clip(g_i, C) + N(0, z² C² I)) / b) / (√v + ε) in the
            second phase; one release a step, one clip for both phases.
        variant="extra_query" (Algorithm 12): each step releases the raw g̃ (clip C), accumulated; where t mod s₁ = 0 it updates
            v and is the step's gradient, and elsewhere the preconditioned gradient (clip C₂) of the *same* batch is released
            as well and is the step's gradient. Two releases about one batch are accounted as one event: ε grows. v follows the
            average of what was accumulated, also at t = 0, where the printed G / s₁ would divide a single gradient by s₁.

    `model` is trained in place, and `privacy` are the options of `PrivateOptimizer`: `clip`, `noise_multiplier`, `sample_rate`
    and others. `lr` is the learning rate, a number or a function of the step. `lr_adaptive` (None: `lr`) is the rate of the
    second phase, `rule` and `beta` say how v moves, `eps` is ε, and `variant` is "delayed" or one of the two weaker ones.

    Source: Li 2023 (thesis), Algorithms 11 and 12, 6.8, 6.14; Li et al. 2023 (DP²).

    >>> import torch
    >>> from equipoise.models import Logistic
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])  # gradients (½, 0) and (0, −½)
    >>> optimizer = DP2(net, lr=1.0, delay=1, beta=0.75, clip=1.0, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=2)
    >>> for batch in optimizer.batches(x, y, steps=1):  # g̃ = (¼, −¼)
    ...     optimizer.step(*batch)
    >>> net.weight.tolist(), optimizer.memory["second_moment"].tolist()  # a step of DP-SGD; then v = ¼ · (¼)²
    ([-0.25, 0.25], [0.015625, 0.015625])
    """

    rules: ClassVar[Mapping[str, Rule]] = {"rmsprop": rmsprop, "adagrad": adagrad, "yogi": yogi}
    releases: ClassVar[tuple[str, ...]] = ("gradient", "preconditioned gradient")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rate,
        delay: int,
        lr_adaptive: Rate | None = None,
        clip_adaptive: float | None = None,
        delay_adaptive: int | None = None,
        rule: Literal["rmsprop", "adagrad", "yogi"] = "rmsprop",
        beta: float = 0.9,
        eps: float = 1e-7,
        variant: Variant = "delayed",
        **privacy: Unpack[PrivacyOptions],
    ) -> None:
        super().__init__(model, **privacy)
        self.lr, self.lr_adaptive = lr, lr if lr_adaptive is None else lr_adaptive
        check_lr("lr", self.lr)
        check_lr("lr_adaptive", self.lr_adaptive)
        self.delay, self.delay_adaptive = delay, delay if delay_adaptive is None else delay_adaptive
        require_integer("delay", self.delay, 1)
        require_integer("delay_adaptive", self.delay_adaptive, 1)
        check_adaptive(beta, eps)
        require(variant in get_args(Variant), "variant", f"must be one of {', '.join(get_args(Variant))}", variant)
        if variant == "noise_first" and clip_adaptive not in (None, self.clip):
            raise IncompatibleParts(
                f"noise_first clips raw gradients in both phases, but clip is {self.clip} and clip_adaptive {clip_adaptive}.",
                "Drop clip_adaptive.",
            )
        if variant == "extra_query" and delay_adaptive is not None:
            raise IncompatibleParts("extra_query has no second phase, so delay_adaptive means nothing.", "Drop delay_adaptive.")
        self.clip_adaptive = self.clip if clip_adaptive is None else clip_adaptive
        check_clip("clip_adaptive", self.clip_adaptive, self.noise_multiplier)
        self.variant, self.rule, self.beta, self.eps = variant, rule, beta, eps
        self._follow = rule_named(rule, self.rules)
        self.memory = {"second_moment": self._zeros(), "sum": self._zeros(), "count": torch.zeros((), dtype=torch.int64)}

    def _preconditions(self) -> bool:
        """Whether the step to come uses the preconditioner."""
        if self.variant == "extra_query":
            return self.steps % self.delay != 0
        return self.steps % (self.delay + self.delay_adaptive) >= self.delay

    def _queries(self, params: Tensor) -> Sequence[Query]:
        raw = Query(self.clip)
        if not self._preconditions() or self.variant == "noise_first":
            return (raw,)
        scaled = Query(self.clip_adaptive, scale=1 / preconditioner(self.memory["second_moment"], self.eps))
        return (raw, scaled) if self.variant == "extra_query" else (scaled,)

    def _change(self, released: Sequence[Tensor]) -> Tensor:
        preconditions, lr = self._preconditions(), rate_at(self.lr, self.steps)
        if preconditions:
            lr, gradient = rate_at(self.lr_adaptive, self.steps), released[-1]
            if self.variant == "noise_first":
                gradient = gradient / preconditioner(self.memory["second_moment"], self.eps)
        else:
            gradient = released[0]
        if self.variant == "extra_query":
            self._accumulate(released[0], complete=not preconditions)
        elif not preconditions:
            self._accumulate(released[0], complete=int(self.memory["count"]) + 1 == self.delay)
        return -lr * gradient

    def _accumulate(self, gradient: Tensor, *, complete: bool) -> None:
        total, count = self.memory["sum"] + gradient, self.memory["count"] + 1
        v = self.memory["second_moment"]
        if complete:
            v = self._follow(v, total / count, self.beta)
            total, count = torch.zeros_like(total), torch.zeros_like(count)
        self.memory = {"second_moment": v, "sum": total, "count": count}
