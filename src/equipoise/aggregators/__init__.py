"""Aggregators: how the clients' updates become one."""

from equipoise.aggregators.centred_clipping import CentredClipping
from equipoise.aggregators.fednova import FedNova
from equipoise.aggregators.robust import FedMGDA, GeometricMedian, KLoss, KNorm, Krum, Median, MultiKrum, NormClip, TrimmedMean
from equipoise.aggregators.selections import Bulyan, DnC, MeaMed
from equipoise.aggregators.weighted_mean import WeightedMean
from equipoise.aggregators.wrappers import NNM, Bucketing

__all__ = [
    "NNM",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "DnC",
    "FedMGDA",
    "FedNova",
    "GeometricMedian",
    "KLoss",
    "KNorm",
    "Krum",
    "MeaMed",
    "Median",
    "MultiKrum",
    "NormClip",
    "TrimmedMean",
    "WeightedMean",
]
