"""Tilted and superquantile losses for PyTorch: a vector of losses becomes one number that autograd can differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import IncompatibleParts, InvalidParameter, is_number, require
from equipoise.risk.superquantile import exact_weights, huber_smoothed
from equipoise.risk.tilted import tilted
from equipoise.tilted.hierarchy import Hierarchy, hierarchy, level_tilts


def tilted_loss(
    losses: Tensor,
    tilt: float,
    groups: Any = None,
    *,
    inner_tilt: float | Sequence[float] = 0.0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """The tilted loss (1/t) log Σ_i α_i e^{t f_i} of a vector of losses f (N,); with groups, of the groups' own tilted losses.

    t > 0 leans towards large losses (fairness, rare classes), t < 0 away from them (outliers, wrong labels), t = 0 is the mean.
    α is `sample_weight` divided by its sum, by default 1/N. With `groups`, `tilt` acts between groups and `inner_tilt` inside
    them: (1/t) log Σ_g α_g e^{t R_g} with R_g = (1/τ) log Σ_{i∈g} (α_i/α_g) e^{τ f_i}. Groups within groups are a list of
    label vectors or an (N, levels) array, outermost first; `inner_tilt` then has one tilt for each level inside the outermost.

    The gradient is exact, Σ_i w_i ∇f_i with w_i = α_i e^{t(f_i − R)}, however large losses and tilts are, and so is the second
    derivative. Arithmetic is in float64; the result has the dtype of the losses.

    Source: Li 2023 (thesis), (7.2), (7.25), (7.82)–(7.85), and (7.238)–(7.240) for three levels.

    >>> losses = torch.tensor([0.0, 1.0, 9.0], requires_grad=True)
    >>> tilted_loss(losses, tilt=-2.0).backward()
    >>> losses.grad
    tensor([8.8080e-01, 1.1920e-01, 1.3415e-08])
    """
    tree = hierarchy(groups, _length(losses), losses.device)
    *inner, outer = level_tilts(tilt, inner_tilt, tree.depth)
    values, masses = climb(losses, _masses(losses, sample_weight), tree, inner)
    root = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return _Level.apply(values, masses, root, 1, outer)[0].to(losses.dtype)  # type: ignore[no-untyped-call,no-any-return]


def tilted_weights(
    losses: Tensor,
    tilt: float,
    groups: Any = None,
    *,
    inner_tilt: float | Sequence[float] = 0.0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """The weight of each example in the gradient of `tilted_loss`; they sum to 1.

    Without groups w_i = e^{t(f_i − R)}/N; with one level of groups (7.85).

    Source: Li 2023 (thesis), (7.25), (7.85).

    >>> tilted_weights(torch.tensor([0.0, 1.0, 9.0]), tilt=-2.0)
    tensor([8.8080e-01, 1.1920e-01, 1.3415e-08])
    """
    values = losses.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        value = tilted_loss(values, tilt, groups, inner_tilt=inner_tilt, sample_weight=sample_weight)
        return torch.autograd.grad(value, values)[0]


def superquantile_loss(
    losses: Tensor,
    tail: float,
    groups: Any = None,
    *,
    inner_tilt: float | Sequence[float] = 0.0,
    sample_weight: Tensor | None = None,
    nu: float | None = None,
) -> Tensor:
    """The mean of the worst share `tail` of the losses (CVaR); with groups, of the groups' (tilted) losses by their mass.

    `nu` > 0 smooths it as in `risk.Superquantile(smoothing="huber")`. The gradient is the (sub)gradient. With `nu` the
    second derivative is exact too, except at kinks of the gradient; without, it takes the weights of the tail as constants.

    Source: Pillutla et al. 2023, (5)–(7); Li 2023 (thesis), (7.61).

    >>> superquantile_loss(torch.tensor([1.0, 2.0, 3.0, 6.0]), tail=0.5)
    tensor(4.5000)
    """
    require(is_number(tail) and 0 < tail <= 1, "tail", "must lie in (0, 1]", tail)
    require(nu is None or (is_number(nu) and nu > 0), "nu", "must be a positive number, or None", nu)
    tree = hierarchy(groups, _length(losses), losses.device)
    inner = level_tilts(0.0, inner_tilt, tree.depth)[:-1]
    tops, masses = climb(losses, _masses(losses, sample_weight), tree, inner)
    kept = masses > 0
    return tail_mean(tops[kept], masses[kept], tail, nu).to(losses.dtype)


def tail_mean(tops: Tensor, masses: Tensor, tail: float, nu: float | None = None) -> Tensor:
    """`superquantile_loss` of losses (G,) with positive masses that sum to 1."""
    if nu is None:
        weights = exact_weights(tops.detach(), masses, tail).double()
        return (weights * tops).sum()
    value, weights = huber_smoothed(tops.detach(), masses, tail, nu)
    moved = tops - tops.detach()  # 0, with derivatives
    ratio = weights * tail / masses
    inside = torch.where((ratio > 0) & (ratio < 1 - 1e-12), masses, 0.0)  # neither left out nor at the cap, up to rounding
    level = (inside * moved).sum() / inside.sum().clamp(min=1e-300)  # η* moves so that the weights still sum to 1
    curved = (inside * (moved - level).square()).sum() / (2 * tail * nu)
    return value + (weights * moved).sum() + curved


def tracked(estimate: Tensor | None, batch_value: Tensor, tilt: float, rho: float) -> Tensor:
    """R ← (1/t) log((1 − ρ) e^{tR} + ρ e^{tR_B}): the tilted risk tracked over batches; t = 0 is the usual moving average.

    Source: Li 2023 (thesis), Algorithm 14, line 6 (its λ is `rho`).
    """
    if estimate is None:
        return batch_value.detach()
    pair = torch.stack([estimate.detach().double(), batch_value.detach().double()])
    return tilted(pair, torch.tensor([1 - rho, rho], dtype=torch.float64, device=pair.device), tilt)[0].to(batch_value.dtype)


@dataclass
class TiltedLoss:
    """`tilted_loss` as an object for a training loop; `tracked=True` remembers the normaliser from batch to batch.

    With `tracked=True` a batch's gradient is (1/|B|) Σ e^{t(f_i − R)} ∇f_i, with R tracked over batches. A batch of large
    losses then moves the model more than a batch of small losses, as in the tilted risk of all data. The value returned is
    the batch's own tilted loss times e^{t(R_B − R)}, at most 1/ρ; read `estimate` for R.

    Source: Li 2023 (thesis), Algorithm 14.

    >>> TiltedLoss(tilt=2.0)(torch.tensor([0.0, 1.0]))
    tensor(0.7169)
    """

    tilt: float
    inner_tilt: float | Sequence[float] = 0.0
    tracked: bool = False
    rho: float = 0.5
    estimate: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        level_tilts(self.tilt, 0.0, 0)
        require(is_number(self.rho) and 0 < self.rho <= 1, "rho", "must lie in (0, 1]", self.rho)

    def __call__(self, losses: Tensor, groups: Any = None, sample_weight: Tensor | None = None) -> Tensor:
        """The tilted loss of a batch: ()."""
        if self.tracked and groups is not None:
            raise IncompatibleParts(
                "TiltedLoss(tracked=True) tracks one normaliser, but groups need one each.",
                "Use tracked=False, or draw batches group by group: tilted.hierarchical_stochastic_descent.",
            )
        value = tilted_loss(losses, self.tilt, groups, inner_tilt=self.inner_tilt, sample_weight=sample_weight)
        if not self.tracked:
            return value
        self.estimate = tracked(self.estimate, value, self.tilt, self.rho)
        return torch.exp(self.tilt * (value.detach() - self.estimate)) * value


def _length(losses: Tensor) -> int:
    if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) == 0 or not losses.is_floating_point():
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidParameter(
            "losses", "must be a vector with one loss per example", shape, 'Use reduction="none", and .mean(1) over the rest.'
        )
    return len(losses)


def _masses(losses: Tensor, sample_weight: Tensor | None) -> Tensor:
    if sample_weight is None:
        return torch.full_like(losses, 1 / len(losses), dtype=torch.float64, requires_grad=False)
    weight = torch.as_tensor(sample_weight).detach().to(losses.device).double()
    good = weight.shape == losses.shape and bool((weight >= 0).all()) and 0 < float(weight.sum()) < float("inf")
    require(good, "sample_weight", f"must be {len(losses)} numbers ≥ 0 with a positive sum", tuple(weight.shape))
    return weight / weight.sum()


def climb(values: Tensor, masses: Tensor, tree: Hierarchy, tilts: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Risks and masses of the outermost groups, or of the examples where there are none; float64."""
    values = values.double()
    for parent, count, tilt in zip(tree.parents, tree.counts, tilts, strict=True):
        values = _Level.apply(values, masses, parent, count, tilt)  # type: ignore[no-untyped-call]
        masses = masses.new_zeros(count).index_add_(0, parent, masses)
    return values, masses


