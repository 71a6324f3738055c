"""Which path trains a model on a GPU: batching clients is tried against training them side by side, and the faster is kept.

No rule of thumb tells which is faster: a perceptron of many clients is one product when batched, a convolution of many clients
is slow when batched. So both do the work of some clients of the first round, and their results are compared, too.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from equipoise.engines.simulator.assignments import Assignment, each_update
from equipoise.engines.simulator.calibration import Choice, SpeedMeasurement
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.cuda.client_capacity import ClientCapacity
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import LocalPath, Worker

_TURNS = 2  # after one that captures graphs
_CLEARLY = 0.95  # of the time of the path that comes first: another one must be faster than this to be taken instead
_FEW = 16  # clients that paths are tried with which do not batch them
_DIFFERENCE, _ROUGH = 1e-2, 0.5  # of the update, by which two paths may differ by rounding, also in reduced precision


def measured_on_device(
    worker: Worker, queue: ClientQueue, rule: LocalRule, capacity: ClientCapacity
) -> SpeedMeasurement | None:
    """The fastest path for such work on a GPU; None if there is nothing to choose from."""
    candidates = worker.candidates(rule, None)
    rivals = [path for path in candidates if path.measured]
    if not rivals or len(queue) == 0 or int(queue.steps.max()) == 0:
        return None
    first = next(path for path in candidates if not path.measured)
    seconds: dict[Choice, float] = {}
    expected: Tensor | None = None
    for path in (first, *rivals):
        batched = path.batches and worker.unbatchable is None
        count = len(queue) if batched else min(len(queue), _FEW)
        size = capacity.most_clients(queue, rule, batched) if batched else count
        few = queue.take(slice(0, min(count, size)))
        work = Assignment(few, rule, size, (), path.name)
        updates, taken = _timed(worker, work, path)
        if math.isinf(taken):
            continue
        if expected is None:
            expected = updates[:_FEW].clone()
        else:
            differing = _difference(updates, expected[: len(updates)])
            if differing > (_ROUGH if worker.place.precision.reduced else _DIFFERENCE):
                path.decline(f"its updates differ from those of {first.name} by {differing:.1e} of their length")
                continue
        seconds[Choice(path=path.name)] = taken / len(few)
    if not seconds:
        return None
    usual = Choice(path=first.name)
    limit = _CLEARLY * seconds.get(usual, math.inf)
    best = min(seconds, key=lambda choice: seconds[choice])
    chosen = best if seconds[best] < limit else usual
    for path in (first, *rivals):
        if path.name != chosen.path:
            path.release()
    torch.cuda.empty_cache()
    return SpeedMeasurement(chosen, seconds)


def _timed(worker: Worker, work: Assignment, path: LocalPath) -> tuple[Tensor, float]:
    """The updates of some clients by a path, and the seconds that they take; infinity if another path did it."""
    updates, best = torch.empty(0), math.inf
    for turn in range(1 + _TURNS):
        worker.taken.clear()
        torch.cuda.synchronize()
        began = time.perf_counter()
        updates, *_ = each_update(worker, work)
        torch.cuda.synchronize()
        if set(worker.taken) != {path.name}:
            return updates, math.inf
        if turn:
            best = min(best, time.perf_counter() - began)
    return updates, best


def _difference(updates: Tensor, expected: Tensor) -> float:
    """By how much the first updates differ from those expected, as a share of their length; 0 where they are not finite."""
    if not bool(torch.isfinite(expected).all()):
        return 0.0
    return float((updates[: len(expected)] - expected).norm() / expected.norm().clamp(min=1e-30))
