"""The optimiser behind the estimators: L-BFGS on the tilted risk of a linear model, preconditioned and annealed.

The problem is min over W, b of R(ℓ(x_i·W + b, y_i)) + (α/2)‖W‖², with R a tilted risk or a superquantile. Three things make it
as fast as the plain problem: the gradient of R is a weighted sum, so that one evaluation costs one pass over the data;
coordinates are those in which the (weighted) covariance of the data is the identity; and tilts grow from 0 in steps, each
warm-started, which for negative tilts is also what chooses among the local minima (section 7.5 of Li 2023). A superquantile
is smoothed on the way, and `sharpen` takes the smoothing away at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor

from equipoise.risk.quantile_sources import tail_quantile
from equipoise.risk.superquantile import huber_smoothed
from equipoise.risk.tilted import tilted
from equipoise.tilted.hierarchy import Hierarchy
from equipoise.tilted.links import Link
from equipoise.tilted.losses import climb, tail_mean, tilted_loss
from equipoise.tilted.newton import refine_minimum

FACTOR = 4.0  # by which a negative tilt grows from one step of the annealing to the next, so as to stay in its valley
CONVEX_FACTOR = 16.0  # the same when no tilt is negative: there is one minimum, and steps only save iterations
FAR = 4  # levels, which is a range of losses of 256 divided by the tilt, from which on a second start is tried
LOOSE = 1e-2  # the tolerance of all steps but the last
SMOOTHING = (1.0, 0.1, 0.01, 0.001)  # of the superquantile, relative to the mean loss, before `sharpen` takes it away
FINEST = 1e-9  # smoothing below which float64 does not tell losses apart
EXACT = 1e-12  # the relative gap of a superquantile that is 0 up to rounding
WHITENED = 500  # more columns than this are only scaled, because a square matrix of them costs too much
SMALL = 50_000  # numbers in the data, up to which a solution is refined as far as float64 goes, because it costs nothing
TURN = 200  # iterations of L-BFGS before Newton's method takes over, where a solution is refined
LIMITS = {"maxls": 50, "maxfun": 10**9}  # of L-BFGS, besides the limit on its iterations
ROWS = 10_000  # enough to estimate the correlations that the preconditioner needs


@dataclass(frozen=True, eq=False)
class Objective:
    """A risk of the losses, with the knob that annealing turns: `level` scales all tilts, or is the width of the smoothing."""

    masses: Tensor  # (N,), positive, sum to 1
    tree: Hierarchy
    tilts: tuple[float, ...]  # innermost first
    tail: float | None = None
    center: Tensor | float = 0.0  # of the superquantile's smoothing: what shares of their caps weights are pulled to, (G,)

    def __call__(self, losses: Tensor, level: float) -> tuple[float, Tensor]:
        """The risk, and its gradient with respect to the losses (N,)."""
        if level == 0:
            return float(self.masses @ losses), self.masses
        if self.tail is None and self.tree.depth == 0:
            value, weights = tilted(losses, self.masses, level * self.tilts[-1])
            return float(value), weights
        points = losses.detach().requires_grad_(True)
        value = self._traced(points, level)
        (weights,) = torch.autograd.grad(value, points)
        return float(value.detach()), weights

    def differentiate_weights(self, losses: Tensor, level: float) -> Callable[[Tensor], Tensor]:
        """The Hessian of the risk with respect to the losses, as a function that multiplies a vector (N,) by it."""
        if level == 0:
            return torch.zeros_like
        if self.tail is None and self.tree.depth == 0:
            tilt = level * self.tilts[-1]
            _, shares = tilted(losses, self.masses, tilt)
            return lambda vector: tilt * shares * (vector - shares @ vector)
        points = losses.detach().requires_grad_(True)
        (weights,) = torch.autograd.grad(self._traced(points, level), points, create_graph=True)
        return lambda vector: torch.autograd.grad(weights, points, vector, retain_graph=True)[0]

    def _traced(self, points: Tensor, level: float) -> Tensor:
        """The risk, differentiable by autograd."""
        if self.tail is not None:
            tops, masses = self.tops(points)
            return tail_mean(tops + level * self.center, masses, self.tail, level)
        inner = [level * each for each in reversed(self.tilts[:-1])]
        return tilted_loss(points, level * self.tilts[-1], self.tree, inner_tilt=inner, sample_weight=self.masses)

    def tops(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and masses (G,) of the outermost groups, or of the examples where there are none."""
        return climb(points, self.masses, self.tree, self.tilts[:-1])

    def exact(self, losses: Tensor) -> float:
        """The risk itself, without any smoothing."""
        return self(losses, 1.0)[0] if self.tail is None else float(tail_mean(*self.tops(losses), self.tail))

    @property
    def plain(self) -> bool:
        """Whether it is the mean."""
        return self.tail is None and not any(self.tilts)

    def levels(self, losses: Tensor, spread: float | None = None) -> list[float]:
        """The levels to go through, by the spread of the losses at the start; the last is the problem itself."""
        if self.tail is not None:
            return [factor * max(float(self.masses @ losses.abs()), 1e-12) for factor in SMOOTHING]
        reach = max(abs(tilt) for tilt in self.tilts) * (float(losses.max() - losses.min()) if spread is None else spread)
        factor = FACTOR if min(self.tilts) < 0 else CONVEX_FACTOR
        levels = [1.0]
        while levels[-1] * reach > factor and len(levels) < 30:
            levels.append(levels[-1] / factor)
        return levels[::-1]


