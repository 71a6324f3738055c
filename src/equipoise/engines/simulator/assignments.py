"""What the simulator asks of one process in one call: local work of some clients, one by one or summed up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.attacks.malicious import corrupted
from equipoise.core.update_checks import usable
from equipoise.engines.simulator.client_queue import ClientQueue, chunks_of, owner_rows, owner_stretches
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, ClippedSum, WeightedSums, Worker, squared_norms
from equipoise.types import Aggregator


@dataclass(frozen=True, eq=False)
class Assignment:
    """Local work of the clients of a queue, in chunks."""

    queue: ClientQueue
    rule: LocalRule
    chunk_size: int | None
    cohorts: tuple[int, ...] = ()  # how many clients each job has in all, for attacks
    chosen: str | None = None  # the path that a measurement or a user has named
    threads: int = 0  # of a path that has its own, if that is chosen

    def trained(
        self, worker: Worker, weights: Tensor | None = None, clip: float | None = None
    ) -> Iterator[tuple[slice, ChunkResult]]:
        """Every chunk, and which stretch of the queue it is; with `weights` (K,) perhaps as weighted sums alone.

        With a `clip` these are sums of clipped updates.
        """
        start, path = 0, worker.path(self.chosen) if self.threads else None
        size = path.most_clients(self.queue, self.chunk_size, sums=weights is not None) if path else self.chunk_size
        for chunk in chunks_of(self.queue, worker.clients, self.rule, size, at_once=path is not None):
            part = slice(start, start + len(chunk))
            yield part, worker.train(self.work(worker, chunk, None if weights is None else weights[part], clip))
            start += len(chunk)

    def work(self, worker: Worker, chunk: ClientQueue, weights: Tensor | None = None, clip: float | None = None) -> ChunkWork:
        """The work of a chunk; with `weights` (k,) weighted sums of updates are enough, with a `clip` of clipped ones."""
        clipped = None if weights is None or clip is None else ClippedSum(weights, clip)
        plain = weights if clip is None else None
        return ChunkWork(worker, chunk, self.rule, worker.space, plain, self.chosen, self.threads, clipped)

    def sent(self, worker: Worker, result: ChunkResult) -> Tensor:
        """The updates of a chunk as they arrive, (k, D): those of malicious clients as an attack makes them."""
        if isinstance(result.updates, WeightedSums):  # rare: some of them cannot be used
            result = worker.train(self.work(worker, result.chunk))
        sent, chunk = result.dense(worker.space), result.chunk
        if worker.data.malicious and self.cohorts:
            for owner, rows in owner_stretches(chunk.owners):
                shares = None if chunk.shares is None else chunk.shares[rows]
                size = self.cohorts[owner]
                arrived = corrupted(worker.data, sent[rows], chunk.clients[rows], chunk.keys[rows], size, shares)
                sent[rows] = arrived
        return sent


def each_update(worker: Worker, assignment: Assignment) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Updates (K, D) and losses (K,) in the order of the queue; as clients made them if the assignment has no cohorts.

    The third result are the rows (K, width) that clients keep for their solver, if they keep any; the fourth their carried
    values (K, C) as they are averaged, if the model has any.
    """
    models = assignment.queue.models
    updates = torch.empty(len(assignment.queue), models.shape[1], dtype=models.dtype, device=models.device)
    losses = torch.empty(len(assignment.queue), dtype=torch.float64)
    rows = None if assignment.queue.rows is None else torch.empty_like(assignment.queue.rows)
    carried = _carried_of(worker, assignment)
    for part, result in assignment.trained(worker):
        updates[part] = assignment.sent(worker, result)
        losses[part] = result.losses
        if carried is not None and result.carried is not None:
            carried[part] = result.carried
        if rows is not None and result.rows is not None:
            rows[part] = result.rows
    return updates, losses, rows, carried


def _carried_of(worker: Worker, assignment: Assignment) -> Tensor | None:
    """Memory for the carried values (K, C) of all clients; None if the model has none."""
    size = worker.task.carried.size
    return torch.empty(len(assignment.queue), size, dtype=torch.float64) if size else None


def adapted_losses(worker: Worker, assignment: Assignment) -> Tensor:
    """The losses (K,) that the clients' work ends with, in the order of the queue."""
    return torch.cat([result.losses for _, result in assignment.trained(worker)])


