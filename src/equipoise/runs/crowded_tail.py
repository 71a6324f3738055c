"""A tail that bins of losses find: whether it holds clearly more clients than asked, because one bin holds too many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from equipoise.types import RoundReport

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.private_quantile import PrivateQuantile

SEVERAL = 5  # rounds with a known tail, before anything is said of it
CLEARLY = 0.1  # of the clients: more than the tail has by rounding to whole clients


def bins_of(algorithm: Algorithm) -> tuple[float, int] | None:
    """Bound and number of the bins in which a risk counts losses to find its tail; None if it does not."""
    source, traits = algorithm.traits.risk.quantile, algorithm.traits.quantile
    if traits.histogram is not None:
        return traits.histogram.bound, traits.histogram.bins
    if traits.calibrated is None:
        return None
    private = cast("PrivateQuantile", source)
    return private.bound, private.bins


def is_crowded(report: RoundReport, tail: float) -> bool:
    """Whether the tail of a round holds clearly more clients than the ⌊θK⌋ + 1 of the threshold rule."""
    if report.tail_share is None or not report.cohort:
        return False
    whole = min(1.0, (math.floor(tail * report.cohort + 1e-9) + 1) / report.cohort)
    return report.tail_share > whole + min(CLEARLY, (1 - whole) / 2)


def crowded_tail(algorithm: Algorithm, rounds: Iterable[RoundReport]) -> Iterator[str]:
    """What to say if the tail held clearly more clients than asked in most of the rounds in which it is known."""
    bins, tail = bins_of(algorithm), algorithm.traits.risk.tail
    known = [report for report in rounds if report.tail_share is not None]
    crowded = [report for report in known if is_crowded(report, tail)]
    if bins is None or len(known) < SEVERAL or 2 * len(crowded) <= len(known):
        return
    (bound, count), held = bins, sum(report.tail_share or 0.0 for report in crowded) / len(crowded)
    everyone = " All clients were in it: that is FedAvg." if held == 1.0 else ""
    yield (
        f"The tail held {100 * held:.0f} % of the clients in {len(crowded)} of {len(known)} rounds, and tail={tail:g} asks for "
        f"{100 * tail:.0f} %.{everyone} A bin of losses is {bound / count:.3g} wide (bound={bound:g}, bins={count}), and "
        "clients in one bin are not told apart. Set bound near the largest loss (about 1.5 · log(classes) of a classifier) "
        f"and give more bins. {_cost(algorithm)}"
    )


def _cost(algorithm: Algorithm) -> str:
    """What more bins cost."""
    if algorithm.traits.quantile.calibrated is not None:
        return "More bins need more noise: no more than a round has clients."
    return "More bins cost a few bytes each, and show losses, without names, to the width of a bin."
