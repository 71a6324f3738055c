"""Every durable write of this package: files that are whole or absent, files that grow, and files that are written in place.

All bytes that must survive a crash go through this module, one primitive at a time: write, truncate, sync, rename, remove. So a
test can put a `recorder` in place, which sees every primitive before it happens. It may refuse one (a full disk), or build the
folders that a crash could leave: what was not synced is lost or torn, and renames of an unsynced folder come in any order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from equipoise.errors import ConfigError, NotWritten

PathLike = str | os.PathLike[str]


class Recorder(Protocol):
    """Sees every primitive before it happens; what it raises happens instead."""

    def __call__(self, operation: str, path: Path, *details: Any) -> None:
        """`operation` is "write" (offset, bytes), "truncate" (length), "sync", "rename" (target), "remove" or "sync folder"."""


recorder: Recorder | None = None  # a test puts one here


def _note(operation: str, path: Path, *details: Any) -> None:
    if recorder is not None:
        recorder(operation, path, *details)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give a failure of the system the file's name, which it lacks where a file is open already: "No space left on device"."""
    try:
        yield
    except OSError as failure:
        if failure.filename is None and failure.errno is not None:
            failure.filename = str(path)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the disk while `path` is written into an error that names it, the reason and the fix."""
    try:
        yield
    except NotWritten:
        raise
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the name
        raise not_written(path, failure) from failure


def not_written(path: Path, failure: OSError | ValueError) -> NotWritten:
    """The error for a file that could not be written: it names the file, the reason and the fix."""
    reason = getattr(failure, "strerror", None) or str(failure)
    fix = "Make room on the disk." if is_full(failure) else "Choose a file in a folder you may write to."
    return NotWritten(f"{path} could not be written: {reason}. {fix}")


def cache_folder() -> Path:
    """The folder of files that can be made again, kept for later runs: $EQUIPOISE_CACHE, or the user's cache folder."""
    folder = os.environ.get("EQUIPOISE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "equipoise"


def config_folder() -> Path:
    """The folder of the user's own settings: $EQUIPOISE_CONFIG, or the user's configuration folder."""
    folder = os.environ.get("EQUIPOISE_CONFIG") or os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "equipoise"


def _bytes_of(content: Any) -> memoryview:
    """Bytes, or the bytes of an array."""
    view = memoryview(content)
    return view.cast("B") if view.nbytes else memoryview(b"")


class DurableFile:
    """A file open for writing, new or from its byte `length` on; what lies behind that is cut off.

    What was written is on the disk after `sync`, and not before. The file's name is on the disk after `sync_folder`. A new file
    that is `private` only its owner may read.
    """

    def __init__(self, path: Path, length: int | None = None, *, private: bool = False) -> None:
        self.path, self._place = path, length or 0
        if length is None:
            with _naming(path):
                _note("truncate", path, 0)
        mode, rights = "w+b" if length is None or not path.exists() else "r+b", 0o600 if private else 0o666
        opener = partial(os.open, mode=rights)
        self._file = open(path, mode, buffering=0, opener=opener)  # noqa: SIM115 — `close` closes it
        if length is not None:
            try:
                self.truncate(length)
            except BaseException:
                self.close()
                raise

    @classmethod
    def at_end(cls, path: Path) -> DurableFile:
        """A file that what is written is added to."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def write(self, content: Any) -> None:
        """Write bytes where the last ones ended."""
        view = _bytes_of(content)
        self.write_at(self._place, view)
        self._place += len(view)

    def write_at(self, place: int, content: Any) -> None:
        """Write bytes at a place of the file."""
        view = _bytes_of(content)
        with _naming(self.path):
            if recorder is not None:
                recorder("write", self.path, place, bytes(view))
            self._file.seek(place)
            while len(view):  # the system may take less than it is given
                view = view[self._file.write(view) or 0 :]

    def truncate(self, length: int) -> None:
        """Cut or extend the file to a length; what is added reads as zeros and takes no room on most disks."""
        with _naming(self.path):
            _note("truncate", self.path, length)
            self._file.truncate(length)

    def read_at(self, place: int, length: int) -> bytes:
        """Bytes of the file; fewer where it ends before."""
        self._file.seek(place)
        return self._file.read(length) or b""

    def sync(self) -> None:
        """Bring to the disk what was written."""
        with _naming(self.path):
            _note("sync", self.path)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class GrowingFile:
    """A file that only grows, also if several processes write to it: each line is one call of the system, at the end.

    Only its owner may read it. A line that a kill has cut off stays as it is, and the next one begins behind it. With `durable`
    a line is on the disk when `add` returns, and so is the file's name.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        make_folder(path.parent)
        new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        if new and durable:
            sync_folder(path.parent)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self.add(b"\n")

    def add(self, line: bytes) -> None:
        """Write a line at the end."""
        with _naming(self.path):
            if recorder is not None:
                recorder("write", self.path, os.fstat(self._file).st_size, line)
            written = os.write(self._file, line)
            if written < len(line):  # a full disk: what there is of the line is not one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.durable:
                _note("sync", self.path)
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def move(source: Path, target: Path) -> None:
    """Give a file, or a folder, another name, on the disk too; a file of that name is replaced."""
    with _naming(target):
        _note("rename", source, target)
        os.replace(source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with _naming(path):
        _note("remove", path)
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring to the disk which files a folder holds, and their names, where the system can."""
    with _naming(folder):
        _note("sync folder", folder)
    with suppress(OSError, AttributeError):  # Windows and some network disks cannot
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where they are not there; their names are on the disk, too."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> Path:
    """Write `content` to `path`, creating its folder. A reader sees the old file or the new one, never a half.

    The new one is on the disk when this returns. If it is `private`, its owner alone may read it, also before it has its name.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        make_folder(path.parent)
        try:
            file = DurableFile(beside, private=private)
            try:
                file.write(content)
                file.sync()
            finally:
                file.close()
            move(beside, path)
        finally:
            if beside.exists():
                remove(beside)
    return path


def remove_unfinished(folder: Path, name: str, *, below: bool = False) -> None:
    """Remove what writers of files of this name, a pattern, left beside them when they were killed, also `below` the folder.

    It is for one who holds the lock of these files. What a process that still lives is writing stays.
    """
    pattern = f".{name}.*.tmp"
    for beside in folder.rglob(pattern) if below else folder.glob(pattern):
        if is_unfinished(beside) and not _is_alive(int(beside.name.split(".")[-2])):
            remove(beside)


def is_unfinished(path: Path) -> bool:
    """Whether a file is what `write_atomically` writes before it gives it its name; a killed process leaves such files."""
    parts = path.name.rsplit(".", 2)
    return path.name.startswith(".") and len(parts) == 3 and parts[1].isdecimal() and parts[2] == "tmp"


def _is_alive(process: int) -> bool:
    """Whether a process of this machine lives; where the system cannot say, yes."""
    if os.name != "posix":  # there, signal 0 is one that acts
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def is_full(failure: BaseException) -> bool:
    """Whether the disk, or the user's part of it, has no room left."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def locked(file: Path, *, wait: bool, work: Path | None = None) -> Iterator[None]:
    """Hold the lock of a file, where the system has locks. If another process holds it, `wait` for it, or refuse to work.

    The refusal names `work`, the file that is worked with, or else the folder of the lock. A lock that cannot be made, on a
    full disk, is an error that names it.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    while True:
        with writing(file):
            handle = file.open("ab")
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as failure:
                whose = f"with {work}" if work is not None else f"in {file.parent}"
                raise ConfigError(f"Another process works {whose}. Wait until it has ended, or stop it first.") from failure
            except OSError:  # some network disks have no locks
                pass
            else:
                if not _is_same_file(file, handle.fileno()):  # whoever held the lock has removed the file meanwhile
                    continue
            _held_locks.append(handle)
            try:
                yield
            finally:
                _held_locks.remove(handle)
            return


_held_locks: list[BinaryIO] = []


def _leave_locks_to_parent() -> None:
    """In a forked process: close its copies of held locks, or they would outlive the process that works under them."""
    for handle in _held_locks:
        handle.close()


if os.name == "posix":
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


def _is_same_file(path: Path, handle: int) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
