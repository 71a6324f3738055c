"""Linear models with a tilted risk or a superquantile in place of the mean loss, in the manner of scikit-learn.

`tilt` > 0 leans towards examples with large losses, < 0 away from them; with `groups` it acts between groups, and `inner_tilt`
inside them. Tilts have the unit of 1/loss: what tilt is strong depends on how large the losses are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from torch.nn.functional import logsigmoid

from equipoise.errors import InvalidParameter, is_integer, is_number, require
from equipoise.risk.quantile_sources import tail_quantile
from equipoise.tilted import links
from equipoise.tilted.convex import Fit, Objective, Settings, fit_linear
from equipoise.tilted.hierarchy import hierarchy, level_tilts

Floats = NDArray[np.float64]
Risk = Literal["tilted", "superquantile"]


def objective_of(estimator: Any, x: Floats, sample_weight: ArrayLike | None, groups: Any) -> tuple[Objective, Any]:
    """The risk that an estimator's parameters ask for, and an index of the rows that have a weight."""
    require(
        estimator.risk in ("tilted", "superquantile"), "risk", 'must be "tilted" or "superquantile"', estimator.risk
    )  # fmt: skip
    weights, kept = np.ones(len(x)), slice(None)
    if sample_weight is not None:
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        require(bool(weights.sum() > 0), "sample_weight", "must have a positive sum", float(weights.sum()))
        kept = weights > 0
        weights = weights[kept]
    tree = hierarchy(groups, len(x))
    if tree.depth and sample_weight is not None:
        tree = hierarchy(_rows(groups, kept), len(weights))
    tilts = level_tilts(estimator.tilt, estimator.inner_tilt if tree.depth else (), tree.depth)
    masses = torch.from_numpy(weights / weights.sum())
    if estimator.risk == "tilted":
        return Objective(masses, tree, tilts), kept
    require(
        estimator.tilt == 0, "tilt", 'must be 0 with risk="superquantile", which takes its place between examples or groups',
        estimator.tilt, "Set `tail`; `inner_tilt` still acts inside groups.",
    )  # fmt: skip
    require(is_number(estimator.tail) and 0 < estimator.tail <= 1, "tail", "must lie in (0, 1]", estimator.tail)
    return Objective(masses, tree, tilts, tail=float(estimator.tail)), kept


