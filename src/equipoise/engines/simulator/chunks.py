"""Clients of a round in chunks of similar work, and the local work of one chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.numbers import Numbers
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.batched_steps import Batch, Gradients, Starts, general_steps, stacked_gradients
from equipoise.engines.simulator.cpu.compiled_softmax import Asked, CompiledSoftmax
from equipoise.engines.simulator.cpu.convnet_gradients import convnet_gradients, is_plain_convnet
from equipoise.engines.simulator.example_batches import FlatBatches, batches_by_step
from equipoise.engines.simulator.linear_blocks import LinearUpdates, LinearWork, Sums, fits_linear_steps
from equipoise.engines.simulator.linear_span import SpanUpdates, fits_span_steps, span_steps
from equipoise.engines.simulator.precision import FULL, Precision, triton_works
from equipoise.engines.simulator.workers import Worker, Workspace
from equipoise.solvers import SGD
from equipoise.solvers.batches import TABLE, BatchCursor, cursor_of
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Cohort, Job, LocalSolver, Pull


@dataclass(frozen=True, eq=False)
class Queue:
    """The clients of all jobs of a round, by falling number of local steps.

    So the clients still at work are always the first of a chunk, and nothing is computed for one that has finished.
    """

    models: Tensor  # (M, D): one per job, or one per client
    owners: Tensor  # (K,) which job
    places: Tensor  # (K,) where in its cohort
    clients: Tensor  # (K,) positions in the training set
    keys: Tensor  # (K,) of their batches, on the engine's device
    sizes: Tensor  # (K,) examples
    steps: Tensor  # (K,)
    own: bool  # whether each client has a model of its own
    pull: Pull | None

    @classmethod
    def of(cls, jobs: Sequence[Job], solver: LocalSolver, clients: ClientSet, pull: Pull | None = None) -> Queue:
        """The parameters of a job are one model (D,), or one for each of its clients (K, D): then it is the only job."""
        counts = [len(job.cohort) for job in jobs]
        owners = np.repeat(np.arange(len(jobs)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        positions = torch.cat([job.cohort.clients for job in jobs])
        keys = torch.cat([batch_keys(job.cohort, clients) for job in jobs])
        sizes = clients.host_sizes.numpy()[positions.numpy()]
        steps = np.concatenate([local_steps(solver, job.cohort, clients) for job in jobs])
        # By steps; then by size, so that full batches of a chunk are padded least. Small batches need no padding: there each
        # model's clients stand together instead.
        second = sizes if solver.batch_size is None else owners
        order = (-(steps * (int(second.max()) + 1) + second)).argsort(kind="stable")
        owner, place, size, taken = (torch.from_numpy(values[order]) for values in (owners, places, sizes, steps))
        picked = torch.from_numpy(order)
        device = clients.x.device
        own = jobs[0].params.dim() == 2
        models = jobs[0].params if own else torch.stack([job.params for job in jobs])
        pull = None if pull is None else _pull_of(pull, picked.to(device))
        return cls(models, owner, place, positions[picked], keys[picked].to(device), size, taken, own, pull)

    def __len__(self) -> int:
        return len(self.clients)

    def take(self, part: slice) -> Queue:
        """A stretch of the clients."""
        pull = None if self.pull is None else _pull_of(self.pull, part)
        return Queue(
            self.models, self.owners[part], self.places[part], self.clients[part], self.keys[part], self.sizes[part],
            self.steps[part], self.own, pull,
        )  # fmt: skip

    def starts(self) -> Starts:
        """The models that the clients start from."""
        return Starts(self.models, self.places if self.own else self.owners, self.pull, each_its_own=self.own)


@dataclass(frozen=True, eq=False)
class Trained:
    """What the clients of a chunk have done: updates, dense (k, D) or by coefficients, and mean batch losses (k,)."""

    chunk: Queue
    updates: Tensor | LinearUpdates | SpanUpdates | Sums
    losses: Tensor

    def dense(self, space: Workspace) -> Tensor:
        """The updates (k, D)."""
        if isinstance(self.updates, Tensor):
            return self.updates
        if isinstance(self.updates, Sums):
            raise TypeError("only sums of these updates were kept")
        models = self.chunk.models
        return self.updates.dense(space.empty("updates", (len(self.chunk), models.shape[1]), models.dtype, models.device))

    def squared_norms(self, space: Workspace) -> Tensor:
        """Squared L2 norms of the updates, (k,) float64 on the CPU."""
        if isinstance(self.updates, Tensor):
            return squared_norms(self.updates)
        if isinstance(self.updates, Sums):
            return self.updates.sq_norms
        squares = self.updates.squares()
        extreme = ~torch.isfinite(squares) | (squares == 0)
        if bool(extreme.any()):  # beyond what squares of the type hold
            squares = squares.double()
            squares[extreme] = self.dense(space)[extreme].double().square().sum(1)
        return squares.double().cpu()


def squared_norms(updates: Tensor) -> Tensor:
    """Squared L2 norms of the rows, (K,) float64 on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1)  # in float64 it would copy all updates first
    squares = norms.double().square()
    extreme = ~torch.isfinite(norms) | (norms == 0)  # beyond what squares of the type hold
    if bool(extreme.any()):
        squares[extreme] = updates[extreme].double().square().sum(1)
    return squares.cpu()


