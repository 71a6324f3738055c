"""One client after another by plain autograd: for models that cannot be batched, and where batching does not pay.

Several processes with one thread each do this side by side on a CPU. The steps of SGD are taken on the module's own parameters,
all of them in one call; those of other solvers as for a batch of one client (`batched_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from equipoise.core import trees
from equipoise.core.devices import seed_generators
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import take_batched_steps
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace, Workspace
from equipoise.solvers.batches import batches_of
from equipoise.types import SgdRule

Tensors = tuple[Tensor, ...] | list[Tensor]
_AT_ONCE = 2**20  # input numbers


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
        named = dict(self.place.task.module.named_parameters())
        return [named[name] for name in self.place.task.layout.names]

    def run(self, work: ChunkWork) -> ChunkResult:
        """Client by client."""
        device = self.place.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if work.rule.traits.sgd is not None and work.rule.pull == "none":
                return self._by_sgd(work)
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

    def _by_sgd(self, work: ChunkWork) -> ChunkResult:
        """Steps of SGD on the module's parameters."""
        chunk, task = work.chunk, self.place.task
        updates, keys, starts, carried = work.new_updates(), work.mask_keys, work.starts.rows(), work.starts.carried_rows()
        moments = None if carried is None else torch.empty(carried.shape, dtype=torch.float64)
        seen = torch.zeros(len(chunk), dtype=torch.float64, device=updates.device)
        for place in range(len(chunk)):
            start = list(task.layout.unflatten(starts[place if len(starts) > 1 else 0]).values())
            values = None if carried is None else carried[place]
            seed = self._seed(work, place)
            loss = self._train_client(work, place, start, values, keys[:, place])
            if not self._ruled and not torch.equal(torch.default_generator.get_state(), seed):
                self._ruled = True  # it draws numbers after all, perhaps by dropout: again, with the rules in force
                self._seed(work, place)
                loss = self._train_client(work, place, start, values, keys[:, place])
            seen[place] = torch.nan if loss is None else loss
            if moments is not None:
                moments[place] = torch.nan if loss is None else task.sent_carried()
            with torch.no_grad():
                change = list(task.layout.unflatten(updates[place]).values())
                torch._foreach_copy_(change, self.leaves)
                torch._foreach_sub_(change, start)
        return ChunkResult(chunk, updates, seen.cpu(), carried=moments)

    def _train_client(
        self, work: ChunkWork, place: int, start: list[Tensor], carried: Tensor | None, keys: Tensor
    ) -> Tensor | None:
        """The steps of one client on the module's parameters: the mean loss of its batches, None if it took no step."""
        task, rule, losses = self.place.task, work.rule, []
        with torch.no_grad():
            torch._foreach_copy_(self.leaves, start)
        if carried is not None:
            task.carried.write(task.module, carried)
        momentum = [torch.zeros_like(leaf) for leaf in self.leaves] if rule.sgd.momentum else []
        for key, (x, y) in zip(keys.unbind() if self._ruled else repeat(None), self._batches(work, place), strict=False):
            if trees.batch_shape(y)[0] < task.smallest_batch:
                continue
            with self._precision():
                with nullcontext() if key is None else ForwardRules(key, batched=False):
                    loss = task.scorer(x, y, False)[0].mean()
                gradients = torch.autograd.grad(loss, self.leaves, allow_unused=True, materialize_grads=True)
            losses.append(loss.detach())
            with torch.no_grad():
                take_sgd_step(self.leaves, gradients, momentum, start, rule.sgd, rule.lr)
        return torch.stack(losses).double().mean() if losses else None

    def _batches(self, work: ChunkWork, place: int) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of each step of one client: gathered for all steps at once where that is little memory."""
        clients, chunk, dtype = self.place.clients, work.chunk, self.place.task.layout.dtype
        first, size, steps = work.first_rows[place], int(chunk.sizes[place]), int(chunk.steps[place])
        batches = batches_of(work.rule.solver, chunk.keys[place], size, steps)
        together = not clients.has_sequences and steps * (work.rule.solver.batch_size or size) * clients.features <= _AT_ONCE
        if not together:
            for rows in batches:
                yield clients.inputs(rows + first, dtype), clients.targets(rows + first, dtype)
            return
        each = list(batches)
        rows = torch.cat(each) + first if each else first[:0]
        x, y = clients.inputs(rows, dtype), clients.targets(rows, dtype)
        end = 0
        for batch in each:
            begin, end = end, end + len(batch)
            yield trees.select(x, slice(begin, end)), trees.select(y, slice(begin, end))

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
