"""Rounds in a row, each begun before the numbers of the one before it are read.

On a GPU a small round takes less time than the host needs to draw a cohort, to weigh it and to write a report. So the host
begins round t + 1 as soon as the work of round t is under way, taking for granted that all its updates can be used, and only
then waits for round t. Where that was wrong, what was begun is dropped, and round t is done with care: states are values that
no round changes, and cohorts depend on seed and round alone. Results are those of rounds one after another, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from equipoise.algorithm import Algorithm
from equipoise.errors import Diverged
from equipoise.round import Plan, next_state, plan_round, report_of, run_round, server_rate
from equipoise.runs.together import Outcome, Prepared, Turn, losses_together, round_together
from equipoise.types import Cohort, Job, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.train import Setting


@dataclass(frozen=True, eq=False)
class Begun:
    """A round of some runs whose work is under way, and the states after it if all updates can be used."""

    before: Sequence[ServerState]
    after: Sequence[ServerState]
    plans: Sequence[Plan]
    work: Any  # what the engine's `begin_round` gave
    began: float

    def outcomes(self, free: float) -> list[Outcome] | None:
        """What became of the runs, after a wait; None if the round has to be done with care. Its time begins when the host was
        free.
        """
        found, began, runs = self.work.collected(), max(self.began, free), len(self.plans)
        if found is None:
            return None
        reports = [report_of(plan, began, work, runs=runs) for plan, work in zip(self.plans, found, strict=True)]
        return list(zip(self.after, reports, strict=True))


class SharedRounds:
    """The rounds of runs that share an engine, one after another: `following(states)` are the next ones.

    The runs in a group of `same_cohorts` draw the same clients.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Setting, Algorithm]],
        same_cohorts: Sequence[Sequence[int]],
    ) -> None:
        self.setting, self.algorithms, self._settings = runs[0][0], [a for _, a in runs], [s for s, _ in runs]
        self._engine: Any = self.setting.engine
        self._server_rate = server_rate(self.algorithms)
        self.early = self._server_rate is not None and all(can_begin_early(*run) for run in runs)
        self._same_cohorts = same_cohorts
        self._begun: Begun | None = None
        self._free = 0.0  # when the last reports were written

    def following(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of every run the state after one more round and what that round did, or the error that stops it."""
        begun, self._begun = self._begun, None
        if begun is None or any(before is not state for before, state in zip(begun.before, states, strict=True)):
            begun = self._begin(states)
        if begun is not None:
            self._begun = self._begin(begun.after)
            outcomes = begun.outcomes(self._free)
            if outcomes is not None:
                self._free = time.perf_counter()
                return outcomes
            self._begun = begun = None  # their memory is free for the round
        return self.whole(states)

    def _turns(self, states: Sequence[ServerState]) -> list[Turn]:
        """What each run brings to the round after its state."""
        turns: dict[int, Turn] = {}
        for same in self._same_cohorts:
            cohort = self._settings[same[0]].cohort(states[same[0]].round)
            for i in same:
                turns[i] = Turn(states[i], self.algorithms[i], cohort, self._settings[i].clients_per_round)
        return [turns[i] for i in range(len(states))]

    def whole(self, states: Sequence[ServerState]) -> list[Outcome]:
        """The next round, run from end to end."""
        return round_together(self._turns(states), self._engine, self.setting.data.train)

    def _begin(self, states: Sequence[ServerState]) -> Begun | None:
        """Begin the round after these states; None where it is to be run as a whole."""
        if not self.early or states[0].round >= self.setting.rounds_allowed or not self._engine.has_room():
            return None
        try:
            return self._started(states)
        except Exception:  # raised again when the round is run as a whole, after those before it have been reported
            return None

    def _started(self, states: Sequence[ServerState]) -> Begun | None:
        began, engine, clients = time.perf_counter(), self._engine, self.setting.data.train
        ready = [Prepared(turn, turn.algorithm.solver, turn.state.solver) for turn in self._turns(states)]
        if not all(len(one.turn.cohort) for one in ready):
            return None
        plans = [
            plan_round(one.turn.state, one.turn.algorithm, one.solver, one.turn.cohort, losses, clients)
            for one, losses in zip(ready, losses_together(ready, engine), strict=True)
        ]
        if not all(len(plan.workers) for plan in plans):
            return None
        jobs = [Job(state.params, plan.workers, plan.weights) for state, plan in zip(states, plans, strict=True)]
        work = engine.begin_round(jobs, ready[0].solver, self.algorithms[0].aggregator, self._server_rate)
        if work is None:  # not work of the kind
            self.early = False
            return None
        after = [
            next_state(state, algorithm, params=params, risk=plan.risk.state)
            for state, algorithm, params, plan in zip(states, self.algorithms, work.params, plans, strict=True)
        ]
        return Begun(states, after, plans, work, began)


class _OwnRounds(SharedRounds):
    """Rounds of one run, which may be more than those that can be shared: with personal models, privacy, or over a network."""

    def whole(self, states: Sequence[ServerState]) -> list[Outcome]:
        return [next_round(self.setting, self.algorithms[0], state) for state in states]


class Rounds:
    """The rounds of one run: `following(state)` is the next one."""

    def __init__(self, setting: Setting, algorithm: Algorithm) -> None:
        self._rounds = _OwnRounds([(setting, algorithm)], [[0]])

    def following(self, state: ServerState) -> tuple[ServerState, RoundReport]:
        """The state after one more round, and what that round did."""
        (outcome,) = self._rounds.following([state])
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome


def can_begin_early(setting: Setting, algorithm: Algorithm) -> bool:
    """Whether rounds may be begun before the last one is known in full.

    Their numbers must not depend on it beyond the parameters, and parts that others wrote may keep notes of their own, so that
    they are called once per round and in order.
    """
    parts = (algorithm.risk, algorithm.solver, algorithm.aggregator, algorithm.reported, setting.sampler)
    return (
        getattr(setting.engine, "begins_early", False)
        and setting.personal is None
        and setting.protection is None
        and server_rate([algorithm]) is not None
        and not hasattr(algorithm.solver, "prepare")
        and all(type(part).__module__.startswith("equipoise.") for part in parts)
    )


def next_round(setting: Setting, algorithm: Algorithm, state: ServerState) -> tuple[ServerState, RoundReport]:
    """One round with the cohort that is drawn for it; an engine over a network may have to try several times."""

    def run(cohort: Cohort) -> tuple[ServerState, RoundReport]:
        return run_round(
            state, algorithm, setting.engine, cohort, setting.data.train, clients_per_round=setting.clients_per_round,
            personal=setting.personal, protection=setting.protection,
        )  # fmt: skip

    if not hasattr(setting.engine, "attempt"):
        return run(setting.cohort(state.round))
    tried: tuple[ServerState, RoundReport] = setting.engine.attempt(run, partial(setting.cohort, state.round))
    return tried
