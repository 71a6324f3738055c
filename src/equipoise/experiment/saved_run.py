"""Writes what was made in Python as folders that reports read like any other: a result or a family as a run, a comparison
as a study.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import locked, move, write_atomically
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.experiment.config import PYTHON
from equipoise.experiment.family_files import MANIFEST, VERSIONS, read_manifest, write_family, write_single
from equipoise.experiment.recorded import RecordedConfig
from equipoise.experiment.run_files import ORDER, RunFolder, method_folder, write_outcome
from equipoise.experiment.train_options import TrainRecord
from equipoise.observers import history_lines

if TYPE_CHECKING:
    from equipoise.compare import Comparison
    from equipoise.result import Result
    from equipoise.runs.family import Family

IN_STUDY = "runs of a study leave none, because writing them takes seconds. For one run: equipoise export DIR"


def save_result(result: Result, path: str | Path) -> Path:
    """Write the folder of a run; it appears whole or not at all, and never over another."""
    return _write_whole(path, lambda folder: _write_result(result, RunFolder(folder)))


def save_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the folder of a study, with a folder for each run; it appears whole or not at all, and never over another."""

    def write(folder: Path) -> None:
        names = _folders_of_runs(comparison)
        for name, run in zip(names, comparison.all_results, strict=True):
            (folder / name).mkdir()
            _write_result(run, RunFolder(folder / name), no_onnx=IN_STUDY)
        write_atomically(folder / ORDER, "".join(f"{name}\n" for name in names).encode())
        comparison.report(folder / "report.html")

    return _write_whole(path, write)


def save_family(family: Family, path: str | Path) -> Path:
    """Write the folder of a family; it appears whole or not at all, and never over another."""
    return _write_whole(path, lambda folder: _write_family(family, RunFolder(folder)))


def publish_family(family: Family, path: str | Path) -> Path:
    """Write the family as the newest version of the one in a folder, or as its first; versions that are there stay.

    Models equal to those of a version that is there are not written again: that version's folder is returned.
    """
    target = Path(path)
    if not (target / MANIFEST).exists():
        return save_family(family, target)
    first = read_manifest(target)
    if (first.knob, first.signature) != (family.knob, next(iter(family.results.values())).signature):
        fix = "Save it in a folder of its own: family.save(folder)."
        raise InvalidParameter("path", "must hold a family with this knob and these inputs", str(path), fix)
    (target / VERSIONS).mkdir(exist_ok=True)
    with locked(target / VERSIONS / ".lock", wait=True):
        numbers = [int(each.name) for each in (target / VERSIONS).iterdir() if each.name.isdecimal()]
        written = save_family(family, target / VERSIONS / str(max(numbers, default=1) + 1))
        version = read_manifest(written).version
        for other in (target, *(target / VERSIONS / str(number) for number in numbers)):
            with suppress(EquipoiseError):
                if read_manifest(other).version == version:
                    shutil.rmtree(written)
                    return other
    return written


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
        if isinstance(failure, EquipoiseError):
            raise
        raise NotWritten(f"{path} could not be written: {failure}. Choose a folder that you may write to.") from failure
    return target


def _write_head(result: Result, folder: RunFolder, train: TrainRecord, lines: list[str], **sections: Mapping[str, Any]) -> None:
    """Write what a run that was made in Python has before its models: config.toml, the log of rounds, and the schema."""
    model = type(result.model)
    known = {"data": result.data, "model": model.__name__, "model_class": f"{model.__module__}:{model.__qualname__}"}
    config = RecordedConfig(result.algorithm, train, {PYTHON: known, **sections})
    write_atomically(folder.config, config.text().encode())
    write_atomically(folder.rounds, "".join(lines).encode())
    if result.schema is not None:
        result.schema.save(folder.schema)


def _write_result(result: Result, folder: RunFolder, *, no_onnx: str | None = None) -> None:
    """Write every file of a finished run."""
    train = TrainRecord(result.rounds, result.clients_per_round, result.seed, name=result.name)
    _write_head(result, folder, train, list(history_lines(result.history)))
    write_single(result, folder, no_onnx=no_onnx)
    write_outcome(result, folder)


def _write_family(family: Family, folder: RunFolder) -> None:
    """Write every file of a finished family."""
    results = list(family.results.values())
    lines = [line for each in results for line in history_lines(each.history, each.name if len(results) > 1 else None)]
    train = TrainRecord(results[0].rounds, results[0].clients_per_round, results[0].seed)
    knob = {f"{family.knob}s": [float(value) for value in family.values]}
    _write_head(results[0], folder, train, lines, family=knob)
    write_family(family, folder)
