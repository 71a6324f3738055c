"""How many clients to train as one batch, and how many batches at once: measured before the first round, then kept.

The fastest choice depends on the model, the batch and the machine's caches, by a factor of two and more. Other chunks add up in
another order, which changes the last bits of a result; so a choice is kept with the run's checkpoint, in this process, and in
a small file for the next run on this machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from equipoise.files import write_atomically

if TYPE_CHECKING:
    from equipoise.engines.chunks import Queue
    from equipoise.engines.simulator import SimulatorEngine
    from equipoise.types import LocalSolver

_WORTH = 2e7  # examples × parameters of a round: below this, everything is one chunk and nothing is measured
_SCHEME = "sums beside a quiet parent"  # to be changed with what is measured: choices made for other code are not used
_SECONDS = 1.5  # that measuring may take, about
_known: dict[str, Choice] = {}


@dataclass(frozen=True)
class Choice:
    """Clients per chunk and chunks at once; None is not decided."""

    chunk_size: int | None = None
    workers: int | None = None


def calibrated(engine: SimulatorEngine, queue: Queue, solver: LocalSolver, lr: float) -> Choice:
    """The choice for work of this kind: a known one, or measured on the clients of `queue`, whose results are dropped."""
    batch = min(solver.batch_size or int(queue.sizes.max()), int(queue.sizes.max()))
    if float(queue.steps.sum()) * batch * queue.models.shape[1] < _WORTH:
        return Choice(engine.given.chunk_size, engine.given.workers or 1)
    name = _name(engine, queue, solver)
    if name not in _known:
        _known.update(_stored())
    if name not in _known:
        _known[name] = _measured(engine, queue, solver, lr)
        _store(_known)
    return _known[name]


def _measured(engine: SimulatorEngine, queue: Queue, solver: LocalSolver, lr: float) -> Choice:
    """Chunks from small to large on all cores, until they stop getting faster; then one process with all threads."""
    from equipoise.engines.chunks import most_clients
    from equipoise.engines.orders import Order, tried_out
    from equipoise.engines.workers import Workers, can_fork

    cores = engine.given.workers or (torch.get_num_threads() if can_fork() else 1)
    limit = most_clients(queue.models[0].nbytes, int(queue.sizes.max()), engine.train, solver)
    largest = engine.given.chunk_size or max(1, min(limit, -(-len(queue) // cores)))
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < largest] + [largest]
    began = time.perf_counter()

    def seconds(workers: Workers, size: int) -> float:
        """Seconds per local step of one client, the best of three tries."""
        first = max(0, (len(queue) - size * workers.count) // 2)
        tried = queue.take(slice(first, first + size * workers.count))
        count = min(workers.count, len(tried))
        orders = [Order(tried.take(slice(i, None, count)), solver, lr, size) for i in range(count)]
        tries = []
        with workers.alone():
            for _ in range(3):
                start = time.perf_counter()
                workers.share(tried_out, orders)
                tries.append(time.perf_counter() - start)
                if tries[-1] > _SECONDS / 5:  # long enough not to be chance
                    break
        return min(tries) / float(tried.steps.sum())

    side_by_side = engine.workers
    side_by_side.count = cores
    seconds(side_by_side, 1)  # processes start, memory is taken
    found: dict[Choice, float] = {}
    worse = 0
    for size in sizes if engine.given.chunk_size is None else sizes[-1:]:
        found[Choice(size, cores)] = seconds(side_by_side, size)
        worse = worse + 1 if found[Choice(size, cores)] > 1.3 * min(found.values()) else 0
        if worse == 2 or time.perf_counter() - began > _SECONDS:  # once may be another program's doing
            break
    # A small gain may be chance: among those close to the best the largest chunk has the least overhead.
    best = max((c for c in found if found[c] <= 1.1 * min(found.values())), key=lambda c: c.chunk_size or 0)
    if cores > 1 and engine.given.workers is None:
        whole = engine.given.chunk_size or min(limit, len(queue), cores * (best.chunk_size or 1))
        one_process, both = Workers(engine.workers.own), (found[best], float("inf"))
        for _ in range(4):  # in turn, as the machine may be busy for a while
            both = min(both[0], seconds(side_by_side, best.chunk_size or 1)), min(both[1], seconds(one_process, whole))
            if time.perf_counter() - began > 2 * _SECONDS:
                break
        best = best if both[0] < 0.95 * both[1] else Choice(whole, 1)  # one process is simpler
    return best


def _name(engine: SimulatorEngine, queue: Queue, solver: LocalSolver) -> str:
    """What a choice depends on: the machine, the model, the kind of work, and what was asked for."""
    work = (
        type(engine.task.module).__qualname__, queue.models.shape[1], str(queue.models.dtype), tuple(engine.train.x.shape[1:]),
        type(solver).__qualname__, solver.batch_size, queue.own, min(len(queue), 128), asdict(engine.given),
    )  # fmt: skip
    machine = f"{platform.node()} {platform.machine()} torch {torch.__version__} threads {torch.get_num_threads()}"
    return f"{_SCHEME} {machine} {work}"


def _file() -> Path:
    """Where choices are kept for the next run: $EQUIPOISE_CACHE, or the user's cache folder."""
    folder = os.environ.get("EQUIPOISE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "equipoise" / "calibration.json"


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
