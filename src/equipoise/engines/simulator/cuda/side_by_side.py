"""Clients side by side on a GPU: each takes plain steps in a stream of its own, and a step of all of them is one CUDA graph.

Batching over clients (`torch.func.vmap`) turns a convolution into one with groups, which libraries run group by group and
slowly. Here a client's step is what it would be alone, by the kernels that libraries have tuned; several clients keep the
device busy, and no Python runs between steps. Models that cannot be batched are trained so, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.core import rng, trees
from equipoise.core.forward_rules import ForwardRules
from equipoise.engines.simulator.convnet_path import why_not_by_hand
from equipoise.engines.simulator.cuda.graph_capacity import captured, power_of_two, rounded_batch
from equipoise.engines.simulator.linear_blocks import why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.precision import first_line
from equipoise.types import SgdRule

_SLOTS = 8  # clients at work at once
_GRAPHS = 64  # at most; then all are captured anew
_SIZES = 4  # of batches that are not padded


@dataclass(frozen=True)
class SlotShape:
    """What all graphs of one set of slots share."""

    slots: int
    steps: int
    batch: int
    sgd: SgdRule


class SideBySide(LocalPath):
    """SGD of any model that can be captured, on a GPU. Works, uncaptured, on a CPU as well: for tests."""

    name = "side by side"
    batches = False
    unpadded = True
    measured = True
    channels_last: ClassVar[bool] = False  # whether images and weights of convolutions have that memory order

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.slots: ClientSlots | None = None
        self.most = _SLOTS
        self.obstacle = self._why_not()

    def _why_not(self) -> str | None:
        task, clients = self.place.task, self.place.clients
        if self.place.device.type != "cuda":
            return "it needs a CUDA device"
        if clients.has_sequences:
            return "sequences of different lengths need batches of different shapes"
        if self.channels_last and not any(len(shape) == 4 for shape in task.layout.shapes):
            return "the model has no weights of convolutions in two dimensions"
        if clients.why_not_plain is None and (why_not_by_hand(task, clients.device) is None or why_not_linear(task) is None):
            return "a path that is written for this model is faster"
        return None

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Steps of SGD from shared models, without a pull."""
        if rule.own_models or rule.pull != "none":
            return "clients have models of their own"
        return self.obstacle or rule.why_not_sgd()

    def supports(self, work: ChunkWork) -> str | None:
        """All batches must fit into one table. A model that could not be captured is not tried again."""
        if self.obstacle is None and self._is_exact(work) and len(set(work.batches.counts.flatten().tolist())) > _SIZES:
            return f"batches of more than {_SIZES} sizes, which may not be padded, need too many graphs"
        return self.obstacle or (None if work.batches.at_once else "the batches of all steps are too many for one table")

    def _is_exact(self, work: ChunkWork) -> bool:
        """Whether batches may not be padded."""
        return self.place.task.mixes or work.worker.unbatchable is not None

    def run(self, work: ChunkWork) -> ChunkResult | None:
        """Some clients after others, all steps of each; None if the model cannot be captured."""
        update, chunk = work.new_updates(), work.chunk
        count, seen = len(update), torch.zeros(len(update), dtype=torch.float64, device=update.device)
        carried = work.starts.carried_rows()
        moments = None if carried is None else torch.empty(carried.shape, dtype=torch.float64)
        groups = -(-count // min(self.most, count))
        size = -(-count // groups)
        try:
            slots = self._slots(work, size)
            for first in range(0, count, size):
                group = slice(first, min(first + size, count))
                slots.fill(work, group, carried)
                slots.take_steps(work, group, exact=self._is_exact(work))
                seen[group] = slots.finish(update[group])
                if moments is not None:
                    moments[group] = slots.sent(len(chunk.steps[group]))
        except RuntimeError as failure:  # a forward pass that asks the device, say
            if isinstance(failure, torch.cuda.OutOfMemoryError) and self.most > 1:
                self.most, self.slots = max(1, self.most // 4), None
                torch.cuda.empty_cache()
                return self.run(work)
            if self.obstacle is not None:
                raise
            self.obstacle, self.slots = f"steps cannot be captured as a CUDA graph ({first_line(failure)})", None
            torch.cuda.synchronize()
            return None
        steps = _steps_taken(work, self.place.task.smallest_batch) if self.place.task.mixes else chunk.steps
        if moments is not None:
            moments[steps <= 0] = torch.nan
        return ChunkResult(chunk, update, seen.cpu() / steps, carried=moments)

    def decline(self, reason: str) -> None:
        """Do no work from now on."""
        self.obstacle = reason

    def release(self) -> None:
        """Free memory and graphs."""
        self.slots = None

    def _slots(self, work: ChunkWork, size: int) -> ClientSlots:
        """Slots that hold this work."""
        cursor, solver = work.batches, work.rule.solver
        batch = rounded_batch(cursor.width)
        if solver.batch_size is not None:
            batch = min(solver.batch_size, int(self.place.clients.host_sizes.max()))
        shape, held = SlotShape(size, power_of_two(len(cursor.active)), batch, work.rule.sgd), self.slots
        if held is not None and held.shape.sgd == shape.sgd:
            sizes = {name: max(getattr(shape, name), getattr(held.shape, name)) for name in ("slots", "steps", "batch")}
            shape = replace(shape, **sizes)
            if held.shape == shape and len(held.graphs) < _GRAPHS:
                return held
        self.slots = held = None  # its memory goes first
        self.slots = ClientSlots(self.place, shape, channels_last=self.channels_last)
        return self.slots


def _steps_taken(work: ChunkWork, smallest_batch: int) -> Tensor:
    """How many steps each client takes, (k,), without those whose batches are too small for the model."""
    counts, steps = work.batches.counts, work.chunk.steps
    working = torch.arange(len(counts)).unsqueeze(1) < steps
    return ((counts >= smallest_batch) & working).sum(0)


class SideBySideChannelsLast(SideBySide):
    """`SideBySide` with images and weights of convolutions in the memory order that some kernels want: channels last."""

    name = "side by side, NHWC"
    channels_last = True


class ClientSlots:
    """Memory with fixed places for some clients at work, and the graphs that work on it."""

    def __init__(self, place: Workplace, shape: SlotShape, *, channels_last: bool) -> None:
        self.place, self.shape, self.channels_last = place, shape, channels_last
        device, dtype, task = place.clients.device, place.task.layout.dtype, place.task
        self.device, self.dtype, self.on_gpu = device, dtype, device.type == "cuda"
        table = (shape.slots, shape.steps, shape.batch)
        self.rows = torch.zeros(table, dtype=torch.int64, device=device)
        self.shares = torch.zeros(table, dtype=dtype, device=device)
        self.rates = torch.zeros(table[:2], dtype=dtype, device=device)
        self.numbers = torch.zeros(shape.slots, 1, dtype=torch.int64, device=device)  # of each client's next step
        self.keys = torch.zeros(shape.slots, dtype=torch.int64, device=device)  # of the clients' masks of dropout
        self.seen = torch.zeros(shape.slots, dtype=torch.float64, device=device)
        self.start = torch.zeros(shape.slots, task.layout.dimension, dtype=dtype, device=device)
        self.starts = task.layout.unflatten(self.start)
        self.weights = {name: self._like(value) for name, value in self.starts.items()}
        self.velocity = {name: self._like(value) for name, value in self.starts.items()} if shape.sgd.momentum else {}
        empty = torch.zeros(shape.slots, task.carried.size, dtype=dtype, device=device)
        self.buffers = {name: value.clone() for name, value in task.carried.unflatten(empty).items()}
        self.graphs: dict[tuple[tuple[int, int], ...], Callable[[], None]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.streams = [torch.cuda.Stream(device) for _ in range(shape.slots)] if self.on_gpu else []  # type: ignore[no-untyped-call]

    def _like(self, value: Tensor) -> Tensor:
        """Memory for a parameter of all slots (S, …), in the order that its gradient comes in."""
        if self.channels_last and value.dim() == 5:
            slots, out, into, high, wide = value.shape
            return torch.zeros(slots, out, high, wide, into, dtype=self.dtype, device=self.device).permute(0, 1, 4, 2, 3)
        return torch.zeros(value.shape, dtype=self.dtype, device=self.device)

    def fill(self, work: ChunkWork, group: slice, carried: Tensor | None) -> None:
        """Put clients into the slots: their starts and their batches."""
        cursor, chunk = work.batches, work.chunk
        places, inside = cursor.batches
        steps, count, width = len(cursor.active), len(chunk.steps[group]), cursor.width
        here = (places[:, group] + work.first_rows[group]).transpose(0, 1)
        counts = cursor.counts[:, group].t().unsqueeze(2).to(self.device, non_blocking=True)
        working = (torch.arange(steps) < chunk.steps[group].unsqueeze(1)).to(self.device, non_blocking=True)
        self.rows[:count, :steps, :width] = here
        self.rows[:count, :steps, width:] = here[:, :, :1]
        self.shares.zero_()
        self.shares[:count, :steps, :width] = inside[:, group].transpose(0, 1).to(self.dtype) / counts
        self.rates.zero_()
        self.rates[:count, :steps] = working.to(self.dtype) * work.rule.lr
        self.numbers.zero_()
        self.seen.zero_()
        self.keys[:count] = chunk.keys[group]
        models = work.starts.rows()
        self.start[:count] = models if work.starts.shared else models[group]
        torch._foreach_copy_(list(self.weights.values()), list(self.starts.values()))
        if self.velocity:
            torch._foreach_zero_(list(self.velocity.values()))
        if carried is not None:
            for name, value in self.place.task.carried.unflatten(carried[group]).items():
                self.buffers[name][:count] = value

    def take_steps(self, work: ChunkWork, group: slice, *, exact: bool) -> None:
        """All steps of the clients in the slots."""
        cursor, task = work.batches, self.place.task
        steps, counts = work.chunk.steps[group].tolist(), cursor.counts[:, group].tolist()
        for number in range(max(steps)):
            active = [slot for slot, taken in enumerate(steps) if taken > number]
            if not exact:  # padding has no effect, and a client that has finished has the rate 0
                together = min(power_of_two(len(active)), len(steps))
                self._replay(tuple((slot, self.shape.batch) for slot in range(together)))
                continue
            sizes = [(slot, counts[number][slot]) for slot in active]
            good = tuple((slot, size) for slot, size in sizes if size >= task.smallest_batch)
            if len(good) == len(steps) and len({size for _, size in good}) == 1:
                self._replay(good)
            else:  # batches of other sizes: each client's step is a graph of its own
                for one in good:
                    self._replay((one,))
                left_out = [slot for slot, size in sizes if size < task.smallest_batch]
                if left_out:
                    self.numbers[left_out] += 1

    def _replay(self, slots: tuple[tuple[int, int], ...]) -> None:
        """The next step of some slots, each with a batch of some size."""
        if slots not in self.graphs:
            self.graphs[slots] = self._captured(slots)
        self.graphs[slots]()

    def _captured(self, slots: tuple[tuple[int, int], ...]) -> Callable[[], None]:
        body = partial(self._body, slots)
        if not self.on_gpu:
            return body
        # Trial runs are undone: they take a step, and may change buffers.
        changing = [self.numbers, self.seen, *self.weights.values(), *self.velocity.values(), *self.buffers.values()]
        before = [value.clone() for value in changing]
        state = torch.cuda.get_rng_state(self.device)

        def put_back() -> None:
            torch._foreach_copy_(changing, before)

        def trial() -> None:
            body()
            put_back()

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            graph = captured(body, trial, 2, self.pool)
        put_back()
        if not torch.equal(torch.cuda.get_rng_state(self.device), state):
            torch.cuda.set_rng_state(state, self.device)
            raise RuntimeError("it draws random numbers")
        return graph.replay

    def _body(self, slots: Sequence[tuple[int, int]]) -> None:
        """One step of each slot, each in a stream of its own."""
        if not self.on_gpu:
            for slot, size in slots:
                self._step(slot, size)
            return
        current = torch.cuda.current_stream(self.device)
        for slot, size in slots:
            side = self.streams[slot]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self._step(slot, size)
        for slot, _ in slots:
            current.wait_stream(self.streams[slot])

    def _step(self, slot: int, size: int) -> None:
        """W ← w − rate · (g + λ w + μ (w − w^t)), or with momentum; a client that has finished has the rate 0."""
        sgd, task = self.shape.sgd, self.place.task
        weights = {name: value[slot] for name, value in self.weights.items()}
        number = self.numbers[slot]
        rows, shares = (table[slot].index_select(0, number)[0, :size] for table in (self.rows, self.shares))
        rate = self.rates[slot].index_select(0, number)[0]
        x = trees.map_tree(self._in_order, self.place.clients.inputs(rows, self.dtype))
        y = self.place.clients.targets(rows, self.dtype)
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        buffers = {name: value[slot] for name, value in self.buffers.items()}
        key = rng.step_keys(self.keys[slot], number)[0]
        with self.place.precision.forward(self.device), ForwardRules(key, batched=False, captured=True):
            loss = (task.losses({**leaves, **buffers}, x, y) * shares).sum()
        factor = rate if sgd.is_plain else torch.ones_like(loss)
        with self.place.precision.products():
            gradients: Any = torch.autograd.grad(loss, list(leaves.values()), factor, materialize_grads=True)
        values = list(weights.values())
        with torch.no_grad():
            if not sgd.is_plain:
                gradients = self._direction(slot, values, list(gradients), rate)
            torch._foreach_sub_(values, gradients)
            self.seen[slot] += torch.where(rate > 0, loss.to(torch.float64), 0.0)
            number += 1

    def _direction(self, slot: int, weights: list[Tensor], gradients: list[Tensor], rate: Tensor) -> Sequence[Tensor]:
        """What a step subtracts, for SGD that is more than plain."""
        sgd = self.shape.sgd
        if sgd.weight_decay:
            torch._foreach_add_(gradients, weights, alpha=sgd.weight_decay)
        if sgd.prox:
            starts = [value[slot] for value in self.starts.values()]
            torch._foreach_add_(gradients, torch._foreach_sub(weights, starts), alpha=sgd.prox)
        if sgd.momentum:
            velocity = [value[slot] for value in self.velocity.values()]
            torch._foreach_mul_(velocity, sgd.momentum)
            torch._foreach_add_(velocity, gradients)
            gradients = velocity
        return torch._foreach_mul(gradients, rate)

    def _in_order(self, leaf: Tensor) -> Tensor:
        """An input in the memory order that is wanted."""
        images = self.channels_last and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    def finish(self, update: Tensor) -> Tensor:
        """Write the updates (k, D) of the first clients; their summed losses (k,)."""
        for name, change in self.place.task.layout.unflatten(update).items():
            torch.sub(self.weights[name][: len(update)], self.starts[name][: len(update)], out=change)
        return self.seen[: len(update)].clone()

    def sent(self, count: int) -> Tensor:
        """The carried values (k, C) of the first clients as they are averaged, on the CPU."""
        task = self.place.task
        return task.carried.sent(task.carried.flatten({n: v[:count] for n, v in self.buffers.items()}, self.dtype))
