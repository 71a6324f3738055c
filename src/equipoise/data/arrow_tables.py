"""Tables of any library as Arrow tables, files of tables, and columns as numbers or names: refusals name row and column.

Rows are counted from 0, as in arrays; lines of a file from 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.data.clients import prefix
from equipoise.data.file_access import PathLike
from equipoise.errors import InvalidData, InvalidParameter, require, unknown_name

Kind = Literal["number", "boolean", "category", "date"]

_MOST_BYTES = 2**31 - 1  # of a block of a CSV file
_MICROSECONDS_PER_DAY = 86_400_000_000


# ----------------------------------------------------------------------------------------------------------------------- tables


def arrow_table(frame: Any, source: str = "table") -> Any:
    """A pandas, Polars or Arrow table, or anything that offers its columns to Arrow, as a pyarrow.Table of at least one row."""
    import pyarrow as pa

    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        table = _from_pandas(frame, source)
    elif isinstance(frame, pa.Table):
        table = frame
    else:
        table = _from_other(frame, source)
    names = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidData(f"{prefix(source)}two columns are called {twice[0]!r}. Rename one of them.")
    if not table.num_rows or not names:
        raise InvalidData(f"{prefix(source)}the table has {table.num_rows} rows and {len(names)} columns; there is no example.")
    return table


def _from_pandas(frame: Any, source: str) -> Any:
    """The columns of a pandas frame, one by one, so that one that cannot be read is named; the index is left out."""
    import pyarrow as pa

    columns = []
    for place, name in enumerate(frame.columns):
        values = frame.iloc[:, place]
        try:
            columns.append(pa.array(values, from_pandas=True))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
            known = [(row, each) for row, (each, there) in enumerate(zip(values, values.notna(), strict=True)) if there]
            other = next(((row, each) for row, each in known if type(each) is not type(known[0][1])), None)
            reason = _first_line(failure)
            if other is not None:
                reason = f"row {other[0]} holds {other[1]!r}, but row {known[0][0]} holds {known[0][1]!r}"
            raise InvalidData(
                f"{prefix(source)}column {str(name)!r} cannot be read: {reason}. Give it one type, e.g. by astype(str)."
            ) from failure
    return pa.Table.from_arrays(columns, names=[str(name) for name in frame.columns])


def _from_other(frame: Any, source: str) -> Any:
    import pyarrow as pa

    attempts: list[Callable[[Any], Any]] = [pa.table, _by_interchange]
    failures = []
    for attempt in attempts:
        try:
            return attempt(frame)
        except Exception as failure:  # whatever a table of some library raises
            failures.append(failure)
    raise InvalidParameter(
        "frame", "must be a pandas, Polars or Arrow table", type(frame).__name__,
        f"It said: {_first_line(failures[0])}. A lazy table: give frame.collect(). Arrays: data.from_arrays(x, y, client).",
    ) from failures[0]  # fmt: skip


def _by_interchange(frame: Any) -> Any:
    from pyarrow.interchange import from_dataframe

    return from_dataframe(frame)


def check_names(table: Any, source: str, **named: str | None) -> None:
    """Refuse names of columns that the table does not have, and one column in two roles; the keywords are parameters."""
    roles: dict[str, str] = {}
    for parameter, name in named.items():
        if name is None:
            continue
        require(isinstance(name, str), parameter, "must be the name of a column", name)
        if name not in table.column_names:
            raise InvalidParameter(
                parameter, f"must name a column of {source}", name,
                unknown_name("column", name, table.column_names) + " The index of a pandas frame: frame.reset_index().",
            )  # fmt: skip
        if name in roles:
            raise InvalidParameter(parameter, f"must be another column than {roles[name]}", name)
        roles[name] = parameter


# ------------------------------------------------------------------------------------------------------------------------ files


def read_csv(path: PathLike, *, delimiter: str, encoding: str, missing: Sequence[str]) -> Any:
    """A CSV file, also compressed, as an Arrow table. Types come from all rows; empty cells and NA, NaN, null are missing."""
    import pyarrow as pa
    from pyarrow import csv

    require(isinstance(delimiter, str) and len(delimiter) == 1, "delimiter", "must be one character", delimiter)
    require(not isinstance(missing, str), "missing", "must be a list of texts", missing)
    file = _existing(path)
    try:
        with pa.input_stream(str(file)) as stream:
            content = stream.read()
        "".encode(encoding)
        options = csv.ConvertOptions(strings_can_be_null=True)
        options.null_values = [*options.null_values, *missing]
        table = csv.read_csv(
            pa.BufferReader(content),
            # One block, so that a type is that of all rows; one thread, so that errors name the line.
            read_options=csv.ReadOptions(use_threads=False, encoding=encoding, block_size=min(len(content) + 1, _MOST_BYTES)),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=options,
        )
        names = table.column_names
    except LookupError:
        raise InvalidParameter("encoding", "must be an encoding that Python knows", encoding, 'E.g. "latin-1".') from None
    except UnicodeError as failure:
        raise _wrong_encoding(path, "it", encoding) from failure
    except (pa.ArrowException, OSError, ValueError) as failure:
        if "UTF" in str(failure) or "codec" in str(failure):
            raise _wrong_encoding(path, "it", encoding) from failure
        reason = _first_line(failure).replace("CSV parse error: Row #", "line ")
        raise InvalidData(f"{path}: cannot be read as CSV: {reason}.") from failure
    for name, column in zip(names, table.columns, strict=True):
        if pa.types.is_binary(column.type):
            raise _wrong_encoding(path, f"column {name!r}", encoding)
    other = [each for each in (";", "\t", "|", ",") if each != delimiter and each in names[0]]
    if len(names) == 1 and other:
        raise InvalidData(f"{path}: has the single column {names[0]!r}. Did you mean delimiter={other[0]!r}?")
    return table


def _wrong_encoding(path: PathLike, what: str, encoding: str) -> InvalidData:
    return InvalidData(f'{path}: {what} is not text in {encoding}. Name its encoding, e.g. encoding="latin-1".')


def read_parquet(path: PathLike) -> Any:
    """A Parquet file, or all those in a folder, as an Arrow table; folders such as hospital=3/ are a column."""
    import pyarrow as pa
    from pyarrow import parquet

    whole = _existing(path)
    files = sorted(whole.rglob("*.parquet")) if whole.is_dir() else [whole]
    if not files:
        raise InvalidData(f"{path}: the folder holds no file *.parquet.")
    for file in files:  # the end of a file says where its columns are, so a file that was cut is found here
        try:
            parquet.read_metadata(file)
        except (pa.ArrowException, OSError) as failure:
            reason = _first_line(failure)
            raise InvalidData(f"{file}: is no complete Parquet file: {reason}. Copy or write it again.") from failure
    try:
        return parquet.read_table(whole, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
        raise InvalidData(f"{path}: cannot be read as Parquet: {_first_line(failure)}.") from failure


def _existing(path: PathLike) -> Path:
    try:
        found = Path(path).expanduser()
        there = found.exists()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidParameter("path", "must name a file", path) from None
    if not there:
        raise InvalidData(f"{found} does not exist.")
    return found


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")[:300]


# ---------------------------------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True, eq=False)
class TableColumn:
    """One column of an Arrow table, with its name and that of the table for errors."""

    name: str
    values: Any  # pyarrow.ChunkedArray
    source: str = "table"

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
            f"{self} holds {of}. A column must hold numbers, booleans, text, categories or dates. Spread it over several "
            f"columns, or leave it out: kinds={{{self.name!r}: 'left out'}}."
        )

    @staticmethod
    def _is_text(of: Any) -> bool:
        import pyarrow.types as kinds

        return bool(kinds.is_string(of) or kinds.is_large_string(of) or kinds.is_string_view(of))

    def numbers(self) -> NDArray[np.float64]:
        """The column as float64 (N,), NaN where it is missing; booleans are 0 and 1, text must be of numbers."""
        import pyarrow as pa

        kind = self.type_kind
        if kind == "date":
            raise InvalidData(f"{self} holds dates ({self.values.type}), but numbers are expected.")
        if kind == "category":
            return self._parsed(float, "number")
        values: NDArray[np.float64] = self.values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        infinite = np.isinf(values)
        if infinite.any():
            row = int(infinite.argmax())
            raise InvalidData(f"{self}, row {row} holds {values[row]}. Repair or drop that row, or make the value missing.")
        return values

    def days(self) -> NDArray[np.float64]:
        """Dates and times as days since 1970-01-01 (UTC), float64 (N,), NaN where they are missing; text must be ISO 8601."""
        import pyarrow as pa

        kind = self.type_kind
        if kind == "category":
            return self._parsed(_days_of_text, "date (write it as 2026-11-16)")
        if kind not in ("date", None):
            raise InvalidData(f"{self} holds {self.values.type}, but dates are expected.")
        if kind is None:
            return np.full(len(self.values), np.nan)
        counts = self._decoded().cast(pa.int64()).cast(pa.float64(), safe=False)
        days: NDArray[np.float64] = counts.to_numpy().astype(np.float64) / _MICROSECONDS_PER_DAY
        return days

    def names(self) -> tuple[NDArray[np.int64], list[str]]:
        """Numbers (N,) into a list of the distinct values as text, −1 where one is missing; 1, 1.0 and "1" are one value."""
        if self.type_kind is None:
            return np.full(len(self.values), -1), []
        encoded = self._decoded().combine_chunks().dictionary_encode()
        known: dict[str, int] = {}
        codes = [-1]
        for value in self._listed(encoded.dictionary):
            missing = value is None or value != value
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
            known = [value for value in distinct if value is not None and value == value]
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
            raise InvalidData(f"{self} holds {self.values.type} that cannot be read: {_first_line(failure)}.") from failure

    def _parsed(self, parse: Callable[[str], float], what: str) -> NDArray[np.float64]:
        """The values of a column of text."""
        codes, names = self.names()
        values = [np.nan]
        for code, name in enumerate(names):
            try:
                values.append(parse(name))
            except (ValueError, OverflowError):
                row = int((codes == code).argmax())
                raise InvalidData(
                    f"{self}, row {row} holds {name!r}, which is no {what}. Repair it, make it missing, or use the column as "
                    f"kinds={{{self.name!r}: 'category'}}."
                ) from None
            if np.isinf(values[-1]):
                raise InvalidData(f"{self}, row {int((codes == code).argmax())} holds {name!r}. Repair it, or make it missing.")
        return np.array(values)[codes + 1]


def _text_of(value: Any) -> str:
    whole = isinstance(value, float | Decimal) and value == value // 1
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


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and name.isascii()
