"""Local stochastic gradient descent: what a client does between receiving the model and sending its update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.numbers import Numbers
from equipoise.errors import require, require_integer, require_number
from equipoise.types import Cohort, SgdRule


def stragglers(keys: Tensor, share: float, full: int) -> tuple[Tensor, Tensor]:
    """Who of K clients is slow, (K,) bool, and how much of 1 … `full` each would get done, (K,) int64.

    A share of the cohort is slow, to the nearest client, but never everyone. Both depend on the clients' keys alone. Source:
    Li 2023 (thesis), section 3.4.2; the published code draws 1 … E − 1 epochs, the text says 1 … E.
    """
    count = min(int(share * len(keys) + 0.5), len(keys) - 1)
    bits = rng.random_bits(keys, 0, 2)  # (K, 2)
    slow = torch.zeros(len(keys), dtype=torch.bool)
    slow[bits[:, 0].argsort(stable=True)[:count]] = True
    return slow, 1 + bits[:, 1] % full


def check_local_work(epochs: int, steps: int | None) -> None:
    """Raise InvalidParameter unless the length of local work is given by epochs, or by steps."""
    require_integer("epochs", epochs, 0)
    require_integer("steps", steps, 0, none="work by epochs")
    fix = "Say how long clients work either by epochs or by steps."
    require(steps is None or epochs == 1, "epochs", "must be left alone when steps is given", epochs, fix)


@dataclass(frozen=True)
class SGD:
    """Local SGD: w ← (1 − γλ) w − γ ∇F(w), over `epochs` passes or exactly `steps` steps.

    `lr` is γ, `weight_decay` λ. `batch_size=None` takes the whole client at once. `momentum` keeps v ← momentum · v + g within
    one round and steps w ← w − γv. `prox` μ > 0 is FedProx: the local objective is F(w) + (μ/2)‖w − w^t‖², which keeps clients
    near the server's model w^t, so that g = ∇F(w) + λw + μ(w − w^t). Round t has the rate lr · lr_decay^⌊t / lr_decay_every⌋.

    `straggler_share` simulates slow clients: that share of every cohort gets only a uniform number of 1 … E epochs (or steps)
    done. `stragglers="keep"` takes their partial work, as FedProx does; `"drop"` takes nothing from them, as FedAvg does.

    Source: McMahan et al. 2017 (FedAvg); Li et al. 2020 (FedProx; thesis, chapter 3); Pillutla et al. 2023, Algorithm 1.
    """

    lr: float = 0.1
    batch_size: int | None = 10
    epochs: int = 1
    steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    lr_decay: float = 1.0
    lr_decay_every: int = 1
    straggler_share: float = 0.0
    stragglers: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_integer("batch_size", self.batch_size, 1, none="the full batch")
        check_local_work(self.epochs, self.steps)
        for name in ("momentum", "straggler_share"):
            require_number(name, getattr(self, name), "[0, 1)")
        for name in ("weight_decay", "prox"):
            require_number(name, getattr(self, name), "[0, ∞)")
        require_number("lr_decay", self.lr_decay, "(0, 1]")
        require_integer("lr_decay_every", self.lr_decay_every, 1)
        require(self.stragglers in ("keep", "drop"), "stragglers", 'must be "keep" or "drop"', self.stragglers)
        share, full = self.straggler_share, self.epochs if self.steps is None else self.steps
        rule = 'needs more than one epoch (or step) with stragglers="keep": whoever gets one done has done all'
        fix = "Give more epochs, count work in steps, or drop stragglers."
        require(share == 0 or self.stragglers == "drop" or full != 1, "straggler_share", rule, share, fix)

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """Steps that a client with `size` examples takes; `effort` is how many epochs (or steps) it gets done, if not all."""
        if self.steps is not None:
            return self.steps if effort is None else min(effort, self.steps)
        epochs = self.epochs if effort is None else min(effort, self.epochs)
        return epochs * (1 if self.batch_size is None else -(-size // self.batch_size))

    def local_steps_each(self, sizes: Numbers, efforts: Numbers | None) -> Numbers:
        """`local_steps` of many clients with these sizes (K,), as an array (K,)."""
        full = self.epochs if self.steps is None else self.steps
        done = np.full(len(sizes), full) if efforts is None else np.minimum(efforts, full)
        return done * (1 if self.steps is not None or self.batch_size is None else -(-sizes // self.batch_size))

    @property
    def sgd(self) -> SgdRule:
        """The step as fast paths write it out again."""
        return SgdRule(self.momentum, self.weight_decay, self.prox)

    def with_prox(self, prox: float) -> SGD:
        """The solver with another μ."""
        return replace(self, prox=prox)

    def with_epochs(self, epochs: int) -> SGD:
        """The solver with another number of passes over a client's data."""
        return replace(self, epochs=epochs, steps=None)

    def for_own_model(self) -> SGD:
        """The solver for a client's own model: without stragglers, and without FedProx's term."""
        return replace(self, straggler_share=0.0, prox=0.0)

    def efforts(self, cohort: Cohort, keys: Tensor) -> Tensor | None:
        """Epochs (or steps) that each client of a cohort gets done, 0 for a straggler that is dropped; None without any."""
        full = self.epochs if self.steps is None else self.steps
        if self.straggler_share == 0 or full == 0:
            return None
        own_keys = rng.client_keys(rng.stream_key(cohort.seed, "stragglers", cohort.round), keys)
        slow, done = stragglers(own_keys, self.straggler_share, full)
        return torch.where(slow, done if self.stragglers == "keep" else 0, full)

    def learning_rate(self, round_index: int) -> float:
        """γ0 c^⌊t/t0⌋ (the journal version prints the exponent with the wrong sign)."""
        return self.lr * self.lr_decay ** (round_index // self.lr_decay_every)

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
        velocity.mul_(self.momentum).add_(gradient)
        weights.add_(velocity, alpha=-lr)
