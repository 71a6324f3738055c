"""Numbers of things, parts and names from elsewhere in words, and words as lines, tables and Markdown."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from logging import LogRecord
from os import PathLike
from typing import Any
from unicodedata import category, east_asian_width

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control characters, marks of direction, halves of a letter, ends of lines
_JOINERS = "\u200c\u200d"  # hidden, too, but some languages, and emoji, need them
_WIDEST = 80  # characters of a cell of a table, but for those of its last column


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


def printable(text: object) -> str:
    r"""Text from elsewhere as one line that a terminal, a log or a page can show.

    Ends of lines and tabs become spaces. Whatever else is no letter, such as an escape sequence, becomes �. The length stays.

    >>> printable("caf\udce9"), printable("red\x1b[31m\nline\u202e"), printable("Δ-FL 0.5")
    ('caf�', 'red�[31m line�', 'Δ-FL 0.5')
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    shown = (" " if each in "\t\n\r" else "�" if category(each) in _HIDDEN and each not in _JOINERS else each for each in plain)
    return "".join(shown)


def joined(lines: Iterable[object]) -> str:
    r"""Lines as a text, of which each stays one line, whatever names are in it.

    >>> joined(["client  error", "anna\n     0.1"])
    'client  error\nanna      0.1'
    """
    return "\n".join(map(printable, lines))


def message(text: str) -> str:
    r"""An error or a notice as it is shown: a line of it that is not indented was begun by a name, and is none.

    >>> message("Client a\nAll is well.\n  Rename it.")
    'Client a All is well.\n  Rename it.'
    """
    return joined(re.split(r"\n(?=  )", text))


def traceback_text(failure: BaseException) -> str:
    """The traceback of a failure, as it can be shown."""
    return "\n".join(message(part.rstrip("\n")) for part in traceback.format_exception(failure))


def clean_record(record: LogRecord) -> bool:
    """A filter of a logger: no name in its lines and tracebacks begins a line or moves a cursor."""
    record.msg = message(str(record.msg))
    if isinstance(record.args, tuple):
        record.args = tuple(message(str(a)) if isinstance(a, str | BaseException | PathLike) else a for a in record.args)
    if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
        record.exc_text = traceback_text(record.exc_info[1])
    return True


def cells(text: str) -> int:
    """The columns of a terminal that a text takes.

    >>> cells("anna"), cells("東京"), cells("e\u0301")
    (4, 4, 1)
    """
    return sum(0 if category(each) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(each) in "WF") for each in printable(text))


def padded(text: str, width: int) -> str:
    """A name as one line with spaces behind it, so that it takes so many columns of a terminal."""
    return printable(text) + " " * (width - cells(text))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, in columns. Very long cells lose their middle, but in the last column.

    >>> table_lines([("client", "size"), ("東京", "3")])
    ['client  size', '東京    3']
    """
    half = _WIDEST // 2
    short = [[*(c if len(c) <= _WIDEST else f"{c[:half]}…{c[1 - half :]}" for c in row[:-1]), row[-1]] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*short, strict=True)]
    return ["  ".join(map(padded, row, widths)).rstrip() for row in short]


def markdown_text(text: object) -> str:
    r"""A text that Markdown and HTML, such as a cell of a table, show as it is.

    >>> print(markdown_text("a|b *c* <i>"))
    a\|b \*c\* &lt;i&gt;
    """
    return re.sub(r"([\\`*_\[\]|#!])", r"\\\1", escape(" ".join(printable(text).split()), quote=False))
