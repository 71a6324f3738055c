"""The direct path for linear models under plain SGD: outputs W x + b, and the gradient of the weights is never formed.

With δ = ∂loss/∂outputs (b, C) of a batch x (b, F), the gradient in W is δᵀ x, of rank b: it is applied to W in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.engines.gather import EpochBatches
from equipoise.engines.stacked import Batch, Starts, runs
from equipoise.engines.workers import Worker, Workspace
from equipoise.models.linear import LinearModel
from equipoise.params import ParameterLayout
from equipoise.solvers import SGD
from equipoise.task import Task, cross_entropy, per_example
from equipoise.types import LocalSolver, Pull


def is_plain_linear(task: Task) -> bool:
    """Whether outputs are W x + b with all of W and b trained, and the loss is a function of outputs and targets alone.

    A subclass with a forward pass of its own, a hook, or a loss that uses the model's parameters takes the general path.
    """
    module = task.module
    if not isinstance(module, LinearModel):
        return False
    as_written = type(module).forward is LinearModel.forward and not (module._forward_hooks or module._forward_pre_hooks)
    loss_of_outputs_alone = getattr(task.loss, "__self__", None) is not module
    all_trained = set(task.layout.names) == {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    return as_written and loss_of_outputs_alone and all_trained


def fits_linear_steps(task: Task, solver: LocalSolver, lr: float, pull: Pull | None = None) -> bool:
    """Whether the direct path does this work: a linear model, plain SGD, perhaps with one pull by a number per client."""
    if type(solver) is not SGD or solver.momentum or lr * solver.weight_decay >= 1:
        return False
    return (pull is None or (pull.strength.dim() == 1 and not solver.prox)) and is_plain_linear(task)


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


class Losses:
    """Batch losses of clients, added to `seen` (k,) by and by: few larger sums instead of many small ones."""

    def __init__(self, seen: Tensor) -> None:
        self.seen, self._waiting, self._factor = seen, list[Tensor](), 0.0

    def add(self, each: Tensor, k: int, factor: float) -> None:
        """Losses (k · b,) or (k · b, 1) of single examples, each to be multiplied by the factor."""
        each = each.view(k, -1)
        if self._waiting and (factor != self._factor or len(self._waiting[0]) != k):
            self.finish()
        self._waiting.append(each)
        self._factor = factor

    def finish(self) -> None:
        """Add what is waiting."""
        if self._waiting:
            k = len(self._waiting[0])
            self.seen[:k] += torch.cat(self._waiting, 1).sum(1, dtype=torch.float64).mul_(self._factor)
            self._waiting.clear()


def output_gradients(task: Task, z: Tensor, batch: Batch, losses: Losses, *, one_score: bool) -> Tensor:
    """∂/∂z of each client's batch loss at outputs z (k · b, C), the same shape; the losses are added to `losses`.

    Where a batch has `even` shares, the gradient is that of the plain sum over its examples.
    """
    k, b = batch.shares.shape
    if task.loss is cross_entropy and not one_score and batch.y.dim() == 2:  # by hand: softmax minus one-hot
        logs = torch.log_softmax(z, 1)
        target = batch.y.reshape(-1, 1)
        chosen = logs.gather(1, target)
        delta = logs.exp_()
        if batch.even is not None:
            losses.add(chosen, k, -batch.even)
            return delta.scatter_add_(1, target, delta.new_full((1, 1), -1.0).expand_as(target))
        share = batch.shares.reshape(-1, 1)
        losses.add(chosen.mul_(share), k, -1.0)
        return delta.mul_(share).scatter_add_(1, target, share.neg())
    z = z.detach().requires_grad_()
    outputs = (z.reshape(k * b) if one_score else z).clone()  # a loss may work in place on it
    with torch.enable_grad():
        each = per_example("loss", task.loss(outputs, batch.y.flatten(0, 1)), outputs) * batch.shares.flatten()
    (delta,) = torch.autograd.grad(each.sum(), z)
    losses.add(each.detach(), k, 1.0)
    return delta if batch.even is None else delta / batch.even


_BLOCK_BYTES = 2**21  # of weights: together with a batch they stay in a core's own cache


@dataclass(frozen=True, eq=False)
class LinearUpdates:
    """Updates of k linear models: of their weights (k, C, F) and biases (k, 1, C)."""

    layout: ParameterLayout
    weight: Tensor
    bias: Tensor | None

    def dense(self, update: Tensor) -> Tensor:
        """The updates (k, D), written to `update`."""
        named = self.layout.unflatten(update)
        named["weight"].view_as(self.weight).copy_(self.weight)
        if self.bias is not None:
            named["bias"].view_as(self.bias).copy_(self.bias)
        return update

    def weighted_sum(self, rows: slice, weights: Tensor, space: Workspace) -> Tensor:
        """Σ_k π_k u_k over some of the clients, (D,)."""
        weights = weights.to(self.weight)
        total = self.weight.new_empty(self.layout.dimension)
        named = self.layout.unflatten(total)
        torch.mv(self.weight[rows].flatten(1).t(), weights, out=named["weight"].view(-1))
        if self.bias is not None:
            torch.mv(self.bias[rows].flatten(1).t(), weights, out=named["bias"].view(-1))
        return total

    def squares(self) -> Tensor:
        """Squared norms, (k,)."""
        squares: Tensor = torch.linalg.vector_norm(self.weight.flatten(1), dim=1).double().square_()
        if self.bias is not None:
            squares += torch.linalg.vector_norm(self.bias.flatten(1), dim=1).double().square_()
        return squares


def linear_steps(
    worker: Worker, starts: Starts, solver: LocalSolver, lr: float, batches: EpochBatches | Iterable[Batch], count: int
) -> tuple[LinearUpdates, Tensor]:
    """Take the steps of `batches` for `count` clients: their updates, and their summed batch losses (k,)."""
    task, models = worker.task, worker.task.layout.unflatten(starts.models)
    one_score = models["weight"].dim() == 2
    start = models["weight"].unsqueeze(1) if one_score else models["weight"]  # (M, C, F)
    dtype, device = start.dtype, start.device
    weight = worker.space.empty("weights", (count, *start.shape[1:]), dtype, device)
    first = models["bias"].reshape(len(start), 1, -1) if "bias" in models else None  # (M, 1, C)
    bias = worker.space.empty("biases", (count, *first.shape[1:]), dtype, device) if first is not None else None
    seen = torch.zeros(count, dtype=torch.float64, device=device)
    keep = 1 - lr * solver.weight_decay if isinstance(solver, SGD) else 1.0
    pull = LinearPull.of(task, pull_of(solver, starts, count), lr / keep)
    size = count if not isinstance(batches, EpochBatches) else max(1, _BLOCK_BYTES // start[0].nbytes)
    for begin in range(0, count, size if device.type == "cpu" else count):
        block = slice(begin, min(begin + size, count) if device.type == "cpu" else count)
        own_copies(start, starts, block, weight[block])
        if bias is not None and first is not None:
            own_copies(first, starts, block, bias[block])
        work = _Block(task, one_score, lr, keep, weight[block], None if bias is None else bias[block],
                      None if pull is None else pull.of_clients(block), seen[block])  # fmt: skip
        work.steps(batches.of(block) if isinstance(batches, EpochBatches) else batches, worker.space)
        for owner, rows in runs(starts.owners[block]):
            weight[block][rows] -= start[owner]
            if bias is not None and first is not None:
                bias[block][rows] -= first[owner]
    return LinearUpdates(task.layout, weight, bias), seen


@dataclass(frozen=True, eq=False)
class _Block:
    """Clients whose weights stay in a cache while all their steps are taken."""

    task: Task
    one_score: bool
    lr: float
    keep: float
    weight: Tensor  # (k, C, F)
    bias: Tensor | None  # (k, 1, C)
    pull: LinearPull | None
    seen: Tensor  # (k,)

    def steps(self, batches: Iterable[Batch], space: Workspace) -> None:
        """All local steps; of each the first clients, as many as the batch has."""
        shape, losses = None, Losses(self.seen)
        for batch in batches:
            if batch.shares.shape != shape:  # views are made once, not at every step: they cost as much as a small product
                k, b = shape = batch.shares.shape
                weight, bias = self.weight[:k], None if self.bias is None else self.bias[:k]
                turned, scores = weight.transpose(1, 2), weight.shape[1]
                outputs = space.empty("outputs", (k * b, scores), weight.dtype, weight.device)
                z = outputs.view(k, b, scores)
            x = batch.x if batch.x.dim() == 3 else batch.x.reshape(k, b, -1)  # (k, b, F)
            if bias is None:
                z.zero_()
            else:
                z.copy_(bias)
            z.baddbmm_(x, turned, alpha=batch.scale)
            delta = output_gradients(self.task, outputs, batch, losses, one_score=self.one_score).view(k, b, scores)
            rate = self.lr if batch.even is None else self.lr * batch.even  # even shares are not yet in delta
            if self.pull is not None:
                self.pull.apply(weight, bias)
            weight.baddbmm_(delta.transpose(1, 2), x, beta=self.keep, alpha=-rate * batch.scale)
            if bias is not None:
                if self.keep != 1:
                    bias.mul_(self.keep)
                bias.sub_(delta.sum(1, keepdim=True), alpha=rate)
        losses.finish()


def pull_of(solver: LocalSolver, starts: Starts, count: int) -> Pull | None:
    """What pulls the clients' models: the given pull, or FedProx's towards their start."""
    if starts.pull is not None or not (isinstance(solver, SGD) and solver.prox):
        return starts.pull
    anchor = starts.models[0] if starts.shared else starts.rows()
    return Pull(anchor, torch.full((count,), solver.prox, dtype=anchor.dtype, device=anchor.device))


@dataclass(frozen=True, eq=False)
class LinearPull:
    """Moves linear models by rate · strength · (anchor − v), before the step of the gradient at v is taken.

    A step that keeps a share κ = 1 − lr · weight decay of the model then scales this, too: the rate is lr / κ.
    """

    weight: Tensor  # (1 or k, C, F)
    bias: Tensor | None  # (1 or k, 1, C)
    share: Tensor  # (k, 1, 1): rate · strength

    @classmethod
    def of(cls, task: Task, pull: Pull | None, rate: float) -> LinearPull | None:
        if pull is None:
            return None
        named = task.layout.unflatten(pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
        weight = named["weight"].unsqueeze(1) if named["weight"].dim() == 2 else named["weight"]
        bias = named["bias"].reshape(len(weight), 1, -1) if "bias" in named else None
        return cls(weight.contiguous(), bias, (rate * pull.strength).view(-1, 1, 1).to(weight))

    def of_clients(self, block: slice) -> LinearPull:
        """The pull on a stretch of the clients."""
        if len(self.weight) == 1:
            return LinearPull(self.weight, self.bias, self.share[block])
        return LinearPull(self.weight[block], None if self.bias is None else self.bias[block], self.share[block])

    def apply(self, weight: Tensor, bias: Tensor | None) -> None:
        """In place: v ← v + rate · strength · (anchor − v)."""
        k = len(weight)
        weight.lerp_(self.weight[:k].expand_as(weight), self.share[:k])
        if bias is not None and self.bias is not None:
            bias.lerp_(self.bias[:k].expand_as(bias), self.share[:k])


def own_copies(values: Tensor, starts: Starts, block: slice, out: Tensor) -> None:
    """Each client's own start, of values (M, …), in `out` (k, …)."""
    if starts.shared:
        out.copy_(values.expand_as(out))
    else:
        torch.index_select(values, 0, starts.owners[block].to(values.device), out=out)
