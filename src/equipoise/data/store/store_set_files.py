"""The files of one set of clients while they are written: batches are checked, and a thread writes them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from equipoise.core.files import make_folder, sync_folder
from equipoise.core.numbers import Numbers
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.label_range import LabelRange
from equipoise.data.clients.ragged import Ragged
from equipoise.data.store.checksummed_file import ChecksummedFile
from equipoise.data.store.store_files import Content, as_manifest_entry, contents, leaf_names, mapped_clients
from equipoise.data.store.store_folder import disk_failures_in_words
from equipoise.errors import InvalidData

_WAITING = 2  # batches that may wait to be written


class SetFiles:
    """The open files of one set of clients; a thread writes a batch and its checksums while the next is packed."""

    def __init__(self, folder: Path, entry: Content, header: Content) -> None:
        self.folder, self.entry, self.header, self.written = folder, entry, header, 0
        with disk_failures_in_words(folder):
            make_folder(folder)
            self.files = {name: ChecksummedFile(folder / name, size, header["block"]) for name, size in entry["files"].items()}
        self.worker, self.pending = ThreadPoolExecutor(1), deque[Future[None]]()
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
            self._wait_for_all_but(_WAITING)
            self.pending.append(self.worker.submit(self._write, data))
        entry["clients"] += len(clients)
        entry["examples"] += clients.examples
        for name, leaf in leaf_names(clients).items():
            if isinstance(leaf, Ragged):
                entry["longest"][name] = max(leaf.longest, entry["longest"].get(name, 0))

    def _write(self, data: dict[str, Numbers]) -> None:
        for name, part in data.items():
            self.files[name].write(part)

    def _wait_for_all_but(self, last: int) -> None:
        while len(self.pending) > last:
            self.pending.popleft().result()

    def _refuse_bad_ids(self, clients: ClientSet) -> None:
        for name in clients.ids:
            if not name or not name.isascii():
                try:
                    empty = not name.encode()
                except UnicodeEncodeError:
                    raise InvalidData(f"{self.header['name']}: the id {name!r} is no valid text (UTF-8). Rename it.") from None
                if empty:
                    raise InvalidData(f"{self.header['name']}: a client has an empty id. Name it.")
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
            for k in range(len(clients)):
                each = clients.take([k]).label_range(self.header["ignore_index"])
                if each is not None and (each.lowest < 0 or (classes and each.highest >= classes)):
                    allowed = f"0 … {classes - 1 if classes else 'C − 1'}"
                    raise InvalidData(
                        f"{self.header['name']}: client {clients.ids[k]!r} has classes {each.lowest} … {each.highest}, but "
                        f"they must be {allowed}. Only {self.header['ignore_index']} may stand for a target to ignore."
                    )
        before = self.entry["labels"]
        if before is not None:
            lowest, highest = min(before[0], found.lowest), max(before[1], found.highest)
            found = LabelRange(lowest, highest, before[2] or found.ignored)
        self.entry["labels"] = list(found)

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        self._wait_for_all_but(0)
        for file in self.files.values():
            file.flush()
        sync_folder(self.folder)
        self.entry["rests"] = {name: file.rest for name, file in self.files.items()}
        self.written = 0

    def close(self) -> None:
        """Close the files, in whatever state."""
        self.worker.shutdown(cancel_futures=True)
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
