"""How many clients to train as one batch, by how many processes, and whether by a path with its own threads: measured.

The fastest choice depends on the model, the batch and the machine's caches, by a factor of two and more. Other chunks add up in
another order, which changes the last bits of a result; so a choice is kept with the run's checkpoint, in this process, and in
a small file for the next run on this machine.
"""

from __future__ import annotations

import json
import math
import platform
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from equipoise.core.files import cache_folder, write_atomically
from equipoise.core.plain_text import parse_json
from equipoise.data.clients import shown_shape
from equipoise.engines.simulator.assignments import Assignment, each_update, try_out
from equipoise.engines.simulator.batched_steps import BatchedAutograd
from equipoise.engines.simulator.client_queue import ClientQueue, most_clients
from equipoise.engines.simulator.cpu.step_cost import step_cost
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import LocalPath, Worker
from equipoise.engines.simulator.one_by_one import OneByOne
from equipoise.engines.simulator.recorded_steps import RecordedSteps
from equipoise.engines.simulator.workers import Workers, can_fork, one_thread, threads
from equipoise.errors import is_integer

_WORTH = 2e7  # examples × parameters of a round: below this, everything is one chunk and nothing is measured
_WORTH_SECONDS = 0.01  # of a round by plain autograd, estimated: the same for models without a path of their own
_SCHEME = "two turns or more, whole chunks, recorded steps"  # change it with what is measured: old choices are then not used
_SECONDS, _MOST_SECONDS = 0.5, 2.5  # or a round, if that is between them: after this no third or later turn begins
_TURNS = (3.0, 1.3, 1.3, 1.3)  # how much slower than the best a choice may be so far to get another turn
_TURN, _SHORTEST, _LONGEST = 0.25, 0.02, 0.6  # seconds that a turn of one choice takes, about
_PAUSE = 0.005
_HOPELESS = 6.0  # how much slower than the best a chunk of batched clients is, for which larger ones are not tried
_known: dict[str, SpeedMeasurement] = {}


@dataclass(frozen=True)
class Choice:
    """Clients per chunk, processes, and a path by name; None is not decided. It was measured on `clients` of them.

    A path with threads of its own does the work in one process with as many threads, and for it chunks are a matter of memory
    alone. Without a path by name, the order of the paths decides.
    """

    chunk_size: int | None = None
    workers: int | None = None
    clients: int | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        counts = self.chunk_size, self.workers, self.clients
        good = all(each is None or (is_integer(each) and each > 0) for each in counts)
        if not good or not isinstance(self.path, str | None):
            raise ValueError(f"a choice is of positive numbers and a path, and not of {counts} and {self.path!r}")

    def serves(self, clients: int) -> bool:
        """Whether it is good for this many clients: not if there were too few of them to try larger chunks."""
        if self.chunk_size is None or self.workers is None:
            return False
        too_few = self.clients is not None and clients > 2 * self.clients and self.chunk_size * self.workers >= self.clients
        return self.path is not None or not too_few

    def __str__(self) -> str:
        return f"{self.path or 'the first path'}, {self.workers} at once, chunks of {self.chunk_size}"


class UsesChoice(Protocol):
    """An engine that works by a measured choice."""

    choice: Choice

    def use(self, choice: Choice) -> None:
        """Go on with a choice that was measured before."""


class StoredChoice:
    """The engine's measured choice as plain values, for checkpoints."""

    def __init__(self, engine: UsesChoice) -> None:
        self._engine = engine

    def read(self) -> dict[str, Any]:
        """The choice that is used."""
        return asdict(self._engine.choice)

    def use(self, values: Mapping[str, Any]) -> None:
        """Go on with a choice that `read` gave."""
        self._engine.use(Choice(**values))


