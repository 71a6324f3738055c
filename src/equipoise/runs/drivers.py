"""How the rounds of some runs follow each other: in turn, the next begun early, tried again over a network, or on a clock.

`choose_driver` decides once, when the runs are set up. A driver is called with the runs' states and gives the next outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from equipoise.core.equality import same_part
from equipoise.core.grouping import grouped
from equipoise.errors import Diverged
from equipoise.round import Outcome, Planned, Rounds, draw_cohort, plan_rounds, run_round
from equipoise.round_report import report_of
from equipoise.runs.buffered_rounds import BufferedRounds
from equipoise.runs.secret_cohorts import secret_cohort
from equipoise.runs.setup import Setting
from equipoise.server_step import next_state
from equipoise.types import Cohort, Job, LookAheadEngine, Network, RoundReport, RoundUnderWay, ServerState

Driver = Callable[[Sequence[ServerState]], list[Outcome]]


def choose_driver(settings: Sequence[Setting]) -> Driver:
    """How to drive the rounds of runs that share an engine."""
    rounds = Rounds(settings, grouped(range(len(settings)), lambda i, j: draw_alike(settings[i], settings[j])))
    traits = settings[0].engine_traits
    if any(setting.algorithm.traits.sampler.buffered is not None for setting in settings):
        return BufferedRounds(settings)
    if traits.network is not None:
        return partial(attempt_rounds, traits.network, rounds)
    rates = {setting.algorithm.traits.server.linear_rate for setting in settings}
    if traits.look_ahead is not None and len(rates) == 1 and all(map(can_begin_early, settings)):
        return RoundsAhead(rounds, traits.look_ahead, float(rates.pop() or 0))
    return rounds


def draw_alike(first: Setting, second: Setting) -> bool:
    """Whether two runs have the same cohorts in every round: not if one draws them from a secret of its own."""
    if any(run.noise is not None and not run.noise.nominal for run in (first, second)):
        return False
    same = first.seed == second.seed and first.clients_per_round == second.clients_per_round
    return same and same_part(first.sampler, second.sampler) and torch.equal(first.alpha, second.alpha)


def attempt_rounds(network: Network, rounds: Rounds, states: Sequence[ServerState]) -> list[Outcome]:
    """One round of each run over a network, one run at a time."""
    with rounds.settings[0].engine_traits.round_context():
        return [attempt_round(network, *run) for run in zip(rounds.settings, states, strict=True)]


def attempt_round(network: Network, setting: Setting, state: ServerState) -> Outcome:
    """One round over a network, which may have to try several times.

    Each time it is with another cohort, but under privacy with the same: it is drawn in secret and written down.
    """
    book = setting.protection.book

    def run(cohort: Cohort) -> tuple[ServerState, RoundReport]:
        (outcome,) = run_round([setting], [state], [cohort], setting.engine)
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome

    try:
        if book is None:
            return network.attempt(run, partial(draw_cohort, setting, state.round))
        return network.attempt(run, lambda _: secret_cohort(setting, book, state.round))
    except Diverged as failure:
        return failure


def can_begin_early(setting: Setting) -> bool:
    """Whether a round may be begun before the last one is known in full: its numbers depend on the parameters alone.

    Parts that are not known to be pure may keep notes of their own, so they are called once per round and in order.
    """
    traits = setting.algorithm.traits
    linear = traits.server.linear_rate is not None and traits.aggregator.weighted_sum and traits.risk.server_step is None
    plain = traits.solver.sgd is not None and setting.personal is None and setting.protection.in_the_open
    return linear and plain and traits.risk.pure and traits.averaging.pure and traits.sampler.pure


class StartedRound(NamedTuple):
    """A round of some runs that a device works on, and the states after it if all client updates can be used."""

    before: Sequence[ServerState]
    after: Sequence[ServerState]
    planned: Sequence[Planned]
    work: RoundUnderWay
    began: float

    def outcomes(self, host_free: float) -> list[Outcome] | None:
        """The outcomes, after a wait; None if the round must be run again, update by update.

        The time that is reported begins when the host was free.
        """
        works = self.work.collected()
        if works is None:
            return None
        began, runs = max(self.began, host_free), len(self.planned)
        reports = [
            report_of(run.setting, plan, began, work, runs=runs) for (run, plan), work in zip(self.planned, works, strict=True)
        ]
        return list(zip(self.after, reports, strict=True))


class RoundsAhead:
    """Rounds in a row, each begun before the numbers of the one before it are read.

    On a GPU a small round takes less time than the host needs to draw a cohort, to weigh it and to write a report. So the host
    begins round t + 1 as soon as the work of round t is under way, assuming that all its updates can be used, and only then
    waits for round t. If the assumption fails, the started round is dropped and round t is run again in the ordinary way:
    states are values that no round changes, and cohorts depend on seed and round alone. Results equal those of rounds one after
    another, bit for bit.
    """

    def __init__(self, rounds: Rounds, engine: LookAheadEngine, server_rate: float) -> None:
        self.rounds, self.engine, self.server_rate = rounds, engine, server_rate
        self.possible = True
        self._started: StartedRound | None = None
        self._host_free = 0.0  # when the last reports were written

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """The next outcomes; the round after it is begun, too."""
        started, self._started = self._started, None
        if started is None or any(before is not state for before, state in zip(started.before, states, strict=True)):
            started = self._begin(states)
        if started is not None:
            self._started = self._begin(started.after)
            outcomes = started.outcomes(self._host_free)
            if outcomes is not None:
                self._host_free = time.perf_counter()
                return outcomes
            self._started = started = None  # frees their memory for the round
        return self.rounds(states)

    def _begin(self, states: Sequence[ServerState]) -> StartedRound | None:
        """Begin the round after these states; None where it is to be run in the ordinary way."""
        last_round = self.rounds.settings[0].protection.rounds_allowed
        if not self.possible or states[0].round >= last_round or not self.engine.has_capacity():
            return None
        try:
            return self._start(states)
        except Exception:  # raised again when the round is run in the ordinary way, after those before it have been reported
            return None

    def _start(self, states: Sequence[ServerState]) -> StartedRound | None:
        began, settings = time.perf_counter(), self.rounds.settings
        cohorts = self.rounds.cohorts(states)
        if not all(map(len, cohorts)):
            return None
        plans = plan_rounds(settings, states, cohorts, self.rounds.engine)
        planned = [each for each in plans if not isinstance(each, Diverged) and len(each[1].workers)]
        if len(planned) < len(settings):
            return None
        jobs = [Job(run.state.params, plan.workers, plan.weights) for run, plan in planned]
        algorithm = settings[0].algorithm
        work = self.engine.begin_round(jobs, algorithm.solver, algorithm.aggregator, self.server_rate)
        if work is None:
            self.possible = False
            return None
        after = [
            next_state(run.setting, run.state, params=params, risk=plan.risk.state)
            for (run, plan), params in zip(planned, work.params, strict=True)
        ]
        return StartedRound(states, after, planned, work, began)
