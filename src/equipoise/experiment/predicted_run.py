"""Applies the model of a finished run to the rows of a new file, by the schema that the run has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from equipoise.core.tensor_files import read_tensor_file
from equipoise.core.words import counted
from equipoise.data.csv_reading import CSV_DEFAULTS
from equipoise.data.new_rows import read_columns, read_rows
from equipoise.data.schema import Schema
from equipoise.data.table_column import shown_names
from equipoise.errors import ConfigError, notify, unknown_name
from equipoise.experiment.config import PYTHON, RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, MEMBERS, read_manifest
from equipoise.experiment.run_files import RunFolder
from equipoise.models.table_network import Tabular


def predict_rows(
    path: Path, rows: Path, *, reading: Mapping[str, Any] | None = None, member: str | None = None, keep: Sequence[str] = (),
    trust: bool = False,
) -> Any:  # fmt: skip
    """What the model of the run in a folder says about each row of a CSV or Parquet file: an Arrow table as `Schema.predict`.

    A CSV file is read as the run's own was, but for the options `reading`. `member` names a model of a family: a value of its
    knob, or its name. Columns `keep` of the file come first, those of a CSV file as they are written there.
    """
    folder = RunFolder(path)
    if not path.exists():
        raise ConfigError(f"The folder {path} does not exist. Name a folder of equipoise run.")
    if not folder.config.is_file():
        runs = sorted(str(each.parent) for each in path.glob(f"*/{folder.config.name}"))
        fix = f"It holds the runs {shown_names(runs)}: name one of them." if runs else "Name a folder of equipoise run."
        raise ConfigError(f"{path} is no folder of a run: it has no {folder.config.name}. {fix}")
    if not folder.schema.is_file():
        raise ConfigError(
            f"The data of the run in {path} are no table, so that it has no {folder.schema.name} to read rows by."
        )
    schema, table = Schema.load(folder.schema), read_toml(folder.config)
    model = _trained(folder, table, schema, _model_file(folder, member), trust=trust)
    options = _options(table, schema, reading or {})
    found = read_rows(rows, schema, options)
    answer = schema.predict(model, found, str(rows))
    if folder.personal.is_file():
        count = len(np.load(folder.personal, mmap_mode="r"))
        notify(
            f"These predictions are of the shared model. The run has own models of {counted(count, 'client')}, in "
            f"{folder.personal}, which were not used."
        )
    kept = _kept_columns(rows, options, keep, found.column_names, answer)
    for place, name in enumerate(kept.column_names):
        answer = answer.add_column(place, name, kept.column(name))
    return answer


def _kept_columns(rows: Path, reading: Mapping[str, Any], keep: Sequence[str], present: Sequence[str], answer: Any) -> Any:
    """The columns of the file that the output is to have, too; those that the file lacks or the answer has are refused."""
    for name in keep:
        if name not in present:
            raise ConfigError(f"--keep {name}: {rows} has no such column. " + unknown_name("column", name, present))
        if name in answer.column_names:
            fix = "Give the column another name in the file."
            raise ConfigError(f"--keep {name}: the output has a column {name!r} of its own, for what the model says. {fix}")
    return read_columns(rows, reading, list(dict.fromkeys(keep)))


def _options(table: Mapping[str, Any], schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """How to read a CSV file: as the configuration of the run or its schema says, but for what is given."""
    for name, value in given.items():
        if name not in CSV_DEFAULTS:
            raise ConfigError(f"--set {name}={value}: " + unknown_name("option", name, CSV_DEFAULTS))
    data = table.get("data")
    own = {name: data[name] for name in CSV_DEFAULTS if name in data} if isinstance(data, Mapping) else {}
    return {**dict(schema.reading), **own, **given}


def _model_file(folder: RunFolder, member: str | None) -> Path:
    """The file with the parameters: that of the run, or of a member of a family."""
    if not (folder.path / MANIFEST).exists():
        if member is not None:
            raise ConfigError(f"{folder.path} is no family, so that there is no model {member!r} to choose. Leave it out.")
        if not folder.model.exists():
            raise ConfigError(f"{folder.model} does not exist: the run has not ended. equipoise run --resume goes on.")
        return folder.model
    members = read_manifest(folder.path).members
    for each in members:
        if member in (each.folder, each.name, repr(each.value), f"{each.value:g}"):
            return folder.path / MEMBERS / each.folder / folder.model.name
    known = ", ".join(each.folder for each in members)
    found = "none is named" if member is None else f"{member!r} is none of them"
    raise ConfigError(f"{folder.path} holds a family of the models {known}, but {found}. Write --member {members[0].folder}.")


def _trained(folder: RunFolder, table: Mapping[str, Any], schema: Schema, file: Path, *, trust: bool) -> nn.Module:
    """The trained model of a run; its code is that of the configuration, or `Tabular` for a result saved from Python."""
    stored = read_tensor_file(file).tensors
    if PYTHON in table:
        own = f"{Tabular.__module__}:{Tabular.__qualname__}"
        made = table[PYTHON].get("model_class") if isinstance(table[PYTHON], Mapping) else None
        if made != own:
            fix = "In Python: load the file into your model, and call schema.predict(model, frame)."
            raise ConfigError(f"The run in {folder.path} was saved from Python, with the model {made} of your own. {fix}")
        # What each layer has to be follows from the parameters; dropout, which has none, only moves their numbers.
        places = sorted(int(name.split(".")[1]) for name in stored if name.startswith("layers.") and name.endswith(".weight"))
        hidden = [len(stored[f"layers.{place}.weight"]) for place in places[:-1]]
        model: nn.Module = Tabular(schema, hidden=hidden, dropout=0.5 if places[1:2] == [3] else 0.0)
    else:
        config = RunConfig.read(folder.config, code="resume", trust=trust)
        takes = {parameter.name for parameter in config.model.part.all_parameters if parameter.required}
        model = config.model.make("model", **({"schema": schema} if "schema" in takes else {}))
    try:
        model.load_state_dict(stored)
    except RuntimeError as failure:
        raise ConfigError(f"{file} does not fit the model of {folder.config}: {failure}") from failure
    return model
