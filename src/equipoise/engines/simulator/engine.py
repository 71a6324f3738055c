"""The simulator: many clients as one batched computation, on a CPU or a GPU.

Each client of a chunk has its own row of parameters, and a local step is taken for all of them at once (`stacked.py`,
`linear.py`). Clients are sorted by their number of local steps (`chunks.py`), so that the clients still at work are always the
first rows: nothing is computed for a client that has finished, and only the last, smaller batch of an epoch is padded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from equipoise.core.task import Task, misclassified
from equipoise.core.update_checks import checked_norms, longest_square
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.loop import Loop, LoopEngine, ResidentSets, usable_device
from equipoise.engines.simulator.assignments import Order, Sum, adapted_losses, each_update, summed_updates
from equipoise.engines.simulator.batched_steps import Batch, stacked_gradients
from equipoise.engines.simulator.calibration import Choice, calibrated
from equipoise.engines.simulator.chunks import Queue, chunks_of, gradients_of, padding_of, squared_norms
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmax
from equipoise.engines.simulator.cuda.client_capacity import ClientMemory
from equipoise.engines.simulator.cuda.linear_round_graphs import SpanGraphs, Underway
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.precision import FULL, PRECISIONS, Precision
from equipoise.engines.simulator.scoring import Scoring
from equipoise.engines.simulator.workers import Worker, Workers, can_fork, one_thread
from equipoise.errors import EquipoiseNotice, is_whole, require
from equipoise.types import Aggregator, Cohort, Job, LocalSolver, LocalWork, Pull

_EARLY_BYTES = 2**30  # of a round under way, beside which another one is begun


@dataclass(frozen=True)
class Simulator:
    """Train many clients at once. `device` is any torch device.

    `chunk_size` is how many clients are trained as one batch, `workers` how many processes do so side by side on a CPU, each
    with one torch thread. None measures what is fastest before the first round; the choice is kept with a checkpoint, and for
    the next run on this machine. Results depend on neither beyond rounding.

    `compiled` says whether a CPU may train softmax regression by C code, which is compiled once where there is a C compiler; it
    is measured beside the rest, and used if it is the fastest.

    `precision` is how exactly a GPU multiplies: "float32", or faster and rougher "tf32" (10 bits of each factor) and "bf16" (7
    bits in the forward pass, too); parameters, gradients and sums are float32 in any case.

    A model that cannot be vectorised over clients is trained by the loop engine instead, with one notice.

    Source: ours; vectorising over clients with torch.func.
    """

    chunk_size: int | None = None
    device: str | None = None
    workers: int | None = None
    precision: str = "float32"
    compiled: bool = True

    def __post_init__(self) -> None:
        for name in ("chunk_size", "workers"):
            value = getattr(self, name)
            good = value is None or (is_whole(value) and value >= 1)
            require(good, name, "must be a whole number of at least 1, or None", value)
        require(isinstance(self.compiled, bool), "compiled", "must be True or False", self.compiled)
        on_cpu = self.device is None or str(self.device).startswith("cpu")
        require(self.workers is None or on_cpu, "workers", "must be left alone on a GPU", self.workers)
        known = self.precision in PRECISIONS
        require(known, "precision", f"must be one of {', '.join(map(repr, PRECISIONS))}", self.precision)
        fix = 'Leave it at "float32", or give device="cuda".'
        require(self.precision == "float32" or not on_cpu, "precision", "is for a GPU", self.precision, fix)

    def start(self, task: Task, data: FederatedData) -> SimulatorEngine | LoopEngine:
        given = Choice(self.chunk_size, self.workers)
        engine = SimulatorEngine(task, data, usable_device(self.device), given, Precision(self.precision), self.compiled)
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

    def __init__(
        self,
        task: Task,
        data: FederatedData,
        device: torch.device,
        given: Choice,
        precision: Precision = FULL,
        compiled: bool = True,
    ) -> None:
        self.device, self.task, self.sets = device, task.to(device), ResidentSets(device)
        self.data, self.train = data, self.sets[data.train]
        self.given, self.choice = given, given  # what was asked for, and what is used
        self.threads = torch.get_num_threads()
        self._last: list[Order] | None = []  # None: graphs of their own
        self.compiled = CompiledSoftmax(self.task, self.train) if compiled and device.type == "cpu" else None
        self._compiled: dict[str, CompiledSoftmax] = {}  # by split
        worker = Worker(self.task, data, self.train, compiled=self.compiled)
        if device.type == "cuda":
            worker = replace(worker, gradients_of=gradients_of(self.task, device, precision))
            worker = replace(worker, graphs=StepGraphs(worker, worker.gradients_of, precision))
        self.workers = Workers(worker, given.workers or 1)
        self.scoring = Scoring(self.task, device, precision)
        self.spans = SpanGraphs(worker, precision)
        self.memory = ClientMemory(worker)

    def round_context(self) -> AbstractContextManager[None]:
        """What a round of this engine is done in: threads of torch that wait for work would take a core from compiled code."""
        return one_thread() if self.choice.compiled else self.workers.alone()

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
        if solver is None or not getattr(solver, "adapts", False):
            graphed = self.spans.losses([Job(params, cohort, cohort.weights)])
            return self.losses_of([params], cohort)[0] if graphed is None else graphed[0]
        orders = self._orders([Job(params, cohort, cohort.weights)], solver)
        adapted = torch.empty(len(cohort), dtype=torch.float64)
        for order, losses in zip(orders, self.workers.share(adapted_losses, orders), strict=True):
            adapted[order.queue.places] = losses
        return adapted

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """The same for several models, (D,) each, at once: (M, K)."""
        if len(models) > 1:
            graphed = self.spans.losses([Job(params, cohort, cohort.weights) for params in models])
            if graphed is not None:
                return torch.stack(graphed)
        (losses,) = self._means(torch.stack(tuple(models)), self.train, cohort.clients, with_errors=False)
        return losses

    def losses_each(self, jobs: Sequence[Job]) -> list[Tensor]:
        """The same for several models, each with a cohort of its own: (K,) each."""
        found, cohorts = self.spans.losses(jobs), [job.cohort.clients for job in jobs]
        if found is None and len(jobs) > 1:
            models = torch.stack([job.params for job in jobs])
            if self.scoring.can_batch(models, self.train, cohorts):
                found = self.scoring.means_each(models, self.train, cohorts)
        return found if found is not None else [self.losses_of([job.params], job.cohort)[0] for job in jobs]

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, (n,) and (n,)."""
        loss, error = self._means(params.unsqueeze(0), self.sets[clients], None, with_errors=True)
        return loss[0], error[0]

    def _means(self, models: Tensor, clients: ClientSet, which: Tensor | None, *, with_errors: bool) -> tuple[Tensor, ...]:
        """Mean loss (and error) per model (M, D) and client, (M, n) each: by compiled code if that trains, too."""
        compiled = self._compiled_for(clients) if self.choice.compiled else None
        if compiled is None or not (compiled.possible and (not with_errors or self.task.error is misclassified)):
            return self.scoring.shared_means(self.workers, models, clients, which, with_errors=with_errors)
        return compiled.scores(models, which, self.choice.threads)[: 1 + with_errors]

    def _compiled_for(self, clients: ClientSet) -> CompiledSoftmax | None:
        """Compiled code for one of the splits; None for data from elsewhere, which are not kept."""
        split = next((name for name, held in self.data.splits.items() if self.sets[held] is clients), None)
        if self.compiled is None or split is None:
            return None
        if split not in self._compiled:
            self._compiled[split] = self.compiled if clients is self.train else CompiledSoftmax(self.task, clients)
        return self._compiled[split]

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models, (K,) and (K,)."""
        return self.scoring.own_means(models, self.sets[clients], which)

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        orders = self._orders([Job(params, cohort, cohort.weights)], solver, attacked=True)
        updates, losses = self._each(orders, len(cohort))
        sq_norms = squared_norms(updates)
        return LocalWork(updates, checked_norms(sq_norms, losses, longest_square(params)), losses)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, aggregated and added up chunk by chunk: total (D,); memory is bounded by the chunk."""
        return self.summed_updates([Job(params, cohort, weights)], solver, aggregator)[0]

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """The same for several models in one batched computation: one result per job. Their cohorts are of one round."""
        if (graphed := self.spans.sums(jobs, solver, aggregator)) is not None:
            self._last = None
            return graphed
        orders = self._orders(jobs, solver, attacked=True)
        longest = tuple(longest_square(job.params) for job in jobs)
        counts = [len(job.cohort) for job in jobs]
        first = torch.tensor([0, *accumulate(counts[:-1])])  # the jobs' clients stand one after the other
        places = [first[order.queue.owners] + order.queue.places for order in orders]
        weights = torch.cat([job.weights.double().cpu() for job in jobs])
        asked = [(order, Sum(aggregator, weights[here], longest)) for order, here in zip(orders, places, strict=True)]
        parts = self.workers.share(summed_updates, asked)
        sq_norms, losses = torch.empty(2, sum(counts), dtype=torch.float64)
        for part, here in zip(parts, places, strict=True):
            sq_norms[here], losses[here] = part.sq_norms, part.losses
        totals = reduce(torch.add, [part.totals for part in parts])
        return [LocalWork(*work) for work in zip(totals, sq_norms.split(counts), losses.split(counts), strict=True)]

    @property
    def look_ahead(self) -> SimulatorEngine | None:
        """The engine itself, if the next round may be begun while one is under way: on a GPU, for work of one graph."""
        return self if self.spans.possible else None

    @property
    def measured(self) -> SimulatorEngine:
        """The engine itself: it measures what is fastest."""
        return self

    def read(self) -> dict[str, Any]:
        """The choice as plain values, for a checkpoint."""
        return asdict(self.choice)

    def has_capacity(self) -> bool:
        """Whether memory allows another round beside those under way."""
        return self.spans.bytes_under_way <= _EARLY_BYTES

    def begin_round(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator, server: float) -> Underway | None:
        """Start `summed_updates` and the server's steps w + server · total, and go on; None if this is not work of the kind."""
        started = self.spans.begin(jobs, solver, aggregator, server)
        if started is not None:
            self._last = None
        return started

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D)."""
        if pull is not None:
            pull = Pull(pull.anchor.to(models), pull.strength.to(models))
        orders = self._orders([Job(models, cohort, cohort.weights)], solver, pull)
        return self._each(orders, len(cohort))[0].add_(models)

    def _orders(
        self, jobs: Sequence[Job], solver: LocalSolver, pull: Pull | None = None, *, attacked: bool = False
    ) -> list[Order]:
        """What each process does: with `count` of them, every count-th client by falling number of steps."""
        queue = Queue.of(jobs, solver, self.train, pull)
        lr = solver.learning_rate(jobs[0].cohort.round)
        cohorts = tuple(len(job.cohort) for job in jobs) if attacked else ()
        if self.device.type == "cpu" and not self.choice.serves(len(queue)):
            self.use(calibrated(self, queue, solver, lr))
        chunk_size = self.choice.chunk_size
        if self.device.type == "cuda" and chunk_size is None:
            chunk_size = self.memory.most_clients(queue, solver)
        threads = self.choice.threads if self.compiled is not None and self.compiled.fits(solver, lr, pull) else 0
        count = 1 if threads else min(self.workers.count, len(queue))
        parts = [queue.take(slice(i, None, count)) for i in range(count)] if count > 1 else [queue]
        self._last = [Order(part, solver, lr, chunk_size, cohorts, threads) for part in parts]
        return self._last

    def _each(self, orders: Sequence[Order], count: int) -> tuple[Tensor, Tensor]:
        """Updates (K, D) and losses (K,) of every client, in the order of the cohort."""
        models = orders[0].queue.models
        updates = torch.empty(count, models.shape[1], dtype=models.dtype, device=self.device)
        losses = torch.empty(count, dtype=torch.float64)
        for order, (found, seen) in zip(orders, self.workers.share(each_update, orders), strict=True):
            updates[order.queue.places.to(self.device)] = found
            losses[order.queue.places] = seen
        return updates, losses

    @property
    def waste(self) -> float:
        """The share of examples computed in the last call that were padding."""
        if self._last is None:
            return 1 - self.spans.useful / max(1, self.spans.computed)
        if any(order.threads for order in self._last):  # one client at a time
            return 0.0
        chunks = [c for o in self._last for c in chunks_of(o.queue, self.train, o.solver, o.chunk_size)]
        return padding_of(chunks, self._last[0].solver)

    def use(self, choice: Choice | Mapping[str, Any]) -> None:
        """Go on with this chunk size and these workers, except where others were asked for."""
        if isinstance(choice, Mapping):
            choice = Choice(**choice)
        self.choice = Choice(
            self.given.chunk_size or choice.chunk_size, self.given.workers or choice.workers, choice.clients, choice.compiled
        )  # fmt: skip
        self.workers.count = (self.choice.workers or 1) if can_fork() else 1