def _exponentials(values: Tensor, masses: Tensor, parent: Tensor, count: int, tilt: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per group the loss that dominates, and per member e^{t(f − that)} exponent and share of the group's mass."""
    weighs = masses > 0  # a member without mass must not dominate, or those with mass would underflow
    shown = torch.where(weighs, values.detach(), -torch.inf if tilt > 0 else torch.inf)
    top = torch.zeros(count, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(0, parent, shown, "amax" if tilt > 0 else "amin", include_self=False)
    top = torch.where(torch.isfinite(top), top, 0.0)  # a group without mass
    total = torch.zeros_like(top).index_add(0, parent, masses)
    share = masses / torch.where(total > 0, total, 1.0)[parent]
    return top, torch.where(weighs, tilt * (values - top[parent]), 0.0), share


def _member_weights(values: Tensor, masses: Tensor, parent: Tensor, count: int, tilt: float) -> Tensor:
    """Each member's share of its group's gradient: a softmax inside each group, itself differentiable."""
    _, exponents, share = _exponentials(values, masses, parent, count, tilt)
    parts = share * torch.exp(exponents)
    total = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, parent, parts)
    return parts / torch.where(total > 0, total, 1.0)[parent]


class _Level(torch.autograd.Function):
    """One level: values (M,) with masses (M,) and parents (M,) become the groups' tilted risks (G,).

    Plain autograd through the log of a sum would lose digits, and return NaN where exponentials underflow; here the backward
    pass is the formula of the weights, itself differentiable. All groups are done together, without branches on data: a loop
    over thousands of groups would be slow, and vmap allows no branch. `risk.tilted.tilted` and the loop over groups,
    `risk.hierarchical.hierarchical`, are its oracles in the tests.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, masses: Tensor, parent: Tensor, count: int, tilt: float) -> Tensor:
        top, exponents, share = _exponentials(values, masses, parent, count, tilt)
        zeros = torch.zeros_like(top)
        if tilt == 0:
            return zeros.index_add(0, parent, share * torch.where(masses > 0, values, 0.0))
        small = zeros.index_add(0, parent, share * torch.expm1(exponents))  # Σ e^x − 1: keeps its digits as t → 0
        whole = zeros.index_add(0, parent, share * torch.exp(exponents))
        logs = torch.where(small > -0.5, torch.log1p(small.clamp(min=-0.5)), torch.log(whole.clamp(min=1e-300)))
        return top + logs / tilt

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, masses, parent, ctx.count, ctx.tilt = inputs
        ctx.save_for_backward(values, masses, parent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        values, masses, parent = ctx.saved_tensors
        return grads[0][parent] * _member_weights(values, masses, parent, ctx.count, ctx.tilt), None, None, None, None
