"""CSV and Parquet files of any size into a store, with the schema that was fitted on the training clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core.files import PathLike
from equipoise.core.trees import select
from equipoise.data.clients.client_batches import batches_of_stream
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.splits import draw_clients
from equipoise.data.store.store_writer import write_store, write_streams
from equipoise.data.tables.arrow import TableFiles, check_names
from equipoise.data.tables.checks import tell_of_unseen
from equipoise.data.tables.column import CSV_DEFAULTS, Kind, TableColumn
from equipoise.data.tables.frames import PARTS, categories_asked, client_names, from_frame, given_schema
from equipoise.data.tables.read import CSV_NAMES, csv_files, parquet_files, read_csv
from equipoise.data.tables.rules import TargetKind
from equipoise.data.tables.schema import Schema
from equipoise.errors import InvalidData, InvalidParameter

SUFFIXES = ".csv", ".csv.gz", ".parquet"


def holds_table(source: PathLike) -> bool:
    """Whether a name is that of a CSV or Parquet file, or of a folder of them."""
    path = Path(source)
    patterns = "*.parquet", *CSV_NAMES
    return any(any(path.rglob(p)) for p in patterns) if path.is_dir() else path.name.endswith(SUFFIXES)


def write_table_store(
    source: PathLike,
    path: PathLike,
    *,
    client: str,
    target: str,
    validation: float = 0.0,
    test: float = 0.2,
    seed: int = 0,
    name: str = "",
    schema: Schema | PathLike | None = None,
    columns: Sequence[str] | None = None,
    kinds: Mapping[str, Kind | Literal["left out"]] | None = None,
    one_hot: int = 16,
    target_kind: TargetKind | None = None,
    classes: int | Sequence[str] = 0,
    delimiter: str = ",",
    decimal: str = ".",
    encoding: str = "utf-8",
    missing: Sequence[str] = (),
    thousands: str = "",
    date_format: str = "",
    memory: float = 1e9,
    append: bool = False,
) -> Path:
    """Write a CSV or Parquet file, or a folder of them, into a store that `open_store` opens with its splits and its schema.

    Options are those of `from_frame` and `csv`: the same clients are tested on, and the schema is fitted on the training
    clients. Tables of at most `memory` bytes are read whole. Larger ones are read in pieces, one column at a time to fit
    the schema; the rows of each client must then be contiguous, as in a table that is sorted by client, or a Parquet folder
    with a folder client=… for each. CSV files are read once for each column, so Parquet takes less time.

    `source` is the file or folder that is read, `path` the folder that is written. Of `from_frame` are `schema`, `columns`,
    `kinds`, `one_hot`, `target_kind` and `classes`; of `csv` are `delimiter`, `decimal`, `encoding`, `missing`, `thousands`
    and `date_format`.
    """
    called = name or Path(source).name.partition(".")[0]
    parquet = Path(source).suffix == ".parquet" or (Path(source).is_dir() and any(Path(source).rglob("*.parquet")))
    given = (delimiter, decimal, encoding, missing, thousands, date_format)
    spelling: dict[str, Any] = {"client": client, **dict(zip(CSV_DEFAULTS, given, strict=True))}
    spelling["text"] = categories_asked(kinds)
    if not parquet and Path(source).is_file() and Path(source).stat().st_size <= memory:
        table = read_csv(source, **spelling)  # at once, in one block
    else:
        files = parquet_files(source, client) if parquet else csv_files(source, **spelling)
        table = files.read() if files.bytes <= memory else files
    fitting: dict[str, Any] = {"columns": columns, "kinds": kinds, "target_kind": target_kind}
    if not isinstance(table, TableFiles):
        data = from_frame(
            table, client=client, target=target, validation=validation, test=test, seed=seed, name=called, schema=schema,
            one_hot=one_hot, classes=classes, **fitting,
        )  # fmt: skip
        return write_store(data, path, append=append)
    check_names(table, called, client=client, target=target)
    clients = _clients_in_order(table, client, called)
    drawn = draw_clients(clients, validation=validation, test=test, seed=seed)
    parts = dict(zip(PARTS, drawn, strict=True))
    if schema is not None:
        chosen = {"one_hot": None if one_hot == 16 else one_hot, "classes": classes or None}
        schema = given_schema(schema, target, **fitting, **chosen)
    else:
        trained = np.isin(np.arange(len(clients)), parts["train"].numpy()).repeat(clients.sizes.numpy())
        options = fitting | {"one_hot": one_hot, "classes": classes}
        schema = Schema.fit(table, target=target, client=client, rows=trained, source=called, **options)
    unseen: dict[str, set[str]] = {}
    streams = {
        part: batches_of_stream(
            _triples(table, clients, positions.numpy(), schema, called, unseen), scale=None, shift=0.0, source=called
        )
        for part, positions in parts.items()
        if len(positions)
    }
    written = write_streams(streams, path, name=called, classes=len(schema.target.classes), schema=schema, append=append)
    tell_of_unseen(unseen, called)
    return written


def _clients_in_order(table: TableFiles, client: str, name: str) -> ClientSet:
    """The clients of a table in the order of its rows, without data; refused if a client's rows do not stand together."""
    import pyarrow as pa

    ids: list[str] = []
    starts: list[int] = []
    rows = 0
    for batch in table.batches([client]):
        codes, names = client_names(TableColumn(client, pa.chunked_array([batch.column(0)]), name, rows))
        for place in np.flatnonzero(np.diff(codes, prepend=-1)).tolist():
            if not ids or names[codes[place]] != ids[-1]:
                ids.append(names[codes[place]])
                starts.append(rows + place)
        rows += len(codes)
    if not ids:
        raise InvalidData(f"{name}: the table has no row; there is no example.")
    found: dict[str, int] = {}
    if (again := next((k for k, each in enumerate(ids) if found.setdefault(each, k) != k), None)) is not None:
        raise InvalidParameter(
            "source", "must have the rows of each client together, since it is read in pieces", name,
            f"Client {ids[again]!r} comes again in row {starts[again]}. Sort the table by {client!r}, or give memory=… bytes.",
        )  # fmt: skip
    offsets = torch.tensor([*starts, rows])
    return ClientSet.trusted(x=torch.empty(0), y=torch.empty(0), offsets=offsets, ids=tuple(ids), source=name)


