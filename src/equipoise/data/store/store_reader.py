"""Opening a store without reading it, checks of rows when they are first used, and of a whole store by reading all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.files import PathLike
from equipoise.core.plain_text import open_plain
from equipoise.core.task_trial import TRIED_ROWS
from equipoise.core.trees import named_leaves
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.leaves import LabelRange, rows_in_turn, taken
from equipoise.data.clients.ragged import Ragged
from equipoise.data.clients.splits import How, split
from equipoise.data.store.store_files import (
    CHECKSUMS,
    DIGEST_BYTES,
    Content,
    block_digest,
    leaf_names,
    mapped_clients,
    read_manifest,
    read_schema,
)
from equipoise.errors import InvalidData, InvalidParameter, require

_ROWS_TOGETHER = 1 << 18
_MOST_CLASSES = 100_000
_CURE = "The store was damaged: `equipoise data check STORE` says where. Copy it again, or write it again."
_TRIED = 3  # clients whose rows are read before a run, to try the model on
_SHOWN = 5  # bad blocks in a message


def open_store(
    path: PathLike, *, split_by: How = "clients", validation: float = 0.0, test: float | None = None, seed: int = 0
) -> FederatedData:
    """Open a store that `write_store` wrote. It reads ids and sizes; inputs are read from the disk when they are used.

    Targets are read until each class was seen in a training client, unless `write_store` got `classes`. A share `test` of
    the clients (0.2 if nothing is said) and a share `validation` are kept apart, the same clients as `split_clients`
    chooses in memory. A store that was written from a `FederatedData` or a table has its splits and takes neither; that of
    a table has its `schema`.

    Source: your own data.

    >>> import tempfile
    >>> import equipoise as eq
    >>> folder = Path(tempfile.mkdtemp()) / "store"
    >>> eq.data.open_store(eq.data.write_store([("a", [[0.0], [1.0]], [0, 1]), ("b", [[2.0]], [1])], folder), test=0.5)
    FederatedData('store', train: 1 client / 2 examples, test: 1 client / 1 example)
    """
    folder = Path(path).expanduser().absolute()
    manifest = read_manifest(folder)
    sets = {name: mapped_clients(folder, manifest, name, entry, entry["digest"]) for name, entry in manifest["sets"].items()}
    about: Content = {key: manifest[key] for key in ("name", "classes", "ignore_index")}
    schema = read_schema(folder, manifest)
    for name, clients in sets.items():
        refuse_bad_offsets(folder / name, clients)
        owners = int(torch.searchsorted(clients.offsets, TRIED_ROWS)) if clients.has_sequences else _TRIED
        RowCheck(clients)(torch.arange(min(max(owners, _TRIED), len(clients))))
    if "clients" not in sets:
        given = {"split_by": split_by != "clients", "validation": bool(validation), "test": test is not None}
        for parameter in (name for name, changed in given.items() if changed):
            raise InvalidParameter(
                parameter, "must be left away: this store has its own splits", ", ".join(sets), "Open it by open_store(path)."
            )
        rest = sets.get("validation"), sets.get("test")
        return FederatedData(sets["train"], *rest, **about, schema=schema)
    require(
        split_by != "examples", "split_by", 'must be "clients" for a store of whole clients', split_by,
        "Split before writing: write_store(data.split_examples(clients), path), or write a FederatedData.",
    )  # fmt: skip
    data = split(sets["clients"], split_by, validation=validation, test=0.2 if test is None else test, seed=seed, **about)
    if not manifest["classes"]:
        refuse_untrained(data)
    return replace(data, schema=schema)


def refuse_changed_store(data: FederatedData) -> None:
    """Refuse data whose store changed on disk since it was opened; this takes microseconds, and nothing for data in memory.

    >>> import equipoise as eq
    >>> refuse_changed_store(eq.data.digits())  # data in memory
    """
    for store in {clients.store for clients in data.splits.values() if clients.store is not None}:
        store.refuse_changed()


class StoreCheck(NamedTuple):
    """What a store that was read and found good holds."""

    clients: int
    examples: int
    bytes: int


def check_store(path: PathLike) -> StoreCheck:
    """Read a whole store, and compare every block with its checksum and every offset with its neighbours.

    A block or an offset that is wrong is refused with its place. A good store gives its clients, examples and bytes.

    >>> import tempfile
    >>> import equipoise as eq
    >>> folder = Path(tempfile.mkdtemp()) / "store"
    >>> check_store(eq.data.write_store([("a", [[0.0], [1.0]], [0, 1]), ("b", [[2.0]], [1])], folder)).examples
    3
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    read_schema(folder, manifest)
    bad = [
        line
        for name, entry in manifest["sets"].items()
        for file, part in entry["files"].items()
        for line in _bad_blocks(folder / name / file, part, manifest["block"])
    ]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidData(
            f"{folder}: {'; '.join(bad[:_SHOWN])}{more} changed since they were written. Copy the store again, or "
            "write it again."
        )
    for name, entry in manifest["sets"].items():
        _refuse_all_bad_offsets(folder, manifest, name, entry)
    entries = manifest["sets"].values()
    size = sum(part["bytes"] for entry in entries for part in entry["files"].values())
    return StoreCheck(sum(entry["clients"] for entry in entries), sum(entry["examples"] for entry in entries), size)


def _bad_blocks(file: Path, part: Content, block: int) -> list[str]:
    """The blocks of a file that do not fit their checksums, in words."""
    whole, rest = divmod(part["bytes"], block)
    bad = []
    with open_plain(file) as values, open_plain(file.with_name(f"{file.name}{CHECKSUMS}")) as checksums:
        for k in range(whole + bool(rest)):
            found = block_digest(values.read(block if k < whole else rest)).hexdigest()
            wanted = checksums.read(DIGEST_BYTES).hex() if k < whole else part["rest"]
            if found != wanted:
                bad.append(f"block {k} of {file.parent.name}/{file.name} (bytes {k * block} …)")
    return bad


def _refuse_all_bad_offsets(folder: Path, manifest: Content, name: str, entry: Content) -> None:
    clients = mapped_clients(folder, manifest, name, entry)
    refuse_bad_offsets(folder / name, clients)
    for leaf_name, leaf in leaf_names(clients).items():
        if isinstance(leaf, Ragged):
            refuse_unrising(folder / name / f"{leaf_name}.offsets", leaf.offsets, len(leaf.values), entry["examples"])


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
