"""CSV files as Arrow tables: whole, or a column or a piece at a time where they need not fit into memory.

Lines of a file are counted from 1.
"""

from __future__ import annotations

import csv as csv_module
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from equipoise.core.plain_text import open_plain
from equipoise.core.unpacking import Unpacked
from equipoise.core.words import counted
from equipoise.data.arrays import first_line
from equipoise.data.csv_reading import read_by
from equipoise.data.file_access import PathLike
from equipoise.data.leading_zeros import columns_with_zeros, may_begin_with_zero, numeric_columns
from equipoise.data.row_places import RowPlaces, record_lines
from equipoise.data.table_files import CSV_NAMES, TableFiles, existing_path, files_of, require_column_name
from equipoise.data.written_values import (
    batch_with_numbers,
    checked_decimal,
    checked_spelling,
    grouped_numbers,
    read_as_text,
    with_numbers,
)
from equipoise.errors import InvalidData, InvalidParameter, notify, require

_MOST_BYTES = 2**31 - 1  # of a block of a CSV file
_BLOCK_BYTES = 1 << 24  # of a CSV file that is read in pieces
_COMPRESSION = 8  # guessed
_HEADER_BYTES = 1 << 16  # that are looked at for another delimiter


def read_csv(
    path: PathLike, *, client: str, delimiter: str, decimal: str | Mapping[str, str], encoding: str, missing: Sequence[str],
    thousands: str = "", date_format: str = "", text: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A CSV file, also compressed, as an Arrow table. Types come from all rows; empty cells and NA, NaN, null are missing.
    Columns `text` stay text, and so do those with a number that begins with 0, such as the postcode 01234. The metadata of the
    table hold how it was read, for `spelling_of`, `reading_of`, `zeros_of` and `places_of`.

    The column `client` is text as it stands, so that 007 and 7 are two clients; 7.0 is 7. "NA" is a client, with a notice.
    """
    import pyarrow as pa
    from pyarrow import csv

    require_column_name("client", client)
    file = existing_path(path)
    checked_decimal(decimal, delimiter)
    types = dict.fromkeys((client, *text, *read_as_text(decimal)), pa.string())
    options = _csv_options(delimiter, decimal, encoding, missing, thousands, date_format, column_types=types)
    try:
        with _opened_csv(file, encoding) as stream:
            content = stream.read()
        options["read_options"].block_size = min(len(content) + 1, _MOST_BYTES)  # one, so that a type is that of all rows
        table = csv.read_csv(pa.BufferReader(content), **options)

        def texts(columns: Sequence[str], *, of_clients: bool = False) -> Any:
            convert: dict[str, Any] = {"column_types": dict.fromkeys(columns, pa.string()), "include_columns": columns}
            alone = _csv_options(delimiter, decimal, encoding, missing, of_clients=of_clients, **convert)
            alone["read_options"].block_size = options["read_options"].block_size
            return csv.read_csv(pa.BufferReader(content), **alone)

        names, zeros = table.column_names, []
        if (numeric := numeric_columns(table.schema)) and may_begin_with_zero(content, delimiter, encoding):
            written = texts(numeric)
            zeros = columns_with_zeros([written], numeric)
            for name in zeros:
                table = table.set_column(names.index(name), name, written.column(name))
        if names.count(client) == 1:
            place = names.index(client)
            found = table.column(place)
            if found.null_count:  # what counts as missing differs there
                found = texts([client], of_clients=True).column(0)
                _tell_of_na(found, path, client, RowPlaces((str(file),), delimiter, encoding))
            table = table.set_column(place, client, _plain_clients(found))
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise failure if isinstance(failure, InvalidData) else _no_csv(file, encoding, delimiter, failure) from failure
    _refuse_other_delimiter(path, names, delimiter)
    _refuse_binary(path, dict(zip(names, table.schema.types, strict=True)), encoding)
    table = with_numbers(table, decimal, thousands, but=(client, *text))
    return table.replace_schema_metadata(read_by([file], zeros, delimiter, decimal, encoding, missing, thousands, date_format))


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

    with open_plain(file) as opened:
        begins = opened.read(5)
    if begins.startswith(b"PK\x03\x04"):
        raise InvalidData(f"{file}: is a ZIP archive or an Excel file. Save it as CSV.")
    if begins == b"PAR1\x15":
        raise InvalidData(f"{file}: is a Parquet file. Use data.parquet.")
    if begins[:2] in (b"\xff\xfe", b"\xfe\xff") and "16" not in encoding:
        raise InvalidData(f'{file}: is text in UTF-16, not in {encoding}. Write encoding="utf-16".')
    stream = pa.input_stream(str(file), compression="gzip" if begins.startswith(b"\x1f\x8b") else "detect")
    return io.BufferedReader(Unpacked(stream, file), _BLOCK_BYTES)


def _csv_options(
    delimiter: str, decimal: str | Mapping[str, str], encoding: str, missing: Sequence[str], thousands: str = "",
    date_format: str = "", *, of_clients: bool = False, **convert: Any,
) -> dict[str, Any]:  # fmt: skip
    """The options of Arrow's reader of CSV files; one thread, so that errors name the line."""
    from pyarrow import csv

    require(isinstance(delimiter, str) and len(delimiter) == 1, "delimiter", "must be one character", delimiter)
    checked_decimal(decimal, delimiter)
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
    options = csv.ConvertOptions(
        strings_can_be_null=True, decimal_point=decimal if isinstance(decimal, str) else ".", **convert
    )
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


def _tell_of_na(values: Any, path: PathLike, client: str, places: RowPlaces, first: int = 0) -> bool:
    """Whether there is a client NA in a CSV file, or in a piece of it from row `first` on, and a notice that it is one."""
    from pyarrow import compute

    row = compute.index(values, "NA").as_py()
    if row >= 0:
        text = f'column {client!r}, {places.words(first + row)} holds "NA", which is taken for a client of this name'
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
    reason = re.sub(
        r"CSV parse error: Row #(\d+)", lambda found: _line_of(path, encoding, delimiter, int(found[1])), first_line(failure)
    )
    if wanted := re.search(r"Expected (\d+) columns", reason):
        reason += (
            f". The header has {counted(int(wanted[1]), 'column')}. Repair the line; titles above the header and short lines"
        )
        reason += " below the last row must go"
    return InvalidData(f"{path}: cannot be read as CSV: {reason}.")


def _line_of(path: Path, encoding: str, delimiter: str, record: int) -> str:
    """The line at which a record of a file begins, in words; records are counted from 1, the header's first."""
    try:
        line = next(islice(record_lines(str(path), delimiter, encoding), record - 1, None), None)
    except (OSError, ValueError, csv_module.Error):
        line = None
    return f"record {record}" if line is None else f"line {line}"


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


def csv_files(
    path: PathLike, *, client: str, delimiter: str, decimal: str | Mapping[str, str], encoding: str, missing: Sequence[str],
    thousands: str = "", date_format: str = "",
) -> TableFiles:  # fmt: skip
    """A CSV file, or all those in a folder. Types come from all rows: they are read once, and again from a row that differs.

    The column `client` is read as by `read_csv` where it is read alone.
    """
    import pyarrow as pa
    from pyarrow import csv

    require_column_name("client", client)
    files = files_of(path, *CSV_NAMES)
    checked_decimal(decimal, delimiter)
    types: dict[str, Any] = dict.fromkeys((client, *read_as_text(decimal)), pa.string())
    grouped: dict[str, Any] = {}  # the types of columns of numbers with separators of thousands
    places = RowPlaces(tuple(map(str, files)), delimiter, encoding)

    @contextmanager
    def opened(file: Path, names: Sequence[str] | None = None, *, untyped: bool = False) -> Iterator[Any]:
        convert: dict[str, Any] = {
            "column_types": {} if untyped else types,
            **({"include_columns": list(names)} if names is not None else {}),
        }
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
                        told = told or _tell_of_na(batch.column(0), path, client, places, rows)
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
        with opened(file, untyped=True) as reader:  # its types are found below
            others = reader.schema.names
        if others != names:
            raise InvalidData(f"{file}: its columns are not those of {files[0]}. Give all files one header.")
    _find_types(types, lambda: batches(None))
    zeros: list[str] = []
    numeric = numeric_columns(pa.schema(list(types.items())))
    if numeric and any(_any_zero(file, delimiter, encoding) for file in files):
        numbers = {name: types[name] for name in numeric}
        types |= dict.fromkeys(numeric, pa.string())
        zeros = columns_with_zeros(batches(numeric), numeric)
        types |= {name: of for name, of in numbers.items() if name not in zeros}
    own = read_as_text(decimal)
    if thousands or own:
        texts = [name for name, of in types.items() if of == pa.string() and name != client and (thousands or name in own)]
        grouped |= grouped_numbers(batches(None), texts, decimal, thousands)
    size = sum(file.stat().st_size * (_COMPRESSION if file.suffix == ".gz" else 1) for file in files)
    metadata = read_by(files, zeros, delimiter, decimal, encoding, missing, thousands, date_format)
    return TableFiles(path, names, size, batches, client, metadata)


def _any_zero(file: Path, delimiter: str, encoding: str) -> bool:
    """Whether a cell of a CSV file may begin with 0 and a further digit; false if none does."""
    end = b""
    with _opened_csv(file, encoding) as stream:
        while piece := stream.read(_BLOCK_BYTES):
            if may_begin_with_zero(end + piece, delimiter, encoding):
                return True
            end = piece[-2:]
    return False


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
