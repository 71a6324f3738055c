"""Measures on this machine what the formula of a round over many workers needs (`round_costs.py`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.engines.cluster.piece_work import Phase, Stretch
from equipoise.engines.cluster.pieces import SCORING, TRAINING, JobPieces
from equipoise.engines.cluster.ray_engine import RayEngine
from equipoise.engines.cluster.round_costs import ExchangeCosts, PhaseWork
from equipoise.engines.cluster.shared_phases import PhaseRecord

_PIECES = 64  # of an exchange without work, so that every worker has some
_BYTES = 400_000  # of a model that is sent there and back
_TURNS = 40
_TRAINING = ("sums", "updates", "own_steps", "adapted_losses")  # kinds of phases that are cut as local work


@dataclass(frozen=True)
class MeasuredRound:
    """The phases of a round, its seconds, and what the driver did besides them."""

    phases: list[PhaseWork]
    seconds: float
    driver: float  # seconds


def measure_exchange(engine: RayEngine) -> ExchangeCosts:
    """What exchanges without work take: with one worker and with two, with a small and a large model."""
    nothing, large = torch.zeros(1), torch.zeros(_BYTES // 4)
    job = JobPieces(None, np.arange(_PIECES + 1), np.ones(_PIECES))
    limit = engine.pool.sessions[engine.session]

    def seconds(workers: int, model: torch.Tensor) -> float:
        engine.pool.sessions[engine.session] = limit.of(workers)
        phase = Phase("exchange", engine.session, (model,))
        times = []
        for _ in range(_TURNS):
            began = time.perf_counter()
            engine.phases.share_out(phase, [job], _nothing_of, fixed_bytes=model.nbytes)
            times.append(time.perf_counter() - began)
        return statistics.median(times[_TURNS // 4 :])

    try:
        count = min(2, len(engine.pool.workers))
        one, more, bytes_too = seconds(1, nothing), seconds(count, nothing), seconds(1, large)
    finally:
        engine.pool.sessions[engine.session] = limit
    call = max(1e-5, (more - one) if count > 1 else one / 2)
    return ExchangeCosts(max(0.0, one - call), call, max(1e-11, (bytes_too - one) / (2 * _BYTES)))


def _nothing_of(job: JobPieces, number: int, first: int, last: int) -> Stretch:
    return Stretch(number, (first, last), len(job), job.lengths(first, last))


def measure_round(engine: RayEngine, make_round: Callable[[], object], *, seconds: float = 3.0) -> MeasuredRound:
    """Medians of the phases of a round, over rounds of about `seconds` in all; the first round is not counted."""
    make_round()
    times: list[float] = []
    records: list[list[PhaseRecord]] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        made = engine.phases.records = []
        began = time.perf_counter()
        make_round()
        times.append(time.perf_counter() - began)
        records.append(made)
        if len(times) >= 2 and time.perf_counter() > until + 4 * seconds:
            break
    engine.phases.records = None
    count = min(len(each) for each in records)
    phases = [_phase_work([each[number] for each in records], engine.kind_of_device) for number in range(count)]
    rest = [whole - sum(phase.seconds for phase in each) for whole, each in zip(times, records, strict=True)]
    return MeasuredRound(phases, statistics.median(times), statistics.median(rest))


def _phase_work(records: list[PhaseRecord], device: str) -> PhaseWork:
    """A phase of several rounds: its median size, and the median speed of a worker."""
    size = (TRAINING if records[0].kind in _TRAINING else SCORING)[device]
    speed = statistics.median(record.cost / max(sum(record.worker_seconds), 1e-9) for record in records)
    last = records[-1]
    cost, clients = (statistics.median(each) for each in zip(*((r.cost, r.clients) for r in records), strict=True))
    return PhaseWork(
        last.kind, cost, int(clients), size, speed, last.model_bytes, last.sum_bytes, last.row_bytes
    )  # fmt: skip
