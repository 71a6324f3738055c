"""Runs in parallel processes, one torch thread each, with a live table; a run that fails does not stop the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun

Status = Literal["waiting", "running", "done", "failed", "there already"]
POLL_SECONDS = 0.25


@dataclass
class ScheduledRun:
    """A run of a study, its process and its progress."""

    run: PlannedRun
    status: Status = "waiting"
    process: subprocess.Popen[bytes] | None = None
    start_time: float = 0.0
    first_round: int = 0  # of this process
    message: str = ""  # why the run failed
    log_start: int = 0  # the position in run.log at which this process began to write
    options: tuple[str, ...] = ()  # command-line options of the worker

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return self.run.folder

    def rounds_done(self) -> int:
        """The number of rounds in the log of rounds."""
        if self.status in ("done", "there already"):
            return self.run.config.train.rounds
        event = self.folder.last_event()
        return int(event.get("round", -1)) + (event.get("event") == "round") if "round" in event else 0

    def seconds_left(self) -> float | None:
        """The expected time to the end, by the rounds that this process has done; None while nothing is known."""
        done = self.rounds_done() - self.first_round
        if self.status != "running" or done <= 0:
            return None
        return (time.monotonic() - self.start_time) / done * (self.run.config.train.rounds - self.rounds_done())


def run_all(runs: Sequence[PlannedRun], *, workers: int, console: Console, options: Sequence[str] = ()) -> list[ScheduledRun]:
    """Make the runs that are not finished, `workers` at a time; returns all with their status. `options` are the worker's."""
    jobs = [ScheduledRun(run, "there already" if run.folder.finished else "waiting", options=tuple(options)) for run in runs]
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=4, get_renderable=lambda: live_table(jobs)):
                _work_through(jobs, workers, None)
        else:
            _work_through(jobs, workers, console)
    finally:
        for job in jobs:
            _stop(job)
    return jobs


def _work_through(jobs: list[ScheduledRun], workers: int, console: Console | None) -> None:
    """Start runs as workers become free, until all have ended; print each end to the console, if there is one."""
    while True:
        for job in jobs:
            if job.status == "running" and _ended(job) and console is not None:
                text = f"{job.status}: {job.run.method}, seed {job.run.seed} {job.message}".rstrip()
                console.print(Text(text), soft_wrap=True)
        waiting = [job for job in jobs if job.status == "waiting"]
        running = sum(job.status == "running" for job in jobs)
        if not waiting and not running:
            return
        for job in waiting[: workers - running]:
            _start(job)
        time.sleep(POLL_SECONDS)


def _start(job: ScheduledRun) -> None:
    """Start the process of a run; what it prints goes to run.log."""
    job.first_round, job.start_time, job.status = job.rounds_done(), time.monotonic(), "running"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # -P: a file in the working directory hides no module.
    command = [sys.executable, "-P", "-m", "equipoise.experiment.worker", str(job.folder.path), *job.options]
    with job.folder.log.open("ab") as log:
        job.log_start = log.tell()
        job.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | one_thread)


def _ended(job: ScheduledRun) -> bool:
    """Whether the process of a run has ended; then its status and message are set."""
    if job.process is None or (code := job.process.poll()) is None:
        return False
    if code == 0 and job.folder.finished:
        job.status = "done"
        return True
    job.status = "failed"
    lines = job.folder.log.read_bytes()[job.log_start :].decode("utf-8", errors="replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if line.startswith("Error:")), lines[-1] if lines else "")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    job.message = reason.removeprefix("Error: ") if code == 2 and reason else f"ended with {how}. {reason}".strip()
    return True


def _stop(job: ScheduledRun) -> None:
    """End the process of a run, if it still works."""
    if job.process is not None and job.process.poll() is None:
        job.process.terminate()
        try:
            job.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


_COLOURS = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "red", "there already": "green"}


def live_table(jobs: Sequence[ScheduledRun]) -> Table:
    """A table of all runs with status, progress and time left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("method", "seed", "status", "", "rounds", "time left"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("seed", "rounds", "time left") else "left")
    for job in jobs:
        done, total, left = job.rounds_done(), job.run.config.train.rounds, job.seconds_left()
        table.add_row(
            Text(job.run.method),
            str(job.run.seed),
            Text(job.status, style=_COLOURS[job.status]),
            ProgressBar(total=max(total, 1), completed=done if total else 1, width=24),
            f"{done}/{total}",
            "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}",
        )
    return table
