"""CSV and Parquet files as Arrow tables: whole, or a column or a piece at a time where they need not fit into memory.

Lines of a file are counted from 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.data.arrays import first_line
from equipoise.data.csv_reading import read_by
from equipoise.data.file_access import PathLike
from equipoise.data.written_values import batch_with_numbers, checked_spelling, grouped_numbers, with_numbers
from equipoise.errors import InvalidData, InvalidParameter, notify, require

CSV_NAMES = "*.csv", "*.csv.gz"
_MOST_BYTES = 2**31 - 1  # of a block of a CSV file
_BLOCK_BYTES = 1 << 24  # of a CSV file that is read in pieces
_PIECE_ROWS = 1 << 16  # of Parquet files
_COMPRESSION = 8  # guessed
_HEADER_BYTES = 1 << 16  # that are looked at for another delimiter


def require_column_name(parameter: str, name: Any) -> None:
    """Raise InvalidParameter unless a parameter is the name of a column."""
    require(isinstance(name, str), parameter, "must be the name of a column", name, 'A name is text, e.g. "hospital" or "0".')


def read_csv(
    path: PathLike, *, client: str, delimiter: str, decimal: str, encoding: str, missing: Sequence[str], thousands: str = "",
    date_format: str = "", text: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A CSV file, also compressed, as an Arrow table. Types come from all rows; empty cells and NA, NaN, null are missing.
    Columns `text` stay text. The metadata of the table hold how it was read, for `spelling_of` and `reading_of`.

    The column `client` is text as it stands, so that 007 and 7 are two clients; 7.0 is 7. "NA" is a client, with a notice.
    """
    import pyarrow as pa
    from pyarrow import csv

    require_column_name("client", client)
    file = _existing(path)
    types = dict.fromkeys((client, *text), pa.string())
    options = _csv_options(delimiter, decimal, encoding, missing, thousands, date_format, column_types=types)
    try:
        with _opened_csv(file, encoding) as stream:
            content = stream.read()
        options["read_options"].block_size = min(len(content) + 1, _MOST_BYTES)  # one, so that a type is that of all rows
        table = csv.read_csv(pa.BufferReader(content), **options)
        names = table.column_names
        if names.count(client) == 1:
            place = names.index(client)
            found = table.column(place)
            if found.null_count:  # what counts as missing differs there
                convert: dict[str, Any] = {"column_types": {client: pa.string()}, "include_columns": [client]}
                alone = _csv_options(delimiter, decimal, encoding, missing, of_clients=True, **convert)
                alone["read_options"].block_size = options["read_options"].block_size
                found = csv.read_csv(pa.BufferReader(content), **alone).column(0)
                _tell_of_na(found, path, client)
            table = table.set_column(place, client, _plain_clients(found))
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise failure if isinstance(failure, InvalidData) else _no_csv(file, encoding, delimiter, failure) from failure
    _refuse_other_delimiter(path, names, delimiter)
    _refuse_binary(path, dict(zip(names, table.schema.types, strict=True)), encoding)
    table = with_numbers(table, decimal, thousands, but=(client, *text))
    return table.replace_schema_metadata(read_by(delimiter, decimal, encoding, missing, thousands, date_format))


def temporal_of_text(texts: Any) -> Any:
    """Texts, an Arrow array without missing ones, as the dates or times that a CSV file would hold; None if one is neither."""
    import pyarrow as pa
    from pyarrow import csv
    from pyarrow.types import is_temporal

    written = pa.BufferOutputStream()
    csv.write_csv(pa.table({"text": texts}), written)
    options = _csv_options(",", ".", "utf-8", ())
    options["read_options"].block_size = written.tell() + 1  # one, so that a type is that of all texts
    options["convert_options"].null_values = []
    try:
        found = csv.read_csv(pa.BufferReader(written.getvalue()), **options).column(0)
    except pa.ArrowException:
        return None
    return found.combine_chunks() if is_temporal(found.type) and len(found) == len(texts) else None


