"""Local work whose updates are scaled by ā/a_k before anybody sees them: what FedNova asks of any engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise.attacks.malicious import summed_rows
from equipoise.core.abilities import read, solver_traits
from equipoise.core.numbers import Numbers
from equipoise.data.clients import ClientSet
from equipoise.errors import EquipoiseError
from equipoise.solvers.batches import steps_taken
from equipoise.types import Aggregator, AggregatorTraits, Cohort, Engine, LocalSolver, LocalWork, Pull


def steps_of(cohort: Cohort, solver: LocalSolver, clients: ClientSet, least: int) -> Numbers:
    """How many local steps each client of a cohort takes, (K,); batches of less than `least` examples are left out."""
    sizes = clients.host_sizes.numpy()[cohort.clients.numpy()].tolist()
    efforts = [] if cohort.effort is None else [cohort.effort.tolist()]
    asked = [(one[0], solver.local_steps(*one)) for one in zip(sizes, *efforts, strict=True)]
    return np.array([steps_taken(solver, size, steps, least) for size, steps in asked], dtype=np.int64)


def normalisers_of(cohort: Cohort, solver: LocalSolver, clients: ClientSet, least: int) -> Tensor:
    """a_k of each client of a cohort, (K,) float64: what its steps add up to under a gradient of 1, in units of the rate."""
    rule = solver_traits(solver).normalisers
    if rule is None:
        raise EquipoiseError(f"{type(solver).__name__} does not say what its steps add up to.")
    return rule(torch.from_numpy(steps_of(cohort, solver, clients, least)), solver.learning_rate(cohort.rate_round))


class NormalisedWork(Engine):
    """The local work of a round's workers, each update times ā/a_k; norms are those of the scaled updates."""

    def __init__(self, engine: Engine, normalisers: Tensor, weights: Tensor, mean: float | None, *, streams: bool) -> None:
        self.engine, self.streams = engine, streams  # carried values, if there are any, would be averaged under scaled weights
        average = float(weights @ normalisers / weights.sum()) if mean is None else mean
        self.scales = average / normalisers  # (K,)

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client, normalised; its `update` is (K, D)."""
        work = self.engine.updates(params, cohort, solver)
        update = work.update * self.scales.to(work.update).unsqueeze(1)
        return replace(work, update=update, sq_norms=work.sq_norms * self.scales.square())

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Normalised local work through a linear aggregator, (D,); a weighted mean is streamed, by scaled weights."""
        inner = read(AggregatorTraits, aggregator).normalises or aggregator
        if self.streams and read(AggregatorTraits, inner).weighted_sum:
            work = self.engine.summed_update(params, cohort, solver, weights * self.scales, inner)
            return replace(work, sq_norms=work.sq_norms * self.scales.square())
        return summed_rows(self.updates(params, cohort, solver), weights, inner)

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """As the engine's."""
        return self.engine.losses(params, cohort, solver)

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """As the engine's: clients' own models are not normalised."""
        return self.engine.own_steps(models, cohort, solver, pull)

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As the engine's."""
        return self.engine.evaluate(params, clients, which)

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """As the engine's."""
        return self.engine.evaluate_own(models, clients, which)
