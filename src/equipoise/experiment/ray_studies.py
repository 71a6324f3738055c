"""Runs of a study as tasks of a Ray cluster: each where there is room, started again elsewhere if its node is lost.

A node that sees the study's folder works in it, and a lost run goes on from its checkpoint there. Any other node gets the files
of the run's folder with the task and sends them back at the end.
"""

from __future__ import annotations

import io
import secrets
import socket
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from equipoise.core.files import write_atomically
from equipoise.experiment.run_files import RunFolder

MOST_STARTS = 3  # of one run, where workers or nodes are lost
_TOKEN = ".ray-study"  # noqa: S105 (a file in the study's folder, by which a node knows that it sees the folder)


class RayTasks:
    """Starts runs as tasks of a cluster, and says how they ended."""

    def __init__(self, address: str, folder: Path) -> None:
        from equipoise.engines.cluster.ray_extra import connect

        self.ray = connect(address)
        self.token, self.file = secrets.token_hex(8), folder.absolute() / _TOKEN
        write_atomically(self.file, self.token.encode())
        self.room = max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        self.task = self.ray.remote(_train_folder).options(num_cpus=1, max_retries=0)

    def start(self, folder: RunFolder, options: Sequence[str]) -> Any:
        """Start a run; the reference to what it will say."""
        path = folder.path.absolute()
        return self.task.remote(str(path), str(self.file), self.token, _packed(path), tuple(options))

    def ended(self, reference: Any, folder: RunFolder) -> tuple[int | None, str, bool] | None:
        """Of a run that has ended the exit code, the node, and whether it was lost; None while it works."""
        ready, _ = self.ray.wait([reference], timeout=0)
        if not ready:
            return None
        try:
            code, node, files = self.ray.get(reference)
        except self.ray.exceptions.RayError as failure:
            lines = str(failure).strip().splitlines()
            return None, lines[0] if lines else type(failure).__name__, True
        if files is not None:
            _unpack(files, folder.path)
        return code, node, False

    def stop(self, references: Sequence[Any]) -> None:
        """End tasks that still work, and take the token away."""
        for reference in references:
            with suppress(Exception):  # it has ended by now
                self.ray.cancel(reference, force=True)
        self.file.unlink(missing_ok=True)


def _train_folder(
    path: str, token_file: str, token: str, files: bytes, options: tuple[str, ...]
) -> tuple[int, str, bytes | None]:
    """Train the run of a folder on this node: the exit code, the node's name, and the files if the driver cannot see them."""
    seen = Path(token_file)
    shared = seen.exists() and seen.read_text() == token
    if shared:
        return _train_here(Path(path), options), socket.gethostname(), None
    with tempfile.TemporaryDirectory(prefix="equipoise-run-") as place:
        folder = Path(place) / Path(path).name
        folder.mkdir()
        _unpack(files, folder)
        return _train_here(folder, options), socket.gethostname(), _packed(folder)


def _train_here(folder: Path, options: tuple[str, ...]) -> int:
    """Train the run of a folder in this process; what it prints goes to run.log."""
    import torch

    from equipoise.experiment.worker import main

    torch.set_num_threads(1)
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
