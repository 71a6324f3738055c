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
    """What a graph is captured for."""

    models: int
    clients: int  # of each model
    examples: int
    epochs: int
    batch: int
    decay: float
    prox: float


@dataclass(frozen=True, eq=False)
class Part:
    """Clients of one job that are trained in one graph."""

    job: int
    places: Numbers  # in the job's cohort
    positions: Numbers  # in the training set
    sizes: Numbers
    steps: Numbers
    weights: Numbers
    stream: int


class SpanGraphs:
    """The graphs of one task and its training clients on one device."""

    def __init__(self, worker: Worker, precision: Precision) -> None:
        self.worker, self.precision = worker, precision
        self.graphs: dict[Shape, list[SpanGraph]] = {}
        self.sizes = worker.clients.host_sizes.numpy()
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
        batch = min(solver.batch_size or _LARGEST, _LARGEST)
        parts = [
            part for i, (job, found) in enumerate(zip(jobs, sizes, strict=True)) for part in self._parts(i, job, found, solver)
        ]
        # Jobs of one part each are one graph, with a model each; otherwise every part has a graph of its own.
        bundles = [parts] if len(parts) == len(jobs) else [[part] for part in parts]
        started: list[SpanGraph] = []
        self.computed, self.useful = 0, sum(int(found.sum()) for found in sizes)
        for bundle in bundles:
            shape = self._shape(bundle, solver, batch)
            graph = self._graph(shape, taken=started)
            graph.start([jobs[part.job].params for part in bundle], bundle, lr)
            started.append(graph)
            self.computed += shape.models * shape.clients * shape.examples
        return self._collected(jobs, sizes, bundles, started)

    def _parts(self, index: int, job: Job, sizes: Numbers, solver: SGD) -> list[Part]:
        steps, groups = self._grouping(job, sizes, solver)
        positions, weights = job.cohort.clients.numpy(), job.weights.numpy()
        stream = rng.signed(rng.stream_key(job.cohort.seed, "batches", job.cohort.round))
        if len(groups) == 1 and self.alike:
            return [Part(index, groups[0], positions, sizes, steps, weights, stream)]
        return [
            Part(index, places, positions[places], sizes[places], steps[places], weights[places], stream) for places in groups
        ]

    def _grouping(self, job: Job, sizes: Numbers, solver: SGD) -> tuple[Numbers, list[Numbers]]:
        """Steps of the clients, and which of them are trained in one graph."""
        key = len(sizes), solver.batch_size, solver.epochs, solver.steps
        known = self.alike and job.cohort.effort is None
        if known and key in self._grouped:
            return self._grouped[key]
        steps = steps_of(solver, sizes, None if job.cohort.effort is None else job.cohort.effort.numpy())
        found = steps, groups(sizes, self._most(int(sizes.max(initial=1))))
        if known:
            self._grouped[key] = found
        return found

    def _shape(self, bundle: Sequence[Part], solver: SGD, batch: int) -> Shape:
        work = tuple((len(part.places), int(part.steps.max())) for part in bundle)
        key = work, batch, solver.weight_decay, solver.prox
        if self.alike and key in self._shapes:
            return self._shapes[key]
        clients, largest, epochs = 1, 1, 1
        for part in bundle:
            per_epoch = np.where(part.sizes > batch, -(-part.sizes // batch), 1)
            epochs = max(epochs, int((-(-part.steps // per_epoch)).max()))
            clients, largest = max(clients, len(part.places)), max(largest, int(part.sizes.max()))
        shape = Shape(len(bundle), padded(clients), padded(largest, 4), epochs, batch, solver.weight_decay, solver.prox)
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
                sq_norms, losses = clients[:, model, : len(part.places)]
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
    if len(sizes) <= most and sizes.min() == sizes.max():
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
    """One captured round for clients of up to so many examples. Results are valid until the next start."""

    def __init__(self, worker: Worker, shape: Shape, precision: Precision) -> None:
        self.worker, self.shape, self.precision, self.clients = worker, shape, precision, worker.clients
        task, device = worker.task, worker.clients.x.device
        self.classes, self.features = task.layout.shapes[task.layout.names.index("weight")]
        self.bias = "bias" in task.layout.names
        models, per_model, n = shape.models, shape.clients, shape.examples
        k, pinned = models * per_model, device.type == "cuda"

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        # Positions, steps and weights of the clients, then the streams' keys and the rate: one copy to the device.
        self.host = torch.zeros(3 * k + models + 1, dtype=torch.int64, pin_memory=pinned)
        self.host_numbers: Numbers = self.host.numpy()
        self.host_floats: Numbers = self.host_numbers.view(np.float64)
        self.asked = torch.zeros_like(self.host, device=device)
        self.params = torch.zeros(models, task.layout.dimension, device=device)
        self.totals = torch.zeros_like(self.params)
        self.x, self.gram = empty(k, n, self.features), empty(k, n, n)
        self.scores = -(-self.classes // 16) * 16  # rows of such a length are read and multiplied faster
        bytes_ = self.clients.x.dtype == torch.uint8 and self.clients.scale is not None and not self.clients.shift
        self.scale = self.clients.scale if bytes_ and self.clients.scale is not None else 1.0  # of x, in its products
        self.parts = 2 if bytes_ and not precision.reduced else 1
        self.products = Precision("tf32") if self.parts == 2 else precision
        self.outputs = empty(k, n, self.parts * self.scores)
        self.coefficients = empty(k, n, self.scores)
        self.weighted = torch.zeros_like(self.outputs)
        self.weight = torch.zeros(models, self.parts * self.scores, self.features, device=device)
        self.ones, self.summed = torch.ones(models, device=device), torch.zeros(k, self.scores, device=device)
        self.orders = empty(k, shape.epochs, n, dtype=torch.int32)
        # Squared norms and summed losses of the clients, then the models' norms.
        self.small = torch.zeros(2 * k + models, dtype=torch.float64, device=device)
        self.answer = torch.zeros(2 * k + models, dtype=torch.float64, pin_memory=pinned)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses, self.on_gpu = 0, device.type == "cuda"
        self.side: Any = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def bytes(self) -> int:
        """Memory that is kept for the examples and what belongs to each of them."""
        return self.x.nbytes + self.gram.nbytes + 2 * self.outputs.nbytes + self.coefficients.nbytes

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
        k, each = self.shape.models * self.shape.clients, self.shape.clients
        host, floats = self.host_numbers, self.host_floats
        for model, part in enumerate(parts):
            first, count = model * each, len(part.positions)
            here, rest = slice(first, first + count), slice(first + count, first + each)
            host[:k][here], host[:k][rest] = part.positions, part.positions[0]
            host[k : 2 * k][here], host[k : 2 * k][rest] = part.steps, 0
            floats[2 * k : 3 * k][here], floats[2 * k : 3 * k][rest] = part.weights, 0.0
            host[3 * k + model] = part.stream
            self.params[model].copy_(params[model], non_blocking=True)
        floats[-1] = lr
        self.uses += 1
        if self.on_gpu and self.graph is None and self.uses > _BEFORE_CAPTURE:
            self._capture()
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()

    def _body(self) -> None:
        from equipoise.engines.kernels import span as kernels

        clients, shape, models = self.clients, self.shape, self.shape.models
        k = models * shape.clients
        self.asked.copy_(self.host, non_blocking=True)
        which, steps, streams = self.asked[:k], self.asked[k : 2 * k], self.asked[3 * k : -1]
        weights, rate = self.asked[2 * k : 3 * k].view(torch.float64).float(), self.asked[-1:].view(torch.float64)
        offsets, sizes = clients.offsets, clients.sizes
        scale, shift = (1.0, 0.0) if clients.scale is None or self.scale != 1.0 else (clients.scale, clients.shift)
        named = self.worker.task.layout.unflatten(self.params)
        with self._aside():
            kernels.draw_orders(clients.keys, which, sizes, streams, self.orders, shape.batch)
            kernels.split(named["weight"], self.ones, self.scale, self._halves(self.weight, self.classes, 1))
            torch.linalg.vector_norm(self.params, dim=1, dtype=torch.float64, out=self.small[2 * k :])
            self.coefficients.zero_()
        kernels.gather_examples(clients.x.view(len(clients.x), -1), which, offsets, sizes, self.x, scale, shift)
        self._join()
        squares, losses = self.small[:k], self.small[k : 2 * k]
        factors, scales = (torch.empty(k, device=self.x.device) for _ in range(2))
        with self.products.products():
            x, outputs = (v.view(models, -1, v.shape[2]) for v in (self.x, self.outputs))
            torch.bmm(x, self.weight.transpose(1, 2), out=outputs)
            torch.baddbmm(self.gram, self.x, self.x.transpose(1, 2), beta=0, alpha=self.scale**2, out=self.gram)
            kernels.take_steps(
                self.outputs, named.get("bias"), self.gram, clients.y, which, offsets, sizes, steps, self.orders, rate,
                self.coefficients, (self.summed, squares, losses, factors, scales), classes=self.classes, batch=shape.batch,
                decay=shape.decay, prox=shape.prox, tf32=self.precision.reduced,
            )  # fmt: skip
            if shape.decay or shape.prox:
                self.coefficients.mul_(scales.view(-1, 1, 1))
                lengths = self.params.square().sum(1).repeat_interleave(shape.clients, output_size=k)
                crossed = (self.coefficients[..., : self.classes] * self._start_outputs(named)).sum((1, 2))
                squares += 2 * factors * crossed + factors.square() * lengths
            self._sum(weights, factors)
        self.answer.copy_(self.small, non_blocking=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Kernels inside run beside those that follow, until `_join`."""
        if not self.on_gpu:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _join(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.side)

    def _halves(self, whole: Tensor, count: int, dim: int = 2) -> list[Tensor]:
        """The first `count` entries of each part of parts · P along a dimension."""
        return [whole.narrow(dim, part * self.scores, count) for part in range(self.parts)]

    def _start_outputs(self, named: dict[str, Tensor]) -> Tensor:
        """Outputs (k, n, C) of all examples at their model's start."""
        outputs = torch.stack(self._halves(self.outputs, self.classes)).sum(0)
        if self.bias:
            outputs += named["bias"].repeat_interleave(self.shape.clients, 0, output_size=len(outputs)).unsqueeze(1)
        return outputs

    def _sum(self, weights: Tensor, factors: Tensor) -> None:
        """The weighted sums of updates, into `totals`."""
        from equipoise.engines.kernels import span as kernels

        models, classes, named = self.shape.models, self.classes, self.worker.task.layout.unflatten(self.totals)
        kernels.split(self.coefficients, weights, self.scale, self._halves(self.weighted, self.scores))
        x, weighted = (v.view(models, -1, v.shape[2]) for v in (self.x, self.weighted))
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
