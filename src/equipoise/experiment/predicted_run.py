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
from equipoise.experiment.catalog import own_signature
from equipoise.experiment.config import PYTHON, RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, MEMBERS, read_manifest
from equipoise.experiment.own_code import OwnCode, own_failures
from equipoise.experiment.run_files import RunFolder
from equipoise.models.table_network import Tabular


def predict_rows(
    path: Path, rows: Path, *, reading: Mapping[str, Any] | None = None, member: str | None = None, keep: Sequence[str] = (),
    trust: bool = False, model: str | None = None,
) -> Any:  # fmt: skip
    """What the model of the run in a folder says about each row of a CSV or Parquet file: an Arrow table as `Schema.predict`.

    A CSV file is read as the run's own was, but for the options `reading`. `member` names a model of a family: a value of its
    knob, or its name. Columns `keep` of the file come first, those of a CSV file as they are written there.

    `model`, "module:name", names code of the user's own that makes the untrained model; it is looked for in the folder in use
    and on sys.path, and runs because the user names it. It may take `schema`, `features` and `classes` by these names.
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
    trained = _trained(folder, table, schema, _model_file(folder, member), trust=trust, import_path=model)
    options = _options(table, schema, reading or {})
    found = read_rows(rows, schema, options)
    answer = schema.predict(trained, found, str(rows))
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


def _trained(
    folder: RunFolder, table: Mapping[str, Any], schema: Schema, file: Path, *, trust: bool, import_path: str | None
) -> nn.Module:
    """The trained model of a run: `import_path` makes it, or the configuration, or `Tabular` for a result saved from Python."""
    stored = read_tensor_file(file).tensors
    if import_path is not None:
        made, model = f"--model {import_path}", _made_by(import_path, schema)
    elif PYTHON in table:
        made, model = str(folder.config), _table_network(folder, table, schema, stored)
    else:
        made, config = str(folder.config), RunConfig.read(folder.config, code="resume", trust=trust)
        takes = {parameter.name for parameter in config.model.part.all_parameters if parameter.required}
        model = config.model.make("model", **({"schema": schema} if "schema" in takes else {}))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{made} must make a torch.nn.Module, but made a {type(model).__name__}.")
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    there = {name: tuple(value.shape) for name, value in stored.items()}
    wrong = [f"{name} of shape {shape} is in the file alone" for name, shape in there.items() if name not in wanted]
    wrong += [f"{name} of shape {shape} is in the model alone" for name, shape in wanted.items() if name not in there]
    both = [name for name in wanted if name in there and wanted[name] != there[name]]
    wrong += [f"{name} has the shape {there[name]} in the file, but {wanted[name]} in the model" for name in both]
    if wrong:
        raise ConfigError(f"{file} does not fit the model of {made}: {shown_names(wrong)}. Make the model as it was trained.")
    model.load_state_dict(stored)
    return model


def _made_by(import_path: str, schema: Schema) -> Any:
    """What a class or function of the user's own makes; it may take `schema`, `features` and `classes` by these names."""
    part = OwnCode(Path.cwd()).part("model", import_path, "--model")
    sizes = {"schema": schema, "features": len(schema.feature_names), "classes": len(schema.target.classes)}
    parameters = own_signature(part.target)
    given = {each.name: sizes[each.name] for each in parameters if each.name in sizes}
    if asked := [each.name for each in parameters if each.default is each.empty and each.name not in given]:
        fix = "Name a function of yours that makes the model as it was trained, e.g. def make(schema): return Net(…)."
        raise ConfigError(f"--model {import_path}: it needs {', '.join(asked)}, which nobody gives. {fix}")
    with own_failures("--model", import_path, list(part.files.values())):
        return part.target(**given)


def _table_network(folder: RunFolder, table: Mapping[str, Any], schema: Schema, stored: Mapping[str, Any]) -> nn.Module:
    """The untrained `Tabular` of a result saved from Python; another model is refused."""
    own = f"{Tabular.__module__}:{Tabular.__qualname__}"
    made = table[PYTHON].get("model_class") if isinstance(table[PYTHON], Mapping) else None
    if made != own:
        module, _, name = str(made).partition(":")
        can_be_named = name.isidentifier() and module.partition(".")[0] not in ("__main__", "torch")
        ways = f"--model {made}, or " if can_be_named else ""
        fix = f"Write {ways}--model my_model:make, for a function make in a file my_model.py that makes the untrained model."
        raise ConfigError(f"The run in {folder.path} was saved from Python, with the model {made} of your own. {fix}")
    # What each layer has to be follows from the parameters; dropout, which has none, only moves their numbers.
    places = sorted(int(name.split(".")[1]) for name in stored if name.startswith("layers.") and name.endswith(".weight"))
    hidden = [len(stored[f"layers.{place}.weight"]) for place in places[:-1]]
    return Tabular(schema, hidden=hidden, dropout=0.5 if places[1:2] == [3] else 0.0)
