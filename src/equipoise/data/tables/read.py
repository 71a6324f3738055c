"""CSV and Parquet files as Arrow tables: whole, or a column or a piece at a time where memory is short."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from equipoise.core.files import PathLike
from equipoise.core.plain_text import open_plain
from equipoise.core.unpacking import Unpacked, claimed_bytes, refuse_bomb
from equipoise.data.clients.arrays import first_line
from equipoise.data.tables.arrow import TableFiles, require_column_name
from equipoise.data.tables.column import CSV_DEFAULTS, number_pattern, read_by
from equipoise.errors import FileGuard, InvalidData, InvalidParameter, notify, require

CSV_NAMES = "*.csv", "*.csv.gz"
_TEXTS = "string", "large_string", "binary", "large_binary"
_PIECE_ROWS = 1 << 16  # of Parquet files
_BLOCK_BYTES = 1 << 24  # of CSV files that are read in pieces
_MOST_BYTES = 2**31 - 1  # of a block of a CSV file
_PACKED = ".gz", ".bz2", ".zst", ".lz4"


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


def _files_of(path: PathLike, *patterns: str) -> list[Path]:
    """The file of this name, or all files of a folder, in order, whose names fit."""
    whole = existing_path(path)
    files = [whole]
    if whole.is_dir():  # names that begin with "." or "_" are those of tools
        found = (file for pattern in patterns for file in whole.rglob(pattern))
        files = sorted(file for file in found if not any(part[0] in "._" for part in file.relative_to(whole).parts))
    if not files:
        raise InvalidData(f"{path}: the folder holds no file {patterns[0]}.")
    return files


# ------------------------------------------------------------------------------------------------------------------------ CSV


def read_csv(path: PathLike, *, client: str, text: Sequence[str] = (), **options: Any) -> Any:
    """A CSV file as an Arrow table, read at once; options and the column `client` as in `csv_files`."""
    require_column_name("client", client)
    return csv_files(path, client=client, text=text, block=_MOST_BYTES, **options).read()


def csv_files(path: PathLike, *, client: str, text: Sequence[str] = (), block: int | None = None, **given: Any) -> TableFiles:
    """A CSV file, also compressed, or all those in a folder; options are those of `CSV_DEFAULTS`.

    Types come from all rows: files are read once, and again from a row that differs. Empty cells and NA, NaN, null are missing.
    Columns `text` stay text. The column `client` is text as it stands, so that 007 and 7 are two clients; 7.0 is 7, and where
    it is read alone NA is a client.
    """
    import pyarrow as pa
    from pyarrow import csv

    require_column_name("client", client)
    reading = {**CSV_DEFAULTS, **given}
    checked = _checked_options(**reading)
    decimal, thousands, encoding, delimiter = (reading[key] for key in ("decimal", "thousands", "encoding", "delimiter"))
    files = _files_of(path, *CSV_NAMES)
    types: dict[str, Any] = dict.fromkeys((client, *text), pa.string())
    grouped: dict[str, Any] = {}  # the types of columns of numbers with separators of thousands
    sizes = [_size(file) for file in files]
    largest = max(sizes)
    together = min(largest + 1, block or _BLOCK_BYTES)

    @contextmanager
    def opened(file: Path, names: Sequence[str] | None = None, *, untyped: bool = False) -> Iterator[Any]:
        convert = csv.ConvertOptions(strings_can_be_null=True, decimal_point=decimal, column_types={} if untyped else types)
        alone = names is not None and list(names) == [client]
        convert.null_values = [*(each for each in convert.null_values if not alone or each != "NA"), *checked["missing"]]
        if names is not None:
            convert.include_columns = list(names)
        if reading["date_format"]:
            convert.timestamp_parsers = [csv.ISO8601, reading["date_format"]]
        options = {
            "read_options": csv.ReadOptions(use_threads=False, encoding=encoding, block_size=together),
            "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            "convert_options": convert,
        }
        try:
            with _opened_csv(file) as stream, csv.open_csv(stream, **options) as reader:
                yield reader
        except (pa.ArrowException, OSError, UnicodeError) as failure:
            raise _no_csv(file, encoding, delimiter, failure) from failure

    def batches(names: Sequence[str] | None) -> Iterator[Any]:
        for file in files:
            with opened(file, names) as reader:
                for batch in reader:
                    yield _with_numbers(batch, client, grouped, decimal, thousands)

    with opened(files[0]) as reader:
        names, found = list(reader.schema.names), list(reader.schema.types)
    types.clear()
    types |= dict(zip(names, found, strict=True))
    _refuse_other_delimiter(files[0], names, delimiter)
    for name in (name for name, kind in types.items() if pa.types.is_binary(kind)):
        raise _wrong_encoding(files[0], encoding, name)
    for file in files[1:]:
        with opened(file, untyped=True) as reader:  # its types are found below
            others = reader.schema.names
        if others != names:
            raise InvalidData(f"{file}: its columns are not those of {files[0]}. Give all files one header.")
    if len(files) > 1 or largest >= together or files[0].suffix in _PACKED:
        _find_types(types, lambda: batches(None))
    if thousands:
        texts = [name for name, of in types.items() if of == pa.string() and name != client and name not in text]
        grouped |= _grouped_numbers(batches(None), texts, decimal, thousands)
    kept = {**reading, "missing": sorted(reading["missing"])}
    return TableFiles(path, names, sum(sizes), batches, client, read_by(kept))


def _size(file: Path) -> int:
    """How many bytes a CSV file has when it is unpacked, which are counted before there is room made for them."""
    with FileGuard(file, InvalidData), open_plain(file) as opened:
        packed = file.suffix in _PACKED or opened.read(2) == b"\x1f\x8b"
    if not packed:
        return file.stat().st_size
    with FileGuard(file, InvalidData, "cannot be read as CSV"), _opened_csv(file) as stream:
        return sum(map(len, iter(lambda: stream.read(_BLOCK_BYTES), b"")))


def _checked_options(
    *, delimiter: Any, decimal: Any, encoding: Any, missing: Any, thousands: Any, date_format: Any
) -> dict[str, Any]:
    """The options by which a CSV file is read; those that make no sense are refused."""
    require(isinstance(delimiter, str) and len(delimiter) == 1, "delimiter", "must be one character", delimiter)
    good = decimal in (".", ",") and (decimal == "," or decimal != delimiter)
    require(good, "decimal", 'must be "." or ",", and no point if that is the delimiter', decimal)
    good = isinstance(missing, Sequence | Set) and not isinstance(missing, str) and all(isinstance(m, str) for m in missing)
    require(good, "missing", "must be a list of texts", missing, 'E.g. missing=["?", "-99"].')
    good = (
        isinstance(thousands, str) and len(thousands) <= 1 and not thousands.isalnum() and thousands not in ("-", "+", decimal)
    )
    require(
        good, "thousands", "must be one sign, and not that of decimals", thousands, 'E.g. "." with decimal="," for 2.980,44.'
    )
    good = isinstance(date_format, str) and (not date_format or _is_format(date_format))
    rule = "must be a format of strptime with a day, a month and a year"
    require(good, "date_format", rule, date_format, 'E.g. "%d.%m.%Y" for 25.09.2024, or leave it out for 2024-09-25.')
    try:
        "".encode(encoding)
    except (LookupError, TypeError, ValueError):
        raise InvalidParameter("encoding", "must be an encoding that Python knows", encoding, 'E.g. "latin-1".') from None
    return {"missing": missing}


def _is_format(text: str) -> bool:
    """Whether Arrow reads back the dates that a format writes."""
    import pyarrow as pa
    from pyarrow import compute

    moment = datetime(2026, 11, 16)
    try:
        return bool(compute.strptime(pa.scalar(moment.strftime(text)), text, "s").as_py().date() == moment.date())
    except (pa.ArrowException, ValueError, AttributeError):
        return False


def _opened_csv(file: Path) -> Any:
    """The bytes of a CSV file, whether it is compressed or not; files of other kinds are refused by how they begin."""
    import pyarrow as pa

    with open_plain(file) as opened:
        begins = opened.read(5)
    if begins.startswith(b"PK\x03\x04"):
        raise InvalidData(f"{file}: is a ZIP archive or an Excel file. Save it as CSV.")
    if begins == b"PAR1\x15":
        raise InvalidData(f"{file}: is a Parquet file. Use data.parquet.")
    stream = pa.input_stream(str(file), compression="gzip" if begins.startswith(b"\x1f\x8b") else "detect")
    return io.BufferedReader(Unpacked(stream, file), _BLOCK_BYTES)


def _no_csv(path: Path, encoding: str, delimiter: str, failure: Exception) -> InvalidData:
    """The refusal of a file that cannot be read as CSV; a header without the delimiter is the likely cause."""
    if isinstance(failure, UnicodeError) or "UTF" in str(failure) or "codec" in str(failure):
        return _wrong_encoding(path, encoding)
    if "Expected 1 columns" in str(failure):
        with _opened_csv(path) as stream:
            header = stream.read(1 << 16).partition(b"\n")[0].decode(encoding, "replace").strip()
        _refuse_other_delimiter(path, [header], delimiter)
    reason = re.sub(r"CSV parse error: Row #(\d+)", r"record \1", first_line(failure))
    return InvalidData(f"{path}: cannot be read as CSV: {reason}. Repair that record; the header must be the first.")


def _refuse_other_delimiter(path: PathLike, names: list[str], delimiter: str) -> None:
    other = [each for each in (";", "\t", "|", ",") if each != delimiter and each in names[0]]
    if len(names) == 1 and other:
        raise InvalidData(f"{path}: has the single column {names[0]!r}. Did you mean delimiter={other[0]!r}?")


def _wrong_encoding(path: PathLike, encoding: str, column: str = "") -> InvalidData:
    what = f"column {column!r}" if column else "it"
    return InvalidData(f'{path}: {what} is not text in {encoding}. Name its encoding, e.g. encoding="latin-1" or "utf-16".')


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


def _without_thousands(values: Any, decimal: str, thousands: str) -> Any:
    """Text, an Arrow column, as the numbers that it is with separators of thousands; None if one is no number."""
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(values)
    if thousands.isspace():
        texts, thousands = compute.replace_substring_regex(texts, "[\u00a0\u202f]", " "), " "
    pattern = f"^(?:{number_pattern(decimal, thousands)})$"
    if texts.null_count == len(texts) or not compute.all(compute.match_substring_regex(texts, pattern)).as_py():
        return None
    plain = compute.replace_substring(compute.replace_substring(texts, thousands, ""), decimal, ".")
    try:
        return plain.cast(pa.int64())
    except pa.ArrowInvalid:
        return plain.cast(pa.float64())


def _grouped_numbers(batches: Iterator[Any], texts: Sequence[str], decimal: str, thousands: str) -> dict[str, Any]:
    """Those of some columns of text that hold numbers by these signs, each with the type of all its numbers."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    left = set(texts)
    for batch in batches:
        for name in sorted(left):
            values = batch.column(name)
            if values.null_count == len(values):
                continue
            numbers = _without_thousands(values, decimal, thousands)
            if numbers is None:
                left.discard(name)
            elif found.get(name) != pa.float64():
                found[name] = numbers.type
    return {name: of for name, of in found.items() if name in left}


