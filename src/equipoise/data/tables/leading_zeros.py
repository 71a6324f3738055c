"""Columns of a CSV file that look like numbers but hold 01234, a postcode or another code: they stay text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_BLOCK = 1 << 24  # bytes that are looked at together
_ZERO = r"^\s*0\d"


def may_begin_with_zero(content: Any, delimiter: str, encoding: str) -> bool:
    """Whether a cell among the bytes of a CSV file may begin with 0 and a further digit; fast, and true if in doubt."""
    if "0".encode(encoding) != b"0":
        return True
    before = np.zeros(256, dtype=bool)
    before[list(b'\r\n" \t' + delimiter.encode(encoding, "replace")[-1:])] = True
    values = np.frombuffer(content, np.uint8)
    for first in range(0, len(values), _BLOCK):
        block = values[first : first + _BLOCK + 2]
        zeros = np.flatnonzero(block[1:-1] == ord("0")) + 1
        if (before[block[zeros - 1]] & (block[zeros + 1] - ord("0") < 10)).any():  # unsigned: smaller signs are large numbers
            return True
    return False


def numeric_columns(schema: Any) -> list[str]:
    """The columns of an Arrow schema that hold numbers; none where two columns have one name, which is refused later."""
    from pyarrow.types import is_floating, is_integer

    found = [field.name for field in schema if is_integer(field.type) or is_floating(field.type)]
    return found if len(set(schema.names)) == len(schema.names) else []


def columns_with_zeros(tables: Iterable[Any], names: Sequence[str]) -> list[str]:
    """Those of some columns, given as text in Arrow tables or record batches, in which a cell begins with 0 and a digit."""
    from pyarrow import compute

    left, found = list(names), []
    for table in tables:
        now = [name for name in left if compute.any(compute.match_substring_regex(table.column(name), _ZERO)).as_py()]
        found += now
        left = [name for name in left if name not in now]
    return [name for name in names if name in found]
