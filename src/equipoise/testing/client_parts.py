"""The laws of what clients do: solvers, the engines that run them, and the observers that watch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.algorithm import Algorithm
from equipoise.core.abilities import engine_traits, solver_traits
from equipoise.core.params import ParameterLayout
from equipoise.core.rng import torch_generator
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop
from equipoise.models import Softmax
from equipoise.runs.setup import EngineChoice
from equipoise.sampling import Full
from equipoise.solvers.prepared import RoundContext
from equipoise.testing.laws import close, hold
from equipoise.train import train
from equipoise.types import (
    Cohort,
    Engine,
    Job,
    LocalSolver,
    Observer,
)


def _small_task(seed: int) -> tuple[Task, FederatedData]:
    """A softmax model and eight ragged clients, in float64."""
    gen = torch_generator(seed, "check task")
    sizes = [1, 2, 3, 7, 10, 11, 20, 25]
    clients = ClientSet.pack(
        (f"client-{i}", torch.randn(n, 4, generator=gen, dtype=torch.float64), torch.randint(0, 3, (n,), generator=gen))
        for i, n in enumerate(sizes)
    )
    return Task.of(Softmax(4, 3).double()), FederatedData(clients, classes=3, name="ragged")


def _everyone(data: FederatedData, seed: int) -> Cohort:
    return Full()(0, Algorithm().base_weights(data.train), clients_per_round=len(data.train), seed=seed)


def _prepared(solver: LocalSolver, engine: Engine, params: Tensor, cohort: Cohort, layout: ParameterLayout) -> LocalSolver:
    """The solver of a round, where every client takes part in every cohort."""
    prepare = solver_traits(solver).prepare
    if prepare is None:
        return solver
    return prepare(RoundContext(engine, params, cohort, cohort.weights, lambda purpose: cohort, layout), None)[0]


@dataclass(frozen=True)
class _NoSteps:
    """A solver's work with no step at all."""

    solver: LocalSolver

    @property
    def batch_size(self) -> int | None:
        return self.solver.batch_size

    def local_steps(self, size: int, effort: int | None = None) -> int:
        return 0

    def learning_rate(self, round_index: int) -> float:
        return self.solver.learning_rate(round_index)

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        return self.solver.begin(weights)

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        self.solver.step(weights, gradient, memory, anchor=anchor, lr=lr)


def check_solver(solver: LocalSolver, *, seed: int = 0) -> None:
    """Zero steps give a zero update; a step acts on each client alone; more data never mean fewer steps.

    A solver that is prepared anew for each round is checked as it is prepared for the first round of a small run.
    """
    task, data = _small_task(seed)
    solver = _prepared(solver, Loop().start(task, data), task.layout.read(task.module), _everyone(data, seed), task.layout)
    for size in (1, 2, 9, 10, 11, 1000):
        steps = solver.local_steps(size)
        hold(isinstance(steps, int) and steps >= 0, solver, "local_steps is a whole number ≥ 0", (size, steps))
        hold(steps <= solver.local_steps(size + 1), solver, "more data never mean fewer steps", size)
    for round_index in (0, 1, 1000):
        lr = solver.learning_rate(round_index)
        hold(math.isfinite(lr) and lr > 0, solver, "the learning rate is positive and finite in every round", (round_index, lr))
    params = torch.randn(task.layout.dimension, generator=torch_generator(seed, "check_solver"), dtype=torch.float64)
    work = Loop().start(task, data).updates(params, _everyone(data, seed), _NoSteps(solver))
    hold(bool((work.update == 0).all()), solver, "zero steps give a zero update", float(work.update.abs().max()))
    gen = torch_generator(seed, "check_solver steps")
    together, anchor = torch.randn(3, 5, generator=gen), torch.randn(5, generator=gen)
    alone = [row.clone() for row in together]
    memory, memories = solver.begin(together), [solver.begin(row) for row in alone]
    for _ in range(3):
        gradients = torch.randn(3, 5, generator=gen)
        kept = gradients.clone()
        solver.step(together, gradients, memory, anchor=anchor, lr=0.1)
        hold(torch.equal(gradients, kept), solver, "a step does not write to the gradient, which parameters may share")
        for row, gradient, own in zip(alone, gradients, memories, strict=True):
            solver.step(row, gradient.clone(), own, anchor=anchor, lr=0.1)
    hold(close(together, torch.stack(alone), 1e-6), solver, "a step on many clients is the step on each")


