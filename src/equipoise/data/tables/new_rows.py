"""Files of new rows, read by the schema of the table that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import PathLike
from equipoise.data.tables.csv_files import read_csv
from equipoise.data.tables.csv_reading import CSV_DEFAULTS
from equipoise.data.tables.table_files import parquet_files

if TYPE_CHECKING:
    from equipoise.data.tables.schema import Schema


def read_rows(path: PathLike, schema: Schema, reading: Mapping[str, Any], client: str = "") -> Any:
    """The rows of a CSV or Parquet file as an Arrow table; columns that were text in training are text, as 007 is no 7.

    A CSV file is read by the options `reading`, which stand for those of `data.csv`, and so is its column `client`.
    """
    return _read(path, reading, [rule.name for rule in schema.columns if _is_text(rule.categories)], client)


def read_columns(path: PathLike, reading: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Some columns of a CSV or Parquet file as an Arrow table; those of a CSV file as text, as they are written."""
    return _read(path, reading, names).select(list(names))


def _read(path: PathLike, reading: Mapping[str, Any], text: Sequence[str], client: str = "") -> Any:
    if Path(path).suffix == ".parquet" or Path(path).is_dir():
        return parquet_files(path, client).read()
    return read_csv(path, client=client, **{**CSV_DEFAULTS, **reading}, text=text)


def _is_text(categories: tuple[str, ...]) -> bool:
    """Whether categories are text that a reader could take for something else: some are neither numbers nor booleans."""

    def is_read_back(name: str) -> bool:
        try:
            return name in ("True", "False") or repr(float(name)).removesuffix(".0") == name
        except ValueError:
            return False

    return not all(map(is_read_back, categories))