def as_tensor(array: Floats) -> Tensor:
    """An array as a tensor that shares its memory; a copy only where the array is read-only, which torch does not know."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _rows(groups: Any, kept: Any) -> Any:
    """The labels of the rows that are kept."""
    if isinstance(groups, list | tuple) and len(groups) and isinstance(groups[0], list | tuple | np.ndarray | Tensor):
        return [np.asarray(each)[kept] for each in groups]
    return np.asarray(groups)[kept]


def check_stopping(estimator: Any) -> None:
    """Refuse a tolerance or a number of iterations that cannot be."""
    require(is_number(estimator.tol) and estimator.tol > 0, "tol", "must be a positive number", estimator.tol)
    most = estimator.max_iter
    require(is_integer(most) and most >= 1, "max_iter", "must be a whole number ≥ 1", most)


@dataclass(eq=False, repr=False)
class _LinearEstimator(BaseEstimator):  # type: ignore[misc]
    """The parameters of linear estimators, which scikit-learn reads from the signature, and their fit."""

    tilt: float = 0.0
    _: KW_ONLY
    inner_tilt: float | Sequence[float] = 0.0
    risk: Risk = "tilted"
    tail: float = 0.5
    alpha: float = 1e-4
    fit_intercept: bool = True
    anneal: bool = True
    warm_start: bool = False
    tol: float = 1e-6
    max_iter: int = 1000

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: Any = None) -> Self:
        """Fit; `groups` has a label per row, or one column of labels per level, outermost first."""
        X, targets = self._prepare(X, y)
        objective, kept = objective_of(self, X, sample_weight, groups)
        fits = self._minima(as_tensor(X[kept]), as_tensor(targets[kept]), objective)
        self._warm = [(fit.coef.numpy(), fit.intercept.numpy()) for fit in fits]
        self.coef_ = np.concatenate([fit.coef.numpy() for fit in fits])
        self.intercept_: Any = np.concatenate([fit.intercept.numpy() for fit in fits])
        self.n_iter_ = max(1, *(fit.iterations for fit in fits))
        self.objective_ = sum(fit.value for fit in fits)
        return self

    def _prepare(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        """Check the data; give the rows and the targets as numbers."""
        raise NotImplementedError

    def _minima(self, x: Tensor, targets: Tensor, objective: Objective) -> list[Fit]:
        """Fit one vector of coefficients, or several."""
        raise NotImplementedError

    def _minimise(self, x: Tensor, y: Tensor, link: links.Link, objective: Objective, outputs: int = 1, row: int = 0) -> Fit:
        """Fit from zeros with annealing, or from the last fit without, if `warm_start`."""
        good = is_number(self.alpha) and 0 <= self.alpha < math.inf
        require(good, "alpha", "must be a number ≥ 0, the strength of the L2 penalty", self.alpha)
        check_stopping(self)
        coef, intercept = torch.zeros(outputs, x.shape[1], dtype=torch.float64), torch.zeros(outputs, dtype=torch.float64)
        if link.quadratic and self.fit_intercept:
            # The median, because outliers must not choose where negative tilts start.
            intercept[0] = tail_quantile(y, objective.masses, 0.5) if min(objective.tilts) < 0 else objective.masses @ y
        before = getattr(self, "_warm", []) if self.warm_start else []
        warm = row < len(before) and before[row][0].shape == coef.shape
        if warm:
            coef, intercept = (torch.from_numpy(part.copy()) for part in before[row])
            intercept = intercept if self.fit_intercept else torch.zeros_like(intercept)
        anneal = bool(self.anneal) and not warm
        settings = Settings(float(self.alpha), bool(self.fit_intercept), anneal, float(self.tol), int(self.max_iter))
        fit = fit_linear(x, y, link, objective, (coef, intercept), settings)
        if not fit.converged:
            warnings.warn(
                f"{type(self).__name__} stopped after max_iter={self.max_iter} iterations before reaching tol="
                f"{self.tol:g}. Raise max_iter or tol, or add a penalty alpha if classes can be separated without error.",
                ConvergenceWarning,
                stacklevel=4,
            )
        return fit


@dataclass(eq=False, repr=False)
class TiltedLinearRegression(RegressorMixin, _LinearEstimator):  # type: ignore[misc]
    """Least squares with a tilted risk: min (1/t) log Σ α_i e^{t (y_i − x_i·w − b)²} + (alpha/2)‖w‖².

    `tilt` = 0 is ordinary least squares; negative tilts ignore outliers (the thesis uses −2 on targets of about unit spread),
    positive ones fit the worst examples better. Negative tilts are not convex: the solution is followed from `tilt` 0, unless
    `anneal=False`, which starts at zeros, or `warm_start=True`, which starts at the last fit.

    Parameters
    ----------
    tilt, inner_tilt : tilts between examples, or between groups and inside them, if `fit` is given groups.
    risk, tail : "superquantile" minimises the mean of the worst share `tail` of the losses (or groups) instead.
    alpha : strength of the L2 penalty; the intercept is free.
    tol : largest slope at the solution, in coordinates in which data and residuals have unit spread;
        of a superquantile also the largest distance to the optimum, in units of the mean loss. No smoothing is left.

    Attributes
    ----------
    coef_ (n_features,), intercept_ (float), n_iter_, objective_ (the value that was minimised), n_features_in_.

    Source: Li 2023 (thesis), sections 7.5 and 7.7.1.1; "exponential squared loss" of Wang et al. 2013 for `tilt` < 0.

    >>> import numpy as np
    >>> x = np.arange(8.0)[:, None]
    >>> y = np.array([0., 1, 2, 3, 4, 5, 6, 50])  # the last is wrong
    >>> round(float(TiltedLinearRegression(tilt=-2.0).fit(x, y).coef_[0]), 3)
    1.0
    """

    alpha: float = 0.0

    def _prepare(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return X, np.asarray(y, np.float64)

    def _minima(self, x: Tensor, targets: Tensor, objective: Objective) -> list[Fit]:
        return [self._minimise(x, targets, links.squared, objective)]

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: Any = None) -> Self:
        """Fit; `groups` has a label per row, or one column of labels per level, outermost first."""
        super().fit(X, y, sample_weight, groups)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])
        return self

    def predict(self, X: Any) -> Floats:
        """The predicted targets (N,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(X @ self.coef_ + self.intercept_)


class _Classifier(ClassifierMixin, _LinearEstimator):  # type: ignore[misc]
    """What the two classifiers share: classes, scores and predictions from `coef_` (K, F) and `intercept_` (K,)."""

    coef_: Floats
    intercept_: Floats
    classes_: NDArray[Any]

    def _prepare(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            name = type(self).__name__
            raise InvalidParameter(
                "y", f"must hold at least two classes for {name}, but contains only one class", self.classes_
            )
        return X, codes

    def decision_function(self, X: Any) -> Floats:
        """Scores (N,) of the second class for two classes, else (N, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        scores = X @ self.coef_.T + self.intercept_
        return np.asarray(scores[:, 0] if scores.shape[1] == 1 else scores)

    def predict(self, X: Any) -> NDArray[Any]:
        """The predicted classes (N,)."""
        scores = self.decision_function(X)
        return np.asarray(self.classes_[(scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(1)])


class TiltedLogisticRegression(_Classifier):
    """Logistic regression with a tilted risk: min (1/t) log Σ α_i e^{t ℓ_i} + (alpha/2)‖w‖², ℓ_i = −log p(y_i | x_i).

    Two classes have one vector of coefficients, more a softmax over all. `tilt` = 0 is LogisticRegression(C=1/(alpha·N)).
    Negative tilts (the thesis uses −2) are robust to wrong labels; with `groups=y` a positive one serves rare classes, and an
    `inner_tilt` of −2 beside it keeps wrong labels out. Parameters and attributes are those of TiltedLinearRegression, with
    `coef_` (1 or classes, n_features), `intercept_` (1 or classes,) and `classes_`.

    Source: Li 2023 (thesis), sections 7.5, 7.6, 7.7.2.5 and 7.7.3.1.

    >>> import numpy as np
    >>> x, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array([0, 0, 1, 1])
    >>> TiltedLogisticRegression(tilt=1.0).fit(x, y).predict(np.array([[-3.0], [3.0]]))
    array([0, 1])
    """

    def _minima(self, x: Tensor, targets: Tensor, objective: Objective) -> list[Fit]:
        if len(self.classes_) == 2:
            return [self._minimise(x, targets.double(), links.logistic, objective)]
        fit = self._minimise(x, targets, links.multinomial, objective, outputs=len(self.classes_))
        # Adding the same to all classes changes nothing: choose the sum 0.
        return [replace(fit, coef=fit.coef - fit.coef.mean(0), intercept=fit.intercept - fit.intercept.mean())]

    def predict_log_proba(self, X: Any) -> Floats:
        """Logarithms of the class probabilities (N, classes)."""
        scores = torch.from_numpy(self.decision_function(X))
        if scores.dim() == 1:
            return np.asarray(logsigmoid(torch.stack([-scores, scores], 1)).numpy())
        return np.asarray(torch.log_softmax(scores, 1).numpy())

    def predict_proba(self, X: Any) -> Floats:
        """The class probabilities (N, classes)."""
        return np.asarray(np.exp(self.predict_log_proba(X)))


@dataclass(eq=False, repr=False, kw_only=True)
class TiltedSVC(_Classifier):
    """A linear support vector classifier with a tilted risk: min (1/t) log Σ α_i e^{t ℓ_i} + (alpha/2)‖w‖².

    `loss="squared_hinge"` is max(0, 1 − s z)², `"hinge"` its root with the kink rounded off over a width of 0.01. More than two
    classes are fitted one against the rest. `tilt` = 0 with the squared hinge is LinearSVC(C=1/(alpha·N)) with a free
    intercept. Parameters and attributes are those of TiltedLogisticRegression.

    Source: Li 2023 (thesis), sections 7.7.2.2 and 7.7.2.5.

    >>> import numpy as np
    >>> x, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array([0, 0, 1, 1])
    >>> TiltedSVC(tilt=1.0).fit(x, y).predict(np.array([[-3.0], [3.0]]))
    array([0, 1])
    """

    loss: Literal["squared_hinge", "hinge"] = "squared_hinge"

    def _prepare(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        require(self.loss in ("squared_hinge", "hinge"), "loss", 'must be "squared_hinge" or "hinge"', self.loss)
        return super()._prepare(X, y)

    def _minima(self, x: Tensor, targets: Tensor, objective: Objective) -> list[Fit]:
        link = links.squared_hinge if self.loss == "squared_hinge" else links.hinge
        chosen = [1] if len(self.classes_) == 2 else range(len(self.classes_))
        return [self._minimise(x, (targets == k).double(), link, objective, row=row) for row, k in enumerate(chosen)]
