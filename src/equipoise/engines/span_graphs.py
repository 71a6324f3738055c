"""A round of softmax regression on a GPU as one CUDA graph: examples gathered, all local steps, the sum of updates.

The arithmetic is that of `span.py`; the local steps of a client are one Triton kernel. A graph is captured once for a number of
clients and a largest number of examples, and then replayed: the host hands over one small block of numbers, and gets one back.

Bytes (pixels) are multiplied as they are, which tensor cores do without rounding: a byte has 8 bits, and they keep 11. The
other factor, of float32 with 24 bits, is split into two numbers that they keep whole, so that a product at the fast rate is as
exact as one of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_ALL_BYTES = 2 * 2**30  # of the graphs that are kept for the next round
_BEFORE_CAPTURE = 2  # uses: a shape that does not come again is not worth a graph
Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for: room for so many clients and rows of examples of each model, of any sizes."""

    models: int
    clients: int
    rows: int
    grams: int  # numbers of all Gram matrices
    largest: int  # examples of one client
    epochs: int
    batch: int
    decay: float
    prox: float


@dataclass(frozen=True, eq=False)
class Part:
    """Clients of one job that are trained in one graph."""

    job: int
    places: Numbers | slice  # in the job's cohort
    positions: Numbers  # in the training set
    sizes: Numbers
    steps: Numbers
    weights: Numbers
    stream: int
    layout: tuple[Any, ...] | None = None  # parts with the same one have the same sizes and steps


