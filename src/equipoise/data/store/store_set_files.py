"""The files of one set of clients while they are written: they grow, and every whole block of them gets a checksum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from equipoise.core.files import DurableFile, make_folder, sync_folder
from equipoise.core.numbers import Numbers
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.leaves import LabelRange
from equipoise.data.clients.ragged import Ragged
from equipoise.data.store.store_files import (
    CHECKSUMS,
    DIGEST_BYTES,
    Content,
    as_manifest_entry,
    block_digest,
    contents,
    leaf_names,
    mapped_clients,
)  # fmt: skip
from equipoise.errors import InvalidData, NotWritten


@contextmanager
def disk_failures_in_words(folder: Path, done: int = 0) -> Iterator[None]:
    """Turn a failure of the disk into a message that says how many clients are there, and how to go on."""
    try:
        yield
    except OSError as failure:
        raise NotWritten(
            f"{folder} could not be written on after {done} clients: {failure.strerror or failure}. Make room, or see to the "
            "folder's permissions, and start the same call again: it goes on where it stopped."
        ) from failure


class ChecksummedFile:
    """A file that grows, with the checksum of each whole block in a file beside it."""

    def __init__(self, path: Path, length: int, block: int) -> None:
        self.path, self.length, self.block = path, length, block
        self.file = _opened_at(path, length)
        self.checksums = _opened_at(path.with_name(f"{path.name}{CHECKSUMS}"), length // block * DIGEST_BYTES)
        self.within = length % block
        self.digest = block_digest(self.file.read_at(length - self.within, self.within))

    def write(self, data: Numbers) -> None:
        """Add bytes at the end."""
        view = memoryview(data)  # type: ignore[arg-type]
        self.file.write(view)
        self.length += len(view)
        while len(view):
            part, view = view[: self.block - self.within], view[self.block - self.within :]
            self.digest.update(part)
            self.within += len(part)
            if self.within == self.block:
                self.checksums.write(self.digest.digest())
                self.digest, self.within = block_digest(), 0

    @property
    def rest(self) -> str:
        """The checksum of what lies after the last whole block; empty if nothing does."""
        return str(self.digest.hexdigest()) if self.within else ""

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        for file in (self.file, self.checksums):
            file.sync()

    def close(self) -> None:
        """Close both files; what the disk does not take any more was not noted as written."""
        for file in (self.file, self.checksums):
            with suppress(OSError):
                file.close()


def _opened_at(path: Path, length: int) -> DurableFile:
    """A file open for writing after its first bytes; what a killed write left behind them is cut off."""
    if (path.stat().st_size if path.exists() else 0) < length:
        raise InvalidData(f"{path} is shorter than it was when it was written. Delete the folder, and write the store again.")
    return DurableFile(path, length)


class SetFiles:
    """The open files of one set of clients."""

    def __init__(self, folder: Path, entry: Content, header: Content) -> None:
        self.folder, self.entry, self.header, self.written = folder, entry, header, 0
        with disk_failures_in_words(folder):
            make_folder(folder)
            self.files = {name: ChecksummedFile(folder / name, size, header["block"]) for name, size in entry["files"].items()}
        self.known = _KeySet()
        if entry["clients"]:
            self.known.add(np.fromfile(folder / "keys", np.uint64, entry["clients"]))

    def add(self, clients: ClientSet) -> None:
        """Check the clients of a batch and write them."""
        self._refuse_bad_ids(clients)
        self._refuse_bad_labels(clients)
        entry = self.entry
        with disk_failures_in_words(self.folder.parent, entry["clients"]):
            data = contents(clients, entry["files"], entry["examples"])
            for name, part in data.items():
                if name not in self.files:
                    self.files[name] = ChecksummedFile(self.folder / name, 0, self.header["block"])
                entry["files"][name] = entry["files"].get(name, 0) + len(part)
                self.written += len(part)
                self.files[name].write(part)
        entry["clients"] += len(clients)
        entry["examples"] += clients.examples
        for name, leaf in leaf_names(clients).items():
            if isinstance(leaf, Ragged):
                entry["longest"][name] = max(leaf.longest, entry["longest"].get(name, 0))

    def _refuse_bad_ids(self, clients: ClientSet) -> None:
        for name in clients.ids:
            if not name or any("\ud800" <= letter <= "\udfff" for letter in name):
                raise InvalidData(f"{self.header['name']}: the id {name!r} is empty or no valid text (UTF-8). Rename it.")
        keys = clients.host_keys.numpy().view(np.uint64)
        if (doubtful := self.known.add(keys)).size:
            suspects = [clients.ids[k] for k in np.flatnonzero(np.isin(keys, doubtful)).tolist()]
            with disk_failures_in_words(self.folder.parent, self.entry["clients"]):
                self.flush()
            stored = mapped_clients(self.folder.parent, self.header, self.folder.name, as_manifest_entry(self.entry))
            if twice := [name for name in suspects if name in stored.ids]:  # else two names have one key, which does no harm
                raise InvalidData(
                    f"{self.header['name']}: client {twice[0]!r} comes twice. Give all examples of a client at once, and "
                    "each id to one client."
                )

    def _refuse_bad_labels(self, clients: ClientSet) -> None:
        found, classes = clients.label_range(self.header["ignore_index"]), self.header["classes"]
        if found is None:
            return
        if found.lowest < 0 or (classes and found.highest >= classes):
            ranges = ((name, clients.take([k]).label_range(self.header["ignore_index"])) for k, name in enumerate(clients.ids))
            odd, each = next((n, r) for n, r in ranges if r and (r.lowest < 0 or (classes and r.highest >= classes)))
            raise InvalidData(
                f"{self.header['name']}: client {odd!r} has classes {each.lowest} … {each.highest}, but they must be 0 … "
                f"{classes - 1 if classes else 'C − 1'}, or {self.header['ignore_index']} for a target to ignore."
            )
        before = self.entry["labels"]
        if before is not None:
            lowest, highest = min(before[0], found.lowest), max(before[1], found.highest)
            found = LabelRange(lowest, highest, before[2] or found.ignored)
        self.entry["labels"] = list(found)

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        for file in self.files.values():
            file.flush()
        sync_folder(self.folder)
        self.entry["rests"] = {name: file.rest for name, file in self.files.items()}
        self.written = 0

    def close(self) -> None:
        """Close the files, in whatever state."""
        for file in self.files.values():
            file.close()


class _KeySet:
    """The stream keys of all clients so far, in sorted arrays of falling length: 8 bytes each."""

    def __init__(self) -> None:
        self.levels: list[Numbers] = []

    def add(self, keys: Numbers) -> Numbers:
        """Add keys, and return those that were there before."""
        ordered = np.sort(keys)
        found = [ordered[level[np.searchsorted(level, ordered).clip(max=len(level) - 1)] == ordered] for level in self.levels]
        self.levels.append(ordered)
        while len(self.levels) > 1 and len(self.levels[-2]) <= 2 * len(self.levels[-1]):
            self.levels[-2:] = [np.sort(np.concatenate(self.levels[-2:]), kind="stable")]
        return np.concatenate([keys[:0], *found])
