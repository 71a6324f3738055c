"""Values of a table's columns as 64-bit numbers, so that equal values and equal rows are found by sorting numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipoise.data.tables.table_column import TableColumn

MISSING = np.uint64(0)  # the hash of a missing value; a value has it with a chance of 2^-64


def value_hashes(column: TableColumn) -> NDArray[np.uint64]:
    """A number (N,) for each value: equal for equal values of the column, and 0 where one is missing.

    Two different values have the same number with a chance of about 2^-64. 0.0 and -0.0 are equal. Text and categories are
    numbered in the order in which they come, so that numbers of different columns do not compare.
    """
    import pyarrow as pa
    import pyarrow.types as kinds

    values, of = column.values, column.values.type
    if kinds.is_null(of):
        return np.zeros(len(values), dtype=np.uint64)
    if kinds.is_floating(of):
        numbers = values.cast(pa.float64()).to_numpy() + 0.0  # -0.0 becomes 0.0
        return np.where(np.isnan(numbers), MISSING, mixed(numbers.view(np.uint64)))
    missing = values.is_null().to_numpy()
    if kinds.is_integer(of) or kinds.is_boolean(of):
        whole = values.fill_null(False if kinds.is_boolean(of) else 0)
        bits = whole.cast(pa.uint64() if kinds.is_unsigned_integer(of) else pa.int64()).to_numpy().astype(np.uint64)
    else:
        codes = column.decoded().combine_chunks().dictionary_encode().indices.fill_null(0)
        bits = codes.to_numpy(zero_copy_only=False).astype(np.uint64)
    return np.where(missing, MISSING, mixed(bits))


def mixed(bits: NDArray[np.uint64], salt: int = 0) -> NDArray[np.uint64]:
    """Numbers (N,) with their bits mixed: a permutation of all 64-bit numbers, another one for each `salt`.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).

    >>> len(set(mixed(np.arange(1000, dtype=np.uint64), salt=3).tolist()))
    1000
    """
    z = bits + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
