"""One federated round, from the cohort to the next parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import server_opt
from equipoise.algorithm import Algorithm
from equipoise.core import rng
from equipoise.core.numbers import Numbers, numbers
from equipoise.core.update_checks import marked, usable
from equipoise.data.clients import ClientSet
from equipoise.errors import Diverged, InvalidParameter
from equipoise.personal.personal_run import PersonalRun
from equipoise.privacy.private_run import PrivateRun
from equipoise.privacy.secure_run import SecureRun
from equipoise.risk.mean import Mean
from equipoise.solvers.prepared import RoundContext
from equipoise.types import Cohort, Engine, LocalSolver, LocalWork, RiskValue, RoundReport, ServerState

TAIL = 0.1  # the share of clients in a report's tail loss
_UNKNOWN = torch.tensor(float("nan"))


def run_round(
    state: ServerState,
    algorithm: Algorithm,
    engine: Engine,
    cohort: Cohort,
    clients: ClientSet,
    *,
    clients_per_round: int | None = None,
    personal: PersonalRun | None = None,
    protection: PrivateRun | SecureRun | None = None,
) -> tuple[ServerState, RoundReport]:
    """Losses → risk and its weights → local work of the clients with weight → aggregate → server step.

    `clients_per_round` is what the sampler was asked for, for solvers that draw a cohort of their own (None: as many as came).
    `personal` lets every client of the cohort train a model of its own, too; only the state of it changes. `protection` finds
    weights and sums in its own way (differential privacy, secure aggregation).
    """
    with getattr(engine, "in_round", nullcontext)():
        return _run_round(state, algorithm, engine, cohort, clients, clients_per_round, personal, protection)


def _run_round(
    state: ServerState,
    algorithm: Algorithm,
    engine: Engine,
    cohort: Cohort,
    clients: ClientSet,
    clients_per_round: int | None,
    personal: PersonalRun | None,
    protection: PrivateRun | SecureRun | None,
) -> tuple[ServerState, RoundReport]:
    began = time.perf_counter()
    if len(cohort) == 0 and not isinstance(protection, PrivateRun):  # Poisson sampling may draw nobody; noise is released still
        return next_state(state, algorithm), report_of(Plan.nobody(cohort), began)

    solver, solver_state = prepare(state, algorithm, engine, cohort, clients, clients_per_round)
    losses = losses_of(state, algorithm, engine, solver, cohort)  # (K,)
    cohort, losses = still_there(engine, cohort, losses)
    plan = plan_round(state, algorithm, solver, cohort, losses, clients, protection)
    sent, own = None, None
    if personal is not None:
        own = personal.work(state.personal, state.params, cohort, solver)
        sent = personal.updates(own, state.params, plan.workers, solver)
    if len(plan.workers) == 0 and not isinstance(protection, PrivateRun):  # a risk flat at these losses, or all work lost
        changed = next_state(state, algorithm, risk=plan.risk.state, solver=solver_state, personal=own)
        return changed, report_of(plan, began)

    work: LocalWork | None
    aggregator_state, private_state = state.aggregator, state.privacy
    if protection is None:
        total, aggregator_state, work = combine(state, algorithm, engine, solver, plan, sent)  # (D,)
        stop_if_nothing_arrived(plan, work, clients)
        total = times(total, step_factor(algorithm, solver, plan, work))
    elif isinstance(protection, PrivateRun):
        total, private_state, work = protection.combine(state.privacy, state.params, engine, solver, plan, sent)
    else:
        total, work = protection.combine(state.params, engine, solver, plan, sent)
    params, server_state = server_step(state, algorithm, total)
    changed = next_state(
        state, algorithm, params=params, risk=plan.risk.state, aggregator=aggregator_state, server=server_state,
        solver=solver_state, personal=own, privacy=private_state,
    )  # fmt: skip
    report = report_of(plan, began, work, clients if protection is None else None)
    return changed, replace(report, epsilon=protection.epsilon_after(changed.round)) if isinstance(
        protection, PrivateRun
    ) else report


def losses_of(state: ServerState, algorithm: Algorithm, engine: Engine, solver: LocalSolver, cohort: Cohort) -> Tensor | None:
    """The cohort's losses (K,), if the risk or the aggregator asks for them."""
    if not needs_losses(algorithm):
        return None
    return engine.losses(state.params, cohort, solver) if len(cohort) else torch.zeros(0, dtype=torch.float64)


