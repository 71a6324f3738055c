"""The laws of solvers and of the observers that watch a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.rng import torch_generator
from equipoise.engines import Loop
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.testing.laws import agree, hold, unchanged
from equipoise.testing.small_run import draw_everyone, make_small_task, prepare_solver
from equipoise.train import train
from equipoise.types import LocalSolver, Observer


class _NoSteps(AdjustedSolver):
    """A solver whose clients take no step."""

    def local_steps(self, size: int, effort: int | None = None) -> int:
        return 0


def check_solver(solver: LocalSolver, *, seed: int = 0) -> None:
    """Zero steps give a zero update; a step acts on each client alone; more data never mean fewer steps.

    A solver that is prepared anew for each round is checked as it is prepared for the first round of a small run.
    """
    task, data = make_small_task(seed)
    engine, params = Loop().start(task, data), task.layout.read(task.module)
    solver = prepare_solver(solver, engine, params, draw_everyone(data, seed), task.layout)
    for size in (1, 2, 9, 10, 11, 1000):
        steps = solver.local_steps(size)
        hold(isinstance(steps, int) and steps >= 0, solver, "local_steps is an integer ≥ 0", (size, steps))
        hold(steps <= solver.local_steps(size + 1), solver, "more data never mean fewer steps", size)
    for round_index in (0, 1, 1000):
        lr = solver.learning_rate(round_index)
        hold(math.isfinite(lr) and lr > 0, solver, "the learning rate is positive and finite in every round", (round_index, lr))
    params = torch.randn(task.layout.dimension, generator=torch_generator(seed, "check_solver"), dtype=torch.float64)
    work = Loop().start(task, data).updates(params, draw_everyone(data, seed), _NoSteps(solver))
    agree(solver, "zero steps give a zero update", work.update, torch.zeros_like(work.update))
    gen = torch_generator(seed, "check_solver steps")
    together, anchor = torch.randn(3, 5, generator=gen), torch.randn(5, generator=gen)
    alone = [row.clone() for row in together]
    memory, memories = solver.begin(together), [solver.begin(row) for row in alone]
    for _ in range(3):
        gradients = torch.randn(3, 5, generator=gen)
        with unchanged(solver, "a step", gradient=gradients):  # which parameters may share
            solver.step(together, gradients, memory, anchor=anchor, lr=0.1)
        for row, gradient, own in zip(alone, gradients, memories, strict=True):
            solver.step(row, gradient.clone(), own, anchor=anchor, lr=0.1)
    agree(solver, "a step on many clients is the step on each", together, torch.stack(alone), 1e-6)


def check_observer(observer: Observer, *, seed: int = 0) -> None:
    """Watching a run does not change it: the parameters are the same, bit for bit, with and without the observer."""
    task, data = make_small_task(seed)

    def params(*observers: Observer) -> Tensor:
        return train(
            task.module, data, rounds=4, clients_per_round=3, seed=seed, evaluate_every=2, observers=observers, progress=False
        ).params

    alone = params()  # first: an observer may change what all runs share
    agree(observer, "an observer does not change training", params(observer), alone)
