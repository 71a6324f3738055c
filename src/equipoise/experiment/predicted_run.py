"""Applies the model of a finished run to the rows of a new file, by the schema that the run has left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.core.tensor_files import read_tensor_file
from equipoise.data.schema import Schema
from equipoise.data.table_files import parquet_files, read_csv
from equipoise.errors import ConfigError, unknown_name
from equipoise.experiment.config import PYTHON, RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, MEMBERS, read_manifest
from equipoise.experiment.run_files import RunFolder
from equipoise.models.table_network import Tabular

_READING: dict[str, Any] = {
    "delimiter": ",", "decimal": ".", "encoding": "utf-8", "missing": (), "thousands": "", "date_format": "",
}  # fmt: skip


def predict_rows(
    path: Path, rows: Path, *, reading: Mapping[str, Any] | None = None, member: str | None = None, trust: bool = False
) -> Any:
    """What the model of the run in a folder says about each row of a CSV or Parquet file: an Arrow table as `Schema.predict`.

    A CSV file is read as the run's own was, but for the options `reading`. `member` names a model of a family: a value of its
    knob, or its name.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"{path} is no folder of a run: it has no {folder.config.name}. Name a folder of equipoise run.")
    if not folder.schema.is_file():
        raise ConfigError(
            f"The data of the run in {path} are no table, so that it has no {folder.schema.name} to read rows by."
        )
    schema, table = Schema.load(folder.schema), read_toml(folder.config)
    model = _trained(folder, table, schema, _model_file(folder, member), trust=trust)
    return schema.predict(model, read_rows(rows, schema, _options(table, reading or {})), str(rows))


def read_rows(path: Path, schema: Schema, reading: Mapping[str, Any]) -> Any:
    """The rows of a CSV or Parquet file as an Arrow table; columns that were text in training are text, as 007 is no 7."""
    if path.suffix == ".parquet":
        return parquet_files(path, "").read()
    return read_csv(path, client="", **reading, text=[rule.name for rule in schema.columns if _is_text(rule.categories)])


def _is_text(categories: tuple[str, ...]) -> bool:
    """Whether categories are text that a reader could take for something else: some are neither numbers nor booleans."""

    def is_read_back(name: str) -> bool:
        try:
            return name in ("True", "False") or repr(float(name)).removesuffix(".0") == name
        except ValueError:
            return False

    return not all(map(is_read_back, categories))


def _options(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """How to read a CSV file: as the configuration of the run says, but for what is given."""
    for name in given:
        if name not in _READING:
            raise ConfigError(unknown_name("option", name, _READING))
    data = table.get("data")
    own = {name: data[name] for name in _READING if name in data} if isinstance(data, Mapping) else {}
    return {**_READING, **own, **given}


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
