"""Writing a store: clients stream into flat files, and a write that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.core.files import PathLike, locked, make_folder, remove, write_atomically
from equipoise.data.clients.client_batches import batches_of, batches_of_stream
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.leaves import IGNORE
from equipoise.data.clients.ragged import Ragged
from equipoise.data.store.store_files import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    PROGRESS,
    SCHEMA,
    SETS,
    Content,
    array_bytes,
    as_manifest_entry,
    as_progress_entry,
    describe_clients,
    leaf_names,
    mapped_clients,
    read_content,
    read_manifest,
    schema_digest,
    set_digest,
)
from equipoise.data.store.store_set_files import SetFiles, disk_failures_in_words
from equipoise.data.tables.schema import Schema
from equipoise.errors import InvalidData, InvalidParameter, require, require_integer

JOURNAL_BYTES = 1 << 27  # written between two notes of progress
LOCK = ".lock"


def write_store(
    clients: Iterable[tuple[str, Any, Any]] | ClientSet | FederatedData,
    path: PathLike,
    *,
    scale: Any = None,
    shift: Any = 0.0,
    classes: int = 0,
    ignore_index: int = IGNORE,
    name: str | None = None,
    append: bool = False,
) -> Path:
    """Write clients of any number into a folder that `open_store` opens without reading it. Returns the folder.

    `clients` is an iterable of (id, x, y), of which only some are in memory at a time, a `ClientSet`, or a `FederatedData`,
    whose splits are kept. Values, ids and shapes are checked client by client. If a call was interrupted, the same call
    with the same clients continues where it stopped, and ends with the same bytes. `append=True` adds clients to a store.
    `scale`, `shift` and `classes` are those of `from_arrays`.

    >>> import tempfile
    >>> folder = write_store([("a", [[0.0], [1.0]], [0, 1]), ("b", [[2.0]], [1])], Path(tempfile.mkdtemp()) / "store")
    >>> folder.name
    'store'
    """
    require_integer("classes", classes, 0)
    called, schema = name or _name(clients) or Path(path).stem, None
    if isinstance(clients, FederatedData):
        classes, ignore_index, schema = classes or clients.classes, clients.ignore_index, clients.schema
    adopts = append and not isinstance(clients, ClientSet | FederatedData) and scale is None and shift == 0.0
    return write_streams(
        _streams(clients, scale, shift, called), path, name=called, classes=classes, ignore_index=ignore_index, schema=schema,
        append=append, adopts=adopts,
    )  # fmt: skip


def write_streams(
    streams: dict[str, Iterator[ClientSet]],
    path: PathLike,
    *,
    name: str,
    classes: int,
    ignore_index: int = IGNORE,
    schema: Schema | None = None,
    append: bool = False,
    adopts: bool = False,
) -> Path:
    """Write the clients of each set, in batches, into a store. With `adopts`, scale, shift and schema are as they are there."""
    folder = Path(path).expanduser().absolute()
    header: Content = {"format": FORMAT, "block": BLOCK_BYTES, "name": name, "classes": classes}
    header |= {"ignore_index": ignore_index, "schema": schema_digest(schema)}
    with disk_failures_in_words(folder):
        _refuse_foreign_folder(folder)
    (first_name, first), *others = streams.items()
    batch = next(first, None)
    if batch is None:
        raise InvalidData(f"{header['name']}: there is no client.")
    header |= describe_clients(batch)
    streams = {first_name: chain([batch], first), **dict(others)}
    with ExitStack() as stack:
        with disk_failures_in_words(folder):
            make_folder(folder)
            stack.enter_context(locked(folder / LOCK, wait=False))
            stack.callback(_remove_lock, folder)
            _remove_leftovers(folder)
        writer = _StoreWriter.begin(folder, header, list(streams), append, adopts)
        writer.note()
        if schema is not None:
            with disk_failures_in_words(folder):
                schema.save(folder / SCHEMA)
        for set_name, stream in streams.items():
            writer.write_set(set_name, stream)
        with disk_failures_in_words(folder, sum(entry["clients"] for entry in writer.progress["sets"].values())):
            writer.finish()
    return folder


def _name(clients: Any) -> str:
    if isinstance(clients, FederatedData):
        return clients.name
    return clients.source if isinstance(clients, ClientSet) else ""


def _streams(clients: Any, scale: Any, shift: Any, name: str) -> dict[str, Iterator[ClientSet]]:
    """The clients of each set, in batches."""
    if isinstance(clients, ClientSet | FederatedData):
        rule = "must be left away, since the data have their own"
        require(scale is None and shift == 0.0, "scale and shift", rule, (scale, shift))
    if isinstance(clients, ClientSet):
        return {"clients": batches_of(clients)}
    if isinstance(clients, FederatedData):
        if clients.attack is not None:
            raise InvalidParameter(
                "clients", "must be without an attack, which a store cannot keep", clients.attack,
                "Write the honest data, and apply the attack to the opened store.",
            )  # fmt: skip
        return {split: batches_of(part) for split, part in clients.splits.items()}
    if not isinstance(clients, Iterable) or isinstance(clients, str | bytes | dict):
        raise InvalidParameter(
            "clients", "must be an iterable of (id, x, y), a ClientSet or a FederatedData", type(clients).__name__,
            "A dict {id: (x, y)} is ((i, x, y) for i, (x, y) in clients.items()).",
        )  # fmt: skip
    return {"clients": batches_of_stream(clients, scale=scale, shift=shift, source=name)}


def _refuse_foreign_folder(folder: Path) -> None:
    """Refuse a path that is a file, and a folder that holds files but neither a store nor the beginning of one."""
    if folder.exists() and not folder.is_dir():
        raise InvalidParameter("path", "must be a folder for the store", str(folder), "A file has this name; choose another.")
    ours = any((folder / name).exists() for name in (MANIFEST, PROGRESS))
    strange = (
        [] if ours or not folder.is_dir() else sorted(each.name for each in folder.iterdir() if not _is_leftover(each.name))
    )
    if strange:
        raise InvalidParameter(
            "path", "must be a new or empty folder, or a store", str(folder),
            f"It holds other files, e.g. {strange[0]!r}. Choose another folder.",
        )  # fmt: skip


def _is_leftover(name: str) -> bool:
    """Whether a file is what a killed write may leave beside the store."""
    return name == LOCK or (name.endswith(".tmp") and name.startswith((f".{MANIFEST}.", f".{PROGRESS}.", f".{SCHEMA}.")))


def _remove_lock(folder: Path) -> None:
    """Remove the lock of a store, if the folder can be written."""
    with suppress(OSError):  # in a folder that may not be written, which was refused before
        (folder / LOCK).unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files that killed writes have left in the folder of a store."""
    for each in folder.iterdir():
        if _is_leftover(each.name) and each.name != LOCK:
            each.unlink(missing_ok=True)


