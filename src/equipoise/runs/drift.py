"""What the server does in a round for solvers with a common correction: SCAFFOLD's c and FedDyn's h."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.core.numbers import Numbers
from equipoise.errors import EquipoiseError
from equipoise.runs.normalised_work import normalisers_of, steps_of
from equipoise.types import Cohort, Combined, LocalSolver

if TYPE_CHECKING:
    from equipoise.round import Plan, RunInRound


def weights_of_steps(run: RunInRound, cohort: Cohort, solver: LocalSolver, weights: Numbers) -> Numbers:
    """The risk's weights (K,), where lengths of steps count: 0 for clients without a step, which take no part.

    A solver with a plain mean has all other clients count alike.
    """
    traits, clients, least = run.algorithm.traits, run.setting.data.train, run.setting.task.smallest_batch
    weights = np.where(steps_of(cohort, solver, clients, least) > 0, weights, 0.0)
    return np.where(weights > 0, 1.0, 0.0) if traits.solver.plain_mean else weights


def corrected_state(run: RunInRound, plan: Plan, combined: Combined) -> Any:
    """The solver's state after a round: by clients' rows where the total is a mean that the server sees, else by the total."""
    setting, traits, work = run.setting, run.algorithm.traits, combined.work
    by_rows, by_total = traits.solver.after_rows, traits.solver.after_total
    if by_total is None or combined.lost:
        return run.solver_state
    rows = work.rows if work is not None and in_the_open_mean(run) else None
    if by_rows is not None and setting.kept is not None and work is not None and rows is not None:
        here = torch.from_numpy(np.flatnonzero(work.arrived))
        who = plan.workers.clients[here]
        return by_rows(run.solver_state, setting.alpha[who], setting.kept.change(run.state.kept, who, rows[here]))
    scale = float("nan") if by_rows is None else run.solver.learning_rate(plan.cohort.rate_round) * mean_length(run, plan)
    return by_total(run.solver_state, combined.total, counted_share(run, plan, combined), scale)


def in_the_open_mean(run: RunInRound) -> bool:
    """Whether the server sees every update, and takes their weighted mean."""
    return run.setting.protection.in_the_open and run.algorithm.traits.aggregator.weighted_sum


def counted_share(run: RunInRound, plan: Plan, combined: Combined) -> float:
    """Σ α_k over the clients whose updates are in the total; m/n for a plain mean, and the expected m/n under noise."""
    alpha, workers = run.setting.alpha, plan.workers.clients
    if run.algorithm.private:  # how many came is secret
        return plan.denominator / len(alpha)
    each: Tensor = torch.full_like(alpha, 1 / len(alpha)) if run.algorithm.traits.solver.plain_mean else alpha
    if combined.mass is not None:
        return float(each[workers].sum()) * combined.mass / float(plan.weights.sum())
    if combined.work is None:
        return float(each[workers].sum())
    return float(each[workers[torch.from_numpy(combined.work.arrived)]].sum())


def mean_length(run: RunInRound, plan: Plan) -> float:
    """The length a of the steps of the clients in a total: public where all take the same number of steps, else their mean."""
    traits = solver_traits(run.solver)
    if traits.steps is not None and traits.normalisers is not None and plan.workers.effort is None:
        return float(traits.normalisers(torch.tensor([traits.steps]), run.solver.learning_rate(plan.cohort.rate_round))[0])
    if not run.setting.protection.in_the_open:
        raise EquipoiseError(f"{run.algorithm.solver!r} must count its work in steps where clients are protected.")
    setting = run.setting
    lengths = normalisers_of(plan.workers, run.solver, setting.data.train, setting.task.smallest_batch)
    weights = plan.weights.double()
    return float(weights @ lengths / weights.sum())
