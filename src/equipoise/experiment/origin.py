"""Where a configuration was read: the folder that its paths start from, and the code of the user's own that it may run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from equipoise.experiment.own_code import OwnCode, recorded_folders

# "never" for reports and listings; "run" for a configuration that the user runs; "resume" for the folder of a run.
CodeUse = Literal["never", "run", "resume"]


@dataclass(frozen=True)
class Origin:
    """The folder of a configuration, if it has one, and its code, if that may run."""

    folder: Path | None = None
    code: OwnCode | None = None

    @classmethod
    def of(cls, path: str | Path, table: Mapping[str, Any], code: CodeUse, *, trust: bool = False) -> Origin:
        """The origin of the tables of a file.

        A configuration that the user runs may name code beside it, which the user trusts thereby. One that a run has written
        (it has a section [code], or lies in the folder of a run) may name only the recorded files, if they are trusted.
        """
        folder = Path(os.path.abspath(path)).parent
        if code == "never":
            return cls(folder)
        left_by_run = any((folder / name).exists() for name in ("rounds.jsonl", "checkpoint/state.safetensors"))
        by_a_run = code == "resume" or "code" in table or left_by_run
        return cls(folder, OwnCode(folder, recorded_folders(table) if by_a_run else None, trust=trust))

    def path(self, text: str) -> str:
        """A path of the configuration, absolute.

        A relative path starts from the folder of the configuration. If nothing is there, but something is there from the
        working directory, it is that.
        """
        if self.folder is None:
            return text
        try:
            given = Path(text).expanduser()
            beside, here = self.folder / given, Path.cwd() / given
            return os.path.abspath(here if here.exists() and not beside.exists() else beside)
        except (OSError, ValueError, RuntimeError):  # no such user, a name too long, a NUL: the reader of the file refuses it
            return text
