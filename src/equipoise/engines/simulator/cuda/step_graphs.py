"""One local step of many clients as a CUDA graph: captured once for a number of clients and a batch, replayed at every step.

A step of a small network is hundreds of short kernels, and starting them one by one takes longer than running them. All that
changes from step to step lies on the device: a table of the examples of every step, the rates, and the number of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.engines.simulator.batched_steps import Gradients, stacked_gradients
from equipoise.engines.simulator.client_queue import StartModels
from equipoise.engines.simulator.convnet_path import fastest_gradients
from equipoise.engines.simulator.cuda.graph_capacity import captured, power_of_two, rounded_batch, rounded_up
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.precision import first_line, why_no_kernels
from equipoise.errors import EquipoiseNotice
from equipoise.solvers.batches import BatchCursor
from equipoise.types import SgdRule

_GRAPHS = 512  # at most; then all are captured anew
_SMALL = 2**20  # parameters of all clients of a chunk: neither memory nor padding matters, but every graph does
_TABLE = 2**23  # numbers in the tables of all steps, of steps that only the largest client takes
_LARGEST_RANKED = 4096  # examples of a client: a kernel ranks them by comparing all pairs


@dataclass(frozen=True)
class StepShape:
    """What all graphs of one set of buffers share."""

    clients: int
    steps: int
    batch: int
    one_model: bool  # or several, of which every client has a copy to start from
    sgd: SgdRule


class StepGraphs(LocalPath):
    """SGD of clients that start from one model or a few, on a GPU. Works, uncaptured, on a CPU as well: for tests."""

    name = "step graphs"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.buffers: StepBuffers | None = None
        self.obstacle = _obstacle(place)
        self.computed = self.useful = 0  # examples in the last chunk, with and without padding

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient that is captured."""
        if self.place.clients.why_not_plain is not None:
            return stacked_gradients
        return fastest_gradients(self.place.task, self.place.device, self.place.precision)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Steps of SGD from shared models, without a pull."""
        if rule.own_models or rule.pull != "none":
            return "clients have models of their own"
        return self.obstacle or rule.why_not_sgd()

    def supports(self, work: ChunkWork) -> str | None:
        """All batches must fit into one table. A model that could not be captured is not tried again."""
        return self.obstacle or (None if work.batches.at_once else "the batches of all steps are too many for one table")

    def run(self, work: ChunkWork) -> ChunkResult | None:
        """Replay a step as often as the clients take one; None if the model cannot be captured."""
        cursor, update = work.batches, work.new_updates()
        buffers = self._buffers(work.rule, cursor, len(update), alone=work.starts.shared)
        try:
            buffers.fill(work.starts, cursor, work.first_rows, work.rule.lr)
            computed = 0
            for active, widest in zip(cursor.active, cursor.widest, strict=True):
                clients = min(buffers.rounded(active), buffers.shape.clients)
                batch = buffers.shape.batch if work.rule.solver.batch_size else min(rounded_batch(widest), buffers.shape.batch)
                buffers.step(clients, batch)
                computed += clients * batch
        except RuntimeError as failure:  # a forward pass that asks the device, say
            if self.obstacle is not None or isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            self.obstacle, self.buffers = f"steps cannot be captured as a CUDA graph ({first_line(failure)})", None
            warnings.warn(EquipoiseNotice(f"Rounds of this model are slower: {self.obstacle}."), stacklevel=2)
            torch.cuda.synchronize()
            return None
        self.computed, self.useful = computed, int(cursor.counts[_working(cursor)].sum())
        return work.result(update, buffers.finish(update))

    def release(self) -> None:
        """Free memory and graphs."""
        self.buffers = None

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
        shape = StepShape(capacity, power_of_two(steps), batch, alone, rule.sgd)
        held = self.buffers
        if held is not None:
            sizes = {name: max(getattr(shape, name), getattr(held.shape, name)) for name in ("clients", "steps", "batch")}
            shape = replace(shape, **sizes)
            if held.shape == shape and len(held.graphs) < _GRAPHS:
                return held
        self.buffers = None  # its memory goes first
        self.buffers = StepBuffers(self.place, shape, self.gradients)
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


class StepBuffers:
    """Memory with fixed places for the steps of some clients, and the graphs that work on it."""

    def __init__(self, place: Workplace, shape: StepShape, gradients_of: Gradients) -> None:
        self.place, self.shape, self.gradients_of = place, shape, gradients_of
        self.device, self.dtype = place.clients.device, place.task.layout.dtype
        table = (shape.steps, shape.clients, shape.batch)
        self.rows = torch.zeros(table, dtype=torch.int64, device=self.device)
        self.shares = torch.zeros(table, dtype=self.dtype, device=self.device)
        self.rates = torch.zeros(table[:2], dtype=self.dtype, device=self.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.keys = torch.zeros(shape.clients, dtype=torch.int64, device=self.device)  # of the clients' masks of dropout
        self.seen = torch.zeros(shape.clients, dtype=torch.float64, device=self.device)
        rows = 1 if shape.one_model else shape.clients
        self.start = torch.zeros(rows, place.task.layout.dimension, dtype=self.dtype, device=self.device)
        self.finest = 8 if shape.clients * place.task.layout.dimension <= _SMALL else 16
        self.weights: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self.by_kernels = self.device.type == "cuda" and why_no_kernels("batch_tables") is None
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def rounded(self, active: int) -> int:
        """A number of clients rounded up by an eighth at most, or by a quarter where they are few and small."""
        return rounded_up(active, power_of_two(active, 16) // self.finest)

    def fill(self, starts: StartModels, cursor: BatchCursor, first: Tensor, lr: float) -> None:
        """Put a chunk's starts and batches in place."""
        if self.by_kernels and int(cursor.sizes.max()) <= _LARGEST_RANKED:
            self._tables_by_kernels(cursor, first, lr)
        else:
            self._tables(cursor, first, lr)
        self.number.zero_()
        self.seen.zero_()
        self.keys[: len(cursor.keys)] = cursor.keys
        models = starts.rows()
        self.start[: len(models)] = models
        self.start[len(models) :] = models[0]
        if not self.weights:
            self._make_weights()
        for name, value in self.place.task.layout.unflatten(self.start).items():
            self.weights[name].copy_(value.expand_as(self.weights[name]))
            if self.shape.sgd.momentum:
                self.velocity[name].zero_()

    def _tables(self, cursor: BatchCursor, first: Tensor, lr: float) -> None:
        """Which rows each client's steps see, with which weights and rates."""
        places, inside = cursor.batches
        steps, clients, width = places.shape
        self.rates.zero_()
        self.shares.zero_()
        self.rows[:steps, :clients, :width] = places + first
        self.rows[:steps, clients:] = first[0]
        counts = cursor.counts.unsqueeze(2).to(self.device, non_blocking=True)
        working = _working(cursor).to(self.device, non_blocking=True)
        self.shares[:steps, :clients, :width] = (inside & working.unsqueeze(2)).to(self.dtype) / counts
        self.rates[:steps, :clients] = working.to(self.dtype) * lr

    def _tables_by_kernels(self, cursor: BatchCursor, first: Tensor, lr: float) -> None:
        """What `_tables` does in few operations, where starting some fifty takes a GPU's host longer than the GPU."""
        from equipoise.engines.simulator.cuda.kernels.batch_tables import draw_permutations, fill_tables

        largest, count = int(cursor.sizes.max()), len(cursor.active)
        sizes, steps = torch.stack([cursor.sizes, cursor.steps]).to(self.device, non_blocking=True)
        orders = torch.empty(len(sizes), cursor.drawn, largest, dtype=torch.int32, device=self.device)
        draw_permutations(cursor.keys, sizes, sizes, None, orders, cursor.width)
        fill_tables(orders, first, sizes, steps, (self.rows, self.shares, self.rates), count, cursor.width)
        self.rates[:count].mul_(lr)  # a number handed to a kernel would be rounded to float32

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
        return self.gradients_of is stacked_gradients and self.shape.sgd.is_plain

    def _gradients(
        self, weights: dict[str, Tensor], clients: int, batch: int, factors: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        rows = self.rows.index_select(0, self.number)[0, :clients, :batch]
        shares = self.shares.index_select(0, self.number)[0, :clients, :batch]
        x, y = self.place.clients.inputs(rows, self.dtype), self.place.clients.targets(rows, self.dtype)
        with self.place.precision.forward(self.device):
            keys = rng.step_keys(self.keys[:clients], self.number)
            return self.gradients_of(self.place.task, weights, ExampleBatch(x, y, shares, False, keys=keys, factors=factors))

    def step(self, clients: int, batch: int) -> None:
        """The next step of the first `clients`."""
        if (clients, batch) not in self.graphs:
            self.graphs[clients, batch] = self._captured(clients, batch)
        self.graphs[clients, batch]()

    def _captured(self, clients: int, batch: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            return partial(self._body, clients, batch)
        # Trial runs take no step (their rate is 0), but would count one.
        number, rates, seen = self.number.clone(), self.rates.clone(), self.seen.clone()
        velocity = {name: value.clone() for name, value in self.velocity.items()}
        self.rates.zero_()

        def trial() -> None:
            self.number.copy_(number)
            self._body(clients, batch)

        graph = captured(partial(self._body, clients, batch), trial, 1 if self.graphs else 2, self.pool)
        self.number.copy_(number)
        self.rates.copy_(rates)
        self.seen.copy_(seen)
        for name, value in velocity.items():
            self.velocity[name].copy_(value)
        return graph.replay

    def _body(self, clients: int, batch: int) -> None:
        """W ← w − rate · (g + λ w + μ (w − w^t)), or with momentum; a client that has finished has the rate 0."""
        sgd = self.shape.sgd
        weights = {name: value[:clients] for name, value in self.weights.items()}
        rates = self.rates.index_select(0, self.number)[0, :clients]
        gradients, losses = self._gradients(weights, clients, batch, rates if self.scaled else None)
        starts = self.place.task.layout.unflatten(self.start)
        with torch.no_grad():
            if self.scaled:
                torch._foreach_sub_(list(weights.values()), [gradients[name] for name in weights])
            for name, gradient in gradients.items() if not self.scaled else ():
                value, rate = weights[name], rates.view(-1, *(1,) * (gradient.dim() - 1))
                if sgd.weight_decay:
                    gradient = gradient.add(value, alpha=sgd.weight_decay)
                if sgd.prox:
                    gradient = gradient.add(value - starts[name][:clients], alpha=sgd.prox)
                if sgd.momentum:
                    gradient = self.velocity[name][:clients].mul_(sgd.momentum).add_(gradient)
                value.addcmul_(rate, gradient, value=-1)
            self.seen[:clients] += torch.where(rates > 0, losses.to(torch.float64), 0.0)
            self.number += 1

    def finish(self, update: Tensor) -> Tensor:
        """Write the updates (k, D) of the first clients; their summed losses (k,)."""
        starts = self.place.task.layout.unflatten(self.start)
        for name, change in self.place.task.layout.unflatten(update).items():
            torch.sub(self.weights[name][: len(update)], starts[name][: len(update)], out=change)
        return self.seen[: len(update)].clone()
