"""Client risks: a number from the cohort's losses, and the weights that are its gradient."""

from equipoise.risk import measures
from equipoise.risk.group_dro import GroupDRO
from equipoise.risk.hierarchical import HierarchicalTilt
from equipoise.risk.mean import Mean
from equipoise.risk.mixture import Mixture
from equipoise.risk.qfair import QFair
from equipoise.risk.superquantile import Superquantile
from equipoise.risk.tilted import Tilted
from equipoise.risk.worst_case import WorstCase
from equipoise.types import RiskValue

__all__ = [
    "GroupDRO",
    "HierarchicalTilt",
    "Mean",
    "Mixture",
    "QFair",
    "RiskValue",
    "Superquantile",
    "Tilted",
    "WorstCase",
    "measures",
]
