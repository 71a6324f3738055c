"""How many clients to train as one batch, and how many batches at once: measured before the first round, then kept.

The fastest choice depends on the model, the batch and the machine's caches, by a factor of two and more. Other chunks add up in
another order, which changes the last bits of a result; so a choice is kept with the run's checkpoint, in this process, and in
a small file for the next run on this machine.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from equipoise.core.files import cache_folder, write_atomically
from equipoise.engines.simulator.workers import one_thread, threads

if TYPE_CHECKING:
    from equipoise.engines.simulator.chunks import Queue
    from equipoise.engines.simulator.engine import SimulatorEngine
    from equipoise.engines.simulator.workers import Worker, Workers
    from equipoise.types import LocalSolver

_WORTH = 2e7  # examples × parameters of a round: below this, everything is one chunk and nothing is measured
_SCHEME = "two turns or more, whole chunks"  # to be changed with what is measured: choices made for other code are not used
_SECONDS, _MOST_SECONDS = 0.5, 2.5  # or a round, if that is between them: after this no third or later turn begins
_TURNS = (3.0, 1.3, 1.3, 1.3)  # how much slower than the best a choice may be so far to get another turn
_TURN, _SHORTEST, _LONGEST = 0.25, 0.02, 0.6  # seconds that a turn of one choice takes, about
_PAUSE = 0.005
_known: dict[str, Choice] = {}


@dataclass(frozen=True)
class Choice:
    """Clients per chunk and chunks at once, measured on so many clients; None is not decided.

    Compiled code does the work in one process with as many threads, and for it chunks are a matter of memory alone.
    """

    chunk_size: int | None = None
    workers: int | None = None
    clients: int | None = None
    compiled: bool = False

    @property
    def threads(self) -> int:
        """Of compiled code; 0: it is not used."""
        return (self.workers or 1) if self.compiled else 0

    def serves(self, clients: int) -> bool:
        """Whether it is good for so many clients: not if there were too few of them to try larger chunks."""
        if self.chunk_size is None or self.workers is None:
            return False
        too_few = self.clients is not None and clients > 2 * self.clients and self.chunk_size * self.workers >= self.clients
        return self.compiled or not too_few


def calibrated(engine: SimulatorEngine, queue: Queue, solver: LocalSolver, lr: float) -> Choice:
    """The choice for work of this kind: a known one, or measured on the clients of `queue`, whose results are dropped."""
    batch = min(solver.batch_size or int(queue.sizes.max()), int(queue.sizes.max()))
    if float(queue.steps.sum()) * batch * queue.models.shape[1] < _WORTH:
        return Choice(engine.given.chunk_size, engine.given.workers or 1)
    name = _name(engine, queue, solver)
    if name not in _known:
        _known.update(_stored())
    if name not in _known:
        with threads(engine.threads):  # a round of several processes has but one
            _known[name] = replace(_measured(engine, queue, solver, lr), clients=len(queue))
        _store(_known)
    return _known[name]


def _measured(engine: SimulatorEngine, queue: Queue, solver: LocalSolver, lr: float) -> Choice:
    """The fastest of compiled code, chunks of several sizes on all cores, and one process with all threads."""
    from equipoise.engines.simulator.chunks import most_clients
    from equipoise.engines.simulator.workers import Workers, can_fork

    given, limit = engine.given, most_clients(queue.models[0].nbytes, int(queue.sizes.max()), engine.train, solver)
    cores = given.workers or (torch.get_num_threads() if can_fork() else 1)
    engine.workers.count, one_process = cores, Workers(engine.workers.own)
    each = _seconds(engine.workers, queue, Choice(1, cores), cores, solver, lr)  # processes start, memory is taken
    each = min(each, _seconds(engine.workers, queue, Choice(1, cores), 2 * cores, solver, lr))
    least = min(len(queue), max(4 * cores, int(_TURN / each)))  # clients, if they take as long as one by one
    best: dict[Choice, float] = {}
    counts: dict[Choice, int] = {}  # clients that a choice is tried with

    def measure(choice: Choice) -> float:
        workers = engine.workers if choice.workers == cores and not choice.compiled else one_process
        return _seconds(workers, queue, choice, counts[choice], solver, lr)

    def first_turn(choice: Choice, count: int) -> None:
        counts[choice] = count
        best[choice] = measure(choice)

    compiled = engine.compiled
    if compiled is not None and compiled.fits(solver, lr, queue.pull) and _agrees(engine.workers.own, queue, solver, lr):
        first_turn(Choice(given.chunk_size or limit, given.workers or torch.get_num_threads(), compiled=True), least)
    largest = max(1, min(limit, -(-len(queue) // cores)))
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
    return max(good, key=lambda c: (c.chunk_size or 0) * (c.workers or 1) + (c.workers == 1))


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


def _agrees(worker: Worker, queue: Queue, solver: LocalSolver, lr: float) -> bool:
    """Whether compiled code does the work of two clients as it should: a compiler may be broken."""
    from equipoise.engines.simulator.assignments import Order, each_update

    few = queue.take(slice(0, 2))
    expected, _ = each_update(worker, Order(few, solver, lr, None))
    found, _ = each_update(worker, Order(few, solver, lr, None, threads=2))
    return bool((found - expected).norm() <= 1e-3 * expected.norm())


def _seconds(workers: Workers, queue: Queue, choice: Choice, count: int, solver: LocalSolver, lr: float) -> float:
    """Seconds per client with the middle `count` clients of a queue; the best of some calls where they are short."""
    from equipoise.engines.simulator.assignments import Order, tried_out

    first = max(0, (len(queue) - count) // 2)
    tried = queue.take(slice(first, first + count))
    processes = min(workers.count, len(tried))
    parts = [tried.take(slice(i, None, processes)) for i in range(processes)]
    orders = [Order(part, solver, lr, choice.chunk_size or 1, threads=choice.threads) for part in parts]
    best, began = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - began < _SHORTEST:
        time.sleep(_PAUSE)  # threads of the last operation stop waiting for another
        with one_thread() if choice.compiled else workers.alone():
            start = time.perf_counter()
            workers.share(tried_out, orders)
            best = min(best, (time.perf_counter() - start) / len(tried))
    return best


def _name(engine: SimulatorEngine, queue: Queue, solver: LocalSolver) -> str:
    """What a choice depends on: the machine, the model, the kind of work, and what was asked for."""
    work = (
        type(engine.task.module).__qualname__, queue.models.shape[1], str(queue.models.dtype), tuple(engine.train.x.shape[1:]),
        type(solver).__qualname__, solver.batch_size, queue.own, min(1 << (len(queue) - 1).bit_length(), 1024),
        (engine.given.chunk_size, engine.given.workers, engine.compiled is not None),
    )  # fmt: skip
    machine = f"{platform.node()} {platform.machine()} torch {torch.__version__} threads {engine.threads}"
    return f"{_SCHEME} {machine} {work}"


def _file() -> Path:
    """Where choices are kept for the next run."""
    return cache_folder() / "calibration.json"


def _stored() -> dict[str, Choice]:
    try:
        return {name: Choice(**choice) for name, choice in json.loads(_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # there is none yet, or it is damaged: it is made anew
        return {}


def _store(known: dict[str, Choice]) -> None:
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {name: asdict(choice) for name, choice in (_stored() | known).items()}
        write_atomically(file, json.dumps(content, indent=1).encode())
    except Exception:  # a read-only home: the next run measures again  # noqa: S110
        pass
