"""Aggregators: how the clients' updates become one."""

from equipoise.aggregators.robust import FedMGDA, GeometricMedian, KLoss, KNorm, Krum, Median, MultiKrum, NormClip, TrimmedMean
from equipoise.aggregators.weighted_mean import WeightedMean

__all__ = [
    "FedMGDA",
    "GeometricMedian",
    "KLoss",
    "KNorm",
    "Krum",
    "Median",
    "MultiKrum",
    "NormClip",
    "TrimmedMean",
    "WeightedMean",
]