@dataclass(frozen=True, eq=False)
class Fit:
    """Coefficients (K, F) and intercepts (K,), the iterations it took, whether they sufficed, and the objective there."""

    coef: Tensor
    intercept: Tensor
    iterations: int
    converged: bool
    value: float


def sharpen(objective: Objective, level: float, enough: float, solve: Callable[[Objective, float], Tensor | None]) -> float:
    """Solve at the last level, and then without its smoothing; returns the gap to the optimum, in units of the mean loss.

    The method of multipliers: smoothing pulls the weights to a centre, so the problem is solved again around the weights that
    it gave, until they stay. The solution is the optimum under these weights, and the risk is the largest value under any that
    are allowed: what is missing to the risk bounds the gap. `solve` gives the losses (N,) of a solution, None where it gave up.

    Source: Rockafellar 1976 (Augmented Lagrangians and applications of the proximal point algorithm).
    """
    gap, unit = math.inf if objective.tail else 0.0, level / SMOOTHING[-1]
    while (losses := solve(objective, level)) is not None and objective.tail is not None:
        before, (tops, masses) = gap, objective.tops(losses)
        _, weights = huber_smoothed(tops + level * objective.center, masses, objective.tail, level)
        gap = (objective.exact(losses) - float(weights @ tops)) / unit
        if gap <= enough or level < FINEST * unit:
            break
        level *= 1.0 if gap < 0.1 * before else 0.1
        objective = replace(objective, center=weights * objective.tail / masses)
    return gap


@dataclass(frozen=True)
class Settings:
    """How to fit: the L2 penalty, whether there is an intercept, annealing, and when to stop."""

    alpha: float = 0.0
    fit_intercept: bool = True
    anneal: bool = True
    tol: float = 1e-6
    max_iter: int = 1000


def fit_linear(x: Tensor, y: Tensor, link: Link, objective: Objective, start: tuple[Tensor, Tensor], settings: Settings) -> Fit:
    """Minimise from `start`, a pair (K, F) and (K,); `anneal=False` goes to the final level at once."""
    problem = _Problem(x, y, link, objective, settings)
    coef, intercept = start
    if objective.plain:
        return problem.descend(coef, intercept, [0.0])
    losses = problem.losses(coef, intercept)
    if not settings.anneal:
        return problem.descend(coef, intercept, [objective.levels(losses)[-1]])
    if objective.tail is None and min(objective.tilts) >= 0:  # one minimum: where the way starts does not matter
        return problem.descend(coef, intercept, objective.levels(losses))
    low, offset, used, _ = problem.solve(coef, intercept, 0.0, LOOSE)
    levels = objective.levels(problem.losses(low, offset))
    fit = problem.descend(low, offset, levels, used)
    if min(objective.tilts) < 0 and len(levels) > FAR:
        # The losses differ by orders of magnitude: outliers may have drawn the minimum of the mean so far to their side that
        # the way from there ends among them. So go a second way, from the start, whose typical loss sets the first tilt.
        typical = float(tail_quantile(losses - losses.min(), objective.masses, 0.5))
        other = problem.descend(coef, intercept, objective.levels(losses, typical))
        fit = other if other.value < fit.value else fit
    return fit


