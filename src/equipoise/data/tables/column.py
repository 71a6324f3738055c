"""One column of a table as numbers, days, names or codes; refusals name the row. How the table was read is in its metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.core.plain_text import parse_json
from equipoise.data.clients.arrays import first_line
from equipoise.data.clients.client_set import prefix
from equipoise.errors import InvalidData

Kind = Literal["number", "boolean", "category", "date"]
Reading = str | tuple[str, ...]  # the value of an option
CSV_DEFAULTS: dict[str, Any] = {
    "delimiter": ",", "decimal": ".", "encoding": "utf-8", "missing": (), "thousands": "", "date_format": "",
}  # fmt: skip

_MICROSECONDS_PER_DAY = 86_400_000_000
_MISSING = ("", "#n/a", "#n/a n/a", "#na", "<na>", "n/a", "na", "nan", "nat", "none", "null")  # among dates and numbers as text
_READ_BY, _KEPT = "equipoise csv", "equipoise kept rows"  # keys of metadata
_MINUS = "\u2212"  # the minus sign, which is no hyphen
_SPACES = "\u00a0\u202f"  # no-break spaces


def metadata_of(table: Any) -> dict[str, Any]:
    """The metadata of an Arrow table or of TableFiles."""
    import pyarrow as pa

    found = table.schema.metadata if isinstance(table, pa.Table) else table.metadata
    return {str(key, "utf-8", "replace") if isinstance(key, bytes) else key: value for key, value in (found or {}).items()}


def read_by(options: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a table that was CSV files, read by these options."""
    return {_READ_BY: json.dumps(dict(options))}


def reading_of(table: Any) -> tuple[tuple[str, Reading], ...]:
    """The options by which a CSV file was read and that are not the usual ones, each with its value."""
    found = parse_json(metadata_of(table).get(_READ_BY, "{}"))
    options = {name: tuple(value) if name == "missing" else value for name, value in found.items()}
    return tuple((name, value) for name, value in options.items() if value != CSV_DEFAULTS[name])


def kept_rows(table: Any, kept: NDArray[np.bool_]) -> Any:
    """Those rows of an Arrow table where `kept` (N,) is true; its metadata say which these were."""
    return table.filter(kept).replace_schema_metadata({**metadata_of(table), _KEPT: np.flatnonzero(kept).tobytes()})


def rows_before(table: Any) -> NDArray[np.int64] | None:
    """The rows of a table as it was before some were left out; None if none were."""
    found = metadata_of(table)
    return np.frombuffer(found[_KEPT], np.int64) if _KEPT in found else None


@dataclass(frozen=True, eq=False)
class TableColumn:
    """One column of an Arrow table, with its name and that of the table for errors."""

    name: str
    values: Any  # pyarrow.ChunkedArray
    source: str = "table"
    first: int = 0  # the row of the table that the column begins with, if it is a piece of one
    reading: Mapping[str, Any] | None = None  # the options by which a CSV file was read
    kept: NDArray[np.int64] | None = None  # its rows, as the table had them before some were left out

    @classmethod
    def of(cls, table: Any, name: str, source: str, first: int = 0) -> TableColumn:
        """The column of a name of an Arrow table or of TableFiles."""
        return cls(name, table.column(name), source, first, dict(reading_of(table)), rows_before(table))

    def row(self, row: int) -> int:
        """A row of the column as the whole table counts it, from 0."""
        return self.first + row if self.kept is None else int(self.kept[row])

    def place(self, where: NDArray[Any]) -> str:
        """The first row of the table where something (N,) is true."""
        return f"row {self.row(int(where.argmax()))}"

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
        if _is_text(of):
            return "category"
        if kinds.is_temporal(of) and not kinds.is_interval(of):
            return "date"
        raise InvalidData(
            f"{self} holds {of}, but must hold numbers, booleans, text, categories or dates. Spread it over several columns, "
            f"or leave it out: kinds={{{self.name!r}: 'left out'}}."
        )

    @property
    def is_text(self) -> bool:
        """Whether the column holds text, not made a category by its owner."""
        return _is_text(self.values.type)

    def as_dates(self) -> TableColumn:
        """The column with dates and times for its text, if all of it is written as in a CSV file; else the column itself.

        Blanks, NA, NaT, null and the like are missing.
        """
        import pyarrow as pa
        from pyarrow import compute

        if not self.is_text or self.values.null_count == len(self.values):
            return self
        encoded = self.decoded().combine_chunks().dictionary_encode()
        texts = encoded.dictionary
        missing = compute.is_in(compute.utf8_lower(compute.utf8_trim_whitespace(texts)), pa.array(_MISSING, texts.type))
        known = texts.filter(compute.invert(missing))
        if not len(known) or not known[0].as_py()[:1].isdecimal() or (found := _temporal_of_text(known)) is None:
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
            return self._parsed(lambda text: number_of_text(text, self.reading or {}), "number")
        values: NDArray[np.float64] = self.values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        if (infinite := np.isinf(values)).any():
            found = f"{self.place(infinite)} holds {values[infinite][0]}"
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
            dates = self.as_dates()
            return self._parsed(_days_of_text, "date") if dates is self else dates.days()
        if kind is None or (kind == "number" and bool(np.isnan(self.numbers()).all())):  # an empty column, as pandas reads it
            return np.full(len(self.values), np.nan)
        if kind != "date":
            raise InvalidData(f"{self} holds {self.values.type}, but dates are expected.")
        counts = self.decoded().cast(pa.int64()).cast(pa.float64(), safe=False)
        days: NDArray[np.float64] = counts.to_numpy().astype(np.float64) / _MICROSECONDS_PER_DAY
        return days

    def numbers_of_kind(self, kind: Kind) -> NDArray[np.float64]:
        """Numbers, dates as days, or booleans as 0 and 1, (N,), NaN where they are missing; other numbers are no booleans."""
        values = self.days() if kind == "date" else self.numbers()
        if kind == "boolean" and (odd := ~np.isnan(values) & (values != 0) & (values != 1)).any():
            raise InvalidData(f"{self}, {self.place(odd)} holds {values[odd][0]:g}, but must be true or false, or 0 or 1.")
        return values

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
        encoded = self.decoded().combine_chunks().dictionary_encode()
        known: dict[str, int] = {}
        values = self._listed(encoded.dictionary)
        codes = [-1, *(-1 if _is_missing(each) else known.setdefault(text_of(each), len(known)) for each in values)]
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.array(codes)[places.astype(np.int64) + 1], list(known)

    def codes(self) -> NDArray[np.int64]:
        """Numbers (N,) that are equal where values are, −1 where one is missing; numbers are not made text."""
        import pyarrow as pa

        if self.type_kind in (None, "category"):
            return self.names()[0]
        if pa.types.is_floating(self.values.type):
            numbers = self.values.cast(pa.float64()).to_numpy() + 0.0  # of which -0.0 is 0.0
            return np.where(np.isnan(numbers), -1, np.unique(numbers, return_inverse=True)[1])
        indices = self.decoded().combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.where(self.missing(), -1, indices.astype(np.int64))

    def constant(self) -> str:
        """What a column of one value or none holds; empty if its rows differ."""
        if self.type_kind is None:
            return "all missing"
        values, known = self.decoded(), []
        for part in (values[:100], values):  # the first rows mostly differ, which saves looking at all
            distinct = self._listed(part.unique()[:3])
            known = [value for value in distinct if not _is_missing(value)]
            if known and len(distinct) > 1:
                return ""
        return f"always {text_of(known[0])!r}" if known else "all missing"

    def decoded(self) -> Any:
        """The values without a dictionary, text in one type, dates and times in microseconds."""
        import pyarrow as pa
        import pyarrow.types as kinds

        dictionary = kinds.is_dictionary(self.values.type)
        of = wanted = self.values.type.value_type if dictionary else self.values.type
        if _is_text(of):
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
                values.append(np.inf)
            if np.isinf(values[-1]):
                raise InvalidData(
                    f"{self}, {self.place(codes == code)} holds {name!r}, which is no {what}. Repair it, make it missing, or "
                    "name how it is written: decimal, thousands or date_format of data.csv."
                )
        return np.array(values)[codes + 1]


