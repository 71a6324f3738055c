"""One round of several runs, their clients' work in one batched computation: what families, seeds and algorithms share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.equality import same_part
from equipoise.data.clients import ClientSet
from equipoise.errors import Diverged
from equipoise.round import (
    Plan,
    combine,
    left_out_factor,
    needs_losses,
    next_state,
    plan_round,
    prepare,
    report_of,
    server_step,
    step_factor,
    stop_if_nothing_arrived,
    times,
)
from equipoise.types import Cohort, Engine, Job, LocalSolver, LocalWork, RoundReport, ServerState


@dataclass(frozen=True, eq=False)
class Turn:
    """What one run brings to a round that it shares with others."""

    state: ServerState
    algorithm: Algorithm
    cohort: Cohort
    clients_per_round: int | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A turn with the solver of its round and that solver's next state."""

    turn: Turn
    solver: LocalSolver
    solver_state: Any


@dataclass(frozen=True, eq=False)
class Done:
    """The local work of a run's round, and its total (D,)."""

    work: LocalWork
    total: Tensor
    aggregator_state: Any


Outcome = tuple[ServerState, RoundReport] | Diverged


def round_together(turns: Sequence[Turn], engine: Engine, clients: ClientSet) -> list[Outcome]:
    """One round of every run: as `run_round`, with their losses and local work computed together where they can be.

    A run that diverges has the error as its outcome; the others are not touched by it.
    """
    with getattr(engine, "in_round", nullcontext)():
        return _round_together(turns, engine, clients)


def _round_together(turns: Sequence[Turn], engine: Engine, clients: ClientSet) -> list[Outcome]:
    began = time.perf_counter()
    outcomes: dict[int, Outcome] = {}
    ready: dict[int, Prepared] = {}
    for number, turn in enumerate(turns):
        if len(turn.cohort):
            ready[number] = Prepared(
                turn, *prepare(turn.state, turn.algorithm, engine, turn.cohort, clients, turn.clients_per_round)
            )
        else:  # Poisson sampling may draw nobody
            outcomes[number] = (
                next_state(turn.state, turn.algorithm),
                report_of(Plan.nobody(turn.cohort), began, runs=len(turns)),
            )
    plans: dict[int, Plan] = {}
    for (number, one), losses in zip(ready.items(), losses_together(list(ready.values()), engine), strict=True):
        try:
            plans[number] = plan_round(one.turn.state, one.turn.algorithm, one.solver, one.turn.cohort, losses, clients)
        except Diverged as failure:
            outcomes[number] = failure
    works = work_together([(ready[number], plan) for number, plan in plans.items()], engine)
    for (number, plan), done in zip(plans.items(), works, strict=True):
        try:
            outcomes[number] = ended(ready[number], plan, done, clients, began, len(turns))
        except Diverged as failure:
            outcomes[number] = failure
    return [outcomes[number] for number in range(len(turns))]


def losses_together(ready: Sequence[Prepared], engine: Engine) -> list[Tensor | None]:
    """The losses (K,) of each run's cohort at its model; None where nobody asks for them.

    Runs with the same cohort are scored in one pass over its examples.
    """
    losses: list[Tensor | None] = [None] * len(ready)
    asked = [i for i, one in enumerate(ready) if needs_losses(one.turn.algorithm)]
    adapting = [i for i in asked if getattr(ready[i].solver, "adapts", False)]
    for i in adapting:
        losses[i] = engine.losses(ready[i].turn.state.params, ready[i].turn.cohort, ready[i].solver)
    cohorts = {i: ready[i].turn.cohort.clients for i in asked if i not in adapting}
    alone = []
    for same in grouped(cohorts, lambda i, j: cohorts[i] is cohorts[j] or torch.equal(cohorts[i], cohorts[j])):
        if len(same) == 1:
            alone.append(same[0])
            continue
        models = [ready[i].turn.state.params for i in same]
        for i, found in zip(same, engine.losses_of(models, ready[same[0]].turn.cohort), strict=True):
            losses[i] = found
    for i, found in zip(alone, losses_each(engine, [ready[i].turn for i in alone]), strict=True):
        losses[i] = found
    return losses


def losses_each(engine: Engine, turns: Sequence[Turn]) -> list[Tensor]:
    """The losses (K,) of cohorts that differ, each at its own model: in one call if the engine has one for that."""
    if hasattr(engine, "losses_each") and turns:
        found: list[Tensor] = engine.losses_each([Job(turn.state.params, turn.cohort, turn.cohort.weights) for turn in turns])
        return found
    return [engine.losses(turn.state.params, turn.cohort) for turn in turns]


def work_together(planned: Sequence[tuple[Prepared, Plan]], engine: Engine) -> list[Done | None]:
    """The local work of each run; None where nobody works. Runs with one solver and one linear aggregator work in one call."""
    done: list[Done | None] = [None] * len(planned)
    busy = [i for i, (_, plan) in enumerate(planned) if len(plan.workers)]

    def alike(i: int, j: int) -> bool:
        first, second = planned[i][0], planned[j][0]
        aggregators = first.turn.algorithm.aggregator, second.turn.algorithm.aggregator
        return aggregators[0].linear and same_part(*aggregators) and same_part(first.solver, second.solver)

    for group in grouped(busy, alike):
        for i, found in zip(group, work_of_group([planned[i] for i in group], engine), strict=True):
            done[i] = found
    return done


def work_of_group(planned: Sequence[tuple[Prepared, Plan]], engine: Engine) -> list[Done]:
    """The local work of runs with the same solver and aggregator."""
    one, plan = planned[0]
    algorithm = one.turn.algorithm
    if len(planned) == 1:
        total, aggregator_state, work = combine(one.turn.state, algorithm, engine, one.solver, plan)
        return [Done(work, total, aggregator_state)]
    jobs = [Job(prepared.turn.state.params, plan.workers, plan.weights) for prepared, plan in planned]
    works = engine.summed_updates(jobs, one.solver, algorithm.aggregator)
    return [
        Done(work, times(work.update, left_out_factor(plan, work)), prepared.turn.state.aggregator)
        for work, (prepared, plan) in zip(works, planned, strict=True)
    ]


def ended(
    one: Prepared, plan: Plan, done: Done | None, clients: ClientSet, began: float, runs: int
) -> tuple[ServerState, RoundReport]:
    """The server's part of a run's round: the next state, and the report."""
    state, algorithm = one.turn.state, one.turn.algorithm
    changed: dict[str, Any] = {"risk": plan.risk.state, "solver": one.solver_state}
    if done is None:
        return next_state(state, algorithm, **changed), report_of(plan, began, runs=runs)
    stop_if_nothing_arrived(plan, done.work, clients)
    total = times(done.total, step_factor(algorithm, one.solver, plan, done.work))
    changed["params"], changed["server"] = server_step(state, algorithm, total)
    changed["aggregator"] = done.aggregator_state
    return next_state(state, algorithm, **changed), report_of(plan, began, done.work, clients, runs=runs)


def grouped(numbers: Iterable[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Numbers in groups whose members are alike, in order.

    >>> grouped([4, 7, 1, 10], lambda i, j: i % 3 == j % 3)
    [[4, 7, 1, 10]]
    >>> grouped([4, 5, 1], lambda i, j: i % 3 == j % 3)
    [[4, 1], [5]]
    """
    groups: list[list[int]] = []
    for number in numbers:
        for group in groups:
            if alike(group[0], number):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups
