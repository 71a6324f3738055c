"""The laws of solvers, of their schedules, and of the observers that watch a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import solver_traits
from equipoise.core.rng import torch_generator
from equipoise.engines import Loop
from equipoise.errors import is_number
from equipoise.observers import Run, hears_something
from equipoise.runs.own_parts import (
    HAS_EFFECT,
    IS_MEMORY,
    LOWERS,
    MEMORY_CURE,
    MEMORY_IN_PLACE,
    MOVES,
    NUMBER_CURE,
    TUPLE_CURE,
)
from equipoise.runs.state_rules import FINITE, FINITE_CURE, SAME_AGAIN, SAME_CURE
from equipoise.runs.step_laws import EACH_CLIENT, EACH_CLIENT_CURE, broken_step_law
from equipoise.runs.steps_alone import (
    BEGIN_CURE,
    convex_losses,
    failure_without_memory,
    ignored_options,
    is_memory,
    lost_memories,
    some_steps,
    step_call,
)
from equipoise.runs.tried_calls import copied
from equipoise.solvers.client_steps import memory_of, rows_of
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.testing.laws import accepts, agree, check_of, has, hold, unchanged, without_error
from equipoise.testing.small_run import draw_everyone, make_small_task, prepare_solver
from equipoise.train import train
from equipoise.types import LocalSolver, Observer, Schedule, ServerState


class _NoSteps(AdjustedSolver):
    """A solver whose clients take no step."""

    def local_steps(self, size: int, effort: int | None = None) -> int:
        return 0


@check_of("a solver", on_copy=True)
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
    if solver_traits(solver).prepare is None:
        _check_form(solver)
    task, data = make_small_task(seed)
    engine, params = Loop().start(task, data), task.layout.read(task.module)
    if solver_traits(solver).after_total is not None:
        _check_correction(solver, seed)
    solver = prepare_solver(solver, engine, params, draw_everyone(data, seed), task.layout)
    for size in (1, 2, 9, 10, 11, 1000):
        steps = solver.local_steps(size)
        hold(isinstance(steps, int) and steps >= 0, solver, "local_steps is an integer ≥ 0", (size, steps))
        hold(steps <= solver.local_steps(size + 1), solver, "more data never mean fewer steps", size)
    for round_index in (0, 1, 1000):
        lr = solver.learning_rate(round_index)
        hold(math.isfinite(lr) and lr > 0, solver, "the learning rate is positive and finite in every round", (round_index, lr))
    _check_factors(solver)
    params = torch.randn(task.layout.dimension, generator=torch_generator(seed, "check_solver"), dtype=torch.float64)
    cohort = draw_everyone(data, seed)
    work = Loop().start(task, data).updates(params, cohort, _NoSteps(solver))
    agree(solver, "zero steps give a zero update", work.update, torch.zeros_like(work.update))
    once, twice = some_steps(solver)[1], some_steps(solver)[1]
    hold(torch.isfinite(once).all(), solver, FINITE, f"the parameters are {once.tolist()}", FINITE_CURE)
    agree(solver, SAME_AGAIN, once, twice, cure=SAME_CURE)
    _check_rows_apart(solver, torch_generator(seed, "check_solver steps"))
    lost = lost_memories(solver)
    hold(not lost, solver, MEMORY_IN_PLACE, f"memory{lost} is not", MEMORY_CURE)
    before, after = convex_losses(solver)
    hold(after < before, solver, LOWERS, f"{before:.6g} before and {after:.6g} after")
    ignored = ignored_options(solver)
    hold(not ignored, solver, HAS_EFFECT, ", ".join(ignored))
    if (broken := broken_step_law(solver)) is not None:
        hold(False, solver, *broken)
    if solver_traits(solver).keeps is not None and solver_traits(solver).shift is None:
        _check_kept_memory(solver, task.layout.dimension, torch_generator(seed, "check_solver memory"))


def _check_form(solver: LocalSolver) -> None:
    """What a solver has, how its step is called, and the form of its memory."""
    fix = "Extend solvers.SGD and write a step of your own."
    has(solver, "a solver", "batch_size", "local_steps", "learning_rate", "begin", "step", cure=fix)
    told = _told(solver, 1)
    accepts(solver, solver.step, step_call(told), (0, 0, 0), NUMBER_CURE if told else "", anchor=0, lr=0, **told)
    for weights in (torch.zeros(5), torch.zeros(3, 5)):
        with without_error(solver, IS_MEMORY):
            memory = copied(solver).begin(weights)
        hold(is_memory(memory, weights), solver, IS_MEMORY, type(memory).__name__, TUPLE_CURE)
    failure = failure_without_memory(copied(solver))
    hold(not failure, solver, IS_MEMORY, failure, BEGIN_CURE)
    again = copied(solver)  # as it was made: what a part keeps in self is of the shape that it saw first
    agree(solver, SAME_AGAIN, some_steps(again)[1], some_steps(again)[1], cure=SAME_CURE)


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
        if state.solver is None or setting is None or setting.kept is None:
            return
        rows = setting.kept.given(state.kept, torch.arange(len(setting.alpha))).double()
        law = "the common correction is the weighted sum of all clients' rows after every round"
        agree(self.solver, law, state.solver.double(), setting.alpha @ rows, 1e-6)
        self.rounds += 1


def _check_correction(solver: LocalSolver, seed: int) -> None:
    """A short run in which some clients take part in each round."""
    task, data = make_small_task(seed)
    watch = _WatchCorrection(solver)
    train(
        task.module, data, Algorithm(solver=solver), rounds=3, clients_per_round=3, seed=seed, observers=[watch], progress=False
    )
    hold(watch.rounds == 3, solver, "a solver with a common correction keeps it in its state", watch.rounds)


def _check_factors(solver: LocalSolver) -> None:
    traits = solver_traits(solver)
    clip, rates, factor = traits.clip_norm, traits.rates or {}, traits.step_factor
    hold(clip is None or clip > 0, solver, "the bound of gradients is positive", clip)
    hold(all(0 < rate < math.inf for rate in rates.values()), solver, "rates by name are positive and finite", rates)
    if factor is not None:
        check_schedule(factor)


def _told(solver: LocalSolver, number: int | Tensor) -> dict[str, Any]:
    return {"number": number} if solver_traits(solver).numbered else {}


def _check_rows_apart(solver: LocalSolver, gen: torch.Generator) -> None:
    """Steps on many clients are the steps on each: with one number for all, and with a number of each client."""
    for first in (torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 4.0, 1000.0], dtype=torch.float64)):
        together, anchor = torch.randn(3, 5, generator=gen), torch.randn(5, generator=gen)
        start, alone = together.clone(), [row.clone() for row in together]
        memory, memories = solver.begin(together), [solver.begin(row) for row in alone]
        for number in range(1, 1 + max(3, solver_traits(solver).repeats)):
            gradients = torch.randn(3, 5, generator=gen)
            several = first + number if bool(first.any()) else number
            told = _told(solver, several.unsqueeze(1) if isinstance(several, Tensor) else several)
            with unchanged(solver, "a step", gradient=gradients):  # which parameters may share
                solver.step(together, gradients, memory, anchor=anchor, lr=0.1, **told)
            for row, gradient, own, before in zip(alone, gradients, memories, first.tolist(), strict=True):
                solver.step(row, gradient.clone(), own, anchor=anchor, lr=0.1, **_told(solver, int(before) + number))
        hold(not torch.equal(together, start), solver, MOVES, start.tolist())
        agree(solver, EACH_CLIENT, together, torch.stack(alone), 1e-6, cure=EACH_CLIENT_CURE)


def _check_kept_memory(solver: LocalSolver, dimension: int, gen: torch.Generator) -> None:
    """A memory that is written as a row and read again goes on as it was."""
    keeps = solver_traits(solver).keeps
    width = None if keeps is None else keeps(dimension)
    once, anchor = (torch.randn(dimension, generator=gen, dtype=torch.float64) for _ in range(2))
    twice = once.clone()
    memory = solver.begin(once)
    hold(width == len(memory) * dimension + 1, solver, "a client keeps its memory and the number of its steps", width)
    again = solver.begin(twice)
    for number in range(1, 5):
        gradient = torch.randn(dimension, generator=gen, dtype=torch.float64)
        solver.step(once, gradient, memory, anchor=anchor, lr=0.1, **_told(solver, number))
        again, taken = memory_of(rows_of(again, torch.tensor(number - 1)), dimension)
        solver.step(twice, gradient, again, anchor=anchor, lr=0.1, **_told(solver, int(taken) + 1))
    agree(solver, "a memory that was kept goes on as it was", twice, once)


@check_of("a schedule", "__call__", cure="Write schedule(index), which returns a number.")
def check_schedule(schedule: Schedule | Callable[[int], float]) -> None:
    """A schedule is a function of the index, positive and finite at every one from 0 on.

    >>> import equipoise as eq
    >>> check_schedule(eq.solvers.Cosine(rounds=10))  # nothing is returned: all laws hold
    """
    for index in (0, 1, 2, 3, 9, 10, 11, 99, 100, 199, 200, 201, 1000):
        factor, again = schedule(index), schedule(index)
        hold(is_number(factor) and 0 < factor < math.inf, schedule, "a factor is positive and finite", (index, factor))
        hold(factor == again, schedule, "one index has one factor", (index, factor, again))


@check_of("an observer")
def check_observer(observer: Observer, *, seed: int = 0) -> None:
    """Watching a run does not change it: the parameters are the same, bit for bit, with and without the observer.

    A small model is trained twice, with and without it.

    >>> import equipoise as eq
    >>> check_observer(eq.observers.History())  # nothing is returned: all laws hold
    """
    cure = "Extend equipoise.types.Observer."
    hold(hears_something(observer), observer, "an observer has a method such as on_round(report)", cure=cure)
    task, data = make_small_task(seed)

    def params(*observers: Observer) -> Tensor:
        return train(
            task.module, data, rounds=4, clients_per_round=3, seed=seed, evaluate_every=2, observers=observers, progress=False
        ).params

    alone = params()  # first: an observer may change what all runs share
    agree(observer, "an observer does not change training", params(observer), alone)
