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


def gathered(
    clients: ClientSet,
    rows: Tensor,
    dtype: torch.dtype,
    space: Workspace,
    *,
    scaled: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """What `clients.inputs(rows, dtype)` gives, in `out` or in memory that is valid until the next call with the same space.

    Without `scaled` the numbers are as they are stored, but for their type and a shift.
    """
    shape, device = (rows.numel(), *clients.x.shape[1:]), clients.x.device
    raw = torch.index_select(clients.x, 0, rows.flatten(), out=space.empty("raw inputs", shape, clients.x.dtype, device))
    wanted = dtype if clients.scale is not None or raw.is_floating_point() else torch.int64
    if out is not None:
        x = out.copy_(raw.view(out.shape))
    else:
        x = raw if raw.dtype == wanted else space.empty("inputs", shape, wanted, device).copy_(raw)
    if clients.scale is not None:
        if scaled:
            x.mul_(clients.scale)
        if clients.shift:
            x.add_(clients.shift if scaled else clients.shift / clients.scale)
    return x if out is not None else x.view(*rows.shape, *shape[1:])


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
    """The same as flat rows of features (k, b, P), gathered for all steps together and not yet scaled.

    Fewer and larger operations. With a `constant`, feature F is 1 after scaling, and P is the next multiple of 16.
    """

    def __init__(
        self,
        clients: ClientSet,
        cursor: BatchCursor,
        first: Tensor,
        dtype: torch.dtype,
        space: Workspace,
        *,
        constant: bool = False,
    ) -> None:
        self.cursor, (places, inside) = cursor, cursor.batches
        rows, features = places + first, max(1, clients.x.shape[1:].numel())  # (T, K, b)
        self.scale = 1.0 if clients.scale is None else clients.scale
        width = wider(features, constant)
        self.x = space.empty("epochs", (*rows.shape, width), dtype, first.device)
        gathered(clients, rows, dtype, space, scaled=False, out=self.x.view(-1, width)[:, :features])
        fill_constant(self.x, features, self.scale)
        self.y = clients.targets(rows, dtype)
        self.shares = inside.to(dtype) / cursor.counts.unsqueeze(2).to(inside.device)
        alike = (cursor.counts == cursor.counts[:, :1]).all(1).tolist()
        self.even = [1 / count if same else None for same, count in zip(alike, cursor.widest, strict=True)]

    @staticmethod
    def fit(clients: ClientSet, cursor: BatchCursor) -> bool:
        """Whether the batches are not too much memory at once."""
        count = len(cursor.active) * len(cursor.sizes) * cursor.width
        return cursor.at_once and count * clients.x.shape[1:].numel() <= _AT_ONCE

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


def wider(features: int, constant: bool) -> int:
    """How long a row of so many features is with room for a constant one: rows of 16 numbers are multiplied faster."""
    return -(-(features + 1) // 16) * 16 if constant else features


def fill_constant(x: Tensor, features: int, scale: float) -> None:
    """Make feature number `features` of x (…, P) one after scaling, and those after it 0."""
    if x.shape[-1] > features:
        x[..., features] = 1 / scale
        x[..., features + 1 :] = 0