class _Problem:
    """Data and risk of one fit, and the coordinates that were last used."""

    def __init__(self, x: Tensor, y: Tensor, link: Link, objective: Objective, settings: Settings) -> None:
        self.x, self.y, self.link, self.objective, self.settings = x, y, link, objective, settings
        self.weights = objective.masses  # for which the coordinates were made
        self.ridge = settings.alpha / link.curvature
        self.center, self.basis = coordinates(x, self.weights, settings.fit_intercept, self.ridge)

    def predictions(self, coef: Tensor, intercept: Tensor) -> Tensor:
        """(N,) for one output, (N, K) for several."""
        return self.x @ coef[0] + intercept[0] if len(coef) == 1 else self.x @ coef.T + intercept

    def losses(self, coef: Tensor, intercept: Tensor) -> Tensor:
        return self.link(self.predictions(coef, intercept), self.y)[0]

    def descend(self, coef: Tensor, intercept: Tensor, levels: list[float], used: int = 0) -> Fit:
        """Through all levels, the last one to the full tolerance."""
        tol, converged = self.settings.tol, True

        def solve(objective: Objective, level: float, tol: float = tol) -> Tensor | None:
            nonlocal coef, intercept, used, converged
            self.objective = objective
            coef, intercept, more, converged = self.solve(coef, intercept, level, tol)
            used += more
            return self.losses(coef, intercept) if converged else None

        for level in levels[:-1]:
            solve(self.objective, level, LOOSE)
        enough = min(tol, EXACT) if self.x.numel() * len(coef) <= SMALL else tol
        converged = sharpen(self.objective, levels[-1], enough, solve) <= tol and converged
        value = self.objective.exact(self.losses(coef, intercept)) + 0.5 * self.settings.alpha * float(coef.square().sum())
        return Fit(coef, intercept, used, converged, value)

    def solve(self, coef: Tensor, intercept: Tensor, level: float, tol: float) -> tuple[Tensor, Tensor, int, bool]:
        """Solve one level in coordinates (u, v) with W = W₀ + c u Bᵀ and b + m·W = β₀ + c v.

        On large data this is L-BFGS. On small data L-BFGS and Newton's method take turns until `tol` is reached, and Newton's
        method finds the remaining digits.
        """
        alpha, fit_intercept = self.settings.alpha, self.settings.fit_intercept
        losses = self.losses(coef, intercept)
        _, weights = self.objective(losses, level)
        if level and 0.5 * float((weights - self.weights).abs().sum()) > 0.3:
            # The examples that count have changed: so has the shape of the problem. For positive tilts a few examples may hold
            # all weight, so that the covariance of all is kept in part.
            self.weights = weights if max(self.objective.tilts) <= 0 and self.objective.tail is None else (
                0.5 * weights + 0.5 * self.objective.masses
            )  # fmt: skip
            self.center, self.basis = coordinates(self.x, self.weights, fit_intercept, self.ridge)
        unit = (
            max(float(weights @ losses), 1e-14 * float(self.objective.masses @ losses), 1e-300) if self.link.quadratic else 1.0
        )
        c = unit**0.5
        outputs, features = coef.shape
        center, basis = self.center, self.basis
        shift = intercept + coef @ center  # β₀
        last = tol <= self.settings.tol
        refine = last and self.x.numel() * outputs <= SMALL

        def unpack(point: Tensor) -> tuple[Tensor, Tensor]:
            table = point.reshape(outputs, features + 1)
            new = coef + c * (table[:, :features] @ basis.T if basis.dim() == 2 else table[:, :features] * basis)
            return new, (shift + c * table[:, features] if fit_intercept else shift) - new @ center

        def function(point: Tensor) -> tuple[float, Tensor]:
            new, offset = unpack(point)
            losses, slopes = self.link(self.predictions(new, offset), self.y)
            value, weights = self.objective(losses, level)
            gradient = gather(slopes * (weights if slopes.dim() == 1 else weights[:, None]), new)
            return (value + 0.5 * alpha * float(new.square().sum())) / unit, gradient

        def function_of_arrays(flat: Any) -> tuple[float, Any]:
            value, gradient = function(torch.from_numpy(flat))
            return value, gradient.numpy()

        def gather(parts: Tensor, penalised: Tensor) -> Tensor:
            """The derivative by the point from the derivatives by predictions and the coefficients under the penalty."""
            total = parts.sum(0).reshape(outputs, 1)
            along = (parts @ self.x)[None] if parts.dim() == 1 else parts.T @ self.x
            gradient = along - total * center + alpha * penalised
            gradient = gradient @ basis if basis.dim() == 2 else gradient * basis
            full = torch.cat([gradient, total if fit_intercept else torch.zeros_like(total)], 1) * (c / unit)
            if outputs > 1 and refine:  # the same for all classes changes no probability: no direction for the last digits
                full = full - full.mean(0)
            flat: Tensor = full.flatten()
            return flat

        def hessian(point: Tensor) -> Callable[[Tensor], Tensor]:
            """The Hessian at a point, as a function that multiplies a direction by it."""
            at = self.predictions(*unpack(point)).requires_grad_(True)
            losses, slopes = self.link(at, self.y)
            losses, fixed = losses.detach(), slopes.detach()
            _, weights = self.objective(losses, level)
            derivative = self.objective.differentiate_weights(losses, level)
            # With one output each slope depends on its own prediction alone, so that one pass gives all second derivatives.
            second = torch.autograd.grad(slopes.sum(), at)[0] * weights if at.dim() == 1 else None

            def multiply(direction: Tensor) -> Tensor:
                table = c * direction.reshape(outputs, features + 1)
                change = table[:, :features] @ basis.T if basis.dim() == 2 else table[:, :features] * basis
                moved = self.predictions(change, (table[:, features] if fit_intercept else 0.0) - change @ center)
                if second is not None:
                    return gather(second * moved + fixed * derivative(fixed * moved), change)
                (bent,) = torch.autograd.grad(slopes, at, moved, retain_graph=True)
                return gather(bent * weights[:, None] + fixed * derivative((fixed * moved).sum(1))[:, None], change)

            return multiply

        point, used = torch.zeros(outputs * (features + 1), dtype=torch.float64), 0
        while True:
            left = self.settings.max_iter - used
            options = {"maxiter": min(left, TURN) if refine else left, "gtol": tol, "ftol": 2.2e-16 if last else 1e-9}
            optimum = minimize(function_of_arrays, point.numpy(), jac=True, method="L-BFGS-B", options=LIMITS | options)
            point, used, enough = torch.from_numpy(optimum.x), used + int(optimum.nit), optimum.status != 1
            if refine:
                least = self.link.curvature if self.link.quadratic and level == 0 and basis.dim() == 2 else 0.0  # by B's making
                point, steps, largest = refine_minimum(function, hessian, point, self.settings.max_iter - used, least)
                used, enough = (used, True) if enough else (used + steps, largest <= tol)
            if enough or used >= self.settings.max_iter:
                coef, intercept = unpack(point)
                return coef, intercept, used, enough


