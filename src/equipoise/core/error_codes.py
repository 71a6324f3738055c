"""The codes that messages end in: a family of rules is an error class and the modules that raise it (`error_codes.toml`).

No place that raises an error names a code. A new module gets the code of the longest prefix that fits, or of its error class.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from equipoise.core.plain_text import parse_toml

PACKAGE = __name__.partition(".")[0]
WRITTEN = re.compile(r" \[(EQ\d{3})\]")


@dataclass(frozen=True)
class ErrorFamily:
    """A family of rules: its code, the class and the modules that raise it, what it is about, its usual cause and its cure."""

    code: str
    error: str
    modules: tuple[str, ...]
    title: str
    cause: str
    cure: str


@lru_cache(maxsize=1)
def families() -> dict[str, ErrorFamily]:
    """Every family by its code."""
    table = parse_toml(Path(__file__).with_name("error_codes.toml"))
    return {
        code: ErrorFamily(code, row["error"], tuple(row["modules"]), row["title"], row["cause"], row["cure"])
        for code, row in table.items()
    }


@lru_cache(maxsize=1024)
def code_of(classes: tuple[str, ...], module: str) -> str:
    """The code of an error whose class and bases have these names, most special first, raised in a module of the library.

    >>> code_of(("InvalidParameter", "EquipoiseError"), "risk.superquantile")
    'EQ101'
    """
    for error in classes:
        found = [(len(prefix), family.code) for family in families().values() if family.error == error
                 for prefix in family.modules if prefix == "*" or f"{module}.".startswith(f"{prefix}.")]  # fmt: skip
        if found:
            return max(found)[1]
    return ""


def raised_in(depth: int = 2) -> str:
    """The module of the library that makes an error now, without the package's name; "" for code outside of the library.

    Helpers that check and raise for others (`require` of equipoise.errors) are passed over.
    """
    frame = sys._getframe(depth)
    while frame is not None and frame.f_globals.get("__name__") == f"{PACKAGE}.errors":
        frame = frame.f_back  # type: ignore[assignment]
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else ""
