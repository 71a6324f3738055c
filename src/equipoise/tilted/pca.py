"""Principal components that serve every group: a tilted risk of the groups' excess reconstruction errors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from equipoise.errors import is_integer, require
from equipoise.tilted.convex import LOOSE, Objective, sharpen
from equipoise.tilted.estimators import Floats, Risk, as_tensor, check_stopping, objective_of
from equipoise.tilted.hierarchy import Hierarchy


def top_groups(tree: Hierarchy) -> Tensor:
    """The outermost group of every example (N,)."""
    group = tree.parents[0]
    for parent in tree.parents[1:]:
        group = parent[group]
    return group


def best_directions(x: Tensor, masses: Tensor, rank: int) -> Tensor:
    """The `rank` directions (F, rank) that keep most of Σ m_i x_i x_iᵀ."""
    vectors: Tensor = torch.linalg.eigh(x.T @ (x * masses[:, None])).eigenvectors
    return vectors[:, -rank:].flip(1)


def errors(x: Tensor, directions: Tensor) -> Tensor:
    """‖x_i − U Uᵀ x_i‖² for every row (N,)."""
    return (x.square().sum(1) - (x @ directions).square().sum(1)).clamp(min=0.0)


def best_errors(x: Tensor, objective: Objective, rank: int) -> Tensor:
    """What each example's outermost group would pay under its own best directions: its mean error there (N,).

    It is a mean also where `inner_tilt` tilts inside groups: a constant per group, so that a group's loss is its excess.
    """
    if objective.tree.depth == 0:
        return torch.zeros(len(x), dtype=torch.float64)  # an example alone is reconstructed without error
    groups = top_groups(objective.tree)
    base = torch.zeros(len(x), dtype=torch.float64)
    for group in range(objective.tree.counts[-1]):
        rows = torch.nonzero(groups == group)[:, 0]
        masses = objective.masses[rows] / objective.masses[rows].sum()
        base[rows] = masses @ errors(x[rows], best_directions(x[rows], masses, rank))
    return base


@dataclass(eq=False, repr=False)
class FairPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Principal components of a tilted risk: min over U of (1/t) log Σ_g α_g e^{t f_g(U)}.

    f_g(U) = (1/|g|)(‖X_g − X_g U Uᵀ‖² − ‖X_g − X̂_g‖²) is what group g loses beside its own best approximation X̂_g of the same
    rank; all data are centred by their common mean. `tilt` = 0 is PCA; as `tilt` grows, groups lose equally much, up to min-max
    fairness. Without groups every example is its own: negative tilts then give components that ignore outliers.
    `inner_tilt` tilts inside groups, and risk="superquantile" with `tail` serves the worst share of the groups.

    Parameters
    ----------
    n_components : the number of components; None keeps as many as the data have directions of their own.
    tol : largest slope at the solution, with losses measured in units of the total variance; of a superquantile also the
        largest excess over what its weights give there, in units of the mean loss.

    Attributes
    ----------
    components_ (n_components, n_features), orthonormal, in order of the variance they explain; mean_ (n_features,);
    explained_variance_ (n_components,), divided by the number of examples; group_losses_ (groups,), the f_g in the order of
    the sorted labels, if `fit` was given groups; n_iter_, objective_.

    Source: Li 2023 (thesis), section 7.7.2.1 and Algorithm 15; Samadi et al. 2018 (the loss and the min-max limit).
    """

    n_components: int | None = None
    _: KW_ONLY
    tilt: float = 0.0
    inner_tilt: float | Sequence[float] = 0.0
    risk: Risk = "tilted"
    tail: float = 0.5
    tol: float = 1e-7
    max_iter: int = 2000

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None, groups: Any = None) -> Self:
        """Fit; `groups` has a label per row, or one column of labels per level, outermost first. `y` is ignored."""
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        rank, most = self.n_components, X.shape[1]
        good = rank is None or (is_integer(rank) and 1 <= rank <= most)
        require(good, "n_components", f"must be None or a whole number in 1 … {most}", rank)
        check_stopping(self)
        objective, kept = objective_of(self, X, sample_weight, groups)
        rows = as_tensor(X[kept])
        mean = objective.masses @ rows
        rows = rows - mean
        rank = _directions_of(rows, objective.masses) if rank is None else int(rank)
        directions, self.n_iter_, self.objective_ = self._solve(rows, objective, rank)
        self.mean_, self.n_components_ = mean.numpy(), rank
        self.components_, self.explained_variance_ = _ordered(rows, objective.masses, directions)
        self._n_features_out = rank
        if objective.tree.depth:
            excess = (errors(rows, directions) - best_errors(rows, objective, rank)) * objective.masses
            top, zeros = top_groups(objective.tree), torch.zeros(objective.tree.counts[-1], dtype=torch.float64)
            self.group_losses_ = (zeros.index_add(0, top, excess) / zeros.index_add(0, top, objective.masses)).numpy()
        return self

    def _solve(self, x: Tensor, objective: Objective, rank: int) -> tuple[Tensor, int, float]:
        """L-BFGS over matrices V (F, rank) whose column space is what counts, restarted at orthonormal V at every level."""
        directions = best_directions(x, objective.masses, rank)
        unit = float(objective.masses @ x.square().sum(1))
        base = best_errors(x, objective, rank)
        if objective.plain or rank == x.shape[1] or unit == 0:
            value = objective(errors(x, directions) - base, 0.0)[0]
            return directions, 1, value
        iterations, status, levels = 0, 0, objective.levels(errors(x, directions) - base)

        def solve(objective: Objective, level: float, tol: float = self.tol, ftol: float = 1e-15) -> Tensor | None:
            nonlocal directions, iterations, status

            def function(flat: object) -> tuple[float, object]:
                v = torch.as_tensor(flat, dtype=torch.float64).reshape(-1, rank)
                u, r = torch.linalg.qr(v)
                along = x @ u
                value, weights = objective((x.square().sum(1) - along.square().sum(1)) - base, level)
                pull = x.T @ (along * weights[:, None])  # S U, with S the second moments under the weights
                slope = -2 * (pull - u @ (u.T @ pull))
                slope = torch.linalg.solve_triangular(r, slope.T, upper=True).T  # with respect to V = U R
                return value / unit, (slope / unit).flatten().numpy()

            options = {"maxiter": self.max_iter, "gtol": tol, "maxls": 50, "ftol": ftol, "maxfun": 10**9}
            optimum = minimize(function, directions.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
            directions = torch.linalg.qr(torch.from_numpy(optimum.x).reshape(-1, rank)).Q
            iterations, status = iterations + int(optimum.nit), optimum.status
            return None if status == 1 else errors(x, directions) - base

        for level in levels[:-1]:
            solve(objective, level, max(self.tol, 1e-2 * LOOSE), 1e-10)
        if sharpen(objective, levels[-1], self.tol, solve) > self.tol or status == 1:
            warnings.warn(f"FairPCA stopped after max_iter={self.max_iter} iterations.", ConvergenceWarning, stacklevel=3)
        return directions, max(iterations, 1), objective.exact(errors(x, directions) - base)

    def transform(self, X: Any) -> Floats:
        """Coordinates along the components (N, n_components)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray((X - self.mean_) @ self.components_.T)

    def inverse_transform(self, X: Any) -> Floats:
        """Points (N, n_features) with these coordinates."""
        check_is_fitted(self)
        return np.asarray(np.asarray(X, np.float64) @ self.components_ + self.mean_)


def _directions_of(x: Tensor, masses: Tensor) -> int:
    """The number of directions in which the data vary, at least 1."""
    values = torch.linalg.eigvalsh(x.T @ (x * masses[:, None]))
    return max(int((values > 1e-12 * values[-1]).sum()), 1)


def _ordered(x: Tensor, masses: Tensor, directions: Tensor) -> tuple[Floats, Floats]:
    """Axes of the subspace of `directions`, by falling variance, and their variances; the largest entry of an axis is positive.

    Only the subspace was fitted, so that its axes may be chosen.
    """
    along = x @ directions
    values, vectors = torch.linalg.eigh(along.T @ (along * masses[:, None]))
    components = (directions @ vectors.flip(1)).T
    signs = torch.sign(components.gather(1, components.abs().argmax(1, keepdim=True)))
    return (components * torch.where(signs == 0, 1.0, signs)).numpy(), values.flip(0).clamp(min=0.0).numpy()