def coordinates(x: Tensor, weights: Tensor, fit_intercept: bool, ridge: float) -> tuple[Tensor, Tensor]:
    """The weighted mean m (F,) of the columns, and B with Bᵀ (Cov + ridge) B = 1: (F, F), or for many columns scales (F,).

    Directions in which the data do not vary at all are left out of B: nothing is learnt there. Correlations come from at most
    `ROWS` rows: this is a preconditioner, which changes the way and not the goal.
    """
    features = x.shape[1]
    mean = weights @ x if fit_intercept else torch.zeros(features, dtype=x.dtype)
    step = -(-len(x) // ROWS)
    share = weights[::step] / weights[::step].sum().clamp(min=1e-300)
    rows = (x[::step] - mean) * share.sqrt()[:, None]
    spread = rows.square().sum(0)
    if step > 1 and bool((spread <= 1e-12 * mean.square()).any()):  # constant in the rows taken, but perhaps not in all
        spread = torch.stack([weights @ (column - middle).square() for column, middle in zip(x.T, mean, strict=True)])
    constant = spread <= 1e-24 * mean.square()  # up to rounding; such a column says nothing beside the intercept
    scale = torch.where(constant, 0.0, 1 / (spread + ridge).clamp(min=1e-300).sqrt())
    if features > WHITENED or features == 0:
        return mean, scale
    covariance = rows.T @ rows
    own, deviation = covariance.diagonal().clamp(min=1e-300).sqrt(), spread.sqrt()
    seen = own > 1e-6 * deviation
    matrix = torch.where(seen[:, None] & seen[None, :], covariance / own / own[:, None], 0.0)
    matrix.fill_diagonal_(1.0)  # the correlations
    matrix = matrix * (deviation * scale) * (deviation * scale)[:, None] + torch.diag(ridge * scale.square())
    values, vectors = torch.linalg.eigh(matrix)
    inverse = torch.where(values > 1e-12 * features, 1 / values.clamp(min=1e-300).sqrt(), 0.0)
    return mean, scale[:, None] * vectors * inverse
