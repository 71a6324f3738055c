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

from equipoise.core.task import Task
from equipoise.engines.simulator.example_batches import ExampleBatch, batches_by_step
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath
from equipoise.engines.simulator.stacked_memory import StackedMemory
from equipoise.solvers.client_steps import clip_factors
from equipoise.solvers.local_optimizer import rates_by_name
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Pull

Gradients = Callable[[Task, dict[str, Tensor], ExampleBatch], tuple[dict[str, Tensor], Tensor]]


def stacked_gradients(task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each client's batch loss in its own parameters (k, …), and the losses (k,).

    No client's loss depends on another's parameters, so the gradient of the sum is all gradients at once; that is faster than
    `vmap(grad(…))`, whose backward pass runs inside the transform.
    """

    def batch_loss(named: dict[str, Tensor], x: Any, y: Any, shares: Tensor, key: Tensor | None = None) -> Tensor:
        return (task.batched_losses(named, x, y, key) * shares).sum()

    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    given = (leaves, batch.x, batch.y, batch.shares, *(() if batch.keys is None else (batch.keys,)))
    losses: Tensor = vmap(batch_loss)(*given)
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), losses.detach()


class BatchedAutograd(LocalPath):
    """Any model that vmap can batch, any solver: gradients by autograd, one batched computation per step."""

    name = "batched autograd"

    def supports_rule(self, rule: LocalRule) -> str | None:
        """It does all work."""
        return None

    def run(self, work: ChunkWork) -> ChunkResult:
        """Step by step."""
        return take_batched_steps(work, stacked_gradients)


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
    return work.result(update, *_take_steps(work, gradients_of, update, correction))


def _take_steps(
    work: ChunkWork, gradients_of: Gradients, update: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Take all steps; writes `update` (k, D), returns the summed batch losses (k,), or the last ones of a rule with a finish.

    The second result are the rows that clients keep until their next round, if they keep any. `correction` (k, D) is added to
    every gradient of a client.
    """
    task, rule, traits, starts = work.worker.task, work.rule, work.rule.traits, work.starts
    anchor, shifts = task.layout.unflatten(starts.rows()), task.layout.unflatten(correction) if correction is not None else {}
    pulls = _named_pull(task, starts.pull)
    scales = task.layout.unflatten(traits.preconditioner) if traits.preconditioner is not None else {}
    seen = torch.zeros(len(update), dtype=torch.float64, device=update.device)
    weights: dict[str, Tensor] = {}
    memory, rates = StackedMemory(rule.solver, task.layout, work.chunk.rows), rates_by_name(traits.rates, task.layout.names)
    place = work.worker.clients
    for batch in batches_by_step(place, work.cursor, work.first_rows, update.dtype, work.space, work.mask_keys):
        k = len(batch.shares)
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
    for name, change in task.layout.unflatten(update).items():
        if name in weights:
            k = len(weights[name])
            torch.sub(weights[name], anchor[name][:k], out=change[:k])
    return seen, memory.rows()


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
