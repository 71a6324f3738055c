"""Files of tables, and Parquet files as Arrow tables: whole, or a column or a piece at a time where memory is too small."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.core.plain_text import open_plain
from equipoise.core.unpacking import claimed_bytes, refuse_bomb
from equipoise.data.arrays import first_line
from equipoise.data.file_access import PathLike
from equipoise.errors import InvalidData, InvalidParameter, notify, require

CSV_NAMES = "*.csv", "*.csv.gz"
_TEXTS = "string", "large_string", "binary", "large_binary"
_PIECE_ROWS = 1 << 16  # of Parquet files


def require_column_name(parameter: str, name: Any) -> None:
    """Raise InvalidParameter unless a parameter is the name of a column."""
    require(isinstance(name, str), parameter, "must be the name of a column", name, 'A name is text, e.g. "hospital" or "0".')


def _parquet_schema(path: PathLike, files: list[Path]) -> tuple[int, Any]:
    """About how many bytes Parquet files take in memory, and the Arrow schema of them all; files that were cut are refused.

    A type that holds the values of every file is found. A column that a file lacks is missing there, and a notice says so.
    """
    import pyarrow as pa
    from pyarrow import parquet

    total, whole = 0, pa.schema([])
    first: dict[str, Path] = {}  # the first file that has a column
    lacking: dict[str, Path] = {}
    for file in files:  # the end of a file says where its columns are, so one that was cut is found here
        try:
            with open_plain(file) as opened:
                found = parquet.read_metadata(opened)
            own = found.schema.to_arrow_schema().remove_metadata()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as failure:  # names of columns are text
            reason = first_line(failure)
            raise InvalidData(f"{file}: is no complete Parquet file: {reason}. Copy or write it again.") from failure
        total += claimed_bytes(found)
        if own == whole:
            continue
        names = list(own.names)  # Arrow makes it at each call
        there = set(names)
        lacking = {name: file for name in whole.names if name not in there} | lacking
        lacking |= {name: files[0] for name in names if file != files[0] and name not in first}
        try:
            whole = pa.unify_schemas([whole, own], promote_options="permissive")
        except (pa.ArrowException, ValueError, TypeError) as failure:
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise InvalidData(f"{file}: two columns are called {twice[0]!r}. Rename one of them.") from failure
            odd = next(name for name in names if name in first and not _fits(own.field(name), whole.field(name)))
            raise InvalidData(
                f"{file}: column {odd!r} holds {own.field(odd).type}, but {whole.field(odd).type} in {first[odd]}. Give it one "
                "type in all files."
            ) from failure
        first |= {name: file for name in names if name not in first}
    for name, file in lacking.items():
        text = f"column {name!r} is there in {first[name]}, but not in {file}, whose rows count as missing"
        notify(f"{path}: {text}. Leave it out: kinds={{{name!r}: 'left out'}}.")
    return total, whole


def _fits(one: Any, other: Any) -> bool:
    """Whether there is a type that holds the values of two Arrow fields of one name."""
    import pyarrow as pa

    try:
        pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive")
    except (pa.ArrowException, ValueError, TypeError):
        return False
    return True


def files_of(path: PathLike, *patterns: str) -> list[Path]:
    """The file of this name, or all files of a folder, in order, whose names fit."""
    whole = existing_path(path)
    files = [whole]
    if whole.is_dir():  # names that begin with "." or "_" are those of tools
        found = (file for pattern in patterns for file in whole.rglob(pattern))
        files = sorted(file for file in found if not any(part[0] in "._" for part in file.relative_to(whole).parts))
    if not files:
        raise InvalidData(f"{path}: the folder holds no file {patterns[0]}.")
    return files


def existing_path(path: PathLike) -> Path:
    """The path of a file or folder that is there, on this computer; others are refused."""
    if isinstance(path, str) and "://" in path:
        raise InvalidParameter("path", "must name a file of this computer", path, "Download it first.")
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
    apart: str | None = None  # a column that must be read alone
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
        if self.apart in columns and len(columns) > 1:
            table = table.set_column(columns.index(self.apart), self.apart, self.column(self.apart))
        return table if self.metadata is None else table.replace_schema_metadata(self.metadata)


def parquet_files(path: PathLike, client: str) -> TableFiles:
    """A Parquet file, or all those in a folder; folders such as hospital=3/ are a column.

    It is text if it is `client`, or if a value begins with 0, as in region=01/.
    """
    import pyarrow as pa
    from pyarrow import compute, dataset

    def refuse(failure: Exception) -> InvalidData:
        return InvalidData(f"{path}: cannot be read as Parquet: {first_line(failure)}.")

    require_column_name("client", client)
    files = files_of(path, "*.parquet")
    size, schema = _parquet_schema(path, files)
    packed = sum(file.stat().st_size for file in files)
    refuse_bomb(path, size, packed)
    texts = {field.name: str(field.type).removeprefix("large_") for field in schema if str(field.type) in _TEXTS}
    # Without buffers of whole files, which need not fit into memory.
    checked = dataset.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=False, use_buffered_stream=True)
    top = existing_path(path)
    folder = top if top.is_dir() else top.parent
    options = {
        "format": dataset.ParquetFileFormat(
            dataset.ParquetReadOptions(dictionary_columns=set(texts)), default_fragment_scan_options=checked
        ),
        "partition_base_dir": str(folder),
    }

    def discover(folders: Any = None) -> Any:
        by_name = dataset.HivePartitioning.discover(infer_dictionary=True, schema=folders)
        return dataset.dataset([str(file) for file in files], partitioning=by_name, **options)

    try:
        opened = discover()
        known = set(schema.names)  # Arrow makes the list at each call
        by_folder = [field for field in opened.schema if field.name not in known]
        as_text = {name for file in files for name, _ in re.findall(r"([^/\\]+)=(0\d)", str(file.parent.relative_to(folder)))}
        as_text.add(client)
        if as_text & {field.name for field in by_folder}:
            text = pa.dictionary(pa.int32(), pa.string())
            by_folder = [field.with_type(text) if field.name in as_text else field for field in by_folder]
            opened = discover(pa.schema(by_folder))
        types = {name: pa.dictionary(pa.int32(), pa.type_for_alias(of)) for name, of in texts.items()}
        whole = pa.schema([*(field.with_type(types.get(field.name, field.type)) for field in schema), *by_folder])
        opened = dataset.dataset([str(file) for file in files], whole, partitioning=opened.partitioning, **options)
    except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
        raise refuse(failure) from failure

    def batches(names: Sequence[str] | None) -> Iterator[Any]:
        unpacked = 0
        try:
            # Few batches are read ahead, which would be held in memory.
            for batch in opened.to_batches(
                columns=None if names is None else list(names), batch_size=_PIECE_ROWS, batch_readahead=2, fragment_readahead=1
            ):
                batch.validate(full=True)  # else text that is none is found anywhere
                for place, name in enumerate(batch.schema.names):
                    if name in texts:  # which may be long, and there once for all rows
                        column = batch.column(place)
                        unpacked += compute.sum(compute.binary_length(column.dictionary).take(column.indices)).as_py() or 0
                        refuse_bomb(path, unpacked, packed)
                        batch = batch.set_column(place, name, column.cast(schema.field(name).type))
                yield batch
        except (pa.ArrowException, OSError, ValueError, TypeError) as failure:
            raise refuse(failure) from failure

    return TableFiles(path, list(opened.schema.names), size, batches)
