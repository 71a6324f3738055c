"""Names that look alike and count as different ones: with a space at an end, in capitals, or with accents written otherwise."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from equipoise.data.clients import prefix
from equipoise.data.schema import Schema
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


def tell_of_similar(schema: Schema, clients: Iterable[str], client: str, source: str) -> None:
    """Give a notice for each column of a table in which two clients, categories or classes look alike."""
    columns = {(client, "clients"): clients} | {(rule.name, "categories"): rule.categories for rule in schema.columns}
    columns[schema.target.name, "classes"] = schema.target.classes
    for (name, what), names in columns.items():
        if (pair := _pair_that_looks_alike(names)) is not None:
            same = _without_spaces(pair[0]) == _without_spaces(pair[1])  # then the eye sees no difference
            first, second = map(ascii if same else repr, pair)
            text = f"{prefix(source)}column {name!r} holds {first} and {second}, which look alike"
            notify(f"{text}. They are two {what}. If they are one, write them alike.")
