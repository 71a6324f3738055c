"""How many clients to train as one batch, and how many batches at once: measured before the first round, then kept.

The fastest choice depends on the model, the batch and the machine's caches, by a factor of two and more. Other chunks add up in
another order, which changes the last bits of a result; so a choice is kept with the run's checkpoint, in this process, and in
a small file for the next run on this machine.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from equipoise.engines.workers import one_thread, threads
from equipoise.files import cache_folder, write_atomically

if TYPE_CHECKING:
    from equipoise.engines.chunks import Queue
    from equipoise.engines.simulator import SimulatorEngine
    from equipoise.engines.workers import Worker, Workers
    from equipoise.types import LocalSolver

_WORTH = 2e7  # examples × parameters of a round: below this, everything is one chunk and nothing is measured
_SCHEME = "in turns, with compiled code"  # to be changed with what is measured: choices made for other code are not used
_SECONDS = 1.0  # after which no third or later turn begins
_TURNS = 5
_TURN = 0.25  # seconds that a turn of one choice may take, about
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
    """All candidates in turn, the slow ones only once or twice.

    Other programs may be busy for a while, so every choice is judged by its best turn.
    """
    from equipoise.engines.workers import Workers, can_fork

    cores = engine.given.workers or (torch.get_num_threads() if can_fork() else 1)
    engine.workers.count, one_process = cores, Workers(engine.workers.own)
    began = time.perf_counter()
    each = _seconds(engine.workers, queue, Choice(1, cores), cores, solver, lr)  # processes start, memory is taken
    each = min(each, _seconds(engine.workers, queue, Choice(1, cores), 2 * cores, solver, lr))
    tried = min(len(queue), max(4 * cores, int(_TURN / each)))  # clients, if they take as long as one by one
    choices = dict.fromkeys(_candidates(engine, queue, solver, lr, cores, tried), float("inf"))
    for choice in choices:
        if choice.compiled:
            _seconds(one_process, queue, choice, tried, solver, lr)  # memory is taken
    for turn in range(_TURNS):
        for choice, best in choices.items():
            if best <= 1.3 * min(choices.values()) or best == float("inf"):
                workers = engine.workers if choice.workers == cores and not choice.compiled else one_process
                choices[choice] = min(best, _seconds(workers, queue, choice, tried, solver, lr))
        if turn and time.perf_counter() - began > _SECONDS:  # one turn alone may be chance
            break
    # Small differences are chance: the largest chunk has the least overhead, and one process is the simplest.
    good = [choice for choice in choices if choices[choice] <= 1.05 * min(choices.values())]
    return max(good, key=lambda c: (c.chunk_size or 0) * (c.workers or 1) + (c.workers == 1))


def _candidates(
    engine: SimulatorEngine, queue: Queue, solver: LocalSolver, lr: float, cores: int, tried: int
) -> Iterator[Choice]:
    """Compiled code, chunks of several sizes on all cores, and one process with all threads."""
    from equipoise.engines.chunks import most_clients

    given, limit = engine.given, most_clients(queue.models[0].nbytes, int(queue.sizes.max()), engine.train, solver)
    compiled = engine.compiled
    if compiled is not None and compiled.fits(solver, lr, queue.pull) and _agrees(engine.workers.own, queue, solver, lr):
        yield Choice(given.chunk_size or limit, given.workers or torch.get_num_threads(), compiled=True)
    largest = given.chunk_size or max(1, min(limit, -(-len(queue) // cores)))
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < largest and given.chunk_size is None]
    yield from (Choice(size, cores) for size in (*sizes, largest) if size * cores < tried + cores)
    if cores > 1 and given.workers is None:
        yield Choice(given.chunk_size or max(1, min(limit, tried)), 1)


def _agrees(worker: Worker, queue: Queue, solver: LocalSolver, lr: float) -> bool:
    """Whether compiled code does the work of two clients as it should: a compiler may be broken."""
    from equipoise.engines.orders import Order, each_update

    few = queue.take(slice(0, 2))
    expected, _ = each_update(worker, Order(few, solver, lr, None))
    found, _ = each_update(worker, Order(few, solver, lr, None, threads=2))
    return bool((found - expected).norm() <= 1e-3 * expected.norm())


def _seconds(workers: Workers, queue: Queue, choice: Choice, count: int, solver: LocalSolver, lr: float) -> float:
    """Seconds per client with the middle `count` clients of a queue."""
    from equipoise.engines.orders import Order, tried_out

    first = max(0, (len(queue) - count) // 2)
    tried = queue.take(slice(first, first + count))
    processes = min(workers.count, len(tried))
    parts = [tried.take(slice(i, None, processes)) for i in range(processes)]
    orders = [Order(part, solver, lr, choice.chunk_size or 1, threads=choice.threads) for part in parts]
    time.sleep(_PAUSE)  # threads of the last operation stop waiting for another
    with one_thread() if choice.compiled else workers.alone():
        start = time.perf_counter()
        workers.share(tried_out, orders)
        return (time.perf_counter() - start) / len(tried)


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
