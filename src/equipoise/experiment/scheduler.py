"""Runs of a study, several at once: each a process with one torch thread, or a task of a Ray cluster, with a live view.

A run that fails does not stop the others. On Ray each run goes where there is room. A node that sees the study's folder works
in it, and a lost run goes on from its checkpoint there. Any other node gets the files of the run, and sends them back.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from equipoise.core.files import writing
from equipoise.core.screen import Screen
from equipoise.core.words import printable
from equipoise.engines.cluster.ray_tasks import MOST_STARTS, RayTasks, SharedFolder, restarts
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.study import PlannedRun

Status = Literal["waiting", "running", "done", "failed", "there already"]
POLL_SECONDS = 0.25
LEAST_ROOM = 1 << 16  # bytes of a disk that is not full


@dataclass
class ScheduledRun:
    """A run of a study and how it stands."""

    run: PlannedRun
    status: Status = "waiting"
    message: str = ""  # why the run failed
    log_start: int = 0  # the position in run.log at which its process began to write
    options: tuple[str, ...] = ()  # command-line options of the worker
    starts: int = 0  # on a cluster, also after its node was lost
    node: str = ""  # where it runs on a cluster
    stop: Event = field(default_factory=Event)

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

    def begin(self) -> bool:
        """Note that the run begins, unless the study was stopped; False then."""
        self.log_start = self.folder.log.stat().st_size if self.folder.log.exists() else 0
        self.status = "waiting" if self.stop.is_set() else "running"
        return not self.stop.is_set()

    def end(self, code: int, how: str) -> None:
        """Note how the run has ended: its exit code, and in words how its process did."""
        good, reason = code == 0 and self.folder.finished, self.last_words()
        self.status = "done" if good else "failed"
        self.message = "" if good else reason if code == 2 and reason else f"ended with {how}. {reason}".strip()

    def last_words(self) -> str:
        """Why a run failed: its error in run.log, else the last line there. A log that is cut off says if the disk is full."""
        if not self.folder.log.exists():
            return ""
        text = self.folder.log.read_bytes()[self.log_start :].decode("utf-8", errors="replace")
        lines = text.strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("Error:")), lines[-1] if lines else "")
        if not text.endswith("\n") and shutil.disk_usage(self.folder.path).free < LEAST_ROOM:
            reason = f"{reason} {self.folder.log} could not be written: the disk is full. Make room on the disk.".strip()
        return reason.removeprefix("Error: ")


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
    tasks = None if ray is None or not runs else RayTasks(ray, runs[0].folder.path.parent, _train_folder)
    workers = tasks.room if tasks is not None else usual_workers(runs) if workers is None else workers
    pool = ThreadPoolExecutor(1 if tasks is not None else workers)  # with Ray one thread begins, and waits for, all tasks
    waiting = [job for job in jobs if job.status == "waiting"]
    try:
        if tasks is None:
            futures: list[Future[None]] = [pool.submit(_run_here, job) for job in waiting]
        else:
            futures = [pool.submit(_run_on, tasks, waiting, workers)] if waiting else []
        _watch(jobs, futures, console)
    finally:
        for job in jobs:
            job.stop.set()
        pool.shutdown(cancel_futures=True)
        if tasks is not None:
            tasks.stop(list(tasks.numbers))
    return jobs


def _watch(jobs: Sequence[ScheduledRun], futures: Sequence[Future[None]], console: Screen) -> None:
    """Show the runs until all have ended: bars in a terminal, else a line for each end."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn()
    told: set[int] = {id(job) for job in jobs if job.status == "there already"}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        shown = [(job, bars.add_task("", total=job.run.config.train.rounds)) for job in jobs]
        while True:
            ended = wait(futures, POLL_SECONDS).not_done == set()
            for job, bar in shown:
                name = printable(f"{job.run.method}, seed {job.run.seed}"[:50])
                if console.is_terminal:
                    bars.update(bar, completed=job.rounds_done(), description=f"{name}  {job.status} {job.node}".rstrip())
                elif job.status in ("done", "failed") and id(job) not in told:
                    told.add(id(job))
                    console.say(f"{job.status}: {name} {job.message}".rstrip() + (f" on {job.node}" if job.node else ""))
            if ended:
                break
    for future in futures:
        future.result()  # raises what no run can be blamed for


# ------------------------------------------------------------------------------------------------------- on this machine


def _run_here(job: ScheduledRun) -> None:
    """Make a run in a process of its own; what it prints goes to run.log."""
    if not job.begin():
        return
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # -P: a file in the working directory hides no module.
    command = [sys.executable, "-P", "-m", "equipoise.experiment.worker", str(job.folder.path), *job.options]
    with writing(job.folder.log):
        log = job.folder.log.open("ab")
    with log, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | one_thread
    ) as process:  # fmt: skip
        while process.poll() is None and not job.stop.wait(POLL_SECONDS / 5):
            pass
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
    code = process.returncode
    job.end(code, f"signal {-code}" if code < 0 else f"exit code {code}")


# -------------------------------------------------------------------------------------------------------- on a Ray cluster


def _run_on(tasks: RayTasks, waiting: list[ScheduledRun], room: int) -> None:
    """Make runs as tasks of a cluster; one that was lost is started again, a bounded number of times."""
    left, running = list(waiting), dict[Any, ScheduledRun]()

    def start(job: ScheduledRun) -> None:
        if job.begin():
            job.starts += 1
            path = job.folder.path.absolute()
            running[tasks.start(str(path), _packed(path), job.options)] = job

    while (left or running) and not waiting[0].stop.wait(POLL_SECONDS):
        for reference, job in list(running.items()):
            if (end := tasks.ended(reference)) is None:
                continue
            del running[reference]
            if end.lost and job.starts < MOST_STARTS:
                start(job)
                continue
            code, files = end.value if end.value is not None else (1, None)
            if files is not None:
                _unpack(files, job.folder.path)
            job.node = end.node or job.node
            job.end(code, f"exit code {code}")
            if job.status == "failed":
                job.message = f"its worker or node was lost: {end.lost}." if end.lost else end.failed or job.last_words()
            job.message = f"{job.message} {restarts(job.starts)}".strip()
        while left and len(running) < room:
            start(left.pop(0))
        places = tasks.places()
        for reference, job in running.items():
            job.node = places.get(reference, job.node)


def _train_folder(shared: SharedFolder, path: str, files: bytes, options: tuple[str, ...]) -> tuple[int, bytes | None]:
    """Train the run of a folder on this node: the exit code, and the files if the driver cannot see them."""
    if shared.is_here():
        return _train_here(Path(path), options), None
    with tempfile.TemporaryDirectory(prefix="equipoise-run-") as place:
        folder = Path(place) / Path(path).name
        folder.mkdir()
        _unpack(files, folder)
        return _train_here(folder, options), _packed(folder)


def _train_here(folder: Path, options: tuple[str, ...]) -> int:
    """Train the run of a folder in this process; what it prints goes to run.log."""
    from equipoise.experiment import worker

    with RunFolder(folder).log.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        return worker.main(str(folder), without_test="--without-test" in options)


def _packed(folder: Path) -> bytes:
    """The files of a folder in one byte string."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, arcname=".")
    return out.getvalue()


def _unpack(files: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
