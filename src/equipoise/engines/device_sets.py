"""Client sets on the device of an engine: whole, or, where they are too large for it, the clients of a cohort at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from equipoise.core.trees import leaves, map_tree
from equipoise.data.clients import ClientSet, FederatedData, Ragged, rows_in_turn
from equipoise.data.store import ReadAhead, RowCheck
from equipoise.errors import InvalidData

_RESIDENT = 0.5  # of a GPU's free memory: data that take at most this share stay there
_HALF = 0.125  # of it, for each of the two cohorts of a window
_HALF_ON_CPU = 2**30  # bytes; for tests, since nothing is moved on a CPU
_PIECE_BYTES = 2**26  # of a set that is moved to a device


class DeviceSets:
    """Client sets on a device, each moved there once and kept as long as somebody else keeps the original.

    `resident` says whether they are held there as a whole. None: on a GPU, if all splits take at most half of its free memory.
    """

    def __init__(self, device: torch.device, data: FederatedData, *, resident: bool | None = None) -> None:
        self.device = device
        self._moved: WeakKeyDictionary[ClientSet, ClientSet] = WeakKeyDictionary()
        self._windows: WeakKeyDictionary[ClientSet, DataWindow] = WeakKeyDictionary()
        self._ahead: WeakKeyDictionary[ClientSet, ReadAhead] = WeakKeyDictionary()
        self._checks: WeakKeyDictionary[ClientSet, RowCheck] = WeakKeyDictionary()  # of stores that stay where they are
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        self._half_bytes = int(_HALF * free) if free else _HALF_ON_CPU
        if resident is None:
            resident = not free or sum(map(set_bytes, data.splits.values())) <= _RESIDENT * free
        self.resident = resident

    def __getitem__(self, clients: ClientSet) -> ClientSet:
        if clients in self._moved:
            return self._moved[clients]
        if self.resident and self.device == clients.device:
            if clients.store is not None and clients not in self._ahead:
                self._ahead[clients], self._checks[clients] = ReadAhead(clients), RowCheck(clients)
            return clients  # an entry would keep its own key
        if self.resident or clients.is_visited:
            moved = moved_in_pieces(clients, self.device)
        else:
            window = DataWindow(clients, self.device, self._half_bytes)
            moved = window.clients
            self._windows[moved] = window
        self._moved[clients] = moved
        return moved

    def hold(self, clients: ClientSet, *positions: Tensor) -> None:
        """Have the examples of these clients of a set on the device, until others are held."""
        if (window := self._windows.get(clients)) is not None:
            window.hold(positions[0] if len(positions) == 1 else torch.cat(positions))
        elif (check := self._checks.get(clients)) is not None:
            for each in positions:
                check(each)

    def expecting(self, clients: ClientSet) -> Callable[[Tensor], None] | None:
        """What reads examples ahead, told the clients that are held after the next; None if all examples are there."""
        window = self._windows.get(clients)
        return self._ahead.get(clients) if window is None else window.expect

    def in_parts(self, clients: ClientSet, which: Tensor | None) -> Iterator[Tensor | None]:
        """Clients at positions `which` of a set (None: all) in parts that the device holds, each held while it is worked on."""
        window = self._windows.get(clients)
        if window is None:
            if (check := self._checks.get(clients)) is not None:
                check(which)
            yield which
            return
        parts = window.parts(torch.arange(len(clients)) if which is None else which)
        for part, following in zip(parts, [*parts[1:], parts[-1]], strict=True):
            window.expect(following)
            window.hold(part)
            yield part


def set_bytes(clients: ClientSet) -> int:
    """Bytes of the examples of a set's clients."""
    rows = int(clients.host_sizes.sum())
    return int(rows * sum(map(_row_bytes, (*leaves(clients.x), *leaves(clients.y)))))


def _row_bytes(leaf: Any) -> float:
    """Mean bytes of a row of a leaf."""
    if isinstance(leaf, Ragged):
        return leaf.values.nbytes / max(1, len(leaf)) + leaf.offsets.element_size()
    return float(leaf.shape[1:].numel() * leaf.dtype.itemsize)


def moved_in_pieces(clients: ClientSet, device: torch.device) -> ClientSet:
    """A set on a device. Rows of a store are read some megabytes at a time, so that they are never all in the host's memory."""
    if clients.store is not None:
        RowCheck(clients)()
    if clients.store is None or clients.in_turn or clients.has_sequences:
        return clients.to(device)
    window = DataWindow(clients, device, set_bytes(clients), halves=1)
    window.fill(_PIECE_BYTES)
    return window.clients


