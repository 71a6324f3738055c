"""Where clients lie among packed examples: offsets of clients that own rows one after the other, and the rows of some."""

from __future__ import annotations

import torch
from torch import Tensor


def offsets_of(sizes: Tensor) -> Tensor:
    """The first row of each of n clients that own `sizes` (n,) rows one after the other, and the number of rows: (n + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def rows_in_turn(starts: Tensor, sizes: Tensor) -> Tensor:
    """The rows of clients one after another, whose first rows and sizes are `starts` (n,) and `sizes` (n,)."""
    ends = sizes.cumsum(0)
    return torch.arange(int(ends[-1])) + (starts - ends + sizes).repeat_interleave(sizes)
