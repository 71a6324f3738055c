"""A round of softmax regression on a GPU as one CUDA graph: examples gathered, all local steps, the sum of updates.

The arithmetic is that of `span.py`; the local steps of a client are one Triton kernel. A graph is captured once for a number of
clients and a largest number of examples, and then replayed: the host hands over one small block of numbers, and gets one back.

Bytes (pixels) are multiplied as they are, which tensor cores do without rounding: a byte has 8 bits, and they keep 11. The
other factor, of float32 with 24 bits, is split into two numbers that they keep whole, so that a product at the fast rate is as
exact as one of float32.
"""

from __future__ import annotations

import math
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
    server: float | None  # the rate of the server's step, if that is taken, too


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
    all_work: bool  # each of them takes a step
    layout: tuple[Any, ...] | None = None  # parts with the same one have the same sizes and steps


class SpanGraphs:
    """The graphs of one task and its training clients on one device."""

    def __init__(self, worker: Worker, precision: Precision) -> None:
        self.worker, self.precision = worker, precision
        self.graphs: dict[Shape, list[SpanGraph]] = {}
        self.models: dict[int, Models] = {}
        self.sizes = worker.clients.host_sizes.numpy()
        self.grams, self.largest = 1, power_of_two(int(self.sizes.max(initial=1)), 16)  # room that every new graph has
        self.features = worker.clients.x.shape[1:].numel()
        self.alike = bool(self.sizes.min() == self.sizes.max())  # then what depends on sizes alone is found once
        self._grouped: dict[tuple[Any, ...], tuple[Numbers, bool, list[Numbers]]] = {}
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
        """The summed updates of the jobs; None if this work is not of the kind, or has to be looked at more closely."""
        started = self.begin(jobs, solver, aggregator)
        return None if started is None else started.collected()

    def begin(
        self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator, server: float | None = None
    ) -> Underway | None:
        """Start the same, perhaps with the server's step w + server · total; None if this work is not of the kind."""
        if not self.possible or type(solver) is not SGD or solver.momentum or type(aggregator) is not WeightedMean:
            return None
        lr = solver.learning_rate(jobs[0].cohort.round)
        sizes = [self._sizes_of(job) for job in jobs]
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
        if server is not None and len(bundles) > 1:
            return None
        started = Underway([len(found) for found in sizes])
        self.computed = 0
        self.useful = sum(len(found) * largest if self.alike else int(found.sum()) for found in sizes)
        for bundle in bundles:
            shape = self._shape(bundle, solver, server)
            started.add(self._graph(shape), bundle, [jobs[part.job].params for part in bundle], lr)
            self.computed += shape.models * shape.rows
        return started

    @property
    def bytes_under_way(self) -> int:
        """Memory of the graphs whose results somebody waits for."""
        return sum(graph.bytes for graphs in self.graphs.values() for graph in graphs if graph.awaited)

    def _sizes_of(self, job: Job) -> Numbers:
        """How many examples the clients of a job have, (K,)."""
        found: Numbers = self.sizes[: len(job.cohort)] if self.alike else self.sizes[job.cohort.clients.numpy()]
        return found

    def _parts(self, index: int, job: Job, sizes: Numbers, solver: SGD) -> list[Part]:
        known = self.alike and job.cohort.effort is None
        layout = (len(sizes), solver.batch_size, solver.epochs, solver.steps) if known else None
        if layout is None or layout not in self._grouped:
            found = self._grouping(job, sizes, solver)
            if layout is not None:
                self._grouped[layout] = found
        else:
            found = self._grouped[layout]
        steps, all_work, groups = found
        positions, weights = job.cohort.clients.numpy(), job.weights.numpy()
        stream = rng.signed(rng.stream_key(job.cohort.seed, "batches", job.cohort.round))
        if len(groups) == 1:
            return [Part(index, slice(None), positions, sizes, steps, weights, stream, all_work, layout)]
        return [
            Part(index, places, positions[places], sizes[places], steps[places], weights[places], stream, all_work)
            for places in groups
        ]

    def _grouping(self, job: Job, sizes: Numbers, solver: SGD) -> tuple[Numbers, bool, list[Numbers]]:
        """Steps of the clients, whether all take some, and who is trained in one graph: as many as memory allows."""
        steps = steps_of(solver, sizes, None if job.cohort.effort is None else job.cohort.effort.numpy())
        filled = np.cumsum(4 * sizes * (self.features + sizes)) // _BYTES
        return steps, bool(steps.min(initial=1) > 0), [np.flatnonzero(filled == number) for number in np.unique(filled)]

    def _shape(self, bundle: Sequence[Part], solver: SGD, server: float | None = None) -> Shape:
        layouts = tuple(part.layout for part in bundle)
        key = layouts, solver.weight_decay, solver.prox, server
        if None not in layouts and key in self._shapes:
            return self._shapes[key]
        batch = min(solver.batch_size or _LARGEST, _LARGEST)
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
            solver.weight_decay, solver.prox, server,
        )  # fmt: skip
        if None not in layouts:
            self._shapes[key] = shape
        return shape

    def _graph(self, shape: Shape) -> SpanGraph:
        """A graph for this shape whose results nobody waits for."""
        held = self.graphs.setdefault(shape, [])
        for graph in held:
            if not graph.awaited:
                return graph
        everything = [graph for graphs in self.graphs.values() for graph in graphs]
        if len(everything) >= _GRAPHS or sum(graph.bytes for graph in everything) > _ALL_BYTES:  # memory is not for ever
            for other in [s for s in self.graphs if s != shape]:
                if not any(graph.awaited for graph in self.graphs[other]):
                    del self.graphs[other]
        models = Models(shape.models, self.worker)
        if shape.server is not None:  # a step goes on from the last one, whichever graph took it
            models = self.models.setdefault(shape.models, models)
        held.append(SpanGraph(self.worker, shape, self.precision, models))
        return held[-1]


