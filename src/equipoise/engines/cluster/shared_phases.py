"""Phases of a round as the workers of a cluster share them: what each is sent, and the answers, job by job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from equipoise.engines.cluster.packing import joined, message, pack
from equipoise.engines.cluster.piece_work import Phase, Stretch
from equipoise.engines.cluster.pieces import JobPieces, split_by_job
from equipoise.engines.cluster.worker_pool import Work, WorkerPool

_PER_CLIENT = 64  # bytes of an answer for each client, besides rows: norm, loss and their wrapping
_HEAD = 4_000  # bytes of an answer besides its tensors
StretchOf = Callable[[JobPieces, int, int, int], Stretch]  # of a job's pieces, its number, the first and the last + 1


class PhaseRecord(NamedTuple):
    """A phase that was shared out: its kind and size, and the seconds that it took here and in each worker."""

    kind: str
    cost: float
    clients: int
    pieces: int
    model_bytes: int
    sum_bytes: int
    row_bytes: int
    seconds: float
    worker_seconds: list[float]


class SharedPhases:
    """The phases of one session, each shared out among the workers of a pool. What stays the same is not sent again."""

    def __init__(self, pool: WorkerPool, session: int) -> None:
        self.pool, self.session = pool, session
        self.records: list[PhaseRecord] | None = None  # what was shared out and how long it took, for those who ask
        self._models: list[tuple[Tensor, int]] = []  # of the last phase, with the number of times that each was written to
        self._model_number = 0
        self._heads: dict[str, tuple[Phase, bytes]] = {}  # by kind of phase

    def share_out(
        self, phase: Phase, jobs: Sequence[JobPieces], stretch_of: StretchOf, *, row_bytes: int = 0, fixed_bytes: int = 0
    ) -> list[list[tuple[Tensor, Any]]]:
        """The answers to a phase, by job: places in the cohort, and what a worker says of the clients there."""
        counts = [len(job) for job in jobs]

        def own(first: int, last: int) -> list[Stretch]:
            return [stretch_of(jobs[n], n, a, b) for n, a, b in split_by_job(first, last, counts)]

        def answer_bytes(first: int, last: int) -> int:
            parts = split_by_job(first, last, counts)
            clients = sum(int(jobs[n].bounds[b] - jobs[n].bounds[a]) for n, a, b in parts)
            return _HEAD + clients * (_PER_CLIENT + row_bytes) + len(parts) * fixed_bytes

        costs, began = np.concatenate([job.costs for job in jobs]), time.perf_counter()
        number = self._number_of(phase.models)
        work = Work(phase.kind, costs, self._head(phase), cache(lambda: message(phase.models)), number, own, answer_bytes)
        found: list[list[tuple[Tensor, Any]]] = [[] for _ in jobs]
        answers = self.pool.share(self.session, work)
        if self.records is not None:
            self.records.append(PhaseRecord(
                phase.kind, float(costs.sum()), sum(int(job.bounds[-1]) for job in jobs), len(costs),
                sum(model.nbytes for model in phase.models), fixed_bytes // 2, row_bytes,
                time.perf_counter() - began, [answer.seconds for _, answer in answers],
            ))  # fmt: skip
        for (first, last), answer in answers:
            for (n, a, b), value in zip(split_by_job(first, last, counts), answer.values, strict=True):
                found[n].append((jobs[n].places(a, b), value))
        return found

    def _number_of(self, models: tuple[Tensor, ...]) -> int:
        """The number of models: that of the phase before if they are the same ones."""
        now = [(model, model._version) for model in models]
        if len(now) != len(self._models) or any(a is not b or u != v for (a, u), (b, v) in zip(now, self._models, strict=True)):
            self._models, self._model_number = now, self._model_number + 1
        return self._model_number

    def _head(self, phase: Phase) -> bytes:
        """What all workers are told of a phase besides its models; packed once as long as it stays."""
        head, (known, packed) = replace(phase, models=()), self._heads.get(phase.kind, (None, b""))
        if known is None or not head.says_the_same(known):
            packed = joined(pack(head))
            self._heads[phase.kind] = head, packed
        return packed
