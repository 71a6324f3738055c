"""Local solvers: frozen descriptions of what a client does in a round."""

from equipoise.solvers.meta import MAML
from equipoise.solvers.prepared import AdaptiveProx, FedDane
from equipoise.solvers.sgd import SGD

__all__ = ["MAML", "SGD", "AdaptiveProx", "FedDane"]
