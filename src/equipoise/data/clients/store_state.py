"""What clients of a store on disk know of it: their ids, read when shown, and whether the files are still as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.core.rng import name_key
from equipoise.errors import InvalidData

Stat = tuple[int, int, int]  # inode, size, time of the last change
_TOGETHER = 1 << 16  # ids whose places are looked up at once


@dataclass(frozen=True)
class StoreState:
    """An open store: its folder, the digest of one set of clients there, and its files as they were when it was opened."""

    path: Path
    digest: str
    files: tuple[tuple[str, Stat], ...]

    def refuse_changed(self) -> None:
        """Refuse a store with a file that changed since it was opened; this reads no file."""
        for name, found in self.files:
            now = file_stat(self.path / name)
            if now is None:
                raise InvalidData(
                    f"{self.path / name} does not exist any more: the store was moved or deleted while it was open. Bring it "
                    "back, or open it where it is now, and go on from a checkpoint."
                )
            if now != found:
                raise InvalidData(
                    f"{self.path / name} changed while the store was open: earlier and later rows may not fit. "
                    "Let nobody write there during a run; then open the store again, and go on from a checkpoint."
                )


def file_stat(path: Path) -> Stat | None:
    """What tells a changed file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class StoredIds(Sequence[str]):
    """The ids of clients in a store, decoded when asked for; `in` and `index` look them up by their stream keys."""

    def __init__(self, text: Numbers, offsets: Numbers, keys: Numbers, positions: Numbers | None = None) -> None:
        self.text, self.offsets, self.keys, self.positions = text, offsets, keys, positions

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.positions is None else len(self.positions)

    def _decode(self, place: int) -> str:
        return next(self._decoded(np.array([place])))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[k] for k in range(*index.indices(len(self))))
        place = range(len(self))[index]
        return self._decode(place if self.positions is None else int(self.positions[place]))

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _TOGETHER):
            places = np.arange(first, min(first + _TOGETHER, len(self)))
            yield from self._decoded(places if self.positions is None else self.positions[places])

    def _decoded(self, places: Numbers) -> Iterator[str]:
        text, ends = memoryview(self.text), self.offsets[places + 1].tolist()  # type: ignore[arg-type]
        try:
            for start, end in zip(self.offsets[places].tolist(), ends, strict=True):
                yield str(text[start:end], "utf-8")
        except UnicodeDecodeError as failure:
            raise InvalidData(f"The id of a client of the store is no text in UTF-8: {failure}.") from failure

    def at(self, positions: Tensor) -> tuple[str, ...]:
        """The ids at some positions."""
        return tuple(self._decoded(positions.numpy() if self.positions is None else self.positions[positions.numpy()]))

    def select(self, positions: Tensor) -> StoredIds:
        """The ids at some positions, decoded when asked for."""
        chosen = positions.numpy()
        return StoredIds(self.text, self.offsets, self.keys, chosen if self.positions is None else self.positions[chosen])

    @cached_property
    def _by_key(self) -> tuple[Numbers, Numbers]:
        """The keys of these clients in ascending order, and the position of each."""
        keys = np.array(self.keys if self.positions is None else self.keys[self.positions]).view(np.uint64)
        order = np.argsort(keys)
        return keys[order], order

    def _find(self, name: object) -> int | None:
        if not isinstance(name, str):
            return None
        keys, order = self._by_key
        key = np.uint64(name_key(name))
        first, last = np.searchsorted(keys, key), np.searchsorted(keys, key, side="right")
        return next((int(place) for place in order[first:last] if self[int(place)] == name), None)

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The position of an id."""
        place = self._find(value)
        if place is None or place not in range(*slice(start, stop).indices(len(self))):
            raise ValueError(f"{value!r} is no client of the store.")
        return place

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, Sequence) and len(other) == len(self)
        return other is self or (alike and all(map(str.__eq__, self, other)))  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"StoredIds({shown}{', …' if len(self) > 3 else ''}: {len(self)} ids)"
