"""Privacy: what the server may see of the clients."""

from equipoise.risk.quantile import Exact, SecureSums

__all__ = ["Exact", "SecureSums"]
