"""The mean loss of the worst tail of a cohort, as rounds report it."""

from __future__ import annotations

import numpy as np

from equipoise.core.numbers import Numbers

TAIL = 0.1  # the share of clients in a report's tail loss


def worst_mean(values: Numbers, share: Numbers, tail: float) -> float:
    """The mean of the largest values up to a mass of `tail`; `share` sums to 1. It is `metrics.worst` in fewer operations."""
    values, share = np.asarray(values), np.asarray(share)
    order = (-values).argsort()
    values, share = values[order], share[order]
    above = share.cumsum()
    last = min(int(above.searchsorted(tail)), len(values) - 1)  # the one that the tail ends in
    rest = tail - float(above[last - 1]) if last else tail
    return (float(share[:last] @ values[:last]) + rest * float(values[last])) / tail
