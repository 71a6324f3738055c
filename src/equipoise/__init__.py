"""Equipoise: federated learning for clients that are not average.

Names are imported when they are first used, so that `equipoise --help` need not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from equipoise.core.version import VERSION

if TYPE_CHECKING:
    from equipoise import (
        aggregators,
        attacks,
        averaging,
        conformal,
        data,
        engines,
        errors,
        heterogeneity,
        metrics,
        models,
        observers,
        optim,
        personal,
        privacy,
        risk,
        sampling,
        server_opt,
        solvers,
        testing,
        tilted,
    )
    from equipoise.algorithm import Algorithm
    from equipoise.client_table import ClientTable
    from equipoise.compare import Comparison, compare
    from equipoise.data import ClientSet, FederatedData
    from equipoise.evaluate import EvaluatedModel, evaluate
    from equipoise.experiment.run_model import read_personal_models
    from equipoise.experiment.tune import Tuning, tune
    from equipoise.explain import explain
    from equipoise.result import Result
    from equipoise.runs.checkpoint import Checkpoints
    from equipoise.runs.family import Family, train_family
    from equipoise.runs.many import train_many
    from equipoise.runs.stopping import EarlyStopping
    from equipoise.train import train

__version__ = VERSION

__all__ = [
    "Algorithm",
    "Checkpoints",
    "ClientSet",
    "ClientTable",
    "Comparison",
    "EarlyStopping",
    "EvaluatedModel",
    "Family",
    "FederatedData",
    "Result",
    "Tuning",
    "aggregators",
    "attacks",
    "averaging",
    "compare",
    "conformal",
    "data",
    "engines",
    "errors",
    "evaluate",
    "explain",
    "heterogeneity",
    "metrics",
    "models",
    "observers",
    "optim",
    "personal",
    "privacy",
    "read_personal_models",
    "risk",
    "sampling",
    "server_opt",
    "solvers",
    "testing",
    "tilted",
    "train",
    "train_family",
    "train_many",
    "tune",
]

_HOMES = {  # of the names that are no modules
    "Algorithm": "algorithm",
    "Checkpoints": "runs.checkpoint",
    "ClientSet": "data",
    "ClientTable": "client_table",
    "Comparison": "compare",
    "EarlyStopping": "runs.stopping",
    "EvaluatedModel": "evaluate",
    "Family": "runs.family",
    "FederatedData": "data",
    "Result": "result",
    "Tuning": "experiment.tune",
    "read_personal_models": "experiment.run_model",
    "train_family": "runs.family",
    "train_many": "runs.many",
    "tune": "experiment.tune",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"equipoise.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"equipoise.{name}") is not None:
        return import_module(f"equipoise.{name}")
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _FunctionOfModule:
    """A function that has the name of the module it lives in; importing that module leaves the name to the function."""

    def __init__(self, name: str) -> None:
        self.name, self.replaced = name, None

    def __get__(self, package: Any, owner: Any = None) -> Any:
        return self.replaced or getattr(import_module(f"equipoise.{self.name}"), self.name)

    def __set__(self, package: Any, value: Any) -> None:
        if not isinstance(value, ModuleType):
            self.replaced = value


class _Package(ModuleType):
    train = _FunctionOfModule("train")
    compare = _FunctionOfModule("compare")
    evaluate = _FunctionOfModule("evaluate")
    explain = _FunctionOfModule("explain")


sys.modules[__name__].__class__ = _Package
