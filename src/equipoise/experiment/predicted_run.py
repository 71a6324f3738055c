"""Applies the models of a finished run to the rows of a new file, by the schema that the run has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.data.tables import (
    CSV_DEFAULTS,
    Schema,
    TableColumn,
    predict_by_client,
    predicted_columns,
    read_columns,
    read_rows,
    shown_names,
)
from equipoise.errors import ConfigError, unknown_name
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.recorded import FEDERATION
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.run_model import TABULAR, model_file, own_models_of, trained_model, without_stored_models


@dataclass(frozen=True)
class PredictedRows:
    """What models say about each row, as an Arrow table, and in one line whose models these are."""

    table: Any  # columns of the file that are kept, then those of `Schema.predict`
    said: str = ""  # empty if the run has no own models of clients


def predict_rows(
    path: Path, rows: Path, *, reading: Mapping[str, Any] | None = None, member: str | None = None, keep: Sequence[str] = (),
    trust: bool = False, model: str | None = None, shared: bool = False, client: str | None = None,
    schema_file: Path | None = None,
) -> PredictedRows:  # fmt: skip
    """What the models of the run in a folder say about each row of a CSV or Parquet file: columns as of `Schema.predict`.

    A row whose client has a model of its own in the run is predicted by it, unless `shared`, and any other row by the shared
    model. `client` names the column of the file that says whose a row is, where it is not that of training.

    A CSV file is read as the run's own was, but for the options `reading`. `member` names a model of a family: a value of its
    knob, or its name. Columns `keep` of the file come first, those of a CSV file as they are written there.

    `model`, "module:name", names code of the user's own that makes the untrained model; it is looked for in the folder in use
    and on sys.path, and runs because the user names it. It may take `schema`, `features` and `classes` by these names.
    `schema_file` is the schema of a run whose folder has none, such as that of a federation: its app has it.
    Without config.toml a folder with model.safetensors and schema.json will do: whoever was handed a model has no more.
    """
    folder = RunFolder(path)
    if not path.exists():
        raise ConfigError(f"The folder {path} does not exist. Name a folder of equipoise run.")
    handed_over = folder.model.is_file() and (schema_file is not None or folder.schema.is_file())
    if not folder.config.is_file() and not handed_over:
        runs = sorted(str(each.parent) for each in path.glob(f"*/{folder.config.name}"))
        fix = f"It holds the runs {shown_names(runs)}: name one of them." if runs else "Name a folder of equipoise run."
        raise ConfigError(f"{path} is no folder of a run: it has no {folder.config.name}. {fix}")
    table = read_toml(folder.config) if folder.config.is_file() else {FEDERATION: {"model": TABULAR}}
    if schema_file is None and not folder.schema.is_file():
        lacking = f"it has no {folder.schema.name} to read rows by"
        if FEDERATION in table:
            fix = "If the app has one, name it, e.g. --schema my_federation/schema.json."
            raise ConfigError(f"The run in {path} is of a federation, whose data are with its sites: {lacking}. {fix}")
        raise ConfigError(f"The data of the run in {path} are no table, so that {lacking}.")
    schema = Schema.load(schema_file or folder.schema)
    trained = trained_model(folder, table, schema, model_file(folder, member), trust=trust, model=model)
    options, named = _options(table, schema, reading or {}), client or _client_column(table, schema)
    found = read_rows(rows, schema, options, named)
    if client is not None and client not in found.column_names:
        raise ConfigError(f"--client {client}: {rows} has no such column. {unknown_name('column', client, found.column_names)}")
    own = own_models_of(folder, trained) if folder.personal.is_file() and not shared else None
    if own is not None and not named:
        fix = "Write --client COLUMN, or --shared to use the shared model for all rows."
        raise ConfigError(f"The run in {path} has clients' own models, but does not say which column names the client. {fix}")
    inputs = schema.transform(found, str(rows))
    if own is not None and named in found.column_names and found.num_rows:
        by_client = predict_by_client(own.model, own, trained, inputs, schema, TableColumn.of(found, named, str(rows)))
        answer, done, others = by_client.columns, int(by_client.by_own.sum()), by_client.others
        unknown = (
            f"clients without an own model: {shown_names(others) or 'none'}; rows without a client: {by_client.without_client}"
        )
        said = f"Rows by the clients' own models: {done} (clients: {len(by_client.served)}); by the shared model: "
        said += f"{found.num_rows - done} ({unknown}). {own.worse}".rstrip()
    else:
        answer = predicted_columns(trained, inputs, schema.target)
        why = f"--shared, or no column {named!r} in {rows}" if folder.personal.is_file() else without_stored_models(folder)
        said = f"All rows by the shared model: {why}" if why else ""
    return PredictedRows(_joined(_kept_columns(rows, options, keep, found.column_names), answer, trained), said)


def _client_column(table: Mapping[str, Any], schema: Schema) -> str:
    """The column that names the client of a row, as the configuration of the run or its schema says; empty if neither does."""
    data = table.get("data")
    named = data.get("client") if isinstance(data, Mapping) else None
    return named if isinstance(named, str) else schema.client


def _kept_columns(rows: Path, reading: Mapping[str, Any], keep: Sequence[str], present: Sequence[str]) -> dict[str, Any]:
    """The columns of the file that the output is to have, too, by name; those that the file lacks are refused."""
    for name in keep:
        if name not in present:
            raise ConfigError(f"--keep {name}: {rows} has no such column. " + unknown_name("column", name, present))
    kept = read_columns(rows, reading, list(dict.fromkeys(keep)))
    return {name: kept.column(name) for name in kept.column_names}


def _joined(kept: dict[str, Any], answer: Mapping[str, Any], model: nn.Module) -> Any:
    """Kept columns and the model's answer as an Arrow table; a column of the answer that one is called like is "predicted …".

    Numbers are of the model's own type, so that files show no digits that it does not have.
    """
    import pyarrow as pa

    kinds = {value.dtype for value in model.parameters()}
    kind = np.float64 if torch.float64 in kinds else np.float32
    names = {name: f"predicted {name}" if name in kept else name for name in answer}
    for name in names.values():
        if name in kept or list(names.values()).count(name) > 1:
            raise ConfigError(f"--keep {name}: the output has a column {name!r} of its own. Rename the column in the file.")
    return pa.table(kept | {names[name]: pa.array(values.astype(kind)) for name, values in answer.items()})


def _options(table: Mapping[str, Any], schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """How to read a CSV file: as the configuration of the run or its schema says, but for what is given."""
    for name, value in given.items():
        if name not in CSV_DEFAULTS:
            raise ConfigError(f"--set {name}={value}: " + unknown_name("option", name, CSV_DEFAULTS))
    data = table.get("data")
    own = {name: data[name] for name in CSV_DEFAULTS if name in data} if isinstance(data, Mapping) else {}
    return {**dict(schema.reading), **own, **given}
