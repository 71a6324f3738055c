"""Rounds in a row, each begun before the numbers of the one before it are read.

On a GPU a small round takes less time than the host needs to draw a cohort, to weigh it and to write a report. So the host
begins round t + 1 as soon as the work of round t is under way, taking for granted that all its updates can be used, and only
then waits for round t. Where that was wrong, what was begun is dropped, and round t is done with care: states are values that
no round changes, and cohorts depend on seed and round alone. Results are those of rounds one after another, bit for bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from equipoise.algorithm import Algorithm
from equipoise.round import Plan, losses_of, next_state, plan_round, report_of, run_round, server_rate
from equipoise.types import Cohort, Job, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.train import Setting


@dataclass(frozen=True, eq=False)
class Begun:
    """A round whose work is under way, and the state after it if all updates can be used."""

    before: ServerState
    after: ServerState
    plan: Plan
    work: Any  # what the engine's `begin_round` gave
    began: float

    def report(self, free: float) -> RoundReport | None:
        """What the round did, after a wait; None if it has to be done with care. Its time begins when the host was free."""
        found = self.work.collected()
        return None if found is None else report_of(self.plan, max(self.began, free), found[0])


class Rounds:
    """The rounds of a run, one after another: `following(state)` is the next one."""

    def __init__(self, setting: Setting, algorithm: Algorithm) -> None:
        self.setting, self.algorithm, self.early = setting, algorithm, can_begin_early(setting, algorithm)
        self._engine: Any = setting.engine
        self._server_rate = server_rate([algorithm])
        self._begun: Begun | None = None
        self._free = 0.0  # when the last report was written

    def following(self, state: ServerState) -> tuple[ServerState, RoundReport]:
        """The state after one more round, and what that round did."""
        begun, self._begun = self._begun, None
        if begun is None or begun.before is not state:
            begun = self._begin(state)
        if begun is not None:
            self._begun = self._begin(begun.after)
            report = begun.report(self._free)
            if report is not None:
                self._free = time.perf_counter()
                return begun.after, report
            self._begun = begun = None  # their memory is free for the round
        return next_round(self.setting, self.algorithm, state)

    def _begin(self, state: ServerState) -> Begun | None:
        """Begin the round after a state; None where it is to be run as a whole."""
        if not self.early or state.round >= self.setting.rounds_allowed or not self._engine.has_room():
            return None
        try:
            return self._started(state)
        except Exception:  # raised again when the round is run as a whole, after those before it have been reported
            return None

    def _started(self, state: ServerState) -> Begun | None:
        began = time.perf_counter()
        setting, algorithm, engine = self.setting, self.algorithm, self._engine
        cohort = setting.cohort(state.round)
        losses = losses_of(state, algorithm, engine, algorithm.solver, cohort)
        plan = plan_round(state, algorithm, algorithm.solver, cohort, losses, setting.data.train)
        if not len(plan.workers):
            return None
        job = Job(state.params, plan.workers, plan.weights)
        work = engine.begin_round([job], algorithm.solver, algorithm.aggregator, self._server_rate)
        if work is None:  # not work of the kind
            self.early = False
            return None
        after = next_state(state, algorithm, params=work.params[0], risk=plan.risk.state)
        return Begun(state, after, plan, work, began)


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
