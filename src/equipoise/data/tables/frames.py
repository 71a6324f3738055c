"""Your own tables: a pandas, Polars or Arrow table, a CSV file or Parquet files, with a column that says whose each row is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core.files import PathLike
from equipoise.core.trees import select
from equipoise.data.clients import splits
from equipoise.data.clients.arrays import client_of_rows, rows_by_client
from equipoise.data.clients.client_set import ClientSet, large_enough
from equipoise.data.clients.federated_data import FederatedData, TablePlaces
from equipoise.data.clients.leaves import offsets_of
from equipoise.data.clients.splits import How, tell_of_untested
from equipoise.data.tables.arrow import arrow_table, check_names, require_column_name
from equipoise.data.tables.checks import (
    refuse_missing,
    tell_of_client_name,
    tell_of_copies,
    tell_of_rare_classes,
    tell_of_unseen,
)
from equipoise.data.tables.column import Kind, TableColumn, kept_rows, rows_before
from equipoise.data.tables.read import parquet_files, read_csv
from equipoise.data.tables.rules import TargetKind
from equipoise.data.tables.schema import Schema
from equipoise.errors import InvalidData, InvalidParameter, require, require_integer, unknown_name

PARTS = ("train", "validation", "test")


def from_frame(
    frame: Any,
    *,
    client: str,
    target: str,
    split_by: How = "clients",
    split: str | None = None,
    validation: float = 0.0,
    test: float = 0.2,
    seed: int = 0,
    name: str = "table",
    schema: Schema | PathLike | None = None,
    columns: Sequence[str] | None = None,
    kinds: Mapping[str, Kind | Literal["left out"]] | None = None,
    one_hot: int = 16,
    target_kind: TargetKind | None = None,
    classes: int | Sequence[str] = 0,
    attributes: Sequence[str] = (),
    min_examples: int = 1,
) -> FederatedData:
    """Clients from a pandas, Polars or Arrow table; `client` and `target` name columns, all others (or `columns`) are inputs.

    Columns may hold numbers, booleans, text, categories or dates, and missing values. A text column that holds only dates,
    written as `csv` reads them, is a column of dates; blanks and NA in it are missing. Clients are split first. Then a
    `Schema`, which says how each column is encoded, is fitted on the training clients alone; it is `data.schema`. Give a
    fitted `schema`, or its JSON file, to read another table in the same way. The inputs are one floating tensor (N, F), or
    a dict of "numbers" (N, F) and "codes" (N, C) if some columns have more than `one_hot` categories;
    `models.Tabular(data.schema)` fits both.

    `split_by` and the shares `validation` and `test` work as in `from_arrays`. Or `split` names a column that holds "train",
    "validation" or "test" in each row; then no client may be in two parts, unless `split_by="examples"`.

    `kinds` overrides what the type of a column says: {"zip": "category", "day": "date", "row": "left out"}. A target of
    floating numbers or dates is a number to predict, any other is a class; `target_kind` ("classes" or "number") overrides
    it. `classes` names all classes where training clients do not show them all (or is their number if they are 0, 1, …).

    `attributes` names columns that hold one value for each client, such as its region: summaries and reports then show
    subgroups by them. They are not inputs unless `columns` names them.

    `min_examples` leaves out all rows of clients that have fewer rows in the whole table. It comes before all else. Messages
    count rows from 0, those that are left out included.

    Notices name what matters to the model: texts in a column of numbers, columns that name the client or tell the target, rows
    that are there several times, rare classes, categories that training did not have, clients without an example to test on.

    `frame` is the table, or a dict of columns.

    >>> frame = {"who": ["a", "a", "b", "b"], "age": [30, None, 50, 60], "ill": ["no", "yes", "no", "yes"]}
    >>> data = from_frame(frame, client="who", target="ill", test=0.5)
    >>> data
    FederatedData('table', train: 1 client / 2 examples, test: 1 client / 2 examples)
    >>> data.schema.target.classes
    ('no', 'yes')
    """
    require_column_name("client", client)
    table = arrow_table(frame, name, client)
    check_names(table, name, client=client, target=target, split=split)
    answers = TableColumn.of(table, target, name)
    owners = _owners(TableColumn.of(table, client, name), answers if target_kind == "classes" else answers.as_dates())
    require_integer("min_examples", min_examples, 1)
    if min_examples > 1:
        table, owners = _large_clients(table, owners, min_examples, name)
    described = _attributes(table, attributes, owners, name, {client, target, split})
    if described and columns is None and schema is None:
        table = table.drop_columns(list(described))
    if split is None:
        parts = splits.split(_clients(*owners, name), split_by, validation=validation, test=test, seed=seed, name=name)
    else:
        parts = _split_by_column(TableColumn.of(table, split, name), owners, split_by, (validation, test))
    if fitted := schema is None:
        schema = Schema.fit(
            table, target=target, client=client, split=split, rows=parts.train.x, columns=columns, kinds=kinds, one_hot=one_hot,
            target_kind=target_kind, classes=classes, source=name,
        )  # fmt: skip
        for rule in schema.columns:
            if rule.becomes != "left out" and rule.name not in (kinds or {}):
                tell_of_client_name(TableColumn.of(table, rule.name, name), owners[0])
    else:
        options = {"columns": columns, "kinds": kinds, "one_hot": None if one_hot == 16 else one_hot}
        schema = given_schema(schema, target, **options, target_kind=target_kind, classes=classes or None)
    (x, unseen), y = schema.inputs_of(table, name), schema.targets(table, name)
    tell_of_unseen(unseen, name)
    if fitted and schema.target.classes and not classes and target_kind is None:
        tell_of_rare_classes(target, schema.target.classes, y, name)
    tell_of_copies(table, [*schema.inputs, target], owners[0], name)
    if split_by == "examples":
        tell_of_untested(parts, None if split is not None else (validation, test))
    parts = parts.with_attributes(described) if described else parts
    sets: dict[str, Any] = {part: replace(rows, x=select(x, rows.x), y=y[rows.x]) for part, rows in parts.splits.items()}
    kept = rows_before(table)
    places = {part: _places(rows, kept) for part, rows in parts.splits.items()}
    return replace(parts, **sets, classes=len(schema.target.classes), schema=schema, table_places=places)


def _places(clients: ClientSet, kept: NDArray[np.int64] | None) -> TablePlaces:
    """Where the examples of clients, whose inputs are rows of the table, were before rows were left out."""
    rows: NDArray[np.int64] = clients.x.numpy()
    return clients.ids, clients.sizes.cumsum(0).numpy(), rows if kept is None else kept[rows]


def csv(
    path: PathLike,
    *,
    client: str,
    target: str,
    delimiter: str = ",",
    decimal: str = ".",
    encoding: str = "utf-8",
    missing: Sequence[str] = (),
    thousands: str = "",
    date_format: str = "",
    name: str = "",
    **options: Any,
) -> FederatedData:
    """Clients from a CSV file with a header, also compressed (.gz); options as in `from_frame`.

    Empty cells and NA, N/A, NaN, null and the like are missing; `missing` names more spellings, such as "?". The column
    `client` is read as text: 007 and 7 are two clients, 7 and 7.0 are the same, and NA is a client, too. Numbers are written
    as 1005.5, or with `decimal=","` as 1005,5, or with `thousands="."`, too, as 1.005,5. Cells with a comma are quoted if that
    is the delimiter. Dates are written as 2026-11-16, or as `date_format` says ("%d.%m.%Y" for 16.11.2026). The name of the
    data is that of the file, unless given.

    `delimiter` is what stands between cells.

    Source: your own file.
    """
    _check_options(options, csv, {"sep": "delimiter", "na_values": "missing", "decimal_point": "decimal"})
    table = read_csv(
        path, client=client, delimiter=delimiter, decimal=decimal, encoding=encoding, missing=missing, thousands=thousands,
        date_format=date_format, text=categories_asked(options.get("kinds")),
    )  # fmt: skip
    return from_frame(table, client=client, target=target, name=name or Path(path).stem, **options)


def parquet(path: PathLike, *, client: str, target: str, name: str = "", **options: Any) -> FederatedData:
    """Clients from a Parquet file, or from all Parquet files of a folder; options as in `from_frame`.

    Folders with names such as hospital=3 are a column. A column that some of the files lack is missing there, and a notice
    says so. The name of the data is that of the file or folder, unless given.

    Source: your own files.
    """
    _check_options(options, parquet, {})
    table = parquet_files(path, client).read()
    return from_frame(table, client=client, target=target, name=name or Path(path).stem, **options)


def categories_asked(kinds: Any) -> list[str]:
    """The columns that a user asks for as categories: those of a CSV file are text as they stand, as 01234 is no 1234."""
    return [name for name, kind in kinds.items() if kind == "category"] if isinstance(kinds, Mapping) else []


def _check_options(options: Mapping[str, Any], reader: Callable[..., Any], elsewhere: Mapping[str, str]) -> None:
    """Refuse options that neither a reader of files nor `from_frame` has; `elsewhere` are names that other libraries use."""
    known = [name for taken in (reader, from_frame) for name in signature(taken).parameters if name not in ("frame", "options")]
    for option, value in options.items():
        hint = f"Write {elsewhere[option]}={value!r}." if option in elsewhere else unknown_name("option", option, set(known))
        require(option in known, "options", f"must be those of data.{reader.__name__} and data.from_frame", option, hint)


def _owners(column: TableColumn, target: TableColumn) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The client of each row as numbers (N,) into the sorted ids; rows without one are refused with those without a target."""
    codes, names = client_names(column, target)
    order, ids = client_of_rows(names)
    return order[codes], ids


