"""Rounds of softmax regression on a GPU: which CUDA graph (`linear_round_graph.py`) does which work, and rounds under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.numbers import Numbers
from equipoise.core.per_example_losses import cross_entropy
from equipoise.core.update_checks import ABSURD
from equipoise.engines.simulator.cuda.client_graph import DeviceModels
from equipoise.engines.simulator.cuda.graph_capacity import GraphCapacity, power_of_two, rounded_up
from equipoise.engines.simulator.cuda.linear_round_graph import JobClients, LossGraph, RoundGraph, RoundShape
from equipoise.engines.simulator.linear_blocks import has_one_score, why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.precision import why_no_kernels
from equipoise.types import Job, LocalWork

K = TypeVar("K")
V = TypeVar("V")
_LARGEST = 2048  # examples of a client: beyond, Gram matrices cost more than the steps they save
_WIDEST = 64  # examples of a batch, which the kernel holds in registers
_BYTES = 4 * 2**30  # of one graph's examples and Gram matrices
_LOSS_BYTES = 2**30  # of the examples of a graph for losses, and of all of them
_GRAPHS = 256  # at most
_ALL_BYTES = 2 * 2**30  # of the graphs that are kept for the next round
_EARLY_BYTES = 2**30  # of rounds under way, beside which another one is begun


class LinearRounds(LocalPath):
    """Whole rounds of softmax regression under SGD without momentum, summed by their weights: one CUDA graph each."""

    name = "linear round graph"
    whole_rounds = True

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.graphs: dict[RoundShape, list[RoundGraph]] = {}
        self.loss_graphs: dict[GraphCapacity, LossGraph] = {}
        self.models: dict[int, DeviceModels] = {}
        self.sizes = place.clients.host_sizes.numpy()
        self.grams, self.largest = 1, power_of_two(int(self.sizes.max(initial=1)), 16)  # of every new graph
        self.features = place.clients.features
        self.alike = bool(self.sizes.min() == self.sizes.max())  # then what depends on sizes alone is found once
        self._asked: tuple[LocalRule | None, str | None] = None, None  # the last rule, and why it is not supported
        self._grouped: dict[tuple[Any, ...], tuple[Numbers, bool, list[Numbers]]] = {}
        self._capacities: dict[tuple[int, ...], GraphCapacity] = {}
        self._shapes: dict[tuple[Any, ...], RoundShape] = {}
        self.obstacle = why_no_graphs(place)
        self.computed = self.useful = 0  # rows of examples in the last call, with and without padding

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Softmax regression under plain SGD from shared models, on a GPU."""
        if self.obstacle is not None:
            return self.obstacle
        if rule.own_models or rule.pull != "none":
            return "clients have models of their own"
        sgd = rule.traits.sgd
        if sgd is None or sgd.momentum:
            return rule.why_not_plain_sgd()
        return "the learning rate times all decay is 1 or more" if rule.lr * (sgd.weight_decay + sgd.prox) >= 1 else None

    def supports(self, work: ChunkWork) -> str | None:
        """Whether a cohort's clients and batches are small enough."""
        return self._why_not_sizes(work.largest, work.rule)

    def _why_not_sizes(self, largest: int, rule: LocalRule) -> str | None:
        if largest > _LARGEST:
            return f"a client has more than {_LARGEST} examples"
        wide = min(rule.solver.batch_size or largest, largest) > _WIDEST
        return f"a batch has more than {_WIDEST} examples" if wide else None

    def sums(self, jobs: Sequence[Job], rule: LocalRule) -> list[LocalWork] | None:
        """The weighted sums of the jobs' updates; None if it does not support them, or some update cannot be used."""
        started = self.begin(jobs, rule)
        return None if started is None else started.collected()

    def begin(self, jobs: Sequence[Job], rule: LocalRule, server: float | None = None) -> LinearRoundUnderWay | None:
        """Start `sums`, perhaps with the server's step w + server · total; None if it does not support the work."""
        if self._asked[0] is not rule:
            self._asked = rule, self.supports_rule(rule)
        if self._asked[1] is not None:
            return None
        sizes = [self._sizes_of(job) for job in jobs]
        largest = int(self.sizes[0]) if self.alike else max(int(own.max(initial=1)) for own in sizes)
        if self._why_not_sizes(largest, rule) is not None:
            return None
        parts = [part for i, (job, own) in enumerate(zip(jobs, sizes, strict=True)) for part in self._parts(i, job, own, rule)]
        # Jobs of one part each are one graph, with a model each; otherwise every part has a graph of its own.
        bundles = [parts] if len(parts) == len(jobs) else [[part] for part in parts]
        if server is not None and len(bundles) > 1:
            return None
        started = LinearRoundUnderWay([len(own) for own in sizes])
        self.computed = 0
        self.useful = sum(len(own) * largest if self.alike else int(own.sum()) for own in sizes)
        for bundle in bundles:
            shape = self._shape(bundle, rule, server)
            started.add(self._graph(shape), bundle, [jobs[part.job].params for part in bundle], rule.lr)
            self.computed += shape.models * shape.rows
        return started

    def losses(self, jobs: Sequence[Job]) -> list[Tensor] | None:
        """The mean losses (K,) of each job's clients at its parameters; None if it does not do this work."""
        if self.obstacle is not None or not all(len(job.cohort) for job in jobs):
            return None
        sizes = [self._sizes_of(job) for job in jobs]
        layout = tuple(map(len, sizes)) if self.alike else None

        def new_capacity() -> GraphCapacity:
            rows = max(int(own.sum()) for own in sizes)
            return GraphCapacity(len(jobs), rounded_up(max(map(len, sizes))), _rows(rows), self.largest)

        capacity = _kept(self._capacities, layout, new_capacity)
        if 4 * capacity.all_rows * self.features > _LOSS_BYTES:
            return None
        if capacity not in self.loss_graphs:
            if sum(graph.bytes for graph in self.loss_graphs.values()) > _LOSS_BYTES:
                self.loss_graphs.clear()
            self.loss_graphs[capacity] = LossGraph(self.place, capacity, self._models(len(jobs)))
        positions = [job.cohort.clients.numpy() for job in jobs]
        return self.loss_graphs[capacity].losses([job.params for job in jobs], positions, sizes, layout)

    def _models(self, count: int) -> DeviceModels:
        """Parameters of `count` models: a loss, and a server's step, mostly are of what the last step has left there."""
        return _kept(self.models, count, lambda: DeviceModels(count, self.place))

    @property
    def bytes_under_way(self) -> int:
        """Memory of the graphs whose results somebody waits for."""
        return sum(graph.held for graphs in self.graphs.values() for graph in graphs if graph.awaited)

    def has_capacity(self) -> bool:
        """Whether memory allows another round beside those under way."""
        return self.bytes_under_way <= _EARLY_BYTES

    def _sizes_of(self, job: Job) -> Numbers:
        """How many examples the clients of a job have, (K,)."""
        own: Numbers = self.sizes[: len(job.cohort)] if self.alike else self.sizes[job.cohort.clients.numpy()]
        return own

    def _parts(self, index: int, job: Job, sizes: Numbers, rule: LocalRule) -> list[JobClients]:
        """The clients of a job by the graphs that they are trained in."""
        known = self.alike and job.cohort.effort is None
        layout = (len(sizes), rule.solver.batch_size, rule.solver.local_steps(int(self.sizes[0]))) if known else None
        steps, all_work, groups = _kept(self._grouped, layout, lambda: self._grouping(job, sizes, rule))
        positions, weights = job.cohort.clients.numpy(), job.weights.numpy()
        stream = rng.signed(rng.stream_key(job.cohort.seed, "batches", job.cohort.round))
        if len(groups) == 1:
            return [JobClients(index, slice(None), positions, sizes, steps, weights, stream, all_work, layout)]
        return [
            JobClients(index, places, positions[places], sizes[places], steps[places], weights[places], stream, all_work)
            for places in groups
        ]

    def _grouping(self, job: Job, sizes: Numbers, rule: LocalRule) -> tuple[Numbers, bool, list[Numbers]]:
        """Steps of the clients, whether all take some, and who is trained in one graph: as many as memory allows."""
        steps = rule.steps_each(sizes, job.cohort.effort)
        filled = np.cumsum(4 * sizes * (self.features + sizes)) // _BYTES
        return steps, bool(steps.min(initial=1) > 0), [np.flatnonzero(filled == number) for number in np.unique(filled)]

    def _shape(self, bundle: Sequence[JobClients], rule: LocalRule, server: float | None = None) -> RoundShape:
        """The shape of the graph for these clients."""
        layouts = tuple(part.layout for part in bundle)
        key = None if None in layouts else (layouts, rule.sgd, server)
        return _kept(self._shapes, key, lambda: self._new_shape(bundle, rule, server))

    def _new_shape(self, bundle: Sequence[JobClients], rule: LocalRule, server: float | None) -> RoundShape:
        batch = min(rule.solver.batch_size or _LARGEST, _LARGEST)
        clients, rows, grams, epochs = 1, 1, 0, 1
        for part in bundle:
            most = int(part.steps.max())
            if batch < int(part.sizes.max()):
                per_epoch = np.where(part.sizes > batch, -(-part.sizes // batch), 1)
                most = int((-(-part.steps // per_epoch)).max())
            clients, rows = max(clients, len(part.sizes)), max(rows, int(part.sizes.sum()))
            grams, epochs = grams + int((part.sizes * part.sizes).sum()), max(epochs, most)
        # What costs memory but no time is the same for all graphs, so that few of them serve all cohorts.
        if grams > self.grams:
            self.grams = power_of_two(grams)
            self.graphs.clear()
            self._shapes.clear()
        capacity = len(bundle), rounded_up(clients), _rows(rows), self.largest
        return RoundShape(*capacity, self.grams, epochs, batch, rule.sgd, server)

    def _graph(self, shape: RoundShape) -> RoundGraph:
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
        held.append(RoundGraph(self.place, shape, self._models(shape.models)))
        return held[-1]


def why_no_graphs(place: Workplace) -> str | None:
    """Why rounds and losses of a task on its data are not done by these graphs; None if they are."""
    clients, task = place.clients, place.task
    if place.device.type != "cuda":
        return "it needs a CUDA device"
    if (reason := clients.why_not_plain or why_not_linear(task)) is not None:
        return reason
    if task.loss is not cross_entropy or has_one_score(task) or clients.y.dim() != 1:
        return "it is for cross-entropy with one class per example"
    if task.layout.dtype != torch.float32:
        return f"it is for float32, not {task.layout.dtype}"
    if clients.scale is None and not clients.x.is_floating_point():
        return "the inputs are integers without a scale"
    return "attacks change single updates" if place.data.malicious else why_no_kernels("span_kernels")


class LinearRoundUnderWay:
    """The work of some jobs, started on the device.

    With a server's step `params` are each job's next parameters (D,). They are good if every update can be used.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self.graphs: list[RoundGraph] = []
        self.bundles: list[Sequence[JobClients]] = []
        self.totals: list[Tensor | None] = [None] * len(counts)
        self.params: tuple[Tensor, ...] = ()

    def add(self, graph: RoundGraph, bundle: Sequence[JobClients], params: Sequence[Tensor], lr: float) -> None:
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
        """The work, after a wait; None if some update cannot be used, or its square is beyond float32."""
        results: list[Numbers | None] = [None] * len(self.counts)
        for bundle, graph in zip(self.bundles, self.graphs, strict=True):
            clients, lengths, after = graph.answers()
            if not all(map(math.isfinite, after.tolist())):  # a model is lost
                return None
            for part, numbers, length in zip(bundle, clients, lengths, strict=True):
                numbers = numbers[:, : len(part.sizes)].copy()  # the next start writes over them
                sq_norms, losses = numbers
                longest = (ABSURD * max(1.0, float(length))) ** 2
                # NaN compares as False. To be left out, or a square that float32 does not hold: rare, and run again elsewhere.
                if not (part.all_work and sq_norms.min() > 0 and sq_norms.max() <= longest and math.isfinite(losses.sum())):
                    return None
                losses /= part.steps
                if isinstance(part.places, slice):  # all clients of the job
                    results[part.job] = numbers
                    continue
                if (mine := results[part.job]) is None:
                    mine = results[part.job] = np.empty((2, self.counts[part.job]))
                mine[:, part.places] = numbers
        return [
            LocalWork(total if self.params else total.clone(), torch.from_numpy(numbers[0]), torch.from_numpy(numbers[1]))
            for total, numbers in zip(self.totals, results, strict=True)
            if total is not None and numbers is not None
        ]


def _kept(held: dict[K, V], key: K | None, make: Callable[[], V]) -> V:
    """What `make` gives, made once for a key; without one it is made anew."""
    if key is None:
        return make()
    if key not in held:
        held[key] = make()
    return held[key]


def _rows(count: int) -> int:
    """Rows of examples, rounded up so that few graphs serve all cohorts."""
    return rounded_up(count, power_of_two(count, 256) // 16)
