"""Local steps of many clients at once, on parameters stacked over clients (k, …), for any solver.

Gradients come from autograd over `torch.func.vmap`, for any model that it can batch, or from a function written by hand for one
model (`convnet_path.py`). Linear models have paths of their own (`linear_blocks.py`, `linear_span.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from equipoise.core import trees
from equipoise.core.task import Task
from equipoise.engines.simulator.example_batches import ExampleBatch, batches_by_step
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath
from equipoise.engines.simulator.stacked_memory import StackedMemory
from equipoise.solvers.batches import batch_sizes
from equipoise.solvers.client_steps import clip_factors
from equipoise.solvers.local_optimizer import rates_by_name
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Pull

Named = dict[str, Tensor]
Gradients = Callable[[Task, dict[str, Tensor], ExampleBatch], tuple[dict[str, Tensor], Tensor]]


def stacked_gradients(task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each client's batch loss in its own parameters (k, …), and the losses (k,).

    No client's loss depends on another's parameters, so the gradient of the sum is all gradients at once; that is faster than
    `vmap(grad(…))`, whose backward pass runs inside the transform.
    """

    def batch_loss(named: Named, buffers: Named, x: Any, y: Any, shares: Tensor, key: Tensor | None = None) -> Tensor:
        return (task.batched_losses({**named, **buffers}, x, y, key) * shares).sum()

    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    buffers = dict(batch.buffers or {})  # a forward pass in training writes to them
    given = (leaves, buffers, batch.x, batch.y, batch.shares, *(() if batch.keys is None else (batch.keys,)))
    losses: Tensor = vmap(batch_loss)(*given)
    factors = torch.ones_like(losses) if batch.factors is None else batch.factors
    gradients = torch.autograd.grad(losses, list(leaves.values()), factors, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), losses.detach()


