"""One federated round of some runs, of which one is the usual case: prepare → losses → plan → local work → finish.

Runs that share their rounds (a family, several seeds) have their losses and their local work computed in one call where they
can be. A run that diverges has the error as its outcome; the others are not touched by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core import rng
from equipoise.core.abilities import named_part, solver_traits
from equipoise.core.equality import same_part
from equipoise.core.grouping import grouped
from equipoise.core.numbers import are_weights, has_weight, numbers
from equipoise.core.update_checks import as_local_work
from equipoise.data.clients import ClientSet
from equipoise.errors import Diverged, InvalidParameter
from equipoise.privacy.observer_table import PrivacyTable, unprotected_table
from equipoise.round_report import rejected_clients, report_of
from equipoise.runs.carried_rules import next_carried
from equipoise.runs.drift import corrected_state, weights_of_steps
from equipoise.runs.normalised_work import NormalisedWork, normalisers_of
from equipoise.runs.secret_cohorts import draw_unforeseen
from equipoise.runs.state_rules import refuse_unkeepable
from equipoise.server_step import (
    combined_rows,
    combined_sum,
    named_by_aggregator,
    next_state,
    scaled,
    server_step,
    step_factor,
    total_of_rows,
)
from equipoise.solvers.prepared import NoClients, RoundContext
from equipoise.types import Cohort, Combined, Job, RiskValue, RoundReport, ServerState

if TYPE_CHECKING:
    from equipoise.privacy.ledger import Ledger
    from equipoise.runs.setup import Setting
    from equipoise.types import Engine, LocalSolver, SolverTraits

T = TypeVar("T")
_UNKNOWN = torch.tensor(float("nan"))
Outcome = tuple[ServerState, RoundReport] | Diverged


# ----------------------------------------------------------------------------------------------------- what a round consists of


class RunInRound(NamedTuple):
    """A run in one round: its state before the round, its cohort, and the solver of this round with the solver's next state."""

    setting: Setting
    state: ServerState
    cohort: Cohort
    solver: LocalSolver
    solver_traits: SolverTraits
    solver_state: Any = None

    @property
    def algorithm(self) -> Algorithm:
        """The run's algorithm."""
        return self.setting.algorithm


class Plan(NamedTuple):
    """Who works in a round, and with which weights."""

    cohort: Cohort
    losses: Tensor | None  # (K,) of the cohort, if the risk asked for them
    risk: RiskValue
    workers: Cohort
    weights: Tensor  # of the workers, summing to 1; under protection as it says
    worker_losses: Tensor | None
    dropped: int  # clients with a weight whose work does not arrive
    denominator: float = 1.0  # fixed in advance, under differential privacy
    carried: Tensor | None = None  # (K, C) that the workers send beside updates which the solver did not make


Planned = tuple[RunInRound, Plan]
Worked = tuple[Combined | None, Any]  # combined local work, None where there is nothing to do; and the personal state after it


class Rounds:
    """The rounds of runs that share an engine, one after another: called with the runs' states, it gives the next outcomes.

    `same_cohorts` groups the runs (by position) that draw the same clients.
    """

    def __init__(self, settings: Sequence[Setting], same_cohorts: Sequence[Sequence[int]] = ((0,),)) -> None:
        self.settings, self.same_cohorts = settings, same_cohorts
        self.engine = settings[0].engine
        self.stores = {clients.store for clients in settings[0].data.splits.values() if clients.store is not None}
        can_look = all(setting.algorithm.traits.sampler.pure for setting in settings)
        self.expect = settings[0].engine_traits.expect if can_look else None
        self.next_cohorts: list[Cohort] = []  # drawn early, to read their examples ahead

    def __call__(self, states: Sequence[ServerState]) -> list[Outcome]:
        """Of each run the state after one more round and what that round did, or the error that stops it."""
        with self.settings[0].engine_traits.round_context():
            return run_round(self.settings, states, self.cohorts(states), self.engine)

    def cohorts(self, states: Sequence[ServerState]) -> list[Cohort]:
        """The cohort of each run; those that draw the same clients share one."""
        for store in self.stores:
            store.refuse_changed()
        index = states[0].round
        cohorts = self.next_cohorts if self.next_cohorts and self.next_cohorts[0].round == index else self.draw(index)
        if self.expect is not None and index + 1 < self.settings[0].protection.rounds_allowed:
            self.next_cohorts = self.draw(index + 1)
            self.expect(torch.cat([self.next_cohorts[same[0]].clients for same in self.same_cohorts]))
        return cohorts

    def draw(self, round_index: int) -> list[Cohort]:
        """The cohort of each run in a round; those that draw the same clients share one."""
        if len(self.settings) == 1:
            return [draw_cohort(self.settings[0], round_index)]
        drawn: dict[int, Cohort] = {}
        for same in self.same_cohorts:
            drawn |= dict.fromkeys(same, draw_cohort(self.settings[same[0]], round_index))
        return [drawn[number] for number in range(len(self.settings))]


