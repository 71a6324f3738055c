"""The checks of solvers, of their schedules, and of the observers that watch a run: laws of steps, and laws of small runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import solver_traits
from equipoise.engines import Loop
from equipoise.errors import is_number
from equipoise.observers import Run, hears_something
from equipoise.solvers.client_steps import memory_of, rows_of
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.testing.laws import agree, check_of, has, hold, try_laws
from equipoise.testing.small_run import draw_everyone, make_small_task, prepare_solver
from equipoise.testing.steps import STEP_LAWS, TriedSteps
from equipoise.train import train
from equipoise.types import LocalSolver, Observer, Schedule, ServerState

FIX = "Extend solvers.SGD and write a step of your own."


@check_of("a solver")
def check_solver(solver: LocalSolver, *, seed: int = 0) -> None:
    """Zero steps give a zero update; steps move the parameters, in place; a step acts on each client and each number alone.

    More data never mean fewer steps. A few small steps on a convex loss lower it. A memory that a step uses is changed by it,
    in place. The same steps again give the same result. Options that a subclass of SGD inherits have an effect. The anchor
    attracts the weights, and weights shrink without a gradient, where they move at all. Equal gradients at 60 steps move the
    weights against them. Steps without a gradient do not take back the step of one gradient.

    Rates, their factors at local steps and by name, and the bound of gradients are positive. A solver that is told the number
    of a step takes it for all clients at once, or for each client. A client that keeps its memory between rounds goes on as
    if its rounds were one. The common correction of SCAFFOLD or FedDyn is Σ α_k row_k after every round, also where only some
    clients take part. A solver that is prepared anew for each round is checked as it is prepared for the first round of a
    small run.
    """
    traits = solver_traits(solver)
    if traits.prepare is None:
        has(solver, "a solver", "batch_size", "local_steps", "learning_rate", "begin", "step", fix=FIX)
    if traits.after_total is not None:
        _check_correction(solver, seed)
    task, data = make_small_task(seed)
    cohort, engine = draw_everyone(data, seed), Loop().start(task, data)
    solver = prepare_solver(solver, engine, task.layout.read(task.module), cohort, task.layout)
    try_laws(STEP_LAWS if traits.prepare is None else STEP_LAWS[1:], lambda: TriedSteps(solver, seed=seed))
    case = TriedSteps(solver, seed=seed)
    clip, rates, factor = case.traits.clip_norm, case.traits.rates or {}, case.traits.step_factor
    hold(clip is None or clip > 0, solver, "positive_clip", clip)
    hold(all(0 < rate < math.inf for rate in rates.values()), solver, "positive_rates", rates)
    if factor is not None:
        check_schedule(factor)
    update = engine.updates(case.random(task.layout.dimension), cohort, _NoSteps(case.part)).update
    agree(solver, "zero_steps", update, torch.zeros_like(update))
    if case.traits.keeps is not None and case.traits.shift is None:
        _check_kept_memory(case, case.traits.keeps(task.layout.dimension), task.layout.dimension)


class _NoSteps(AdjustedSolver):
    """A solver whose clients take no step."""

    def local_steps(self, size: int, effort: int | None = None) -> int:
        return 0


class _WatchCorrection(Observer):
    """Compares a solver's common correction with what all clients' rows add up to, after every round."""

    def __init__(self, solver: LocalSolver) -> None:
        self.solver, self.rounds = solver, 0
        self.run: Run | None = None

    def on_start(self, run: Run) -> None:
        """Remember the run."""
        self.run = run

    def on_state(self, state: ServerState) -> None:
        """Compare, if a round has taken place."""
        setting = None if self.run is None else self.run.setting
        if state.solver is not None and setting is not None and setting.kept is not None:
            rows = setting.kept.given(state.kept, torch.arange(len(setting.alpha))).double()
            agree(self.solver, "correction", state.solver.double(), setting.alpha @ rows, 1e-6)
            self.rounds += 1


def _check_correction(solver: LocalSolver, seed: int) -> None:
    """A short run in which some clients take part in each round."""
    (task, data), watch = make_small_task(seed), _WatchCorrection(solver)
    given: dict[str, Any] = {"rounds": 3, "clients_per_round": 3, "seed": seed, "observers": [watch], "progress": False}
    train(task.module, data, Algorithm(solver=solver), **given)
    hold(watch.rounds == 3, solver, "correction_kept", watch.rounds)


def _check_kept_memory(case: TriedSteps, width: int, dimension: int) -> None:
    """A memory that is written as a row and read again goes on as it was."""
    once, anchor = case.random(dimension), case.random(dimension)
    twice = once.clone()
    memory, again = case.part.begin(once), case.part.begin(twice)
    case.hold(width == len(memory) * dimension + 1, "memory_width", width)
    for number in range(1, 5):
        gradient = case.random(dimension)
        case.step(once, gradient, memory, anchor, number, 0.1)
        again, taken = memory_of(rows_of(again, torch.tensor(number - 1)), dimension)
        case.step(twice, gradient, again, anchor, int(taken) + 1, 0.1)
    agree(case.part, "memory_kept", twice, once)


@check_of("a schedule", "__call__", fix="Write schedule(index), which returns a number.")
def check_schedule(schedule: Schedule | Callable[[int], float]) -> None:
    """A schedule is a function of the index, positive and finite at every one from 0 on.

    >>> import equipoise as eq
    >>> check_schedule(eq.solvers.Cosine(rounds=10))  # nothing is returned: all laws hold
    """
    for index in (0, 1, 2, 3, 9, 10, 11, 99, 100, 199, 200, 201, 1000):
        factor, again = schedule(index), schedule(index)
        hold(is_number(factor) and 0 < factor < math.inf, schedule, "factor", (index, factor))
        hold(factor == again, schedule, "one_factor", (index, factor, again))


@check_of("an observer")
def check_observer(observer: Observer, *, seed: int = 0) -> None:
    """Watching a run does not change it: the parameters are the same, bit for bit, with and without the observer.

    A small model is trained twice, with and without it.

    >>> import equipoise as eq
    >>> check_observer(eq.observers.History())  # nothing is returned: all laws hold
    """
    hold(hears_something(observer), observer, "hears")
    task, data = make_small_task(seed)

    def params(*observers: Observer) -> Tensor:
        given: dict[str, Any] = {"rounds": 4, "clients_per_round": 3, "seed": seed, "evaluate_every": 2, "progress": False}
        return train(task.module, data, observers=observers, **given).params

    alone = params()  # first: an observer may change what all runs share
    agree(observer, "watches", params(observer), alone)
