"""A node's data, loaded once for all messages: they are read again when one of the files that they came from has changed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from equipoise.engines.flower.apps.node_log import keep_traceback
from equipoise.errors import EquipoiseError

log = logging.getLogger("equipoise.node")
_PROC = Path("/proc/self/task")
_OF_JEMALLOC = "jemalloc_bg_thd"
_LIBRARY = (".py", ".pyc", ".so", ".pth")  # what an import opens is no data
_listening: list[set[str]] = []


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event == "open" and isinstance(arguments[0], str | bytes):
        _listening[-1].add(os.fsdecode(arguments[0]))


class WatchedFiles:
    """The files that were opened while something was done, and whether they have changed since."""

    _hooked = False

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, int, int] | None] = {}

    def watch(self, work: Callable[[], Any]) -> Any:
        """Do something, and note which files it opens. Files that a library opens without Python are not seen."""
        if not WatchedFiles._hooked:
            sys.addaudithook(_note_opened)  # stays for good, and notes nothing while nobody listens
            WatchedFiles._hooked = True
        opened: set[str] = set()
        _listening.append(opened)
        try:
            return work()
        finally:
            _listening.remove(opened)
            files = (path for path in opened if not path.endswith(_LIBRARY) and not path.startswith(("/proc", "/dev", "/sys")))
            self.seen = {path: _state(path) for path in files}

    @property
    def changed(self) -> bool:
        """Whether one of the files is another one now."""
        return any(_state(path) != before for path, before in self.seen.items())


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(eq=False)
class KeptData:
    """Loads the data of an installed app in this process, so that forks of it have them; `load` and `forget` are the app's."""

    load: Callable[[], Any]
    forget: Callable[[], None]
    files: WatchedFiles = field(default_factory=WatchedFiles)
    loaded: bool = False
    said: str = ""  # what the log has told of the last failure

    def refresh(self) -> None:
        """Load the data unless they are there and their files are as they were. A failure is left to each message to report."""
        if self.loaded and not self.files.changed:
            return
        self.forget()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads do not survive a fork, and libraries wait for them
        try:
            self.files.watch(self.load)
            self.loaded, self.said = True, ""
        except Exception as failure:
            text = f"{type(failure).__name__}: {failure}"
            if text != self.said:  # each message says it again
                unforeseen = failure if not isinstance(failure, EquipoiseError) else None
                log.warning("The data cannot be loaded: %s%s", text, keep_traceback(unforeseen))
            self.said = text
            self.forget()
            self.loaded = False
        finally:
            torch.set_num_threads(threads)


def has_threads() -> bool:
    """Whether this process has more than one thread: then its forks may wait for locks that nobody gives back.

    The one that jemalloc keeps, which pandas brings by way of pyarrow, does not count: jemalloc prepares itself for forks.
    """
    return _PROC.exists() and sum(_thread_name(thread) != _OF_JEMALLOC for thread in _PROC.iterdir()) > 1


def _thread_name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # it has ended meanwhile
        return _OF_JEMALLOC