def draw_cohort(setting: Setting, round_index: int, attempt: int = 0) -> Cohort:
    """Who takes part in a round, which nobody can foresee of a private run; others are drawn for a further attempt at it."""
    if setting.noise is not None and not setting.noise.nominal:
        return draw_unforeseen(setting, round_index, setting.noise.source("cohort", round_index))
    seed = rng.stream_key(setting.seed, f"cohort, try {attempt}") >> 1 if attempt else setting.seed
    with named_part("sampler", setting.sampler):
        drawn = setting.sampler(round_index, setting.alpha, clients_per_round=setting.clients_per_round, seed=seed)
    return replace(drawn, seed=setting.seed) if attempt else drawn


# -------------------------------------------------------------------------------------------------------------------- the round


def run_round(
    settings: Sequence[Setting], states: Sequence[ServerState], cohorts: Sequence[Cohort], engine: Engine
) -> list[Outcome]:
    """One round of each run: prepare → losses → plan → local work → finish."""
    began, runs = time.perf_counter(), len(settings)
    plans = plan_rounds(settings, states, cohorts, engine)
    works = iter(local_work([plan for plan in plans if not isinstance(plan, Diverged)], engine))
    return [plan if isinstance(plan, Diverged) else or_diverged(finish, *plan, next(works), began, runs) for plan in plans]


def plan_rounds(
    settings: Sequence[Setting], states: Sequence[ServerState], cohorts: Sequence[Cohort], engine: Engine
) -> list[Planned | Diverged]:
    """The first half of a round: the solver of each run, the losses of its cohort, and who works with which weight."""
    runs = [prepare(*given, engine) for given in zip(settings, states, cohorts, strict=True)]
    return [or_diverged(make_plan, *each) for each in zip(runs, cohort_losses(runs, engine), strict=True)]


def or_diverged(step: Callable[..., T], *arguments: Any) -> T | Diverged:
    """What a step of one run gives, or the error that stops this run and no other."""
    try:
        return step(*arguments)
    except Diverged as failure:
        return failure


def prepare(setting: Setting, state: ServerState, cohort: Cohort, engine: Engine) -> RunInRound:
    """The run with the solver of this round: the algorithm's own, unless that prepares each round."""
    algorithm, traits = setting.algorithm, setting.algorithm.traits.solver
    if traits.prepare is None or not has_work(setting, cohort):
        return RunInRound(setting, state, cohort, algorithm.solver, traits, state.solver)

    def draw(purpose: str) -> Cohort:
        seed = rng.stream_key(cohort.seed, purpose) >> 1
        return setting.sampler(cohort.round, setting.alpha, clients_per_round=setting.clients_per_round, seed=seed)

    asked, named = engine, cohort
    if not setting.protection.in_the_open:
        asked, named = cast("Engine", NoClients()), cohort.take(torch.zeros(0, dtype=torch.int64))
    context = RoundContext(asked, state.model, named, setting.alpha, draw, setting.task.layout)
    solver, solver_state = traits.prepare(context, state.solver)
    return RunInRound(setting, state, cohort, solver, solver_traits(solver), solver_state)


def has_work(setting: Setting, cohort: Cohort) -> bool:
    """Whether the round does anything: Poisson sampling may draw nobody, but noise is released still."""
    return len(cohort) > 0 or setting.protection.without_clients


