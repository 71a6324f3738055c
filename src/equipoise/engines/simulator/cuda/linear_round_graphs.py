"""Rounds of softmax regression on a GPU: which CUDA graph (`span_graph.py`) does which work, and work that is under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.core import rng
from equipoise.core.numbers import Numbers
from equipoise.core.task import cross_entropy
from equipoise.core.update_checks import ABSURD
from equipoise.engines.simulator.chunks import steps_of
from equipoise.engines.simulator.cuda.client_graph import Models, Room, padded, power_of_two
from equipoise.engines.simulator.cuda.linear_round_graph import LossGraph, Part, Shape, SpanGraph
from equipoise.engines.simulator.linear_blocks import has_one_score, is_plain_linear
from equipoise.engines.simulator.precision import Precision, triton_works
from equipoise.engines.simulator.workers import Worker
from equipoise.solvers import SGD
from equipoise.types import Aggregator, Job, LocalSolver, LocalWork

_LARGEST = 2048  # examples of a client: beyond, Gram matrices cost more than the steps they save
_BYTES = 4 * 2**30  # of one graph's examples and Gram matrices
_LOSS_BYTES = 2**30  # the same of graphs for losses, of one and of all
_GRAPHS = 256  # at most
_ALL_BYTES = 2 * 2**30  # of the graphs that are kept for the next round


class SpanGraphs:
    """The graphs of one task and its training clients on one device."""

    def __init__(self, worker: Worker, precision: Precision) -> None:
        self.worker, self.precision = worker, precision
        self.graphs: dict[Shape, list[SpanGraph]] = {}
        self.loss_graphs: dict[Room, LossGraph] = {}
        self.models: dict[int, Models] = {}
        self.sizes = worker.clients.host_sizes.numpy()
        self.grams, self.largest = 1, power_of_two(int(self.sizes.max(initial=1)), 16)  # room that every new graph has
        self.features = worker.clients.x.shape[1:].numel()
        self.alike = bool(self.sizes.min() == self.sizes.max())  # then what depends on sizes alone is found once
        self._grouped: dict[tuple[Any, ...], tuple[Numbers, bool, list[Numbers]]] = {}
        self._rooms: dict[tuple[int, ...], Room] = {}
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        clients, task = worker.clients, worker.task
        self.possible = (
            clients.x.device.type == "cuda"
            and task.layout.dtype == torch.float32
            and task.loss is cross_entropy
            and clients.y.dim() == 1
            and (clients.scale is not None or clients.x.is_floating_point())
            and is_plain_linear(task)
            and not has_one_score(task)
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

    def losses(self, jobs: Sequence[Job]) -> list[Tensor] | None:
        """The mean losses (K,) of each job's clients at its parameters; None if this work is not of the kind."""
        if not self.possible or not all(len(job.cohort) for job in jobs):
            return None
        sizes = [self._sizes_of(job) for job in jobs]
        layout = tuple(map(len, sizes)) if self.alike else None
        room = self._rooms.get(layout) if layout is not None else None
        if room is None:
            rows = max(int(found.sum()) for found in sizes)
            room = Room(len(jobs), padded(max(map(len, sizes))), _rows(rows), self.largest)
            if layout is not None:
                self._rooms[layout] = room
        if 4 * room.all_rows * self.features > _LOSS_BYTES:
            return None
        if room not in self.loss_graphs:
            if sum(graph.bytes for graph in self.loss_graphs.values()) > _LOSS_BYTES:
                self.loss_graphs.clear()
            self.loss_graphs[room] = LossGraph(self.worker, room, self.precision, self._models(len(jobs)))
        positions = [job.cohort.clients.numpy() for job in jobs]
        return self.loss_graphs[room].losses([job.params for job in jobs], positions, sizes, layout)

    def _models(self, count: int) -> Models:
        """Parameters of so many models: a loss, and a server's step, mostly are of what the last step has left there."""
        if count not in self.models:
            self.models[count] = Models(count, self.worker)
        return self.models[count]

    @property
    def bytes_under_way(self) -> int:
        """Memory of the graphs whose results somebody waits for."""
        return sum(graph.held for graphs in self.graphs.values() for graph in graphs if graph.awaited)

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
            len(bundle), padded(clients), _rows(rows), self.largest, self.grams, epochs, batch, solver.weight_decay,
            solver.prox, server,
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
        if len(everything) >= _GRAPHS or sum(graph.held for graph in everything) > _ALL_BYTES:  # memory is not for ever
            for other in [s for s in self.graphs if s != shape]:
                if not any(graph.awaited for graph in self.graphs[other]):
                    del self.graphs[other]
        held.append(SpanGraph(self.worker, shape, self.precision, self._models(shape.models)))
        return held[-1]


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


def _rows(count: int) -> int:
    """Rows of examples, rounded up so that few graphs serve all cohorts."""
    return padded(count, power_of_two(count, 256) // 16)
