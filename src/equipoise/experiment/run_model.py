"""The trained model of a finished run, made anew and filled with the parameters that the run's folder holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from equipoise.core.tensor_files import read_tensor_file
from equipoise.data.tables import Schema, shown_names
from equipoise.errors import ConfigError
from equipoise.experiment.catalog import own_signature
from equipoise.experiment.config import PYTHON, RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, MEMBERS, read_manifest
from equipoise.experiment.own_code import OwnCode, own_failures
from equipoise.experiment.recorded import FEDERATION
from equipoise.experiment.run_files import RunFolder
from equipoise.models.table_network import Tabular

TABULAR = f"{Tabular.__module__}:{Tabular.__qualname__}"


def model_file(folder: RunFolder, member: str | None) -> Path:
    """The file with the parameters: that of the run, or of a member of a family."""
    if not (folder.path / MANIFEST).exists():
        if member is not None:
            raise ConfigError(f"{folder.path} is no family, so that there is no model {member!r} to choose. Leave it out.")
        if not folder.model.exists():
            again = "equipoise flower run" if FEDERATION in read_toml(folder.config) else "equipoise run --resume"
            raise ConfigError(f"{folder.model} does not exist: the run has not ended. {again} goes on.")
        return folder.model
    members = read_manifest(folder.path).members
    for each in members:
        if member in (each.folder, each.name, repr(each.value), f"{each.value:g}"):
            return folder.path / MEMBERS / each.folder / folder.model.name
    known = ", ".join(each.folder for each in members)
    found = "none is named" if member is None else f"{member!r} is none of them"
    raise ConfigError(f"{folder.path} holds a family of the models {known}, but {found}. Write --member {members[0].folder}.")


def trained_model(
    folder: RunFolder, table: Mapping[str, Any], schema: Schema, file: Path, *, trust: bool, model: str | None
) -> nn.Module:
    """The trained model of a run: the code that `model` names makes it, or the configuration, or `Tabular` if Python saved it.

    `table` is the content of the run's config.toml.
    """
    stored = read_tensor_file(file).tensors
    if model is not None:
        return _filled(_made_by(model, schema), stored, file, f"--model {model}")
    if FEDERATION in table and table[FEDERATION].get("model") != TABULAR:
        fix = "Name the function that makes the untrained model, as task.py of the app has it: --model my_federation.task:net"
        raise ConfigError(f"The run in {folder.path} is of a federation, whose model is the app's own. {fix}")
    if PYTHON in table or FEDERATION in table:
        made = str(folder.config) if folder.config.is_file() else f"models.Tabular (without --model and {folder.config.name})"
        return _filled(_table_network(folder, table, schema, stored), stored, file, made)
    config = RunConfig.read(folder.config, code="resume", trust=trust)
    takes = {parameter.name for parameter in config.model.part.all_parameters if parameter.required}
    made = config.model.make("model", **({"schema": schema} if "schema" in takes else {}))
    return _filled(made, stored, file, str(folder.config))


def filled_copy(model: nn.Module, file: Path) -> nn.Module:
    """A copy of an untrained model with the parameters of a file; names and shapes that differ are refused."""
    return _filled(copy.deepcopy(model), read_tensor_file(file).tensors, file, "the parameter `model`")


def _filled(model: Any, stored: Mapping[str, Tensor], file: Path, made: str) -> nn.Module:
    """A model with the stored parameters of a file; `made` says who made it, for a refusal."""
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
    with own_failures("--model", import_path):
        return part.target(**given)


def _table_network(folder: RunFolder, table: Mapping[str, Any], schema: Schema, stored: Mapping[str, Any]) -> nn.Module:
    """The untrained `Tabular` of a result saved from Python; another model is refused."""
    if is_own_of_python(table):
        made = _class_of_python(table)
        module, _, name = str(made).partition(":")
        can_be_named = name.isidentifier() and module.partition(".")[0] not in ("__main__", "torch")
        ways = f"--model {made}, or " if can_be_named else ""
        fix = f"Write {ways}--model my_model:make, for a function make in a file my_model.py that makes the untrained model."
        raise ConfigError(f"The run in {folder.path} was saved from Python, with the model {made} of your own. {fix}")
    # What each layer has to be follows from the parameters; dropout, which has none, only moves their numbers.
    places = sorted(int(name.split(".")[1]) for name in stored if name.startswith("layers.") and name.endswith(".weight"))
    hidden = [len(stored[f"layers.{place}.weight"]) for place in places[:-1]]
    return Tabular(schema, hidden=hidden, dropout=0.5 if places[1:2] == [3] else 0.0)


def is_own_of_python(table: Mapping[str, Any]) -> bool:
    """Whether a config.toml records a result that was saved from Python with another model than `Tabular`."""
    return PYTHON in table and _class_of_python(table) != TABULAR


def _class_of_python(table: Mapping[str, Any]) -> Any:
    """The class of the model of a result that was saved from Python."""
    return table[PYTHON].get("model_class") if isinstance(table[PYTHON], Mapping) else None
