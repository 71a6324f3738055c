"""A file of a store while it is written: bytes are added at its end, and every whole block of them gets a checksum."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from equipoise.core.files import DurableFile
from equipoise.core.numbers import Numbers
from equipoise.data.store.store_files import CHECKSUMS, DIGEST_BYTES, block_digest
from equipoise.errors import InvalidData


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
