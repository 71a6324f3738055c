"""Tables of any library as Arrow tables, and the names of their columns."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from numbers import Real
from typing import Any

from equipoise.core.files import PathLike
from equipoise.data.clients.arrays import first_line
from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.column import text_of
from equipoise.errors import InvalidData, InvalidParameter, require, unknown_name


@dataclass(frozen=True, eq=False)
class TableFiles:
    """A table in files, of which a column or a piece is in memory at a time; it offers what `Schema.fit` asks of a table."""

    path: PathLike
    column_names: list[str]
    bytes: int  # about what the whole table takes in memory
    batches: Callable[[Sequence[str] | None], Iterator[Any]]  # of some columns, or of all: Arrow's record batches in order
    client: str = ""  # a column of CSV files in which NA is no missing value, if it is read alone
    metadata: dict[str, str] | None = None  # how CSV files were read

    @cached_property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(batch.num_rows for batch in self.batches(self.column_names[:1]))

    def column(self, name: str) -> Any:
        """A whole column, a pyarrow.ChunkedArray."""
        return self.read([name]).column(name)

    def read(self, names: Sequence[str] | None = None) -> Any:
        """Some columns, or the whole table, as a pyarrow.Table."""
        import pyarrow as pa

        found, columns = list(self.batches(names)), list(names or self.column_names)
        if not found:
            return pa.table({name: [] for name in columns})
        table = pa.Table.from_batches(found)
        if len(columns) > 1 and columns.count(self.client) == 1 and table.column(self.client).null_count:
            table = table.set_column(columns.index(self.client), self.client, self.column(self.client))
        return table if self.metadata is None else table.replace_schema_metadata(self.metadata)


def arrow_table(frame: Any, source: str = "table", client: str | None = None) -> Any:
    """A pandas, Polars or Arrow table, or anything that offers its columns to Arrow, as a pyarrow.Table of at least one row.

    `TableFiles` stay as they are. The column `client` may hold numbers beside text: 1, 1.0 and "1" are one client.
    """
    import pyarrow as pa

    pandas = sys.modules.get("pandas")
    if isinstance(frame, pa.Table | TableFiles):
        table = frame
    elif pandas is not None and isinstance(frame, pandas.DataFrame):
        columns = [_from_pandas(frame.iloc[:, k], str(name), source, client) for k, name in enumerate(frame.columns)]
        table = pa.Table.from_arrays(columns, names=[str(name) for name in frame.columns])
    else:
        table = _from_other(frame)
    if isinstance(table, pa.Table) and any(map(pa.types.is_string_view, table.schema.types)):
        # Of views, as Polars gives text, Arrow can take no single rows.
        plain = [each.with_type(pa.large_string()) if pa.types.is_string_view(each.type) else each for each in table.schema]
        table = table.cast(pa.schema(plain, table.schema.metadata))
    names = table.column_names
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise InvalidData(f"{prefix(source)}two columns are called {twice[0]!r}. Rename one of them.")
    if not table.num_rows or not names:
        raise InvalidData(f"{prefix(source)}the table has {table.num_rows} rows and {len(names)} columns; there is no example.")
    return table


def _from_pandas(values: Any, name: str, source: str, client: str | None) -> Any:
    """A column of pandas: sparse ones dense, periods as the dates they begin at, intervals as text."""
    import pyarrow as pa

    pandas, of = sys.modules["pandas"], values.dtype
    if isinstance(of, pandas.SparseDtype):
        values = values.sparse.to_dense()
    elif isinstance(of, pandas.PeriodDtype):
        values = values.dt.to_timestamp()
    elif isinstance(of, pandas.IntervalDtype):
        values = values.map(str, na_action="ignore")
    elif isinstance(of, pandas.CategoricalDtype) and isinstance(of.categories.dtype, pandas.IntervalDtype | pandas.PeriodDtype):
        values = values.cat.rename_categories(str)
    known = values[values.notna()] if of.kind == "O" else ()
    try:
        made = pa.array(values, from_pandas=True)
        if pa.types.is_temporal(made.type) and len({isinstance(each, datetime) for each in known}) > 1:
            raise TypeError("it mixes dates and times")  # of which Arrow drops the time of day
        return made
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
        if name == client and not isinstance(failure, UnicodeError) and all(isinstance(k, str | Real | Decimal) for k in known):
            return pa.array(values.map(text_of, na_action="ignore"), pa.large_string(), from_pandas=True)
        raise InvalidData(
            f"{prefix(source)}column {name!r} cannot be read: {first_line(failure)}. Give it one type: numbers, text or dates."
        ) from failure


def _from_other(frame: Any) -> Any:
    import pyarrow as pa
    from pyarrow.interchange import from_dataframe

    failures = []
    for attempt in (pa.table, from_dataframe):
        try:
            return attempt(frame)
        except Exception as failure:  # whatever a table of some library raises
            failures.append(failure)
    fix = (
        f"It said: {first_line(failures[0])}. A lazy table: give frame.collect(). Arrays: data.from_arrays(x, y, client). "
        "A file: data.csv and data.parquet take its path."
    )
    raise InvalidParameter("frame", "must be a pandas, Polars or Arrow table", type(frame).__name__, fix) from failures[0]


def check_names(table: Any, source: str, **named: str | None) -> None:
    """Refuse names of columns that the table does not have, and one column in two roles; the keywords are parameters."""
    roles: dict[str, str] = {}
    known = set(table.column_names)  # Arrow makes the list at each call, and a table may have 100,000 columns
    for parameter, name in named.items():
        if name is None and parameter in ("client", "split"):
            continue
        if not isinstance(name, str):
            raise InvalidParameter(parameter, "must be the name of a column", name)
        if name not in known:
            fix = unknown_name("column", name, table.column_names).removeprefix(f"Unknown column {name!r}. ")
            raise InvalidParameter(parameter, f"must name a column of {source}", name, fix)
        if name in roles:
            raise InvalidParameter(parameter, f"must be another column than {roles[name]}", name)
        roles[name] = parameter


def require_column_name(parameter: str, name: Any) -> None:
    """Raise InvalidParameter unless a parameter is the name of a column."""
    require(isinstance(name, str), parameter, "must be the name of a column", name, 'A name is text, e.g. "hospital" or "0".')


def table_like(frame: Any, columns: dict[str, Any]) -> Any:
    """Columns as a table of the library that `frame` is of, with the index of a pandas frame; else a pyarrow.Table."""
    import pyarrow as pa

    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        return pandas.DataFrame(columns, index=frame.index)
    if polars is not None and isinstance(frame, polars.DataFrame):
        return polars.DataFrame(columns)
    return pa.table(columns)
