"""The user's own list of trusted code: pairs of an import path and the SHA-256 of its file, in `trusted.toml`.

It lies in the user's configuration folder, $EQUIPOISE_CONFIG or ~/.config, under equipoise. Only what a folder of a run names
is looked up there; the list itself runs nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from equipoise.core.files import config_folder, locked, write_atomically
from equipoise.errors import ConfigError, NotWritten
from equipoise.experiment import toml

Pair = tuple[str, str]  # import path, SHA-256
NOTE = "# Code that run folders may run: import path = SHA-256 of the files. Delete a line to trust it no longer.\n"


def list_path() -> Path:
    """The file of the list."""
    return config_folder() / "trusted.toml"


def trusted_pairs() -> set[Pair]:
    """All pairs of the list; none if there is no list."""
    path = list_path()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as failure:
        raise ConfigError(f"{path}, your list of trusted code, cannot be read: {failure}. Repair or delete it.") from failure
    if not all(isinstance(hashes, list) and all(isinstance(each, str) for each in hashes) for hashes in table.values()):
        raise ConfigError(f"{path}, your list of trusted code, must hold lists of SHA-256 by import path. Repair or delete it.")
    return {(name, each) for name, hashes in table.items() for each in hashes}


def extend_list(pairs: Iterable[Pair]) -> None:
    """Add pairs to the list; other processes that add at the same time lose nothing."""
    new, path = set(pairs), list_path()
    if new <= trusted_pairs():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(".lock"), wait=True):
            table: dict[str, list[str]] = {}
            for name, digest in sorted(trusted_pairs() | new):
                table.setdefault(name, []).append(digest)
            write_atomically(path, (NOTE + toml.dumps(table)).encode())
    except OSError as failure:
        fix = "Set EQUIPOISE_CONFIG to a folder that you may write to."
        raise NotWritten(f"{path}, your list of trusted code, cannot be written: {failure}. {fix}") from failure
