"""Names that look alike and count as different ones: with a space at an end, in capitals, or with accents written otherwise."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence

from equipoise.data.clients.client_set import prefix
from equipoise.data.tables.schema import Schema
from equipoise.errors import notify


def _without_spaces(name: str) -> str:
    """A name without spaces at its ends, and with each accent written in one way (Unicode's form C)."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def _without_capitals(name: str) -> str:
    return _without_spaces(name).casefold()


def _pair_that_looks_alike(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that are one without spaces, accents written otherwise and capitals."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(_without_capitals(name), name)) != name:
            return other, name
    return None


def same_but_for_writing(name: str, known: Iterable[str]) -> str:
    """The first known name that differs from a name in spaces, accents and capitals alone; empty if there is none.

    >>> same_but_for_writing(" klinik 25", ["Klinik 24", "Klinik 25"])
    'Klinik 25'
    """
    plain = _without_capitals(name)
    return next((other for other in known if other != name and _without_capitals(other) == plain), "")


_PANDAS: dict[str, Callable[[str], str]] = {  # what writes names alike, the shortest first
    ".str.strip().str.casefold()": lambda name: name.strip().casefold(),
    '.str.split().str.join(" ").str.casefold()': lambda name: " ".join(name.split()).casefold(),
    '.str.normalize("NFC").str.split().str.join(" ").str.casefold()': _without_capitals,
}


def _how_many(names: Sequence[str], column: str) -> tuple[str, str]:
    """How many more names look like another one, and the line of pandas that makes them one; empty where one does."""
    count, left = len(set(names)), len(set(map(_without_capitals, names)))
    if count - left < 2:
        return "", ""
    line = next(line for line, write in _PANDAS.items() if len(set(map(write, names))) == left)
    whole = f"{count} names would be {left} after {line}"
    return f", and {count - left - 1} more such names: {whole}", f", e.g. frame[{column!r}] = frame[{column!r}]{line}"


def tell_of_similar(schema: Schema, clients: Iterable[str], client: str, source: str) -> None:
    """Give a notice for each column of a table in which two clients, categories or classes look alike."""
    columns = {(client, "clients"): clients} | {(rule.name, "categories"): rule.categories for rule in schema.columns}
    columns[schema.target.name, "classes"] = schema.target.classes
    for (name, what), names in columns.items():
        if (pair := _pair_that_looks_alike(names)) is not None:
            same = _without_spaces(pair[0]) == _without_spaces(pair[1])  # then the eye sees no difference
            first, second = map(ascii if same else repr, pair)
            more, line = _how_many(list(names), name)
            text = f"{prefix(source)}column {name!r} holds {first} and {second}, which look alike{more}"
            they = f"Each counts as one of the {what}" if more else f"They are two {what}"
            notify(f"{text}. {they}. If they are one, write them alike{line}.")
