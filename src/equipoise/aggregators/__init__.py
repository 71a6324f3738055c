"""Aggregators: one update from many."""

from equipoise.aggregators.mean import WeightedMean

__all__ = ["WeightedMean"]
