"""One federated round, from the cohort to the next parameters."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise import rng
from equipoise.algorithm import Algorithm
from equipoise.data.clients import ClientSet
from equipoise.errors import Diverged, InvalidParameter
from equipoise.sampling import Uniform
from equipoise.solvers.prepared import RoundContext
from equipoise.types import Cohort, Engine, LocalSolver, LocalWork, RiskValue, RoundReport, ServerState

TAIL = 0.1  # the share of clients in a report's tail loss


def run_round(
    state: ServerState,
    algorithm: Algorithm,
    engine: Engine,
    cohort: Cohort,
    clients: ClientSet,
    *,
    clients_per_round: int | None = None,
) -> tuple[ServerState, RoundReport]:
    """Losses → risk and its weights → local work of the clients with weight → aggregate → server step.

    `clients_per_round` is what the sampler was asked for, for solvers that draw a cohort of their own (None: as many as came).
    """
    began = time.perf_counter()
    if len(cohort) == 0:  # Poisson sampling may draw nobody
        return next_state(state, algorithm), report_of(Plan.nobody(cohort), began)

    solver, solver_state = prepare(state, algorithm, engine, cohort, clients, clients_per_round)
    losses = engine.losses(state.params, cohort, solver) if needs_losses(algorithm) else None  # (K,)
    plan = plan_round(state, algorithm, solver, cohort, losses, clients)
    if len(plan.workers) == 0:  # a risk that is flat at these losses, or all work lost
        return next_state(state, algorithm, risk=plan.risk.state, solver=solver_state), report_of(plan, began)

    total, aggregator_state, work = combine(state, algorithm, engine, solver, plan)  # (D,)
    params, server_state = server_step(state, algorithm, solver, plan, total, work, clients)
    changed = next_state(
        state, algorithm, params=params, risk=plan.risk.state, aggregator=aggregator_state, server=server_state,
        solver=solver_state,
    )  # fmt: skip
    return changed, report_of(plan, began, work)


@dataclass(frozen=True, eq=False)
class Plan:
    """Who works in a round, and with which weights."""

    cohort: Cohort
    losses: Tensor | None  # (K,) of the cohort, if the risk asked for them
    risk: RiskValue
    workers: Cohort
    weights: Tensor  # of the workers, summing to 1
    worker_losses: Tensor | None
    dropped: int  # clients with a weight whose work does not arrive

    @classmethod
    def nobody(cls, cohort: Cohort) -> Plan:
        """The plan of an empty cohort."""
        return cls(cohort, None, RiskValue(torch.tensor(float("nan")), cohort.weights), cohort, cohort.weights, None, 0)


def needs_losses(algorithm: Algorithm) -> bool:
    """Whether the risk's weights depend on the losses, or the aggregator goes by them."""
    return bool(getattr(algorithm.risk, "needs_losses", True) or getattr(algorithm.aggregator, "needs_losses", False))


def prepare(
    state: ServerState,
    algorithm: Algorithm,
    engine: Engine,
    cohort: Cohort,
    clients: ClientSet,
    clients_per_round: int | None = None,
) -> tuple[LocalSolver, Any]:
    """The solver of this round and its next state: the algorithm's own, unless it looks around first."""
    if not hasattr(algorithm.solver, "prepare"):
        return algorithm.solver, state.solver
    alpha, sampler = algorithm.base_weights(clients), algorithm.sampler or Uniform()

    def draw(purpose: str) -> Cohort:
        seed = rng.stream_key(cohort.seed, purpose) >> 1
        return sampler(cohort.round, alpha, clients_per_round=clients_per_round or len(cohort), seed=seed)

    prepared: tuple[LocalSolver, Any] = algorithm.solver.prepare(
        RoundContext(engine, state.params, cohort, alpha, draw), state.solver
    )
    return prepared


def plan_round(
    state: ServerState,
    algorithm: Algorithm,
    solver: LocalSolver,
    cohort: Cohort,
    losses: Tensor | None,
    clients: ClientSet,
) -> Plan:
    """The risk of the cohort, and the clients that work for it: those with a weight whose work arrives."""
    if losses is not None:
        stop_unless_finite(losses, cohort, clients, "loss")
    if hasattr(solver, "efforts"):
        cohort = replace(cohort, effort=solver.efforts(cohort, clients.keys[cohort.clients].cpu()))
    risk = weigh(algorithm, cohort, losses, clients, state.risk)
    chosen = risk.weights > 0  # the others are not trained: that is where the tail's speed comes from
    dropped = chosen & (cohort.effort == 0) if cohort.effort is not None else torch.zeros_like(chosen)
    chosen = chosen & ~dropped
    kept = risk.weights[chosen]
    return Plan(
        cohort,
        losses,
        risk,
        cohort.take(chosen),
        kept / kept.sum(),
        losses[chosen] if losses is not None else None,
        int(dropped.sum()),
    )