class SpanGraphs:
    """The graphs of one task and its training clients on one device."""

    def __init__(self, worker: Worker, precision: Precision) -> None:
        self.worker, self.precision = worker, precision
        self.graphs: dict[Shape, list[SpanGraph]] = {}
        self.sizes = worker.clients.host_sizes.numpy()
        self.grams, self.largest = 1, power_of_two(int(self.sizes.max(initial=1)), 16)  # room that every new graph has
        self.features = worker.clients.x.shape[1:].numel()
        self.alike = bool(self.sizes.min() == self.sizes.max())  # then what depends on sizes alone is found once
        self._grouped: dict[tuple[Any, ...], tuple[Numbers, list[Numbers]]] = {}
        self._shapes: dict[tuple[Any, ...], Shape] = {}
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
        largest = int(self.sizes[0]) if self.alike else max(int(found.max(initial=1)) for found in sizes)
        if largest > _LARGEST or lr * (solver.weight_decay + solver.prox) >= 1:
            return None
        if min(solver.batch_size or largest, largest) > 64:  # the kernel holds a batch in registers
            return None
        parts = [
            part for i, (job, found) in enumerate(zip(jobs, sizes, strict=True)) for part in self._parts(i, job, found, solver)
        ]
        # Jobs of one part each are one graph, with a model each; otherwise every part has a graph of its own.
        bundles = [parts] if len(parts) == len(jobs) else [[part] for part in parts]
        started: list[SpanGraph] = []
        self.computed, self.useful = 0, sum(int(found.sum()) for found in sizes)
        for bundle in bundles:
            shape = self._shape(bundle, solver)
            graph = self._graph(shape, taken=started)
            graph.start([jobs[part.job].params for part in bundle], bundle, lr)
            started.append(graph)
            self.computed += shape.models * shape.rows
        return self._collected(jobs, sizes, bundles, started)

    def _parts(self, index: int, job: Job, sizes: Numbers, solver: SGD) -> list[Part]:
        known = self.alike and job.cohort.effort is None
        layout = (len(sizes), solver.batch_size, solver.epochs, solver.steps) if known else None
        if layout is None or layout not in self._grouped:
            found = self._grouping(job, sizes, solver)
            if layout is not None:
                self._grouped[layout] = found
        else:
            found = self._grouped[layout]
        steps, groups = found
        positions, weights = job.cohort.clients.numpy(), job.weights.numpy()
        stream = rng.signed(rng.stream_key(job.cohort.seed, "batches", job.cohort.round))
        if len(groups) == 1:
            return [Part(index, slice(None), positions, sizes, steps, weights, stream, layout)]
        return [
            Part(index, places, positions[places], sizes[places], steps[places], weights[places], stream) for places in groups
        ]

    def _grouping(self, job: Job, sizes: Numbers, solver: SGD) -> tuple[Numbers, list[Numbers]]:
        """Steps of the clients, and which of them are trained in one graph: as many as memory allows."""
        steps = steps_of(solver, sizes, None if job.cohort.effort is None else job.cohort.effort.numpy())
        filled = np.cumsum(4 * sizes * (self.features + sizes)) // _BYTES
        return steps, [np.flatnonzero(filled == number) for number in np.unique(filled)]

    def _shape(self, bundle: Sequence[Part], solver: SGD) -> Shape:
        batch = min(solver.batch_size or _LARGEST, _LARGEST)
        key = tuple((len(part.sizes), int(part.steps.max())) for part in bundle), batch, solver.weight_decay, solver.prox
        if self.alike and key in self._shapes:
            return self._shapes[key]
        clients, rows, grams, epochs = 1, 1, 0, 1
        for part in bundle:
            most = int(part.steps.max())
            if batch < int(part.sizes.max()):
                per_epoch = np.where(part.sizes > batch, -(-part.sizes // batch), 1)
                most = int((-(-part.steps // per_epoch)).max())
            clients, rows = max(clients, len(part.sizes)), max(rows, int(part.sizes.sum()))
            grams, epochs = grams + int((part.sizes * part.sizes).sum()), max(epochs, most)
        # Room that costs memory but no time is the same for all graphs, so that few of them serve all cohorts.
        if grams > self.grams:
            self.grams = power_of_two(grams)
            self.graphs.clear()
            self._shapes.clear()
        shape = Shape(
            len(bundle), padded(clients), padded(rows, power_of_two(rows, 256) // 16), self.grams, self.largest, epochs, batch,
            solver.weight_decay, solver.prox,
        )  # fmt: skip
        if self.alike:
            self._shapes[key] = shape
        return shape

    def _collected(
        self, jobs: Sequence[Job], sizes: Sequence[Numbers], bundles: Sequence[Sequence[Part]], started: Sequence[SpanGraph]
    ) -> list[LocalWork] | None:
        """The results of all graphs, after one wait; None if some update has to be looked at more closely."""
        totals: list[Tensor | None] = [None] * len(jobs)
        for bundle, graph in zip(bundles, started, strict=True):
            copied = graph.totals.clone()
            for part, total in zip(bundle, copied, strict=True):
                so_far = totals[part.job]
                totals[part.job] = total if so_far is None else so_far + total
        if started[0].on_gpu:
            torch.cuda.current_stream().synchronize()
        found = [np.empty((2, len(each))) for each in sizes]
        for bundle, graph in zip(bundles, started, strict=True):
            answers, models = graph.answer.numpy(), graph.shape.models
            clients = answers[:-models].reshape(2, models, -1)
            for model, part in enumerate(bundle):
                sq_norms, losses = clients[:, model, : len(part.sizes)]
                longest = (ABSURD * max(1.0, float(answers[model - models]))) ** 2
                # NaN compares as False. To be left out, or a square that float32 does not hold: rare, and done with care.
                if not (
                    sq_norms.min() > 0 and sq_norms.max() <= longest and part.steps.min() > 0 and np.isfinite(losses.sum())
                ):
                    return None
                mine = found[part.job]
                mine[0, part.places], mine[1, part.places] = sq_norms, losses / part.steps
        return [
            LocalWork(total, torch.from_numpy(numbers[0]), torch.from_numpy(numbers[1]))
            for total, numbers in zip(totals, found, strict=True)
            if total is not None
        ]

    def _graph(self, shape: Shape, taken: Sequence[SpanGraph]) -> SpanGraph:
        """A graph for this shape whose results nobody waits for."""
        held = self.graphs.setdefault(shape, [])
        for graph in held:
            if not any(graph is other for other in taken):
                return graph
        everything = [graph for graphs in self.graphs.values() for graph in graphs]
        if len(everything) >= _GRAPHS or sum(graph.bytes for graph in everything) > _ALL_BYTES:  # memory is not for ever
            for other in [s for s in self.graphs if s != shape]:
                if not any(graph is one for graph in self.graphs[other] for one in taken):
                    del self.graphs[other]
        held.append(SpanGraph(self.worker, shape, self.precision))
        return held[-1]


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


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


class SpanGraph:
    """One captured round for clients with so much room. Results are valid until the next start."""

    def __init__(self, worker: Worker, shape: Shape, precision: Precision) -> None:
        self.worker, self.shape, self.precision, self.clients = worker, shape, precision, worker.clients
        task, device = worker.task, worker.clients.x.device
        self.classes, self.features = task.layout.shapes[task.layout.names.index("weight")]
        self.bias = "bias" in task.layout.names
        models, rows = shape.models, shape.models * shape.rows
        k, pinned = models * shape.clients, device.type == "cuda"

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        # Six numbers of every client, then the streams' keys and the rate: one copy to the device.
        self.host = torch.zeros(6 * k + models + 1, dtype=torch.int64, pin_memory=pinned)
        self.host_clients: Numbers = self.host.numpy()[: 6 * k].reshape(6, models, -1)
        self.host_weights: Numbers = self.host_clients[5].view(np.float64)
        self.host_rest: Numbers = self.host.numpy()[6 * k :]
        self.layout: tuple[Any, ...] | None = None
        self.asked = torch.zeros_like(self.host, device=device)
        self.params, self.totals = (zeros(models, task.layout.dimension) for _ in range(2))
        self.x, self.gram = zeros(rows, self.features), zeros(shape.grams)
        self.scores = power_of_two(self.classes, 16)  # rows of such a length are read and multiplied faster
        bytes_ = self.clients.x.dtype == torch.uint8 and self.clients.scale is not None and not self.clients.shift
        self.scale = self.clients.scale if bytes_ and self.clients.scale is not None else 1.0  # of x, in its products
        self.parts = 2 if bytes_ and not precision.reduced else 1
        self.products = Precision("tf32") if self.parts == 2 else precision
        self.outputs, self.weighted = (zeros(rows, self.parts * self.scores) for _ in range(2))
        self.coefficients = zeros(rows, self.scores)
        self.weight = zeros(models, self.parts * self.scores, self.features)
        self.ones, self.summed = torch.ones(models, device=device), zeros(k, self.scores)
        self.orders = zeros(k, shape.epochs, shape.largest, dtype=torch.int32)
        # Squared norms and summed losses of the clients, then the models' norms.
        self.small = zeros(2 * k + models, dtype=torch.float64)
        self.answer = torch.zeros(2 * k + models, dtype=torch.float64, pin_memory=pinned)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses, self.on_gpu = 0, device.type == "cuda"
        self.sides = [torch.cuda.Stream() for _ in range(2)] if self.on_gpu else []  # type: ignore[no-untyped-call]

    @property
    def bytes(self) -> int:
        """Memory that is kept for the examples and what belongs to each of them."""
        held = (self.x, self.gram, self.outputs, self.weighted, self.coefficients, self.orders)
        return sum(tensor.nbytes for tensor in held)

    def _capture(self) -> None:
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

    def start(self, params: Sequence[Tensor], parts: Sequence[Part], lr: float) -> None:
        """Start a round of one part per model: `totals` (M, D) are the sums of updates; `answer` comes later."""
        layout = tuple(part.layout for part in parts)
        if layout != self.layout or None in layout:
            self._lay_out(parts)
            self.layout = layout
        for model, part in enumerate(parts):
            count = len(part.positions)
            self.host_clients[0, model, :count] = part.positions
            self.host_weights[model, :count] = part.weights
            self.host_rest[model] = part.stream
            self.params[model].copy_(params[model], non_blocking=True)
        self.host_rest[-1:].view(np.float64)[0] = lr
        self.uses += 1
        if self.on_gpu and self.graph is None and self.uses > _BEFORE_CAPTURE:
            self._capture()
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()

    def _lay_out(self, parts: Sequence[Part]) -> None:
        """Tell the device where the clients lie in memory, and how many steps they take."""
        grams = 0
        self.host_clients.fill(0)  # clients without examples or steps
        for model, part in enumerate(parts):
            _, counts, rows_at, grams_at, steps, _ = self.host_clients[:, model, : len(part.positions)]
            counts[:], steps[:] = part.sizes, part.steps
            squares = part.sizes * part.sizes
            np.cumsum(part.sizes[:-1], out=rows_at[1:])
            np.cumsum(squares[:-1], out=grams_at[1:])
            rows_at += model * self.shape.rows
            grams_at += grams
            grams += int(squares.sum())

    def _body(self) -> None:
        from equipoise.engines.kernels import span as kernels

        clients, shape, models = self.clients, self.shape, self.shape.models
        k = models * shape.clients
        self.asked.copy_(self.host, non_blocking=True)
        which, counts, rows_at, grams_at, steps, weights = self.asked[: 6 * k].view(6, k)
        here, streams, rate = (
            kernels.Ragged(which, counts, rows_at, grams_at, shape.largest),
            self.asked[6 * k : -1],
            self.asked[-1:],
        )
        weights, rate = weights.view(torch.float64).float(), rate.view(torch.float64)
        scale, shift = (1.0, 0.0) if clients.scale is None or self.scale != 1.0 else (clients.scale, clients.shift)
        named = self.worker.task.layout.unflatten(self.params)
        halves = [self.weight[:, part * self.scores :][:, : self.classes] for part in range(self.parts)]
        with self._aside(0):
            kernels.draw_orders(clients.keys, here, streams, self.orders, shape.batch)
            self.coefficients.zero_()
            self.weighted.zero_()  # of rows that belong to nobody
        with self._aside(1):
            kernels.split(named["weight"], self.ones, self.scale, halves)
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[2 * k :])
        kernels.gather_examples(clients.x.view(len(clients.x), -1), here, clients.offsets, self.x, scale, shift)
        self._join(1)
        squares, losses = self.small[:k], self.small[k : 2 * k]
        factors, scales = (torch.empty(k, device=self.x.device) for _ in range(2))
        with self.products.products():
            x, outputs = (v.view(models, shape.rows, -1) for v in (self.x, self.outputs))
            torch.bmm(x, self.weight.transpose(1, 2), out=outputs)
            precision = "tf32" if self.products.reduced else "tf32x3"  # the latter is as exact as float32
            kernels.gram_matrices(self.x, here, self.gram, self.scale**2, precision)
            self._join(0)
            kernels.take_steps(
                self.outputs, named.get("bias"), self.gram, clients.y, here, clients.offsets, steps, self.orders, rate,
                self.coefficients, (self.summed, squares, losses, factors, scales), classes=self.classes, batch=shape.batch,
                decay=shape.decay, prox=shape.prox, tf32=self.precision.reduced,
            )  # fmt: skip
            if shape.decay or shape.prox:  # ‖u‖² = ⟨A, G A⟩ + 2 (c−1) ⟨A, X W_0ᵀ⟩ + (c−1)² ‖W_0‖²
                crossed = torch.empty_like(factors)
                kernels.crossed_with_start(
                    self.coefficients, self.outputs, named.get("bias"), scales, here, self.classes, crossed
                )  # fmt: skip
                lengths = self.params.square().sum(1).repeat_interleave(shape.clients, output_size=k)
                squares += 2 * factors * crossed + factors.square() * lengths
            kernels.weigh(self.coefficients, weights, scales, here, self.scale, self.weighted)
            self._sum(weights, factors)
        self.answer.copy_(self.small, non_blocking=True)

    @contextmanager
    def _aside(self, side: int) -> Iterator[None]:
        """Kernels inside run beside those that follow, until they are joined."""
        if not self.on_gpu:
            yield
            return
        self.sides[side].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.sides[side]):
            yield

    def _join(self, side: int) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.sides[side])

    def _sum(self, weights: Tensor, factors: Tensor) -> None:
        """The weighted sums of updates, into `totals`."""
        models, classes, named = self.shape.models, self.classes, self.worker.task.layout.unflatten(self.totals)
        x, weighted = (v.view(models, self.shape.rows, -1) for v in (self.x, self.weighted))
        products = torch.bmm(weighted.transpose(1, 2), x) if models > 1 else torch.mm(weighted[0].t(), x[0]).unsqueeze(0)
        if self.parts == 2:
            torch.add(products[:, :classes], products[:, self.scores : self.scores + classes], out=named["weight"])
        else:
            named["weight"].copy_(products[:, :classes])
        if self.bias:
            totals = torch.bmm(weights.view(models, 1, -1), self.summed.view(models, -1, self.scores))
            named["bias"].copy_(totals[:, 0, :classes])
        if self.shape.decay or self.shape.prox:
            shares = (weights * factors).view(models, -1).sum(1, keepdim=True)
            self.totals.addcmul_(self.params, shares)
