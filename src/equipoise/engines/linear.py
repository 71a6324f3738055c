"""The direct path for linear models under plain SGD: outputs W x + b, and the gradient of the weights is never formed.

With δ = ∂loss/∂outputs (b, C) of a batch x (b, F), the gradient in W is δᵀ x, of rank b: it is applied to W in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.engines.gather import EpochBatches, fill_constant, wider
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


_BLOCK_BYTES = 2**20  # of weights: together with a batch they stay in a core's own cache


@dataclass(frozen=True, eq=False)
class LinearUpdates:
    """Updates of k linear models (k, C, P): of the weights of F features, of a bias after them, and zeros."""

    layout: ParameterLayout
    whole: Tensor

    def dense(self, update: Tensor) -> Tensor:
        """The updates (k, D), written to `update`."""
        named = self.layout.unflatten(update)
        features = named["weight"].shape[-1]
        _matrices(named["weight"], 1).copy_(self.whole[..., :features])
        if "bias" in named:
            named["bias"].view(len(update), -1).copy_(self.whole[..., features])
        return update

    def weighted_sum(self, rows: slice, weights: Tensor, space: Workspace) -> Tensor:
        """Σ_k π_k u_k over some of the clients, (D,)."""
        summed = torch.mv(self.whole[rows].flatten(1).t(), weights.to(self.whole)).view(self.whole.shape[1:])
        return self.dense_one(summed)

    def dense_one(self, one: Tensor) -> Tensor:
        """A model (C, P) as a vector (D,)."""
        return LinearUpdates(self.layout, one.unsqueeze(0)).dense(one.new_empty(1, self.layout.dimension))[0]

    def squares(self) -> Tensor:
        """Squared norms, (k,)."""
        norms: Tensor = torch.linalg.vector_norm(self.whole.flatten(1), dim=1)
        return norms.double().square_()


def _matrices(weight: Tensor, leading: int) -> Tensor:
    """Weights (…, C, F), also of models with one score, whose weights are (…, F)."""
    return weight if weight.dim() == leading + 2 else weight.unsqueeze(leading)


def augmented(task: Task, models: Tensor) -> Tensor:
    """Linear models (M, D) as matrices (M, C, P): a bias is the weight of one more feature that is always 1."""
    named = task.layout.unflatten(models)
    weight = _matrices(named["weight"], 1)
    if "bias" not in named:
        return weight.contiguous()
    whole = weight.new_zeros(*weight.shape[:2], wider(weight.shape[2], True))
    whole[..., : weight.shape[2]] = weight
    whole[..., weight.shape[2]] = named["bias"].view(weight.shape[:2])
    return whole


def linear_steps(
    worker: Worker, starts: Starts, solver: LocalSolver, lr: float, batches: EpochBatches | Iterable[Batch], count: int
) -> tuple[LinearUpdates, Tensor]:
    """Take the steps of `batches` for `count` clients: their updates, and their summed batch losses (k,)."""
    task, start = worker.task, augmented(worker.task, starts.models)  # (M, C, P)
    whole = worker.space.empty("weights", (count, *start.shape[1:]), start.dtype, start.device)
    seen = torch.zeros(count, dtype=torch.float64, device=start.device)
    keep = 1 - lr * solver.weight_decay if isinstance(solver, SGD) else 1.0
    pull = LinearPull.of(task, pull_of(solver, starts, count), lr / keep)
    in_blocks = isinstance(batches, EpochBatches) and start.device.type == "cpu"
    size = max(1, _BLOCK_BYTES // start[0].nbytes) if in_blocks else count
    for begin in range(0, count, size):
        block = slice(begin, min(begin + size, count))
        own_copies(start, starts, block, whole[block])
        work = _Block(task, lr, keep, whole[block], None if pull is None else pull.of_clients(block), seen[block])
        work.steps(batches.of(block) if isinstance(batches, EpochBatches) else batches, worker.space)
        for owner, rows in runs(starts.owners[block]):
            whole[block][rows] -= start[owner]
    return LinearUpdates(task.layout, whole), seen


@dataclass(frozen=True, eq=False)
class _Block:
    """Clients whose weights stay in a cache while all their steps are taken."""

    task: Task
    lr: float
    keep: float
    whole: Tensor  # (k, C, P)
    pull: LinearPull | None
    seen: Tensor  # (k,)

    def steps(self, batches: Iterable[Batch], space: Workspace) -> None:
        """All local steps; of each the first clients, as many as the batch has."""
        shape, losses = None, Losses(self.seen)
        scores, width = self.whole.shape[1:]
        one_score = len(self.task.layout.shapes[self.task.layout.names.index("weight")]) == 1
        for batch in batches:
            if batch.shares.shape != shape:  # views are made once, not at every step: they cost as much as a small product
                k, b = shape = batch.shares.shape
                weight = self.whole[:k]
                turned = weight.transpose(1, 2)
                outputs = space.empty("outputs", (k * b, scores), weight.dtype, weight.device)
                z = outputs.view(k, b, scores)
            x = batch.x
            if x.dim() != 3 or x.shape[2] != width:
                x = self._flat(batch, space)
            torch.baddbmm(z, x, turned, beta=0, alpha=batch.scale, out=z)  # with β = 0 what was in z does not matter
            delta = output_gradients(self.task, outputs, batch, losses, one_score=one_score).view(k, b, scores)
            rate = self.lr if batch.even is None else self.lr * batch.even  # even shares are not yet in delta
            if self.pull is not None:
                self.pull.apply(weight)
            weight.baddbmm_(delta.transpose(1, 2), x, beta=self.keep, alpha=-rate * batch.scale)
        losses.finish()

    def _flat(self, batch: Batch, space: Workspace) -> Tensor:
        """Inputs (k, b, …) as rows of features, with the constant one that belongs to a bias."""
        k, b = batch.shares.shape
        flat = batch.x.reshape(k, b, -1)
        x = space.empty("wider inputs", (k, b, self.whole.shape[2]), flat.dtype, flat.device)
        x[..., : flat.shape[2]] = flat
        fill_constant(x, flat.shape[2], batch.scale)
        return x


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

    anchor: Tensor  # (1 or k, C, P)
    share: Tensor  # (k, 1, 1): rate · strength

    @classmethod
    def of(cls, task: Task, pull: Pull | None, rate: float) -> LinearPull | None:
        if pull is None:
            return None
        anchor = augmented(task, pull.anchor if pull.anchor.dim() == 2 else pull.anchor.unsqueeze(0))
        return cls(anchor, (rate * pull.strength).view(-1, 1, 1).to(anchor))

    def of_clients(self, block: slice) -> LinearPull:
        """The pull on a stretch of the clients."""
        return LinearPull(self.anchor if len(self.anchor) == 1 else self.anchor[block], self.share[block])

    def apply(self, whole: Tensor) -> None:
        """In place: v ← v + rate · strength · (anchor − v)."""
        k = len(whole)
        whole.lerp_(self.anchor[:k].expand_as(whole), self.share[:k])


def own_copies(values: Tensor, starts: Starts, block: slice, out: Tensor) -> None:
    """Each client's own start, of values (M, …), in `out` (k, …)."""
    if starts.shared:
        out.copy_(values.expand_as(out))
    else:
        torch.index_select(values, 0, starts.owners[block].to(values.device), out=out)