def still_there(engine: Engine, cohort: Cohort, losses: Tensor | None) -> tuple[Cohort, Tensor | None]:
    """The cohort without clients that a network has lost so far, their base weights shared out among the others."""
    if not hasattr(engine, "gone") or not bool((gone := engine.gone(cohort)).any()):
        return cohort, losses
    left = cohort.take(~gone)
    left = replace(left, weights=left.weights / left.weights.sum())
    return left, losses[~gone] if losses is not None else None


@dataclass(frozen=True, eq=False)
class Plan:
    """Who works in a round, and with which weights."""

    cohort: Cohort
    losses: Tensor | None  # (K,) of the cohort, if the risk asked for them
    risk: RiskValue
    workers: Cohort
    weights: Tensor  # of the workers, summing to 1; under protection as it says
    worker_losses: Tensor | None
    dropped: int  # clients with a weight whose work does not arrive
    denominator: float = 1.0  # fixed in advance, under differential privacy

    @classmethod
    def nobody(cls, cohort: Cohort) -> Plan:
        """The plan of an empty cohort."""
        return cls(cohort, None, RiskValue(_UNKNOWN, cohort.weights), cohort, cohort.weights, None, 0)


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
    alpha, sampler = algorithm.base_weights(clients), algorithm.drawn_by

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
    protection: PrivateRun | SecureRun | None = None,
) -> Plan:
    """The risk of the cohort, and the clients that work for it: those with a weight whose work arrives."""
    if losses is not None and protection is None:  # a protected client is not named, nor does the run stop because of it
        stop_unless_finite(losses, cohort, clients, "loss")
    if hasattr(solver, "efforts") and getattr(solver, "straggler_share", 1) > 0:
        cohort = replace(cohort, effort=solver.efforts(cohort, clients.keys[cohort.clients].cpu()))
    if protection is None:
        risk, denominator = weigh(algorithm, cohort, losses, clients, state.risk), None
    else:
        risk, denominator = protection.weigh(cohort, losses, state.risk)
    values = numbers(risk.weights)
    if cohort.effort is None and values.min(initial=1.0) > 0:  # the usual case: nobody to pick out
        kept, workers, worker_losses, dropped = values, cohort, losses, 0
    else:
        chosen = values > 0  # the others are not trained: that is where the tail's speed comes from
        lost = chosen & (cohort.effort.numpy() == 0) if cohort.effort is not None else np.zeros_like(chosen)
        places = torch.from_numpy(np.flatnonzero(chosen & ~lost))
        kept, workers, dropped = values[places.numpy()], cohort.take(places), int(lost.sum())
        worker_losses = losses[places.to(losses.device)] if losses is not None else None
    fixed = 1.0 if denominator is None else denominator
    weights = torch.from_numpy(kept / (kept.sum() if denominator is None else denominator))
    return Plan(cohort, losses, risk, workers, weights, worker_losses, dropped, fixed)


def weigh(algorithm: Algorithm, cohort: Cohort, losses: Tensor | None, clients: ClientSet, state: Any) -> RiskValue:
    """The risk of the cohort. A risk that needs no losses gets zeros, and its value is not reported."""
    if losses is None and type(algorithm.risk) is Mean:  # the usual one, and its answer is known
        return RiskValue(_UNKNOWN, cohort.weights, state)
    ids = tuple(clients.id_array[cohort.clients.numpy()].tolist())
    given = losses if losses is not None else torch.zeros_like(cohort.weights)
    risk = algorithm.risk(given, cohort.weights, clients=ids, state=state)
    if risk.weights.shape != cohort.weights.shape or not _sane(numbers(risk.weights)):
        raise InvalidParameter(
            "risk",
            f"must give {len(cohort)} finite weights ≥ 0, one per client",
            algorithm.risk,
            "equipoise.testing.check_risk(risk) says which law it breaks.",
        )
    return risk


