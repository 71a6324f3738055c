"""The folders that a power cut can leave: what was not synced is lost or torn at 4 KiB, and names may lag behind in any order.

A `PowerCut` is put in the place of `equipoise.core.files.recorder`. It follows every write, and at a chosen one builds a folder
that a disk could hold after the power went: of each file the synced bytes and some of the later 4 KiB blocks, and of each name
in a folder one of the files that it stood for since the folder was synced.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 4096


@dataclass
class Content:
    """A file's bytes on the disk, and the writes that are only in memory."""

    synced: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)

    def left(self, chance: random.Random) -> bytes:
        """What may be on the disk: of every write any of its 4 KiB blocks, and lengths as they were at some moment."""
        found = bytearray(self.synced)
        for operation, place, written in self.pending:
            if operation == "truncate":
                if chance.random() < 0.5:
                    found = found[:place] + bytes(max(0, place - len(found)))
                continue
            start = place
            while start < place + len(written):
                end = min((start // BLOCK + 1) * BLOCK, place + len(written))
                if chance.random() < 0.5:
                    found += bytes(max(0, end - len(found)))
                    found[start:end] = written[start - place : end - place]
                start = end
        return bytes(found)

    def now(self) -> bytes:
        """What a reader sees while the power is on."""
        found = bytearray(self.synced)
        for operation, place, written in self.pending:
            if operation == "truncate":
                found = found[:place] + bytes(max(0, place - len(found)))
            else:
                found += bytes(max(0, place + len(written) - len(found)))
                found[place : place + len(written)] = written
        return bytes(found)


class PowerWentOut(BaseException):
    """Ends the process where the power goes."""


class PowerCut:
    """Follows the writes below a folder; before the `after`-th primitive it builds `target` and raises PowerWentOut."""

    def __init__(self, folder: Path, target: Path, after: int, chance: random.Random) -> None:
        self.folder, self.target, self.after, self.chance, self.seen = folder.resolve(), target, after, chance, 0
        # By name: the files that it stood for since its folder was synced, the last one being that of now; None: no file.
        self.names: dict[Path, list[Content | None]] = {}
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.names[path] = [Content(path.read_bytes())]

    def __call__(self, operation: str, path: Path, *details: Any) -> None:
        path = path.absolute()
        if self.folder not in path.parents and path != self.folder:
            return
        self.seen += 1
        if self.seen > self.after:
            self.build()
            raise PowerWentOut
        if operation == "sync folder":
            for name, stood in self.names.items():
                if name.parent == path:
                    self.names[name] = stood[-1:]
            return
        stood = self.names.setdefault(path, [None])
        if operation == "rename":
            self.names.setdefault(Path(details[0]).absolute(), [None]).append(stood[-1])
            stood.append(None)
        elif operation == "remove":
            stood.append(None)
        else:
            if stood[-1] is None:
                stood.append(Content())
            content = stood[-1]
            assert content is not None
            if operation == "sync":
                content.synced, content.pending = content.now(), []
            elif operation == "truncate":
                content.pending.append(("truncate", details[0], b""))
            else:
                content.pending.append(("write", details[0], details[1]))

    def build(self) -> None:
        """Write a folder that a disk could hold now."""
        for path, stood in self.names.items():
            content = self.chance.choice(stood)
            if content is not None:
                place = self.target / path.relative_to(self.folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.left(self.chance))
