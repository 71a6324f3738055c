"""CSV and Parquet files as Arrow tables: whole, or a column or a piece at a time where they need not fit into memory.

Lines of a file are counted from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.data.arrays import first_line
from equipoise.data.file_access import PathLike
from equipoise.errors import InvalidData, InvalidParameter, require

CSV_NAMES = "*.csv", "*.csv.gz"
_MOST_BYTES = 2**31 - 1  # of a block of a CSV file
_BLOCK_BYTES = 1 << 24  # of a CSV file that is read in pieces
_PIECE_ROWS = 1 << 16  # of Parquet files
_COMPRESSION = 8  # guessed


def read_csv(path: PathLike, *, delimiter: str, encoding: str, missing: Sequence[str]) -> Any:
    """A CSV file, also compressed, as an Arrow table. Types come from all rows; empty cells and NA, NaN, null are missing."""
    import pyarrow as pa
    from pyarrow import csv

    file = _existing(path)
    options = _csv_options(delimiter, encoding, missing)
    try:
        with pa.input_stream(str(file)) as stream:
            content = stream.read()
        options["read_options"].block_size = min(len(content) + 1, _MOST_BYTES)  # one, so that a type is that of all rows
        table = csv.read_csv(pa.BufferReader(content), **options)
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise _no_csv(path, encoding, failure) from failure
    _refuse_other_delimiter(path, names, delimiter)
    _refuse_binary(path, dict(zip(names, table.schema.types, strict=True)), encoding)
    return table


def _csv_options(delimiter: str, encoding: str, missing: Sequence[str], **convert: Any) -> dict[str, Any]:
    """The options of Arrow's reader of CSV files; one thread, so that errors name the line."""
    from pyarrow import csv

    require(isinstance(delimiter, str) and len(delimiter) == 1, "delimiter", "must be one character", delimiter)
    require(not isinstance(missing, str), "missing", "must be a list of texts", missing)
    try:
        "".encode(encoding)
    except LookupError:
        raise InvalidParameter("encoding", "must be an encoding that Python knows", encoding, 'E.g. "latin-1".') from None
    options = csv.ConvertOptions(strings_can_be_null=True, **convert)
    options.null_values = [*options.null_values, *missing]
    return {
        "read_options": csv.ReadOptions(use_threads=False, encoding=encoding, block_size=_BLOCK_BYTES),
        "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        "convert_options": options,
    }


def _no_csv(path: PathLike, encoding: str, failure: Exception) -> InvalidData:
    """The refusal of a file that cannot be read as CSV."""
    if isinstance(failure, UnicodeError) or "UTF" in str(failure) or "codec" in str(failure):
        return _wrong_encoding(path, "it", encoding)
    reason = first_line(failure).replace("CSV parse error: Row #", "line ")
    return InvalidData(f"{path}: cannot be read as CSV: {reason}.")


def _refuse_other_delimiter(path: PathLike, names: list[str], delimiter: str) -> None:
    other = [each for each in (";", "\t", "|", ",") if each != delimiter and each in names[0]]
    if len(names) == 1 and other:
        raise InvalidData(f"{path}: has the single column {names[0]!r}. Did you mean delimiter={other[0]!r}?")


def _refuse_binary(path: PathLike, types: dict[str, Any], encoding: str) -> None:
    from pyarrow.types import is_binary

    for name in (name for name, kind in types.items() if is_binary(kind)):
        raise _wrong_encoding(path, f"column {name!r}", encoding)


def _wrong_encoding(path: PathLike, what: str, encoding: str) -> InvalidData:
    return InvalidData(f'{path}: {what} is not text in {encoding}. Name its encoding, e.g. encoding="latin-1".')


