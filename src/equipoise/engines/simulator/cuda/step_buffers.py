"""Memory on a GPU for the steps of a chunk of clients, and the CUDA graphs that work on it (`step_graphs.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng, trees
from equipoise.engines.simulator.batched_steps import Gradients, stacked_gradients
from equipoise.engines.simulator.client_queue import StartModels
from equipoise.engines.simulator.cuda.adjusted_steps import PLAIN, GradientAdjustments, StepKind, TurnMemory
from equipoise.engines.simulator.cuda.deferred_products import DeferredProducts, ProductsSeen
from equipoise.engines.simulator.cuda.graph_capacity import captured, power_of_two, rounded_batch, rounded_up
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.local_work import ChunkWork, Workplace
from equipoise.engines.simulator.precision import why_no_kernels
from equipoise.solvers.batches import BatchCursor
from equipoise.types import SgdRule

SMALL = 2**20  # parameters of all clients of a chunk: neither memory nor padding matters, but every graph does
_LARGEST_RANKED = 4096  # examples of a client: a kernel ranks them by comparing all pairs
_AT_ONCE = 2**24  # numbers of the inputs of all steps that are gathered together
_WHOLE = 64  # steps of a round that may be one graph
_BEFORE_CAPTURE = 2  # rounds of a shape, before they are made one graph
_SHAPES = 8  # of rounds that are one graph


@dataclass(frozen=True)
class StepShape:
    """What all graphs of one set of buffers share."""

    clients: int
    steps: int
    batch: int
    one_model: bool  # or several, of which every client has a copy to start from
    sgd: SgdRule
    kind: StepKind = PLAIN


class ChunkPlan(NamedTuple):
    """What fixes the work of a chunk but for its numbers."""

    clients: int
    epochs: int  # that need a permutation
    largest: int  # examples of one client
    width: int  # of a batch
    steps: tuple[tuple[int, int], ...]  # of each step the clients at work and the width of their batches, rounded up


def growing_parts(count: int) -> list[range]:
    """`count` steps in parts, the first of one step and each of three times as many as the one before.

    >>> growing_parts(10), growing_parts(1)
    ([range(0, 1), range(1, 4), range(4, 10)], [range(0, 1)])
    """
    parts, size = [range(0, 1)], 3
    while parts[-1].stop < count:
        parts.append(range(parts[-1].stop, min(count, parts[-1].stop + size)))
        size *= 3
    return parts


def working_clients(cursor: BatchCursor) -> Tensor:
    """Which clients work at which step, (T, K)."""
    active = torch.tensor(cursor.active).unsqueeze(1)
    return torch.arange(cursor.counts.shape[1]) < active


@dataclass(frozen=True, eq=False)
class ChunkAnswer:
    """What the clients of a chunk have done, on the device: valid until the next chunk."""

    updates: Tensor  # (C, D), the first k of them
    total: Tensor  # (D,), the weighted sum
    small: Tensor  # (2, k) float64: squared norms and summed losses

    def answer(self) -> tuple[Tensor, Tensor]:
        """Squared norms and summed losses on the CPU, (k,) each."""
        sq_norms, seen = self.small.cpu()
        return sq_norms, seen


class StepBuffers:
    """Memory with fixed places for the steps of some clients, and the graphs that work on it."""

    def __init__(self, place: Workplace, shape: StepShape, gradients_of: Gradients, *, drops: bool) -> None:
        self.place, self.shape, self.gradients_of, self.drops = place, shape, gradients_of, drops
        self.device, self.dtype = place.clients.device, place.task.layout.dtype
        table = (shape.steps, shape.clients, shape.batch)
        self.rows = torch.zeros(table, dtype=torch.int64, device=self.device)
        self.shares = torch.zeros(table, dtype=self.dtype, device=self.device)
        self.rates = torch.zeros(table[:2], dtype=self.dtype, device=self.device)
        self.losses = torch.zeros(table[:2], dtype=self.dtype, device=self.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.mask_keys = torch.zeros(table[:2] if drops else (0, 0), dtype=torch.int64, device=self.device)
        # What a chunk is told, in one copy: keys, first rows, sizes and steps of its clients, their weights in a sum, the rate.
        self.asked = torch.zeros(6, shape.clients, dtype=torch.int64, device=self.device)
        self.host = torch.zeros(6, shape.clients, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.told, self.told_floats = self.host.numpy(), self.host[4:].numpy().view(np.float64)
        self.keys, self.first, self.sizes, self.steps, *_ = self.asked
        self.pi, self.lr = self.asked[4].view(torch.float64), self.asked[5].view(torch.float64)[0]
        rows = 1 if shape.one_model else shape.clients
        self.start = torch.zeros(rows, place.task.layout.dimension, dtype=self.dtype, device=self.device)
        self.finest = 8 if shape.clients * place.task.layout.dimension <= SMALL else 16
        self.weights: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        kind = shape.kind
        self.adjustments: GradientAdjustments | None = None
        if kind.pull != "none" or kind.scaled or kind.shifted:
            self.adjustments = GradientAdjustments(place.task.layout, kind, shape.clients, self.start)
        self.turns: TurnMemory | None = None  # of a solver that takes its steps by turns
        self.graphs: dict[tuple[int, int, int], Callable[[], None]] = {}
        self.products: dict[tuple[int, int], frozenset[int]] = {}  # of steps, by their shape: those that are gradients
        self.examples: tuple[Any, Any] | None = None  # of all steps, while a chunk is captured
        self.whole: dict[ChunkPlan, tuple[Callable[[], None], ChunkAnswer]] = {}
        self.seen_plans: Counter[ChunkPlan] = Counter()
        self.by_kernels = self.device.type == "cuda" and why_no_kernels("batch_tables") is None
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def rounded(self, active: int) -> int:
        """A number of clients rounded up by an eighth at most, or by a quarter where they are few and small."""
        return rounded_up(active, power_of_two(active, 16) // self.finest)

    def plan(self, cursor: BatchCursor, *, whole_batches: bool) -> ChunkPlan:
        """The plan of a chunk; `whole_batches` says that a batch is all examples of a client."""
        most, widest = self.shape.clients, self.shape.batch
        exact = self.shape.kind.turns is not None  # its steps have no rate that could be 0 for a client that has finished
        working = cursor.active if exact else [min(self.rounded(active), most) for active in cursor.active]
        widths = [min(rounded_batch(width), widest) if whole_batches else widest for width in cursor.widest]
        steps = tuple(zip(working, widths, strict=True))
        return ChunkPlan(len(cursor.sizes), cursor.drawn, int(cursor.sizes.max()), cursor.width, steps)

    def load(
        self, starts: StartModels, steps: Tensor, sizes: Tensor, keys: Tensor, first: Tensor, lr: float, weights: Tensor | None
    ) -> None:
        """Tell the device what a chunk is about."""
        count = len(sizes)
        if not self.weights:
            self.start[:] = starts.rows()[0]
            self._make_weights()
        values = (keys, first, sizes, steps)
        for place, each in enumerate(values):
            if each.device.type == "cpu":
                self.told[place, :count] = each.numpy()  # the device has read the last chunk's: its answer was waited for
        self.told_floats[0, :count] = 0.0 if weights is None else weights.numpy()
        self.told_floats[1, 0] = lr
        self.asked.copy_(self.host, non_blocking=True)
        for place, each in enumerate(values):
            if each.device.type != "cpu":
                self.asked[place, :count] = each
        models = starts.rows()
        self.start[: len(models)] = models
        if not self.shape.one_model:
            self.start[len(models) :] = models[0]

    def load_kind(self, work: ChunkWork) -> None:
        """Tell the device what steps of this kind need."""
        if self.adjustments is not None:
            self.adjustments.load(work)
        if self.shape.kind.turns is not None:
            if self.turns is None:
                self.turns = TurnMemory(self.shape.kind.turns, self.weights)
            self.turns.load(work, self.place.task.layout)

    def turn_rows(self, work: ChunkWork) -> Tensor | None:
        """What clients keep of a solver's memory by turns."""
        return None if self.turns is None else self.turns.rows(work, self.place.task.layout)

    def whole_chunk(self, plan: ChunkPlan) -> ChunkAnswer | None:
        """All work of a chunk by one graph; None if there is none for this plan, or not yet."""
        if plan not in self.whole:
            self.seen_plans[plan] += 1
            often = self.seen_plans[plan] > _BEFORE_CAPTURE and len(self.whole) < _SHAPES
            ranked = self.by_kernels and plan.largest <= _LARGEST_RANKED
            if not (often and ranked and len(plan.steps) <= _WHOLE):
                return None
            self.whole[plan] = self._captured_chunk(plan)
        replay, answer = self.whole[plan]
        replay()
        return answer

    def _captured_chunk(self, plan: ChunkPlan) -> tuple[Callable[[], None], ChunkAnswer]:
        """All work of a chunk as a few graphs, the first of them short: the device works while the host starts the next."""
        answers: list[ChunkAnswer] = []

        def body(part: range) -> None:  # the first begins by setting all that is changed, so that a trial leaves nothing behind
            if part.start == 0:
                self.begin(plan)
                self.examples = self._all_examples(plan)
            for number in part:
                self._body(*plan.steps[number], number)
            if part.stop == len(plan.steps):
                answers.append(self.end(plan))

        whole = range(len(plan.steps))
        graphs: list[torch.cuda.CUDAGraph] = []
        for part in growing_parts(len(plan.steps)):
            graphs.append(captured(partial(body, part), partial(body, whole), 1 if not graphs else 0, self.pool))
        self.examples = None

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        return replay, answers[-1]

    def _all_examples(self, plan: ChunkPlan) -> tuple[Any, Any] | None:
        """Inputs and targets of all steps, gathered at once; None if steps differ, or there are too many of them."""
        if len(set(plan.steps)) > 1:
            return None
        clients, batch = plan.steps[0]
        rows, held = self.rows[: len(plan.steps), :clients, :batch], self.place.clients
        if rows.numel() * max(1, held.features) > _AT_ONCE:
            return None
        return held.inputs(rows, self.dtype), held.targets(rows, self.dtype)

    def begin(self, plan: ChunkPlan, cursor: BatchCursor | None = None) -> None:
        """Make the tables of a chunk, by kernels that a graph may hold or from a cursor, and put its starts in place."""
        if self.by_kernels and plan.largest <= _LARGEST_RANKED and self.shape.kind.turns is None:
            self._tables_by_kernels(plan)
        elif cursor is not None:
            self._tables(cursor)
        count = len(plan.steps)
        if self.drops:
            numbers = torch.arange(count, device=self.device).unsqueeze(1)
            torch.add(rng.step_keys(self.keys, numbers), 0, out=self.mask_keys[:count])  # a copy would be slow to start
        self.number.zero_()
        starts = self.place.task.layout.unflatten(self.start)
        torch._foreach_copy_(list(self.weights.values()), [starts[n].expand_as(v) for n, v in self.weights.items()])
        if self.velocity:
            torch._foreach_zero_(list(self.velocity.values()))

    def _tables(self, cursor: BatchCursor) -> None:
        """Which rows each client's steps see, with which weights and rates."""
        places, inside = cursor.batches
        steps, clients, width = places.shape
        first = self.first[:clients].unsqueeze(1)
        self.rates.zero_()
        self.shares.zero_()
        self.rows[:steps, :clients, :width] = places + first
        self.rows[:steps, clients:] = first[0]
        counts = cursor.counts.unsqueeze(2).to(self.device, non_blocking=True)
        working = working_clients(cursor).to(self.device, non_blocking=True)
        self.shares[:steps, :clients, :width] = (inside & working.unsqueeze(2)).to(self.dtype) / counts
        self.rates[:steps, :clients] = working.to(self.dtype) * self.lr

    def _tables_by_kernels(self, plan: ChunkPlan) -> None:
        """What `_tables` does in few operations, where starting some fifty takes a GPU's host longer than the GPU."""
        from equipoise.engines.simulator.cuda.kernels.batch_tables import draw_permutations, fill_tables

        here, count = slice(0, plan.clients), len(plan.steps)
        sizes, steps = self.sizes[here], self.steps[here]
        orders = torch.empty(plan.clients, plan.epochs, plan.largest, dtype=torch.int32, device=self.device)
        draw_permutations(self.keys[here], sizes, sizes, None, orders, plan.width)
        fill_tables(orders, self.first[here], sizes, steps, (self.rows, self.shares, self.rates), count, plan.width)
        self.rates[:count].mul_(self.lr)  # a number handed to a kernel would be rounded to float32

    def _make_weights(self) -> None:
        """Each parameter in the memory order in which its gradient comes: a step then streams through both."""
        named = self.place.task.layout.unflatten(self.start)
        stacked = {name: value.expand(self.shape.clients, *value.shape[1:]) for name, value in named.items()}
        gradients, _ = self._gradients(stacked, self.shape.clients, self.shape.batch)
        self.weights = {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        if self.shape.sgd.momentum:
            self.velocity = {name: torch.empty_like(value) for name, value in self.weights.items()}

    @property
    def scaled(self) -> bool:
        """Whether autograd multiplies gradients by the rates, so that a step is one subtraction of all parameters."""
        return self.gradients_of is stacked_gradients and self.shape.sgd.is_plain and self.shape.kind.is_plain

    def _gradients(
        self, weights: dict[str, Tensor], clients: int, batch: int, factors: Tensor | None = None, number: int | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        shares = self._at(self.shares, number)[:clients, :batch]
        if self.examples is not None and number is not None:
            x, y = (trees.map_tree(lambda leaf: leaf[number], tree) for tree in self.examples)
        else:
            rows = self._at(self.rows, number)[:clients, :batch]
            x, y = self.place.clients.inputs(rows, self.dtype), self.place.clients.targets(rows, self.dtype)
        with self.place.precision.forward(self.device):
            keys = self._at(self.mask_keys, number)[:clients] if self.drops else None
            return self.gradients_of(self.place.task, weights, ExampleBatch(x, y, shares, False, keys=keys, factors=factors))

    def step(self, clients: int, batch: int, turn: int) -> None:
        """The next step of the first `clients`, at a turn of the solver."""
        if (clients, batch, turn) not in self.graphs:
            self.graphs[clients, batch, turn] = self._captured(clients, batch, turn)
        self.graphs[clients, batch, turn]()

    def _captured(self, clients: int, batch: int, turn: int) -> Callable[[], None]:
        body = partial(self._body, clients, batch, None, turn)
        if self.device.type != "cuda":
            return body
        # Trial runs take no step (their rate is 0), but would count one; steps by turns have no rate, and are undone.
        changing = [self.number, self.rates, *self.velocity.values()]
        if self.turns is not None:
            changing += [*self.weights.values(), *(each for slots in self.turns.named.values() for each in slots)]
        before = [value.clone() for value in changing]
        self.rates.zero_()

        def trial() -> None:
            self.number.copy_(before[0])
            body()

        graph = captured(body, trial, 2, self.pool)  # the first trial looks for products
        for value, old in zip(changing, before, strict=True):
            value.copy_(old)
        return graph.replay

    def _at(self, table: Tensor, number: int | None) -> Tensor:
        """What a table holds of a step: that of a number, or the one that the device counts to."""
        return table[number] if number is not None else table.index_select(0, self.number)[0]

    def _body(self, clients: int, batch: int, number: int | None = None, turn: int = 0) -> None:
        """W ← w − rate · (g + λ w + μ (w − w^t)), or with momentum; a client that has finished has the rate 0."""
        sgd = self.shape.sgd
        weights = {name: value[:clients] for name, value in self.weights.items()}
        rates = self._at(self.rates, number)[:clients]
        deferred = None
        if not self.scaled:
            gradients, losses = self._gradients(weights, clients, batch, None, number)
        elif (clients, batch) not in self.products:  # the first such step shows which products are gradients
            with ProductsSeen() as seen:
                gradients, losses = self._gradients(weights, clients, batch, rates, number)
            self.products[clients, batch] = seen.gradients(gradients)
        else:
            with DeferredProducts(self.products[clients, batch]) as deferred:
                gradients, losses = self._gradients(weights, clients, batch, rates, number)
        starts = self.place.task.layout.unflatten(self.start)
        with torch.no_grad():
            if self.turns is not None:
                self.turns.step(turn, self.shape.kind.lr or 0.0, weights, gradients, starts)
            elif self.scaled:
                names = list(weights) if deferred is None else deferred.subtract(weights, gradients)
                if names:
                    torch._foreach_sub_([weights[name] for name in names], [gradients[name] for name in names])
            for name, gradient in gradients.items() if not self.scaled and self.turns is None else ():
                value, rate = weights[name], rates.view(-1, *(1,) * (gradient.dim() - 1))
                if self.adjustments is not None:
                    gradient = self.adjustments.adjusted(name, gradient, value)
                if sgd.weight_decay:
                    gradient = gradient.add(value, alpha=sgd.weight_decay)
                if sgd.prox:
                    gradient = gradient.add(value - starts[name][:clients], alpha=sgd.prox)
                if sgd.momentum:
                    gradient = self.velocity[name][:clients].mul_(sgd.momentum).add_(gradient)
                value.addcmul_(rate, gradient, value=-1)
            if number is not None:
                torch.add(losses, 0, out=self.losses[number, :clients])
                return
            self.losses[:, :clients].index_copy_(0, self.number, losses.unsqueeze(0))
            self.number += 1

    def end(self, plan: ChunkPlan) -> ChunkAnswer:
        """The updates of a chunk's clients, their weighted sum, squared norms and summed losses."""
        count, steps = plan.clients, len(plan.steps)
        updates = torch.empty(count, self.start.shape[1], dtype=self.dtype, device=self.device)
        starts, changes = self.place.task.layout.unflatten(self.start), self.place.task.layout.unflatten(updates)
        for name, change in changes.items():
            torch.sub(self.weights[name][:count], starts[name][:count], out=change)
        total = self.pi[:count].to(self.dtype) @ updates
        sq_norms = torch.linalg.vector_norm(updates, dim=1).double().square()
        working = self.rates[:steps, :count] > 0
        seen = torch.where(working, self.losses[:steps, :count].double(), 0.0).sum(0)
        return ChunkAnswer(updates, total, torch.stack([sq_norms, seen]))