def cohort_losses(runs: Sequence[RunInRound], engine: Engine) -> list[Tensor | None]:
    """The losses (K,) of each run's cohort at its model; None where neither risk nor aggregator asks for them.

    Runs with one cohort are scored in one pass over its examples.
    """
    losses: dict[int, Tensor] = {}
    wanting = [i for i, run in enumerate(runs) if run.algorithm.traits.needs_losses]
    if not wanting:
        return [None] * len(runs)
    asked = [i for i in wanting if has_work(runs[i].setting, runs[i].cohort)]
    several = asked if len(asked) > 1 else ()
    shared = [i for i in several if len(runs[i].cohort) and not runs[i].solver_traits.adapts]
    for i in asked:
        if len(runs[i].cohort) == 0:
            losses[i] = torch.zeros(0, dtype=torch.float64)
        elif len(shared) < 2 or i not in shared:
            losses[i] = losses_alone(runs[i], engine)
    if len(shared) > 1:
        cohorts = {i: runs[i].cohort.clients for i in shared}
        groups = grouped(shared, lambda i, j: cohorts[i] is cohorts[j] or torch.equal(cohorts[i], cohorts[j]))
        for same in groups:
            if len(same) > 1:
                models = [runs[i].state.model for i in same]
                losses |= zip(same, engine.losses_of(models, runs[same[0]].cohort), strict=True)
        alone = [same[0] for same in groups if len(same) == 1]
        jobs = [Job(runs[i].state.model, runs[i].cohort, runs[i].cohort.weights) for i in alone]
        losses |= zip(alone, engine.losses_each(jobs) if jobs else [], strict=True)
    return [losses.get(i) for i in range(len(runs))]


def losses_alone(run: RunInRound, engine: Engine) -> Tensor:
    """The losses (K,) of one run's cohort: at the shared model, or at clients' own models if the method says so."""
    setting, state = run.setting, run.state
    own = None if setting.personal is None else setting.personal.losses(state.personal, state.model, run.cohort)
    return own if own is not None else engine.losses(state.model, run.cohort, run.solver if run.solver_traits.adapts else None)


def without_lost_clients(run: RunInRound, losses: Tensor | None) -> tuple[Cohort, Tensor | None]:
    """The cohort without clients that a network has lost so far, their base weights shared out among the others."""
    network, cohort = run.setting.engine_traits.network, run.cohort
    if network is None or not bool((gone := network.gone(cohort)).any()):
        return cohort, losses
    left = cohort.take(~gone)
    left = replace(left, weights=left.weights / left.weights.sum())
    return left, losses[~gone] if losses is not None else None


def make_plan(run: RunInRound, losses: Tensor | None) -> Planned:
    """The risk of the cohort, and the clients that work for it: those with a weight whose work arrives."""
    clients, protection = run.setting.data.train, run.setting.protection
    cohort = run.cohort
    if run.setting.engine_traits.network is not None:
        cohort, losses = without_lost_clients(run, losses)
    if not has_work(run.setting, run.cohort):
        return run, Plan(cohort, None, RiskValue(_UNKNOWN, cohort.weights), cohort, cohort.weights, None, 0)
    if losses is not None and protection.in_the_open:  # a protected client is not named, nor does the run stop because of it
        stop_unless_finite(losses, cohort, clients, "loss")
    traits = run.solver_traits
    if traits.efforts is not None and traits.straggler_share > 0:
        cohort = replace(cohort, effort=traits.efforts(cohort, clients.keys[cohort.clients].cpu()))
    risk, denominator = protection.weigh(cohort, losses, run.state.risk)
    values = numbers(risk.weights)
    if run.algorithm.traits.counts_steps:
        values = weights_of_steps(run, cohort, run.solver, values)
    chosen = has_weight(values)  # the others are not trained: that is where the tail's speed comes from
    if cohort.effort is None and chosen.all():  # the usual case: nobody to pick out
        kept, workers, worker_losses, dropped = values, cohort, losses, 0
    else:
        lost = chosen & (cohort.effort.numpy() == 0) if cohort.effort is not None else np.zeros_like(chosen)
        places = torch.from_numpy(np.flatnonzero(chosen & ~lost))
        kept, workers, dropped = values[places.numpy()], cohort.take(places), int(lost.sum())
        worker_losses = losses[places.to(losses.device)] if losses is not None else None
    fixed = 1.0 if denominator is None else denominator
    weights = torch.from_numpy(kept / (kept.sum() if denominator is None else denominator))
    if run.setting.data.malicious:
        workers = replace(workers, shares=weights)
    return run, Plan(cohort, losses, risk, workers, weights, worker_losses, dropped, fixed)


