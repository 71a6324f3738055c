"""Tables of any library as Arrow tables: refusals name row and column.

Rows are counted from 0, as in arrays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from numbers import Real
from typing import Any

from equipoise.data.clients.arrays import first_line
from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.csv_reading import spelling_of
from equipoise.data.tables.table_column import text_of
from equipoise.data.tables.table_files import TableFiles
from equipoise.errors import InvalidData, InvalidParameter, unknown_name


def arrow_table(frame: Any, source: str = "table", client: str | None = None) -> Any:
    """A pandas, Polars or Arrow table, or anything that offers its columns to Arrow, as a pyarrow.Table of at least one row.

    `TableFiles` stay as they are. The column `client` may hold numbers beside text: 1, 1.0 and "1" are one client.
    """
    import pyarrow as pa

    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        table = _from_pandas(frame, source, client)
    elif isinstance(frame, pa.Table | TableFiles):
        table = frame
    else:
        table = _from_other(frame, source)
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


def _from_pandas(frame: Any, source: str, client: str | None) -> Any:
    """The columns of a pandas frame, one by one, so that one that cannot be read is named; the index is left out."""
    import pyarrow as pa

    columns = []
    for place, name in enumerate(frame.columns):
        values = _plain(frame.iloc[:, place])
        try:
            made = pa.array(values, from_pandas=True)
            if values.dtype == object and pa.types.is_temporal(made.type):
                _refuse_mixed_times(values)
            columns.append(made)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
            known = [(row, each) for row, (each, there) in enumerate(zip(values, values.notna(), strict=True)) if there]
            mixed = str(name) == client and all(isinstance(each, str | Real | Decimal) for _, each in known)
            if mixed and not isinstance(failure, UnicodeError):
                columns.append(pa.array(values.map(text_of, na_action="ignore"), pa.large_string(), from_pandas=True))
                continue
            raise InvalidData(
                f"{prefix(source)}column {str(name)!r} cannot be read: {_unreadable(str(name), known, failure)}"
            ) from failure
    return pa.Table.from_arrays(columns, names=[str(name) for name in frame.columns])


def _plain(values: Any) -> Any:
    """A column of pandas in a type that Arrow has: sparse ones dense, periods as the dates they begin at, intervals as text."""
    pandas, of = sys.modules["pandas"], values.dtype
    if isinstance(of, pandas.SparseDtype):
        return values.sparse.to_dense()
    if isinstance(of, pandas.PeriodDtype):
        return values.dt.to_timestamp()
    if isinstance(of, pandas.IntervalDtype):
        return values.map(str, na_action="ignore")
    if isinstance(of, pandas.CategoricalDtype) and isinstance(of.categories.dtype, pandas.IntervalDtype | pandas.PeriodDtype):
        return values.cat.rename_categories(str)
    return values


def _refuse_mixed_times(values: Any) -> None:
    """Raise TypeError for objects that Arrow would make one type of: of a moment among dates it drops the time of day."""
    kinds = {datetime if isinstance(each, datetime) else type(each) for each in values[values.notna()]}
    if len(kinds) > 1:
        raise TypeError(f"it mixes {' and '.join(sorted(kind.__name__ for kind in kinds))}")


def _unreadable(name: str, known: list[tuple[int, Any]], failure: Exception) -> str:
    """Why a column of pandas cannot be read, and the cure; `known` are rows and values that are there."""
    row, value = next(((row, each) for row, each in known if isinstance(each, complex)), (0, None))
    if value is not None:
        return f"row {row} holds the complex number {value!r}. Give real and imaginary parts as two columns."
    if isinstance(failure, UnicodeEncodeError):
        row = next(row for row, each in known if isinstance(each, str) and not _is_unicode(each))
        return f"row {row} holds text that is no Unicode ({first_line(failure)}). Read its file again in the right encoding."
    reason = first_line(failure)
    if (other := next(((row, each) for row, each in known if type(each) is not type(known[0][1])), None)) is not None:
        reason = f"row {other[0]} holds {other[1]!r}, but row {known[0][0]} holds {known[0][1]!r}"
    elif (
        large := next(((row, each) for row, each in known if isinstance(each, int) and abs(each) >= 2**63), None)
    ) is not None:
        reason = f"row {large[0]} holds {large[1]}, beyond 64 bits"
    if all(isinstance(each, date) for _, each in known):
        return f"{reason}. Give it one type: pd.to_datetime(frame[{name!r}], utc=True)."
    return (
        f"{reason}. Give it one type: pd.to_numeric(frame[{name!r}], errors='coerce').astype(float) for numbers, "
        "astype(str) for categories."
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_other(frame: Any, source: str) -> Any:
    import pyarrow as pa

    attempts: list[Callable[[Any], Any]] = [pa.table, _by_interchange]
    failures = []
    for attempt in attempts:
        try:
            return attempt(frame)
        except Exception as failure:  # whatever a table of some library raises
            failures.append(failure)
    if (polars := sys.modules.get("polars")) is not None and isinstance(frame, polars.DataFrame):
        for name, of in frame.schema.items():
            try:
                pa.table(frame.select(name))
            except Exception as failure:  # whatever Arrow raises for a type that it does not know
                raise InvalidData(
                    f"{prefix(source)}column {name!r} holds {of}, which cannot be read: {first_line(failure)}. Cast it: "
                    f"frame.with_columns(pl.col({name!r}).cast(pl.Float64)) for numbers, cast(pl.String) for ids."
                ) from failure
    fix = (
        f"It said: {first_line(failures[0])}. A lazy table: give frame.collect(). Arrays: data.from_arrays(x, y, client). "
        "A file: data.csv and data.parquet take its path; else pandas.read_csv makes a table of it."
    )
    if type(frame).__name__ in ("FederatedData", "ClientSet"):
        fix = "Its rows are encoded already: they are the x of a split, e.g. data.train.x."
    raise InvalidParameter("frame", "must be a pandas, Polars or Arrow table", type(frame).__name__, fix) from failures[0]


def _by_interchange(frame: Any) -> Any:
    from pyarrow.interchange import from_dataframe

    return from_dataframe(frame)


def _may_be_pandas(table: Any) -> bool:
    return "pandas" in sys.modules and not isinstance(table, TableFiles) and spelling_of(table) is None


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
            raise InvalidParameter(
                parameter, f"must name a column of {source}", name,
                unknown_name("column", name, table.column_names).removeprefix(f"Unknown column {name!r}. ")
                + (" The index of a pandas frame: frame.reset_index()." if _may_be_pandas(table) else ""),
            )  # fmt: skip
        if name in roles:
            raise InvalidParameter(parameter, f"must be another column than {roles[name]}", name)
        roles[name] = parameter
