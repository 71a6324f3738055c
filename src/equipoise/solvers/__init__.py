"""Local solvers: frozen descriptions of what a client does in a round."""

from equipoise.solvers.meta import MAML
from equipoise.solvers.per_fedavg import PerFedAvg
from equipoise.solvers.preconditioned import AdaDPS
from equipoise.solvers.prepared import AdaptiveProx, FedDane
from equipoise.solvers.sgd import SGD

__all__ = ["MAML", "SGD", "AdaDPS", "AdaptiveProx", "FedDane", "PerFedAvg"]