def weigh(algorithm: Algorithm, cohort: Cohort, losses: Tensor | None, clients: ClientSet, state: Any) -> RiskValue:
    """The risk of the cohort. A risk that needs no losses gets zeros, and its value is not reported."""
    ids = tuple(clients.ids[i] for i in cohort.clients.tolist())
    risk = algorithm.risk(
        losses if losses is not None else torch.zeros_like(cohort.weights), cohort.weights, clients=ids, state=state
    )
    if risk.weights.shape != cohort.weights.shape or not bool((torch.isfinite(risk.weights) & (risk.weights >= 0)).all()):
        raise InvalidParameter(
            "risk",
            f"must give {len(cohort)} finite weights ≥ 0, one per client",
            algorithm.risk,
            "equipoise.testing.check_risk(risk) says which law it breaks.",
        )
    return risk


def combine(
    state: ServerState, algorithm: Algorithm, engine: Engine, solver: LocalSolver, plan: Plan
) -> tuple[Tensor, Any, LocalWork]:
    """Local work and its aggregate (D,). A linear aggregator's sum is streamed; others see every update."""
    if algorithm.aggregator.linear:
        work = engine.summed_update(state.params, plan.workers, solver, plan.weights, algorithm.aggregator)
        return work.update, state.aggregator, work
    work = engine.updates(state.params, plan.workers, solver)
    total, aggregator_state = algorithm.aggregator(work.update, plan.weights, losses=plan.worker_losses, state=state.aggregator)
    return total, aggregator_state, work


def server_step(
    state: ServerState,
    algorithm: Algorithm,
    solver: LocalSolver,
    plan: Plan,
    total: Tensor,
    work: LocalWork,
    clients: ClientSet,
) -> tuple[Tensor, Any]:
    """The next parameters and the server's state; updates and losses that are not finite stop the run.

    An aggregator that sees each update leaves out those that are not finite; then the run stops only if none is left.
    """
    if algorithm.aggregator.linear or not bool(torch.isfinite(work.sq_norms).any()):
        stop_unless_finite(work.sq_norms, plan.workers, clients, "update")
        stop_unless_finite(torch.where(work.sq_norms > 0, work.losses, 0.0), plan.workers, clients, "loss")  # no step, no loss
    total = total * step_factor(algorithm, solver, plan, work)
    params, server_state = algorithm.server.step(state.params, total, state.server)
    if not bool(torch.isfinite(params).all()):
        raise Diverged(plan.cohort.round, (), "model after the server's step")
    return params, server_state


def step_factor(algorithm: Algorithm, solver: LocalSolver, plan: Plan, work: LocalWork) -> float:
    """The factor by which a risk scales the server's step: 1, unless it has a `server_step` of its own."""
    rule = getattr(algorithm.risk, "server_step", None)
    if rule is None:
        return 1.0
    sq_norms = work.sq_norms
    if not algorithm.aggregator.linear:  # or one attacker with a huge update stalls the run
        sq_norms = sq_norms.nan_to_num(nan=math.inf).clamp(max=float(sq_norms.nan_to_num(nan=math.inf).median()))
    lr, weight_sum = solver.learning_rate(plan.cohort.round), plan.risk.weights.sum()
    base = plan.workers.weights
    return float(rule(losses=plan.worker_losses, base_weights=base, weight_sum=weight_sum, sq_norms=sq_norms, lr=lr))


def next_state(state: ServerState, algorithm: Algorithm, **changed: Any) -> ServerState:
    """The state after a round in which `changed` has changed."""
    state = replace(state, round=state.round + 1, **changed)
    return replace(state, averaging=algorithm.reported.update(state.params, state.averaging))


def stop_unless_finite(values: Tensor, cohort: Cohort, clients: ClientSet, what: str) -> None:
    """Raise Diverged with the round and the clients whose number is not finite."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        raise Diverged(cohort.round, (clients.ids[i] for i in cohort.clients[bad].tolist()), what)


def worst_mean(values: Tensor, share: Tensor, tail: float) -> float:
    """The mean of the largest values up to a mass of `tail`; `share` sums to 1. What metrics.worst gives, in few operations."""
    ordered, order = values.sort(descending=True)
    above = share[order].cumsum(0)
    inside = above.clamp(max=tail) - (above - share[order]).clamp(max=tail)
    return float(inside @ ordered / inside.sum())


def report_of(plan: Plan, began: float, work: LocalWork | None = None) -> RoundReport:
    """The report of a round: of the cohort's losses if the risk asked for them, else of those seen at work."""
    if plan.losses is not None:
        shown, share = plan.losses, plan.cohort.weights
    else:
        shown, share = (work.losses, plan.weights) if work is not None else (torch.zeros(0), torch.zeros(0))
    known = ~torch.isnan(shown)  # a client without a step saw no loss
    mean = tail = float("nan")
    if bool(known.any()):
        shown, share = shown[known], share[known] / share[known].sum()
        mean, tail = float(share @ shown), worst_mean(shown, share, TAIL)
    return RoundReport(
        round=plan.cohort.round,
        loss=mean,
        tail_loss=tail,
        loss_from="start" if plan.losses is not None else "work",
        risk=float(plan.risk.value) if plan.losses is not None else None,
        cohort=len(plan.cohort),
        trained=len(plan.workers),
        seconds=time.perf_counter() - began,
        dropped=plan.dropped,
        rejected=int((~torch.isfinite(work.sq_norms)).sum()) if work is not None else 0,
    )
