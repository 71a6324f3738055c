"""One client after another by plain autograd: for models that cannot be batched, and where batching does not pay.

Several processes with one thread each do this side by side on a CPU. The steps of SGD are taken on the module's own parameters,
all of them in one call; those of other solvers as for a batch of one client (`batched_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.core import trees
from equipoise.core.devices import seed_generators
from equipoise.core.dropout import StepNoise
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import take_batched_steps
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, WeightedSums, Workplace, Workspace
from equipoise.solvers.batches import batches_of
from equipoise.types import SgdRule

Tensors = tuple[Tensor, ...] | list[Tensor]
Batches = list[tuple[Any, Any]]  # inputs and targets of some steps
_AT_ONCE = 2**19  # input numbers
_CACHED = 2**16  # numbers of each of three vectors


class Program(Protocol):
    """Takes steps of SGD on batches of one shape in another way than by autograd."""

    def run(
        self, batches: Batches, first: int, noise: StepNoise | None, start: list[Tensor], momentum: list[Tensor],
        rule: LocalRule,
    ) -> list[Tensor]:  # fmt: skip
        """Take a step with each batch, the first of which is step `first`, on the module's parameters: the losses."""


class Programs(Protocol):
    """Programs for batches of some shapes."""

    def leading(self, batches: Batches) -> tuple[Program | None, int]:
        """The program of the first batch, and how many batches in a row it takes; without one None and 1."""


