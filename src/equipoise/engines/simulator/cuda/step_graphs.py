"""One local step of many clients as a CUDA graph: captured once for a number of clients and a batch, replayed at every step.

A step of a small network is hundreds of short kernels, and starting them one by one takes longer than running them. All that
changes from step to step lies on the device: a table of the examples of every step, the rates, and the number of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.engines.simulator.batched_steps import Batch, Gradients, Starts
from equipoise.engines.simulator.cuda.client_graph import capturing, padded, power_of_two
from equipoise.engines.simulator.precision import Precision, triton_works
from equipoise.engines.simulator.workers import Worker
from equipoise.errors import EquipoiseNotice
from equipoise.solvers import SGD
from equipoise.solvers.batches import BatchCursor
from equipoise.types import LocalSolver

_GRAPHS = 512  # at most; then all are captured anew
_SMALL = 2**20  # parameters of all clients of a chunk: neither memory nor padding matters, but every graph does
_TABLE = 2**23  # numbers in the tables of all steps, of steps that only the largest client takes
_LARGEST_RANKED = 4096  # examples of a client: a kernel ranks them by comparing all pairs


@dataclass(frozen=True)
class Kind:
    """What all graphs of one set of buffers share."""

    clients: int
    steps: int
    batch: int
    one_model: bool  # or several, of which every client has a copy to start from
    momentum: float
    weight_decay: float
    prox: float


class StepGraphs:
    """Steps of SGD for chunks of clients that start from one model or a few. Works, uncaptured, on a CPU as well: for tests."""

    def __init__(self, worker: Worker, gradients_of: Gradients, precision: Precision) -> None:
        self.worker, self.gradients_of, self.precision = worker, gradients_of, precision
        self.buffers: Buffers | None = None
        self.possible = worker.clients.x.device.type == "cuda"
        self.computed = self.useful = 0  # examples in the last chunk, with and without padding

    def fit(self, solver: LocalSolver, starts: Starts, cursor: object) -> bool:
        """Whether this work can be done by replaying steps."""
        plain = type(solver) is SGD and isinstance(cursor, BatchCursor) and cursor.at_once and cursor.repeats == 1
        return self.possible and plain and starts.pull is None and not starts.each_its_own

    def take_steps(
        self, starts: Starts, solver: SGD, lr: float, cursor: BatchCursor, first: Tensor, update: Tensor
    ) -> Tensor | None:
        """As `general_steps`: writes `update` (k, D), returns summed losses (k,); None if the model cannot be captured."""
        buffers = self._buffers(solver, cursor, len(update), alone=starts.shared)
        try:
            buffers.fill(starts, cursor, first, lr)
            computed = 0
            for active, widest in zip(cursor.active, cursor.widest, strict=True):
                clients = min(buffers.rounded(active), buffers.kind.clients)
                batch = buffers.kind.batch if solver.batch_size else min(_rounded(widest), buffers.kind.batch)
                buffers.step(clients, batch)
                computed += clients * batch
        except RuntimeError as failure:  # a forward pass that asks the device, say
            if not self.possible or isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            self.possible, self.buffers = False, None
            reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0][:160]
            warnings.warn(
                EquipoiseNotice(f"The model's steps cannot be captured as a CUDA graph ({reason}); rounds are slower."),
                stacklevel=2,
            )
            torch.cuda.synchronize()
            return None
        self.computed, self.useful = computed, int(cursor.counts[_working(cursor)].sum())
        return buffers.finish(update)

    def _buffers(self, solver: SGD, cursor: BatchCursor, clients: int, *, alone: bool) -> Buffers:
        """Buffers with room for this work, and for larger work that is to be expected: other buffers need other graphs."""
        batch, steps = _rounded(cursor.width), len(cursor.active)
        if solver.batch_size is not None:
            largest = int(self.worker.clients.host_sizes.max())
            batch, most = min(solver.batch_size, largest), max(steps, solver.local_steps(largest))
            steps = most if most * clients * batch <= _TABLE else steps
        room = 2 * power_of_two(clients)
        if room * self.worker.task.layout.dimension > _SMALL:
            room = padded(clients)
        kind = Kind(room, power_of_two(steps), batch, alone, solver.momentum, solver.weight_decay, solver.prox)
        held = self.buffers
        if held is not None:
            most_of_both = {name: max(getattr(kind, name), getattr(held.kind, name)) for name in ("clients", "steps", "batch")}
            kind = replace(kind, **most_of_both)
            if held.kind == kind and len(held.graphs) < _GRAPHS:
                return held
        self.buffers = None  # its memory goes first
        self.buffers = Buffers(self.worker, kind, self.gradients_of, self.precision)
        return self.buffers


def _rounded(batch: int) -> int:
    """A batch of all examples, rounded up by an eighth at most, so that few graphs serve all cohorts."""
    return padded(batch, power_of_two(batch, 16) // 16)


def _working(cursor: BatchCursor) -> Tensor:
    """Which clients work at which step, (T, K)."""
    active = torch.tensor(cursor.active).unsqueeze(1)
    return torch.arange(cursor.counts.shape[1]) < active


class Buffers:
    """Memory with fixed places for the steps of up to so many clients, and the graphs that work on it."""

    def __init__(self, worker: Worker, kind: Kind, gradients_of: Gradients, precision: Precision) -> None:
        self.worker, self.kind, self.gradients_of, self.precision = worker, kind, gradients_of, precision
        self.device, self.dtype = worker.clients.x.device, worker.task.layout.dtype
        table = (kind.steps, kind.clients, kind.batch)
        self.rows = torch.zeros(table, dtype=torch.int64, device=self.device)
        self.shares = torch.zeros(table, dtype=self.dtype, device=self.device)
        self.rates = torch.zeros(table[:2], dtype=self.dtype, device=self.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(kind.clients, dtype=torch.float64, device=self.device)
        rows = 1 if kind.one_model else kind.clients
        self.start = torch.zeros(rows, worker.task.layout.dimension, dtype=self.dtype, device=self.device)
        self.finest = 8 if kind.clients * worker.task.layout.dimension <= _SMALL else 16
        self.weights: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self.by_kernels = self.device.type == "cuda" and triton_works()
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def rounded(self, active: int) -> int:
        """A number of clients rounded up by an eighth at most, or by a quarter where they are few and small."""
        return padded(active, power_of_two(active, 16) // self.finest)

    def fill(self, starts: Starts, cursor: BatchCursor, first: Tensor, lr: float) -> None:
        """Put a chunk's starts and batches in place."""
        if self.by_kernels and int(cursor.sizes.max()) <= _LARGEST_RANKED:
            self._tables_by_kernels(cursor, first, lr)
        else:
            self._tables(cursor, first, lr)
        self.number.zero_()
        self.seen.zero_()
        found = starts.rows()
        self.start[: len(found)] = found
        self.start[len(found) :] = found[0]
        if not self.weights:
            self._make_weights()
        for name, value in self.worker.task.layout.unflatten(self.start).items():
            self.weights[name].copy_(value.expand_as(self.weights[name]))
            if self.kind.momentum:
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
        """The same in few operations, where starting some fifty takes a GPU's host longer than the GPU."""
        from equipoise.engines.simulator.cuda.kernels.batch_tables import draw_orders, fill_tables

        largest, count = int(cursor.sizes.max()), len(cursor.active)
        sizes, steps = torch.stack([cursor.sizes, cursor.steps]).to(self.device, non_blocking=True)
        orders = torch.empty(len(sizes), cursor.drawn, largest, dtype=torch.int32, device=self.device)
        draw_orders(cursor.keys, sizes, sizes, None, orders, cursor.width)
        fill_tables(orders, first, sizes, steps, (self.rows, self.shares, self.rates), count, cursor.width)
        self.rates[:count].mul_(lr)  # a number handed to a kernel would be rounded to float32

    def _make_weights(self) -> None:
        """Each parameter in the memory order in which its gradient comes: a step then streams through both."""
        named = self.worker.task.layout.unflatten(self.start)
        stacked = {name: value.expand(self.kind.clients, *value.shape[1:]) for name, value in named.items()}
        gradients, _ = self._gradients(stacked, self.kind.clients, self.kind.batch)
        self.weights = {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        if self.kind.momentum:
            self.velocity = {name: torch.empty_like(value) for name, value in self.weights.items()}

    def _gradients(self, weights: dict[str, Tensor], clients: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
        rows = self.rows.index_select(0, self.number)[0, :clients, :batch]
        shares = self.shares.index_select(0, self.number)[0, :clients, :batch]
        x, y = self.worker.clients.inputs(rows, self.dtype), self.worker.clients.targets(rows, self.dtype)
        with self.precision.forward(self.device):
            return self.gradients_of(self.worker.task, weights, Batch(x, y, shares, False))

    def step(self, clients: int, batch: int) -> None:
        """The next step of the first `clients`."""
        if (clients, batch) not in self.graphs:
            self.graphs[clients, batch] = self._captured(clients, batch)
        self.graphs[clients, batch]()

    def _captured(self, clients: int, batch: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self._body(clients, batch)
        # Trial runs take no step (their rate is 0), but would count one.
        number, rates, seen = self.number.clone(), self.rates.clone(), self.seen.clone()
        velocity = {name: value.clone() for name, value in self.velocity.items()}
        self.rates.zero_()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(1 if self.graphs else 2):  # the first time libraries take their memory
                self.number.copy_(number)
                self._body(clients, batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool):
            self._body(clients, batch)
        self.number.copy_(number)
        self.rates.copy_(rates)
        self.seen.copy_(seen)
        for name, value in velocity.items():
            self.velocity[name].copy_(value)
        return graph.replay

    def _body(self, clients: int, batch: int) -> None:
        """W ← w − rate · (g + λ w + μ (w − w^t)), or with momentum; a client that has finished has the rate 0."""
        kind = self.kind
        weights = {name: value[:clients] for name, value in self.weights.items()}
        rates = self.rates.index_select(0, self.number)[0, :clients]
        gradients, losses = self._gradients(weights, clients, batch)
        starts = self.worker.task.layout.unflatten(self.start)
        with torch.no_grad():
            for name, gradient in gradients.items():
                value, rate = weights[name], rates.view(-1, *(1,) * (gradient.dim() - 1))
                if kind.weight_decay:
                    gradient = gradient.add(value, alpha=kind.weight_decay)
                if kind.prox:
                    gradient = gradient.add(value - starts[name][:clients], alpha=kind.prox)
                if kind.momentum:
                    gradient = self.velocity[name][:clients].mul_(kind.momentum).add_(gradient)
                value.addcmul_(rate, gradient, value=-1)
            self.seen[:clients] += torch.where(rates > 0, losses.to(torch.float64), 0.0)
            self.number += 1

    def finish(self, update: Tensor) -> Tensor:
        """Write the updates (k, D) of the first clients; their summed losses (k,)."""
        starts = self.worker.task.layout.unflatten(self.start)
        for name, change in self.worker.task.layout.unflatten(update).items():
            torch.sub(self.weights[name][: len(update)], starts[name][: len(update)], out=change)
        return self.seen[: len(update)].clone()
