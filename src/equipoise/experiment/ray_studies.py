"""Runs of a study as tasks of a Ray cluster: each where there is room, started again elsewhere if its node is lost.

A node that sees the study's folder works in it, and a lost run goes on from its checkpoint there. Any other node gets the files
of the run's folder with the task and sends them back at the end.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from equipoise.engines.cluster.ray_tasks import RayTasks, SharedFolder, TaskEnd
from equipoise.experiment.run_files import RunFolder


def study_tasks(address: str, folder: Path) -> RayTasks:
    """Tasks that train runs whose folders are in the folder of a study."""
    return RayTasks(address, folder, _train_folder)


def start_run(tasks: RayTasks, folder: RunFolder, options: Sequence[str]) -> Any:
    """Start a run; the reference to what it will say."""
    path = folder.path.absolute()
    return tasks.start(str(path), _packed(path), tuple(options))


def run_ended(tasks: RayTasks, reference: Any, folder: RunFolder) -> TaskEnd | None:
    """How a run has ended, with its exit code as the value; None while it works. Its files are there then."""
    end = tasks.ended(reference)
    if end is None or end.value is None:
        return end
    code, files = end.value
    if files is not None:
        _unpack(files, folder.path)
    return end._replace(value=code)


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
    from equipoise.experiment.worker import main

    train: Callable[..., int] = main
    with RunFolder(folder).log.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        return train(str(folder), without_test="--without-test" in options)


def _packed(folder: Path) -> bytes:
    """The files of a folder in one byte string."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, arcname=".")
    return out.getvalue()


def _unpack(files: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