def local_work(planned: Sequence[Planned], engine: Engine) -> list[Worked | Diverged]:
    """The local work of each run, or the error that stops it.

    Runs with one solver and one linear aggregator work in one call.
    """
    works: dict[int, Worked | Diverged] = {}
    together: list[int] = []
    for i, (run, plan) in enumerate(planned):
        setting = run.setting
        alone = setting.personal is not None or setting.kept is not None
        alone = alone or run.algorithm.traits.aggregator.normalises is not None
        open_sum = setting.protection.in_the_open and run.algorithm.aggregator.linear and not alone
        if len(planned) > 1 and open_sum and len(plan.workers):
            together.append(i)
            continue
        works[i] = or_diverged(work_alone, run, plan, engine)  # a client's own model may diverge

    def alike(i: int, j: int) -> bool:
        first, second = planned[i][0], planned[j][0]
        return same_part(first.algorithm.aggregator, second.algorithm.aggregator) and same_part(first.solver, second.solver)

    for group in grouped(together, alike):
        run, plan = planned[group[0]]
        if len(group) == 1:
            works[group[0]] = work_alone(run, plan, engine)
            continue
        jobs = [Job(planned[i][0].state.model, planned[i][1].workers, planned[i][1].weights) for i in group]
        for i, work in zip(group, engine.summed_updates(jobs, run.solver, run.algorithm.aggregator), strict=True):
            works[i] = combined_sum(planned[i][0].state, planned[i][1], work), None
    return [works[i] for i in range(len(planned))]


def work_alone(run: RunInRound, plan: Plan, engine: Engine) -> Worked:
    """The local work of one run: of the whole cohort on the clients' own models, if they have any, and of the workers."""
    setting, state, own, sent = run.setting, run.state, run.state.personal, None
    if setting.personal is not None and len(plan.cohort):
        own = setting.personal.work(state.personal, state.model, plan.cohort, run.solver)
        given = setting.personal.updates(own, state.model, plan.workers, run.solver)
        if given is not None:
            sent, plan = given.updates, plan._replace(carried=given.carried)
    if len(plan.workers) == 0 and not setting.protection.without_clients:
        return None, own  # an empty cohort, a risk flat at these losses, or all work lost
    if setting.kept is not None:
        workers, own_prox = plan.workers, run.algorithm.traits.solver.own_prox
        prox = None if own_prox is None else own_prox(setting.alpha[workers.clients], len(setting.alpha))
        workers = replace(workers, rows=setting.kept.given(state.kept, workers.clients), prox=prox)
        plan = plan._replace(workers=workers)
    traits = run.algorithm.traits.aggregator
    if traits.normalises is not None and len(plan.workers):
        lengths = normalisers_of(plan.workers, run.solver, setting.data.train, setting.task.smallest_batch)
        engine = NormalisedWork(engine, lengths, plan.weights.double(), traits.steps, streams=state.carried is None)
    return setting.protection.combine(state, engine, run.solver, plan, sent), own


def finish(run: RunInRound, plan: Plan, worked: Worked | Diverged, began: float, runs: int) -> tuple[ServerState, RoundReport]:
    """The server's part of a run's round: the next state, and the report. The round began at `began` for all `runs`."""
    if isinstance(worked, Diverged):
        raise worked
    setting, state, (combined, own) = run.setting, run.state, worked
    if not has_work(setting, run.cohort):
        return next_state(setting, state), report_of(setting, plan, began, runs=runs)
    changed: dict[str, Any] = {"risk": plan.risk.state, "solver": run.solver_state, "personal": own}
    if combined is None:
        return next_state(setting, state, **changed), report_of(setting, plan, began, runs=runs)
    total, work = combined.total, combined.work
    if setting.protection.in_the_open and work is not None:
        if not work.arrived.any():
            stop_unless_finite(work.sq_norms, plan.workers, setting.data.train, "update")
        total = scaled(total, step_factor(run, plan, work))
    if run.algorithm.traits.solver.after_total is not None:
        changed["solver"] = corrected_state(run, plan, combined)
    if (server_total := run.algorithm.traits.solver.server_total) is not None and not combined.lost:
        total = server_total(changed["solver"], total)
    try:
        changed["params"], changed["server"] = server_step(state, run.algorithm, total)
    except Diverged as failure:
        raise named_by_aggregator(failure, run.algorithm.aggregator, combined) from None
    changed |= {"aggregator": combined.aggregator, "privacy": combined.privacy}
    if combined.carried is not None and state.carried is not None:
        changed["carried"] = next_carried(setting.task, run.algorithm, state.carried, combined.carried)
    if setting.kept is not None:
        changed["kept"] = setting.kept.write(state.kept, plan.workers, work)
    if state.round == 0:  # later states are looked at when a checkpoint is written
        for part, value in (("risk", plan.risk.state), ("aggregator", combined.aggregator)):
            refuse_unkeepable(part, vars(run.algorithm)[part], value, setting.name)
    after = next_state(setting, state, **changed)
    report = report_of(setting, plan, began, work, runs=runs)
    if combined.lost:  # whatever clients did is in no model
        report = replace(report, trained=0)
    rejected = rejected_clients(plan, work, setting.data.train) if setting.protection.in_the_open else ()
    epsilon = setting.protection.epsilon_after(after.round)
    return after, report if epsilon is None and not rejected else replace(report, rejected=rejected, epsilon=epsilon)


