"""First-order solvers for tilted risks of any differentiable losses: batch, stochastic and hierarchical.

Each takes a function that gives per-example losses of a parameter tensor, and returns a `Solution`. Negative tilts are not
convex, so they are reached by annealing: the tilt goes linearly from 0 to its value over the share `anneal` of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.errors import is_integer, is_number, require
from equipoise.tilted.hierarchy import hierarchy, level_tilts
from equipoise.tilted.losses import tilted_loss, tracked

Rate = float | Callable[[int], float]


@dataclass(frozen=True, eq=False)
class Solution:
    """The parameters found, and the objective at every step: exact for batch solvers, an estimate for stochastic ones."""

    parameters: Tensor  # θ (D,)
    values: Tensor  # (steps,)


def annealed(tilt: float, progress: float) -> float:
    """The tilt at `progress` in [0, 1] of the annealing: linear from 0. Past 1 it is the tilt itself.

    Source: Li 2023 (thesis), section 7.5, and 7.12.2.2 ("we scale t linearly").

    >>> [annealed(-2.0, step / 4) for step in range(6)]
    [0.0, -0.5, -1.0, -1.5, -2.0, -2.0]
    """
    return tilt * min(max(progress, 0.0), 1.0) if progress > 0 else 0.0


def batch_descent(
    losses: Callable[[Tensor], Tensor],
    start: Tensor,
    tilt: float,
    *,
    groups: Any = None,
    inner_tilt: float | Sequence[float] = 0.0,
    lr: Rate = 0.1,
    steps: int = 1000,
    anneal: float | None = None,
) -> Solution:
    """Gradient descent θ ← θ − η Σ_i w_i ∇f_i with the weights of the tilted risk, all examples in every step.

    `losses(θ)` gives the loss of every example (N,). With `groups` it is the hierarchical algorithm; `lr` may be a function of
    the step. `anneal=None` anneals over half of the steps if any tilt is negative.

    Source: Li 2023 (thesis), Algorithms 13 (no groups) and 15 (groups).
    """
    _check(lr, steps, anneal)
    tree = hierarchy(groups, 0 if groups is None else len(losses(start.detach())), start.device)
    tilts = level_tilts(tilt, inner_tilt, tree.depth)
    theta, values = start.detach().clone(), []
    for step in range(steps):
        scale = annealed(1.0, _progress(step, steps, anneal, tilts))
        theta.requires_grad_(True)
        inside = [scale * each for each in reversed(tilts[:-1])]
        value = tilted_loss(losses(theta), scale * tilts[-1], tree, inner_tilt=inside)
        (slope,) = torch.autograd.grad(value, theta)
        theta = (theta - _rate(lr, step) * slope).detach()
        values.append(value.detach())
    return Solution(theta, torch.stack(values))


def stochastic_descent(
    losses: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    size: int,
    tilt: float,
    *,
    lr: Rate = 0.1,
    steps: int = 1000,
    batch_size: int = 1,
    rho: float = 0.5,
    batches: Literal[1, 2] = 1,
    anneal: float | None = None,
    seed: int = 0,
) -> Solution:
    """Stochastic descent with a tracked normaliser: θ ← θ − (η/|B|) Σ_{i∈B} e^{t(f_i − R)} ∇f_i.

    `losses(θ, index)` gives the losses of the examples `index` out of `size`. R starts as the tilted risk of all examples and
    follows the batches, R ← (1/t) log((1 − ρ) e^{tR} + ρ e^{tR_B}). `batches=1` uses one batch for both; `batches=2` draws a
    second, independent one for R, which is what the convergence theorems assume.

    Source: Li 2023 (thesis), Algorithms 14 (`batches=1`) and 17 (`batches=2`); their λ is `rho`.

    >>> y = torch.tensor([0.0, 0.0, 9.0])
    >>> found = stochastic_descent(lambda w, index: (w - y[index]) ** 2, torch.zeros(1), 3, 0.0, lr=0.01, steps=400, seed=0)
    >>> found.parameters.shape, found.values.shape
    (torch.Size([1]), torch.Size([400]))
    """
    _check(lr, steps, anneal, batch_size=batch_size, rho=rho)
    require(batches in (1, 2), "batches", "must be 1 or 2", batches)
    require(is_integer(size) and size >= 1, "size", "must be the number of examples, at least 1", size)
    (tilt,) = level_tilts(tilt, (), 0)
    generator = torch.Generator().manual_seed(seed)
    theta, values = start.detach().clone(), []

    def draw() -> Tensor:
        return torch.randint(size, (batch_size,), generator=generator).to(start.device)

    with torch.no_grad():
        first = annealed(tilt, _progress(0, steps, anneal, (tilt,)))
        estimate = tilted_loss(losses(theta, torch.arange(size, device=start.device)), first)
    for step in range(steps):
        now = annealed(tilt, _progress(step, steps, anneal, (tilt,)))
        theta.requires_grad_(True)
        value = tilted_loss(losses(theta, draw()), now)
        if batches == 1:
            other = value.detach()
        else:
            with torch.no_grad():
                other = tilted_loss(losses(theta, draw()), now)
        estimate = tracked(estimate, other, now, rho)
        # e^{t(f − R)}/|B| is the batch's own weight times e^{t(R_B − R)}. With one batch that is at most 1/ρ; with two it has
        # no bound, so that its steps must be small, and the exponent is cut where a float32 would overflow.
        (slope,) = torch.autograd.grad(value, theta)
        factor = torch.exp((now * (value.detach() - estimate)).clamp(max=80.0))
        theta = (theta - _rate(lr, step) * factor * slope).detach()
        values.append(estimate)
    return Solution(theta, torch.stack(values))


def group_probabilities(risks: Tensor, sizes: Tensor, tilt: float) -> Tensor:
    """The probability of drawing each group, ∝ |g| e^{t R_g}, in the log domain.

    `risks` (groups,) are the R_g, `sizes` (groups,) the |g|.

    Source: Li 2023 (thesis), Algorithm 16, line 3 (a Gumbel-softmax draw with these logits).

    >>> group_probabilities(torch.tensor([0.0, 1.0]), torch.tensor([9, 1]), tilt=0.0)
    tensor([0.9000, 0.1000])
    """
    return torch.softmax(sizes.double().log() + tilt * risks.double(), 0).to(risks.dtype)


def hierarchical_stochastic_descent(
    losses: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    groups: Any,
    tilt: float,
    *,
    inner_tilt: float = 0.0,
    lr: Rate = 0.1,
    steps: int = 1000,
    batch_size: int = 1,
    rho: float = 0.5,
    anneal: float | None = None,
    seed: int = 0,
) -> Solution:
    """Stochastic descent over groups: one is drawn with probability ∝ |g| e^{t R_g}, then a batch inside it.

    R_g is the group's tracked τ-tilted risk, and the step is (η/|B|) Σ_{i∈B} e^{τ(f_i − R_g)} ∇f_i. `groups` has one label per
    example. Every R_g starts as the risk of one batch at the inner tilt of the first step: the 0 of the published algorithm
    would draw the groups that were not seen yet too rarely (t > 0) or too often (t < 0).

    Source: Li 2023 (thesis), Algorithm 16; its λ is `rho`.

    >>> y, groups = torch.tensor([0.0, 0.0, 9.0]), ["a", "a", "b"]
    >>> found = hierarchical_stochastic_descent(
    ...     lambda w, index: (w - y[index]) ** 2, torch.zeros(1), groups, 0.01, lr=0.01, steps=400, seed=0)
    >>> found.parameters.shape, found.values.shape
    (torch.Size([1]), torch.Size([400]))
    """
    _check(lr, steps, anneal, batch_size=batch_size, rho=rho)
    size = len(groups)
    tree = hierarchy(groups, size)
    require(tree.depth == 1, "groups", "must be one vector of labels", tree.depth, "Deeper trees: batch_descent.")
    inner, tilt = level_tilts(tilt, inner_tilt, 1)
    sizes = torch.bincount(tree.parents[0], minlength=tree.counts[0])
    order = torch.argsort(tree.parents[0], stable=True)
    starts = sizes.cumsum(0) - sizes
    generator = torch.Generator().manual_seed(seed)
    theta, values = start.detach().clone(), []

    def draw(group: int) -> Tensor:
        places = torch.randint(int(sizes[group]), (batch_size,), generator=generator)
        return order[starts[group] + places].to(start.device)

    with torch.no_grad():
        first = annealed(1.0, _progress(0, steps, anneal, (inner, tilt))) * inner
        risks = torch.stack([tilted_loss(losses(theta, draw(g)), first) for g in range(len(sizes))]).cpu()
    for step in range(steps):
        scale = annealed(1.0, _progress(step, steps, anneal, (inner, tilt)))
        odds = group_probabilities(risks, sizes, scale * tilt)
        group = int(torch.multinomial(odds, 1, generator=generator))
        theta.requires_grad_(True)
        value = tilted_loss(losses(theta, draw(group)), scale * inner)
        (slope,) = torch.autograd.grad(value, theta)
        risks[group] = tracked(risks[group], value.detach().cpu(), scale * inner, rho)
        factor = math.exp(scale * inner * float(value.detach().cpu() - risks[group]))  # at most 1/ρ
        theta = (theta - _rate(lr, step) * factor * slope).detach()
        values.append(tilted_loss(risks, scale * tilt, sample_weight=sizes))
    return Solution(theta, torch.stack(values))


def _rate(lr: Rate, step: int) -> float:
    return lr(step) if callable(lr) else lr


def _progress(step: int, steps: int, anneal: float | None, tilts: Sequence[float]) -> float:
    """How far the annealing is; the first annealed step has tilt 0, and without annealing it is over before it starts."""
    share = (0.5 if min(tilts) < 0 else 0.0) if anneal is None else anneal
    return step / (share * steps) if share > 0 else 1.0


def _check(lr: Rate, steps: int, anneal: float | None, *, batch_size: int = 1, rho: float = 0.5) -> None:
    require(
        callable(lr) or (is_number(lr) and 0 < lr < math.inf), "lr", "must be a positive number or a function of the step", lr
    )
    require(is_integer(steps) and steps >= 1, "steps", "must be a whole number of at least 1", steps)
    good = anneal is None or (is_number(anneal) and 0 <= anneal <= 1)
    require(good, "anneal", "must be a share of the steps, in [0, 1], or None", anneal, "0 starts at the tilt itself.")
    require(is_integer(batch_size) and batch_size >= 1, "batch_size", "must be a whole number of at least 1", batch_size)
    require(is_number(rho) and 0 < rho <= 1, "rho", "must lie in (0, 1]", rho)