def _with_numbers(batch: Any, client: str, grouped: dict[str, Any], decimal: str, thousands: str) -> Any:
    """A record batch with numbers in the columns that `grouped` has a type of, and clients of which 7.0 is 7."""
    import pyarrow as pa
    from pyarrow import compute

    arrays = []
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        if name in grouped:
            numbers = _without_thousands(values, decimal, thousands)
            values = pa.nulls(len(values), grouped[name]) if numbers is None else numbers.cast(grouped[name])
        elif name == client:
            values = compute.replace_substring_regex(values, r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1")
        arrays.append(values)
    return pa.record_batch(arrays, names=batch.schema.names)


# -------------------------------------------------------------------------------------------------------------------- Parquet


def parquet_files(path: PathLike, client: str) -> TableFiles:
    """A Parquet file, or all those in a folder; folders such as hospital=3/ are a column.

    It is text if it is `client`, or if a value begins with 0, as in region=01/.
    """
    import pyarrow as pa
    from pyarrow import compute, dataset

    def refuse(failure: Exception) -> InvalidData:
        return InvalidData(f"{path}: cannot be read as Parquet: {first_line(failure)}.")

    require_column_name("client", client)
    files = _files_of(path, "*.parquet")
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


def _parquet_schema(path: PathLike, files: list[Path]) -> tuple[int, Any]:
    """About how many bytes Parquet files take in memory, and the Arrow schema of them all; files that were cut are refused.

    A type that holds the values of every file is found. A column that a file lacks is missing there, and a notice says so.
    """
    import pyarrow as pa
    from pyarrow import parquet

    total, whole = 0, pa.schema([])
    own: dict[Path, set[str]] = {}
    for file in files:  # the end of a file says where its columns are, so one that was cut is found here
        try:
            with open_plain(file) as opened:
                found = parquet.read_metadata(opened)
            schema = found.schema.to_arrow_schema().remove_metadata()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as failure:  # names of columns are text
            reason = first_line(failure)
            raise InvalidData(f"{file}: is no complete Parquet file: {reason}. Copy or write it again.") from failure
        total += claimed_bytes(found)
        own[file] = set(schema.names)
        try:
            whole = pa.unify_schemas([whole, schema], promote_options="permissive")
        except (pa.ArrowException, ValueError, TypeError) as failure:
            if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
                raise InvalidData(f"{file}: two columns are called {twice[0]!r}. Rename one of them.") from failure
            raise InvalidData(
                f"{file}: its columns do not fit those of {files[0]}: {first_line(failure)}. Give each one type in all files."
            ) from failure
    for name in whole.names:
        if lacking := [file for file in files if name not in own[file]]:
            cure = f"Its rows count as missing there. Leave it out: kinds={{{name!r}: 'left out'}}."
            notify(f"{path}: column {name!r} is not in {len(lacking)} of {len(files)} files, e.g. {lacking[0]}. {cure}")
    return total, whole
