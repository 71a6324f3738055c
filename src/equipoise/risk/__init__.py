"""Client risks: a number from the cohort's losses, and the weights that are its gradient."""

from equipoise.risk.combine import Mixture
from equipoise.risk.mean import Mean
from equipoise.risk.superquantile import Superquantile
from equipoise.types import RiskValue

__all__ = ["Mean", "Mixture", "RiskValue", "Superquantile"]
