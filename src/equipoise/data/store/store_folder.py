"""The folder that a store is written into: whose it is, its lock, what killed writes leave there, and failures of its disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from equipoise.data.store.store_files import MANIFEST, PROGRESS, SCHEMA
from equipoise.errors import InvalidParameter, NotWritten

LOCK = ".lock"


def refuse_foreign_folder(folder: Path) -> None:
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


def remove_lock(folder: Path) -> None:
    """Remove the lock of a store, if the folder can be written."""
    with suppress(OSError):  # in a folder that may not be written, which was refused before
        (folder / LOCK).unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files that killed writes have left in the folder of a store."""
    for each in folder.iterdir():
        if _is_leftover(each.name) and each.name != LOCK:
            each.unlink(missing_ok=True)


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
