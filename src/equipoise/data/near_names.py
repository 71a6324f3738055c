"""Names that look alike and count as different ones: with a space at an end, in capitals, or with accents written otherwise."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

from equipoise.data.clients import prefix
from equipoise.data.schema import Schema
from equipoise.errors import notify


def _without_spaces(name: str) -> str:
    """A name without spaces at its ends, and with each accent written in one way (Unicode's form C)."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def _without_capitals(name: str) -> str:
    return _without_spaces(name).casefold()


def _pair_that_looks_alike(names: Iterable[str], plain: Callable[[str], str]) -> tuple[str, str] | None:
    """The first two names that are one after `plain`."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(plain(name), name)) != name:
            return other, name
    return None


def tell_of_similar(schema: Schema, clients: Iterable[str], client: str, source: str) -> None:
    """Give a notice for each column of a table in which two clients, categories or classes look alike.

    Of clients and categories only spaces and accents count: identifiers may differ by capitals.
    """
    found = {(client, "clients"): _pair_that_looks_alike(clients, _without_spaces)}
    found |= {(rule.name, "categories"): _pair_that_looks_alike(rule.categories, _without_spaces) for rule in schema.columns}
    found[schema.target.name, "classes"] = _pair_that_looks_alike(schema.target.classes, _without_capitals)
    for (name, what), pair in found.items():
        if pair is not None:
            text = f"{prefix(source)}column {name!r} holds {pair[0]!a} and {pair[1]!a}, which look alike"
            notify(f"{text}. They are two {what}. If they are one, write them alike.")
