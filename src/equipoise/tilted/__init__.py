"""Tilted risk outside federated learning: losses and solvers for PyTorch, estimators for scikit-learn.

The estimators need scikit-learn, and are imported only when they are asked for; all else needs torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.tilted.losses import TiltedLoss, superquantile_loss, tilted_loss, tilted_weights
from equipoise.tilted.solvers import (
    Solution,
    annealed,
    batch_descent,
    group_probabilities,
    hierarchical_stochastic_descent,
    stochastic_descent,
)

if TYPE_CHECKING:
    from equipoise.tilted.estimators import TiltedLinearRegression, TiltedLogisticRegression, TiltedSVC
    from equipoise.tilted.pca import FairPCA

_ESTIMATORS = {
    "FairPCA": "pca",
    "TiltedLinearRegression": "estimators",
    "TiltedLogisticRegression": "estimators",
    "TiltedSVC": "estimators",
}

__all__ = [
    "FairPCA",
    "Solution",
    "TiltedLinearRegression",
    "TiltedLogisticRegression",
    "TiltedLoss",
    "TiltedSVC",
    "annealed",
    "batch_descent",
    "group_probabilities",
    "hierarchical_stochastic_descent",
    "stochastic_descent",
    "superquantile_loss",
    "tilted_loss",
    "tilted_weights",
]


def __getattr__(name: str) -> Any:
    if name in _ESTIMATORS:
        from importlib import import_module

        return getattr(import_module(f"equipoise.tilted.{_ESTIMATORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