# Parameters, gradients and batch of a chunk: few enough clients to bound memory.
_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}


def most_clients(parameter_bytes: int, largest: int, clients: ClientSet, solver: LocalSolver) -> int:
    """How many clients with up to `largest` examples fit into a chunk: their parameters, gradients, batch and order."""
    whole = solver.batch_size is None or hasattr(solver, "shared_gradient")
    batch = largest if whole else min(solver.batch_size or 1, largest)
    each = 3 * parameter_bytes + 4 * batch * clients.x.shape[1:].numel() + 24 * largest
    return max(1, _CHUNK_BYTES.get(clients.x.device.type, 2**26) // each)


def chunks_of(
    queue: Queue, clients: ClientSet, solver: LocalSolver, chunk_size: int | None, *, at_once: bool = False
) -> Iterator[Queue]:
    """The queue in chunks of at most `chunk_size`, as equal as can be; None: as large as memory allows.

    With `at_once`, a chunk of several clients has few enough examples for all its batches to be made at once.
    """
    start = 0
    while start < len(queue):
        left = len(queue) - start
        largest = int(queue.sizes[start:].max())  # of all that are left: stragglers may be large and have few steps
        most = chunk_size or most_clients(queue.models[0].nbytes, largest, clients, solver)
        if at_once:  # clients come by falling number of steps
            seen = int(queue.steps[start]) * min(solver.batch_size or largest, largest)
            most = max(1, min(most, TABLE // max(1, largest, seen)))
        size = -(-left // -(-left // most))
        yield queue.take(slice(start, start + size))
        start += size


def train_chunk(
    worker: Worker, chunk: Queue, solver: LocalSolver, lr: float, weights: Tensor | None = None, threads: int = 0
) -> Trained:
    """Local work of the clients of a chunk. Its updates are valid until the worker's next chunk.

    With `weights` (k,), updates may be given as their weighted sums alone, where that is faster. With `threads`,
    compiled code may do the work by so many.
    """
    clients, device, models = worker.clients, chunk.models.device, chunk.models
    starts, which = chunk.starts(), chunk.clients.to(device)
    if int(chunk.steps[0]) == 0:
        nothing = torch.zeros(len(chunk), models.shape[1], dtype=models.dtype, device=device)
        return Trained(chunk, nothing, torch.full((len(chunk),), float("nan"), dtype=torch.float64))
    cursor = cursor_of(solver, chunk.keys, chunk.sizes, chunk.steps)
    count = 1 if hasattr(solver, "finish") else chunk.steps
    largest = int(chunk.sizes.max())
    compiled: CompiledSoftmax | None = worker.compiled if threads else None
    if (
        compiled is not None
        and isinstance(cursor, BatchCursor)
        and cursor.at_once
        and isinstance(solver, SGD)
        and compiled.fits(solver, lr, starts.pull)
    ):
        done, seen = compiled.train(Asked(which, starts, solver, lr, cursor, threads), weights)
        return Trained(chunk, done, seen / count)
    worker.task.scorer.train()
    if (
        isinstance(cursor, BatchCursor)
        and isinstance(solver, SGD)
        and fits_span_steps(worker.task, solver, lr, starts, largest, device)
    ):
        updates, seen = span_steps(worker, which, starts, solver, lr, cursor)
        return Trained(chunk, updates, seen.cpu() / count)
    first = clients.offsets[which].unsqueeze(1)
    graphs = worker.graphs
    if (
        graphs is not None
        and isinstance(cursor, BatchCursor)
        and isinstance(solver, SGD)
        and graphs.fit(solver, starts, cursor)
    ):
        update = worker.space.empty("updates", (len(chunk), models.shape[1]), models.dtype, device)
        replayed = graphs.take_steps(starts, solver, lr, cursor, first, update)
        if replayed is not None:
            return Trained(chunk, update, replayed.cpu() / count)
    if fits_linear_steps(worker.task, solver, lr, starts.pull):
        batches: FlatBatches | Iterator[Batch]
        if isinstance(cursor, BatchCursor) and FlatBatches.fit(clients, cursor):
            bias = "bias" in worker.task.layout.names
            batches = FlatBatches(clients, cursor, first, models.dtype, worker.space, constant=bias)
        else:
            batches = batches_by_step(clients, cursor, first, models.dtype, worker.space)
        work = LinearWork(worker, starts, solver, lr, batches, len(chunk))
        found = work.sums(weights) if weights is not None else None
        return Trained(chunk, work.updates() if found is None else found, work.seen.cpu() / count)
    update = worker.space.empty("updates", (len(chunk), models.shape[1]), models.dtype, device)
    if int(chunk.steps[-1]) == 0:
        update.zero_()
    take_steps = partial(general_steps, gradients_of=worker.gradients_of or gradients_of(worker.task, device))
    if hasattr(solver, "shared_gradient"):
        once = replace(worker, space=Workspace())
        alone = replace(chunk, steps=torch.ones_like(chunk.steps))
        own = train_chunk(once, alone, GRADIENT, 1.0).dense(once.space)  # −∇F_k(w^t)
        take_steps = partial(take_steps, correction=own.add_(solver.shared_gradient))
    batches = batches_by_step(clients, cursor, first, models.dtype, worker.space)
    seen = take_steps(worker, starts, solver, lr, batches, update)
    return Trained(chunk, update, seen.cpu() / count)  # NaN for a client without a step


def gradients_of(task: Task, device: torch.device, precision: Precision = FULL) -> Gradients:
    """How to get gradients of many clients at once: written by hand where the model is known, else by autograd."""
    if not is_plain_convnet(task):
        return stacked_gradients
    if device.type == "cpu":
        return convnet_gradients
    if device.type == "cuda" and task.layout.dtype == torch.float32 and triton_works():
        try:
            from equipoise.engines.simulator.cuda.kernels.convnet_gradients import convnet_gradients as on_a_gpu
        except ImportError:
            return stacked_gradients
        return partial(on_a_gpu, precision=precision.name)
    return stacked_gradients


def padding_of(chunks: Iterable[Queue], solver: LocalSolver) -> float:
    """The share of examples that are computed for nothing: a step of a chunk is as wide as the widest batch in it."""
    computed = useful = 0
    for chunk in chunks:
        if len(chunk) and int(chunk.steps[0]) > 0:
            cursor = cursor_of(solver, chunk.keys, chunk.sizes, chunk.steps)
            if isinstance(cursor, BatchCursor):
                working = torch.arange(len(cursor.active)).unsqueeze(1) < chunk.steps
                computed += sum(k * b for k, b in zip(cursor.active, cursor.widest, strict=True))
                useful += int(cursor.counts[working].sum())
    return 1 - useful / computed if computed else 0.0


def batch_keys(cohort: Cohort, clients: ClientSet) -> Tensor:
    """The keys of the cohort's batches in its round, (K,), on the CPU."""
    stream = rng.stream_key(cohort.seed, "batches", cohort.round)
    return rng.client_keys(stream, clients.host_keys[cohort.clients])


def local_steps(solver: LocalSolver, cohort: Cohort, clients: ClientSet) -> Numbers:
    """How many steps each client of a cohort takes, (K,)."""
    sizes = clients.host_sizes.numpy()[cohort.clients.numpy()]
    if type(solver) is SGD:
        return steps_of(solver, sizes, None if cohort.effort is None else cohort.effort.numpy())
    efforts = [None] * len(sizes) if cohort.effort is None else cohort.effort.tolist()
    each = [
        solver.local_steps(s) if e is None else solver.local_steps(s, e) for s, e in zip(sizes.tolist(), efforts, strict=True)
    ]
    return np.array(each, dtype=np.int64)


def steps_of(solver: SGD, sizes: Numbers, effort: Numbers | None) -> Numbers:
    """`solver.local_steps` of many clients at once."""
    if solver.steps is not None:
        return np.full(len(sizes), solver.steps) if effort is None else np.minimum(effort, solver.steps)
    epochs = np.full(len(sizes), solver.epochs) if effort is None else np.minimum(effort, solver.epochs)
    return epochs * (1 if solver.batch_size is None else -(-sizes // solver.batch_size))


def _pull_of(pull: Pull, here: Tensor | slice) -> Pull:
    """The pull on some of the clients."""
    return Pull(pull.anchor if pull.anchor.dim() == 1 else pull.anchor[here], pull.strength[here])
