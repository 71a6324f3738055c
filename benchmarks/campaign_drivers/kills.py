"""Runs that are killed, stopped, cut off from power or out of disk at random moments, and gone on with until they are done.

What they leave in the end must be what an undisturbed run leaves, bit for bit: the model, the history and the client table.
Disturbances are SIGKILL, SIGINT, SIGTERM, power cuts, full and read-only disks, a second process, and a clock that jumps.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from campaign_drivers.crash_states import PowerCut, PowerWentOut
from campaign_drivers.findings import Finding, in_child, start_child, wait_for
from campaign_drivers.killed_runs import ENDED, KilledRun, draw_run
from equipoise.core import files
from equipoise.errors import EquipoiseError, NotWritten
from equipoise.experiment.run_files import RunFolder
from equipoise.runs import checkpoint as checkpoint_module

LIMIT = 120.0  # seconds that a child may take
TRIES = 15  # after so many disturbances a run is left in peace
POWER_CUT, REFUSED, NO_DISK, WORDLESS = 75, 76, 77, 78  # exit codes of children
NOBODY = 65534  # a user that may not write to folders of others
HOW = {"kill": 10, "interrupt": 2, "terminate": 1, "power": 5, "full": 2, "read-only": 1, "two processes": 1, "clock": 1}
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


def work(run: KilledRun, place: Path) -> None:
    """What a child does: the run, or the rest of it. A refusal is an exit code of its own."""
    try:
        run.go_on(place)
    except EquipoiseError as refusal:
        if isinstance(refusal, OSError):  # NotWritten: the disk
            raise
        (place.parent / "refusal").write_text(f"{type(refusal).__name__}: {refusal}")
        os._exit(REFUSED)


def try_kills(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """One run of a random configuration, disturbed until it has had enough or is done."""
    run = draw_run(chance)
    case = run.words()
    began = time.monotonic()
    whole, place, number = folder / "whole", folder / "try-0", 0
    for each in (whole, place):
        each.mkdir()
    code = in_child(partial(work, run, whole), limit=LIMIT)
    if code == REFUSED:
        counts["refused or diverged"] += 1
        return
    if code != 0:
        raise Finding(f"an undisturbed run ended with exit code {code}", **case)
    length, done = time.monotonic() - began, []
    for _ in range(TRIES):
        how = chance.choices(list(HOW), list(HOW.values()))[0]
        target = folder / f"try-{number + 1}"
        code = _disturb(how, chance, run, place, target, length)
        done.append(f"{how}: {code}")
        counts[how] += how in ("clock", "two processes", "read-only") or code != 0
        if code == REFUSED:
            said = (folder / "refusal").read_text()
            raise Finding(f"after {how} the run was refused", **case, disturbances=done, refusal=said)
        if code == WORDLESS:
            said = (folder / "refusal").read_text()
            raise Finding(f"after {how} the error does not say how to go on", **case, disturbances=done, said=said)
        if code == 70 and how == "interrupt":
            counts["interrupt, by another exception"] += 1  # torch's own stack of modes is torn if it comes inside
        elif code == 70:
            raise Finding(f"after {how} the run ended in an exception", **case, disturbances=done)
        if code == POWER_CUT:
            target.mkdir(exist_ok=True)
            place, number = target, number + 1
        if code == 0 and run.ended(place):
            break
    else:
        code = in_child(partial(work, run, place), limit=LIMIT)
        if code != 0:
            said = (folder / "refusal").read_text() if code == REFUSED else ""
            raise Finding(f"the last run ended with exit code {code}", **case, disturbances=done, refusal=said)
    first, second = run.left_in(whole), run.left_in(place)
    if first != second:
        differ = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
        about = {key: [str(found.get(key))[:400] for found in (first, second)] for key in differ[:3]}
        raise Finding("a disturbed run ended elsewhere", **case, disturbances=done, differs=differ, shown=about)
    counts["ended alike"] += 1
    counts[f"runs: {run.mode}"] += 1


def _disturb(how: str, chance: random.Random, run: KilledRun, place: Path, target: Path, length: float) -> int:
    """One attempt at a run: the exit code of the child, 0 if it came to its end before anything happened to it."""
    moment, after, luck = chance.uniform(0, 0.7 * length), chance.randint(1, 60), random.Random(chance.random())
    if how in SIGNALS:
        return in_child(partial(work, run, place), limit=LIMIT, kill_after=moment, by=SIGNALS[how])
    if how == "two processes":
        return _two_at_once(run, place, luck.uniform(0, 0.3 * length))
    if how == "read-only" and os.getuid() == 0:
        return _read_only(run, place)

    def disturbed() -> None:
        if how == "clock":
            checkpoint_module.time = _Clock(luck)  # type: ignore[attr-defined]
            work(run, place)
            return
        if how == "power":
            files.recorder = PowerCut(place, target, after, luck)
        else:
            files.recorder = _NoRoom(after, errno.ENOSPC if how == "full" else errno.EROFS)
        try:
            work(run, place)
        except PowerWentOut:
            os._exit(POWER_CUT)
        except NotWritten as failure:
            os._exit(NO_DISK if _says_how_to_go_on(failure, run, place) else WORDLESS)

    return in_child(disturbed, limit=LIMIT)


def _says_how_to_go_on(failure: NotWritten, run: KilledRun, place: Path) -> bool:
    """Whether an error of the disk names a file of the run and, once there is something to go on with, how to go on."""
    said = " ".join([str(failure), *vars(failure).get("__notes__", ())])
    begun = RunFolder(place / "run").config.exists() if "folder" in run.mode else (place / "run.safetensors").exists()
    how = "--resume" if run.mode not in ("train", "family", "many") else "the same call goes on"
    good = str(place) in said and (how in said or not begun or ENDED in said)
    if not good:
        (place.parent / "refusal").write_text(said)
    return good


def _two_at_once(run: KilledRun, place: Path, later: float) -> int:
    """Two processes go on with one run: one of them does, and the other is refused or finds it done."""
    first = start_child(partial(work, run, place))
    time.sleep(later)
    second = start_child(partial(work, run, place))
    codes = [wait_for(child, limit=LIMIT) for child in (first, second)]
    refusal = place.parent / "refusal"
    if REFUSED in codes and 0 in codes and "nother process" in refusal.read_text():
        return 0
    return next((code for code in codes if code != 0), 0)


def _read_only(run: KilledRun, place: Path) -> int:
    """Another user may read the folder and not write to it: an error of our own, and nothing changes."""
    before = sorted((path, path.read_bytes()) for path in place.rglob("*") if path.is_file())

    def as_nobody() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            run.go_on(place)
        except (EquipoiseError, OSError):
            os._exit(NO_DISK)

    for path in (place, *place.parents[:1], *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    code = in_child(as_nobody, limit=LIMIT)
    after = sorted((path, path.read_bytes()) for path in place.rglob("*") if path.is_file())
    if code != 0 and before != after:
        raise Finding("a read-only folder has changed", **run.words())
    return code if code in (0, NO_DISK) else 70


class _NoRoom:
    """Takes so many primitives, and no more bytes after them: the disk is full, or has become read-only."""

    def __init__(self, after: int, why: int) -> None:
        self.left, self.why = after, why

    def __call__(self, operation: str, path: Path, *details: Any) -> None:
        self.left -= 1
        if self.left < 0 and (operation in ("write", "sync") or self.why == errno.EROFS):
            raise OSError(self.why, os.strerror(self.why))


class _Clock:
    """A clock that jumps by hours, forwards and backwards."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.shift = chance, 0.0

    def monotonic(self) -> float:
        """Seconds, as time.monotonic gives them, and some hours more or less."""
        self.shift += self.chance.choice([0, 0, 0, 3600, -3600])
        return time.monotonic() + self.shift
