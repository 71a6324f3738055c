"""Local steps of many clients at once, on parameters stacked over clients (k, …). The simulator's inner loop.

`general_steps` works for any model that `torch.func.vmap` can batch, by any solver. Gradients come from autograd, or from a
function written by hand for one model (`convnet.py`). Linear models have a path of their own (`linear.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from equipoise.core.task import Task
from equipoise.engines.simulator.workers import Worker
from equipoise.types import LocalSolver, Pull


class Batch(NamedTuple):
    """One local step's examples of the k clients still at work, padded to b; a client's `shares` sum to 1, padding has 0."""

    x: Tensor  # (k, b, …)
    y: Tensor  # (k, b, …)
    shares: Tensor  # (k, b)
    last: bool  # no step comes after it
    scale: float = 1.0  # a model sees x · scale; 1 unless the caller can take it into its products
    even: float | None = None  # the share of every example, if they are known to be the same


def stacked_gradients(task: Task, params: dict[str, Tensor], batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each client's batch loss in its own parameters (k, …), and the losses (k,).

    No client's loss depends on another's parameters, so the gradient of the sum is all gradients at once; that is faster than
    `vmap(grad(…))`, whose backward pass runs inside the transform.
    """

    def batch_loss(named: dict[str, Tensor], x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        return (task.losses(named, x, y) * shares).sum()

    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    losses: Tensor = vmap(batch_loss)(leaves, batch.x, batch.y, batch.shares)
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), losses.detach()


Gradients = Callable[[Task, dict[str, Tensor], Batch], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Starts:
    """The models (M, D) that k clients start from, which of them each client has (k,), and what pulls them elsewhere."""

    models: Tensor
    owners: Tensor
    pull: Pull | None = None  # its rows are those of the k clients
    each_its_own: bool = False  # whether there is a model per client

    @property
    def shared(self) -> bool:
        """Whether all clients start from one model."""
        return len(self.models) == 1

    def rows(self) -> Tensor:
        """Each client's own copy of its start, (k, D); of a shared one (1, D)."""
        return self.models if self.shared else self.models.index_select(0, self.owners.to(self.models.device))


def runs(owners: Tensor) -> list[tuple[int, slice]]:
    """The stretches of equal owners: (owner, rows). Clients are sorted by work, so each owner has few of them.

    >>> runs(torch.tensor([0, 0, 2, 2, 2, 1]))
    [(0, slice(0, 2, None)), (2, slice(2, 5, None)), (1, slice(5, 6, None))]
    """
    values, counts = torch.unique_consecutive(owners, return_counts=True)
    ends = counts.cumsum(0)
    return [(v, slice(e - c, e)) for v, c, e in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True)]


def by_owner(owners: Tensor) -> list[tuple[int, slice | Tensor]]:
    """The rows of each owner: a stretch, or where they are not one their numbers.

    >>> by_owner(torch.tensor([0, 0, 2, 1, 2]))
    [(0, slice(0, 2, None)), (1, slice(3, 4, None)), (2, tensor([2, 4]))]
    """
    stretches: dict[int, list[slice]] = {}
    for owner, rows in runs(owners):
        stretches.setdefault(owner, []).append(rows)
    return [
        (owner, found[0] if len(found) == 1 else (owners == owner).nonzero().flatten())
        for owner, found in sorted(stretches.items())
    ]


def general_steps(
    worker: Worker,
    starts: Starts,
    solver: LocalSolver,
    lr: float,
    batches: Iterable[Batch],
    update: Tensor,
    *,
    gradients_of: Gradients = stacked_gradients,
    correction: Tensor | None = None,
) -> Tensor:
    """Take the steps of `batches`; writes `update` (k, D), returns the summed batch losses (k,), or the last for `finish`.

    `correction` (k, D) is added to every gradient of a client.
    """
    task = worker.task
    anchor, shifts = task.layout.unflatten(starts.rows()), task.layout.unflatten(correction) if correction is not None else {}
    pulls = _named_pull(task, starts.pull)
    scale = getattr(solver, "preconditioner", None)
    scales = task.layout.unflatten(scale) if scale is not None else {}
    seen = torch.zeros(len(update), dtype=torch.float64, device=update.device)
    weights: dict[str, Tensor] = {}
    memory: dict[str, tuple[Tensor, ...]] = {}
    for batch in batches:
        k = len(batch.x)
        stacked = weights or {name: value.expand(len(update), *value.shape[1:]) for name, value in anchor.items()}
        gradients, losses = gradients_of(task, {name: value[:k] for name, value in stacked.items()}, batch)
        if not weights:
            # Each parameter is kept in the memory order in which its gradient comes: a step then streams through both.
            weights = {name: torch.empty_like(gradients[name]).copy_(value[:k]) for name, value in anchor.items()}
            memory = {name: solver.begin(value) for name, value in weights.items()}
        take = getattr(solver, "finish", solver.step) if batch.last else solver.step
        for name, gradient in gradients.items():
            held = tuple(m[:k] for m in memory[name])
            if scales:
                gradient = gradient / scales[name]
            if shifts:
                gradient = gradient + shifts[name][:k]
            if pulls:
                towards, strength = pulls[name]
                gradient = torch.addcmul(gradient, strength[:k], weights[name][:k] - towards[:k])
            take(weights[name][:k], gradient, held, anchor=anchor[name][:k], lr=lr)
        if batch.last and hasattr(solver, "finish"):
            seen.zero_()
        seen[:k] += losses
    for name, change in task.layout.unflatten(update).items():
        if name in weights:
            k = len(weights[name])
            torch.sub(weights[name], anchor[name][:k], out=change[:k])
    return seen


def _named_pull(task: Task, pull: Pull | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Anchor (1 or k, …) and strength (k, 1, …) or (k, …) by parameter; empty without a pull."""
    if pull is None:
        return {}
    anchors = task.layout.unflatten(pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
    if pull.strength.dim() == 2:
        strengths = task.layout.unflatten(pull.strength)
        return {name: (anchor, strengths[name]) for name, anchor in anchors.items()}
    return {name: (anchor, pull.strength.view(-1, *(1,) * (anchor.dim() - 1))) for name, anchor in anchors.items()}
