"""One column of a table as numbers, days or names; refusals name the column, the row and the line of a CSV file.

Rows are counted from 0, as in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.core.words import counted
from equipoise.data.clients.arrays import first_line
from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.csv_files import temporal_of_text
from equipoise.data.tables.csv_reading import places_of, spelling_of, zeros_of
from equipoise.data.tables.row_places import RowPlaces
from equipoise.data.tables.written_values import days_of_text, decimal_signs, number_of_text, reading_advice
from equipoise.errors import InvalidData

Kind = Literal["number", "boolean", "category", "date"]

_MICROSECONDS_PER_DAY = 86_400_000_000
_MISSING = ("", "#n/a", "#n/a n/a", "#na", "<na>", "n/a", "na", "nan", "nat", "none", "null")  # among dates and numbers as text
_NO_FILE = RowPlaces()
PLAIN = {"number": "1005.5", "date": "2026-11-16"}  # as a number or a date can always be written


@dataclass(frozen=True, eq=False)
class TableColumn:
    """One column of an Arrow table, with its name and that of the table for errors."""

    name: str
    values: Any  # pyarrow.ChunkedArray
    source: str = "table"
    first: int = 0  # the row of the table that the column begins with, if it is a piece of one
    spelling: Mapping[str, str] | None = None  # how numbers and dates of a CSV file were read; None: it was none
    known: bool = False  # whether a schema says its kind already, so that no message may advise `kinds`
    zeros: bool = False  # whether it would be numbers of a CSV file, did none of them begin with 0
    target: bool = False  # whether it is the target, which `kinds` does not name
    places: RowPlaces = _NO_FILE  # where its rows are for a person

    @classmethod
    def of(cls, table: Any, name: str, source: str, **more: Any) -> TableColumn:
        """The column of a name of an Arrow table or of TableFiles."""
        told: dict[str, Any] = {
            "spelling": spelling_of(table, name),
            "places": places_of(table),
            "zeros": name in zeros_of(table),
        }
        return cls(name, table.column(name), source, **told, **more)

    def place(self, where: NDArray[Any]) -> str:
        """In words, the first row of the table where something (N,) is true, and its line in a CSV file."""
        return self.places.words(self.first + int(where.argmax()))

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
        encoded = self.decoded().combine_chunks().dictionary_encode()
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
            return self._parsed(lambda text: number_of_text(text, self.spelling), "number")
        values: NDArray[np.float64] = self.values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
        infinite = np.isinf(values)
        if infinite.any():
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
            if (dates := self.as_dates()) is not self:
                return dates.days()
            return self._parsed(days_of_text, "date")
        if kind == "number" and bool(np.isnan(self.numbers()).all()):  # an empty column, as pandas reads it
            kind = None
        if kind not in ("date", None):
            raise InvalidData(f"{self} holds {self.values.type}, but dates are expected.")
        if kind is None:
            return np.full(len(self.values), np.nan)
        counts = self.decoded().cast(pa.int64()).cast(pa.float64(), safe=False)
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
        encoded = self.decoded().combine_chunks().dictionary_encode()
        known: dict[str, int] = {}
        codes = [-1]
        for value in self._listed(encoded.dictionary):
            missing = _is_missing(value)
            codes.append(-1 if missing else known.setdefault(text_of(value), len(known)))
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.array(codes)[places.astype(np.int64) + 1], list(known)

    def constant(self) -> str:
        """In words, what a column of one value or none holds; empty if its rows differ."""
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
                cure = reading_advice(what, self.name, texts, self.spelling)
                if not cure and what == "number" and (mixed := self.mixed_decimals(codes, names)):
                    raise InvalidData(f"{self} {mixed}") from None
                raise InvalidData(
                    f"{self}, {self.place(codes == code)} holds {name!r}, which is no {what} as it stands. "
                    f"{cure or self._repair(what)}"
                ) from None
            if np.isinf(values[-1]):
                raise InvalidData(f"{self}, {self.place(codes == code)} holds {name!r}. Repair it, or make it missing.")
        return np.array(values)[codes + 1]

    def mixed_decimals(self, codes: NDArray[np.int64], names: Sequence[str]) -> str:
        """What is said of text that has both signs of decimals, 1,5 and 1.5: where each is first; empty if it has one."""
        found = []
        for sign, texts in decimal_signs(names).items():
            cells = np.isin(codes, [names.index(text) for text in texts])
            first = names[codes[int(cells.argmax())]]
            found.append(f"a decimal {sign} in {counted(int(cells.sum()), 'cell')} (first in {self.place(cells)}: {first!r})")
        if len(found) < 2:
            return ""
        cure = 'Write all of them with a point, or all of them with a comma and give decimal=",".'
        if self.spelling is None:
            cure = f"Write all of them with a point, in pandas by frame[{self.name!r}].str.replace(',', '.').astype(float)."
        return f"mixes two ways to write numbers: {' and '.join(found)}. {cure}"

    def _repair(self, what: str) -> str:
        """The cure for text that no option reads as numbers or dates."""
        plain = PLAIN[what]
        if self.target:
            return f"Write it as {plain}, or drop the row. If the target is a class: target_kind='classes'."
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
