"""What a server shows: the runs, families and studies below a folder, found again when folders come and go."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.core.words import printable
from equipoise.experiment.family_files import MEMBERS, VERSIONS
from equipoise.experiment.run_files import ORDER
from equipoise.serve.refusals import Gone
from equipoise.serve.run_states import RunState, WatchedRun
from equipoise.serve.safe_files import mark_of, open_below

DEEPEST = 3  # folders below the served one in which runs are looked for
MOST_RUNS = 5000
MOST_WATCHED = 200  # runs whose curves are kept in memory
RESCAN = 2.0  # seconds between two looks at the folders
SKIPPED = frozenset({MEMBERS, VERSIONS, "checkpoint"})


class Library:
    """Runs by id. An id is the path below the served folder with ~ for /; nothing else becomes a path."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.title = printable(self.root.name)
        self._lock = threading.RLock()
        self._scanned = 0.0
        self._runs: dict[str, Path] = {}
        self._studies: dict[str, list[str]] = {}
        self._watched: OrderedDict[str, WatchedRun] = OrderedDict()
        self._finished: dict[str, tuple[Any, dict[str, Any]]] = {}  # by run: a mark of its files, and what they say

    def scan(self, *, force: bool = False) -> None:
        """Look for runs and studies, unless that was just done."""
        with self._lock:
            if not force and time.monotonic() - self._scanned < RESCAN:
                return
            runs: dict[str, Path] = {}
            studies: dict[str, list[str]] = {}
            for path, inside in _folders(self.root, DEEPEST):
                if (path / "config.toml").is_file() and not (path / "config.toml").is_symlink():
                    runs[self._id(path)] = path
                elif any((path / name / "config.toml").is_file() for name in inside[:50]):
                    studies[self._id(path)] = [self._id(path / name) for name in _in_order(path, inside)]
                if len(runs) >= MOST_RUNS:
                    break
            self._runs = runs
            self._studies = {
                name: [run for run in inside if run in runs] for name, inside in studies.items() if name != self._id(self.root)
                or (self.root / ORDER).is_file()
            }  # fmt: skip
            for kept in (self._watched, self._finished):
                for name in [name for name in kept if name not in runs]:
                    del kept[name]
            self._scanned = time.monotonic()

    def _id(self, path: Path) -> str:
        """The path with ~ for /, and ~. for ~ in a name; names do not begin with a dot, so ids of readable names differ."""
        inside = [printable(part).replace("~", "~.") for part in path.relative_to(self.root).parts]
        return "~".join(inside) if inside else printable(self.root.name) or "root"

    def ids(self) -> list[str]:
        """The ids of all runs, in order."""
        self.scan()
        return sorted(self._runs)

    def studies(self) -> dict[str, list[str]]:
        """The ids of studies, each with those of its runs."""
        self.scan()
        return {name: runs for name, runs in sorted(self._studies.items()) if runs}

    def path(self, run: str) -> Path:
        """The folder of a run."""
        self.scan()
        found = self._runs.get(run)
        if found is None or not found.is_dir():
            raise Gone(
                f"There is no run {run[:100]!r} here. It may have been moved or deleted; the list of runs is at /api/runs."
            )
        return found

    def watched(self, run: str) -> WatchedRun:
        """A run with its log, up to date."""
        path = self.path(run)
        with self._lock:
            found = self._watched.get(run)
            if found is None or found.path != path:
                found = self._watched[run] = WatchedRun(path)
            self._watched.move_to_end(run)
            while len(self._watched) > MOST_WATCHED:
                self._watched.popitem(last=False)
            found.refresh()
            return found

    def overview(self, run: str) -> dict[str, Any]:
        """A run in a few fields. Those of a finished run are kept: its files change no more."""
        path = self.path(run)
        mark = path, mark_of(path, ["config.toml"]), mark_of(path, ["rounds.jsonl"])
        known = self._finished.get(run)
        if known is not None and known[0] == mark:
            return known[1]
        watched = self.watched(run)
        about, state = watched.about, watched.state()
        found = {
            "id": run, "name": about.name, "kind": about.kind, "knob": about.knob, "values": list(about.values),
            "data": about.data, "model": about.model, "method": about.method, "private": about.private,
            "seed": about.seed, "privacy": about.privacy, **state.table(),
        }  # fmt: skip
        if state.status == "finished":
            self._finished[run] = mark, found
        return found

    def state(self, run: str) -> RunState:
        """How a run stands."""
        return self.watched(run).state()


def _folders(root: Path, deepest: int) -> Iterator[tuple[Path, list[str]]]:
    """The folders below one, with the names of those inside each; links and hidden folders are not followed."""
    try:
        inside = sorted(
            each.name for each in os.scandir(root)
            if each.is_dir(follow_symlinks=False) and each.name not in SKIPPED
            and not each.name.startswith(".")
        )  # fmt: skip
    except OSError:
        return
    yield root, inside
    if deepest and not (root / "config.toml").is_file():
        for name in inside:
            yield from _folders(root / name, deepest - 1)


def _in_order(path: Path, names: list[str]) -> list[str]:
    """The names of a study's runs in the order of the study."""
    try:
        with open_below(path, [ORDER]) as file:
            order = file.read(2**20).decode().splitlines()
    except (OSError, ValueError):
        return names
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))
