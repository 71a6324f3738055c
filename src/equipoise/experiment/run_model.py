"""Models of a finished run: the trained one, made anew and filled from the folder; those of clients; and their export."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.client_table import ClientTable
from equipoise.core.files import locked
from equipoise.core.plain_text import parse_json
from equipoise.core.signature import Signature
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.core.tensor_files import read_tensor_file
from equipoise.data.tables import Schema, predicted_table, shown_names
from equipoise.errors import ConfigError, FileGuard, InvalidParameter, require
from equipoise.experiment.build import build
from equipoise.experiment.catalog import own_signature
from equipoise.experiment.config import PYTHON, RunConfig
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.family_files import MANIFEST, MEMBERS, SINGLE_MANIFEST, read_manifest, write_single
from equipoise.experiment.folder import read_record, resume_command
from equipoise.experiment.own_code import OwnCode, own_failures
from equipoise.experiment.recorded import FEDERATION
from equipoise.experiment.run_files import RunFolder, refuse_damaged_files
from equipoise.models.table_network import Tabular
from equipoise.report.notices import own_worse_notices, said
from equipoise.result import Result
from equipoise.run_record import RunRecord

TABULAR = f"{Tabular.__module__}:{Tabular.__qualname__}"


def model_file(folder: RunFolder, member: str | None) -> Path:
    """The file with the parameters: that of the run, or of a member of a family."""
    if not (folder.path / MANIFEST).exists():
        if member is not None:
            raise ConfigError(f"{folder.path} is no family, so that there is no model {member!r} to choose. Leave it out.")
        if not folder.model.exists():
            how = resume_command(folder.path)
            raise ConfigError(f"{folder.model} does not exist: the run has not ended. Go on with it: {how}")
        return folder.model
    members = read_manifest(folder.path).members
    for each in members:
        if member in (each.folder, each.name, repr(each.value), f"{each.value:g}"):
            return folder.path / MEMBERS / each.folder / folder.model.name
    known = ", ".join(each.folder for each in members)
    raise ConfigError(f"{folder.path} holds a family of {known}, but member is {member!r}. Write --member {members[0].folder}.")


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
        return _filled(_table_network(folder, table, schema, stored), stored, file, "models.Tabular")
    config = RunConfig.read(folder.config, code="resume", trust=trust)
    takes = {parameter.name for parameter in config.model.part.all_parameters if parameter.required}
    made = config.model.make("model", **({"schema": schema} if "schema" in takes else {}))
    return _filled(made, stored, file, str(folder.config))


def _filled(model: Any, stored: Mapping[str, Tensor], file: Path, made: str) -> nn.Module:
    """A model with the stored parameters of a file; `made` says who made it, for a refusal."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{made} must make a torch.nn.Module, but made a {type(model).__name__}.")
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    there = {name: tuple(value.shape) for name, value in stored.items()}
    names = [name for name in wanted | there if wanted.get(name) != there.get(name)]
    if names:
        shapes = shown_names([f"{name}: {there.get(name)} in the file, {wanted.get(name)} in the model" for name in names])
        raise ConfigError(f"{file} does not fit the model of {made}: {shapes}. Make the model as it was trained.")
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
    if (made := own_of_python(table)) is not None:
        fix = "Write --model my_model:make, for a function make in a file my_model.py that makes the untrained model."
        raise ConfigError(f"The run in {folder.path} was saved from Python, with the model {made} of your own. {fix}")
    # What each layer has to be follows from the parameters; dropout, which has none, only moves their numbers.
    places = sorted(int(name.split(".")[1]) for name in stored if name.startswith("layers.") and name.endswith(".weight"))
    hidden = [len(stored[f"layers.{place}.weight"]) for place in places[:-1]]
    return Tabular(schema, hidden=hidden, dropout=0.5 if places[1:2] == [3] else 0.0)


def own_of_python(table: Mapping[str, Any]) -> str | None:
    """The class of the model of a result that was saved from Python, by a config.toml; None for `Tabular`, and other runs."""
    if PYTHON not in table:
        return None
    made = table[PYTHON].get("model_class") if isinstance(table[PYTHON], Mapping) else None
    return None if made == TABULAR else str(made)


