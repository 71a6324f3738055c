"""Examples gathered into memory that is used again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.local_work import Workspace
from equipoise.solvers.batches import BatchCursor, SplitCursor

_AT_ONCE = 2**24  # the most numbers that are gathered for all steps together


class ExampleBatch(NamedTuple):
    """One local step's examples of the k clients still at work, padded to b; a client's `shares` sum to 1, padding has 0."""

    x: Any  # (k, b, …), or a tuple or dict of such
    y: Any
    shares: Tensor  # (k, b)
    last: bool  # no step comes after it
    scale: float = 1.0  # a model sees x · scale; 1 unless the caller can take it into its products
    even: float | None = None  # the share of every example, if they are known to be the same
    keys: Tensor | None = None  # (k,) of the masks of dropout
    buffers: Mapping[str, Tensor] | None = None  # (k, …) of each client, which the forward pass changes
    factors: Tensor | None = None  # (k,) by which clients' gradients are multiplied, where autograd finds them


def gather_inputs(
    clients: ClientSet, rows: Tensor, dtype: torch.dtype, space: Workspace, *, scaled: bool = True, out: Tensor | None = None
) -> Any:
    """What `clients.inputs(rows, dtype)` gives, in `out` or in memory that is valid until the next call with the same space.

    Without `scaled` the numbers are as they are stored, but for their type and a shift.
    """
    if not isinstance(clients.x, Tensor):
        return clients.inputs(rows, dtype)
    shape, device = (rows.numel(), *clients.x.shape[1:]), clients.device
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
    clients: ClientSet, cursor: BatchCursor | SplitCursor, first: Tensor, dtype: torch.dtype, space: Workspace,
    keys: Tensor | None = None,
) -> Iterator[ExampleBatch]:  # fmt: skip
    """The batches of clients whose examples begin at the rows `first` (k, 1), each gathered when its step comes.

    `keys` (T, k) are those of the masks of dropout at every step.
    """
    for step, k in enumerate(cursor.active):
        places, shares = cursor.batch(step, dtype)  # (k, b)
        rows = first[:k] + places
        last = step + 1 == len(cursor.active)
        x, y = gather_inputs(clients, rows, dtype, space), clients.targets(rows, dtype)
        yield ExampleBatch(x, y, shares, last, keys=None if keys is None else keys[step, :k])


class FlatBatches:
    """The batches of clients as flat rows of features (k, b, P), not yet scaled, for a few clients at a time: `of(block)`.

    With a `constant`, feature F is 1 after scaling, and P is the next multiple of 16. On a CPU examples are gathered when their
    step comes, so that it finds them in a core's own cache; on a GPU for all steps together, in fewer and larger operations.
    """

    def __init__(
        self, clients: ClientSet, cursor: BatchCursor, first: Tensor, dtype: torch.dtype, space: Workspace, *, constant: bool
    ) -> None:
        self.clients, self.cursor, self.dtype, self.space = clients, cursor, dtype, space
        places, inside = cursor.batches
        self.rows, self.features = places + first, max(1, clients.features)  # (T, K, b)
        self.scale, self.width = 1.0 if clients.scale is None else clients.scale, row_width(self.features, constant)
        self.shift = clients.shift / clients.scale if clients.scale is not None and clients.shift else 0.0
        self._memory: dict[torch.Size, ExampleMemory] = {}
        working = torch.arange(len(self.rows[0])) < torch.tensor(cursor.active).unsqueeze(1)
        self._full = (cursor.counts == cursor.width) & working  # (T, K)
        self._all_full = bool(self._full.all())
        self.y = clients.targets(self.rows, dtype)
        self.shares = inside.to(dtype) / cursor.counts.unsqueeze(2).to(inside.device)
        alike = (cursor.counts == cursor.counts[:, :1]).all(1).tolist()
        self.even = [1 / count if same else None for same, count in zip(alike, cursor.widest, strict=True)]

    @staticmethod
    def fit(clients: ClientSet, cursor: BatchCursor) -> bool:
        """Whether the batches are not too much memory at once."""
        if clients.device.type == "cpu":
            return cursor.at_once
        count = len(cursor.active) * len(cursor.sizes) * cursor.width
        return cursor.at_once and count * clients.features <= _AT_ONCE

    def stretches(self, block: slice) -> list[tuple[slice, bool]]:
        """All steps of a stretch of the clients, as those in a row in which each of them has a full batch, and the others."""
        if self._all_full:
            return [(slice(0, len(self._full)), True)]
        full = self._full[:, block].all(1).tolist()
        edges = [0, *(i for i in range(1, len(full)) if full[i] != full[i - 1]), len(full)]
        return [(slice(begin, end), full[begin]) for begin, end in pairwise(edges)]

    def of(self, block: slice, steps: slice | None = None) -> Iterator[ExampleBatch]:
        """The batches of a stretch of the clients; each is valid until the next one."""
        steps = steps or slice(0, len(self.cursor.active))
        count, last = block.stop - block.start, len(self.cursor.active) - 1
        parts = zip(*(part[steps, block].unbind(0) for part in (self.rows, self.y, self.shares)), strict=True)
        together = None if self.rows.device.type == "cpu" else self._gather(self.rows[steps, block])
        for step, (rows, y, shares) in enumerate(parts, steps.start):
            k, b = min(max(self.cursor.active[step] - block.start, 0), count), self.cursor.widest[step]
            if k == 0:
                return
            if k < count or b < rows.shape[1]:
                rows, y, shares = rows[:k, :b], y[:k, :b], shares[:k, :b]
            x = self._gather(rows) if together is None else together[step - steps.start, :k, :b]
            yield ExampleBatch(x, y, shares, step == last, self.scale, self.even[step])

    def _gather(self, rows: Tensor) -> Tensor:
        """The examples (…, P) of the rows (…)."""
        memory = self.memory(rows.shape)
        torch.index_select(self.clients.x, 0, rows.reshape(-1), out=memory.raw)
        memory.features.copy_(memory.raw_rows)
        if self.shift:
            memory.features.add_(self.shift)
        return memory.whole

    def memory(self, shape: torch.Size) -> ExampleMemory:
        """Memory for examples of this shape (…), with the constant features in place."""
        if shape not in self._memory:  # views are made once, not at every step: they cost as much as a small product
            clients, count = self.clients, shape.numel()
            raw = self.space.empty("raw inputs", (count, *clients.x.shape[1:]), clients.x.dtype, clients.device)
            flat = self.space.empty("rows of features", (count, self.width), self.dtype, clients.device)
            self._memory[shape] = ExampleMemory(
                raw, raw.view(count, -1), flat[:, : self.features], flat.view(*shape, self.width)
            )
            fill_constant(flat, self.features, self.scale)
        return self._memory[shape]


class ExampleMemory(NamedTuple):
    """Memory for n examples, in four views."""

    raw: Tensor  # as they are stored (n, …)
    raw_rows: Tensor  # (n, F)
    features: Tensor  # as numbers of the model's type (n, F)
    whole: Tensor  # (…, P), with constant features


def row_width(features: int, constant: bool) -> int:
    """The length of a row of `features` numbers with space for a constant one: rows of 16 numbers are multiplied faster."""
    return -(-(features + 1) // 16) * 16 if constant else features


def fill_constant(x: Tensor, features: int, scale: float) -> None:
    """Make feature number `features` of x (…, P) one after scaling, and those after it 0."""
    if x.shape[-1] > features:
        x[..., features] = 1 / scale
        x[..., features + 1 :] = 0
