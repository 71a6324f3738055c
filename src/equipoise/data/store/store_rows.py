"""Checks of a store that read no more than they must: offsets at opening, rows of clients when they are first used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.trees import named_leaves
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.label_range import LabelRange
from equipoise.data.clients.leaves import taken
from equipoise.data.clients.packed_rows import rows_in_turn
from equipoise.data.clients.ragged import Ragged
from equipoise.errors import InvalidData

_ROWS_TOGETHER = 1 << 18
_MOST_CLASSES = 100_000
_CURE = "The store was damaged: `equipoise data check STORE` says where. Copy it again, or write it again."


def refuse_bad_offsets(folder: Path, clients: ClientSet) -> None:
    """Refuse a set of a store with offsets of clients, or of their ids, that do not rise: rows would have no owner."""
    count, ids = len(clients.offsets) - 1, clients.ids
    rows = len(next(iter(named_leaves("x", clients.x).values())))
    refuse_unrising(folder / "offsets", clients.offsets, rows, count)
    refuse_unrising(folder / "ids.offsets", torch.from_numpy(ids.offsets), len(ids.text), count)  # type: ignore[attr-defined]


def refuse_unrising(file: Path, offsets: Tensor, last: int, count: int) -> None:
    """Refuse offsets that do not rise from 0 to `last` in `count` steps."""
    good = len(offsets) == count + 1 and int(offsets[0]) == 0 and int(offsets[-1]) == last
    if not good or bool((offsets[1:] <= offsets[:-1]).any()):
        raise InvalidData(f"{file} does not rise from 0 to {last} in {count} steps, so that rows have no owner. {_CURE}")


class RowCheck:
    """Checks the rows of a store's clients when they are first used: offsets of sequences, and classes."""

    def __init__(self, clients: ClientSet) -> None:
        self.starts, self.sizes, self.y = clients.starts.cpu(), clients.host_sizes, clients.y
        self.ids, self.source = clients.ids, clients.source
        self.checked = np.zeros(len(clients), dtype=bool)
        trees = named_leaves("x", clients.x) | named_leaves("y", clients.y)
        self.sequences = {name: leaf for name, leaf in trees.items() if isinstance(leaf, Ragged)}
        known = [(ignore, labels) for ignore, labels in clients.label_ranges.items() if labels is not None]
        self.labels: tuple[int, LabelRange] | None = known[0] if known else None

    def __call__(self, positions: Tensor | None = None) -> None:
        """Refuse damaged rows of the clients at some positions, None: of all; those that were checked before are not read."""
        if self.labels is None and not self.sequences:
            return
        asked = np.arange(len(self.checked)) if positions is None else positions.numpy()
        if not (fresh := asked[~self.checked[asked]]).size:
            return
        for part in _parts(torch.from_numpy(fresh), self.sizes):
            rows = rows_in_turn(self.starts[part], self.sizes[part])
            for name, leaf in self.sequences.items():
                begin, end = leaf.offsets[rows], leaf.offsets[rows + 1]
                steps = end - begin
                bad = (steps < 1) | (steps > leaf.longest) | (begin < 0) | (end > len(leaf.values))
                self._refuse(name, rows, bad, "a sequence of a length that none had")
            if self.labels is not None:
                self._check_labels(rows, *self.labels)
        self.checked[fresh] = True

    def _check_labels(self, rows: Tensor, ignore: int, labels: LabelRange) -> None:
        leaf = taken(self.y, rows)
        values = leaf.values if isinstance(leaf, Ragged) else leaf
        if int(values.min()) >= labels.lowest and int(values.max()) <= labels.highest:
            return
        bad = ((values < labels.lowest) | (values > labels.highest)) & (values != ignore)
        bad = bad.flatten(1).any(1) if bad.dim() > 1 else bad
        owners = rows.repeat_interleave(leaf.lengths) if isinstance(leaf, Ragged) else rows
        self._refuse("y", owners, bad, "a class that none had")

    def _refuse(self, name: str, rows: Tensor, bad: Tensor, what: str) -> None:
        if bool(bad.any()):
            row = int(rows[bad][0])
            owner = int(((self.starts <= row) & (row < self.starts + self.sizes)).nonzero()[0])
            where = f"client {self.ids[owner]!r}, row {row - int(self.starts[owner])} of its {name}"
            raise InvalidData(f"{self.source}: {where} holds {what} when the store was written. {_CURE}")


def _parts(positions: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """Positions of clients in parts of some rows together."""
    number = (sizes[positions].cumsum(0) - 1) // _ROWS_TOGETHER
    if int(number[-1]) == 0:
        yield positions
        return
    yield from torch.split(positions, torch.unique_consecutive(number, return_counts=True)[1].tolist())


def refuse_untrained(data: FederatedData) -> None:
    """Refuse a class that no training client of a store has, but others have. It reads targets until all classes were seen."""
    if data.train.label_range(data.ignore_index) is None or data.classes > _MOST_CLASSES:
        return
    trained = _classes_of(data.train, data, np.ones(data.classes, dtype=bool))
    for name, clients in data.splits.items():
        if name != "train" and not trained.all() and (strange := _classes_of(clients, data, ~trained) & ~trained).any():
            raise InvalidData(
                f"{data.name}: {name} has the class {int(np.flatnonzero(strange)[0])}, which no training client has. Open the "
                f"store with another seed; if that is meant, write it with classes={data.classes}."
            )


def _classes_of(clients: ClientSet, data: FederatedData, wanted: Any) -> Any:
    """Which classes clients have, (C,) bool; reading ends when all wanted ones were seen."""
    seen = np.zeros(data.classes, dtype=bool)
    for part in _parts(torch.arange(len(clients)), clients.host_sizes):
        leaf = taken(clients.y, rows_in_turn(clients.starts[part], clients.host_sizes[part]))
        values = (leaf.values if isinstance(leaf, Ragged) else leaf).flatten()
        good = (values != data.ignore_index) & (values >= 0) & (values < data.classes)
        seen |= np.bincount(values[good].numpy(), minlength=data.classes) > 0
        if (seen >= wanted).all():
            break
    return seen