def read_parquet(path: PathLike) -> Any:
    """A Parquet file, or all those in a folder, as an Arrow table; folders such as hospital=3/ are a column."""
    import pyarrow as pa
    from pyarrow import parquet

    _parquet_bytes(path)
    try:
        return parquet.read_table(_existing(path), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
        raise InvalidData(f"{path}: cannot be read as Parquet: {first_line(failure)}.") from failure


def _parquet_bytes(path: PathLike) -> int:
    """About how many bytes a Parquet file, or all those in a folder, take in memory; files that were cut are refused."""
    import pyarrow as pa
    from pyarrow import parquet

    total = 0
    for file in files_of(path, "*.parquet"):  # the end of a file says where its columns are, so one that was cut is found here
        try:
            found = parquet.read_metadata(file)
        except (pa.ArrowException, OSError) as failure:
            reason = first_line(failure)
            raise InvalidData(f"{file}: is no complete Parquet file: {reason}. Copy or write it again.") from failure
        packed = sum(found.row_group(k).total_byte_size for k in range(found.num_row_groups))
        total += max(packed, 8 * found.num_rows * found.num_columns)
    return total


def files_of(path: PathLike, *patterns: str) -> list[Path]:
    """The file of this name, or all files of a folder, in order, whose names fit."""
    whole = _existing(path)
    files = sorted(file for pattern in patterns for file in whole.rglob(pattern)) if whole.is_dir() else [whole]
    if not files:
        raise InvalidData(f"{path}: the folder holds no file {patterns[0]}.")
    return files


def _existing(path: PathLike) -> Path:
    try:
        found = Path(path).expanduser()
        there = found.exists()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidParameter("path", "must name a file", path) from None
    if not there:
        raise InvalidData(f"{found} does not exist.")
    return found


@dataclass(frozen=True, eq=False)
class TableFiles:
    """A table in files, of which a column or a piece is in memory at a time; it offers what `Schema.fit` asks of a table."""

    path: PathLike
    column_names: list[str]
    bytes: int  # about what the whole table takes in memory
    batches: Callable[[Sequence[str] | None], Iterator[Any]]  # of some columns, or of all: Arrow's record batches in order

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

        return pa.Table.from_batches(list(self.batches(names)))


def parquet_files(path: PathLike) -> TableFiles:
    """A Parquet file, or all those in a folder; folders such as hospital=3/ are a column."""
    import pyarrow as pa
    from pyarrow import dataset

    def refuse(failure: Exception) -> InvalidData:
        return InvalidData(f"{path}: cannot be read as Parquet: {first_line(failure)}.")

    size = _parquet_bytes(path)
    # Without buffers of whole files, which need not fit into memory.
    checked = dataset.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=False, use_buffered_stream=True)
    folders = dataset.HivePartitioning.discover(infer_dictionary=True)
    try:
        opened = dataset.dataset(
            str(_existing(path)), format=dataset.ParquetFileFormat(default_fragment_scan_options=checked), partitioning=folders
        )
    except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
        raise refuse(failure) from failure

    def batches(names: Sequence[str] | None) -> Iterator[Any]:
        try:
            # Few batches are read ahead, which would be held in memory.
            yield from opened.to_batches(
                columns=None if names is None else list(names), batch_size=_PIECE_ROWS, batch_readahead=2, fragment_readahead=1
            )
        except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
            raise refuse(failure) from failure

    return TableFiles(path, list(opened.schema.names), size, batches)


def csv_files(path: PathLike, *, delimiter: str, encoding: str, missing: Sequence[str]) -> TableFiles:
    """A CSV file, or all those in a folder. Types come from all rows: they are read once, and again from a row that differs."""
    import pyarrow as pa
    from pyarrow import csv

    files = files_of(path, *CSV_NAMES)
    types: dict[str, Any] = {}

    @contextmanager
    def opened(file: Path, names: Sequence[str] | None = None) -> Iterator[Any]:
        convert = {"column_types": types, **({"include_columns": list(names)} if names is not None else {})}
        options = _csv_options(delimiter, encoding, missing, **convert)
        try:
            with csv.open_csv(file, **options) as reader:
                yield reader
        except (pa.ArrowException, OSError, UnicodeError) as failure:
            raise _no_csv(file, encoding, failure) from failure

    def batches(names: Sequence[str] | None) -> Iterator[Any]:
        for file in files:
            with opened(file, names) as reader:
                yield from reader

    with opened(files[0]) as reader:
        types |= {field.name: field.type for field in reader.schema}
    names = list(types)
    _refuse_other_delimiter(files[0], names, delimiter)
    _refuse_binary(files[0], types, encoding)
    for file in files[1:]:
        with opened(file) as reader:
            found = reader.schema.names
        if found != names:
            raise InvalidData(f"{file}: its columns are not those of {files[0]}. Give all files one header.")
    _find_types(types, lambda: batches(None))
    size = sum(file.stat().st_size * (_COMPRESSION if file.suffix == ".gz" else 1) for file in files)
    return TableFiles(path, names, size, batches)


def _find_types(types: dict[str, Any], batches: Callable[[], Iterator[Any]]) -> None:
    """Change the types of columns until all rows have them, in the order in which Arrow tries types."""
    import pyarrow as pa

    order = [
        pa.null(), pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"), pa.float64(),
        pa.string(),
    ]  # fmt: skip
    names = list(types)
    while True:
        try:
            for _ in batches():
                pass
            return
        except InvalidData as failure:
            found = re.search(r"In CSV column #(\d+): (Row #\d+: )?CSV conversion error to", str(failure.__cause__))
            if found is None or types[names[int(found[1])]] not in order[:-1]:
                raise
            name = names[int(found[1])]
            types[name] = order[order.index(types[name]) + 1]
