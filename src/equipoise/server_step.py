"""What the server does with client updates at the end of a round: it adds them up, steps, and has its next state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.aggregators.robust import RobustAggregator
from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user, named_part, nested_aggregators, read
from equipoise.core.carried import mean_carried
from equipoise.core.numbers import has_weight
from equipoise.errors import Diverged, shown
from equipoise.types import Aggregator, AggregatorTraits, Combined, LocalWork, ServerState

if TYPE_CHECKING:
    from equipoise.round import Plan, RunInRound
    from equipoise.runs.setup import Setting


def total_of_rows(
    aggregator: Aggregator, work: LocalWork, updates: Tensor, weights: Tensor, state: Any, *, losses: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The total (D,) that an aggregator makes of updates (K, D), and its next state.

    The library's own aggregators get rows of NaN for what cannot be used, and leave them out, as they do rows without a weight.
    One of the user's own gets only the other rows, with weights that sum to 1.
    """
    arrived = torch.from_numpy(work.arrived)
    if leaves_out(aggregator):
        if not bool(arrived.all()):
            updates = torch.where(arrived.to(updates.device).unsqueeze(1), updates, float("nan"))
    elif not bool((counts := arrived & has_weight(weights)).all()):
        weights = weights[counts] / weights[counts].sum()
        updates = updates[counts.to(updates.device)]
        losses, keys = (None if each is None else each[counts.to(each.device)] for each in (losses, keys))
    streams = {} if keys is None else {"keys": keys}
    own = next((part for part in nested_aggregators(aggregator) if is_of_user(part)), aggregator)
    with named_part("aggregator", own):
        return aggregator(updates, weights, losses=losses, state=state, **streams)


def leaves_out(aggregator: Aggregator) -> bool:
    """Whether an aggregator itself leaves out rows of NaN and without a weight: the library's, and extensions of theirs."""
    if (inside := read(AggregatorTraits, aggregator).normalises) is not None:  # FedNova hands all rows on
        return leaves_out(inside)
    return isinstance(aggregator, RobustAggregator) or not is_of_user(aggregator)


def combined_sum(state: ServerState, plan: Plan, work: LocalWork) -> Combined:
    """A sum (D,) of client updates under the plan's weights as the total of a linear aggregator."""
    return Combined(scaled(work.update, left_out_factor(plan, work)), work, state.aggregator, carried=work.carried)


def combined_rows(state: ServerState, plan: Plan, work: LocalWork, aggregator: Aggregator) -> Combined:
    """Client updates (K, D) under the plan's weights through a linear aggregator; those that cannot be used are left out."""
    arrived = torch.isfinite(work.sq_norms)
    updates = torch.where(arrived.to(work.update.device).unsqueeze(1), work.update, 0.0)
    total = aggregator(updates, plan.weights * left_out_factor(plan, work))[0]
    carried = mean_carried(work.carried, torch.where(arrived, plan.weights, 0.0).tolist())
    return Combined(total, work, state.aggregator, carried=carried)


def left_out_factor(plan: Plan, work: LocalWork) -> float:
    """By what a linear total grows because some updates were left out of it: 1 / the weight that arrived."""
    arrived = work.arrived
    if arrived.all() or not arrived.any():
        return 1.0
    return 1.0 / float(plan.weights[torch.from_numpy(arrived)].sum())


def scaled(total: Tensor, factor: float) -> Tensor:
    """Factor · total, (D,). The factor is 1 in most rounds, and then nothing is computed."""
    return total if factor == 1.0 else total * factor


def step_factor(run: RunInRound, plan: Plan, work: LocalWork) -> float:
    """The factor by which a risk scales the server's step: 1, unless it has a `server_step` of its own."""
    rule = run.algorithm.traits.risk.server_step
    if rule is None:
        return 1.0
    arrived = torch.isfinite(work.sq_norms)  # the others are left out of the step as they are of the total
    sq_norms, base = work.sq_norms[arrived], plan.workers.weights[arrived]
    losses = plan.worker_losses[arrived] if plan.worker_losses is not None else None
    if not run.algorithm.aggregator.linear:  # or one huge update stalls the run
        sq_norms = sq_norms.clamp(max=float(sq_norms.median()))
    lr, weight_sum = run.solver.learning_rate(plan.cohort.round), plan.risk.weights.sum()
    return float(rule(losses=losses, base_weights=base, weight_sum=weight_sum, sq_norms=sq_norms, lr=lr))


def server_step(state: ServerState, algorithm: Algorithm, total: Tensor) -> tuple[Tensor, Any]:
    """The next parameters and the server's state."""
    with named_part("server optimiser", algorithm.server):
        params, server_state = algorithm.server.step(state.params, total, state.server)
    # A sum over all of them is finite if each is; the other way round is checked where it is not.
    if not math.isfinite(float(params.sum())) and not bool(torch.isfinite(params).all()):
        raise Diverged(state.round, (), "model after the server's step")
    return params, server_state


def named_by_aggregator(failure: Diverged, aggregator: Any, combined: Combined) -> Diverged:
    """The error of a round whose model is not finite; it names an aggregator of the user's own that made it so.

    It gets finite updates alone, so it did where their total is not finite.
    """
    own = next((part for part in nested_aggregators(aggregator) if is_of_user(part)), None)
    count = 0 if combined.work is None else int(combined.work.arrived.sum())
    if count == 0 or own is None or bool(torch.isfinite(combined.total).all()):
        return failure
    updates = "one finite update" if count == 1 else f"{count} finite updates"
    named = Diverged(failure.round, (), f"total that {shown(own)} makes of {updates}")
    named.because("The clients' work is not the cause. Try the aggregator with equipoise.testing.check_aggregator.")
    return named


def next_state(setting: Setting, state: ServerState, **changed: Any) -> ServerState:
    """The state after a round in which the parts named by `changed` have new states."""
    after = ServerState(**(vars(state) | changed | {"round": state.round + 1}))
    averaging = setting.averaged.update(after)
    return after if averaging is after.averaging else replace(after, averaging=averaging)
