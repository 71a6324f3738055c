"""The simulator: many clients as one batched computation, on a CPU or a GPU.

Each client of a chunk has its own row of parameters, and a local step is taken for all of them at once (`stacked.py`). Clients
are sorted by their number of local steps, so that the clients still at work are always the first rows: nothing is computed for
a client that has finished, and only the last, smaller batch of an epoch is padded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise import rng
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.loop import Loop, LoopEngine, ResidentSets, usable_device
from equipoise.engines.stacked import Batch, fits_linear_steps, general_steps, linear_steps, stacked_gradients
from equipoise.errors import EquipoiseNotice, is_whole, require
from equipoise.solvers.batches import BatchCursor
from equipoise.task import Task
from equipoise.types import Aggregator, Cohort, LocalSolver, LocalWork

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
        self.train = self.sets[data.train]

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
                loss = self.task.losses(leaf, x[i], y[i]).mean()
                single.append(self.task.layout.unflatten(torch.autograd.grad(loss, leaf)[0]))
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap's own slow loop
            try:
                together, _ = stacked_gradients(self.task, params, Batch(x, y, even))
            except Exception as failure:  # vmap refuses in many ways
                return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:160]
        for name, gradient in together.items():
            expected = torch.stack([s[name] for s in single])
            scale = float(expected.nan_to_num(0, 0, 0).abs().max()) + 1e-3
            if not torch.allclose(gradient, expected, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
                return f"the batched gradient of {name} differs from the plain one"
        return None

    def losses(self, params: Tensor, cohort: Cohort) -> Tensor:
        """F_k(w) of each client of the cohort, (K,): one pass over all their examples."""
        loss, _ = self._segment_means(params, self.train, cohort.clients.to(self.device))
        return loss

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, (n,) and (n,)."""
        return self._segment_means(params, self.sets[clients], None)

    def _segment_means(self, params: Tensor, clients: ClientSet, which: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean loss and error per client at the shared model: large batches over clients' borders, then segment means."""
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
        losses = torch.empty(count, dtype=torch.float64, device=self.device)
        errors = torch.empty_like(losses)
        with torch.no_grad():
            for start in range(0, count, width):
                part = slice(start, min(start + width, count))
                here = part if rows is None else rows[part]
                x, y = clients.inputs(here, params.dtype), clients.targets(here, params.dtype)
                losses[part], errors[part] = self.task.scores(params, x, y)
        means = [torch.segment_reduce(v, "mean", lengths=sizes, unsafe=True).cpu() for v in (losses, errors)]
        return means[0], means[1]

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        updates = torch.empty(len(cohort), len(params), dtype=params.dtype, device=self.device)
        losses = torch.empty(len(cohort), dtype=torch.float64)
        for places, update, loss in self._chunks(params, cohort, solver):
            updates[places.to(self.device)] = update
            losses[places] = loss
        return LocalWork(updates, _sq_norms(updates), losses)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, aggregated and added up chunk by chunk: total (D,); memory is bounded by the chunk."""
        total = torch.zeros_like(params)
        sq_norms, losses = torch.empty(len(cohort), dtype=torch.float64), torch.empty(len(cohort), dtype=torch.float64)
        for places, update, loss in self._chunks(params, cohort, solver):
            total += aggregator(update, weights[places].to(self.device))[0]
            sq_norms[places] = _sq_norms(update)
            losses[places] = loss
        return LocalWork(total, sq_norms, losses)

    def _chunks(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Chunks of clients with similar amounts of work: (places in the cohort, updates (k, D), mean batch losses (k,))."""
        self.task.scorer.train()
        sizes = self.train.sizes.cpu()[cohort.clients]
        steps = torch.tensor([solver.local_steps(s) for s in sizes.tolist()])
        # By steps, then by size: the active clients are a prefix, and batches of one chunk are padded least.
        order = torch.argsort(steps * (int(sizes.max()) + 1) + sizes, descending=True, stable=True)
        start = 0
        while start < len(order):
            # The first client of a chunk is its largest.
            count = self._clients_per_chunk(len(params) * params.element_size(), int(sizes[order[start]]), solver)
            places = order[start : start + count]
            update, loss = self._train_chunk(params, cohort.take(places), steps[places], solver)
            yield places, update, loss
            start += count

    def _clients_per_chunk(self, parameter_bytes: int, largest: int, solver: LocalSolver) -> int:
        """How many clients with up to `largest` examples to train at once: their parameters, gradients, batch and order."""
        if self.chunk_size is not None:
            return self.chunk_size
        batch = largest if solver.batch_size is None else min(solver.batch_size, largest)
        each = 3 * parameter_bytes + 4 * batch * self.train.x.shape[1:].numel() + 24 * largest
        return max(1, (_CPU_CHUNK_BYTES if self.device.type == "cpu" else _GPU_CHUNK_BYTES) // each)

    def _train_chunk(self, params: Tensor, cohort: Cohort, steps: Tensor, solver: LocalSolver) -> tuple[Tensor, Tensor]:
        """Local work of a chunk whose clients come by falling number of steps: updates (k, D) and mean batch losses (k,)."""
        clients = cohort.clients.to(self.device)
        update = torch.zeros(len(clients), len(params), dtype=params.dtype, device=self.device)
        if int(steps[0]) == 0:
            return update, torch.full((len(clients),), float("nan"), dtype=torch.float64)
        keys = rng.client_keys(rng.stream_key(cohort.seed, "batches", cohort.round), self.train.keys[clients])
        cursor = BatchCursor(keys, self.train.sizes[clients], solver.batch_size, steps.to(self.device))
        batches = self._batches(cursor, self.train.offsets[clients].unsqueeze(1), params.dtype)
        take_steps = linear_steps if fits_linear_steps(self.task, solver) else general_steps
        loss = take_steps(self.task, params, solver, solver.learning_rate(cohort.round), batches, update)
        return update, (loss / steps.to(self.device)).cpu()  # NaN for a client without a step

    def _batches(self, cursor: BatchCursor, first: Tensor, dtype: torch.dtype) -> Iterator[Batch]:
        for step, k in enumerate(cursor.active):
            places, shares = cursor.batch(step, dtype)  # (k, b)
            rows = first[:k] + places
            yield Batch(self.train.inputs(rows, dtype), self.train.targets(rows, dtype), shares)


def _sq_norms(updates: Tensor) -> Tensor:
    """Squared L2 norms of the rows, (K,) float64 on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1)  # in float64 it would copy all updates first
    squares = norms.double().square()
    extreme = ~torch.isfinite(norms) | (norms == 0)  # beyond what squares of the type hold
    if bool(extreme.any()):
        squares[extreme] = updates[extreme].double().square().sum(1)
    return squares.cpu()
