"""A round of softmax regression on a GPU as one CUDA graph: examples gathered, all local steps, the sum of updates.

The arithmetic is that of `span.py`; the local steps of a client are one Triton kernel. A graph is captured once for a number of
clients and a largest number of examples, and then replayed: the host hands over one small block of numbers, and gets one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import rng
from equipoise.aggregators import WeightedMean
from equipoise.engines.arrivals import ABSURD
from equipoise.engines.linear import is_plain_linear
from equipoise.engines.precision import Precision, triton_works
from equipoise.engines.workers import Worker
from equipoise.solvers import SGD
from equipoise.task import cross_entropy
from equipoise.types import Aggregator, Job, LocalSolver, LocalWork

_LARGEST = 2048  # examples of a client: beyond, Gram matrices cost more than the steps they save
_BYTES = 4 * 2**30  # of one graph's examples and Gram matrices
_GRAPHS = 256  # at most
Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for."""

    clients: int
    examples: int
    epochs: int
    batch: int
    decay: float
    prox: float


class SpanGraphs:
    """The graphs of one task and its training clients on one device."""

    def __init__(self, worker: Worker, precision: Precision) -> None:
        self.worker, self.precision = worker, precision
        self.graphs: dict[Shape, list[SpanGraph]] = {}
        self.sizes = worker.clients.host_sizes.numpy()
        clients, task = worker.clients, worker.task
        self.possible = (
            clients.x.device.type == "cuda"
            and task.layout.dtype == torch.float32
            and task.loss is cross_entropy
            and clients.y.dim() == 1
            and (clients.scale is not None or clients.x.is_floating_point())
            and is_plain_linear(task)
            and len(task.layout.shapes[task.layout.names.index("weight")]) == 2
            and not worker.data.malicious
            and triton_works()
        )
        self.computed = self.useful = 0  # rows of examples in the last call, with and without padding

    def sums(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork] | None:
        """The summed updates of the jobs; None if this work is not of the kind."""
        if not self.possible or type(solver) is not SGD or solver.momentum or type(aggregator) is not WeightedMean:
            return None
        lr = solver.learning_rate(jobs[0].cohort.round)
        sizes = [self.sizes[job.cohort.clients.numpy()] for job in jobs]
        largest = max(int(found.max(initial=1)) for found in sizes)
        if largest > _LARGEST or lr * (solver.weight_decay + solver.prox) >= 1:
            return None
        if min(solver.batch_size or largest, largest) > 64:  # the kernel holds a batch in registers
            return None
        self.computed = self.useful = 0
        done = [self._sum(job, solver, lr, found) for job, found in zip(jobs, sizes, strict=True)]
        return None if any(work is None for work in done) else [work for work in done if work is not None]

    def _sum(self, job: Job, solver: SGD, lr: float, sizes: Numbers) -> LocalWork | None:
        steps = steps_of(solver, sizes, None if job.cohort.effort is None else job.cohort.effort.numpy())
        batch = min(solver.batch_size or _LARGEST, _LARGEST)
        per_epoch = np.where(sizes > batch, -(-sizes // batch), 1)
        positions, weights = job.cohort.clients.numpy(), job.weights.numpy()
        stream = rng.signed(rng.stream_key(job.cohort.seed, "batches", job.cohort.round))
        parts, started = groups(sizes, self._most(int(sizes.max(initial=1)))), list[SpanGraph]()
        for part in parts:
            largest, epochs = int(sizes[part].max()), max(1, int((-(-steps[part] // per_epoch[part])).max()))
            shape = Shape(padded(len(part)), padded(largest, 4), epochs, batch, solver.weight_decay, solver.prox)
            graph = self._graph(shape, taken=started)
            graph.start(job.params, positions[part], steps[part], weights[part], stream, lr)
            started.append(graph)
            self.computed += shape.clients * shape.examples
        self.useful += int(sizes.sum())
        total = started[0].total.clone()
        for graph in started[1:]:
            total += graph.total
        if started[0].graph is not None:
            torch.cuda.current_stream().synchronize()
        sq_norms, losses = np.empty(len(sizes)), np.empty(len(sizes))
        for part, graph in zip(parts, started, strict=True):
            sq_norms[part], losses[part] = graph.answer.numpy()[:, : len(part)]
        longest = (ABSURD * max(1.0, float(started[0].answer[0, -1]))) ** 2
        if not (steps.all() and np.isfinite(losses).all() and (sq_norms > 0).all() and (sq_norms <= longest).all()):
            return None  # something to leave out, or a square that float32 does not hold: rare, and done with care
        return LocalWork(total, torch.from_numpy(sq_norms), torch.from_numpy(losses / steps))

    def _graph(self, shape: Shape, taken: Sequence[SpanGraph]) -> SpanGraph:
        """A graph for this shape whose results nobody waits for."""
        held = self.graphs.setdefault(shape, [])
        for graph in held:
            if graph not in taken:
                return graph
        if sum(map(len, self.graphs.values())) >= _GRAPHS:  # memory is not for ever
            for other in [s for s in self.graphs if s != shape]:
                if not any(graph in taken for graph in self.graphs[other]):
                    del self.graphs[other]
        held.append(SpanGraph(self.worker, shape, self.precision))
        return held[-1]

    def _most(self, largest: int) -> int:
        features = self.worker.clients.x.shape[1:].numel()
        return max(1, _BYTES // (4 * largest * (features + largest)))


def steps_of(solver: SGD, sizes: Numbers, effort: Numbers | None) -> Numbers:
    """`solver.local_steps` of many clients at once."""
    if solver.steps is not None:
        return np.full(len(sizes), solver.steps) if effort is None else np.minimum(effort, solver.steps)
    epochs = np.full(len(sizes), solver.epochs) if effort is None else np.minimum(effort, solver.epochs)
    return epochs * (1 if solver.batch_size is None else -(-sizes // solver.batch_size))


def padded(count: int, least: int = 1) -> int:
    """A count rounded up by at most a sixteenth, so that few graphs serve all cohorts, and to a multiple of `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def groups(sizes: Numbers, most: int) -> list[Numbers]:
    """Clients of similar size together, at most `most` in one group: places in `sizes`, largest first.

    A group takes smaller clients in as long as padding stays below a seventh of its examples; the smallest clients, with a
    twentieth of all examples, are one group.
    """
    if len(sizes) <= most and sizes.min(initial=1) == sizes.max(initial=1):
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    ends = np.cumsum(ordered)
    found, start = [], 0
    while start < len(order):
        before = ends[start] - ordered[start]
        inside = np.arange(1, len(order) - start + 1)
        held = ends[start:] - before  # examples of a group that ends at each client
        rest = ends[-1] - before <= 0.05 * ends[-1]
        size = len(inside) if rest else int((inside * ordered[start] <= 1.14 * held).cumprod().sum())
        found.append(order[start : start + min(size, most)])
        start += min(size, most)
    return found


class SpanGraph:
    """One captured round for clients of up to so many examples. Results are valid until the next run."""

    def __init__(self, worker: Worker, shape: Shape, precision: Precision) -> None:
        self.worker, self.shape, self.precision = worker, shape, precision
        task, clients, device = worker.task, worker.clients, worker.clients.x.device
        k, n = shape.clients, shape.examples
        self.classes, self.features = task.layout.shapes[task.layout.names.index("weight")]
        self.bias = "bias" in task.layout.names

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        # Positions, steps and weights of the clients, then the stream's key and the rate: one copy to the device.
        self.host = torch.zeros(3 * k + 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.host_numbers: Numbers = self.host.numpy()
        self.host_floats: Numbers = self.host_numbers[2 * k :].view(np.float64)
        self.asked = torch.zeros(3 * k + 2, dtype=torch.int64, device=device)
        self.params = torch.zeros(task.layout.dimension, dtype=torch.float32, device=device)
        self.x, self.gram = empty(k, n, self.features), empty(k, n, n)
        self.outputs, self.coefficients = empty(k, n, self.classes), empty(k, n, self.classes)
        self.orders = empty(k, shape.epochs, n, dtype=torch.int32)
        self.total = torch.zeros_like(self.params)
        self.small = torch.zeros(2, k + 1, dtype=torch.float64, device=device)  # squared norms and losses; the model's norm
        self.answer = torch.zeros(2, k + 1, dtype=torch.float64, pin_memory=device.type == "cuda")
        self.clients = clients
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        self.asked[2 * self.shape.clients : 3 * self.shape.clients] = 0
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and libraries ready before the capture
                self._body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        self.graph = graph

    def start(self, params: Tensor, positions: Numbers, steps: Numbers, weights: Numbers, stream: int, lr: float) -> None:
        """Start a round. `total` is the sum of the updates; `answer` (2, k + 1) will hold the clients' squared norms and summed
        losses, and last the norm of the model.
        """
        k, count = self.shape.clients, len(positions)
        host, floats = self.host_numbers, self.host_floats
        host[:count], host[count:k] = positions, positions[0]
        host[k : k + count], host[k + count : 2 * k] = steps, 0
        floats[:count], floats[count:k] = weights, 0.0
        host[3 * k], floats[k + 1] = stream, lr
        self.asked.copy_(self.host, non_blocking=True)
        self.params.copy_(params, non_blocking=True)
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()
        self.answer.copy_(self.small, non_blocking=True)

    def _body(self) -> None:
        from equipoise.engines.kernels import span as kernels

        clients, shape, k = self.clients, self.shape, self.shape.clients
        which, steps, stream = self.asked[:k], self.asked[k : 2 * k], self.asked[3 * k : 3 * k + 1]
        weights, rate = self.asked[2 * k : 3 * k].view(torch.float64), self.asked[3 * k + 1 :].view(torch.float64)
        offsets, sizes = clients.offsets, clients.sizes
        scale, shift = (1.0, 0.0) if clients.scale is None else (clients.scale, clients.shift)
        kernels.draw_orders(clients.keys, which, sizes, stream, self.orders, shape.batch)
        data = clients.x.view(len(clients.x), -1)
        kernels.gather_examples(data, which, offsets, sizes, self.x, scale, shift)
        named, totals = self.worker.task.layout.unflatten(self.params), self.worker.task.layout.unflatten(self.total)
        flat, outputs = self.x.view(-1, self.features), self.outputs.view(-1, self.classes)
        with self.precision.products():
            if self.bias:
                torch.addmm(named["bias"], flat, named["weight"].t(), out=outputs)
            else:
                torch.mm(flat, named["weight"].t(), out=outputs)
            torch.bmm(self.x, self.x.transpose(1, 2), out=self.gram)
            self.coefficients.zero_()
            losses, factors, scales = (torch.empty(k, dtype=torch.float32, device=flat.device) for _ in range(3))
            kernels.take_steps(
                self.outputs, self.gram, clients.y, which, offsets, sizes, steps, self.orders, rate, self.coefficients,
                (losses, factors, scales), batch=shape.batch, decay=shape.decay, prox=shape.prox, bias=self.bias,
                tf32=self.precision.reduced,
            )  # fmt: skip
            if shape.decay or shape.prox:
                self.coefficients.mul_(scales.view(-1, 1, 1))
            moved = torch.bmm(self.gram, self.coefficients)
            if self.bias:  # a feature that is 1 adds 1 to every entry of the Gram matrix
                moved += self.coefficients.sum(1, keepdim=True)
            squares = (self.coefficients * moved).view(k, -1).sum(1)
            if shape.decay or shape.prox:
                start = self.params.square().sum()
                squares += 2 * factors * (self.coefficients * self.outputs).view(k, -1).sum(1) + factors.square() * start
            weighted = self.coefficients * weights.to(torch.float32).view(-1, 1, 1)
            torch.mm(weighted.view(-1, self.classes).t(), flat, out=totals["weight"])
            if self.bias:
                torch.sum(weighted.view(-1, self.classes), 0, out=totals["bias"])
            if shape.decay or shape.prox:
                self.total.add_(self.params * (weights.to(torch.float32) @ factors))
        self.small[0, :k], self.small[1, :k] = squares, losses
        self.small[0, k:] = torch.linalg.vector_norm(self.params, dtype=torch.float64)
