"""What the simulator asks of one process in one call: local work of some clients, one by one or summed up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.attacks import corrupted
from equipoise.core.update_checks import checked_norms
from equipoise.engines.simulator.batched_steps import by_owner, runs
from equipoise.engines.simulator.chunks import Queue, Trained, chunks_of, squared_norms, train_chunk
from equipoise.engines.simulator.linear_blocks import Sums
from equipoise.engines.simulator.workers import Worker
from equipoise.types import Aggregator, LocalSolver

_EACH_BYTES = 2**23  # of models of a chunk whose updates compiled code gives one by one


@dataclass(frozen=True, eq=False)
class Order:
    """Local work of the clients of a queue, in chunks."""

    queue: Queue
    solver: LocalSolver
    lr: float
    chunk_size: int | None
    cohorts: tuple[int, ...] = ()  # how many clients each job has in all, for attacks
    threads: int = 0  # of compiled code; 0: without it

    def trained(self, worker: Worker, weights: Tensor | None = None) -> Iterator[tuple[slice, Trained]]:
        """Every chunk, and which stretch of the queue it is; with `weights` (K,) perhaps as weighted sums alone."""
        start, size, compiled = 0, self.chunk_size, self.threads > 0
        if compiled and (weights is None or self.queue.own):  # then it holds a model or two for each client
            size = min(size or len(self.queue), max(1, _EACH_BYTES // worker.compiled.model_bytes))
        for chunk in chunks_of(self.queue, worker.clients, self.solver, size, at_once=compiled):
            part = slice(start, start + len(chunk))
            wanted = None if weights is None else weights[part]
            yield part, train_chunk(worker, chunk, self.solver, self.lr, wanted, self.threads)
            start += len(chunk)

    def sent(self, worker: Worker, trained: Trained) -> Tensor:
        """The updates of a chunk as they arrive, (k, D): those of malicious clients as an attack makes them."""
        if isinstance(trained.updates, Sums):  # rare: some of them cannot be used
            trained = train_chunk(worker, trained.chunk, self.solver, self.lr, threads=self.threads)
        sent, chunk = trained.dense(worker.space), trained.chunk
        if worker.data.malicious and self.cohorts:
            for owner, rows in runs(chunk.owners):
                arrived = corrupted(worker.data, sent[rows], chunk.clients[rows], chunk.keys[rows], self.cohorts[owner])
                sent[rows] = arrived
        return sent


def each_update(worker: Worker, order: Order) -> tuple[Tensor, Tensor]:
    """Updates (K, D) and losses (K,) in the order of the queue; as clients made them if the order has no cohorts."""
    models = order.queue.models
    updates = torch.empty(len(order.queue), models.shape[1], dtype=models.dtype, device=models.device)
    losses = torch.empty(len(order.queue), dtype=torch.float64)
    for part, trained in order.trained(worker):
        updates[part] = order.sent(worker, trained)
        losses[part] = trained.losses
    return updates, losses


def adapted_losses(worker: Worker, order: Order) -> Tensor:
    """The losses (K,) that the clients' work ends with, in the order of the queue."""
    return torch.cat([trained.losses for _, trained in order.trained(worker)])


@dataclass(frozen=True, eq=False)
class Sum:
    """How updates are to be summed up."""

    aggregator: Aggregator
    weights: Tensor  # (K,) in the order of the queue
    longest: tuple[float, ...]  # squared length beyond which an update of a job is absurd

    def longest_of(self, owners: Tensor) -> Tensor | float:
        """The same for each client, (k,); one number if there is one job."""
        return self.longest[0] if len(self.longest) == 1 else torch.tensor(self.longest, dtype=torch.float64)[owners]


@dataclass(frozen=True, eq=False)
class Summed:
    """Totals (M, D), one per job, and of every client in the order of the queue its squared norm and loss, (K,)."""

    totals: Tensor
    sq_norms: Tensor  # infinite where the update was left out
    losses: Tensor


def summed_updates(worker: Worker, asked: tuple[Order, Sum]) -> Summed:
    """Local work, aggregated and added up chunk by chunk: memory is bounded by the chunk."""
    order, rule = asked
    done = Summed(
        torch.zeros_like(order.queue.models), torch.empty_like(rule.weights), torch.empty(len(order.queue), dtype=torch.float64)
    )
    plain = type(rule.aggregator) is WeightedMean and not worker.data.malicious
    for part, trained in order.trained(worker, rule.weights if plain else None):
        updates = trained.updates if plain else order.sent(worker, trained)
        sq_norms = squared_norms(updates) if isinstance(updates, Tensor) else trained.squared_norms(worker.space)
        weights, done.losses[part] = rule.weights[part], trained.losses
        done.sq_norms[part] = checked_norms(sq_norms, trained.losses, rule.longest_of(trained.chunk.owners))
        good = torch.isfinite(done.sq_norms[part])
        if not bool(good.all()):  # rare, so that the good ones are not copied in every round
            arrived = order.sent(worker, trained)
            for owner, rows in by_owner(trained.chunk.owners):
                if bool(good[rows].any()):
                    kept = arrived[rows][good[rows].to(arrived.device)]
                    done.totals[owner] += rule.aggregator(kept, weights[rows][good[rows]].to(arrived.device))[0]
        elif isinstance(updates, Sums):
            done.totals.add_(updates.totals)
        elif isinstance(updates, Tensor):
            for owner, rows in by_owner(trained.chunk.owners):
                done.totals[owner] += rule.aggregator(updates[rows], weights[rows].to(updates.device))[0]
        else:
            for owner, stretch in runs(trained.chunk.owners):
                done.totals[owner] += updates.weighted_sum(stretch, weights[stretch], worker.space)
    return done


def tried_out(worker: Worker, order: Order) -> None:
    """The work of a round, whose results are dropped: to see how long it takes."""
    if order.queue.own:
        each_update(worker, order)
    else:
        weights = torch.ones(len(order.queue), dtype=torch.float64)
        summed_updates(worker, (order, Sum(WeightedMean(), weights, (float("inf"),) * len(order.queue.models))))
