"""Opens files below a folder and nowhere else: no step of the way may be a link, whoever puts one there and when."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from equipoise.core.plain_text import open_plain

NO_FOLLOW = vars(os).get("O_NOFOLLOW", 0)  # Windows has none


class Outside(OSError):
    """A path that leaves its folder, or is no plain file."""


def open_below(root: Path, parts: Sequence[str]) -> BufferedReader:
    """Open the file at root/parts[0]/parts[1]/… for reading. Links, "..", devices and anything but a plain file are refused."""
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\\" in part or "\0" in part:
            raise Outside(f"{part!r} is no name of a file")
    if not parts:
        raise Outside("no file is named")
    if os.open not in os.supports_dir_fd:  # Windows: look first, then open
        whole = root.joinpath(*parts)
        if any(step.is_symlink() for step in (whole, *whole.parents) if root in step.parents) or not whole.is_file():
            raise Outside(f"{whole} is no plain file")
        return open_plain(whole)
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        return open_plain(parts[-1], NO_FOLLOW, here)
    finally:
        os.close(here)


def mark_of(path: Path, steps: list[str]) -> tuple[int, int, int]:
    """What changes when a file or folder changes."""
    try:
        about = path.joinpath(*steps).lstat()
        return about.st_ino, about.st_mtime_ns, about.st_size
    except OSError:
        return 0, 0, 0
