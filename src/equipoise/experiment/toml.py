"""Writes TOML with strings, booleans, numbers, lists and tables, as configurations hold them; `tomllib` reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any]) -> str:
    """A table as TOML; sub-tables become sections, tables inside lists are written inline.

    >>> print(dumps({"train": {"rounds": 3}, "algorithm": {"risk": {"name": "superquantile", "tail": 0.5}}}), end="")
    [train]
    rounds = 3
    <BLANKLINE>
    [algorithm.risk]
    name = "superquantile"
    tail = 0.5
    """
    sections = ("\n".join(lines) for lines in _sections(table, ()))
    return "\n\n".join(sections) + "\n"


def _sections(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[list[str]]:
    """The lines of the section at `path`, and of all sections below it."""
    plain = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if not isinstance(v, Mapping)]
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    if plain or (path and not inner):  # a section that only holds others needs no heading of its own
        yield ([f"[{'.'.join(map(_key, path))}]"] if path else []) + plain
    for key, value in inner.items():
        yield from _sections(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):  # true and false are written as in JSON
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"{value!r} ({type(value).__name__}) has no place in a TOML file.")
