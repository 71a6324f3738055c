"""Writes what was made in Python as folders that reports read like any other: a result as a run, a comparison as a study."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import move, write_atomically
from equipoise.errors import InvalidParameter, NotWritten
from equipoise.experiment.config import PYTHON
from equipoise.experiment.family_files import write_single
from equipoise.experiment.recorded import RecordedConfig
from equipoise.experiment.run_files import ORDER, RunFolder, method_folder, write_outcome
from equipoise.experiment.train_options import TrainRecord
from equipoise.observers import history_lines

if TYPE_CHECKING:
    from equipoise.compare import Comparison
    from equipoise.result import Result


def save_result(result: Result, path: str | Path) -> Path:
    """Write the folder of a run; it appears whole or not at all, and never over another."""
    return _write_whole(path, lambda folder: write_files(result, RunFolder(folder)))


def save_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the folder of a study, with a folder for each run; it appears whole or not at all, and never over another."""

    def write(folder: Path) -> None:
        names = _folders_of_runs(comparison)
        written: dict[Any, Mapping[str, bytes]] = {}  # of each kind of model: to trace one takes seconds
        for name, run in zip(names, comparison.all_results, strict=True):
            (folder / name).mkdir()
            kind = _kind_of_model(run)
            written[kind] = write_files(run, RunFolder(folder / name), like=written.get(kind))
        write_atomically(folder / ORDER, "".join(f"{name}\n" for name in names).encode())
        comparison.report(folder / "report.html")

    return _write_whole(path, write)


def _kind_of_model(result: Result) -> tuple[Any, ...]:
    """What models that differ in parameters alone have in common: class, modules, names, shapes and types, and the loss."""
    model, task = result.model, result.task
    shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in model.state_dict().items())
    scored = None if task is None else task.given_functions
    return type(model), repr(model), shapes, result.signature, scored


def _folders_of_runs(comparison: Comparison) -> list[str]:
    """The name of the folder of each run: method and seed; methods that make the same name are numbered."""
    names: list[str] = []
    taken: set[str] = set()
    for method, runs in comparison.results.items():
        short = method_folder(method)[:80]
        number = next(k for k in itertools.count(1) if (short if k == 1 else f"{short}-method{k}").casefold() not in taken)
        name = short if number == 1 else f"{short}-method{number}"
        taken.add(name.casefold())
        names += [f"{name}-{run.seed}" for run in runs]
    return names


def _write_whole(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Fill a new folder by `write`; it appears whole or not at all, and never over another."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InvalidParameter("path", "must be a new or empty folder", str(path), "A run never overwrites another.")
        beside.mkdir(parents=True)
        try:
            write(beside)
            move(beside, target)  # also over an empty folder, but not over one that has been filled meanwhile
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, ValueError) as failure:
        if isinstance(failure, InvalidParameter | NotWritten):
            raise
        raise NotWritten(f"{path} could not be written: {failure}. Choose a folder that you may write to.") from failure
    return target


def write_files(result: Result, folder: RunFolder, *, like: Mapping[str, bytes] | None = None) -> Mapping[str, bytes]:
    """Write every file of a finished run that was made in Python; returns those of the model.

    `like` are the files of a model that differs in parameters alone.
    """
    model = type(result.model)
    known = {"data": result.data, "model": model.__name__, "model_class": f"{model.__module__}:{model.__qualname__}"}
    train = TrainRecord(result.rounds, result.clients_per_round, result.seed, name=result.name)
    config = RecordedConfig(result.algorithm, train, {PYTHON: known})
    write_atomically(folder.config, config.text().encode())
    write_atomically(folder.rounds, "".join(history_lines(result.history)).encode())
    if result.schema is not None:
        result.schema.save(folder.schema)
    files = write_single(result, folder, like=like)
    write_outcome(result, folder)
    return files
