"""Local steps of many clients at once, on parameters stacked over clients (k, …). The simulator's inner loop.

`general_steps` works for any model that `torch.func.vmap` can batch. `linear_steps` is a direct path for linear models under
plain SGD: it never forms the gradient of the weights, whose size is that of the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from equipoise.models.linear import LinearModel
from equipoise.solvers import SGD
from equipoise.task import Task, per_example
from equipoise.types import LocalSolver, Pull


@dataclass(frozen=True, eq=False)
class Batch:
    """One local step's examples of the k clients still at work, padded to b; a client's `shares` sum to 1, padding has 0."""

    x: Tensor  # (k, b, …)
    y: Tensor  # (k, b, …)
    shares: Tensor  # (k, b)
    last: bool  # no step comes after it


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


@dataclass(frozen=True, eq=False)
class Starts:
    """The models (M, D) that k clients start from, which of them each client has (k,), and what pulls them elsewhere."""

    models: Tensor
    owners: Tensor
    pull: Pull | None = None  # its rows are those of the k clients

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


def general_steps(
    task: Task,
    starts: Starts,
    solver: LocalSolver,
    lr: float,
    batches: Iterable[Batch],
    update: Tensor,
    correction: Tensor | None = None,
) -> Tensor:
    """Take the steps of `batches`; writes `update` (k, D), returns the summed batch losses (k,), or the last for `finish`.

    `correction` (k, D) is added to every gradient of a client.
    """
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
        gradients, losses = stacked_gradients(task, {name: value[:k] for name, value in stacked.items()}, batch)
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


def fits_linear_steps(task: Task, solver: LocalSolver, pull: Pull | None = None) -> bool:
    """Whether the direct path does this work: a linear model with all its parameters trained, by plain SGD.

    A subclass with a forward pass of its own, a hook, or a loss that uses the model's parameters takes the general path.
    """
    if type(solver) is not SGD or solver.momentum or solver.prox:
        return False
    return (pull is None or (pull.strength.dim() == 1 and not solver.weight_decay)) and is_plain_linear(task)


def is_plain_linear(task: Task) -> bool:
    """Whether outputs are W x + b with all of W and b trained, and the loss is a function of outputs and targets alone."""
    module = task.module
    if not isinstance(module, LinearModel):
        return False
    as_written = type(module).forward is LinearModel.forward and not (module._forward_hooks or module._forward_pre_hooks)
    loss_of_outputs_alone = getattr(task.loss, "__self__", None) is not module
    all_trained = set(task.layout.names) == {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    return as_written and loss_of_outputs_alone and all_trained


def linear_losses(task: Task, models: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Losses (M, B) of shared examples under several linear models (M, D): their weights side by side are one product."""
    named = task.layout.unflatten(models)
    one_score = named["weight"].dim() == 2
    weight = named["weight"].flatten(0, -2)  # (M · C, F)
    z = torch.mm(x.reshape(len(x), -1), weight.t()).view(len(x), len(models), -1).transpose(0, 1)  # (M, B, C)
    if "bias" in named:
        z = z + named["bias"].reshape(len(models), 1, -1)
    outputs = z.reshape(-1) if one_score else z.reshape(len(models) * len(x), -1)
    targets = y.repeat(len(models), *(1,) * (y.dim() - 1))
    return per_example("loss", task.loss(outputs, targets), outputs).view(len(models), len(x))


def linear_steps(
    task: Task, starts: Starts, solver: LocalSolver, lr: float, batches: Iterable[Batch], update: Tensor
) -> Tensor:
    """The same for outputs z = W x + b: with δ = ∂loss/∂z the gradient in W is δ xᵀ, of rank b, and is applied in place."""
    models, count = task.layout.unflatten(starts.models), len(update)
    one_score = models["weight"].dim() == 2
    start = models["weight"].unsqueeze(1) if one_score else models["weight"]  # (M, C, F)
    weight = _own_copies(start.transpose(1, 2), starts, count)  # (k, F, C): in this order both products are fast
    bias = _own_copies(models["bias"].reshape(len(start), 1, -1), starts, count) if "bias" in models else None
    seen = torch.zeros(count, dtype=torch.float64, device=update.device)
    keep = 1 - lr * solver.weight_decay if isinstance(solver, SGD) else 1.0
    pull = _LinearPull.of(task, starts.pull, lr)
    for batch in batches:
        k, b = batch.shares.shape
        x = batch.x.reshape(k, b, -1)  # (k, b, F)
        z = torch.bmm(x, weight[:k]) if bias is None else torch.baddbmm(bias[:k], x, weight[:k])  # (k, b, C)
        z.requires_grad_()
        outputs = (z.reshape(k * b) if one_score else z.reshape(k * b, -1)).clone()  # a loss may work in place on it
        losses = per_example("loss", task.loss(outputs, batch.y.flatten(0, 1)), outputs) * batch.shares.flatten()
        (delta,) = torch.autograd.grad(losses.sum(), z)
        if pull is not None:
            pull.apply(weight[:k], bias[:k] if bias is not None else None)
        weight[:k].baddbmm_(x.transpose(1, 2), delta, beta=keep, alpha=-lr)
        if bias is not None:
            bias[:k].mul_(keep).add_(delta.sum(1, keepdim=True), alpha=-lr)
        seen[:k] += losses.detach().view(k, b).sum(1)
    changes = task.layout.unflatten(update)
    change = changes["weight"].unsqueeze(1) if one_score else changes["weight"]
    for owner, rows in runs(starts.owners):
        torch.sub(weight[rows].transpose(1, 2), start[owner], out=change[rows])
        if bias is not None:
            torch.sub(bias[rows].flatten(1), models["bias"][owner].reshape(1, -1), out=changes["bias"][rows].flatten(1))
    return seen


@dataclass(frozen=True, eq=False)
class _LinearPull:
    """Moves linear models by −lr · strength · (v − anchor), before the step of the gradient at v is taken."""

    weight: Tensor  # (1 or k, F, C)
    bias: Tensor | None  # (1 or k, 1, C)
    share: Tensor  # (k, 1, 1): lr · strength

    @classmethod
    def of(cls, task: Task, pull: Pull | None, lr: float) -> _LinearPull | None:
        if pull is None:
            return None
        named = task.layout.unflatten(pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
        weight = named["weight"].unsqueeze(1) if named["weight"].dim() == 2 else named["weight"]
        bias = named["bias"].reshape(len(weight), 1, -1) if "bias" in named else None
        return cls(weight.transpose(1, 2).contiguous(), bias, (lr * pull.strength).view(-1, 1, 1).to(weight))

    def apply(self, weight: Tensor, bias: Tensor | None) -> None:
        """In place: v ← v + lr · strength · (anchor − v)."""
        k = len(weight)
        weight.lerp_(self.weight[:k].expand_as(weight), self.share[:k])
        if bias is not None and self.bias is not None:
            bias.lerp_(self.bias[:k].expand_as(bias), self.share[:k])


def _own_copies(values: Tensor, starts: Starts, count: int) -> Tensor:
    """A contiguous copy of each client's own start (k, …), of values (M, …) in any order of memory."""
    values = values.contiguous()
    return (
        values.expand(count, *values.shape[1:]).clone()
        if starts.shared
        else values.index_select(0, starts.owners.to(values.device))
    )
