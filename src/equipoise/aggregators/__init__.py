"""Aggregators: how the clients' updates become one."""

from equipoise.aggregators.mean import WeightedMean
from equipoise.aggregators.robust import (
    FedMGDA,
    GeometricMedian,
    KLoss,
    KNorm,
    Krum,
    Median,
    MultiKrum,
    NormClip,
    TrimmedMean,
)

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