def _sane(weights: Numbers) -> bool:
    """Whether all weights are finite and none is negative."""
    return bool(weights.min(initial=0.0) >= 0 and (math.isfinite(weights.sum()) or np.isfinite(weights).all()))


def combine(
    state: ServerState,
    algorithm: Algorithm,
    engine: Engine,
    solver: LocalSolver,
    plan: Plan,
    sent: Tensor | None = None,
) -> tuple[Tensor, Any, LocalWork]:
    """Local work and its aggregate (D,). A linear aggregator's sum is streamed; others see every update.

    Updates that are not finite, or absurdly long, are left out: their weight goes to the others. `sent` (K, D) are updates
    that clients have made in another way than by the solver's work.
    """
    if algorithm.aggregator.linear and sent is None:
        work = engine.summed_update(state.params, plan.workers, solver, plan.weights, algorithm.aggregator)
        return times(work.update, left_out_factor(plan, work)), state.aggregator, work
    work = engine.updates(state.params, plan.workers, solver) if sent is None else work_of(sent, state.params, plan)
    updates, arrived = work.update, torch.isfinite(work.sq_norms)
    if not bool(arrived.all()):  # robust aggregators know NaN for what cannot be used
        updates = torch.where(arrived.to(updates.device).unsqueeze(1), updates, float("nan"))
    if algorithm.aggregator.linear:
        factor = left_out_factor(plan, work)
        return algorithm.aggregator(updates.nan_to_num(0.0), plan.weights * factor)[0], state.aggregator, work
    total, aggregator_state = algorithm.aggregator(updates, plan.weights, losses=plan.worker_losses, state=state.aggregator)
    return total, aggregator_state, work


def work_of(updates: Tensor, params: Tensor, plan: Plan) -> LocalWork:
    """Updates (K, D) that were made elsewhere, as local work; the losses are those at the start of the round, if known."""
    sq_norms = updates.double().square().sum(1).cpu()
    losses = plan.worker_losses if plan.worker_losses is not None else torch.zeros_like(sq_norms)
    return LocalWork(updates, marked(sq_norms, usable(sq_norms, losses, params)), losses)


def times(total: Tensor, factor: float) -> Tensor:
    """A total (D,) by a factor, which mostly is 1."""
    return total if factor == 1.0 else total * factor


def left_out_factor(plan: Plan, work: LocalWork) -> float:
    """By what a linear total grows because some updates were left out of it: 1 / the weight that arrived."""
    arrived = work.arrived
    if arrived.all() or not arrived.any():
        return 1.0
    return 1.0 / float(plan.weights[torch.from_numpy(arrived)].sum())


def stop_if_nothing_arrived(plan: Plan, work: LocalWork, clients: ClientSet) -> None:
    """Stop the run if no update of the round could be used."""
    if not work.arrived.any():
        stop_unless_finite(work.sq_norms, plan.workers, clients, "update")


def server_step(state: ServerState, algorithm: Algorithm, total: Tensor) -> tuple[Tensor, Any]:
    """The next parameters and the server's state."""
    params, server_state = algorithm.server.step(state.params, total, state.server)
    # A sum over all of them is finite if each is; the other way round is checked where it is not.
    if not math.isfinite(float(params.sum())) and not bool(torch.isfinite(params).all()):
        raise Diverged(state.round, (), "model after the server's step")
    return params, server_state


