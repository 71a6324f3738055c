"""Local solvers: frozen descriptions of what a client does in a round."""

from equipoise.solvers.sgd import SGD

__all__ = ["SGD"]