def check_engine(
    engine: EngineChoice,
    *,
    task: Task | None = None,
    data: FederatedData | None = None,
    solver: LocalSolver | None = None,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Agrees with the loop engine on losses, updates, summed updates and evaluation, for the given task or a small one."""
    if task is None or data is None:
        task, data = _small_task(seed)
    solver = solver or Algorithm().solver
    oracle, tried = Loop().start(task, data), engine.start(task, data)
    gen = torch_generator(seed, "check_engine")
    params = task.layout.read(task.module)
    params = params + 0.1 * torch.randn(len(params), generator=gen, dtype=params.dtype)
    device = engine_traits(tried).device
    here = params.to(device)
    cohort = _everyone(data, seed)
    plain, solver = (
        _prepared(solver, oracle, params, cohort, task.layout), _prepared(solver, tried, here, cohort, task.layout)
    )  # fmt: skip
    efforts = solver_traits(solver).efforts
    if efforts is not None:
        cohort = replace(cohort, effort=efforts(cohort, data.train.keys))
    models = [params, 0.5 * params]
    half = cohort.take(torch.arange(0, len(cohort), 2))
    jobs = [Job(models[0], cohort, cohort.weights), Job(models[1], half, half.weights)]
    moved = [Job(job.params.to(device), job.cohort, job.weights) for job in jobs]
    pairs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "losses": lambda: (tried.losses(here, cohort), oracle.losses(params, cohort)),
        "updates": lambda: (tried.updates(here, cohort, solver).update, oracle.updates(params, cohort, plain).update),
        "local losses": lambda: (tried.updates(here, cohort, solver).losses, oracle.updates(params, cohort, plain).losses),
        "update norms": lambda: (tried.updates(here, cohort, solver).sq_norms, oracle.updates(params, cohort, plain).sq_norms),
        "summed update": lambda: (
            tried.summed_update(here, cohort, solver, cohort.weights, WeightedMean()).update,
            oracle.summed_update(params, cohort, plain, cohort.weights, WeightedMean()).update,
        ),
        "losses for a solver": lambda: (tried.losses(here, cohort, solver), oracle.losses(params, cohort, plain)),
        "losses of several models": lambda: (
            tried.losses_of([job.params for job in moved], cohort),
            oracle.losses_of(models, cohort),
        ),
        "summed updates of several models": lambda: (
            torch.stack([work.update for work in tried.summed_updates(moved, solver, WeightedMean())]),
            torch.stack([work.update for work in oracle.summed_updates(jobs, plain, WeightedMean())]),
        ),
        "evaluated losses": lambda: (tried.evaluate(here, data.train)[0], oracle.evaluate(params, data.train)[0]),
        "evaluated errors": lambda: (tried.evaluate(here, data.train)[1], oracle.evaluate(params, data.train)[1]),
    }
    for what, pair in pairs.items():
        found, expected = (t.cpu().nan_to_num(nan=-1.0) for t in pair())
        difference = float((found - expected).abs().max()) if found.shape == expected.shape else "another shape"
        hold(close(found, expected, tolerance), engine, f"{what} agree with the loop engine", difference)


def check_observer(observer: Observer, *, seed: int = 0) -> None:
    """Watching a run does not change it: the parameters are the same, bit for bit, with and without the observer."""
    task, data = _small_task(seed)

    def params(*observers: Observer) -> Tensor:
        result = train(
            task.module, data, rounds=4, clients_per_round=3, seed=seed, evaluate_every=2, observers=observers, progress=False
        )
        return result.params

    alone = params()
    hold(torch.equal(params(observer), alone), observer, "an observer does not change training")
