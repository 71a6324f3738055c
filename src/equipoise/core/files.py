"""Files that are whole or absent: written beside the target, then moved over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.errors import ConfigError, NotWritten


def cache_folder() -> Path:
    """The folder of files that can be made again, kept for later runs: $EQUIPOISE_CACHE, or the user's cache folder."""
    folder = os.environ.get("EQUIPOISE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "equipoise"


def config_folder() -> Path:
    """The folder of the user's own settings: $EQUIPOISE_CONFIG, or the user's configuration folder."""
    folder = os.environ.get("EQUIPOISE_CONFIG") or os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "equipoise"


def write_atomically(path: Path, content: bytes) -> Path:
    """Write `content` to `path`, creating its folder. A reader sees the old file or the new one, never a half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the name
        reason = getattr(failure, "strerror", None) or str(failure)
        raise NotWritten(f"{path} could not be written: {reason}. Choose a file in a folder you may write to.") from failure
    return path


@contextmanager
def locked(file: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a file, where the system has locks. If another process holds it, `wait` for it, or refuse to work."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    with file.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as failure:
            raise ConfigError(
                f"Another process works in {file.parent}. Wait until it has ended, or stop it first."
            ) from failure
        except OSError:  # some network disks have no locks
            pass
        yield