@dataclass(frozen=True)
class SpeedMeasurement:
    """The best of some choices, and the seconds per client of each that was tried."""

    choice: Choice
    seconds: dict[Choice, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeedMeasurement:
        """What a file holds: the fields of the choice, and pairs of a choice and its seconds."""
        values = dict(values)
        tried = values.pop("tried", [])
        return cls(Choice(**values), {Choice(**choice): float(seconds) for choice, seconds in tried})

    def plain(self) -> dict[str, Any]:
        """What a file holds of it."""
        return asdict(self.choice) | {"tried": [[asdict(choice), seconds] for choice, seconds in self.seconds.items()]}


@dataclass(frozen=True, eq=False)
class CalibrationTask:
    """What is to be measured: work of this kind by these processes, with what the user has asked for."""

    workers: Workers
    given: Choice
    threads: int  # of torch, outside of rounds
    queue: ClientQueue
    rule: LocalRule

    @property
    def worker(self) -> Worker:
        """The worker of this process."""
        return self.workers.own


def calibrated(task: CalibrationTask) -> SpeedMeasurement:
    """The choice for such work: a known one, or measured on the clients of the queue, whose results are dropped."""
    queue, solver = task.queue, task.rule.solver
    batch = min(solver.batch_size or int(queue.sizes.max()), int(queue.sizes.max()))
    little = float(queue.steps.sum()) * batch * queue.models.shape[1] < _WORTH
    if little and (_first_path(task) is None or _estimated_seconds(task, batch) < _WORTH_SECONDS):
        return SpeedMeasurement(Choice(task.given.chunk_size, task.given.workers or 1))
    name, file = _name(task), cache_folder() / "calibration.json"  # choices are kept there for the next run
    if name not in _known:
        _known.update(_stored(file))
    if name not in _known:
        with threads(task.threads):  # a round of several processes has but one
            measured = _measured(task)
            _known[name] = replace(measured, choice=replace(measured.choice, clients=len(queue)))
        _store(file, _known)
    return _known[name]


def _measured(task: CalibrationTask) -> SpeedMeasurement:
    """The fastest of paths with their own threads, chunks of several sizes on all cores, and one process with all threads."""
    given, queue, workers = task.given, task.queue, task.workers
    limit = most_clients(queue.models[0].nbytes, int(queue.sizes.max()), task.worker.clients, task.rule)
    cores = given.workers or (torch.get_num_threads() if can_fork() else 1)
    workers.count, one_process = cores, Workers(task.worker)
    first = _first_path(task)
    alone = None if first is None or given.chunk_size is not None else _one_client_path(task)
    each = _seconds(task, workers, Choice(1, cores, path=alone), cores)  # processes start, memory is taken
    if each * cores < _LONGEST:
        each = min(each, _seconds(task, workers, Choice(1, cores, path=alone), 2 * cores))
    least = min(len(queue), max(4 * cores, int(_TURN / each)))  # clients, if they take as long as one by one
    best: dict[Choice, float] = {}
    counts: dict[Choice, int] = {}  # clients that a choice is tried with

    def measure(choice: Choice) -> float:
        several = choice.workers == cores and not _threaded(task, choice)
        return _seconds(task, workers if several else one_process, choice, counts[choice])

    def first_turn(choice: Choice, count: int) -> None:
        counts[choice] = count
        best[choice] = measure(choice)

    for path in task.worker.paths:
        if path.threaded and task.worker.why_not(path, task.rule) is None and _agrees(task, path):
            first_turn(Choice(given.chunk_size or limit, given.workers or torch.get_num_threads(), path=path.name), least)
    largest = max(1, min(limit, -(-len(queue) // cores)))
    if alone is not None:
        first_turn(Choice(largest, cores, path=alone), least)
        if cores > 1 and given.workers is None:
            first_turn(Choice(min(limit, least), 1, path=alone), least)
        for size in batched_sizes(largest) if isinstance(first, BatchedAutograd) else ():
            first_turn(Choice(size, cores, path=BatchedAutograd.name), min(len(queue), max(least, size * cores)))
            if best[Choice(size, cores, path=BatchedAutograd.name)] > _HOPELESS * min(best.values()):
                break
        more_turns(best, measure, len(queue))
        return SpeedMeasurement(min(best, key=lambda choice: best[choice]), best)
    sizes = [given.chunk_size] if given.chunk_size else [*(2**i for i in range(8) if 2**i < largest), largest]
    for size in sizes:
        count = min(len(queue), max(least, size * cores))  # all processes have a whole chunk
        if best and count > least and count * min(best.values()) > _LONGEST:
            break
        first_turn(Choice(size, cores), count)
    if cores > 1 and given.workers is None:
        most = max(counts.values())
        first_turn(Choice(given.chunk_size or min(limit, most), 1), most)
    more_turns(best, measure, len(queue))
    # Small differences are chance: the largest chunk has the least overhead, and one process is the simplest.
    good = [choice for choice in best if best[choice] <= 1.05 * min(best.values())]
    return SpeedMeasurement(max(good, key=lambda c: (c.chunk_size or 0) * (c.workers or 1) + (c.workers == 1)), best)


def _first_path(task: CalibrationTask) -> LocalPath | None:
    """The path that comes first, if it is for models of any kind; else None."""
    first = task.worker.candidates(task.rule, None)[0]
    return first if isinstance(first, BatchedAutograd | RecordedSteps | OneByOne) else None


def _one_client_path(task: CalibrationTask) -> str:
    """The path that does one client after another: with recorded steps where steps can be recorded."""
    (recorded,) = (path for path in task.worker.paths if isinstance(path, RecordedSteps))
    why_not = task.worker.why_not(recorded, task.rule) or recorded.why_not_recorded(task.rule)
    return recorded.name if why_not is None else OneByOne.name


def batched_sizes(largest: int) -> list[int]:
    """Chunk sizes to try where clients are batched by autograd.

    >>> batched_sizes(50), batched_sizes(3)
    ([4, 16, 50], [3])
    """
    return [*(4**i for i in range(1, 5) if 4**i < largest), largest]


def _estimated_seconds(task: CalibrationTask, batch: int) -> float:
    """Seconds of a round by plain autograd, roughly: each operation, and each multiplication, takes its time."""
    cost = step_cost(task.worker.place)
    steps = float(task.queue.steps.sum())
    return steps * (cost.operations * 4e-6 + batch * cost.products_per_example / 2e10)


def more_turns(best: dict[Choice, float], measure: Callable[[Choice], float], clients: int) -> None:
    """Lower the seconds per client of choices that had one turn: other programs may be busy for a while, or for a moment.

    All but the slow ones have a second turn, and the fast ones some more.
    """
    began = time.perf_counter()
    for slack in _TURNS:
        for choice in best:
            if best[choice] <= slack * min(best.values()):
                best[choice] = min(best[choice], measure(choice))
        worth = max(_SECONDS, clients * min(best.values()))
        if time.perf_counter() - began > min(_MOST_SECONDS, worth):
            break


def _agrees(task: CalibrationTask, path: LocalPath) -> bool:
    """Whether a path does the work of two clients as the others do: a compiler may be broken."""
    few = task.queue.take(slice(0, 2))
    expected, *_ = each_update(task.worker, Assignment(few, task.rule, None))
    updates, *_ = each_update(task.worker, Assignment(few, task.rule, None, (), path.name, 2))
    return bool((updates - expected).norm() <= 1e-3 * expected.norm())


def _threaded(task: CalibrationTask, choice: Choice) -> bool:
    """Whether a choice names a path with threads of its own."""
    path = task.worker.path(choice.path)
    return path is not None and path.threaded


def _seconds(task: CalibrationTask, workers: Workers, choice: Choice, count: int) -> float:
    """Seconds per client with the middle `count` clients of a queue; the best of some calls where they are short."""
    first = max(0, (len(task.queue) - count) // 2)
    tried = task.queue.take(slice(first, first + count))
    parts, threaded = tried.share(min(workers.count, len(tried))), _threaded(task, choice)
    own_threads = (choice.workers or 1) if threaded else 0
    assignments = [Assignment(part, task.rule, choice.chunk_size or 1, (), choice.path, own_threads) for part in parts]
    best, began = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - began < _SHORTEST:
        time.sleep(_PAUSE)  # threads of the last operation stop waiting for another
        with one_thread() if threaded else workers.alone():
            start = time.perf_counter()
            workers.share(try_out, assignments)
            best = min(best, (time.perf_counter() - start) / len(tried))
    return best


def _name(task: CalibrationTask) -> str:
    """What a choice depends on: the machine, the model, the kind of work, and what was asked for."""
    queue, worker, solver = task.queue, task.worker, task.rule.solver
    work = (
        type(worker.task.module).__qualname__, zlib.crc32(repr(worker.task.module).encode()),
        queue.models.shape[1], str(queue.models.dtype),
        shown_shape(worker.clients.x), type(solver).__qualname__, solver.batch_size, queue.own,
        min(1 << (len(queue) - 1).bit_length(), 1024), (task.given.chunk_size, task.given.workers, worker.place.compiled),
    )  # fmt: skip
    machine = f"{platform.node()} {platform.machine()} torch {torch.__version__} threads {task.threads}"
    return f"{_SCHEME} {machine} {work}"


def _stored(file: Path) -> dict[str, SpeedMeasurement]:
    try:
        return {name: SpeedMeasurement.of(values) for name, values in parse_json(file).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # there is none yet, or it is damaged: it is made anew
        return {}


def _store(file: Path, known: dict[str, SpeedMeasurement]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {name: measurement.plain() for name, measurement in (_stored(file) | known).items()}
        write_atomically(file, json.dumps(content, indent=1).encode())
    except Exception:  # a read-only home: the next run measures again  # noqa: S110
        pass