class DataWindow:
    """Clients of a large set on a device: all their numbers and names, but the examples of two cohorts at most.

    `clients` is the set as engines see it. Its inputs and targets are memory that keeps its place, in two halves; `starts` says
    where a client's rows are there, and holds for clients that were asked for by `hold` last. While the device works on one
    half, a thread reads the next cohort into the other one.
    """

    def __init__(self, source: ClientSet, device: torch.device, half_bytes: int, *, halves: int = 2) -> None:
        self.source, self.device, on_gpu = source, device, device.type == "cuda"
        self.sizes, self.host_starts = source.host_sizes, source.starts.cpu()
        all_rows, largest = int(self.sizes.sum()), int(self.sizes.max())
        row_bytes = sum(map(_row_bytes, (*leaves(source.x), *leaves(source.y))))
        self.capacity = min(all_rows, max(largest, int(half_bytes / max(row_bytes, 1))))  # rows of a half
        self.half_rows = self.capacity + halves - 1  # offsets of sequences need one more
        trees = [
            map_tree(lambda leaf: _LeafHalves(leaf, self.half_rows, halves, device), tree) for tree in (source.x, source.y)
        ]
        self.leaves: list[_LeafHalves] = [leaf for tree in trees for leaf in leaves(tree)]
        self.where = np.full(len(source), -1, dtype=np.int8)  # the half in which a client's rows are
        self.held: list[Tensor] = [torch.zeros(0, dtype=torch.int64) for _ in range(halves)]
        self.current = 0
        x, y = (map_tree(lambda leaf: leaf.on_device, tree) for tree in trees)
        self.clients = ClientSet.trusted(
            x=x, y=y, offsets=source.offsets.to(device), ids=source.ids, scale=source.scale, shift=source.shift,
            source=source.source, starts=torch.zeros(len(source), dtype=torch.int64, device=device), in_turn=False,
            sizes=self.sizes.to(device), host_sizes=self.sizes, host_keys=source.host_keys, keys=source.host_keys.to(device),
            label_ranges=source.label_ranges, store=source.store,
        )  # fmt: skip
        self._reader = ThreadPoolExecutor(1, "equipoise-reader")
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(halves)]  # type: ignore[no-untyped-call]
        self._reading: tuple[Tensor, Future[None]] | None = None  # into the half that is not current
        self._following: Tensor | None = None  # whom to read next
        self._check = RowCheck(source) if source.store is not None else None
        self.missed = 0  # cohorts that were not read ahead

    def parts(self, positions: Tensor) -> list[Tensor]:
        """Positions in as few parts as fit into a half each."""
        ends = self.sizes[positions].cumsum(0).numpy()
        cuts, before = [0], 0
        while cuts[-1] < len(positions):
            cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + self.capacity, side="right"))))
            before = int(ends[cuts[-1] - 1])
        return [positions[a:b] for a, b in pairwise(cuts)]

    def hold(self, positions: Tensor) -> None:
        """Have the examples of these clients on the device."""
        half, places = 1 - self.current, self.where[positions.numpy()]
        if (places == half).all():
            self.current = half
        elif not (places == self.current).all():
            reading, self._reading = self._reading, None
            if reading is not None:
                reading[1].result()
            if reading is not None and np.isin(positions.numpy(), reading[0].numpy()).all():
                wanted = reading[0]
            else:
                wanted = self._begin(positions, half)
                self._copy(wanted, half)
                self.missed += 1
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._enter(wanted, half)
        following, self._following = self._following, None
        if following is not None and self._reading is None and not (self.where[following.numpy()] == self.current).all():
            wanted = self._begin(following, 1 - self.current)
            self._reading = wanted, self._reader.submit(self._copy, wanted, 1 - self.current)

    def expect(self, positions: Tensor) -> None:
        """Read the examples of these clients while the device works on those that are held next."""
        self._following = positions

    def _begin(self, positions: Tensor, half: int) -> Tensor:
        """Give a half up for these clients: each once, in rising order."""
        wanted = self._wanted(positions)
        old = self.held[half].numpy()
        self.where[old[self.where[old] == half]] = -1
        if self._stream is not None:  # what still reads that half comes first
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return wanted

    def fill(self, piece_bytes: int) -> None:
        """Read all clients, in pieces."""
        row_bytes = max(1.0, sum(leaf.row_bytes for leaf in self.leaves))
        rows = rows_in_turn(self.host_starts, self.sizes)
        for start in range(0, len(rows), max(1, int(piece_bytes / row_bytes))):
            part = rows[start : start + max(1, int(piece_bytes / row_bytes))]
            for leaf in self.leaves:
                leaf.write(part, 0, start)
            if self._stream is not None:  # the next piece takes the same memory on the host
                torch.cuda.current_stream(self.device).synchronize()
        self.held[0] = torch.arange(len(self.source))
        self._enter(self.held[0], 0)
        object.__setattr__(
            self.clients, "offsets", torch.cat([self.clients.starts, self.clients.starts.new_tensor([len(rows)])])
        )
        object.__setattr__(self.clients, "in_turn", True)

    def _wanted(self, positions: Tensor) -> Tensor:
        """The positions, each once; refused if a half does not hold them."""
        wanted = torch.from_numpy(np.unique(positions.numpy()))
        rows = int(self.sizes[wanted].sum())
        if rows > self.capacity:
            raise InvalidData(
                f"The {len(wanted)} clients of a round have {rows} examples, but beside the model the device has memory for "
                f"{self.capacity}. Take fewer clients per round, or train on the CPU."
            )
        return wanted

    def _copy(self, wanted: Tensor, half: int) -> None:
        """Write the rows of these clients to a half; on a GPU the copy goes on after this returns."""
        if self._check is not None:
            self._check(wanted)
        rows = rows_in_turn(self.host_starts[wanted], self.sizes[wanted])
        if (copied := self._copied[half]) is not None:
            copied.synchronize()  # or the memory on the host, which is copied from, is still read
        with torch.cuda.stream(self._stream):  # no stream: nothing
            for leaf in self.leaves:
                leaf.write(rows, half, 0)
            if copied is not None:
                copied.record(self._stream)

    def _enter(self, wanted: Tensor, half: int) -> None:
        """From now on the rows of these clients are those of a half."""
        sizes = self.sizes[wanted]
        starts = half * self.half_rows + sizes.cumsum(0) - sizes
        self.clients.starts.index_copy_(0, wanted.to(self.device), starts.to(self.device))
        self.where[wanted.numpy()] = half
        self.held[half], self.current = wanted, half


