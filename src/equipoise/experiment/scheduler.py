"""Runs in parallel processes, one torch thread each, with a live table; a run that fails does not stop the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from equipoise.core.files import writing
from equipoise.core.screen import Screen
from equipoise.core.words import printable
from equipoise.engines.cluster.ray_tasks import MOST_STARTS, RayTasks, restarts
from equipoise.experiment.ray_studies import run_ended, start_run, study_tasks
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun
from equipoise.report.formats import shorten

Status = Literal["waiting", "running", "done", "failed", "there already"]
POLL_SECONDS = 0.25
LEAST_ROOM = 1 << 16  # bytes of a disk that is not full


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
    remote: Any = None  # the reference to its task on a cluster
    starts: int = 0  # on a cluster, also after its node was lost
    node: str = ""  # where it runs on a cluster

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


def usual_workers(runs: Sequence[PlannedRun]) -> int:
    """How many runs to make at once: one per core, but one alone where a run is on a GPU, whose memory all would share."""
    on_cpu = all((run.config.train.device or "cpu").startswith("cpu") for run in runs)
    if not on_cpu:
        return 1
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def run_all(
    runs: Sequence[PlannedRun], *, workers: int | None, console: Screen, options: Sequence[str] = (), ray: str | None = None
) -> list[ScheduledRun]:
    """Make the runs that are not finished, `workers` at a time; returns all with their status. `options` are the worker's.

    With None as number of workers it is that of `usual_workers`.
    With `ray`, the address of a Ray cluster, each run is a task there, and there are as many at a time as the cluster has CPUs.
    """
    jobs = [ScheduledRun(run, "there already" if run.folder.finished else "waiting", options=tuple(options)) for run in runs]
    tasks = None if ray is None or not runs else study_tasks(ray, runs[0].folder.path.parent)
    workers = tasks.room if tasks is not None else usual_workers(runs) if workers is None else workers
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=4, get_renderable=lambda: live_table(jobs)):
                _work_through(jobs, workers, None, tasks)
        else:
            _work_through(jobs, workers, console, tasks)
    finally:
        for job in jobs:
            _stop(job)
        if tasks is not None:
            tasks.stop([job.remote for job in jobs if job.status == "running"])
    return jobs


def _work_through(jobs: list[ScheduledRun], workers: int, console: Screen | None, tasks: RayTasks | None = None) -> None:
    """Start runs as workers become free, until all have ended; print each end to the console, if there is one."""
    while True:
        for job in jobs:
            if job.status == "running" and (_ended(job) if tasks is None else _ended_on(tasks, job)) and console is not None:
                text = f"{job.status}: {job.run.method}, seed {job.run.seed} {job.message}".rstrip()
                text += f" on {job.node}" if job.node else ""
                console.say(text)
        if tasks is not None and console is None:  # for the live table
            places = tasks.places()
            for job in jobs:
                job.node = places.get(job.remote, job.node) if job.status == "running" else job.node
        waiting = [job for job in jobs if job.status == "waiting"]
        running = sum(job.status == "running" for job in jobs)
        if not waiting and not running:
            return
        for job in waiting[: workers - running]:
            if tasks is None:
                _start(job)
            else:
                _start_on(tasks, job)
        time.sleep(POLL_SECONDS)


def _start(job: ScheduledRun) -> None:
    """Start the process of a run; what it prints goes to run.log."""
    job.first_round, job.start_time, job.status = job.rounds_done(), time.monotonic(), "running"
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # -P: a file in the working directory hides no module.
    command = [sys.executable, "-P", "-m", "equipoise.experiment.worker", str(job.folder.path), *job.options]
    with writing(job.folder.log):
        log = job.folder.log.open("ab")
    with log:
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
    how, reason = f"signal {-code}" if code < 0 else f"exit code {code}", _last_words(job)
    job.message = reason if code == 2 and reason else f"ended with {how}. {reason}".strip()
    return True


def _last_words(job: ScheduledRun) -> str:
    """Why a run failed: its error in run.log, else the last line there. A log that is cut off says if the disk is full."""
    if not job.folder.log.exists():
        return ""
    text = job.folder.log.read_bytes()[job.log_start :].decode("utf-8", errors="replace")
    lines = text.strip().splitlines()
    reason = next((line for line in reversed(lines) if line.startswith("Error:")), lines[-1] if lines else "")
    if not text.endswith("\n") and shutil.disk_usage(job.folder.path).free < LEAST_ROOM:
        reason = f"{reason} {job.folder.log} could not be written: the disk is full. Make room on the disk.".strip()
    return reason.removeprefix("Error: ")


def _start_on(tasks: RayTasks, job: ScheduledRun) -> None:
    """Start a run as a task of a cluster."""
    job.first_round, job.start_time, job.status = job.rounds_done(), time.monotonic(), "running"
    job.log_start = job.folder.log.stat().st_size if job.folder.log.exists() else 0
    job.starts += 1
    job.remote, job.node = start_run(tasks, job.folder, job.options), ""


def _ended_on(tasks: RayTasks, job: ScheduledRun) -> bool:
    """Whether the task of a run has ended for good; one that was lost is started again, a bounded number of times."""
    end = run_ended(tasks, job.remote, job.folder)
    if end is None:
        return False
    if end.lost and job.starts < MOST_STARTS:
        _start_on(tasks, job)
        return False
    job.message, job.node = restarts(job.starts), end.node or job.node
    if end.value == 0 and job.folder.finished:
        job.status = "done"
        return True
    job.status = "failed"
    reason = f"its worker or node was lost: {end.lost}." if end.lost else end.failed or _last_words(job)
    job.message = f"{reason} {job.message}".rstrip()
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
    table, remote = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), any(job.remote is not None for job in jobs)
    for title in ("method", "seed", "status", "", "rounds", "time left", *(["node"] if remote else [])):
        table.add_column(title, no_wrap=True, justify="right" if title in ("seed", "rounds", "time left") else "left")
    for job in jobs:
        done, total, left = job.rounds_done(), job.run.config.train.rounds, job.seconds_left()
        table.add_row(
            shorten(printable(job.run.method), 40),
            str(job.run.seed),
            Text(job.status, style=_COLOURS[job.status]),
            ProgressBar(total=max(total, 1), completed=done if total else 1, width=24),
            f"{done}/{total}",
            "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}",
            *([job.node] if remote else []),
        )
    return table