def _triples(
    table: TableFiles, clients: ClientSet, positions: NDArray[np.int64], schema: Schema, name: str, unseen: dict[str, set[str]]
) -> Iterator[tuple[str, Any, Any]]:
    """(id, x, y) of the clients at some positions, in the order of the table; `unseen` takes categories without a code."""
    import pyarrow as pa

    names = [*(rule.name for rule in schema.columns if rule.becomes != "left out"), schema.target.name]
    check_names(table, name, **{f"column {each}": each for each in names})
    ends = clients.offsets[1:].numpy()
    chosen = np.isin(np.arange(len(clients)), positions)
    done, first, last, held = 0, 0, 0, []
    for batch in table.batches(names):
        held.append(batch)
        last += batch.num_rows
        through = int(np.searchsorted(ends, last, side="right"))  # clients whose last row is there
        if through == done:
            continue
        rows, piece = int(ends[through - 1]) - first, pa.Table.from_batches(held).replace_schema_metadata(table.metadata)
        if chosen[done:through].any():
            whole = piece.slice(0, rows)
            (x, new), y = schema.inputs_of(whole, name, first), schema.targets(whole, name, first)
            unseen.update({column: unseen.get(column, set()) | found for column, found in new.items()})
            for k in np.flatnonzero(chosen[done:through]).tolist():
                own = slice(int(clients.offsets[done + k]) - first, int(ends[done + k]) - first)
                yield clients.ids[done + k], select(x, own), y[own]
        held, done, first = piece.slice(rows).to_batches(), through, first + rows