class OneByOne(LocalPath):
    """Any model, any solver: one client at a time, without padding."""

    name = "one by one"
    batches = False
    unpadded = True

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self._space = Workspace()
        # Rules cost some microseconds for every operation. A model that draws no numbers does not need them.
        self._ruled = place.device.type != "cpu"

    def supports_rule(self, rule: LocalRule) -> str | None:
        """It does all work."""
        return None

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The module's trained parameters in the order of the layout."""
        return trained_parameters(self.place.task)

    def run(self, work: ChunkWork, programs: Programs | None = None) -> ChunkResult:
        """Client by client; with `programs`, full batches are left to those."""
        device = self.place.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if work.rule.traits.sgd is not None and work.rule.pull == "none":
                return self._by_sgd(work, programs)
            return self._by_batches_of_one(work)

    def _precision(self) -> AbstractContextManager[None]:
        """What a forward and a backward pass are done in; weights that are rounded there are not kept for the next step."""
        return nullcontext() if self.place.device.type == "cpu" else self.place.precision.forward(self.place.device)

    def _plain_gradients(self, task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
        with self._precision():
            return plain_gradients(task, params, batch)

    def _seed(self, work: ChunkWork, place: int) -> Tensor:
        """Random operations other than dropout draw from the client's own stream, as in the loop engine: its state."""
        seed_generators(int(work.chunk.keys[place]) & (2**63 - 1), self.place.device)
        return torch.default_generator.get_state()

    def _by_sgd(self, work: ChunkWork, programs: Programs | None) -> ChunkResult:
        """Steps of SGD on the module's parameters."""
        chunk, task, device = work.chunk, self.place.task, self.place.device
        keys, starts, carried = work.mask_keys, work.starts.rows(), work.starts.carried_rows()
        moments = None if carried is None else torch.empty(carried.shape, dtype=torch.float64)
        seen = torch.zeros(len(chunk), dtype=torch.float64, device=device)
        start = list(task.layout.unflatten(starts[0]).values())
        sums = _UpdateSums(work, task, self.leaves, start) if work.weights is not None and len(starts) == 1 else None
        updates = work.new_updates() if sums is None else starts[:0]
        for place in range(len(chunk)):
            if len(starts) > 1:
                start = list(task.layout.unflatten(starts[place]).values())
            values = None if carried is None else carried[place]
            seed = self._seed(work, place)
            loss = self._train_client(work, place, start, values, keys[:, place], programs)
            if not self._ruled and programs is None and not torch.equal(torch.default_generator.get_state(), seed):
                self._ruled = True  # it draws numbers after all, perhaps by dropout: again, with the rules in force
                self._seed(work, place)
                loss = self._train_client(work, place, start, values, keys[:, place], programs)
            seen[place] = torch.nan if loss is None else loss
            if moments is not None:
                moments[place] = torch.nan if loss is None else task.sent_carried()
            with torch.no_grad():
                if sums is not None:
                    sums.add(place)
                else:
                    change = list(task.layout.unflatten(updates[place]).values())
                    torch._foreach_copy_(change, self.leaves)
                    torch._foreach_sub_(change, start)
        return ChunkResult(chunk, updates if sums is None else sums.value(), seen.cpu(), carried=moments)

    def _train_client(
        self, work: ChunkWork, place: int, start: list[Tensor], carried: Tensor | None, keys: Tensor, programs: Programs | None
    ) -> Tensor | None:
        """The steps of one client on the module's parameters: the mean loss of its batches, None if it took no step."""
        task, rule, losses = self.place.task, work.rule, []
        with torch.no_grad():
            torch._foreach_copy_(self.leaves, start)
        if carried is not None:
            task.carried.write(task.module, carried)
        momentum = [torch.zeros_like(leaf) for leaf in self.leaves] if rule.sgd.momentum else []
        noise = StepNoise(keys) if self._ruled or programs is not None else None
        for first, batches in self._blocks(work, place):
            while batches:
                program, count = (None, 1) if programs is None else programs.leading(batches)
                now, number = batches[:count], first
                batches, first = batches[count:], first + count
                if program is not None:
                    losses += program.run(now, number, noise, start, momentum, rule)
                    continue
                x, y = now[0]
                if trees.batch_shape(y)[0] < task.smallest_batch:
                    continue
                rules = None if noise is None else ForwardRules(keys[number], batched=False, draw=noise.at(number))
                with self._precision():
                    with rules or nullcontext():
                        loss = task.scorer(x, y, False)[0].mean()
                    gradients = torch.autograd.grad(loss, self.leaves, allow_unused=True, materialize_grads=True)
                losses.append(loss.detach())
                with torch.no_grad():
                    take_sgd_step(self.leaves, gradients, momentum, start, rule.sgd, rule.lr)
        return torch.stack(losses).double().mean() if losses else None

    def _blocks(self, work: ChunkWork, place: int) -> Iterator[tuple[int, list[tuple[Any, Any]]]]:
        """Inputs and targets of one client's steps, as many at a time as are little memory, with the number of the first."""
        clients, chunk, dtype = self.place.clients, work.chunk, self.place.task.layout.dtype
        first, size, steps = work.first_rows[place], int(chunk.sizes[place]), int(chunk.steps[place])
        each = max(1, _AT_ONCE // max(1, clients.features * min(work.rule.solver.batch_size or size, size)))
        if clients.has_sequences:  # they would all be padded to the longest
            each = 1
        batches = batches_of(work.rule.solver, chunk.keys[place], size, steps)
        for begin in range(0, steps, each):
            rows = list(islice(batches, each))
            taken = (rows[0] if len(rows) == 1 else torch.cat(rows)) + first
            x, y, counts = clients.inputs(taken, dtype), clients.targets(taken, dtype), [len(each) for each in rows]
            if len(rows) == 1:
                yield begin, [(x, y)]
            else:
                yield begin, list(zip(trees.split(x, counts), trees.split(y, counts), strict=True))

    def _by_batches_of_one(self, work: ChunkWork) -> ChunkResult:
        """Each client as a batch of its own."""
        updates, losses, kept, moments = work.new_updates(), [], [], []
        for place in range(len(work.chunk)):
            self._seed(work, place)
            alone = ChunkWork(work.worker, work.chunk.take(slice(place, place + 1)), work.rule, self._space)
            result = take_batched_steps(alone, self._plain_gradients)
            updates[place] = result.dense(self._space)[0]
            losses.append(result.losses)
            kept += [] if result.rows is None else [result.rows.clone()]
            moments += [] if result.carried is None else [result.carried]
        rows, carried = (torch.cat(each) if each else None for each in (kept, moments))
        return ChunkResult(work.chunk, updates, torch.cat(losses), rows, carried)


class _UpdateSums:
    """The weighted sum of the updates of clients with one start, and the squared norm of each: no update is kept.

    `leaves` are the parameters of whichever client is counted.
    """

    def __init__(self, work: ChunkWork, task: Task, leaves: list[Tensor], start: list[Tensor]) -> None:
        if work.weights is None:
            raise TypeError("sums need weights")
        models = work.chunk.models
        self._weights = work.weights.tolist()
        self._totals = torch.zeros_like(models)
        self._blocks = cached_blocks(leaves, start, list(task.layout.unflatten(self._totals[0]).values()))
        self._norms: list[Tensor] = []

    def add(self, place: int) -> None:
        """Count the update of a client, whose parameters it overwrites."""
        norms: list[Tensor] = []
        for update, start, total in self._blocks:
            torch._foreach_sub_(update, start)
            norms += torch._foreach_norm(update)
            torch._foreach_add_(total, update, alpha=self._weights[place])
        self._norms.append(torch.stack(norms).double().square().sum())

    def value(self) -> WeightedSums:
        """Totals (1, D) and squared norms (k,)."""
        return WeightedSums(self._totals, torch.stack(self._norms).cpu())


def cached_blocks(*lists: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """The same places of lists of tensors of the same shapes, in blocks that stay in a core's cache from one pass to the next.

    >>> [[len(each) for each in part] for (part,) in cached_blocks([torch.zeros(40_000), torch.zeros(2, 70_000)])]
    [[40000], [65536], [65536], [8928]]
    """
    if sum(tensor.numel() for tensor in lists[0]) <= _CACHED:
        return [lists]
    blocks: list[tuple[list[Tensor], ...]] = []
    held = _CACHED
    for tensors in zip(*(map(Tensor.detach, each) for each in lists), strict=True):
        whole = not all(tensor.is_contiguous() for tensor in tensors)
        for pieces in [tensors] if whole else zip(*(tensor.view(-1).split(_CACHED) for tensor in tensors), strict=True):
            if held + pieces[0].numel() > _CACHED:
                blocks.append(tuple([] for _ in lists))
                held = 0
            held += pieces[0].numel()
            for block, piece in zip(blocks[-1], pieces, strict=True):
                block.append(piece)
    return blocks


def trained_parameters(task: Task) -> list[Tensor]:
    """The module's trained parameters in the order of the layout."""
    named = dict(task.module.named_parameters())
    return [named[name] for name in task.layout.names]


def take_sgd_step(
    weights: Tensors,
    gradients: Tensors,
    momentum: Tensors,
    start: Tensors,
    sgd: SgdRule,
    lr: float,
) -> None:
    """The step of `solvers.SGD` on all parameters, in place."""
    if sgd.prox:
        gradients = torch._foreach_add(torch._foreach_mul(torch._foreach_sub(weights, start), sgd.prox), gradients)
    if not sgd.momentum:
        if sgd.weight_decay:
            torch._foreach_mul_(weights, 1 - lr * sgd.weight_decay)
        torch._foreach_add_(weights, gradients, alpha=-lr)
        return
    if sgd.weight_decay:
        gradients = torch._foreach_add(gradients, weights, alpha=sgd.weight_decay)
    torch._foreach_mul_(momentum, sgd.momentum)
    torch._foreach_add_(momentum, gradients)
    torch._foreach_add_(weights, momentum, alpha=-lr)


def plain_gradients(task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """What `stacked_gradients` gives for one client, by plain autograd: gradients (1, …) and the loss (1,)."""
    named = dict(task.module.named_parameters())
    leaves = [named[name] for name in params]
    for leaf, value in zip(leaves, params.values(), strict=True):
        leaf.data = value[0]
    x, y = trees.select(batch.x, 0), trees.select(batch.y, 0)
    if batch.buffers is not None:
        task.carried.write_named(task.module, {name: value[0] for name, value in batch.buffers.items()})
    with ForwardRules(None if batch.keys is None else batch.keys[0], batched=False):
        loss = (task.scorer(x, y, False)[0] * batch.shares[0]).sum()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    if batch.buffers is not None:
        now = dict(task.module.named_buffers())
        for name, value in batch.buffers.items():
            value[0] = now[name].detach()
    return {name: each.unsqueeze(0) for name, each in zip(params, gradients, strict=True)}, loss.detach().unsqueeze(0)