# ------------------------------------------------------------------------------------------------------- clients' own models


class SavedPersonalModels:
    """The clients' own models of a finished run, by client; `read_personal_models` reads them from the run's folder."""

    def __init__(
        self, ids: tuple[str, ...], rows: Any, shared: nn.Module, schema: Schema | None = None, worse: str = ""
    ) -> None:
        self._ids, self._rows, self._shared, self._task = ids, rows, shared, Task.of(shared)
        self._schema, self._worse = schema, worse
        self._places = {client: place for place, client in enumerate(ids)}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the clients that have a model of their own, in order."""
        return self._ids

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def worse(self) -> str:
        """A sentence on the clients for which the run found their own models worse than the shared one; empty for none."""
        return self._worse

    def predict(self, frame: Any, *, client: str | None = None) -> Any:
        """What models say about each row of a table: its client's own model, or the shared one if the client has none.

        The columns are those of `Schema.predict`. A last column, "predicted by", says "own model" or "shared model". `frame`
        is a table, or the path of a CSV or Parquet file. `client` names the column that says whose a row is, None that of
        training. The run's data must be a table.
        """
        return predicted_table(frame, self.model, self, self._shared, self._schema, client)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __repr__(self) -> str:
        return f"SavedPersonalModels(clients: {len(self)})"

    def model(self, client: str) -> nn.Module:
        """The model of one client, in evaluation mode; a client that took no part in training has none."""
        if client not in self:
            fix = f"Known are {shown_names(self._ids)}. Other clients are served the shared model, model.safetensors."
            raise InvalidParameter("client", "must be the id of a client with a model of its own", client, fix)
        own = copy.deepcopy(self._shared).eval()
        params, carried = self._task.split(torch.from_numpy(self._rows[self._places[client]].copy()))
        self._task.layout.write(own, params)
        self._task.carried.write(own, carried)
        return own


def read_personal_models(folder: str | Path, model: nn.Module | None = None) -> SavedPersonalModels:
    """The clients' own models of a finished run, read from the folder that `result.save` or `equipoise run` wrote.

    The folder holds numbers and no code. A `models.Tabular` is made from the run's schema. For another model give `model`,
    made in the same way as for training. A folder that lacks own models, is damaged or does not fit the model is refused.

    `folder` is the folder of the run.

    >>> import tempfile, equipoise as eq
    >>> data = eq.data.digits(clients=5, split_by="examples", test=0.2)
    >>> net, ditto = eq.models.Softmax(data.features, data.classes), eq.Algorithm(personal=eq.personal.Ditto())
    >>> result = eq.train(net, data, ditto, rounds=2, clients_per_round=3)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     own = eq.read_personal_models(result.save(f"{place}/run"), net)
    >>> read, made = (models.model(own.ids[0]).state_dict() for models in (own, result.personal))
    >>> all(value.equal(made[name]) for name, value in read.items())
    True
    """
    run = RunFolder(Path(folder))
    if not run.config.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {run.config.name}.")
    if not run.personal.is_file():
        why = f"{folder} holds no own models of clients: it has no {run.personal.name}."
        raise ConfigError(f"{why} {without_stored_models(run) or 'The run had no personal=….'}")
    require(model is None or isinstance(model, nn.Module), "model", "must be a torch.nn.Module, or None", type(model).__name__)
    table, file = read_toml(run.config), model_file(run, None)
    if model is None and (not run.schema.is_file() or own_of_python(table) is not None):
        fix = "Make it as for training; it is filled with the parameters of the folder."
        raise InvalidParameter("model", "must be given for this run, whose folder holds no code", None, fix)
    if model is not None:
        return own_models_of(run, _filled(copy.deepcopy(model), read_tensor_file(file).tensors, file, "the parameter `model`"))
    return own_models_of(run, trained_model(run, table, Schema.load(run.schema), file, trust=False, model=None))


def without_stored_models(run: RunFolder) -> str:
    """What is said of a run without stored own models whose clients were judged by own models; empty if they were not."""
    if not run.clients.is_file() or not ClientTable.from_parquet(run.clients).has_own:
        return ""
    return "Its clients were judged by models that each makes after training; with personal=Finetuning(…) the folder has them."


def own_models_of(run: RunFolder, shared: nn.Module) -> SavedPersonalModels:
    """The own models of a run's clients, for which `shared`, the trained shared model, is the pattern."""
    stored = {run.personal.name, run.personal_ids.name, run.clients.name}
    checksums = run.last_event().get("sha256", {})
    refuse_damaged_files(run, {name: checksum for name, checksum in checksums.items() if name in stored})
    with FileGuard(run.personal, ConfigError, cure="Run it anew."):
        rows = np.lib.format.open_memmap(run.personal, mode="r")  # objects, which would be pickles, are refused
    clients, ids, width = ClientTable.from_parquet(run.clients), _ids(run), Task.of(shared).width
    if rows.dtype.kind != "f" or rows.shape != (len(ids), width):
        named = (run.personal_ids if run.personal_ids.is_file() else run.clients).name
        raise ConfigError(
            f"{run.personal} holds {rows.dtype} of shape {rows.shape}, but must hold floating numbers of shape "
            f"{(len(ids), width)}: clients of {named} × parameters. Make the model as it was trained, or run it anew."
        )
    judged = next(split for split in ("test", "validation", "train") if split in clients.split)
    schema = Schema.load(run.schema) if run.schema.is_file() else None
    return SavedPersonalModels(ids, rows, shared, schema, said(own_worse_notices("run", [clients], judged)))


