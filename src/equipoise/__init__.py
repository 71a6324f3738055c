"""Equipoise: federated learning for clients that are not average."""

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
from equipoise.compare import Comparison, compare
from equipoise.core.version import VERSION
from equipoise.data import ClientSet, FederatedData
from equipoise.result import Result
from equipoise.runs.family import Family, train_family
from equipoise.runs.many import train_many
from equipoise.train import train

__version__ = VERSION

__all__ = [
    "Algorithm",
    "ClientSet",
    "Comparison",
    "Family",
    "FederatedData",
    "Result",
    "aggregators",
    "attacks",
    "averaging",
    "compare",
    "conformal",
    "data",
    "engines",
    "errors",
    "heterogeneity",
    "metrics",
    "models",
    "observers",
    "optim",
    "personal",
    "privacy",
    "risk",
    "sampling",
    "server_opt",
    "solvers",
    "testing",
    "tilted",
    "train",
    "train_family",
    "train_many",
]
