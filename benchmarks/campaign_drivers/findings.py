"""What a driver does with its cases: each from a seed of its own, counted, and kept with a reproduction if it fails."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Where cases work: in memory, if the system has that, since power cuts are played and a disk would be waited for.
MEMORY = "/dev/shm"  # noqa: S108 — a new folder below it
QUICK = MEMORY if os.access(MEMORY, os.W_OK) else None
SLICE = 60.0  # seconds of each driver in `make campaign`
FIXED = {"kills": 3, "inputs": 20, "combinations": 20, "attackers": 30}  # cases of each driver in `make test`, always the same


class Finding(Exception):
    """A promise that a case has broken; `case` describes the case, as small as it is known."""

    def __init__(self, what: str, **case: Any) -> None:
        super().__init__(what)
        self.case = case


@dataclass
class Tally:
    """What a driver has tried, by word, and how many cases failed."""

    driver: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Path] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0  # seconds of this process and of its children

    def line(self) -> str:
        """The tally as a line of JSON."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"when": when, "driver": self.driver, "seed": self.seed, "seconds": round(self.seconds, 1)}
        about["processor"] = round(self.processor, 1)
        about |= {"machine": f"{platform.machine()}, {os.cpu_count()} processors", "counts": dict(self.counts)}
        return json.dumps(about | {"findings": [path.name for path in self.findings]})


Case = Callable[[random.Random, Path, Counter], None]


def drive(
    driver: str, case: Case, *, seconds: float, seed: int, folder: Path, first: int = 0, only: int | None = None,
    most: int | None = None,
) -> Tally:  # fmt: skip
    """Try cases until the time is over, or `most` cases; one that fails is written to the folder with how to repeat it."""
    tally, began, number = Tally(driver, seed), time.monotonic(), first if only is None else only
    worked = sum(os.times()[:4])
    while only is not None or time.monotonic() - began < seconds:
        chance = random.Random(f"{driver} {seed} {number}")
        place = Path(tempfile.mkdtemp(prefix=f"campaign-{driver}-", dir=QUICK))
        try:
            case(chance, place, tally.counts)
        except Exception as failure:  # whatever it is, it was not promised
            tally.findings.append(_keep(folder, driver, seed, number, failure))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        tally.counts["cases"] += 1
        number += 1
        if only is not None or tally.counts["cases"] == most:
            break
    tally.seconds, tally.processor = time.monotonic() - began, sum(os.times()[:4]) - worked
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.jsonl").open("a") as log:
        log.write(tally.line() + "\n")
    return tally


def _keep(folder: Path, driver: str, seed: int, number: int, failure: Exception) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{driver}-{seed}-{number}.json"
    again = f"python benchmarks/campaign.py --driver {driver} --seed {seed} --case {number}"
    case = failure.case if isinstance(failure, Finding) else {}
    content = {"again": again, "what": f"{type(failure).__name__}: {failure}", "case": case}
    content["trace"] = traceback.format_exc().splitlines()[-30:]
    path.write_text(json.dumps(content, indent=1, default=str))
    return path


def start_child(work: Callable[[], None]) -> int:
    """Do some work in a forked child, which begins with everything that its parent has imported; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told this process to ignore it
            work()
            code = 0
        except KeyboardInterrupt:
            code = 71
        except BaseException:  # the parent hears of it by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def wait_for(child: int, *, limit: float, kill_after: float | None = None, by: int = signal.SIGKILL) -> int:
    """The exit code of a child, or minus the signal that ended it. A child beyond `limit` is a finding.

    With `kill_after` it is sent the signal `by` by then. On a busy machine a child that was given little of the processor has
    five times as long.
    """
    began, sent = time.monotonic(), False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        past = time.monotonic() - began
        if kill_after is not None and past >= kill_after and not sent:
            os.kill(child, by)
            sent = True
        if past > 5 * limit or (past > limit and worked_by(child) > limit / 2):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Finding(f"a child did not end within {limit} seconds")
        time.sleep(0.002)


def worked_by(process: int) -> float:
    """Seconds of the processor that a process has used; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_child(work: Callable[[], None], *, limit: float, kill_after: float | None = None, by: int = signal.SIGKILL) -> int:
    """Do some work in a forked child and wait for it."""
    return wait_for(start_child(work), limit=limit, kill_after=kill_after, by=by)