def unpadded_gradients(task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """What `stacked_gradients` gives, with the clients whose batches have one size together: nothing is padded."""
    counts = (batch.shares > 0).sum(1)  # examples come first, padding last
    sizes = sorted(set(counts.tolist()))
    if len(sizes) == 1 and sizes[0] == batch.shares.shape[1]:
        return stacked_gradients(task, params, batch)
    whole: dict[str, Tensor] = {}
    losses = torch.empty_like(batch.shares[:, 0])
    for size in sizes:
        here = (counts == size).nonzero().flatten()
        buffers = {name: value[here] for name, value in (batch.buffers or {}).items()}
        x, y = (trees.map_tree(lambda leaf, here=here, size=size: leaf[here, :size], part) for part in (batch.x, batch.y))
        keys = None if batch.keys is None else batch.keys[here]
        part = ExampleBatch(x, y, batch.shares[here, :size], batch.last, keys=keys, buffers=buffers)
        gradients, losses[here] = stacked_gradients(task, {name: value[here] for name, value in params.items()}, part)
        for name, gradient in gradients.items():
            whole.setdefault(name, gradient.new_empty(len(counts), *gradient.shape[1:]))[here] = gradient
        for name, value in buffers.items():
            (batch.buffers or {})[name][here] = value
    return whole, losses


class BatchedAutograd(LocalPath):
    """Any model that vmap can batch, any solver: gradients by autograd, one batched computation per step.

    Batches of a model that uses their statistics are not padded: clients with batches of one size are computed together.
    """

    name = "batched autograd"
    unpadded = True

    def supports_rule(self, rule: LocalRule) -> str | None:
        """It does all work."""
        return None

    def supports(self, work: ChunkWork) -> str | None:
        """No batch may be too small for the model, as that would be left out."""
        least = self.place.task.smallest_batch
        small = least > 1 and int(batch_sizes(work.rule.solver, work.chunk.sizes)[0].min()) < least
        return f"some batches have fewer than {least} examples, which the model is not trained on" if small else None

    def run(self, work: ChunkWork) -> ChunkResult:
        """Step by step."""
        return take_batched_steps(work, unpadded_gradients if self.place.task.mixes else stacked_gradients)


def take_batched_steps(work: ChunkWork, gradients_of: Gradients) -> ChunkResult:
    """The local work of a chunk, a step of all clients at a time."""
    worker, rule, chunk = work.worker, work.rule, work.chunk
    update = work.new_updates()
    if int(chunk.steps[-1]) == 0:
        update.zero_()
    correction = None
    if rule.traits.shared_gradient is not None:  # FedDane: g − ∇F_k(w^t)
        one_step = LocalRule.of(GRADIENT, 1.0, rule.own_models, rule.pull)
        at_start = work.other(replace(chunk, steps=torch.ones_like(chunk.steps)), one_step)
        own = worker.train(at_start).dense(at_start.space)  # −∇F_k(w^t)
        correction = own.add_(rule.traits.shared_gradient)
    if rule.traits.shift is not None:  # SCAFFOLD: c − c_k
        correction = rule.traits.shift.expand_as(update) if chunk.rows is None else rule.traits.shift - chunk.rows.to(update)
    return work.result(update, *_take_steps(work, gradients_of, update, correction))


def _take_steps(
    work: ChunkWork, gradients_of: Gradients, update: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Take all steps; writes `update` (k, D), returns the summed batch losses (k,), or the last ones of a rule with a finish.

    The second result are the rows that clients keep until their next round, if they keep any, the third their carried values
    (k, C) as they are averaged, if the model has any. `correction` (k, D) is added to every gradient of a client. A client
    alone leaves out batches that are too small for its model.
    """
    task, rule, traits, starts = work.worker.task, work.rule, work.rule.traits, work.starts
    anchor, shifts = task.layout.unflatten(starts.rows()), task.layout.unflatten(correction) if correction is not None else {}
    pulls = _named_pull(task, starts.pull)
    scales = task.layout.unflatten(traits.preconditioner) if traits.preconditioner is not None else {}
    seen = torch.zeros(len(update), dtype=torch.float64, device=update.device)
    weights: dict[str, Tensor] = {}
    memory = StackedMemory(rule.solver, task.layout, work.chunk.rows if traits.shift is None else None)
    rates = rates_by_name(traits.rates, task.layout.names)
    place, carried, left_out = work.worker.clients, starts.carried_rows(), 0
    buffers: Named = {}
    if carried is not None:
        buffers = {name: value.clone() for name, value in task.carried.unflatten(carried).items()}
        task.carried.write(task.module, carried[0])  # counters begin anew
    for batch in batches_by_step(place, work.cursor, work.first_rows, update.dtype, work.space, work.mask_keys):
        k = len(batch.shares)
        if len(update) == 1 and batch.shares.shape[1] < task.smallest_batch:
            left_out += 1
            continue
        if buffers:
            batch = batch._replace(buffers={name: value[:k] for name, value in buffers.items()})
        stacked = weights or {name: value.expand(len(update), *value.shape[1:]) for name, value in anchor.items()}
        gradients, losses = gradients_of(task, {name: value[:k] for name, value in stacked.items()}, batch)
        if not weights:
            # Each parameter is kept in the memory order in which its gradient comes: a step then streams through both.
            weights = {name: torch.empty_like(gradients[name]).copy_(value[:k]) for name, value in anchor.items()}
            memory.begin(weights)
        lr = rule.lr_at(memory.number)
        memory.count_step(k)
        factors = clip_factors(square_norms(gradients), traits.clip_norm) if traits.clip_norm is not None else None
        take = traits.finish if traits.finish is not None and batch.last else rule.solver.step
        for name, gradient in gradients.items():
            if factors is not None:
                gradient = gradient * factors.view(-1, *(1,) * (gradient.dim() - 1))
            if scales:
                gradient = gradient / scales[name]
            if shifts:
                gradient = gradient + shifts[name][:k]
            if pulls:
                towards, strength = pulls[name]
                gradient = torch.addcmul(gradient, strength[:k], weights[name][:k] - towards[:k])
            rate, told = lr * rates.get(name, 1.0), memory.told(gradient)
            take(weights[name][:k], gradient, memory.of(name, k), anchor=anchor[name][:k], lr=rate, **told)
        if batch.last and traits.finish is not None:
            seen.zero_()
        seen[:k] += losses
    if not weights:
        update.zero_()  # every batch was left out: the memory for updates holds anything
    for name, change in task.layout.unflatten(update).items():
        if name in weights:
            k = len(weights[name])
            torch.sub(weights[name], anchor[name][:k], out=change[:k])
    if left_out:
        seen *= int(work.chunk.steps[0]) / (int(work.chunk.steps[0]) - left_out) if weights else torch.nan
    rows = memory.rows() if traits.shift is None else work.rows_after(update, left_out)
    if not buffers:
        return seen, rows, None
    moments = task.carried.sent(task.carried.flatten(buffers, update.dtype))
    moments[(work.chunk.steps - left_out) <= 0] = torch.nan
    return seen, rows, moments


def square_norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """Squared L2 norm of each client's gradient over all parameters (k, …), (k,)."""
    return torch.stack([each.flatten(1).square().sum(1) for each in gradients.values()]).sum(0)


def _named_pull(task: Task, pull: Pull | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Anchor (1 or k, …) and strength (k, 1, …) or (k, …) by parameter; empty without a pull."""
    if pull is None:
        return {}
    anchors = task.layout.unflatten(pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
    if pull.strength.dim() == 2:
        strengths = task.layout.unflatten(pull.strength)
        return {name: (anchor, strengths[name]) for name, anchor in anchors.items()}
    return {name: (anchor, pull.strength.view(-1, *(1,) * (anchor.dim() - 1))) for name, anchor in anchors.items()}