def _large_clients(
    table: Any, owners: tuple[NDArray[np.int64], tuple[str, ...]], min_examples: int, name: str
) -> tuple[Any, tuple[NDArray[np.int64], tuple[str, ...]]]:
    """The rows of clients that have at least `min_examples` of them, and the client of each of these rows."""
    which, ids = owners
    kept = large_enough(np.bincount(which, minlength=len(ids)).tolist(), min_examples, name)
    rows = np.isin(which, kept)
    return kept_rows(table, rows), (np.searchsorted(kept, which[rows]), tuple(ids[k] for k in kept))


def client_names(column: TableColumn, target: TableColumn | None = None) -> tuple[NDArray[np.int64], list[str]]:
    """The client of each row as numbers (N,) into a list of names; a row without a client is refused.

    The refusal also names the rows that lack the target, where it is given.
    """
    import pyarrow.types as kinds

    codes, names = column.names()
    if kinds.is_floating(column.values.type) and (odd := {"inf", "-inf"} & set(names)):
        place = column.place(np.isin(codes, [names.index(each) for each in odd]))
        raise InvalidData(f"{column}, the client, is infinite in {place}. Drop that row, or name its client.")
    empty = np.array([*(not text.strip() for text in names), True])[codes]
    if empty.any():
        refuse_missing((column, "client", empty), *([] if target is None else [(target, "target", target.missing())]))
    return codes, names


