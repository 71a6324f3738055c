"""Defences that need several updates in a round: what to say before a run whose rounds train too few clients for them."""

from __future__ import annotations

import math

from equipoise.algorithm import Algorithm

ENOUGH = 3  # updates: of two, a median or a median norm does not tell the false one from the other
USUAL = 100.0  # `longest` of server_app


def count_at_work(algorithm: Algorithm, clients: int) -> int:
    """How many of a round's clients train if they weigh alike: those in the tail, or all.

    >>> import equipoise as eq
    >>> [count_at_work(eq.Algorithm(risk=eq.risk.Superquantile(tail)), 4) for tail in (0.25, 0.5, 0.7, 1.0)]
    [1, 2, 3, 4]
    """
    tail = algorithm.traits.risk.tail
    return min(clients, max(1, math.ceil(tail * clients - 1e-9)))


def too_few_updates(algorithm: Algorithm, clients: int, longest: float) -> str:
    """A warning if a robust aggregator, or a `longest` that was chosen, has fewer than three updates in a round; else empty.

    Aggregators that are no weighted sum of updates, clipped or not, count as robust.
    """
    count = count_at_work(algorithm, clients)
    aggregator = algorithm.aggregator
    traits = algorithm.traits.aggregator
    robust = not (traits.linear or traits.weighted_sum or traits.clips_to is not None or traits.normalises is not None)
    defences = [f"{type(aggregator).__name__}()"] * robust + [f"longest={longest:g}"] * (longest != USUAL)
    if count >= ENOUGH or not defences or algorithm.privacy is not None:
        return ""
    names, s = " and ".join(defences), "s" * (len(defences) == 1)
    text = f"{names} need{s} {ENOUGH} updates in a round to find a false one, and rounds of {clients} clients train {count}"
    if clients < ENOUGH:
        return f"{text}: a site that lies is not stopped. Invite {ENOUGH} sites or more."
    tail = math.ceil(10 * (ENOUGH - 0.5) / clients) / 10
    cure = f"Give the risk a tail of {min(1.0, tail):g} or more, or draw more clients."
    return f"{text} (tail={algorithm.traits.risk.tail:g}): a site that lies is not stopped. {cure}"
