"""The simulator: many clients as one batched computation, on a CPU or a GPU.

Each client of a chunk has its own row of parameters, and a local step is taken for all of them at once (`stacked.py`). Clients
are sorted by their number of local steps, so that the clients still at work are always the first rows: nothing is computed for
a client that has finished, and only the last, smaller batch of an epoch is padded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from equipoise import rng
from equipoise.attacks import corrupted
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.arrivals import marked, usable
from equipoise.engines.loop import Loop, LoopEngine, ResidentSets, usable_device
from equipoise.engines.stacked import (
    Batch,
    Starts,
    fits_linear_steps,
    general_steps,
    is_plain_linear,
    linear_losses,
    linear_steps,
    runs,
    stacked_gradients,
)
from equipoise.errors import EquipoiseNotice, is_whole, require
from equipoise.solvers.batches import BatchCursor, SplitCursor, cursor_of
from equipoise.solvers.prepared import GRADIENT
from equipoise.task import Task
from equipoise.types import Aggregator, Cohort, Job, LocalSolver, LocalWork, Pull

# Parameters, gradients and batch of a chunk: enough clients to outweigh the cost of a call, few enough to bound memory.
_CPU_CHUNK_BYTES = 64 * 2**20
_GPU_CHUNK_BYTES = 2 * 2**30
_EVALUATION_NUMBERS = 2**21  # input numbers per evaluation batch


@dataclass(frozen=True)
class Simulator:
    """Train many clients at once. `chunk_size` is how many (None: chosen by size); `device` is any torch device.

    A model that cannot be vectorised over clients is trained by the loop engine instead, with one notice.

    Source: ours; vectorising over clients with torch.func.
    """

    chunk_size: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        good = self.chunk_size is None or (is_whole(self.chunk_size) and self.chunk_size >= 1)
        require(good, "chunk_size", "must be a whole number of at least 1, or None", self.chunk_size)

    def start(self, task: Task, data: FederatedData) -> SimulatorEngine | LoopEngine:
        engine = SimulatorEngine(task, data, usable_device(self.device), self.chunk_size)
        reason = engine.why_not_vectorised()
        if reason is None:
            return engine
        warnings.warn(
            EquipoiseNotice(
                f"{type(task.module).__name__} cannot be vectorised over clients ({reason}), so clients are trained one at a "
                "time. Results are the same; rounds are slower."
            ),
            stacklevel=3,
        )
        return Loop(self.device).start(task, data)


class SimulatorEngine:
    """The running simulator of one task on one data set, whose tensors live on the device."""

    def __init__(self, task: Task, data: FederatedData, device: torch.device, chunk_size: int | None) -> None:
        self.device, self.task, self.chunk_size, self.sets = device, task.to(device), chunk_size, ResidentSets(device)
        self.data, self.train = data, self.sets[data.train]
        self.models_together = True  # whether several models can score shared examples in one call

    def why_not_vectorised(self) -> str | None:
        """Try two clients with two examples each against one at a time; the reason if that fails or differs."""
        self.task.scorer.train()
        rows = torch.tensor([[0, 1 % len(self.train.x)], [len(self.train.x) - 1, 0]], device=self.device)
        flat = self.task.layout.read(self.task.module).expand(2, -1).contiguous()
        params = self.task.layout.unflatten(flat)
        x, y = self.train.inputs(rows, flat.dtype), self.train.targets(rows, flat.dtype)
        even = torch.full((2, 2), 0.5, dtype=flat.dtype, device=self.device)
        single = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            for i in range(2):
                leaf = flat[i].detach().requires_grad_()
                loss = self.task.losses(leaf, x[i].clone(), y[i]).mean()
                single.append(self.task.layout.unflatten(torch.autograd.grad(loss, leaf)[0]))
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap's own slow loop
            try:
                together, _ = stacked_gradients(self.task, params, Batch(x, y, even, False))
            except Exception as failure:  # vmap refuses in many ways
                return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:160]
        for name, gradient in together.items():
            expected = torch.stack([s[name] for s in single])
            scale = float(expected.nan_to_num(0, 0, 0).abs().max()) + 1e-3
            if not torch.allclose(gradient, expected, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
                return f"the batched gradient of {name} differs from the plain one"
        return None

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client of the cohort, (K,): one pass over all their examples, or the inner steps of a solver."""
        if solver is not None and getattr(solver, "adapts", False):
            adapted = torch.empty(len(cohort), dtype=torch.float64)
            for chunk in self._chunks([Job(params, cohort, cohort.weights)], solver):
                adapted[chunk.places] = chunk.losses
            return adapted
        return self.losses_of(params.unsqueeze(0), cohort)[0]

    def losses_of(self, models: Tensor, cohort: Cohort) -> Tensor:
        """The same for several models (M, D) at once: (M, K)."""
        (losses,) = self._segment_means(models, self.train, cohort.clients.to(self.device), with_errors=False)
        return losses

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, (n,) and (n,)."""
        loss, error = self._segment_means(params.unsqueeze(0), self.sets[clients], None, with_errors=True)
        return loss[0], error[0]

    def _segment_means(
        self, models: Tensor, clients: ClientSet, which: Tensor | None, *, with_errors: bool
    ) -> tuple[Tensor, ...]:
        """Mean loss (and error) per model (M, D) and client: large batches over clients' borders, then segment means."""
        self.task.scorer.eval()
        if which is None:
            sizes, rows = clients.sizes, None
        else:
            sizes = clients.sizes[which]
            ends = sizes.cumsum(0)
            within = torch.arange(int(ends[-1]), device=self.device)
            rows = within + (clients.offsets[which] - ends + sizes).repeat_interleave(sizes)
        count = len(clients.x) if rows is None else len(rows)
        width = max(256, min(65_536, _EVALUATION_NUMBERS // max(1, clients.x.shape[1:].numel())))
        scores = torch.empty(1 + with_errors, len(models), count, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for start in range(0, count, width):
                part = slice(start, min(start + width, count))
                here = part if rows is None else rows[part]
                x, y = clients.inputs(here, models.dtype), clients.targets(here, models.dtype)
                for place, found in enumerate(self._scores(models, x, y, with_errors)):
                    scores[place, :, part] = found
        return tuple(torch.segment_reduce(v.t().contiguous(), "mean", lengths=sizes, unsafe=True).t().cpu() for v in scores)

    def _scores(self, models: Tensor, x: Tensor, y: Tensor, with_errors: bool) -> tuple[Tensor, ...]:
        """Losses (and errors) of shared examples under several models, (M, B) each; one model needs no batching."""

        def score(params: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
            return self.task.scores(params, inputs, y) if with_errors else (self.task.losses(params, inputs, y),)

        if len(models) == 1:
            return tuple(values.unsqueeze(0) for values in score(models[0], x))
        if not with_errors and is_plain_linear(self.task):
            return (linear_losses(self.task, models, x, y),)
        if self.models_together:
            try:
                scores: tuple[Tensor, ...] = vmap(score, in_dims=(0, None))(models, x.clone())
                return scores
            except RuntimeError:  # a forward pass that writes to the inputs, which models share, or reads a number off a tensor
                self.models_together = False
        alone = [score(params, x.clone()) for params in models]
        return tuple(torch.stack(values) for values in zip(*alone, strict=True))

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        updates = torch.empty(len(cohort), len(params), dtype=params.dtype, device=self.device)
        losses = torch.empty(len(cohort), dtype=torch.float64)
        for chunk in self._chunks([Job(params, cohort, cohort.weights)], solver):
            updates[chunk.places.to(self.device)] = self._sent(chunk, [cohort])
            losses[chunk.places] = chunk.losses
        sq_norms = _sq_norms(updates)
        return LocalWork(updates, marked(sq_norms, usable(sq_norms, losses, params)), losses)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, aggregated and added up chunk by chunk: total (D,); memory is bounded by the chunk."""
        return self.summed_updates([Job(params, cohort, weights)], solver, aggregator)[0]

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """The same for several models in one batched computation: one result per job. Their cohorts are of one round."""
        done = [_nothing_yet(job) for job in jobs]
        for chunk in self._chunks(jobs, solver):
            updates = self._sent(chunk, [job.cohort for job in jobs])
            sq_norms = _sq_norms(updates)
            for owner, rows in runs(chunk.owners):
                places, work, arrived = chunk.places[rows], done[owner], updates[rows]
                good = usable(sq_norms[rows], chunk.losses[rows], jobs[owner].params)
                work.sq_norms[places] = marked(sq_norms[rows], good)
                work.losses[places] = chunk.losses[rows]
                if not bool(good.all()):  # rare, so that the others are not copied in every round
                    places, arrived = places[good], arrived[good.to(self.device)]
                if len(places):
                    work.update.add_(aggregator(arrived, jobs[owner].weights[places].to(self.device))[0])
        return done

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D)."""
        after = torch.empty_like(models)
        if pull is not None:
            pull = Pull(pull.anchor.to(models), pull.strength.to(models))
        for chunk in self._chunks([Job(models, cohort, cohort.weights)], solver, pull):
            places = chunk.places.to(self.device)
            after[places] = chunk.updates.add_(models[places])
        return after

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models, (K,) and (K,)."""
        self.task.scorer.eval()
        clients = self.sets[clients]
        sizes = clients.sizes.cpu()[which]
        totals = torch.zeros(2, len(which), dtype=torch.float64)
        order = sizes.argsort(descending=True, stable=True)
        each = models[0].nbytes + 4 * clients.x.shape[1:].numel()
        together = max(1, (_CPU_CHUNK_BYTES if self.device.type == "cpu" else _GPU_CHUNK_BYTES) // each)
        for first in range(0, len(order), together):
            places = order[first : first + together]  # of similar size
            width = max(1, _EVALUATION_NUMBERS // (len(places) * max(1, clients.x.shape[1:].numel())))
            for start in range(0, int(sizes[places[0]]), width):
                here = places[sizes[places] > start]
                totals[:, here] += self._own_totals(models, clients, which, here, slice(start, start + width))
        return totals[0] / sizes, totals[1] / sizes

    def _own_totals(self, models: Tensor, clients: ClientSet, which: Tensor, here: Tensor, part: slice) -> Tensor:
        """Summed losses and errors of a part of the examples of the clients `here`, padded to one length: (2, k)."""
        positions = which[here].to(self.device)
        sizes, first = clients.sizes[positions], clients.offsets[positions]
        end = min(part.stop, int(sizes.max()))
        numbers = torch.arange(part.start, end, device=self.device)
        inside = numbers < sizes.unsqueeze(1)  # (k, b)
        rows = first.unsqueeze(1) + torch.where(inside, numbers, 0)
        x, y = clients.inputs(rows, models.dtype), clients.targets(rows, models.dtype)
        with torch.no_grad():
            scores = self._own_scores(models[here.to(self.device)], x, y)
        return torch.stack([torch.where(inside, values.double(), 0.0).sum(1).cpu() for values in scores])

    def _own_scores(self, models: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and errors (k, b) of examples (k, b, …) under clients' own models (k, D)."""
        if self.models_together:
            try:
                scores: tuple[Tensor, Tensor] = vmap(self.task.scores)(models, x, y)
                return scores
            except RuntimeError:  # an error, say, that reads a number off a tensor
                self.models_together = False
        alone = [self.task.scores(*one) for one in zip(models, x, y, strict=True)]
        return torch.stack([loss for loss, _ in alone]), torch.stack([error for _, error in alone])

    def _sent(self, chunk: Chunk, cohorts: Sequence[Cohort]) -> Tensor:
        """The updates of a chunk as they arrive: those of malicious clients as an attack makes them."""
        if not self.data.malicious:
            return chunk.updates
        sent = chunk.updates
        for owner, rows in runs(chunk.owners):
            cohort, places = cohorts[owner], chunk.places[rows]
            keys = self._keys(cohort)[places.to(self.device)]
            sent[rows] = corrupted(self.data, sent[rows], cohort.clients[places], keys, len(cohort))
        return sent

    def _chunks(self, jobs: Sequence[Job], solver: LocalSolver, pull: Pull | None = None) -> Iterator[Chunk]:
        """The clients of all jobs in chunks with similar amounts of work, trained.

        The parameters of a job are one model (D,), or one for each of its clients (K, D): then it is the only job.
        """
        self.task.scorer.train()
        owners = torch.cat([torch.full((len(job.cohort),), i) for i, job in enumerate(jobs)])
        places = torch.cat([torch.arange(len(job.cohort)) for job in jobs])
        clients = torch.cat([job.cohort.clients for job in jobs])
        keys = torch.cat([self._keys(job.cohort) for job in jobs])
        sizes = self.train.sizes.cpu()[clients]
        steps = torch.cat([_local_steps(solver, job.cohort, self.train) for job in jobs])
        lr = solver.learning_rate(jobs[0].cohort.round)
        # By steps, so that the active clients are a prefix; then by size, so that full batches of a chunk are padded least.
        # Small batches need no padding: there each model's clients stand together instead.
        second = sizes if solver.batch_size is None else owners
        order = torch.argsort(steps * (int(second.max()) + 1) + second, descending=True, stable=True)
        own = jobs[0].params.dim() == 2
        models = jobs[0].params if own else torch.stack([job.params for job in jobs])
        start = 0
        while start < len(order):
            largest = int(sizes[order[start:]].max())  # of all that are left: stragglers may be large and have few steps
            here = order[start : start + self._clients_per_chunk(models[0].nbytes, largest, solver)]
            starts = Starts(models, places[here] if own else owners[here], _pull_of(pull, here.to(self.device)))
            updates, losses = self._train_chunk(starts, clients[here], keys[here.to(self.device)], steps[here], solver, lr)
            yield Chunk(owners[here], places[here], updates, losses)
            start += len(here)

    def _keys(self, cohort: Cohort) -> Tensor:
        stream = rng.stream_key(cohort.seed, "batches", cohort.round)
        return rng.client_keys(stream, self.train.keys[cohort.clients.to(self.device)])

    def _clients_per_chunk(self, parameter_bytes: int, largest: int, solver: LocalSolver) -> int:
        """How many clients with up to `largest` examples to train at once: their parameters, gradients, batch and order."""
        if self.chunk_size is not None:
            return self.chunk_size
        whole = solver.batch_size is None or hasattr(solver, "shared_gradient")
        batch = largest if whole else min(solver.batch_size or 1, largest)
        each = 3 * parameter_bytes + 4 * batch * self.train.x.shape[1:].numel() + 24 * largest
        return max(1, (_CPU_CHUNK_BYTES if self.device.type == "cpu" else _GPU_CHUNK_BYTES) // each)

    def _train_chunk(
        self, starts: Starts, clients: Tensor, keys: Tensor, steps: Tensor, solver: LocalSolver, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Local work of clients that come by falling number of steps: updates (k, D) and mean batch losses (k,)."""
        clients = clients.to(self.device)
        everyone_works = int(steps[-1]) > 0
        fresh = torch.empty if everyone_works else torch.zeros
        update = fresh(len(clients), starts.models.shape[1], dtype=starts.models.dtype, device=self.device)
        if int(steps[0]) == 0:
            return update, torch.full((len(clients),), float("nan"), dtype=torch.float64)
        take_steps = linear_steps if fits_linear_steps(self.task, solver, starts.pull) else general_steps
        if hasattr(solver, "shared_gradient"):
            once = torch.ones_like(steps)
            own, _ = self._train_chunk(starts, clients, keys, once, GRADIENT, 1.0)  # −∇F_k(w^t)
            take_steps = partial(general_steps, correction=own.add_(solver.shared_gradient))
        cursor = cursor_of(solver, keys, self.train.sizes[clients], steps.to(self.device))
        batches = self._batches(cursor, self.train.offsets[clients].unsqueeze(1), update.dtype)
        seen = take_steps(self.task, starts, solver, lr, batches, update)
        count = 1 if hasattr(solver, "finish") else steps.to(self.device)
        return update, (seen / count).cpu()  # NaN for a client without a step

    def _batches(self, cursor: BatchCursor | SplitCursor, first: Tensor, dtype: torch.dtype) -> Iterator[Batch]:
        for step, k in enumerate(cursor.active):
            places, shares = cursor.batch(step, dtype)  # (k, b)
            rows = first[:k] + places
            last = step + 1 == len(cursor.active)
            yield Batch(self.train.inputs(rows, dtype), self.train.targets(rows, dtype), shares, last)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Trained clients of one or more jobs."""

    owners: Tensor  # (k,) which job
    places: Tensor  # (k,) where in its cohort
    updates: Tensor  # (k, D)
    losses: Tensor  # (k,) mean over the batches


def _pull_of(pull: Pull | None, here: Tensor) -> Pull | None:
    """The pull on some of the clients."""
    if pull is None:
        return None
    return Pull(pull.anchor if pull.anchor.dim() == 1 else pull.anchor[here], pull.strength[here])


def _nothing_yet(job: Job) -> LocalWork:
    empty = torch.empty(len(job.cohort), dtype=torch.float64)
    return LocalWork(torch.zeros_like(job.params), empty, empty.clone())


def _local_steps(solver: LocalSolver, cohort: Cohort, clients: ClientSet) -> Tensor:
    sizes = clients.sizes.cpu()[cohort.clients].tolist()
    if cohort.effort is None:
        return torch.tensor([solver.local_steps(size) for size in sizes], dtype=torch.int64)
    return torch.tensor([solver.local_steps(s, e) for s, e in zip(sizes, cohort.effort.tolist(), strict=True)])


def _sq_norms(updates: Tensor) -> Tensor:
    """Squared L2 norms of the rows, (K,) float64 on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1)  # in float64 it would copy all updates first
    squares = norms.double().square()
    extreme = ~torch.isfinite(norms) | (norms == 0)  # beyond what squares of the type hold
    if bool(extreme.any()):
        squares[extreme] = updates[extreme].double().square().sum(1)
    return squares.cpu()