def _opened_csv(file: Path, encoding: str) -> Any:
    """The bytes of a CSV file, whether it is compressed or not; files of other kinds are refused by how they begin."""
    import pyarrow as pa

    with file.open("rb") as opened:
        begins = opened.read(5)
    if begins.startswith(b"PK\x03\x04"):
        raise InvalidData(f"{file}: is a ZIP archive or an Excel file. Save it as CSV.")
    if begins == b"PAR1\x15":
        raise InvalidData(f"{file}: is a Parquet file. Use data.parquet.")
    if begins[:2] in (b"\xff\xfe", b"\xfe\xff") and "16" not in encoding:
        raise InvalidData(f'{file}: is text in UTF-16, not in {encoding}. Write encoding="utf-16".')
    return pa.input_stream(str(file), compression="gzip" if begins.startswith(b"\x1f\x8b") else "detect")


def _csv_options(
    delimiter: str, decimal: str, encoding: str, missing: Sequence[str], thousands: str = "", date_format: str = "", *,
    of_clients: bool = False, **convert: Any,
) -> dict[str, Any]:  # fmt: skip
    """The options of Arrow's reader of CSV files; one thread, so that errors name the line."""
    from pyarrow import csv

    require(isinstance(delimiter, str) and len(delimiter) == 1, "delimiter", "must be one character", delimiter)
    require(decimal in (".", ",") and decimal != delimiter, "decimal", 'must be "." or ",", and not the delimiter', decimal)
    good = isinstance(missing, Sequence | Set) and not isinstance(missing, str) and all(isinstance(m, str) for m in missing)
    require(good, "missing", "must be a list of texts", missing, 'E.g. missing=["?", "-99"].')
    require(isinstance(encoding, str), "encoding", "must be the name of an encoding", encoding, 'E.g. "latin-1".')
    checked_spelling(decimal, thousands, date_format)
    if date_format:
        convert["timestamp_parsers"] = [csv.ISO8601, date_format]
    try:
        "".encode(encoding)
    except LookupError:
        raise InvalidParameter("encoding", "must be an encoding that Python knows", encoding, 'E.g. "latin-1".') from None
    options = csv.ConvertOptions(strings_can_be_null=True, decimal_point=decimal, **convert)
    options.null_values = [*(each for each in options.null_values if not of_clients or each != "NA"), *missing]
    return {
        "read_options": csv.ReadOptions(use_threads=False, encoding=encoding, block_size=_BLOCK_BYTES),
        "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        "convert_options": options,
    }


def _plain_clients(values: Any) -> Any:
    """Clients of a CSV file, of which 7.0 is 7."""
    from pyarrow import compute

    return compute.replace_substring_regex(values, r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1")


def _tell_of_na(values: Any, path: PathLike, client: str, first: int = 0) -> bool:
    """Whether there is a client NA in a CSV file, or in a piece of it from row `first` on, and a notice that it is one."""
    from pyarrow import compute

    row = compute.index(values, "NA").as_py()
    if row >= 0:
        text = f'column {client!r}, row {first + row} holds "NA", which is taken for a client of this name'
        cure = 'If it is missing there, write missing=["NA"], which refuses the row.'
        notify(f"{path}: {text}. {cure}")
    return bool(row >= 0)


def _no_csv(path: Path, encoding: str, delimiter: str, failure: Exception) -> InvalidData:
    """The refusal of a file that cannot be read as CSV; a header without the delimiter is the likely cause."""
    if isinstance(failure, UnicodeError) or "UTF" in str(failure) or "codec" in str(failure):
        return _wrong_encoding(path, "it", encoding)
    if "Expected 1 columns" in str(failure):
        with _opened_csv(path, encoding) as stream:
            header = stream.read(_HEADER_BYTES).partition(b"\n")[0].decode(encoding, "replace").strip()
        _refuse_other_delimiter(path, [header], delimiter)
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
            found = parquet.read_metadata(file)
            own = found.schema.to_arrow_schema().remove_metadata()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as failure:  # names of columns are text
            reason = first_line(failure)
            raise InvalidData(f"{file}: is no complete Parquet file: {reason}. Copy or write it again.") from failure
        packed = sum(found.row_group(k).total_byte_size for k in range(found.num_row_groups))
        total += max(packed, 8 * found.num_rows * found.num_columns)
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
    whole = _existing(path)
    files = [whole]
    if whole.is_dir():  # names that begin with "." or "_" are those of tools
        found = (file for pattern in patterns for file in whole.rglob(pattern))
        files = sorted(file for file in found if not any(part[0] in "._" for part in file.relative_to(whole).parts))
    if not files:
        raise InvalidData(f"{path}: the folder holds no file {patterns[0]}.")
    return files


def _existing(path: PathLike) -> Path:
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
    """A Parquet file, or all those in a folder; folders such as hospital=3/ are a column, as text if it is `client`."""
    import pyarrow as pa
    from pyarrow import dataset

    def refuse(failure: Exception) -> InvalidData:
        return InvalidData(f"{path}: cannot be read as Parquet: {first_line(failure)}.")

    require_column_name("client", client)
    files = files_of(path, "*.parquet")
    size, schema = _parquet_schema(path, files)
    # Without buffers of whole files, which need not fit into memory.
    checked = dataset.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=False, use_buffered_stream=True)
    top = _existing(path)
    options = {
        "format": dataset.ParquetFileFormat(default_fragment_scan_options=checked),
        "partition_base_dir": str(top if top.is_dir() else top.parent),
    }

    def discover(folders: Any = None) -> Any:
        by_name = dataset.HivePartitioning.discover(infer_dictionary=True, schema=folders)
        return dataset.dataset([str(file) for file in files], partitioning=by_name, **options)

    try:
        opened = discover()
        known = set(schema.names)  # Arrow makes the list at each call
        by_folder = [field for field in opened.schema if field.name not in known]
        if client in (field.name for field in by_folder):
            text = pa.dictionary(pa.int32(), pa.string())
            by_folder = [field.with_type(text) if field.name == client else field for field in by_folder]
            opened = discover(pa.schema(by_folder))
        whole = pa.schema([*schema, *by_folder])
        opened = dataset.dataset([str(file) for file in files], whole, partitioning=opened.partitioning, **options)
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