class Models:
    """The parameters of some models on the device, in the memory that graphs read, and write after a server's step."""

    def __init__(self, count: int, worker: Worker) -> None:
        self.params = torch.zeros(count, worker.task.layout.dimension, device=worker.clients.x.device)
        self.rows = self.params.unbind()
        self.handed_out: tuple[Tensor | None, ...] = (None,) * count

    def take(self, given: Sequence[Tensor]) -> None:
        """Have these parameters here; what was last handed out is here already."""
        for row, params, known in zip(self.rows, given, self.handed_out, strict=True):
            if params is not known:
                row.copy_(params, non_blocking=True)
        self.handed_out = (None,) * len(self.rows)

    def hand_out(self) -> tuple[Tensor, ...]:
        """A copy of the parameters, (D,) each."""
        found: tuple[Tensor, ...] = (self.rows[0].clone(),) if len(self.rows) == 1 else self.params.clone().unbind()
        self.handed_out = found
        return found


class Underway:
    """The work of some jobs, started on the device.

    With a server's step `params` are each job's next parameters (D,). They are good if every update can be used.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self.graphs: list[SpanGraph] = []
        self.bundles: list[Sequence[Part]] = []
        self.totals: list[Tensor | None] = [None] * len(counts)
        self.params: tuple[Tensor, ...] = ()

    def add(self, graph: SpanGraph, bundle: Sequence[Part], params: Sequence[Tensor], lr: float) -> None:
        """Start a graph, too."""
        graph.awaited = True
        self.graphs.append(graph)
        self.bundles.append(bundle)
        graph.start(params, bundle, lr)
        if graph.shape.server is not None:
            self.params = graph.models.hand_out()
        for part, total in zip(bundle, graph.each_total, strict=True):
            so_far = self.totals[part.job]
            self.totals[part.job] = total if so_far is None else so_far + total

    def __del__(self) -> None:
        for graph in self.graphs:
            graph.awaited = False

    def collected(self) -> list[LocalWork] | None:
        """The work, after a wait; None if some of it has to be looked at more closely."""
        found: list[Numbers | None] = [None] * len(self.counts)
        for bundle, graph in zip(self.bundles, self.graphs, strict=True):
            clients, lengths, after = graph.answers()
            if not math.isfinite(after.sum()):  # a model is lost
                return None
            for part, numbers, length in zip(bundle, clients, lengths, strict=True):
                numbers = numbers[:, : len(part.sizes)].copy()  # the next start of the graph writes over them
                sq_norms, losses = numbers
                longest = (ABSURD * max(1.0, float(length))) ** 2
                # NaN compares as False. To be left out, or a square that float32 does not hold: rare, and done with care.
                if not (part.all_work and sq_norms.min() > 0 and sq_norms.max() <= longest and math.isfinite(losses.sum())):
                    return None
                losses /= part.steps
                if isinstance(part.places, slice):
                    found[part.job] = numbers
                else:
                    mine = found[part.job]
                    if mine is None:
                        mine = found[part.job] = np.empty((2, self.counts[part.job]))
                    mine[:, part.places] = numbers
        return [
            LocalWork(total if self.params else total.clone(), torch.from_numpy(numbers[0]), torch.from_numpy(numbers[1]))
            for total, numbers in zip(self.totals, found, strict=True)
            if total is not None and numbers is not None
        ]


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

    def __init__(self, worker: Worker, shape: Shape, precision: Precision, here: Models) -> None:
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
        self.models, self.params, self.totals = here, here.params, torch.zeros_like(here.params)
        self.each_total = self.totals.unbind()
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
        # Memory that is kept for the examples and what belongs to each of them.
        held = (self.x, self.gram, self.outputs, self.weighted, self.coefficients, self.orders)
        self.bytes = sum(tensor.nbytes for tensor in held)
        # Squared norms and summed losses of the clients, then the models' norms before and after the server's step.
        self.small = zeros(2 * k + 2 * models, dtype=torch.float64)
        self.answer = torch.zeros_like(self.small, device="cpu", pin_memory=pinned)
        numbers: Numbers = self.answer.numpy()
        self.of_clients = numbers[: 2 * k].reshape(2, models, -1).swapaxes(0, 1)
        self.before, self.after = numbers[2 * k :].reshape(2, models)
        self.event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.stream: torch.cuda.Stream | None = None
        self.awaited = False  # whether somebody will ask for the results of the last start
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses, self.on_gpu = 0, device.type == "cuda"
        self.sides = [torch.cuda.Stream() for _ in range(2)] if self.on_gpu else []  # type: ignore[no-untyped-call]

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            before = self.params.clone()
            for _ in range(2):  # kernels are compiled and libraries ready before the capture
                self._body()
            self.params.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        self.graph = graph

    def start(self, params: Sequence[Tensor], parts: Sequence[Part], lr: float) -> None:
        """Start a round of one part per model: `totals` (M, D) are the sums of updates; `answers` come later."""
        if self.event is not None:
            self.event.synchronize()  # a start before this one may not have read the host's numbers yet
        self.models.take(params)
        layout = tuple(part.layout for part in parts)
        if layout != self.layout or None in layout:
            self._lay_out(parts)
            self.layout = layout
        for model, part in enumerate(parts):
            count = len(part.positions)
            self.host_clients[0, model, :count] = part.positions
            self.host_weights[model, :count] = part.weights
            self.host_rest[model] = part.stream
        self.host_rest[-1:].view(np.float64)[0] = lr
        self.uses += 1
        if self.on_gpu and self.graph is None and self.uses > _BEFORE_CAPTURE:
            self._capture()
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()
        if self.event is not None:
            self.event.record(self._stream())

    def _stream(self) -> torch.cuda.Stream:
        """The current stream. Its number is quickly found; the object is not, and seldom another one."""
        number = torch._C._cuda_getCurrentRawStream(self.x.device.index or 0)
        if self.stream is None or self.stream.cuda_stream != number:
            self.stream = torch.cuda.current_stream(self.x.device)
        return self.stream

    def answers(self) -> tuple[Numbers, Numbers, Numbers]:
        """After a wait: squared norms and summed losses of each model's clients, (M, 2, K), and the models' norms before and
        after the server's step, (M,) each.
        """
        if self.event is not None:
            self.event.synchronize()
        return self.of_clients, self.before, self.after

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
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[2 * k : -models])
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
        if shape.server is not None:
            torch.add(self.params, self.totals, alpha=shape.server, out=self.params)
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[-models:])
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
