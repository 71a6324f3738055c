"""What a trained model says about rows of a table: probabilities of classes, or numbers in the target's unit.

If clients have models of their own, each row is predicted by its client's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise.core.trees import select
from equipoise.data.tables.arrow import arrow_table, table_like
from equipoise.data.tables.column import TableColumn
from equipoise.data.tables.rules import predicted_columns
from equipoise.data.tables.schema import Schema, read_rows
from equipoise.errors import InvalidParameter, unknown_name

PREDICTED_BY = "predicted by"  # the column that says which model predicted a row
OWN, SHARED = "own model", "shared model"


@dataclass(frozen=True, eq=False)
class ClientPredictions:
    """The columns of predictions (N,), which rows (N,) are of clients' own models, and the clients of the others."""

    columns: dict[str, Any]
    by_own: NDArray[np.bool_]
    served: tuple[str, ...]  # clients with an own model that have rows
    others: tuple[str, ...]  # clients without one
    without_client: int  # rows that name no client


def predict_by_client(
    model_of: Callable[[str], nn.Module], known: Container[str], shared: nn.Module, inputs: Any, schema: Schema,
    column: TableColumn,
) -> ClientPredictions:  # fmt: skip
    """The predictions of each row: by the model of its client if that is `known`, and else by the shared model.

    `column` names the client of each row.
    """
    codes, names = column.names()
    order = np.argsort(codes, kind="stable")
    pieces = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    groups = {names[codes[rows[0]]]: rows for rows in pieces if len(rows) and codes[rows[0]] >= 0}
    served = {client: rows for client, rows in groups.items() if client in known}
    by_own = np.zeros(len(codes), dtype=bool)
    for rows in served.values():
        by_own[rows] = True
    answer: dict[str, Any] = {}

    def predict(model: nn.Module, rows: NDArray[np.int64]) -> None:
        found = predicted_columns(model, select(inputs, torch.from_numpy(rows)), schema.target)
        for name, values in found.items():
            answer.setdefault(name, np.full(len(codes), np.nan))[rows] = values

    if not by_own.all() or not len(codes):
        predict(shared, np.flatnonzero(~by_own))
    for client, rows in served.items():
        predict(model_of(client), rows)
    others = tuple(client for client in groups if client not in served)
    return ClientPredictions(answer, by_own, tuple(served), others, int((codes < 0).sum()))


def predicted_table(
    frame: Any, model_of: Callable[[str], nn.Module], known: Container[str], shared: nn.Module, schema: Schema | None,
    client: str | None,
) -> Any:  # fmt: skip
    """A table of what models say about each row, with the column `PREDICTED_BY`; the other columns are of `Schema.predict`.

    `frame` is a table, or the path of a CSV or Parquet file. `client` names the column of the client, None that of training.
    """
    if schema is None:
        fix = "Its data were no table. Take the model of each client: own.model(client)."
        raise InvalidParameter("schema", "must be that of a table", None, fix)
    named = client or schema.client
    if not named:
        fix = 'E.g. client="hospital"; the schema of the run does not say it.'
        raise InvalidParameter("client", "must name the column that says whose a row is", client, fix)
    source = "table"
    if isinstance(frame, str | os.PathLike):
        source = str(frame)
        frame = read_rows(frame, schema, dict(schema.reading), named)
    table = arrow_table(frame, source)
    if named not in table.column_names:
        fix = f"{unknown_name('column', named, table.column_names)} For the shared model alone: schema.predict(model, table)."
        raise InvalidParameter("client", "must name a column of the table", named, fix)
    inputs = schema.transform(table, source)
    found = predict_by_client(model_of, known, shared, inputs, schema, TableColumn.of(table, named, source))
    return table_like(frame, found.columns | {PREDICTED_BY: np.where(found.by_own, OWN, SHARED)})
