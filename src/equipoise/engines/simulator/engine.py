"""The simulator: many clients as one batched computation, on a CPU or a GPU.

Each client of a chunk has its own row of parameters, and a local step is taken for all of them at once, by the first of several
paths that supports the work (`paths.py`). Clients are sorted by their number of local steps (`client_queue.py`), so that the
clients still at work are always the first rows: nothing is computed for a client that has finished, and only the last, smaller
batch of an epoch is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.attacks.malicious import corrupted_work, sees_all_updates, summed_rows
from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import read, solver_traits
from equipoise.core.carried import count_carried
from equipoise.core.per_example_losses import misclassified
from equipoise.core.task import Task
from equipoise.core.update_checks import checked_norms, longest_square, with_carried
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.device_sets import DeviceSets
from equipoise.engines.simulator import paths as local_paths
from equipoise.engines.simulator.assignments import (
    Assignment,
    Summation,
    adapted_losses,
    each_update,
    put_together,
    sum_updates,
)
from equipoise.engines.simulator.calibration import CalibrationTask, Choice, SpeedMeasurement, StoredChoice, calibrated
from equipoise.engines.simulator.client_queue import ClientQueue, chunks_of, padding_share, pull_on_parameters, whole_jobs
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmax, CompiledSoftmaxPath
from equipoise.engines.simulator.cuda.client_capacity import ClientCapacity
from equipoise.engines.simulator.cuda.device_choice import measured_on_device
from equipoise.engines.simulator.cuda.linear_rounds import LinearRounds, LinearRoundUnderWay
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.explanation import measured_lines, path_answers, table
from equipoise.engines.simulator.local_rule import LocalRule, PullKind, kind_of
from equipoise.engines.simulator.local_work import Worker, Workplace, squared_norms
from equipoise.engines.simulator.precision import FULL, Precision
from equipoise.engines.simulator.scoring import Scoring
from equipoise.engines.simulator.vectorisation import BatchingTrial, try_batching
from equipoise.engines.simulator.workers import Workers, can_fork, one_thread
from equipoise.solvers import SGD
from equipoise.types import Aggregator, AggregatorTraits, Cohort, Job, LocalSolver, LocalWork, LookAheadEngine, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_EXPLAINED = 200  # clients whose chunks an explanation is about


class SimulatorEngine:
    """The running simulator of one task on one data set, whose tensors live on the device."""

    def __init__(
        self, task: Task, data: FederatedData, device: torch.device, given: Choice, precision: Precision = FULL,
        compiled: bool = True, resident: bool | None = None,
    ) -> None:  # fmt: skip
        self.device, self.task, self.sets = device, task.to(device), DeviceSets(device, data, resident=resident)
        self.data, self.train = data, self.sets[data.train]
        self.omniscient_attack = sees_all_updates(data)
        self.given, self.choice = given, given  # what was asked for, and what is used
        self.measurement: SpeedMeasurement | None = None
        self.measures = True  # whether it may measure; not where somebody else decides for several engines
        self.cohort_sizes: tuple[int, ...] | None = None  # of each job, where this engine works on a part of the cohort
        self.threads = torch.get_num_threads()
        self._last: list[Assignment] | None = []  # None: a graph of the whole round
        self._rules: dict[tuple[bool, PullKind], LocalRule] = {}
        self._aggregator: tuple[Aggregator | None, AggregatorTraits] = (None, AggregatorTraits())
        self.trial = BatchingTrial(None)
        self.unvectorised: str | None = None  # why clients are trained one by one, if they must be
        worker = Worker(Workplace(self.task, data, self.train, precision, compiled), local_paths.PATHS)
        self.workers = Workers(worker, given.workers or 1)
        self.scoring = Scoring(self.task, device, precision)
        self.capacity = ClientCapacity(worker.place)
        (self.linear_rounds,) = (path for path in worker.paths if isinstance(path, LinearRounds))
        self.has_capacity = self.linear_rounds.has_capacity
        (self.step_graphs,) = (path for path in worker.paths if isinstance(path, StepGraphs))
        (self.compiled,) = (path.code for path in worker.paths if isinstance(path, CompiledSoftmaxPath))
        self._compiled: dict[str, CompiledSoftmax] = {}  # by split

    def fall_back(self, reason: str) -> None:
        """Train clients one by one, and score one model at a time."""
        self.unvectorised = self.workers.own.unbatchable = reason
        self.scoring.models_together = False

    def round_context(self) -> AbstractContextManager[None]:
        """What a round of this engine is done in: threads of torch that wait for work would take a core from compiled code."""
        chosen = self.workers.own.path(self.choice.path)
        return one_thread() if chosen is not None and chosen.threaded else self.workers.alone()

    @property
    def paths_taken(self) -> tuple[str, ...]:
        """The names of the paths that did the local work of the last call in this process."""
        return tuple(self.workers.own.taken)

    @property
    def measured(self) -> StoredChoice:
        """The choice that was made by measuring, for checkpoints."""
        return StoredChoice(self)

    def why_not_vectorised(self) -> str | None:
        """Why clients of this task cannot be trained as one batch; None if they can."""
        self.sets.hold(self.train, torch.tensor([0, len(self.train) - 1]))
        self.trial = try_batching(self.task, self.train)
        return self.trial.reason

    @property
    def expect(self) -> Callable[[Tensor], None] | None:
        """Reads ahead the examples of clients at these positions, which take part in the next round; None: all are there."""
        return self.sets.expecting(self.train)

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """F_k(w) of each client of the cohort, (K,): one pass over all their examples, or the inner steps of a solver."""
        rule = None if solver is None else self._rule(solver, cohort.round)
        if rule is None or not rule.traits.adapts:
            return self.losses_each([Job(params, cohort, cohort.weights)])[0]
        assignments = self._assignments([Job(params, cohort, cohort.weights)], rule)
        adapted = torch.empty(len(cohort), dtype=torch.float64)
        for assignment, losses in zip(assignments, self.workers.share(adapted_losses, assignments), strict=True):
            adapted[assignment.queue.places] = losses
        return adapted

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """`losses` of several models, (D,) each, at once: (M, K)."""
        self.sets.hold(self.train, cohort.clients)
        if len(models) > 1:
            graphed = self.linear_rounds.losses([Job(params, cohort, cohort.weights) for params in models])
            if graphed is not None:
                return torch.stack(graphed)
        (losses,) = self._means(torch.stack(tuple(models)), self.train, cohort.clients, with_errors=False)
        return losses

    def losses_each(self, jobs: Sequence[Job]) -> list[Tensor]:
        """`losses` of several models, each with a cohort of its own: (K,) each."""
        cohorts = [job.cohort.clients for job in jobs]
        self.sets.hold(self.train, *cohorts)
        losses = self.linear_rounds.losses(jobs)
        if losses is None and len(jobs) > 1:
            models = torch.stack([job.params for job in jobs])
            if self.scoring.can_batch(models, self.train, cohorts):
                losses = self.scoring.means_each(models, self.train, cohorts)
        return losses if losses is not None else [self.losses_of([job.params], job.cohort)[0] for job in jobs]

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, or of those at positions `which`, (n,) and (n,)."""
        here, models = self.sets[clients], params.unsqueeze(0)
        parts = [self._means(models, here, part, with_errors=True) for part in self.sets.in_parts(here, which)]
        loss, error = parts[0] if len(parts) == 1 else map(partial(torch.cat, dim=1), zip(*parts, strict=True))
        return loss[0], error[0]

    def _means(self, models: Tensor, clients: ClientSet, which: Tensor | None, *, with_errors: bool) -> tuple[Tensor, ...]:
        """Mean loss (and error) per model (M, D) and client, (M, n) each: by compiled code if that trains, too."""
        compiled = self._compiled_for(clients) if self.choice.path == CompiledSoftmaxPath.name else None
        if compiled is None or compiled.obstacle is not None or (with_errors and self.task.error is not misclassified):
            return self.scoring.shared_means(self.workers, models, clients, which, with_errors=with_errors)
        return compiled.scores(models, which, self.choice.workers or 1)[: 1 + with_errors]

    def _compiled_for(self, clients: ClientSet) -> CompiledSoftmax | None:
        """Compiled code for one of the splits; None for data from elsewhere, which are not kept."""
        split = next((name for name, held in self.data.splits.items() if self.sets[held] is clients), None)
        if not self.workers.own.place.compiled or split is None:
            return None
        if split not in self._compiled:
            self._compiled[split] = self.compiled if clients is self.train else CompiledSoftmax(self.task, clients)
        return self._compiled[split]

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of clients at their own models, (K,) and (K,)."""
        here, parts, done = self.sets[clients], [], 0
        for part in self.sets.in_parts(here, which):
            count = len(which if part is None else part)
            parts.append(self.scoring.own_means(models[done : done + count], here, which if part is None else part))
            done += count
        loss, error = map(torch.cat, zip(*parts, strict=True))
        return loss, error

    def measure(self, params: Tensor, clients: ClientSet, metrics: ClientMetrics, which: Tensor | None = None) -> Tensor:
        """Each metric of every client, or of those at `which` (n,), at one model (D,) or at their own (n, D): (M, n)."""
        here, parts, done = self.sets[clients], [], 0
        for part in self.sets.in_parts(here, which):
            positions = torch.arange(len(clients)) if part is None else part
            models = params if params.dim() == 1 else params[done : done + len(positions)]
            parts.append(self.scoring.measure(models, here, metrics, positions))
            done += len(positions)
        return torch.cat(parts, 1)

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client: updates (K, D)."""
        pull = self._own_prox([Job(params, cohort, cohort.weights)])
        rule = self._rule(solver, cohort.round, pull=kind_of(pull))
        assignments = self._assignments([Job(params, cohort, cohort.weights)], rule, pull, attacked=True)
        (updates, losses, rows, carried), own = self._each(assignments, len(cohort)), self.task.split(params)[0]
        work = LocalWork(updates, checked_norms(squared_norms(updates), losses, longest_square(own)), losses, rows=rows)
        work = corrupted_work(self.data, work, own, cohort) if self.omniscient_attack else work
        return work if carried is None else with_carried(work, carried)

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work, aggregated and added up chunk by chunk: total (D,); memory is bounded by the chunk."""
        return self.summed_updates([Job(params, cohort, weights)], solver, aggregator)[0]

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """`summed_update` of several models in one batched computation: one per job. Their cohorts are of one round."""
        if self.omniscient_attack:
            return [summed_rows(self.updates(job.params, job.cohort, solver), job.weights, aggregator) for job in jobs]
        pull = self._own_prox(jobs)
        rule, plain = self._rule(solver, jobs[0].cohort.round, pull=kind_of(pull)), self._is_weighted_sum(aggregator)
        self.sets.hold(self.train, *(job.cohort.clients for job in jobs))
        if plain and (graphed := self.linear_rounds.sums(jobs, rule)) is not None:
            self._note_graph()
            return graphed
        if plain and len(jobs) == 1 and (again := self.step_graphs.sum_again(jobs[0], rule)) is not None:
            return [again]
        assignments = self._assignments(jobs, rule, pull, attacked=True)
        longest = tuple(longest_square(self.task.split(job.params)[0]) for job in jobs)
        counts = [len(job.cohort) for job in jobs]
        first = torch.tensor([0, *accumulate(counts[:-1])])  # the jobs' clients stand one after the other
        places = [first[assignment.queue.owners] + assignment.queue.places for assignment in assignments]
        weights = torch.cat([job.weights.double().cpu() for job in jobs])
        asked = [
            (assignment, Summation(aggregator, plain, weights[here], longest, self._sums(aggregator).clips_to))
            for assignment, here in zip(assignments, places, strict=True)
        ]
        parts = self.workers.share(sum_updates, asked)
        sq_norms, losses = torch.empty(2, sum(counts), dtype=torch.float64)
        for part, here in zip(parts, places, strict=True):
            sq_norms[here], losses[here] = part.sq_norms, part.losses
        totals = reduce(torch.add, [part.totals for part in parts])
        rows = put_together([part.rows for part in parts], places)
        kept: list[Any] = [None] * len(jobs) if rows is None else list(torch.split(rows, counts))
        works = zip(totals, sq_norms.split(counts), losses.split(counts), kept, strict=True)
        summed = [LocalWork(total, norms, seen, rows=own) for total, norms, seen, own in works]
        carried = put_together([part.carried for part in parts], places)
        if carried is None:
            return summed
        counted = torch.where(torch.isfinite(sq_norms), weights, 0.0)
        each = zip(torch.split(carried, counts), torch.split(counted, counts), strict=True)
        means = [count_carried(rows, shares.tolist()) for rows, shares in each]
        return [replace(work, carried=m.value(), carried_mass=m.mass) for work, m in zip(summed, means, strict=True)]

    def summed_apart(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> Iterator[LocalWork]:
        """`summed_update` of each job in turn: no bit of one depends on the others. Where a path promises that much for the
        jobs of a chunk, it does several in one call, which takes less time.
        """
        for several in whole_jobs(jobs, self._clients_apart(jobs, solver, aggregator)):
            works = self.summed_updates(several, solver, aggregator)
            worker = self.workers.own
            if len(several) > 1 and (worker.taken != {self.choice.path: 1} or worker.summed != 1):
                # They were no single chunk, or the update of one could not be used: that has changed how all were added up.
                works = [self.summed_update(job.params, job.cohort, solver, job.weights, aggregator) for job in several]
            yield from works

    def _clients_apart(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> int:
        """How many clients of several jobs may be one chunk without a change of bits; 0: each job must be alone."""
        chosen, traits = self.workers.own.path(self.choice.path), self._sums(aggregator)
        added_up = (traits.weighted_sum or traits.clips_to is not None) and not self.data.malicious
        if chosen is None or not chosen.sums_each_job_alone or not added_up or jobs[0].cohort.prox is not None:
            return 0
        threads = self._own_threads(self._rule(solver, jobs[0].cohort.round))
        return (self.choice.chunk_size or 0) if threads == 1 else 0

    @property
    def look_ahead(self) -> LookAheadEngine | None:
        """Starts rounds early, on a GPU, for work of one graph; None where no rounds are of that kind."""
        return self if self.unvectorised is None and self.linear_rounds.obstacle is None else None

    def begin_round(
        self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator, server_rate: float
    ) -> LinearRoundUnderWay | None:
        """Start `summed_updates` and the server's steps w + rate · total, and go on; None if no graph does this work."""
        if not self._is_weighted_sum(aggregator):
            return None
        self.sets.hold(self.train, *(job.cohort.clients for job in jobs))
        started = self.linear_rounds.begin(jobs, self._rule(solver, jobs[0].cohort.round), server_rate)
        if started is not None:
            self._note_graph()
        return started

    def _note_graph(self) -> None:
        """A graph of the whole round has done the work."""
        taken = self.workers.own.taken
        if self._last is not None or LinearRounds.name not in taken:
            self._last = None
            taken.clear()
            taken[LinearRounds.name] = 1

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Each client's own model after its local work, (K, D)."""
        if pull is not None:
            pull = pull_on_parameters(Pull(pull.anchor.to(models), pull.strength.to(models)), self.task.layout.dimension)
        rule = self._rule(solver, cohort.rate_round, True, kind_of(pull))
        assignments = self._assignments([Job(models, cohort, cohort.weights)], rule, pull)
        updates, *_, carried = self._each(assignments, len(cohort))
        return updates.add_(models) if carried is None else self.task.after_work(models, updates, carried)

    def _own_prox(self, jobs: Sequence[Job]) -> Pull | None:
        """The pull to the round's model by strengths of the clients' own, where a cohort has such; a run with them is alone."""
        job = jobs[0]
        if job.cohort.prox is None:
            return None
        params = self.task.split(job.params)[0]
        return Pull(params, job.cohort.prox.to(params))

    def _rule(self, solver: LocalSolver, round_index: int, own_models: bool = False, pull: PullKind = "none") -> LocalRule:
        """The local rule of a round: one object as long as solver and rate stay, so that its traits are read once."""
        lr, held = solver.learning_rate(round_index), self._rules.get((own_models, pull))
        if held is None or held.solver is not solver or held.lr != lr:
            held = self._rules[own_models, pull] = LocalRule.of(solver, lr, own_models, pull)
        return held

    def _is_weighted_sum(self, aggregator: Aggregator) -> bool:
        """Whether an aggregator is the weighted mean, which paths may write out."""
        return self._sums(aggregator).weighted_sum

    def _sums(self, aggregator: Aggregator) -> AggregatorTraits:
        """What an aggregator offers, read once as long as it stays the same."""
        if self._aggregator[0] is not aggregator:
            self._aggregator = aggregator, read(AggregatorTraits, aggregator)
        return self._aggregator[1]

    def _assignments(
        self, jobs: Sequence[Job], rule: LocalRule, pull: Pull | None = None, *, attacked: bool = False
    ) -> list[Assignment]:
        """What each process does: with `count` of them, every count-th client by falling number of steps."""
        self.sets.hold(self.train, *(job.cohort.clients for job in jobs))
        split = [self.task.split(job.params) for job in jobs]
        jobs = [replace(job, params=params) for job, (params, _) in zip(jobs, split, strict=True)]
        queue, worker = ClientQueue.of(jobs, rule, self.train, pull), self.workers.own
        if self.task.carried.names:
            queue = replace(queue, carried=split[0][1] if queue.own else torch.stack([carried for _, carried in split]))
        cohorts = (self.cohort_sizes or tuple(len(job.cohort) for job in jobs)) if attacked else ()
        if self.measures and self.device.type == "cpu" and not self.choice.serves(len(queue)):
            self.measurement = calibrated(CalibrationTask(self.workers, self.given, self.threads, queue, rule))
            self.use(self.measurement.choice)
        if self.device.type == "cuda" and self.choice.path is None:
            self._choose_path(queue, rule)
        chunk_size = self.choice.chunk_size
        if self.device.type == "cuda" and chunk_size is None:
            chunk_size = self.capacity.most_clients(queue, rule, self._batches_clients(rule))
        threads = self._own_threads(rule)
        parts = queue.share(1 if threads else min(self.workers.count, len(queue)))
        worker.taken.clear()
        worker.summed = 0
        self._last = [Assignment(part, rule, chunk_size, cohorts, self.choice.path, threads) for part in parts]
        return self._last

    def _choose_path(self, queue: ClientQueue, rule: LocalRule) -> None:
        """On a GPU, try the paths that do not batch clients against the first one that does, and go on with the fastest."""
        measured = measured_on_device(self.workers.own, queue, rule, self.capacity)
        if measured is not None:
            self.measurement = measured
            self.use(measured.choice)

    def _batches_clients(self, rule: LocalRule) -> bool:
        """Whether the path that does work of a rule has a batch of clients in memory."""
        candidates = self.workers.own.candidates(rule, self.choice.path)
        return self.unvectorised is None and candidates[0].batches

    def _own_threads(self, rule: LocalRule) -> int:
        """Threads of the chosen path, if it has its own and does work of this rule; else 0."""
        chosen = self.workers.own.path(self.choice.path)
        able = chosen is not None and chosen.threaded and self.workers.own.why_not(chosen, rule) is None
        return (self.choice.workers or 1) if able else 0

    def _each(self, assignments: Sequence[Assignment], count: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Updates (K, D), losses (K,), what is kept (K, width) and carried values (K, C) of clients, as in the cohort."""
        models = assignments[0].queue.models
        updates = torch.empty(count, models.shape[1], dtype=models.dtype, device=self.device)
        losses = torch.empty(count, dtype=torch.float64)
        parts = self.workers.share(each_update, assignments)
        for assignment, (part, seen, *_) in zip(assignments, parts, strict=True):
            updates[assignment.queue.places.to(self.device)] = part
            losses[assignment.queue.places] = seen
        places = [each.queue.places for each in assignments]
        rows, carried = (put_together([part[number] for part in parts], places) for number in (2, 3))
        return updates, losses, rows, carried

    @property
    def waste(self) -> float:
        """The share of examples computed in the last call that were padding."""
        if self._last is None:
            return 1 - self.linear_rounds.useful / max(1, self.linear_rounds.computed)
        chosen = self.workers.own.path(self.choice.path)
        one_by_one = self.unvectorised is not None or (chosen is not None and not chosen.batches)
        if not self._last or one_by_one or any(assignment.threads for assignment in self._last):  # one client at a time
            return 0.0
        chunks = [c for a in self._last for c in chunks_of(a.queue, self.train, a.rule, a.chunk_size)]
        return padding_share(chunks, self._last[0].rule)

    def use(self, choice: Choice) -> None:
        """Go on with this chunk size, these workers and this path, except where others were asked for."""
        self.choice = Choice(
            self.given.chunk_size or choice.chunk_size, self.given.workers or choice.workers, choice.clients, choice.path
        )
        self.workers.count = (self.choice.workers or 1) if can_fork() else 1

    def explain(self, algorithm: Algorithm | None = None) -> str:
        """For this model, these data and an algorithm: which path does the local work and why, and what was measured."""
        solver = SGD() if algorithm is None else algorithm.solver
        traits, title = solver_traits(solver), f"{type(self.task.module).__name__} on {self.device}, {solver!r}"
        if traits.prepare is not None and traits.solver is not None:
            solver, title = traits.solver, f"{title}, which prepares every round, shown as {traits.solver!r}"
        plain = algorithm is None or self._is_weighted_sum(algorithm.aggregator)
        lines = [table(f"Local work: {title}", self._answers(LocalRule.of(solver, solver.learning_rate(0)), plain))]
        if algorithm is not None and algorithm.personal is not None:
            own = LocalRule.of(solver, solver.learning_rate(0), own_models=True)
            lines.append(table("Work of personal models, without a pull:", self._answers(own, plain)))
        if self.unvectorised is not None:
            how = "a few side by side" if self.device.type == "cuda" else "one at a time in each process"
            lines.append(f"The model cannot be vectorised over clients ({self.unvectorised}).")
            lines.append(f"Each client is therefore trained on its own, {how}.")
        threads = self._own_threads(LocalRule.of(solver, 0.0)) or (1 if self.workers.count > 1 else self.threads)
        lines.append(measured_lines(self.choice, self.measurement, self.workers.count, threads))
        lines += [str(self.trial)] if str(self.trial) else []
        return "\n".join(lines)

    def _answers(self, rule: LocalRule, sums_only: bool) -> dict[str, str]:
        """By path, whether it is taken for the first clients of the training set and why not."""
        worker = self.workers.own
        count = min(len(self.train), _EXPLAINED)
        even = torch.full((count,), 1 / count, dtype=torch.float64)
        cohort = Cohort(0, 0, torch.arange(count), even, even)
        models = torch.zeros(self.task.layout.dimension, dtype=self.task.layout.dtype, device=self.device)
        models = models.expand(count, -1) if rule.own_models else models
        queue = ClientQueue.of([Job(models, cohort, cohort.weights)], rule, self.train)
        asked = Assignment(queue, rule, self.choice.chunk_size, (), self.choice.path, self._own_threads(rule))
        chunks = chunks_of(queue, self.train, rule, self.choice.chunk_size)
        works = [asked.work(worker, chunk) for chunk in chunks]
        return path_answers(works, sums_only=sums_only, measurement=self.measurement)