def csv_files(
    path: PathLike, *, client: str, delimiter: str, decimal: str, encoding: str, missing: Sequence[str], thousands: str = "",
    date_format: str = "",
) -> TableFiles:  # fmt: skip
    """A CSV file, or all those in a folder. Types come from all rows: they are read once, and again from a row that differs.

    The column `client` is read as by `read_csv` where it is read alone.
    """
    import pyarrow as pa
    from pyarrow import csv

    require_column_name("client", client)
    files = files_of(path, *CSV_NAMES)
    types: dict[str, Any] = {client: pa.string()}
    grouped: dict[str, Any] = {}  # the types of columns of numbers with separators of thousands

    @contextmanager
    def opened(file: Path, names: Sequence[str] | None = None) -> Iterator[Any]:
        convert: dict[str, Any] = {"column_types": types, **({"include_columns": list(names)} if names is not None else {})}
        alone = names is not None and list(names) == [client]
        options = _csv_options(delimiter, decimal, encoding, missing, thousands, date_format, of_clients=alone, **convert)
        try:
            with _opened_csv(file, encoding) as stream, csv.open_csv(stream, **options) as reader:
                yield reader
        except (pa.ArrowException, OSError, UnicodeError) as failure:
            raise _no_csv(file, encoding, delimiter, failure) from failure

    def batches(names: Sequence[str] | None) -> Iterator[Any]:
        alone, told, rows = names is not None and list(names) == [client], False, 0
        for file in files:
            with opened(file, names) as reader:
                for batch in reader:
                    if alone:
                        told = told or _tell_of_na(batch.column(0), path, client, rows)
                        batch = pa.record_batch([_plain_clients(batch.column(0))], names=[client])
                    rows += batch.num_rows
                    yield batch_with_numbers(batch, grouped, decimal, thousands)

    with opened(files[0]) as reader:
        found = reader.schema
    types.clear()
    types |= {field.name: field.type for field in found}
    names = list(types)
    _refuse_other_delimiter(files[0], names, delimiter)
    _refuse_binary(files[0], types, encoding)
    for file in files[1:]:
        with opened(file) as reader:
            others = reader.schema.names
        if others != names:
            raise InvalidData(f"{file}: its columns are not those of {files[0]}. Give all files one header.")
    _find_types(types, lambda: batches(None))
    if thousands:
        texts = [name for name, of in types.items() if of == pa.string() and name != client]
        grouped |= grouped_numbers(batches(None), texts, decimal, thousands)
    size = sum(file.stat().st_size * (_COMPRESSION if file.suffix == ".gz" else 1) for file in files)
    metadata = read_by(delimiter, decimal, encoding, missing, thousands, date_format)
    return TableFiles(path, names, size, batches, client, metadata)


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