def _attributes(
    table: Any, names: Sequence[str], owners: tuple[NDArray[np.int64], tuple[str, ...]], source: str, taken: set[str | None]
) -> dict[str, dict[str, str]]:
    """The value of each client in columns that hold one for each, {column: {client: value}}; missing ones are left out."""
    require(not isinstance(names, str), "attributes", "must be a list of names of columns", names)
    which, ids = owners
    found: dict[str, dict[str, str]] = {}
    for name in names:
        check_names(table, source, attributes=name)
        require(name not in taken, "attributes", "must be other columns than client, target and split", name)
        column = TableColumn.of(table, name, source)
        codes, texts = column.names()
        _, first = np.unique(which, return_index=True)
        if (odd := codes != codes[first][which]).any():
            row = int(odd.argmax())
            before = int(first[which[row]])
            text = f"{column}, an attribute, differs in row {column.row(before)} and row {column.row(row)}"
            raise InvalidData(
                f"{text}, both of client {ids[which[row]]!r}. Repair it, or leave it out of attributes; for groups in a client "
                'see "Groups of rows" in the guide on results.'
            )
        found[name] = {client: texts[codes[k]] for client, k in zip(ids, first, strict=True) if codes[k] >= 0}
    return found


def _clients(which: NDArray[np.int64], ids: tuple[str, ...], name: str, rows: NDArray[np.int64] | None = None) -> ClientSet:
    """Clients whose inputs are the rows of the table that they own; of `rows` alone, if given."""
    kept = np.arange(len(which)) if rows is None else rows
    present, local = np.unique(which[kept], return_inverse=True)
    order, sizes = rows_by_client(local, len(present))
    owned = torch.from_numpy(kept)[order]
    return ClientSet.trusted(
        x=owned, y=owned.float(), offsets=offsets_of(sizes), ids=tuple(ids[k] for k in present), source=name
    )


