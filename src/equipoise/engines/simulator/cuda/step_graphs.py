"""One local step of many clients as a CUDA graph: captured once for a number of clients and a batch, replayed at every step.

A step of a small network is hundreds of short kernels, and starting them one by one takes longer than running them. All that
changes from step to step lies on the device: a table of the examples of every step, the rates, and the number of the step. If
rounds have the same shape again and again, one graph does all of a round's work: tables, steps and the sum of updates.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng, trees
from equipoise.core.update_checks import ABSURD
from equipoise.engines.simulator.batched_steps import Gradients, stacked_gradients
from equipoise.engines.simulator.client_queue import StartModels, batch_keys
from equipoise.engines.simulator.convnet_path import fastest_gradients
from equipoise.engines.simulator.cuda.adjusted_steps import PLAIN, GradientAdjustments, StepKind, TurnMemory
from equipoise.engines.simulator.cuda.deferred_products import DeferredProducts, ProductsSeen
from equipoise.engines.simulator.cuda.graph_capacity import captured, power_of_two, rounded_batch, rounded_up
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.linear_blocks import why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, WeightedSums, Workplace
from equipoise.engines.simulator.precision import first_line, why_no_kernels
from equipoise.errors import EquipoiseNotice
from equipoise.solvers.batches import BatchCursor
from equipoise.types import Job, LocalSolver, LocalWork, SgdRule

_GRAPHS = 512  # at most; then all are captured anew
_SMALL = 2**20  # parameters of all clients of a chunk: neither memory nor padding matters, but every graph does
_TABLE = 2**23  # numbers in the tables of all steps, of steps that only the largest client takes
_LARGEST_RANKED = 4096  # examples of a client: a kernel ranks them by comparing all pairs
_AT_ONCE = 2**24  # numbers of the inputs of all steps that are gathered together
_WHOLE = 64  # steps of a round that may be one graph
_BEFORE_CAPTURE = 2  # rounds of a shape, before they are made one graph
_SHAPES = 8  # of rounds that are one graph
_KINDS = 4  # of steps that have buffers at once, if models are not large
_LARGE = 2**28  # parameters of all clients of a chunk: there one kind of steps has buffers at a time


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


class StepGraphs(LocalPath):
    """SGD of clients that start from one model, a few, or each from its own, on a GPU. Works, uncaptured, on a CPU for tests.

    Gradients may be pulled, shifted or scaled (Ditto, SCAFFOLD, frozen parts), and a solver may take its steps by turns.
    """

    name = "step graphs"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.buffers: StepBuffers | None = None  # of the last chunk
        self._held: dict[tuple[bool, SgdRule, StepKind], StepBuffers] = {}
        self.obstacle = _obstacle(place)
        self._last: tuple[ChunkPlan, BatchCursor] | None = None
        self._solver: LocalSolver | None = None  # of the last chunk

    @property
    def computed(self) -> int:
        """Examples in the last chunk, padding included."""
        return 0 if self._last is None else sum(clients * batch for clients, batch in self._last[0].steps)

    @property
    def useful(self) -> int:
        """Examples in the last chunk without padding."""
        return 0 if self._last is None else int(self._last[1].counts[_working(self._last[1])].sum())

    @cached_property
    def drops(self) -> bool:
        """Whether the model draws masks of dropout."""
        return self.place.task.drops(self.place.data)

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient that is captured."""
        if self.place.clients.why_not_plain is not None:
            return stacked_gradients
        return fastest_gradients(self.place.task, self.place.device, self.place.precision)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Steps of SGD, also by adjusted gradients, and steps by turns; of linear models and large batches the plain ones."""
        if self.obstacle is not None:
            return self.obstacle
        if rule.own_models or not StepKind.of(rule).is_plain:
            if why_not_linear(self.place.task) is None:
                return "linear models of clients have a path of their own"
            if rule.whole_clients:
                return "a step sees all examples of a client, and models are the clients' own"
        if rule.traits.by_turns and self.drops:
            return "steps by turns would need the masks of dropout of their first turn"
        return None if rule.traits.by_turns or rule.traits.adjusted_sgd is not None else rule.why_not_sgd()

    def supports(self, work: ChunkWork) -> str | None:
        """All batches must fit into one table. A model that could not be captured is not tried again."""
        return self.obstacle or (None if work.batches.at_once else "the batches of all steps are too many for one table")

    def run(self, work: ChunkWork) -> ChunkResult | None:
        """Replay a step as often as the clients take one; None if the model cannot be captured."""
        cursor, count = work.batches, len(work.chunk)
        buffers = self._buffers(work.rule, cursor, count, alone=work.starts.shared)
        plan = buffers.plan(cursor, whole_batches=work.rule.solver.batch_size is None)
        plain = buffers.shape.kind.is_plain
        weights = work.weights if work.starts.shared and plain else None
        try:
            first = work.first_rows.squeeze(1)
            buffers.load(work.starts, cursor.steps, cursor.sizes, cursor.keys, first, work.rule.lr, weights)
            buffers.load_kind(work)
            result = buffers.whole_chunk(plan) if buffers.turns is None else None
            if result is None:
                buffers.begin(plan, cursor)
                turns = work.rule.traits.repeats
                for number, (clients, batch) in enumerate(plan.steps):
                    buffers.step(clients, batch, number % turns)
                result = buffers.end(plan)
        except RuntimeError as failure:  # a forward pass that asks the device, say
            if self.obstacle is not None or isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            self.obstacle = f"steps cannot be captured as a CUDA graph ({first_line(failure)})"
            self.release()
            warnings.warn(EquipoiseNotice(f"Rounds of this model are slower: {self.obstacle}."), stacklevel=2)
            torch.cuda.synchronize()
            return None
        self._last, self._solver = (plan, cursor), work.rule.solver
        sq_norms, seen = result.answer()
        if weights is not None and bool((torch.isfinite(sq_norms) & (sq_norms > 0)).all()):
            return work.result(WeightedSums(result.total.clone().unsqueeze(0), sq_norms), seen)
        updates = work.new_updates().copy_(result.updates[:count])
        return work.result(updates, seen, work.rows_after(updates) if buffers.turns is None else buffers.turn_rows(work))

    @cached_property
    def alike(self) -> bool:
        """Whether all clients have as many examples, so that cohorts of one size are the same work."""
        sizes = self.place.clients.host_sizes
        return bool((sizes == sizes[0]).all()) and not self.place.data.malicious

    def sum_again(self, job: Job, rule: LocalRule) -> LocalWork | None:
        """The weighted sum of a cohort's updates by the graph of the last chunk, if that was the same work but for its
        numbers; else None. Nothing is sorted, cut into chunks or looked up again, which small models would feel.
        """
        buffers, last, cohort = self.buffers, self._last, job.cohort
        if buffers is None or last is None or not self.alike or rule.solver is not self._solver or job.params.dim() != 1:
            return None
        plan, cursor = last
        known = plan in buffers.whole and plan.clients == len(cohort) and buffers.shape.one_model
        plain = not rule.own_models and StepKind.of(rule).is_plain and buffers.shape.kind.is_plain
        if not known or not plain or cohort.effort is not None or cohort.rows is not None:
            return None
        keys, first = batch_keys(cohort, self.place.clients), self._first_rows(cohort.clients)
        buffers.load(StartModels(job.params.unsqueeze(0), cohort.clients), cursor.steps, cursor.sizes, keys, first, rule.lr,
                     job.weights)  # fmt: skip
        result = buffers.whole_chunk(plan)
        if result is None:
            return None
        total = result.total.clone()  # asked for while the device works
        sq_norms, seen = result.answer()
        numbers, losses = sq_norms.numpy(), seen.numpy() / cursor.steps.numpy()
        # NaN compares as False. To be left out, or a square that float32 does not hold: rare, and done in the ordinary way.
        if not (numbers.min() > 0 and numbers.max() <= ABSURD**2 and math.isfinite(losses.sum())):
            return None
        return LocalWork(total, sq_norms, torch.from_numpy(losses))

    @cached_property
    def _host_starts(self) -> Tensor | None:
        """The first row of every client, on the CPU; None if rows move, as those of cohorts that are read one at a time do."""
        clients = self.place.clients
        return clients.starts.cpu() if clients.in_turn else None

    def _first_rows(self, clients: Tensor) -> Tensor:
        """The row of the first example of each client at these positions, on the CPU where it is known there."""
        if self._host_starts is not None:
            return self._host_starts[clients]
        return self.place.clients.starts[clients.to(self.place.device, non_blocking=True)]

    def release(self) -> None:
        """Free memory and graphs."""
        self.buffers = None
        self._held.clear()

    def _buffers(self, rule: LocalRule, cursor: BatchCursor, clients: int, *, alone: bool) -> StepBuffers:
        """Buffers that hold this work, and larger work that is to be expected: other buffers need other graphs."""
        solver, batch, steps = rule.solver, rounded_batch(cursor.width), len(cursor.active)
        if solver.batch_size is not None:
            largest = int(self.place.clients.host_sizes.max())
            batch, most = min(solver.batch_size, largest), max(steps, solver.local_steps(largest))
            steps = most if most * clients * batch <= _TABLE else steps
        capacity = 2 * power_of_two(clients)
        if capacity * self.place.task.layout.dimension > _SMALL:
            capacity = rounded_up(clients)
        sgd, kind = rule.traits.sgd or rule.traits.adjusted_sgd or SgdRule(0.0, 0.0, 0.0), StepKind.of(rule)
        shape = StepShape(capacity, power_of_two(steps), batch, alone, sgd, kind)
        held = self._held.get((alone, sgd, kind))
        if held is not None:
            sizes = {name: max(getattr(shape, name), getattr(held.shape, name)) for name in ("clients", "steps", "batch")}
            shape = replace(shape, **sizes)
            if held.shape == shape and len(held.graphs) < _GRAPHS:
                self.buffers = held
                return held
        few = len(self._held) >= _KINDS or shape.clients * self.place.task.layout.dimension > _LARGE
        self.buffers = held = None  # their memory goes first
        if few:
            self._held.clear()
        self._held.pop((alone, sgd, kind), None)
        self.buffers = self._held[alone, sgd, kind] = StepBuffers(self.place, shape, self.gradients, drops=self.drops)
        return self.buffers


def _obstacle(place: Workplace) -> str | None:
    """Why steps on a workplace cannot be captured, whatever they are; None if they can."""
    if place.device.type != "cuda":
        return "it needs a CUDA device"
    return "sequences of different lengths need batches of different shapes" if place.clients.has_sequences else None


def _working(cursor: BatchCursor) -> Tensor:
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
        self.finest = 8 if shape.clients * place.task.layout.dimension <= _SMALL else 16
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
        answers: list[ChunkAnswer] = []

        def body() -> None:  # begins by setting all that it changes, so that a trial leaves nothing behind
            self.begin(plan)
            self.examples = self._all_examples(plan)
            for number, (clients, batch) in enumerate(plan.steps):
                self._body(clients, batch, number)
            self.examples = None
            answers.append(self.end(plan))

        graph = captured(body, body, 1, self.pool)
        return graph.replay, answers[-1]

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
            self.mask_keys[:count] = rng.step_keys(self.keys, numbers)
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
        working = _working(cursor).to(self.device, non_blocking=True)
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
                self.losses[number, :clients] = losses
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