def step_factor(algorithm: Algorithm, solver: LocalSolver, plan: Plan, work: LocalWork) -> float:
    """The factor by which a risk scales the server's step: 1, unless it has a `server_step` of its own."""
    rule = getattr(algorithm.risk, "server_step", None)
    if rule is None:
        return 1.0
    arrived = torch.isfinite(work.sq_norms)  # the others are left out of the step as they are of the total
    sq_norms, base = work.sq_norms[arrived], plan.workers.weights[arrived]
    losses = plan.worker_losses[arrived] if plan.worker_losses is not None else None
    if not algorithm.aggregator.linear:  # or one huge update stalls the run
        sq_norms = sq_norms.clamp(max=float(sq_norms.median()))
    lr, weight_sum = solver.learning_rate(plan.cohort.round), plan.risk.weights.sum()
    return float(rule(losses=losses, base_weights=base, weight_sum=weight_sum, sq_norms=sq_norms, lr=lr))


def server_rate(algorithms: Sequence[Algorithm]) -> float | None:
    """The rate γ of a server's step w + γ · total that all take; None if they do not, or it depends on what clients did."""
    rates = {a.server.lr if type(a.server) is server_opt.SGD else None for a in algorithms}
    plain = all(a.aggregator.linear and getattr(a.risk, "server_step", None) is None for a in algorithms)
    return rates.pop() if plain and len(rates) == 1 else None


def next_state(state: ServerState, algorithm: Algorithm, **changed: Any) -> ServerState:
    """The state after a round in which `changed` has changed."""
    averaging = algorithm.reported.update(changed.get("params", state.params), state.averaging)
    return ServerState(**(vars(state) | changed | {"round": state.round + 1, "averaging": averaging}))


def stop_unless_finite(values: Tensor, cohort: Cohort, clients: ClientSet, what: str) -> None:
    """Raise Diverged with the round and the clients whose number is not finite."""
    if not math.isfinite(numbers(values).sum()) and (bad := ~torch.isfinite(values)).any():
        raise Diverged(cohort.round, (clients.ids[i] for i in cohort.clients[bad].tolist()), what)


def worst_mean(values: Numbers, share: Numbers, tail: float) -> float:
    """The mean of the largest values up to a mass of `tail`; `share` sums to 1. What metrics.worst gives, in few operations."""
    values, share = np.asarray(values), np.asarray(share)
    order = (-values).argsort()
    values, share = values[order], share[order]
    above = share.cumsum()
    last = min(int(above.searchsorted(tail)), len(values) - 1)  # the one that the tail ends in
    rest = tail - float(above[last - 1]) if last else tail
    return (float(share[:last] @ values[:last]) + rest * float(values[last])) / tail


def report_of(
    plan: Plan, began: float, work: LocalWork | None = None, clients: ClientSet | None = None, *, runs: int = 1
) -> RoundReport:
    """The report of a round: of the cohort's losses if the risk asked for them, else of those seen at work.

    Where several runs share the round, each reports its part of the time so far.
    """
    if plan.losses is not None:
        seen, weights = plan.losses, plan.cohort.weights
    else:
        seen, weights = (work.losses, plan.weights) if work is not None else (torch.zeros(0), torch.zeros(0))
    shown, share = numbers(seen), numbers(weights)
    if not math.isfinite(shown.sum()):  # a client without a step saw no loss; one that is left out may have an infinite one
        known = np.isfinite(shown)
        shown, share = shown[known], share[known]
    share = share / share.sum()
    mean, tail = (float(share @ shown), worst_mean(shown, share, TAIL)) if len(shown) else (math.nan, math.nan)
    return RoundReport(
        round=plan.cohort.round,
        loss=mean,
        tail_loss=tail,
        loss_from="start" if plan.losses is not None else "work",
        risk=float(plan.risk.value) if plan.losses is not None else None,
        cohort=len(plan.cohort),
        trained=len(plan.workers),
        seconds=(time.perf_counter() - began) / runs,
        dropped=plan.dropped,
        rejected=rejected_clients(plan, work, clients),
    )


def rejected_clients(plan: Plan, work: LocalWork | None, clients: ClientSet | None) -> tuple[str, ...]:
    """The ids of the clients whose update was left out."""
    if work is None or clients is None or work.arrived.all():
        return ()
    return tuple(clients.ids[i] for i in plan.workers.clients[torch.from_numpy(~work.arrived)].tolist())