def _ids(run: RunFolder) -> tuple[str, ...]:
    """The ids of the clients that have a row in personal.npy: all training clients, also those that were not evaluated."""
    if not run.personal_ids.is_file():
        return ClientTable.from_parquet(run.clients).where("train").client
    with FileGuard(run.personal_ids, ConfigError, cure="Run it anew."):
        ids = parse_json(run.personal_ids)
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids) or len(set(ids)) < len(ids):
            raise ValueError("it must be a list of different ids")
    return tuple(ids)


# -------------------------------------------------------------------------------------------------------------- for export


def export_run(path: Path, *, trust: bool = False) -> list[Path]:
    """Write model.onnx, score.onnx, the card and model.json into the folder of a finished run; returns what is there now.

    The data are read again, for the shapes and types of the model's inputs, and the model is made as config.toml says. A
    federated run has written its own when it ended: nobody has its data here.
    """
    folder = RunFolder(path)
    if (path / MANIFEST).exists():
        raise ConfigError(f"{path} holds a family, which wrote its models when it ended: they are in {path / 'members'}.")
    record = read_record(path)
    if FEDERATION not in read_toml(folder.config):
        _write_export(folder, record, trust=trust)
    (member,) = read_manifest(path, SINGLE_MANIFEST).members
    if member.no_onnx is not None:
        raise ConfigError(f"{path} has its card, but no ONNX: {member.no_onnx}")
    return [path / name for name in (*member.files, SINGLE_MANIFEST)]


def _write_export(folder: RunFolder, record: RunRecord, *, trust: bool) -> None:
    config = RunConfig.read(folder.config, code="resume", trust=trust)
    prepared, file = build(config), model_file(folder, None)
    _filled(prepared.model, read_tensor_file(file).tensors, file, str(folder.config))
    task = try_task(Task.of(prepared.model, config.loss(), config.error()), prepared.data)
    fields = {name: value for name, value in vars(record).items() if name in RunRecord.__dataclass_fields__}
    result = Result(
        **{**fields, "algorithm": prepared.algorithm}, model=prepared.model,
        params=torch.cat([parameter.detach().flatten() for parameter in prepared.model.parameters()]),
        schema=prepared.data.schema, signature=Signature.of(prepared.data, task.layout.dtype), task=task,
    )  # fmt: skip
    with locked(folder.lock, wait=False):
        write_single(result, folder)
        folder.lock.unlink(missing_ok=True)
