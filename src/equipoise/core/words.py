"""Numbers of things, and parts, in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def counted(count: int, noun: str) -> str:
    """A number of things: the noun has an s, unless it is one.

    >>> counted(1, "client"), counted(0, "client"), counted(12, "client")
    ('1 client', '0 clients', '12 clients')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shown_as_before(part: Any, later: tuple[str, ...]) -> str:
    """A dataclass as Python shows it, without the fields `later` where they have their default.

    Checkpoints compare this text, and those from before there were these fields stay valid.
    """
    given = [each for each in fields(part) if each.name not in later or getattr(part, each.name) != each.default]
    return f"{type(part).__qualname__}({', '.join(f'{each.name}={getattr(part, each.name)!r}' for each in given)})"
