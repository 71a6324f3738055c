"""Equipoise: federated learning for clients that are not average."""

from equipoise import (
    aggregators,
    data,
    engines,
    errors,
    metrics,
    models,
    observers,
    risk,
    sampling,
    server_opt,
    solvers,
    testing,
)
from equipoise.algorithm import Algorithm
from equipoise.compare import Comparison, compare
from equipoise.data import ClientSet, FederatedData
from equipoise.result import Result
from equipoise.train import train

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "ClientSet",
    "Comparison",
    "FederatedData",
    "Result",
    "aggregators",
    "compare",
    "data",
    "engines",
    "errors",
    "metrics",
    "models",
    "observers",
    "risk",
    "sampling",
    "server_opt",
    "solvers",
    "testing",
    "train",
]
