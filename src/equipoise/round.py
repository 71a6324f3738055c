"""One federated round, from the cohort to the next parameters."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.data.clients import ClientSet
from equipoise.errors import Diverged, InvalidParameter
from equipoise.risk.superquantile import exact_weights
from equipoise.types import Cohort, Engine, LocalWork, RiskValue, RoundReport, ServerState

TAIL = 0.1  # the share of clients in a report's tail loss


def run_round(
    state: ServerState, algorithm: Algorithm, engine: Engine, cohort: Cohort, clients: ClientSet
) -> tuple[ServerState, RoundReport]:
    """Losses → risk and its weights → local work of the clients with weight → aggregate → server step."""
    began = time.perf_counter()
    if len(cohort) == 0:  # Poisson sampling may draw nobody
        return replace(state, round=state.round + 1), report_of(cohort, began)

    losses = None
    if getattr(algorithm.risk, "needs_losses", True):
        losses = engine.losses(state.params, cohort)  # (K,)
        stop_unless_finite(losses, cohort, clients, "loss")

    risk = weigh(algorithm, cohort, losses, clients, state.risk)
    weight_sum = risk.weights.sum()
    chosen = risk.weights > 0  # the others are not trained: that is where the tail's speed comes from
    workers, weights = cohort.take(chosen), risk.weights[chosen] / weight_sum
    if len(workers) == 0:  # a risk that is flat at these losses
        return replace(state, round=state.round + 1, risk=risk.state), report_of(cohort, began, losses, risk)

    seen = losses[chosen] if losses is not None else None
    total, aggregator_state, work = combine(state, algorithm, engine, workers, weights, seen)  # (D,)
    stop_unless_finite(work.sq_norms, workers, clients, "update")
    stop_unless_finite(torch.where(work.sq_norms > 0, work.losses, 0.0), workers, clients, "loss")  # no step, no loss
    total = total * server_step(algorithm, workers, weight_sum, seen, work)

    params, server_state = algorithm.server.step(state.params, total, state.server)
    if not bool(torch.isfinite(params).all()):
        raise Diverged(cohort.round, (), "model after the server's step")

    report = report_of(cohort, began, losses, risk, workers, weights, work)
    return ServerState(state.round + 1, params, risk.state, aggregator_state, server_state), report


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
    state: ServerState, algorithm: Algorithm, engine: Engine, workers: Cohort, weights: Tensor, losses: Tensor | None
) -> tuple[Tensor, Any, LocalWork]:
    """Local work and its aggregate (D,). A linear aggregator's sum is streamed; others see every update."""
    if algorithm.aggregator.linear:
        work = engine.summed_update(state.params, workers, algorithm.solver, weights, algorithm.aggregator)
        total, aggregator_state = work.update, state.aggregator
    else:
        work = engine.updates(state.params, workers, algorithm.solver)
        total, aggregator_state = algorithm.aggregator(work.update, weights, losses=losses, state=state.aggregator)
    return total, aggregator_state, work


def server_step(algorithm: Algorithm, workers: Cohort, weight_sum: Tensor, losses: Tensor | None, work: LocalWork) -> float:
    """The factor by which a risk scales the server's step: 1, unless it has a `server_step` of its own."""
    rule = getattr(algorithm.risk, "server_step", None)
    if rule is None:
        return 1.0
    sq_norms = work.sq_norms
    if not algorithm.aggregator.linear:  # or one attacker with a huge update stalls the run
        sq_norms = sq_norms.clamp(max=float(sq_norms.median()))
    lr = algorithm.solver.learning_rate(workers.round)
    return float(rule(losses=losses, base_weights=workers.weights, weight_sum=weight_sum, sq_norms=sq_norms, lr=lr))


def stop_unless_finite(values: Tensor, cohort: Cohort, clients: ClientSet, what: str) -> None:
    """Raise Diverged with the round and the clients whose number is not finite."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        raise Diverged(cohort.round, (clients.ids[i] for i in cohort.clients[bad].tolist()), what)


def report_of(
    cohort: Cohort,
    began: float,
    losses: Tensor | None = None,
    risk: RiskValue | None = None,
    workers: Cohort | None = None,
    weights: Tensor | None = None,
    work: LocalWork | None = None,
) -> RoundReport:
    """The report of a round: of the cohort's losses if the risk asked for them, else of those seen at work."""
    shown, share = (losses, cohort.weights) if losses is not None else (work.losses if work else None, weights)
    mean = tail = float("nan")
    if shown is not None and share is not None and bool((known := ~torch.isnan(shown)).any()):
        shown, share = shown[known], share[known] / share[known].sum()  # a client without a step saw no loss
        mean, tail = float(share @ shown), float(exact_weights(shown, share, TAIL) @ shown)
    return RoundReport(
        round=cohort.round,
        loss=mean,
        tail_loss=tail,
        loss_from="start" if losses is not None else "work",
        risk=float(risk.value) if risk is not None and losses is not None else None,
        cohort=len(cohort),
        trained=len(workers) if workers is not None else 0,
        seconds=time.perf_counter() - began,
    )