def stop_unless_finite(values: Tensor, cohort: Cohort, clients: ClientSet, what: str) -> None:
    """Raise Diverged with the round and the clients whose number is not finite."""
    if not math.isfinite(numbers(values).sum()) and (bad := ~torch.isfinite(values)).any():
        raise Diverged(cohort.round, (clients.ids[i] for i in cohort.clients[bad].tolist()), what)


# ----------------------------------------------------------------------------------------------- weights and sums, in the open


@dataclass(frozen=True, eq=False)
class Unprotected:
    """The protection of a run without privacy: the server sees every loss and every client update."""

    algorithm: Algorithm
    clients: ClientSet
    rounds_allowed: int
    in_the_open: bool = True  # single clients may be named
    without_clients: bool = False  # a round without clients releases nothing

    def begin(self) -> None:
        """There is no state."""

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, None]:
        """The risk of the cohort. A risk that needs no losses gets zeros, and its value is not reported."""
        if losses is None and self.algorithm.traits.risk.keeps_base_weights:  # the usual risk, and its answer is known
            return RiskValue(_UNKNOWN, cohort.weights, state), None
        ids = self.clients.ids_at(cohort.clients) if self.algorithm.traits.risk.needs_ids else None
        given = losses if losses is not None else torch.zeros_like(cohort.weights)
        with named_part("risk", self.algorithm.risk):
            risk = self.algorithm.risk(given, cohort.weights, clients=ids, state=state)
        if risk.weights.shape != cohort.weights.shape or not are_weights(numbers(risk.weights)):
            rule = "finite weights ≥ 0, one per client"
            smallest = ", ".join(f"{weight:.4g}" for weight in risk.weights.flatten().sort().values[:3].tolist())
            fix = f"Found {risk.weights.numel()}, the smallest {smallest}. See equipoise.testing.check_risk."
            raise InvalidParameter("risk", f"must give {len(cohort)} {rule}", self.algorithm.risk, fix)
        return risk, None

    def combine(self, state: ServerState, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None) -> Combined:
        """Local work and its total (D,). A linear aggregator's sum is streamed; others see every update.

        Updates that are not finite, or absurdly long, are left out: their weight goes to the others.
        """
        aggregator, params, workers = self.algorithm.aggregator, state.params, plan.workers
        if aggregator.linear and sent is None:
            return combined_sum(state, plan, engine.summed_update(state.model, workers, solver, plan.weights, aggregator))
        made = None if sent is None else as_local_work(sent, params, plan.worker_losses, carried=plan.carried)
        work = made or engine.updates(state.model, workers, solver)
        if not work.arrived.any():
            stop_unless_finite(work.sq_norms, workers, self.clients, "update")
        if aggregator.linear:
            return combined_rows(state, plan, work, aggregator)
        keys = self.streams(workers) if self.algorithm.traits.aggregator.needs_keys else None
        total, aggregator_state = total_of_rows(
            aggregator, work, work.update, plan.weights, state.aggregator, losses=plan.worker_losses, keys=keys
        )
        return Combined(total, work, aggregator_state)

    def streams(self, cohort: Cohort) -> Tensor:
        """A random stream of each client for the aggregator of this round, (K,) int64, whatever the order of clients."""
        return rng.client_keys(
            rng.stream_key(cohort.seed, "aggregation", cohort.round), self.clients.keys[cohort.clients].cpu()
        )

    def epsilon_after(self, rounds: int) -> None:
        """There is no ε."""

    def spent(self, state: Any, rounds: int) -> None:
        """Nothing was spent."""

    def describe(self) -> None:
        """There is no noise."""

    def privacy(self, state: Any) -> PrivacyTable:
        """No observer is held to anything."""
        return unprotected_table()

    @property
    def book(self) -> None:
        """There is no ledger: everything is open."""

    def open_ledger(self, ledger: Ledger, *, data: str, run: str, once: bool) -> None:
        """Nothing is written down: everything is open."""

    def resume(self, state: Any, rounds: int) -> None:
        """There is nothing to go on with."""

    def begin_evaluation(self, round_index: int) -> None:
        """Nothing is written down."""
