"""The options by which a CSV file was read, which the metadata of its table hold and its schema remembers."""

from __future__ import annotations

import json
from typing import Any

_READ_BY = "equipoise csv"  # the key of the metadata of a table that was a CSV file
CSV_DEFAULTS: dict[str, Any] = {
    "delimiter": ",", "decimal": ".", "encoding": "utf-8", "missing": (), "thousands": "", "date_format": "",
}  # fmt: skip


def read_by(*options: Any) -> dict[str, str]:
    """The metadata of a table that was a CSV file, read by these options in the order of `CSV_DEFAULTS`."""
    given = (sorted(each) if name == "missing" else each for name, each in zip(CSV_DEFAULTS, options, strict=True))
    return {_READ_BY: json.dumps(dict(zip(CSV_DEFAULTS, given, strict=True)))}


def _options_of(table: Any) -> dict[str, Any] | None:
    """The options by which a CSV file was read, all of them; None for a table, an Arrow table or TableFiles, that was none."""
    import pyarrow as pa

    metadata = table.schema.metadata if isinstance(table, pa.Table) else table.metadata
    found = {str(key, "utf-8") if isinstance(key, bytes) else key: value for key, value in (metadata or {}).items()}
    return dict(json.loads(found[_READ_BY])) if _READ_BY in found else None


def spelling_of(table: Any) -> dict[str, str] | None:
    """The options by which numbers and dates of a CSV file were read; None for a table that was none."""
    options = _options_of(table)
    return None if options is None else {name: options[name] for name in ("decimal", "thousands", "date_format")}


def reading_of(table: Any) -> tuple[tuple[str, str | tuple[str, ...]], ...]:
    """The options by which a CSV file was read and that are not the usual ones, each with its value."""
    options = {name: tuple(value) if name == "missing" else value for name, value in (_options_of(table) or {}).items()}
    return tuple((name, value) for name, value in options.items() if value != CSV_DEFAULTS[name])