class _LeafHalves:
    """A leaf of the inputs or targets: where its rows come from, and memory for two cohorts of them on a device."""

    def __init__(self, source: Any, rows: int, halves: int, device: torch.device) -> None:
        self.source, self.row_bytes, self.half_rows, self.device = source, _row_bytes(source), rows, device
        if isinstance(source, Ragged):
            mean = len(source.values) / len(source)
            self.half_values = int(1.5 * mean * rows) + source.longest
            values = torch.zeros(halves * self.half_values, *source.step_shape, dtype=source.dtype, device=device)
            offsets = torch.zeros(halves * self.half_rows + 1, dtype=torch.int64, device=device)
            self.on_device: Any = Ragged.trusted(values, offsets, source.pad, source.mask, source.longest)
        else:
            self.on_device = torch.zeros(halves * rows, *source.shape[1:], dtype=source.dtype, device=device)
        self.pinned: dict[int, Tensor] = {}

    def write(self, rows: Tensor, half: int, first: int) -> None:
        """Copy rows of the source to a half, beginning at its row `first`."""
        first += half * self.half_rows
        if not isinstance(self.source, Ragged):
            self.on_device[first : first + len(rows)].copy_(self._gathered(rows, half), non_blocking=True)
            return
        part, at = self.source[rows], half * self.half_values
        if len(part.values) > self.half_values:
            raise InvalidData(
                f"The sequences of a round's clients have {len(part.values)} steps, but beside the model the device has memory "
                f"for {self.half_values}. Take fewer clients per round, or train on the CPU."
            )
        self.on_device.values[at : at + len(part.values)].copy_(part.values)
        self.on_device.offsets[first : first + len(rows) + 1].copy_(part.offsets + at)

    def _gathered(self, rows: Tensor, half: int) -> Tensor:
        """The rows on the host, in memory from which a GPU copies by itself."""
        shape: Sequence[int] = (len(rows), *self.source.shape[1:])
        if self.device.type != "cuda":
            return torch.index_select(self.source, 0, rows)
        count = len(rows) * self.source.shape[1:].numel()
        if half not in self.pinned or self.pinned[half].numel() < count:
            self.pinned[half] = torch.empty(count + count // 4, dtype=self.source.dtype, pin_memory=True)
        return torch.index_select(self.source, 0, rows, out=self.pinned[half][:count].view(shape))
