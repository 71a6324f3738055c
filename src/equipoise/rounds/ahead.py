"""Rounds in a row, each begun before the numbers of the one before it are read.

On a GPU a small round takes less time than the host needs to draw a cohort, to weigh it and to write a report. So the host
begins round t + 1 as soon as the work of round t is under way, assuming that all its updates can be used, and only then waits
for round t. If the assumption fails, the started round is dropped and round t is run again in the ordinary way: states are
values that no round changes, and cohorts depend on seed and round alone. Results equal those of rounds one after another, bit
for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from equipoise.core.equality import same_part
from equipoise.engines.answers import answer_all
from equipoise.errors import Diverged
from equipoise.rounds.drivers import InTurn, Outcome, together
from equipoise.types import Job, LocalWork, LookAheadEngine, RoundUnderWay, ServerState
from equipoise.types.round_contracts import Ask, Fold, Told


class NotAhead(Exception):
    """The round is to be run in the ordinary way."""


class Waiting:
    """Local work of one run that a device works on: its numbers are waited for when they are read."""

    update, carried, rows, mass, told = None, None, None, None, True

    def __init__(self, under_way: Collected, place: int, params: Tensor, clients: int) -> None:
        self.under_way, self.place, self.params = under_way, place, params
        self.arrived = np.ones(clients, dtype=bool)  # assumed

    @property
    def losses(self) -> Tensor:
        """(K,), after a wait."""
        return self.under_way.works[self.place].losses

    @property
    def sq_norms(self) -> Tensor:
        """(K,), after a wait."""
        return self.under_way.works[self.place].sq_norms


class Collected:
    """The work of runs that was begun in one call."""

    def __init__(self, under_way: RoundUnderWay) -> None:
        self.under_way = under_way

    @cached_property
    def works(self) -> list[LocalWork]:
        """The work of each run, after a wait; the round is to be run again if some update cannot be used."""
        works = self.under_way.collected()
        if works is None:
            raise NotAhead
        return works


class StartedRound(NamedTuple):
    """A round of some runs that a device works on, and the states after it if all client updates can be used."""

    before: Sequence[ServerState]
    after: Sequence[ServerState]
    tell: Sequence[Told]
    work: Collected
    began: float


class Ahead(InTurn):
    """The driver of rounds that are begun early."""

    def __init__(self, runs: Sequence[Any], engine: LookAheadEngine) -> None:
        super().__init__(runs)
        self.device, self.possible = engine, True
        self._started: StartedRound | None = None
        self._host_free = 0.0  # when the last reports were written

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """The next outcomes; the round after it is begun, too."""
        started, self._started = self._started, None
        if started is None or any(before is not state for before, state in zip(started.before, states, strict=True)):
            started = self._begin(states)
        if started is not None:
            self._started = self._begin(started.after)
            try:
                _ = started.work.works
                seconds = (time.perf_counter() - max(started.began, self._host_free)) / len(self.runs)
                reports = [tell(seconds) for tell in started.tell]
            except NotAhead:
                self._started = started = None  # frees their memory for the round
            else:
                self._host_free = time.perf_counter()
                return list(zip(started.after, reports, strict=True))
        return super().__call__(states)

    def _begin(self, states: Sequence[ServerState]) -> StartedRound | None:
        """Begin the round after these states; None where it is to be run in the ordinary way."""
        last_round = self.runs[0].protection.rounds_allowed
        if not self.possible or states[0].round >= last_round or not self.device.has_capacity():
            return None
        began, under_way = time.perf_counter(), []

        def answers(asks: Sequence[Ask]) -> list[Any]:
            if asks[0].what != "update":
                return answer_all(self.engine, asks)
            under_way.append(self._start(asks))
            return [Waiting(under_way[0], i, under_way[0].under_way.params[i], len(ask.clients)) for i, ask in enumerate(asks)]

        try:
            self.read_ahead(states[0].round + 1)
            ended = together(answers, self.rounds(states))
        except Exception:  # raised again when the round is run in the ordinary way, after those before it have been reported
            return None
        if any(isinstance(each, Diverged) for each in ended) or not under_way:
            return None
        return StartedRound(states, [after for after, _ in ended], [tell for _, tell in ended], under_way[0], began)

    def _start(self, asks: Sequence[Ask]) -> Collected:
        fold = asks[0].fold or Fold(None)
        alike = all(ask.what == "update" and same_part(ask.rule, asks[0].rule) for ask in asks)
        if len(asks) < len(self.runs) or not alike or fold.step is None or fold.by is None:
            raise NotAhead
        jobs = [Job(ask.model, ask.clients, ask.clients.shares) for ask in asks]
        work = self.device.begin_round(jobs, asks[0].rule, fold.by, fold.step)
        if work is None:
            self.possible = False
            raise NotAhead
        return Collected(work)


def can_begin_early(run: Any) -> bool:
    """Whether a round may be begun before the last one is known in full: its numbers depend on the parameters alone."""
    stages = {stage for hook in run.hooks.values() for stage in hook}
    traits = run.algorithm.traits
    return traits.sampler.pure and traits.solver.sgd is not None and all(stage.pure for stage in stages)
