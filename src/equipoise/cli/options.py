"""Options that several commands share, and files that commands write: none is written over another without being told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from equipoise.errors import ConfigError

Settings = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a value; may be given several times.")]
Trust = Annotated[bool, Option("--trust", help="Trust the code of its own that a run's folder or configuration records.")]
Workers = Annotated[int, Option(min=1, help="How many runs at once, one torch thread each.")]
AtLeast = Annotated[int, Option(min=0, metavar="N", help="Leave clients with fewer examples out of all figures.")]
RayAddress = Annotated[
    str | None,
    Option(metavar="ADDRESS", help='A Ray cluster that makes the runs, one per CPU: HOST:PORT, "auto", or "local".'),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Write over files that are there.")]
Token = Annotated[
    str | None, Option(envvar="EQUIPOISE_TOKEN", metavar="TOKEN", help="The token of the server.", show_envvar=True)
]
AllowHost = Annotated[
    list[str] | None, Option(metavar="NAME", help="A further name of this server; may be given several times.")
]

_HEAD_BYTES = 1 << 16  # of a page, which has its title there
_TITLE = b"Equipoise report</title>"


def refuse_taken_file(path: Path | None, option: str, *, overwrite: bool, pages: bool = False) -> None:
    """Refuse to write over a file, unless it was asked for; with `pages`, the page of an earlier report may be renewed."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file.")
    if overwrite or not path.exists():
        return
    with path.open("rb") as file:
        if not pages or _TITLE not in file.read(_HEAD_BYTES):
            raise ConfigError(f"{option} {path} is there already. Name another file, or add --overwrite.")
