"""Writes a family that was made in Python as the folder of a run, or as a further version of one that is there."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.core.files import locked, write_atomically
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.experiment.config import PYTHON
from equipoise.experiment.family_files import MANIFEST, knob_section, read_manifest, write_family
from equipoise.experiment.recorded import RecordedConfig
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.train_options import TrainRecord
from equipoise.observers import history_lines

if TYPE_CHECKING:
    from equipoise.runs.family import Family

VERSIONS = "versions"  # in the folder of a family: further versions of it, 2, 3, …, each a folder like the first


def save_family(family: Family, path: str | Path) -> Path:
    """Write the folder of a family; it appears whole or not at all, and never over another."""
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fix = "A run never overwrites another. A further version of a family: family.publish(folder)."
        raise InvalidParameter("path", "must be a new or empty folder", str(path), fix)
    return _write_whole(family, target)


def publish_family(family: Family, path: str | Path) -> Path:
    """Write the family as the newest version of the one in a folder, or as its first; versions that are there stay.

    Models equal to those of a version that is there are not written again: that version's folder is returned.
    """
    target = Path(path)
    if not (target / MANIFEST).exists():
        return save_family(family, target)
    first = read_manifest(target)
    same = (first.knob, first.signature) == (family.knob, next(iter(family.results.values())).signature)
    if not same:
        fix = "Save it in a folder of its own: family.save(folder)."
        raise InvalidParameter("path", "must hold a family with this knob and these inputs", str(path), fix)
    (target / VERSIONS).mkdir(exist_ok=True)
    with locked(target / VERSIONS / ".lock", wait=True):
        numbers = [int(each.name) for each in (target / VERSIONS).iterdir() if each.name.isdecimal()]
        written = _write_whole(family, target / VERSIONS / str(max(numbers, default=1) + 1))
        version = read_manifest(written).version
        for other in (target, *(target / VERSIONS / str(number) for number in numbers)):
            with suppress(EquipoiseError):
                if read_manifest(other).version == version:
                    shutil.rmtree(written)
                    return other
    return written


def _write_whole(family: Family, target: Path) -> Path:
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.mkdir(parents=True)
        try:
            write_files(family, RunFolder(beside))
            os.replace(beside, target)  # also over an empty folder, but not over one that has been filled meanwhile
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, ValueError) as failure:
        if isinstance(failure, EquipoiseError):
            raise
        raise NotWritten(f"{target} could not be written: {failure}. Choose a folder that you may write to.") from failure
    return target


def write_files(family: Family, folder: RunFolder) -> None:
    """Write every file of a finished family that was made in Python."""
    results = list(family.results.values())
    first, model = results[0], type(results[0].model)
    known = {"data": first.data, "model": model.__name__, "model_class": f"{model.__module__}:{model.__qualname__}"}
    train = TrainRecord(first.rounds, first.clients_per_round, first.seed)
    config = RecordedConfig(first.algorithm, train, {PYTHON: known, "family": knob_section(family)})
    write_atomically(folder.config, config.text().encode())
    lines = [line for result in results for line in history_lines(result.history, result.name if len(results) > 1 else None)]
    write_atomically(folder.rounds, "".join(lines).encode())
    if first.schema is not None:
        first.schema.save(folder.schema)
    write_family(family, folder)
