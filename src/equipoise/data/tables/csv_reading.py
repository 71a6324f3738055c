"""How and from where a CSV file was read: the metadata of its table hold it, and its schema remembers the options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.plain_text import parse_json
from equipoise.data.tables.row_places import RowPlaces
from equipoise.data.tables.written_values import decimal_of

_READ_BY = "equipoise csv"  # the key of the metadata of a table that was a CSV file
_FILES = "equipoise csv files"  # the key of their names
_ZEROS = "equipoise leading zeros"  # the key of the columns that are text because numbers in them begin with 0
_KEPT = "equipoise kept rows"  # the key of a bit for each row that a table had, 1 for those that it still has
Reading = str | tuple[str, ...] | dict[str, str]  # the value of an option: a text, several, or one for each of some columns
CSV_DEFAULTS: dict[str, Any] = {
    "delimiter": ",", "decimal": ".", "encoding": "utf-8", "missing": (), "thousands": "", "date_format": "",
}  # fmt: skip


def read_by(files: Iterable[Any], zeros: Iterable[str], *options: Any) -> dict[str, str]:
    """The metadata of a table that was CSV files, read by these options in the order of `CSV_DEFAULTS`.

    `zeros` names the columns that are text because numbers in them begin with 0.
    """
    given = (
        sorted(each) if name == "missing" else dict(each) if isinstance(each, Mapping) else each
        for name, each in zip(CSV_DEFAULTS, options, strict=True)
    )
    return {
        _READ_BY: json.dumps(dict(zip(CSV_DEFAULTS, given, strict=True))),
        _FILES: json.dumps([str(file) for file in files]),
        _ZEROS: json.dumps(list(zeros)),
    }


def _metadata_of(table: Any) -> dict[str, Any]:
    """The metadata of an Arrow table or of TableFiles."""
    import pyarrow as pa

    metadata = table.schema.metadata if isinstance(table, pa.Table) else table.metadata
    return {str(key, "utf-8", "replace") if isinstance(key, bytes) else key: value for key, value in (metadata or {}).items()}


def _options_of(table: Any) -> dict[str, Any] | None:
    """The options by which a CSV file was read, all of them; None for a table, an Arrow table or TableFiles, that was none."""
    found = _metadata_of(table)
    return dict(parse_json(found[_READ_BY])) if _READ_BY in found else None


def zeros_of(table: Any) -> list[str]:
    """The columns of a table that are text because numbers in them begin with 0, such as postcodes."""
    return list(parse_json(_metadata_of(table).get(_ZEROS, "[]")))


def kept_rows(table: Any, kept: NDArray[np.bool_]) -> Any:
    """Those rows of an Arrow table where `kept` (N,) is true; its metadata say which these were, for `places_of`."""
    return table.filter(kept).replace_schema_metadata({**_metadata_of(table), _KEPT: np.packbits(kept).tobytes()})


def places_of(table: Any) -> RowPlaces:
    """Where the rows of an Arrow table, or of TableFiles, are for a person."""
    found, options = _metadata_of(table), _options_of(table) or CSV_DEFAULTS
    bits = np.unpackbits(np.frombuffer(found[_KEPT], np.uint8)) if _KEPT in found else None
    kept = None if bits is None else np.flatnonzero(bits)
    return RowPlaces(tuple(parse_json(found.get(_FILES, "[]"))), options["delimiter"], options["encoding"], kept)


def spelling_of(table: Any, column: str = "") -> dict[str, str] | None:
    """The options by which numbers and dates in a column of a CSV file were read; None for a table that was none."""
    options = _options_of(table)
    if options is None:
        return None
    return {name: options[name] for name in ("thousands", "date_format")} | {"decimal": decimal_of(options["decimal"], column)}


def reading_of(table: Any) -> tuple[tuple[str, Reading], ...]:
    """The options by which a CSV file was read and that are not the usual ones, each with its value."""
    options = {name: tuple(value) if name == "missing" else value for name, value in (_options_of(table) or {}).items()}
    return tuple((name, value) for name, value in options.items() if value != CSV_DEFAULTS[name])
