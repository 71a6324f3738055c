"""The state of a run from its folder: waiting, running, finished or stopped, how far it is, and how to go on with it."""

from __future__ import annotations

import os
import shlex
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from equipoise.core.words import printable
from equipoise.experiment.run_files import RunFolder
from equipoise.serve.log_tail import LogTail
from equipoise.serve.pages_text import counted, finite
from equipoise.serve.safe_files import open_below

Status = Literal["waiting", "running", "finished", "stopped"]
FRESH = 15.0  # seconds after its last line in which a run without a lock is taken for running
LARGEST_CONFIG = 2**20
LONGEST_NAME = 200
NONE = "none"


@dataclass(frozen=True)
class RunAbout:
    """What the config.toml of a run says, as far as pages show it."""

    name: str
    kind: Literal["run", "family"]
    knob: str | None = None
    values: tuple[float, ...] = ()
    rounds: int = 0
    seed: int = 0
    data: str = ""
    model: str = ""
    private: bool = False
    privacy: str = ""
    method: str = ""
    saved: bool = False  # by result.save: it cannot be resumed

    @classmethod
    def of(cls, table: Mapping[str, Any], folder: str) -> RunAbout:
        """What a table of TOML says; what is not as expected is left at its default."""
        train, algorithm = (_table(table, name) for name in ("train", "algorithm"))
        family, python = _table(table, "family"), _table(table, "python")
        knob, values = next(((key[:-1], given) for key, given in family.items() if key in ("tails", "qs", "tilts")), (None, []))
        numbers = tuple(v for v in map(finite, values) if v is not None) if isinstance(values, list) else ()
        privacy = algorithm.get("privacy", NONE)
        name = train.get("name", NONE)
        return cls(
            printable(folder if name in (NONE, None) else name)[:LONGEST_NAME], "family" if knob else "run", knob, numbers,
            counted(train.get("rounds")), counted(train.get("seed")),
            printable(_name(table.get("data")) or python.get("data", ""))[:LONGEST_NAME],
            printable(_name(table.get("model")) or python.get("model", ""))[:LONGEST_NAME], privacy != NONE,
            "" if privacy == NONE else printable(_name(privacy))[:LONGEST_NAME],
            printable(_name(algorithm.get("risk")))[:LONGEST_NAME], bool(python),
        )  # fmt: skip


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = table.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _name(part: Any) -> str:
    """A part by its name, or by how it showed itself."""
    if isinstance(part, Mapping):
        return str(part.get("name") or part.get("shown") or "")
    return str(part) if isinstance(part, str) else ""


@dataclass(frozen=True)
class RunState:
    """How a run stands."""

    status: Status
    rounds_done: int
    rounds: int
    seconds_left: float | None = None
    why: str = ""  # it stopped
    resume: str = ""  # the command that goes on with it
    epsilon: float | None = None
    seconds: float | None = None

    def table(self) -> dict[str, Any]:
        """The state as JSON."""
        return dict(vars(self))


@dataclass
class WatchedRun:
    """A run folder that is looked at again and again: its configuration is read when it changes, its log as it grows."""

    path: Path
    _config: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        # What a configuration that cannot be read says of privacy is not known: no single client is shown then.
        name = printable(self.path.resolve().name)[:LONGEST_NAME]
        self.about = RunAbout(name, "run", private=True, privacy="its config.toml cannot be read")
        self.log = LogTail(self.path, "rounds.jsonl")

    def refresh(self) -> bool:
        """Take in what is new; whether anything is."""
        changed = False
        try:
            with open_below(self.path, ["config.toml"]) as file:
                stat = os.fstat(file.fileno())
                if (mark := (stat.st_mtime_ns, stat.st_size)) != self._config and stat.st_size <= LARGEST_CONFIG:
                    self.about = RunAbout.of(tomllib.loads(file.read().decode()), self.path.resolve().name)
                    self._config, changed = mark, True
        except (OSError, ValueError, RecursionError):
            pass
        return self.log.read() or changed

    def state(self, *, fresh: float = FRESH) -> RunState:
        """How the run stands now."""
        log = self.log
        total = log.total_rounds or self.about.rounds
        done = log.rounds_done
        epsilon = next((c.last[4] for c in log.curves.values() if c.last is not None and c.last[4] is not None), None)
        if log.end is not None:
            seconds = log.end.get("seconds")
            return RunState(
                "finished",
                done,
                done or total,
                epsilon=epsilon,
                seconds=finite(seconds),
            )
        command = "" if self.about.saved else f"equipoise run --resume {shlex.quote(printable(self.path))}"
        if log.stopped is None and (is_locked(self.path / ".lock") or time.time() - log.modified < fresh):
            each = log.seconds_per_round
            left = None if each is None else finite(each * max(0, total - done))
            return RunState("running", done, total, left, epsilon=epsilon)
        if not log.curves and log.stopped is None and not RunFolder(self.path).checkpoint.exists():
            return RunState("waiting", 0, total, resume=command)
        why = (
            log.stopped
            or "It wrote nothing for a while, and no process works in its folder: it was killed, or the machine stopped."
        )
        return RunState("stopped", done, total, why=why, resume=command, epsilon=epsilon)


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock of a file, read from the system's list: asking for the lock would disturb a run.

    False where the system has no such list.
    """
    try:
        about = file.stat()
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        return any(device in line.split() for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False
