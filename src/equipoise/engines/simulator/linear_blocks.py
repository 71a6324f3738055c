"""The direct path for linear models under plain SGD: outputs W x + b, and the gradient of the weights is never formed.

With δ = ∂loss/∂outputs (b, C) of a batch x (b, F), the gradient in W is δᵀ x, of rank b: it is applied to W in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.params import ParameterLayout
from equipoise.core.per_example_losses import cross_entropy, per_example
from equipoise.core.task import Task
from equipoise.engines.simulator.client_queue import StartModels, owner_stretches
from equipoise.engines.simulator.cpu.softmax_steps import SoftmaxSteps
from equipoise.engines.simulator.example_batches import ExampleBatch, FlatBatches, batches_by_step, fill_constant, row_width
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, WeightedSums, Workplace, Workspace
from equipoise.engines.simulator.output_gradients import OutputGradients
from equipoise.models.linear import LinearModel
from equipoise.types import Pull

_BLOCK_BYTES = 2**20  # of weights: together with a batch they stay in a core's own cache


class LinearBlocks(LocalPath):
    """Linear models under SGD without momentum, with any loss of the outputs."""

    name = "linear blocks"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.obstacle = place.clients.why_not_plain or why_not_linear(place.task)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """The model must be linear, the rule plain SGD."""
        return self.obstacle or rule.why_not_plain_sgd()

    def run(self, work: ChunkWork) -> ChunkResult:
        """A few clients after another on a CPU, all at once on a GPU."""
        training = LinearWork(work)
        sums = training.sums(work.weights) if work.weights is not None else None
        return work.result(training.updates() if sums is None else sums, training.seen)


def why_not_linear(task: Task) -> str | None:
    """Why outputs are not W x + b with all of W and b trained, and a loss that is a function of outputs and targets alone.

    A subclass with a forward pass of its own, a hook, or a loss that uses the model's parameters takes the general path.
    """
    module = task.module
    if not isinstance(module, LinearModel):
        return f"{type(module).__name__} is not one of the linear models"
    if type(module).forward is not LinearModel.forward or module._forward_hooks or module._forward_pre_hooks:
        return f"{type(module).__name__} has a forward pass or a hook of its own"
    if getattr(task.loss, "__self__", None) is module:
        return "the loss is a method of the model, and may use its parameters"
    all_trained = set(task.layout.names) == {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    return None if all_trained else "some parameters of the model are frozen, or it has others than weight and bias"


def weight_shape(task: Task) -> torch.Size:
    """The shape of a linear model's weights: (C, F), or (F,)."""
    return task.layout.shapes[task.layout.names.index("weight")]


def has_one_score(task: Task) -> bool:
    """Whether the linear model has a single output per example, and a vector for its weights."""
    return len(weight_shape(task)) == 1


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
        summed = torch.mv(self.whole[rows].flatten(1).t(), weights.to(self.whole)).view(1, *self.whole.shape[1:])
        return LinearUpdates(self.layout, summed).dense(summed.new_empty(1, self.layout.dimension))[0]

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
    whole = weight.new_zeros(*weight.shape[:2], row_width(weight.shape[2], True))
    whole[..., : weight.shape[2]] = weight
    whole[..., weight.shape[2]] = named["bias"].view(weight.shape[:2])
    return whole


def _batches(work: ChunkWork) -> FlatBatches | Iterable[ExampleBatch]:
    """The examples of all steps at once, if they are not too much memory, or of one step after another."""
    clients, cursor, dtype = work.worker.clients, work.batches, work.chunk.models.dtype
    if not FlatBatches.fit(clients, cursor):
        return batches_by_step(clients, cursor, work.first_rows, dtype, work.space)
    bias = "bias" in work.worker.task.layout.names
    return FlatBatches(clients, cursor, work.first_rows, dtype, work.space, constant=bias)


