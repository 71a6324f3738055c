"""Where the rows of a table are for a person: rows are counted from 0, lines of a CSV file from 1, the header included."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from equipoise.core.plain_text import open_plain


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of a table's rows: in its CSV files, if it has some, and before rows were left out, if some were."""

    files: tuple[str, ...] = ()
    delimiter: str = ","
    encoding: str = "utf-8"
    kept: NDArray[np.int64] | None = None  # the rows that are left, as the table had them before

    def row(self, row: int) -> int:
        """A row of the table as it was before rows were left out."""
        return row if self.kept is None else int(self.kept[row])

    def words(self, row: int) -> str:
        """Where a row of the table is, in words: "row 3", or for a CSV file "row 3 (counted from 0; line 5 of the file)"."""
        row = self.row(row)
        found = self._line(row)
        if found is None:
            return f"row {row}"
        file, line = found
        return f"row {row} (counted from 0; line {line} of {file if len(self.files) > 1 else 'the file'})"

    def _line(self, row: int) -> tuple[str, int] | None:
        """The file of a row, and the line at which its record begins; None if that cannot be known."""
        try:
            for file in self.files:
                count = 0
                for line in islice(record_lines(file, self.delimiter, self.encoding), 1, None):
                    if count == row:
                        return file, line
                    count += 1
                row -= count
        except (OSError, ValueError, csv.Error):  # an odd file, of which the row alone is said
            pass
        return None


def record_lines(file: str, delimiter: str, encoding: str) -> Iterator[int]:
    """The lines, from 1, at which the records of a CSV file begin, the header's first.

    Empty lines are no records, and quoted text may go over several lines.
    """
    with open_plain(file) as opened:
        packed = opened.read(2) == b"\x1f\x8b"
    with (gzip.open if packed else open)(file, "rt", encoding=encoding, newline="") as lines:
        reader, before = csv.reader(lines, delimiter=delimiter), 0
        for record in reader:
            if record:
                yield before + 1
            before = reader.line_num
