"""Folders of the user's own code, and the list of those that the user trusts: real paths and SHA-256, in `trusted.toml`.

The list lies in the user's configuration folder, $EQUIPOISE_CONFIG or ~/.config, under equipoise. Only what a folder of a run
names is looked up there; the list itself runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from equipoise.core.files import config_folder, locked, write_atomically
from equipoise.core.plain_text import content_of, parse_toml
from equipoise.errors import ConfigError, FileGuard, NotWritten
from equipoise.experiment import toml

Pair = tuple[str, str]  # the real path of a folder, and the SHA-256 of all code in it
INIT = "__init__.py"
NOTE = "# Code that run folders may run: folder = SHA-256 of all its code. Delete a line to trust it no longer.\n"


@dataclass(frozen=True)
class CodeFolder:
    """All that a module of a folder may import from it: the sources there and in its packages, as they were read.

    A package is a folder with an `__init__.py`. Nothing else can be imported: no compiled file, and no other folder.
    """

    path: Path  # its real path
    sources: Mapping[str, bytes]  # by the path below the folder, such as "helper.py" or "package/__init__.py"

    @classmethod
    def read(cls, folder: Path) -> CodeFolder:
        """The code in a folder now; each file is read once."""
        sources = {}
        with FileGuard(folder, ConfigError, cure="Make its code readable, or begin a new run."):
            root = folder.resolve()
            for place, packages, names in os.walk(root):
                packages[:] = sorted(name for name in packages if Path(place, name, INIT).is_file())
                for file in (Path(place, name) for name in sorted(names) if name.endswith(".py")):
                    if file.is_file():
                        sources[file.relative_to(root).as_posix()] = content_of(file)
        return cls(root, sources)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each file, as `sha256sum` prints it."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.sources.items()}

    @property
    def pair(self) -> Pair:
        """What stands for it in the list: another folder, file or content is another pair."""
        return str(self.path), hashlib.sha256(json.dumps(self.hashes, sort_keys=True).encode()).hexdigest()

    @cached_property
    def modules(self) -> dict[str, str]:
        """The file of each module by the module's name; a package comes before a file of the same name."""
        return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in self.sources}


def list_path() -> Path:
    """The file of the list."""
    return config_folder() / "trusted.toml"


def trusted_pairs() -> set[Pair]:
    """All pairs of the list; none if there is no list."""
    path = list_path()
    with FileGuard(path, ConfigError, cure="It is your list of trusted code: repair or delete it."):
        try:
            table = parse_toml(path)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        if not all(isinstance(hashes, list) and all(isinstance(each, str) for each in hashes) for hashes in table.values()):
            raise ValueError("it must hold lists of SHA-256 by folder")
    return {(name, each) for name, hashes in table.items() for each in hashes}


def extend_list(pair: Pair) -> None:
    """Add a pair to the list; other processes that add at the same time lose nothing."""
    path = list_path()
    if pair in trusted_pairs():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(".lock"), wait=True):
            table: dict[str, list[str]] = {}
            for name, digest in sorted(trusted_pairs() | {pair}):
                table.setdefault(name, []).append(digest)
            write_atomically(path, (NOTE + toml.dumps(table)).encode())
    except OSError as failure:
        fix = "Set EQUIPOISE_CONFIG to a folder that you may write to."
        raise NotWritten(f"{path}, your list of trusted code, cannot be written: {failure}. {fix}") from failure
