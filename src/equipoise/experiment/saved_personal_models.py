"""The clients' own models of a finished run, read from its folder: a row of numbers for each client, and never pickled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.client_table import ClientTable
from equipoise.core.plain_text import parse_json
from equipoise.core.task import Task
from equipoise.core.words import counted
from equipoise.data.client_predictions import predicted_table
from equipoise.data.schema import Schema
from equipoise.errors import ConfigError, FileGuard, InvalidParameter, require
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.run_files import RunFolder, refuse_damaged_files
from equipoise.experiment.run_model import filled_copy, is_own_of_python, model_file, trained_model
from equipoise.report.notices import own_worse_notices, said


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
        return f"SavedPersonalModels({counted(len(self), 'client')})"

    def model(self, client: str) -> nn.Module:
        """The model of one client, in evaluation mode; a client that took no part in training has none."""
        if client not in self:
            known = f"{', '.join(self._ids[:5])}{', …' * (len(self) > 5)}"
            fix = f"Known are {known}. Other clients are served the shared model, which is in model.safetensors."
            raise InvalidParameter("client", f"must be the id of one of {counted(len(self), 'client')}", client, fix)
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
    if model is None and (not run.schema.is_file() or is_own_of_python(table)):
        fix = "Make it as for training; it is filled with the parameters of the folder."
        raise InvalidParameter("model", "must be given for this run, whose folder holds no code", None, fix)
    if model is not None:
        return own_models_of(run, filled_copy(model, file))
    return own_models_of(run, trained_model(run, table, Schema.load(run.schema), file, trust=False, model=None))


def without_stored_models(run: RunFolder) -> str:
    """What is said of a run without stored own models whose clients were judged by own models; empty if they were not."""
    if not run.clients.is_file() or not ClientTable.from_parquet(run.clients).has_own:
        return ""
    return (
        "The clients of this run were judged by models that each makes by steps on its own data after training. The folder "
        "does not hold them; with personal=Finetuning(…) it does."
    )


def own_models_of(run: RunFolder, shared: nn.Module) -> SavedPersonalModels:
    """The own models of a run's clients, for which `shared`, the trained shared model, is the pattern."""
    stored = {run.personal.name, run.personal_ids.name, run.clients.name}
    checksums = run.last_event().get("sha256", {})
    refuse_damaged_files(run, {name: checksum for name, checksum in checksums.items() if name in stored})
    with FileGuard(run.personal, ConfigError, cure="Run it anew."):
        rows = np.lib.format.open_memmap(run.personal, mode="r")  # objects, which would be pickles, are refused
    clients, ids = ClientTable.from_parquet(run.clients), _ids(run)
    width = Task.of(shared).width
    if rows.ndim != 2 or rows.dtype.kind != "f" or rows.shape[1] != width:
        raise ConfigError(
            f"{run.personal} holds {rows.dtype} of shape {rows.shape}, but must hold {width} floating numbers for each client, "
            "as the model has. Make the model as it was trained."
        )
    if len(rows) != len(ids):
        raise ConfigError(
            f"{run.personal} holds own models of {counted(len(rows), 'client')}, but {len(ids)} clients are named in the "
            f"folder. With evaluate_clients, {run.personal_ids.name} names them. Run it anew."
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