def _split_by_column(
    column: TableColumn, owners: tuple[NDArray[np.int64], tuple[str, ...]], split_by: How, shares: tuple[float, float]
) -> FederatedData:
    """The parts that a column of the table names."""
    require(shares == (0.0, 0.2), "validation, test", f"must be left out where split={column.name!r} names the parts", shares)
    require(split_by in ("clients", "examples"), "split_by", 'must be "clients" or "examples"', split_by)
    codes, names = column.names()
    for code, text in enumerate([*names, None]):
        if text not in PARTS and (of := codes == (code if text is not None else -1)).any():
            raise InvalidData(
                f"{column}, {column.place(of)} holds {text!r}, but must hold {', '.join(PARTS)}: the part of the row."
            )
    if "train" not in names:
        raise InvalidData(f"{column} names no row 'train', so there is nothing to train on.")
    rows = {text: np.flatnonzero(codes == code) for code, text in enumerate(names)}
    if split_by == "clients":
        _refuse_clients_in_two_parts(column, rows, *owners)
    sets = {part: _clients(*owners, column.source, found) for part, found in rows.items()}
    return FederatedData(sets["train"], sets.get("validation"), sets.get("test"), column.source)


def _refuse_clients_in_two_parts(
    column: TableColumn, rows: dict[str, NDArray[np.int64]], which: NDArray[np.int64], ids: tuple[str, ...]
) -> None:
    first: dict[int, tuple[str, int]] = {}
    for part, found in rows.items():
        for client, place in zip(*np.unique(which[found], return_index=True), strict=True):
            if client in first:
                other, row = first[client]
                one, two = column.row(row), column.row(int(found[place]))
                raise InvalidData(
                    f"{column}: client {ids[client]!r} is in {other} (row {one}) and in {part} (row {two}). Put all rows of a "
                    'client in one part, or write split_by="examples" to test on further examples of clients.'
                )
            first[client] = part, int(found[place])


def given_schema(schema: Any, target: str, **fitting: Any) -> Schema:
    """A schema, or that of a JSON file, checked against the name of the target; options of `fitting` must be None."""
    if isinstance(schema, str | os.PathLike):
        schema = Schema.load(Path(schema).expanduser())
    if not isinstance(schema, Schema):
        raise InvalidParameter("schema", "must be a Schema, or its JSON file", type(schema).__name__, "See data.Schema.load.")
    for parameter, value in fitting.items():
        fix = f"Remove {parameter} from the call: the schema decides this, as in training."
        require(value is None, parameter, "must not be given together with schema", value, fix)
    require(schema.target.name == target, "target", f"must be that of the schema, {schema.target.name!r}", target)
    return schema
