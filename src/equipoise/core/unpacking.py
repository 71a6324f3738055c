"""Packed files that may come from anybody: what they unpack to is compared with their size before there is room made for it."""

from __future__ import annotations

import io
import os
from typing import Any

from equipoise.errors import InvalidData

MOST_UNPACKED = 2**30  # bytes of a packed file that are taken whatever it was packed to
PACKED_AT_MOST = 100  # times that data shrink when they are packed


def refuse_bomb(path: object, unpacked: int, packed: int, most: int | None = None) -> None:
    """Refuse a packed file that would fill the memory when it is unpacked: data are not a hundred times as large as packed."""
    if unpacked > (most or MOST_UNPACKED) and unpacked > PACKED_AT_MOST * packed:
        raise InvalidData(
            f"{path}: {packed / 1e6:.1f} MB unpack to {unpacked / 1e9:.1f} GB or more, which no real data do. Unpack the file "
            "yourself if you trust it."
        )


class Unpacked(io.RawIOBase):
    """What a stream unpacks from the file at `path`; refused as soon as it is too large for what it was packed to."""

    def __init__(self, stream: Any, path: str | os.PathLike[str], most: int | None = None) -> None:
        self.stream, self.path, self.most = stream, path, most
        self.packed, self.unpacked = os.stat(path).st_size, 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, into: Any) -> int:
        """Unpack the next bytes into a buffer; how many there are."""
        count: int = self.stream.readinto(into)
        self.unpacked += count
        refuse_bomb(self.path, self.unpacked, self.packed, self.most)
        return count


def claimed_bytes(about: Any) -> int:
    """What the columns of a Parquet file with this metadata take in memory, if each text is there once."""
    schema, groups = about.schema, [about.row_group(k) for k in range(about.num_row_groups)]
    wide = [max(8, schema.column(k).length) for k in range(len(schema))]  # numbers, and values of a fixed length
    cells = sum(size * max(g.num_rows, g.column(k).num_values) for g in groups for k, size in enumerate(wide))
    return int(max(cells, sum(group.total_byte_size for group in groups)))


def plain_parquet(content: io.BytesIO, named: object) -> Any:
    """A Parquet file of numbers and texts, which is not too large for its bytes; its texts are read as dictionaries."""
    from pyarrow import parquet

    about = parquet.read_metadata(content)
    refuse_bomb(named, claimed_bytes(about), content.getbuffer().nbytes)
    columns = [about.schema.column(k) for k in range(len(about.schema))]
    if any(column.max_repetition_level for column in columns):  # nobody knows how many numbers a list has
        raise ValueError("a column holds lists")
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    return parquet.ParquetFile(content, metadata=about, read_dictionary=texts)


def plain_values(column: Any) -> list[Any]:
    """The values of a column of `plain_parquet`, each text in memory once."""
    from pyarrow.types import is_dictionary

    if not is_dictionary(column.type):
        values: list[Any] = column.to_pylist()
        return values
    pieces = ((piece.dictionary.to_pylist(), piece.indices.to_pylist()) for piece in column.chunks)
    return [None if k is None else words[k] for words, places in pieces for k in places]
