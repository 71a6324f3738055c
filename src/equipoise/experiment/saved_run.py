"""Writes a result that was made in Python as the folder of a run, which reports read like any other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.core.files import move, write_atomically
from equipoise.errors import InvalidParameter, NotWritten
from equipoise.experiment.config import PYTHON
from equipoise.experiment.family_files import write_single
from equipoise.experiment.recorded import RecordedConfig
from equipoise.experiment.run_files import RunFolder, write_outcome
from equipoise.experiment.train_options import TrainRecord
from equipoise.observers import history_lines

if TYPE_CHECKING:
    from equipoise.result import Result


def save_result(result: Result, path: str | Path) -> Path:
    """Write the folder of a run; it appears whole or not at all, and never over another."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InvalidParameter("path", "must be a new or empty folder", str(path), "A run never overwrites another.")
        beside.mkdir(parents=True)
        try:
            write_files(result, RunFolder(beside))
            move(beside, target)  # also over an empty folder, but not over one that has been filled meanwhile
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, ValueError) as failure:
        if isinstance(failure, InvalidParameter | NotWritten):
            raise
        raise NotWritten(f"{path} could not be written: {failure}. Choose a folder that you may write to.") from failure
    return target


def write_files(result: Result, folder: RunFolder) -> None:
    """Write every file of a finished run that was made in Python."""
    model = type(result.model)
    known = {"data": result.data, "model": model.__name__, "model_class": f"{model.__module__}:{model.__qualname__}"}
    train = TrainRecord(result.rounds, result.clients_per_round, result.seed, name=result.name)
    config = RecordedConfig(result.algorithm, train, {PYTHON: known})
    write_atomically(folder.config, config.text().encode())
    write_atomically(folder.rounds, "".join(history_lines(result.history)).encode())
    if result.schema is not None:
        result.schema.save(folder.schema)
    write_single(result, folder)
    write_outcome(result, folder)
