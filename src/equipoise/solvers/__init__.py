"""Local solvers: frozen descriptions of what a client does in a round, and schedules of their learning rates."""

from equipoise.solvers.adam import Adam, AdamW
from equipoise.solvers.feddyn import FedDyn
from equipoise.solvers.meta import MAML
from equipoise.solvers.per_fedavg import PerFedAvg
from equipoise.solvers.preconditioned import AdaDPS
from equipoise.solvers.prepared import AdaptiveProx, FedDane
from equipoise.solvers.scaffold import Scaffold
from equipoise.solvers.schedules import Constant, Cosine, LinearDecay, Step
from equipoise.solvers.sgd import SGD

__all__ = [
    "MAML",
    "SGD",
    "AdaDPS",
    "Adam",
    "AdamW",
    "AdaptiveProx",
    "Constant",
    "Cosine",
    "FedDane",
    "FedDyn",
    "LinearDecay",
    "PerFedAvg",
    "Scaffold",
    "Step",
]
