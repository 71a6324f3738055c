"""A small model, small data and one round's cohort, on which checks try parts out."""

from __future__ import annotations

from inspect import isgenerator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import solver_traits
from equipoise.core.params import ParameterLayout
from equipoise.core.rng import torch_generator
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.answers import answer_all
from equipoise.errors import without_notices
from equipoise.models import Softmax
from equipoise.runs.setup import Setting, set_up
from equipoise.sampling import Full
from equipoise.solvers.prepared import RoundContext
from equipoise.types import Cohort, Engine, LocalSolver

SIZES = (1, 2, 3, 7, 10, 11, 20, 25)  # examples of each client


def make_small_task(seed: int) -> tuple[Task, FederatedData]:
    """A softmax model and eight ragged clients, each with six validation examples, in float64."""
    gen = torch_generator(seed, "check task")

    def clients(sizes: tuple[int, ...]) -> ClientSet:
        return ClientSet.pack(
            (f"client-{i}", torch.randn(n, 4, generator=gen, dtype=torch.float64), torch.randint(0, 3, (n,), generator=gen))
            for i, n in enumerate(sizes)
        )

    data = FederatedData(clients(SIZES), validation=clients((6,) * len(SIZES)), classes=3, name="ragged")
    return Task.of(Softmax(4, 3).double()), data


def set_up_quietly(model: nn.Module, data: FederatedData, algorithm: Algorithm, clients: int, **options: Any) -> Setting:
    """A run of some rounds with `clients` clients in each, set up without notices."""
    with without_notices():
        return set_up(
            model, data, algorithm, clients_per_round=clients, **{"loss": None, "error": None, "engine": "loop"} | options
        )


def perturb_params(task: Task, gen: torch.Generator, models: tuple[int, ...] = ()) -> Tensor:
    """The task's parameters (D,) plus Gaussian noise: a point at which no gradient is zero by symmetry.

    Carried values (C,) of a model that has any follow, a little larger than they are: no variance becomes negative. `models`
    is the number of such points.
    """
    params, carried = task.split(task.read_model().expand(*models, -1))
    moved = params + 0.1 * torch.randn(params.shape, generator=gen, dtype=params.dtype)
    larger = carried + 0.1 * torch.rand(carried.shape, generator=gen, dtype=params.dtype) if task.carried.names else carried
    return torch.cat([moved, larger], -1)


def draw_everyone(data: FederatedData, seed: int) -> Cohort:
    """The cohort of all training clients, weighted by their examples."""
    return Full()(0, Algorithm().base_weights(data.train), clients_per_round=len(data.train), seed=seed)


def prepare_solver(solver: LocalSolver, engine: Engine, params: Tensor, cohort: Cohort, layout: ParameterLayout) -> LocalSolver:
    """The solver of a round: what `prepare` returns where all clients are in every cohort, or the solver itself."""
    prepare = solver_traits(solver).prepare
    if prepare is None:
        return solver
    made = prepare(RoundContext(params, cohort, cohort.weights, lambda purpose: cohort, layout), None)
    answer = None
    while isgenerator(made):
        try:
            (answer,) = answer_all(engine, [made.send(answer)])
        except StopIteration as end:
            made = end.value
    return made[0]
