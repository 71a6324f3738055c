"""JSON and TOML that may come from anybody. Every file and message of these formats is parsed here, and nowhere else.

What is nested too deeply for recursive code, and a number that neither 64 bits nor a float holds, is a ValueError.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

DEEPEST = 50  # lists and tables inside each other
TOO_DEEP = f"it has more than {DEEPEST} lists or tables inside each other"


def parse_json(source: Path | str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text, or of a file. Unless it is to be `finite`, numbers may be NaN or infinite, as Python writes them.

    >>> parse_json('{"rounds": 3}'), parse_json("[NaN]", finite=False)
    ({'rounds': 3}, [nan])
    """
    try:
        return _checked(json.loads(_content(source)), finite=finite)
    except RecursionError as failure:
        raise ValueError(TOO_DEEP) from failure


def parse_toml(source: Path | str | bytes) -> dict[str, Any]:
    """The tables of a TOML text in UTF-8, or of a file.

    >>> parse_toml("rounds = 3")
    {'rounds': 3}
    """
    content = _content(source)
    try:
        tables = tomllib.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except RecursionError as failure:
        raise ValueError(TOO_DEEP) from failure
    _checked(tables, finite=False)
    return tables


def _content(source: Path | str | bytes) -> str | bytes:
    """The text that is given, or that of a file. A device or a pipe, which may never end, is none."""
    if not isinstance(source, Path):
        return source
    if source.exists() and not source.is_file():
        raise OSError(f"{source} is no plain file")
    return source.read_bytes()


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
