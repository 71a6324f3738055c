"""Which driver a run needs: decided once, when the first round is about to begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equipoise.rounds.ahead import Ahead, can_begin_early
from equipoise.rounds.clock import OnAClock
from equipoise.rounds.drivers import Driver, InTurn, OverANetwork


def choose_driver(runs: Sequence[Any]) -> Driver:
    """How to drive the rounds of runs that share an engine."""
    if any(run.algorithm.traits.sampler.buffered is not None for run in runs):
        return OnAClock(runs)
    engine, rates = runs[0].engine_traits, {run.algorithm.traits.server.linear_rate for run in runs}
    if engine.network is not None:
        return OverANetwork(runs, engine.network)
    if engine.look_ahead is not None and len(rates) == 1 and all(map(can_begin_early, runs)):
        return Ahead(runs, engine.look_ahead)
    return InTurn(runs)
