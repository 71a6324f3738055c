"""Local stochastic gradient descent: what a client does between receiving the model and sending its update."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from equipoise.errors import require, require_integer, require_number
from equipoise.solvers.local_optimizer import LocalOptimizer
from equipoise.types import SgdRule


@dataclass(frozen=True, repr=False)
class SGD(LocalOptimizer):
    """Local SGD: w ← (1 − γλ) w − γ ∇F(w), over `epochs` passes or exactly `steps` steps.

    `lr` is γ, `weight_decay` λ. `batch_size=None` takes the whole client at once. `momentum` keeps v ← momentum · v + g and
    steps w ← w − γv; with `nesterov` the step is w ← w − γ(g + momentum · v). `dampening` d makes it v ← momentum · v + (1
    − d)g, from v = 0 on: with d = momentum, one step and state="kept" a client sends the running mean of its gradients over
    rounds, the client momentum that centred clipping asks for. `prox` μ > 0 is FedProx: the local objective is F(w) +
    (μ/2)‖w − w^t‖², which keeps clients near the server's model w^t, so that g = ∇F(w) + λw + μ(w − w^t). `lr_decay` and
    `lr_decay_every` are short for schedule=Step(every, factor): round t has the rate lr · lr_decay^⌊t / lr_decay_every⌋.

    `straggler_share` simulates slow clients: that share of every cohort gets only a uniform number of 1 … E epochs (or steps)
    done. `stragglers="keep"` takes their partial work, as FedProx does; `"drop"` takes nothing from them, as FedAvg does.

    `clip_norm` bounds the gradient of every local step, before weight decay and proximal term. `schedule` and `local_schedule`
    change the rate over rounds and over local steps, `rates` that of parameters by name. `state="kept"` keeps each client's
    velocity from round to round.

    Source: McMahan et al. 2017 (FedAvg); Li et al. 2020 (FedProx; thesis, chapter 3); Pillutla et al. 2023, Algorithm 1.
    """

    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    lr_decay: float = 1.0
    lr_decay_every: int = 1

    local_steps_each = LocalOptimizer.local_steps_each  # a claim of this class, which subclasses do not inherit

    def __post_init__(self) -> None:
        require_number("momentum", self.momentum, "[0, 1)")
        require(isinstance(self.nesterov, bool), "nesterov", "must be True or False", self.nesterov)
        require(self.momentum > 0 or not self.nesterov, "nesterov", "needs momentum", self.nesterov, "Give momentum=0.9.")
        require_number("dampening", self.dampening, "[0, 1)")
        good, rule = self.dampening == 0 or (self.momentum > 0 and not self.nesterov), "needs momentum, and no nesterov"
        require(good, "dampening", rule, self.dampening, "Give momentum=0.9.")
        require_number("lr_decay", self.lr_decay, "(0, 1]")
        require_integer("lr_decay_every", self.lr_decay_every, 1)
        fix = "Write schedule=solvers.Step(every=…, factor=…) for both."
        twice = self.schedule is not None and self.lr_decay != 1
        require(not twice, "lr_decay", "must be left alone when a schedule is given", self.lr_decay, fix)
        super().__post_init__()

    @classmethod
    def always_shown(cls) -> tuple[str, ...]:
        """The options of version 0.1."""
        return (
            *super().always_shown(), "momentum", "weight_decay", "prox", "lr_decay", "lr_decay_every", "straggler_share",
            "stragglers",
        )  # fmt: skip

    @property
    def sgd(self) -> SgdRule | None:
        """The step as fast paths write it out again; None for options that they do not know."""
        known = not (
            self.nesterov or self.dampening or self.clip_norm is not None or self.local_schedule is not None or self.rates
        )
        return SgdRule(self.momentum, self.weight_decay, self.prox) if known and self.state == "fresh" else None

    def learning_rate(self, round_index: int) -> float:
        """γ0 c^⌊t/t0⌋ (the journal version prints the exponent with the wrong sign), or what the schedule says."""
        return super().learning_rate(round_index) * self.lr_decay ** (round_index // self.lr_decay_every)

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The momentum buffer, if there is one."""
        return (torch.zeros_like(weights),) if self.momentum else ()

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """One step in place, for one client's (D,) weights or for many clients' (K, …).

        `gradient` is never written to: autograd may hand the same memory out for two parameters.
        """
        if self.prox:
            gradient = (weights - anchor).mul_(self.prox).add_(gradient)
        if not self.momentum:
            if self.weight_decay:
                weights.mul_(1 - lr * self.weight_decay)
            weights.add_(gradient, alpha=-lr)
            return
        if self.weight_decay:
            gradient = gradient.add(weights, alpha=self.weight_decay)
        (velocity,) = memory
        velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
        weights.add_(gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity, alpha=-lr)
