"""Examples gathered into memory that is used again and again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.data.clients import ClientSet
from equipoise.engines.stacked import Batch
from equipoise.engines.workers import Workspace
from equipoise.solvers.batches import BatchCursor, SplitCursor

_AT_ONCE = 2**24  # numbers: up to so many are gathered for all steps together


def gathered(clients: ClientSet, rows: Tensor, dtype: torch.dtype, space: Workspace, *, scaled: bool = True) -> Tensor:
    """What `clients.inputs(rows, dtype)` gives, in memory that is valid until the next call with the same space.

    Without `scaled` the numbers are as they are stored, but for their type and a shift.
    """
    shape, device = (rows.numel(), *clients.x.shape[1:]), clients.x.device
    raw = torch.index_select(clients.x, 0, rows.flatten(), out=space.empty("raw inputs", shape, clients.x.dtype, device))
    wanted = dtype if clients.scale is not None or raw.is_floating_point() else torch.int64
    x = raw if raw.dtype == wanted else space.empty("inputs", shape, wanted, device).copy_(raw)
    if clients.scale is not None:
        if scaled:
            x.mul_(clients.scale)
        if clients.shift:
            x.add_(clients.shift if scaled else clients.shift / clients.scale)
    return x.view(*rows.shape, *shape[1:])


def batches_by_step(
    clients: ClientSet, cursor: BatchCursor | SplitCursor, first: Tensor, dtype: torch.dtype, space: Workspace
) -> Iterator[Batch]:
    """The batches of clients whose examples begin at the rows `first` (k, 1), each gathered when its step comes."""
    for step, k in enumerate(cursor.active):
        places, shares = cursor.batch(step, dtype)  # (k, b)
        rows = first[:k] + places
        last = step + 1 == len(cursor.active)
        yield Batch(gathered(clients, rows, dtype, space), clients.targets(rows, dtype), shares, last)


class EpochBatches:
    """The same, gathered for all steps together and not yet scaled: fewer and larger operations."""

    def __init__(self, clients: ClientSet, cursor: BatchCursor, first: Tensor, dtype: torch.dtype, space: Workspace) -> None:
        self.cursor, (places, inside) = cursor, cursor.batches
        rows = places + first  # (T, K, b)
        self.x, self.y = gathered(clients, rows, dtype, space, scaled=False), clients.targets(rows, dtype)
        self.scale = 1.0 if clients.scale is None else clients.scale
        self.shares = inside.to(dtype) / cursor.counts.unsqueeze(2).to(inside.device)
        alike = (cursor.counts == cursor.counts[:, :1]).all(1).tolist()
        self.even = [1 / count if same else None for same, count in zip(alike, cursor.widest, strict=True)]

    @staticmethod
    def fit(clients: ClientSet, cursor: BatchCursor) -> bool:
        """Whether the batches are not too much memory at once."""
        return cursor.table is not None and cursor.table[0].numel() * clients.x.shape[1:].numel() <= _AT_ONCE

    def of(self, block: slice) -> Iterator[Batch]:
        """The batches of a stretch of the clients."""
        count, last = block.stop - block.start, len(self.cursor.active) - 1
        parts = (part[:, block].unbind(0) for part in (self.x, self.y, self.shares))
        for step, (x, y, shares) in enumerate(zip(*parts, strict=True)):
            k, b = min(max(self.cursor.active[step] - block.start, 0), count), self.cursor.widest[step]
            if k == 0:
                return
            if k < count or b < x.shape[1]:
                x, y, shares = x[:k, :b], y[:k, :b], shares[:k, :b]
            yield Batch(x, y, shares, step == last, self.scale, self.even[step])
