"""Files, JSON and TOML that may come from anybody: the one opener of files, and the only place where these formats are parsed.

What is nested too deeply for recursive code, and a number that neither 64 bits nor a float holds, is a ValueError.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

DEEPEST = 50  # lists and tables inside each other
LARGEST_TOML = 1 << 24  # bytes; the parser takes about a second for each million
# Texts and comments of TOML, also without an end, so that none is looked for twice; outside of these a key of too many steps.
_TEXTS = re.compile(
    r'"""(?:\\.|.)*?(?:"{3,5}+|\Z)|\'\'\'.*?(?:\'{3,5}+|\Z)|"(?:\\.|[^"\\\n])*+"?+|\'[^\'\n]*+\'?+|#[^\n]*+', re.DOTALL
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++\s*+\.\s*+){{{DEEPEST}}}")
_AT_ONCE = vars(os).get("O_NONBLOCK", 0) | vars(os).get("O_BINARY", 0)  # else opening a pipe waits for its writer
TOO_DEEP = f"it has more than {DEEPEST} lists or tables inside each other"


def parse_json(source: Path | str | bytes, *, finite: bool = False) -> Any:
    """The value of a JSON text, or of a file; with `finite`, NaN and infinite numbers, as Python writes them, are refused.

    >>> parse_json('{"rounds": 3}'), parse_json("[NaN]")
    ({'rounds': 3}, [nan])
    """
    try:
        return _checked(json.loads(content_of(source) if isinstance(source, Path) else source), finite=finite)
    except RecursionError as failure:
        raise ValueError(TOO_DEEP) from failure
    except json.JSONDecodeError as failure:
        raise ValueError(f"it is not valid JSON: {failure}") from failure


def parse_toml(source: Path | str | bytes) -> dict[str, Any]:
    """The tables of a TOML text in UTF-8, or of a file.

    >>> parse_toml("rounds = 3")
    {'rounds': 3}
    """
    content = content_of(source, most=LARGEST_TOML) if isinstance(source, Path) else source
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if _LONG_KEY.search(_TEXTS.sub("x", text)):  # the parser takes memory by the square of the steps of a key
            raise ValueError(TOO_DEEP)
        tables = tomllib.loads(text)
    except RecursionError as failure:
        raise ValueError(TOO_DEEP) from failure
    except UnicodeDecodeError as failure:
        raise ValueError(f"it is not a text in UTF-8: {failure}") from failure
    except tomllib.TOMLDecodeError as failure:
        raise ValueError(f"it is not valid TOML: {failure}") from failure
    _checked(tables, finite=False)
    return tables


def typed(table: Any, kinds: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """A table of which some entries must be of these types, made of them; `strict` ones are of them already.

    >>> typed({"rounds": 3, "name": "mine"}, {"rounds": float})
    {'rounds': 3.0, 'name': 'mine'}
    """
    made: dict[str, Any] = table | {key: made_of(kind, table[key], strict=strict, where=(key,)) for key, kind in kinds.items()}
    return made


def made_of(kind: Any, values: Any, *, strict: bool = False, where: tuple[str, ...] = ()) -> Any:
    """A value of a type, such as a dataclass, of what was parsed; a ValueError names the first entry that does not fit.

    >>> made_of(tuple[int, ...], [1, 2])
    (1, 2)
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(values, strict=strict)
    except ValidationError as failure:
        first = failure.errors()[0]
        place = ".".join(str(step) for step in (*where, *first["loc"]))
        raise ValueError(f"it is damaged at {place or 'its top'}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def open_plain(path: str | os.PathLike[str], flags: int = 0, folder: int | None = None) -> BufferedReader:
    """Open a plain file for reading; a device or a pipe, which may never end, is refused."""
    handle = os.open(path, os.O_RDONLY | _AT_ONCE | flags, dir_fd=folder)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError("it is no plain file")


def content_of(path: Path, *, most: int | None = None) -> bytes:
    """The content of a plain file; one of more bytes than `most` is refused."""
    with open_plain(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most} bytes")
        return file.read()


def _checked(value: Any, *, finite: bool) -> Any:
    """The value, if it is not too deep and has no number that is too large; with `finite` none that is not finite."""
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        inner = []
        for each in level:
            for leaf in each.values() if type(each) is dict else each:
                if (kind := type(leaf)) is list or kind is dict:
                    inner.append(leaf)
                elif kind is int and not -(2**63) <= leaf < 2**64:
                    raise ValueError("it has a whole number of more than 64 bits")
                elif finite and kind is float and not math.isfinite(leaf):
                    raise ValueError("it has a number that is not finite")
        if not inner:
            return value
        level = inner
    raise ValueError(TOO_DEEP)