@dataclass(frozen=True, eq=False)
class Summation:
    """How updates are to be summed up."""

    aggregator: Aggregator
    plain: bool  # whether it is their weighted sum and nothing else
    weights: Tensor  # (K,) in the order of the queue
    longest: tuple[float, ...]  # squared length beyond which an update of a job is absurd
    clip: float | None = None  # it is their weighted sum, each clipped to this norm

    def longest_of(self, owners: Tensor) -> Tensor | float:
        """That squared length for each client, (k,); one number if there is one job."""
        return self.longest[0] if len(self.longest) == 1 else torch.tensor(self.longest, dtype=torch.float64)[owners]


@dataclass(frozen=True, eq=False)
class SummedUpdates:
    """Totals (M, D), one per job, and of every client in the order of the queue its squared norm and loss, (K,)."""

    totals: Tensor
    sq_norms: Tensor  # infinite where the update was left out
    losses: Tensor
    rows: Tensor | None = None  # (K, width), what clients keep for their solver
    carried: Tensor | None = None  # (K, C), as carried values are averaged


def sum_updates(worker: Worker, asked: tuple[Assignment, Summation]) -> SummedUpdates:
    """Local work, aggregated and added up chunk by chunk: memory is bounded by the chunk."""
    assignment, rule = asked
    count = len(assignment.queue)
    totals, losses = torch.zeros_like(assignment.queue.models), torch.empty(count, dtype=torch.float64)
    kept = None if assignment.queue.rows is None else torch.empty_like(assignment.queue.rows)
    done = SummedUpdates(totals, torch.empty_like(rule.weights), losses, kept, _carried_of(worker, assignment))
    plain = rule.plain and not worker.data.malicious
    sums = plain or (rule.clip is not None and not worker.data.malicious)
    for part, result in assignment.trained(worker, rule.weights if sums else None, rule.clip):
        as_it_is = plain or isinstance(result.updates, WeightedSums)
        updates = result.updates if as_it_is else assignment.sent(worker, result)
        sq_norms = squared_norms(updates) if isinstance(updates, Tensor) else result.squared_norms(worker.space)
        weights, done.losses[part] = rule.weights[part], result.losses
        if done.rows is not None and result.rows is not None:
            done.rows[part] = result.rows
        good = usable(sq_norms, result.losses, rule.longest_of(result.chunk.owners))
        if done.carried is not None and result.carried is not None:
            done.carried[part] = result.carried
            good &= ~torch.isinf(result.carried).any(1)
        done.sq_norms[part] = torch.where(good, sq_norms, torch.inf)
        if not bool(good.all()):  # rare, so that the good ones are not copied in every round
            arrived = updates if isinstance(updates, Tensor) else assignment.sent(worker, result)
            for owner, rows in owner_rows(result.chunk.owners):
                if bool(good[rows].any()):
                    kept = arrived[rows][good[rows].to(arrived.device)]
                    done.totals[owner] += rule.aggregator(kept, weights[rows][good[rows]].to(arrived.device))[0]
        elif isinstance(updates, WeightedSums):
            done.totals.add_(updates.totals)
        elif isinstance(updates, Tensor):
            for owner, rows in owner_rows(result.chunk.owners):
                done.totals[owner] += rule.aggregator(updates[rows], weights[rows].to(updates.device))[0]
        else:
            for owner, stretch in owner_stretches(result.chunk.owners):
                done.totals[owner] += updates.weighted_sum(stretch, weights[stretch], worker.space)
    return done


def put_together(parts: Sequence[Tensor | None], places: Sequence[Tensor]) -> Tensor | None:
    """The rows (K, width) of all clients on the CPU, from those of the processes and their places; None without rows."""
    known = [(rows.cpu(), here) for rows, here in zip(parts, places, strict=True) if rows is not None]
    if not known:
        return None
    whole = known[0][0].new_empty(sum(len(here) for here in places), known[0][0].shape[1])
    for rows, here in known:
        whole[here] = rows
    return whole


def try_out(worker: Worker, assignment: Assignment) -> None:
    """The work of a round, whose results are dropped: to see how long it takes."""
    if assignment.queue.own:
        each_update(worker, assignment)
    else:
        weights = torch.ones(len(assignment.queue), dtype=torch.float64)
        longest = (float("inf"),) * len(assignment.queue.models)
        sum_updates(worker, (assignment, Summation(WeightedMean(), True, weights, longest)))
