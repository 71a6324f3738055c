"""Drivers of rounds: they answer what rounds ask, and commit rounds that are finished. They name no part of an algorithm.

A driver is called with the states of some runs and gives of each the state after one more round with its report, or the error
that stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from equipoise.core.grouping import grouped
from equipoise.engines.answers import answer_all
from equipoise.errors import Diverged
from equipoise.rounds.one_round import one_round
from equipoise.types import Cohort, Network, RoundReport, ServerState
from equipoise.types.round_contracts import KINDS, Ask, Round

Outcome = tuple[ServerState, RoundReport] | Diverged
Driver = Callable[[Sequence[ServerState]], list[Outcome]]


def together(answers: Callable[[Sequence[Ask]], Sequence[Any]], rounds: Sequence[Round]) -> list[Any]:
    """What rounds end with, state and report. Questions of one kind are one call; a round that diverges ends alone.

    A round that is ahead of others waits, so that all ask for updates at the same time.
    """
    ended: dict[int, Any] = {}
    pending: dict[int, Ask] = {}
    sent: dict[int, Any] = dict.fromkeys(range(len(rounds)))
    while sent:
        for i, answer in sent.items():
            try:
                pending[i] = rounds[i].throw(answer) if isinstance(answer, Diverged) else rounds[i].send(answer)
            except StopIteration as end:
                ended[i] = end.value
            except Diverged as failure:
                ended[i] = failure
        first = min((KINDS.index(ask.what) for ask in pending.values()), default=0)
        asks = {i: pending.pop(i) for i in sorted(pending) if pending[i].what == KINDS[first]}
        sent = dict(zip(asks, answers(list(asks.values())), strict=True)) if asks else {}
    return [ended[i] for i in range(len(rounds))]


def committed(run: Any, state: ServerState) -> ServerState:
    """The state of a finished round, with what its stages write down."""
    return state.having({stage.name: stage.commit(getattr(state, stage.name)) for stage in run.hooks["commit"]})


def play(run: Any, state: ServerState, cohort: Cohort | None = None) -> tuple[ServerState, RoundReport]:
    """One round of one run, of the cohort that it draws or of another: the state after it and its report, or its error."""
    began, draw = time.perf_counter(), partial(run.draw, state.round) if cohort is None else (lambda: cohort)
    with run.engine_traits.round_context():
        (ended,) = together(partial(answer_all, run.engine), [one_round(run, state, draw)])
    if isinstance(ended, Diverged):
        raise ended
    after, tell = ended
    return committed(run, after), tell(time.perf_counter() - began)


class InTurn:
    """Rounds one after another: the usual driver. Runs that share an engine are asked together.

    What a store holds of the next cohort is read ahead.
    """

    def __init__(self, runs: Sequence[Any]) -> None:
        self.runs, self.engine = runs, runs[0].engine
        self.stores = {clients.store for clients in runs[0].data.splits.values() if clients.store is not None}
        self.expect = runs[0].engine_traits.expect if all(run.algorithm.traits.sampler.pure for run in runs) else None
        same = grouped(range(len(runs)), lambda i, j: runs[i].draw.like(runs[j].draw))
        self.drawing = [runs[group[0]].draw for group in same]
        for group, drawing in zip(same, self.drawing, strict=True):
            for i in group:
                runs[i].draw.drawn_by = drawing

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of each run the state after one more round and what that round did, or the error that stops it."""
        began = time.perf_counter()
        self.read_ahead(states[0].round + 1)
        with self.runs[0].engine_traits.round_context():
            outcomes = zip(self.runs, together(partial(answer_all, self.engine), self.rounds(states)), strict=True)
            return [end if isinstance(end, Diverged) else self.finished(run, end[0], end[1], began) for run, end in outcomes]

    def read_ahead(self, following: int) -> None:
        """Read the examples of the cohorts of the following round ahead."""
        for store in self.stores:
            store.refuse_changed()
        if self.expect is not None and following < self.runs[0].protection.rounds_allowed:
            for draw in self.drawing:
                draw(following - 1)
            self.expect(torch.cat([draw(following).clients for draw in self.drawing]))

    def rounds(self, states: Sequence[ServerState]) -> list[Round]:
        """The next round of each run."""
        return [one_round(run, state, partial(run.draw, state.round)) for run, state in zip(self.runs, states, strict=True)]

    def finished(self, run: Any, state: ServerState, tell: Any, began: float) -> Outcome:
        """A round that is over: written down, and told."""
        return committed(run, state), tell((time.perf_counter() - began) / len(self.runs))


class OverANetwork:
    """Rounds that may have to be tried again, one run at a time. Nothing of a failed try remains."""

    def __init__(self, runs: Sequence[Any], network: Network) -> None:
        self.runs, self.network = runs, network

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of each run the state after one more round and what that round did, or the error that stops it."""
        with self.runs[0].engine_traits.round_context():
            return [self.attempt(run, state) for run, state in zip(self.runs, states, strict=True)]

    def attempt(self, run: Any, state: ServerState) -> Outcome:
        """One round, each try with the cohort that is drawn for it."""

        def once(cohort: Cohort) -> tuple[ServerState, RoundReport]:
            began = time.perf_counter()
            (ended,) = together(partial(answer_all, run.engine), [one_round(run, state, lambda: cohort)])
            if isinstance(ended, Diverged):
                raise ended
            after, tell = ended
            return after, tell(time.perf_counter() - began)

        try:
            after, report = self.network.attempt(once, partial(run.draw_over_a_network, state.round))
        except Diverged as failure:
            return failure
        return committed(run, after), report