class LinearWork:
    """Local work of k clients with linear models, a few at a time on a CPU, so that their weights stay in a core's own cache.

    `seen` (k,) are their summed batch losses, once the work is done.
    """

    def __init__(self, work: ChunkWork) -> None:
        self.task, self.space, self.starts = work.worker.task, work.space, work.starts
        self.lr, self.count = work.rule.lr, len(work.chunk)
        self.start = augmented(self.task, self.starts.models)  # (M, C, P)
        self.seen = torch.zeros(self.count, dtype=torch.float64, device=self.start.device)
        self.keep = 1 - self.lr * work.rule.sgd.weight_decay
        self.pull = LinearPull.of(self.task, pull_of(work.rule.sgd.prox, self.starts, self.count), self.lr / self.keep)
        self.batches = _batches(work)
        self.in_blocks = isinstance(self.batches, FlatBatches) and self.start.device.type == "cpu"
        self.size = min(self.count, max(1, _BLOCK_BYTES // self.start[0].nbytes)) if self.in_blocks else self.count
        one_target = isinstance(self.batches, FlatBatches) and self.batches.y.dim() == 3
        self._ready: SoftmaxSteps | None = None
        self.by_softmax = self.in_blocks and one_target and self.task.loss is cross_entropy and not has_one_score(self.task)

    def updates(self) -> LinearUpdates:
        """What every client has done."""
        whole = self._empty(self.count)
        for block in self._blocks():
            self._train(block, whole[block])
        return LinearUpdates(self.task.layout, whole)

    def sums(self, weights: Tensor) -> WeightedSums | None:
        """Weighted sums of the updates, for which the memory of one block is enough; None where there is no such way."""
        if not self.in_blocks:
            return None
        whole, totals, norms, weights = self._empty(self.size), torch.zeros_like(self.start), [], weights.to(self.start)
        for block in self._blocks():
            here = whole[: block.stop - block.start]
            owners = self._train(block, here)
            flat = here.view(len(here), -1)
            norms.append(torch.linalg.vector_norm(flat, dim=1))
            for owner, rows in owners:
                totals[owner].view(-1).addmv_(flat[rows].t(), weights[block][rows])
        squares = torch.cat(norms).double().square_()
        if bool(((squares == 0) | ~torch.isfinite(squares)).any()):  # beyond what squares of the type hold
            self.seen.zero_()
            return None
        layout = self.task.layout
        dense = LinearUpdates(layout, totals).dense(totals.new_empty(len(totals), layout.dimension))
        return WeightedSums(dense, squares)

    def _softmax(self, batches: FlatBatches, whole: Tensor) -> SoftmaxSteps:
        """Steps on the memory `whole`, made ready once for blocks that use the same memory."""
        if self._ready is None or self._ready.whole.data_ptr() != whole.data_ptr() or len(self._ready.whole) != len(whole):
            self._ready = SoftmaxSteps(batches, whole, self.lr, self.keep)
        return self._ready

    def _empty(self, count: int) -> Tensor:
        return self.space.empty("weights", (count, *self.start.shape[1:]), self.start.dtype, self.start.device)

    def _blocks(self) -> list[slice]:
        return [slice(begin, min(begin + self.size, self.count)) for begin in range(0, self.count, self.size)]

    def _train(self, block: slice, whole: Tensor) -> list[tuple[int, slice]]:
        """Write the updates (k, C, P) of a block to `whole`; gives the stretches of its clients by their start."""
        own_copies(self.start, self.starts, block, whole)
        pull = None if self.pull is None else self.pull.of_clients(block)
        if not isinstance(self.batches, FlatBatches):
            self._steps(self.batches, whole, pull, self.seen[block])
        elif not self.by_softmax:
            self._steps(self.batches.of(block), whole, pull, self.seen[block])
        else:
            for steps, full in self.batches.stretches(block):
                if full:
                    self._softmax(self.batches, whole).take(block, steps, self.seen, None if pull is None else pull.apply)
                else:
                    self._steps(self.batches.of(block, steps), whole, pull, self.seen[block])
        owners = [(0, slice(None))] if self.starts.shared else owner_stretches(self.starts.owners[block])
        for owner, rows in owners:
            whole[rows].sub_(self.start[owner])
        return owners

    def _steps(self, batches: Iterable[ExampleBatch], whole: Tensor, pull: LinearPull | None, seen: Tensor) -> None:
        """Local steps of clients whose weights are `whole` (k, C, P); of each step the first ones, as many as the batch has.

        The weights stay in a cache while all steps are taken.
        """
        shape, scores, width = None, *whole.shape[1:]
        gradient_at = OutputGradients(self.task, seen, one_score=has_one_score(self.task))
        for batch in batches:
            if batch.shares.shape != shape:  # views are made once, not at every step: they cost as much as a small product
                k, b = shape = batch.shares.shape
                weight = whole[:k]
                turned = weight.transpose(1, 2)
                outputs = self.space.empty("outputs", (k * b, scores), weight.dtype, weight.device)
                z = outputs.view(k, b, scores)
            x = batch.x
            if x.dim() != 3 or x.shape[2] != width:
                x = self._flat(batch, width)
            torch.baddbmm(z, x, turned, beta=0, alpha=batch.scale, out=z)  # with β = 0 what was in z does not matter
            delta = gradient_at(outputs, batch).view(k, b, scores)
            rate = self.lr if batch.even is None else self.lr * batch.even  # even shares are not yet in delta
            if pull is not None:
                pull.apply(weight)
            weight.baddbmm_(delta.transpose(1, 2), x, beta=self.keep, alpha=-rate * batch.scale)
        gradient_at.finish()

    def _flat(self, batch: ExampleBatch, width: int) -> Tensor:
        """Inputs (k, b, …) as rows of `width` features, with the constant one that belongs to a bias."""
        k, b = batch.shares.shape
        flat = batch.x.reshape(k, b, -1)
        x = self.space.empty("wider inputs", (k, b, width), flat.dtype, flat.device)
        x[..., : flat.shape[2]] = flat
        fill_constant(x, flat.shape[2], batch.scale)
        return x


def pull_of(prox: float, starts: StartModels, count: int) -> Pull | None:
    """What pulls the clients' models: the given pull, or FedProx's towards their start."""
    if starts.pull is not None or not prox:
        return starts.pull
    anchor = starts.models[0] if starts.shared else starts.rows()
    return Pull(anchor, torch.full((count,), prox, dtype=anchor.dtype, device=anchor.device))


@dataclass(frozen=True, eq=False)
class LinearPull:
    """Moves linear models by rate · strength · (anchor − v), before the step of the gradient at v is taken.

    A step that keeps a share κ = 1 − lr · weight decay of the model then scales this, too: the rate is lr / κ.
    """

    anchor: Tensor  # (1 or k, C, P)
    share: Tensor  # (k, 1, 1): rate · strength

    @classmethod
    def of(cls, task: Task, pull: Pull | None, rate: float) -> LinearPull | None:
        """A pull on the models of a task; None without one."""
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


def own_copies(values: Tensor, starts: StartModels, block: slice, out: Tensor) -> None:
    """Each client's own start, of values (M, …), in `out` (k, …)."""
    if starts.shared:
        out.copy_(values.expand_as(out))
    else:
        torch.index_select(values, 0, starts.owners[block].to(values.device), out=out)
