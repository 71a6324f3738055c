"""Files that commands write: none is written over another without being told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from equipoise.errors import ConfigError

Overwrite = Annotated[bool, Option("--overwrite", help="Write over files that are there.")]

_HEAD_BYTES = 1 << 16  # of a page, which has its title there
_TITLE = b"Equipoise report</title>"


def refuse_taken_file(path: Path | None, option: str, *, overwrite: bool, pages: bool = False) -> None:
    """Refuse to write over a file, unless it was asked for; with `pages`, the page of an earlier report may be renewed."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file.")
    if overwrite or not path.exists() or (pages and _is_report(path)):
        return
    raise ConfigError(f"{option} {path} is there already. Name another file, or add --overwrite.")


def _is_report(path: Path) -> bool:
    """Whether a file is the page of a report."""
    with path.open("rb") as file:
        return _TITLE in file.read(_HEAD_BYTES)
