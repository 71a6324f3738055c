"""Tables of any library as Arrow tables, and columns as numbers or names: refusals name row and column.

Rows are counted from 0, as in arrays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.data.arrays import first_line
from equipoise.data.clients import prefix
from equipoise.data.csv_reading import spelling_of
from equipoise.data.table_files import TableFiles, temporal_of_text
from equipoise.data.written_values import reading_advice
from equipoise.errors import InvalidData, InvalidParameter, unknown_name

Kind = Literal["number", "boolean", "category", "date"]

_MICROSECONDS_PER_DAY = 86_400_000_000
_MISSING = ("", "#n/a", "#n/a n/a", "#na", "<na>", "n/a", "na", "nan", "nat", "none", "null")  # among dates and numbers as text
PLAIN = {"number": "1005.5", "date": "2026-11-16"}  # as a number or a date can always be written


# ----------------------------------------------------------------------------------------------------------------------- tables


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
                columns.append(pa.array(values.map(_text_of, na_action="ignore"), pa.large_string(), from_pandas=True))
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
    raise InvalidParameter(
        "frame", "must be a pandas, Polars or Arrow table", type(frame).__name__,
        f"It said: {first_line(failures[0])}. A lazy table: give frame.collect(). Arrays: data.from_arrays(x, y, client). "
        "A file: read it first, by data.csv, data.parquet or pandas.read_csv.",
    ) from failures[0]  # fmt: skip


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
                unknown_name("column", name, table.column_names)
                + (" The index of a pandas frame: frame.reset_index()." if _may_be_pandas(table) else ""),
            )  # fmt: skip
        if name in roles:
            raise InvalidParameter(parameter, f"must be another column than {roles[name]}", name)
        roles[name] = parameter


# ---------------------------------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True, eq=False)
class TableColumn:
    """One column of an Arrow table, with its name and that of the table for errors."""

    name: str
    values: Any  # pyarrow.ChunkedArray
    source: str = "table"
    first: int = 0  # the row of the table that the column begins with, if it is a piece of one
    spelling: Mapping[str, str] | None = None  # how numbers and dates of a CSV file were read; None: it was none
    known: bool = False  # whether a schema says its kind already, so that no message may advise `kinds`

    def row(self, where: NDArray[Any]) -> int:
        """The first row of the table where something (N,) is true."""
        return self.first + int(where.argmax())

    def __str__(self) -> str:
        return f"{prefix(self.source)}column {self.name!r}"

    @property
    def type_kind(self) -> Kind | None:
        """What the type of the column says: text is a category; None if nothing is there but missing values."""
        import pyarrow.types as kinds

        of = self.values.type
        if kinds.is_null(of):
            return None
        if kinds.is_dictionary(of):
            of = of.value_type
            if not (kinds.is_nested(of) or kinds.is_binary(of) or kinds.is_large_binary(of)):
                return "category"
        if kinds.is_boolean(of):
            return "boolean"
        if kinds.is_integer(of) or kinds.is_floating(of) or kinds.is_decimal(of):
            return "number"
        if self._is_text(of):
            return "category"
        if kinds.is_temporal(of) and not kinds.is_interval(of):
            return "date"
        raise InvalidData(
            f"{self} holds {of}. A column must hold numbers, booleans, text, categories or dates. "
            + ("Give it as in training." if self.known else f"Spread it over several columns, or {self._left_out}.")
        )

    @property
    def _left_out(self) -> str:
        return f"leave it out: kinds={{{self.name!r}: 'left out'}}"

    @property
    def is_text(self) -> bool:
        """Whether the column holds text, not made a category by its owner."""
        return self._is_text(self.values.type)

    @staticmethod
    def _is_text(of: Any) -> bool:
        import pyarrow.types as kinds

        return bool(kinds.is_string(of) or kinds.is_large_string(of) or kinds.is_string_view(of))

    def as_dates(self) -> TableColumn:
        """The column with dates and times for its text, if all of it is written as in a CSV file; else the column itself.

        Blanks, NA, NaT, null and the like are missing.
        """
        import pyarrow as pa
        from pyarrow import compute

        if not self.is_text or self.values.null_count == len(self.values):
            return self
        encoded = self._decoded().combine_chunks().dictionary_encode()
        texts, missing = encoded.dictionary, _are_missing(encoded.dictionary)
        known = texts.filter(compute.invert(missing))
        if not len(known) or not known[0].as_py()[:1].isdecimal() or (found := temporal_of_text(known)) is None:
            return self
        places = compute.subtract(compute.cumulative_sum(compute.invert(missing).cast(pa.int64())), 1)
        places = compute.if_else(missing, pa.scalar(None, pa.int64()), places)
        return replace(self, values=pa.chunked_array([found.take(places.take(encoded.indices))]))

    def numbers(self) -> NDArray[np.float64]:
        """The column as float64 (N,), NaN where it is missing; booleans are 0 and 1, text must be of numbers."""
        import pyarrow as pa

        kind = self.type_kind
        if kind == "date":
            raise InvalidData(f"{self} holds dates ({self.values.type}), but numbers are expected.")
        if kind == "category":
            return self._parsed(_number_of_text, "number")
        values: NDArray[np.float64] = self.values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        infinite = np.isinf(values)
        if infinite.any():
            found = f"row {self.row(infinite)} holds {values[infinite][0]}"
            raise InvalidData(f"{self}, {found}. Repair or drop that row, or make the value missing.")
        return values

    def whole_numbers(self, rows: NDArray[np.int64]) -> int:
        """How many different integers some rows hold, which float64 need not tell apart; 0 of a column of another type."""
        import pyarrow.types as kinds

        return len(self.values.take(rows).unique().drop_null()) if kinds.is_integer(self.values.type) else 0

    def days(self) -> NDArray[np.float64]:
        """Dates and times as days since 1970-01-01 (UTC), float64 (N,), NaN where they are missing; text must be ISO 8601."""
        import pyarrow as pa

        kind = self.type_kind
        if kind == "category":
            if (dates := self.as_dates()) is not self:
                return dates.days()
            return self._parsed(_days_of_text, "date")
        if kind == "number" and bool(np.isnan(self.numbers()).all()):  # an empty column, as pandas reads it
            kind = None
        if kind not in ("date", None):
            raise InvalidData(f"{self} holds {self.values.type}, but dates are expected.")
        if kind is None:
            return np.full(len(self.values), np.nan)
        counts = self._decoded().cast(pa.int64()).cast(pa.float64(), safe=False)
        days: NDArray[np.float64] = counts.to_numpy().astype(np.float64) / _MICROSECONDS_PER_DAY
        return days

    def missing(self) -> NDArray[np.bool_]:
        """Where a value is missing, (N,): blank text is."""
        if self.type_kind == "category":
            return self.names()[0] < 0
        found: NDArray[np.bool_] = self.values.is_null(nan_is_null=True).to_numpy()
        return found

    def names(self) -> tuple[NDArray[np.int64], list[str]]:
        """Numbers (N,) into a list of the distinct values as text, −1 where one is missing; 1, 1.0 and "1" are one value.

        Blank text is missing, as in a CSV file.
        """
        if self.type_kind is None:
            return np.full(len(self.values), -1), []
        encoded = self._decoded().combine_chunks().dictionary_encode()
        known: dict[str, int] = {}
        codes = [-1]
        for value in self._listed(encoded.dictionary):
            missing = _is_missing(value)
            codes.append(-1 if missing else known.setdefault(_text_of(value), len(known)))
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.array(codes)[places.astype(np.int64) + 1], list(known)

    def constant(self) -> str:
        """In words, what a column of one value or none holds; empty if its rows differ."""
        if self.type_kind is None:
            return "all missing"
        values, known = self._decoded(), []
        for part in (values[:100], values):  # the first rows mostly differ, which saves looking at all
            distinct = self._listed(part.unique()[:3])
            known = [value for value in distinct if not _is_missing(value)]
            if known and len(distinct) > 1:
                return ""
        return f"always {_text_of(known[0])!r}" if known else "all missing"

    def _decoded(self) -> Any:
        """The values without a dictionary, text in one type, dates and times in microseconds."""
        import pyarrow as pa
        import pyarrow.types as kinds

        dictionary = kinds.is_dictionary(self.values.type)
        of = wanted = self.values.type.value_type if dictionary else self.values.type
        if self._is_text(of):
            wanted = pa.large_string()
        elif kinds.is_duration(of):
            wanted = pa.duration("us")
        elif kinds.is_time(of):
            wanted = pa.time64("us")
        elif kinds.is_temporal(of):
            wanted = pa.timestamp("us", of.tz if kinds.is_timestamp(of) else None)
        if not dictionary:
            return self.values.cast(wanted, safe=False)
        return pa.chunked_array([part.dictionary.cast(wanted).take(part.indices) for part in self.values.chunks], wanted)

    def _listed(self, values: Any) -> list[Any]:
        """Distinct values of the column as Python objects."""
        import pyarrow as pa

        try:
            return list(values.to_pylist())
        except (pa.ArrowException, ValueError, OverflowError) as failure:  # a date beyond the year 9999, an unknown time zone
            raise InvalidData(f"{self} holds {self.values.type} that cannot be read: {first_line(failure)}.") from failure

    def _parsed(self, parse: Callable[[str], float], what: str) -> NDArray[np.float64]:
        """The values of a column of text."""
        codes, names = self.names()
        values = [np.nan]
        for code, name in enumerate(names):
            try:
                values.append(np.nan if name.strip().lower() in _MISSING else parse(name))
            except (ValueError, OverflowError):
                texts = [each for each in names if each.strip().lower() not in _MISSING]
                cure = reading_advice(what, self.name, texts, self.spelling) or self._repair(what)
                raise InvalidData(
                    f"{self}, row {self.row(codes == code)} holds {name!r}, which is no {what} as it stands. {cure}"
                ) from None
            if np.isinf(values[-1]):
                raise InvalidData(f"{self}, row {self.row(codes == code)} holds {name!r}. Repair it, or make it missing.")
        return np.array(values)[codes + 1]

    def _repair(self, what: str) -> str:
        """The cure for text that no option reads as numbers or dates."""
        plain = PLAIN[what]
        if self.known:
            return f"Training had {what}s there. Write it as {plain}, or make it missing."
        return f"Write it as {plain}, make it missing, or use the column as kinds={{{self.name!r}: 'category'}}."


def _are_missing(texts: Any) -> Any:
    """Which texts, an Arrow array, stand for a missing date: blanks, NA and the like."""
    import pyarrow as pa
    from pyarrow import compute

    return compute.is_in(compute.utf8_lower(compute.utf8_trim_whitespace(texts)), pa.array(_MISSING, texts.type))


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN or blank text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _number_of_text(text: str) -> float:
    """The number that a text writes; true and false are 1 and 0."""
    return {"true": 1.0, "false": 0.0}[text.lower()] if text.lower() in ("true", "false") else float(text)


def _text_of(value: Any) -> str:
    whole = isinstance(value, float | Decimal | np.floating) and value == value // 1
    return str(int(value)) if whole else str(value)


def _days_of_text(text: str) -> float:
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86_400


def sorted_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names in order, whole numbers by their size and before text.

    >>> sorted_names(["10", "b", "9"])
    ('9', '10', 'b')
    """
    return tuple(sorted(names, key=lambda name: (0, int(name), name) if _is_whole(name) else (1, 0, name)))


def shown_names(names: Sequence[str]) -> str:
    """Names for a message, with commas between them; of more than six, the first six and their number."""
    shown = ", ".join(names[:6])
    return f"{shown} … ({len(names)} in all)" if len(names) > 6 else shown


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and name.isascii()
