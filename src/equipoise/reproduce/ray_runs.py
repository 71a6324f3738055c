"""Runs of an experiment as tasks of a Ray cluster: runs on the same data share a task, and there are tasks for all CPUs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from equipoise.engines.cluster.ray_tasks import MOST_STARTS, RayTasks, SharedFolder, restarts
from equipoise.errors import EquipoiseError
from equipoise.reproduce.batched_runs import TimeLimit
from equipoise.reproduce.entry import Method

_POLL_SECONDS = 0.25
Missing = list[tuple[int, Method]]
Record = dict[str, Any]


class TableRuns(Protocol):
    """The runs of an experiment at one scale."""

    @property
    def out(self) -> Path:
        """The folder of runs and checkpoints."""

    @property
    def device(self) -> str | None:
        """The device of a run."""

    @property
    def say(self) -> Callable[[str], object]:
        """Where lines go."""

    def data_key(self, seed: int, method: Method) -> tuple[object, ...]:
        """What is the same for runs that share their data."""

    def make_here(self, missing: Missing, lr: float | None, limit: TimeLimit) -> Iterator[Record]:
        """Make runs in this process."""

    def elsewhere(self, out: Path, say: Callable[[str], object]) -> TableRuns:
        """The same runs in another folder."""

    def keep(self, run: Record) -> None:
        """Store a run that was made elsewhere."""


@dataclass(eq=False)
class SharedTask:
    """Runs that one task makes."""

    runs: Missing
    starts: int = 0
    reference: Any = None

    def __str__(self) -> str:
        return ", ".join(f"{method.name}, seed {seed}" for seed, method in self.runs)


def make_on_cluster(runs: TableRuns, missing: Missing, lr: float | None, limit: TimeLimit, address: str) -> Iterator[Record]:
    """Make runs on a cluster; what the file of each says, as they end. Those that are lost too often are told and left."""
    if not missing:
        return
    runs.out.mkdir(parents=True, exist_ok=True)
    tasks = RayTasks(address, runs.out, _make, gpus=1.0 if str(runs.device).startswith("cuda") else 0.0)
    waiting = share_out(runs, missing, tasks.room)
    working: list[SharedTask] = []
    try:
        while waiting or working:
            while waiting and len(working) < tasks.room:
                task = waiting.pop(0)
                task.starts += 1
                task.reference = tasks.start(runs.elsewhere(runs.out, _silent), task.runs, lr, limit.left)
                working.append(task)
            for task in list(working):
                end = tasks.ended(task.reference)
                if end is None:
                    continue
                working.remove(task)
                if end.failed:
                    raise EquipoiseError(f"{task} on a node of the cluster: {end.failed}")
                if end.lost and task.starts < MOST_STARTS:
                    waiting.insert(0, task)
                    continue
                if task.starts > 1:
                    runs.say(f"{task}: {restarts(task.starts)}")
                if end.lost:
                    runs.say(f"{task}: left, because its worker or node was lost {task.starts} times: {end.lost}")
                    continue
                made, lines = end.value
                for line in lines:
                    runs.say(f"{end.node}: {line}")
                for run in made:
                    run |= {"node": end.node} | ({"starts": task.starts} if task.starts > 1 else {})
                    runs.keep(run)
                    yield run
            time.sleep(_POLL_SECONDS)
    finally:
        tasks.stop([task.reference for task in working])


def share_out(runs: TableRuns, missing: Missing, room: int) -> list[SharedTask]:
    """Missing runs in tasks: those of a task have the same data, and there are about as many tasks as there is room for."""
    most = -(-len(missing) // room)
    by_data: dict[tuple[object, ...], Missing] = {}
    for seed, method in missing:
        by_data.setdefault(runs.data_key(seed, method), []).append((seed, method))
    return [SharedTask(same[i : i + most]) for same in by_data.values() for i in range(0, len(same), most)]


def _silent(line: str) -> None:
    """Nobody listens."""


def _make(
    shared: SharedFolder, runs: TableRuns, missing: Missing, lr: float | None, seconds: float
) -> tuple[list[Record], list[str]]:
    """Make runs on this node: what their files say, and what was said. Checkpoints are in the driver's folder if it is here."""
    lines: list[str] = []
    limit = TimeLimit(time.monotonic() + seconds)
    if shared.is_here():
        return list(runs.elsewhere(Path(shared.path), lines.append).make_here(missing, lr, limit)), lines
    with tempfile.TemporaryDirectory(prefix="equipoise-run-") as place:
        return list(runs.elsewhere(Path(place), lines.append).make_here(missing, lr, limit)), lines