def number_of_text(text: str, reading: Mapping[str, Any]) -> float:
    """The number that a text writes, by the options of its CSV file if it has one; ValueError if it is none.

    True and false are 1 and 0. The minus sign of typesetters is a minus. ASCII digits alone are numbers.
    """
    plain = text.strip().replace(_MINUS, "-")
    if plain.lower() in ("true", "false"):
        return float(plain.lower() == "true")
    decimal, thousands = reading.get("decimal", "."), reading.get("thousands", "")
    if thousands.isspace():
        plain, thousands = plain.translate(dict.fromkeys(map(ord, _SPACES), " ")), " "
    pattern = rf"{number_pattern(decimal, thousands)}(?:[eE][-+]?\d+)?"
    if (decimal, thousands) != (".", "") and re.fullmatch(pattern, plain) is None:
        raise ValueError(f"{text!r} is no number")
    if "_" in plain or not plain.isascii():
        raise ValueError(f"{text!r} is no number")
    return float(plain.replace(thousands, "").replace(decimal, "."))


def number_pattern(decimal: str, thousands: str) -> str:
    """The regular expression of a number in groups of three digits, or in one."""
    grouped = rf"\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+|" if thousands else ""
    return rf"[-+]?(?:(?:{grouped}\d+)(?:{re.escape(decimal)}\d*)?|{re.escape(decimal)}\d+)"


def _days_of_text(text: str) -> float:
    """The days since 1970-01-01 (UTC) of a date or time in ISO 8601; ValueError if it is none."""
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86_400


def _temporal_of_text(texts: Any) -> Any:
    """Texts, an Arrow array without missing ones, as the dates or times that a CSV file would hold; None if one is neither."""
    import pyarrow as pa
    from pyarrow import csv
    from pyarrow.types import is_temporal

    written = pa.BufferOutputStream()
    csv.write_csv(pa.table({"text": texts}), written)
    options = {
        "read_options": csv.ReadOptions(use_threads=False, block_size=written.tell() + 1),  # a type is that of all texts
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "convert_options": csv.ConvertOptions(null_values=[], strings_can_be_null=True),
    }
    try:
        found = csv.read_csv(pa.BufferReader(written.getvalue()), **options).column(0)
    except pa.ArrowException:
        return None
    return found.combine_chunks() if is_temporal(found.type) and len(found) == len(texts) else None


def _is_text(of: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_string(of) or kinds.is_large_string(of) or kinds.is_string_view(of))


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN or blank text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def text_of(value: Any) -> str:
    """A value as the name of a client, category or class; 7.0 is 7."""
    whole = isinstance(value, float | Decimal | np.floating) and value == value // 1
    return str(int(value)) if whole else str(value)


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