class _StoreWriter:
    """A store that is being written: what was there, what has been added, and the note of progress."""

    def __init__(self, folder: Path, header: Content, progress: Content, *, complete: bool) -> None:
        self.folder, self.header, self.progress, self.complete = folder, header, progress, complete

    @classmethod
    def begin(cls, folder: Path, header: Content, names: list[str], append: bool, adopts: bool) -> _StoreWriter:
        """Begin a new store, or go on with what the folder holds."""
        empty: Content = {"clients": 0, "examples": 0, "labels": None}
        sets = {name: empty | {"longest": {}, "files": {}} for name in names}
        base: Content = dict.fromkeys(names, 0)
        progress: Content = {"format": FORMAT, "header": header, "append": append, "base": base, "sets": sets}
        if (folder / PROGRESS).exists():
            found = read_content(folder / PROGRESS)
            if any(entry["clients"] for entry in found["sets"].values()):  # else it begins anew
                progress = found
            if progress["append"] != append:
                call = "write_store(…, append=True)" if progress["append"] else "write_store(…) without append"
                raise InvalidParameter("append", "must be that of the interrupted call", append, f"Start {call} again first.")
        elif (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            stored = {key: value for key, value in manifest.items() if key != "sets"}
            base = {name: entry["clients"] if append else 0 for name, entry in manifest["sets"].items()}
            progress |= {"header": stored, "base": base, "sets": {n: as_progress_entry(e) for n, e in manifest["sets"].items()}}
        if list(progress["sets"]) != names:
            raise InvalidParameter(
                "clients", f"must be of the splits of the store, {', '.join(progress['sets'])}", ", ".join(names),
                "Write other splits into another folder.",
            )  # fmt: skip
        complete = (folder / MANIFEST).exists() and not (folder / PROGRESS).exists() and not append
        made = cls(folder, progress["header"], progress, complete=complete)
        made._refuse_other_header(header, append, adopts)
        return made

    def _refuse_other_header(self, header: Content, append: bool, adopts: bool) -> None:
        free = {"name", "classes", "block"} if append else {"block"}
        free |= {"scale", "shift", "schema"} if adopts else set()
        for key in header:
            if key not in free and header[key] != self.header[key]:
                shown = _shown_kind if key in ("x", "y") else str
                mine, other = shown(self.header[key]), shown(header[key])
                if append:
                    fix = "Convert them, or write them to another folder."
                    if key == "schema":
                        mine, other, fix = f"in {SCHEMA}", "another one", f'Give schema="{self.folder / SCHEMA}".'
                    rule = f"must match those in the store {self.folder}: its {key} is {mine}"
                    raise InvalidParameter("clients", rule, other, fix)
                raise self._other(f"its {key} is {mine}, that of these clients {other}")

    def _other(self, difference: str) -> InvalidParameter:
        return InvalidParameter(
            "path", "must be a new folder, or hold the beginning of what is to be written", str(self.folder),
            f"It holds another store: {difference}. Choose another folder, or delete this one; append=True adds clients.",
        )  # fmt: skip

    def write_set(self, name: str, stream: Iterator[ClientSet]) -> None:
        """Write the clients of a set, except those that the store has already, which must be the same."""
        entry, skipped = self.progress["sets"][name], 0
        there = entry["clients"] - self.progress["base"][name]
        stored = mapped_clients(self.folder, self.header, name, as_manifest_entry(entry)) if there else None
        files = None if self.complete else SetFiles(self.folder / name, entry, self.header)
        try:
            for batch in stream:
                found = describe_clients(batch)
                if found["x"] != self.header["x"] or found["y"] != self.header["y"]:
                    self._refuse_unlike(batch, found)
                if stored is not None and skipped < there:
                    old = min(len(batch), there - skipped)
                    self._refuse_other_clients(batch, stored, self.progress["base"][name] + skipped, old)
                    skipped += old
                    if old == len(batch):
                        continue
                    batch = batch.take(range(old, len(batch)))
                if files is None:
                    raise self._other(f"it ends before client {batch.ids[0]!r}")
                files.add(batch)
                if files.written >= JOURNAL_BYTES:
                    self.note(files)
            if skipped < there:
                raise self._other(f"it goes on after the {skipped} clients that were given")
            if files is not None:
                self.note(files)
        finally:
            if files is not None:
                files.close()

    def _refuse_unlike(self, batch: ClientSet, found: Content) -> None:
        raise InvalidData(
            f"{self.header['name']}: inputs and targets of client {batch.ids[0]!r} are {_shown_kind(found['x'])} and "
            f"{_shown_kind(found['y'])}, those before it {_shown_kind(self.header['x'])} and {_shown_kind(self.header['y'])}. "
            "Give all clients the same kind."
        )

    def _refuse_other_clients(self, batch: ClientSet, stored: ClientSet, first: int, count: int) -> None:
        """Refuse a stream that does not begin with what the store holds: ids, sizes and values of all clients."""
        for k, (new, old) in enumerate(zip(batch.ids, stored.ids[first : first + count], strict=False)):
            if new != old:
                raise self._other(f"its client {first + k} is {old!r}, that of these clients {new!r}")
        differ = np.flatnonzero((batch.sizes[:count] != stored.sizes[first : first + count]).numpy())[:1].tolist()
        if differ or not _same_values(batch, 0, stored, first, count):
            k = next(k for k in (*differ, *range(count)) if k in differ or not _same_values(batch, k, stored, first + k, 1))
            raise self._other(f"its examples of client {batch.ids[k]!r} are others")

    def note(self, files: SetFiles | None = None) -> None:
        """Write down how far the store is, after all of that is on the disk."""
        if not self.complete:
            with disk_failures_in_words(self.folder, files.entry["clients"] if files is not None else 0):
                if files is not None:
                    files.flush()
                write_atomically(self.folder / PROGRESS, json.dumps(self.progress).encode())

    def finish(self) -> None:
        """Write the manifest, which makes the store complete, and remove the note of progress."""
        if not self.complete:
            sets = {}
            for name in sorted(self.progress["sets"], key=SETS.index):
                entry = dict(self.progress["sets"][name])
                rests = entry.pop("rests")
                files = {file: {"bytes": size, "rest": rests[file]} for file, size in entry["files"].items()}
                sets[name] = entry | {"files": files}
            manifest = {**self.header, "sets": sets}
            for name, entry in sets.items():
                entry["digest"] = set_digest(self.folder, manifest, name)
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        remove(self.folder / PROGRESS)


def _shown_kind(tree: Content) -> str:
    """The types and shapes of inputs or targets of a manifest."""
    return ", ".join(f"{'ragged ' if leaf['ragged'] else ''}{leaf['type']} {tuple(leaf['shape'])}" for leaf in tree["leaves"])


def _same_values(new: ClientSet, k: int, old: ClientSet, first: int, count: int) -> bool:
    """Whether `count` clients from the k-th on equal, byte for byte, those of another set from the `first` on."""
    pairs = zip(_values(new, k, count), _values(old, first, count), strict=True)
    return all(np.array_equal(array_bytes(a), array_bytes(b)) for a, b in pairs)


def _values(clients: ClientSet, first: int, count: int) -> Iterator[Tensor]:
    """The values of clients that follow each other, leaf by leaf, and the lengths of sequences; nothing is copied."""
    start, end = int(clients.offsets[first]), int(clients.offsets[first + count])
    for leaf in leaf_names(clients).values():
        if isinstance(leaf, Ragged):
            offsets = leaf.offsets[start : end + 1]
            yield offsets.diff()
            yield leaf.values[int(offsets[0]) : int(offsets[-1])]
        else:
            yield leaf[start:end]
