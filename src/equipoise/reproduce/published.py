"""Published numbers, read from the TOML files beside this module; each table names its document and place."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from equipoise.report.data.over_seeds import Spread

ON_TEST = "test clients"
_WORDS = ("parameter", "chosen_on")


@dataclass(frozen=True)
class PublishedRow:
    """One method's published figures, its parameter, and what that was chosen on ("" where nothing was chosen)."""

    figures: Mapping[str, Spread]
    parameter: str = ""
    chosen_on: str = ""

    @property
    def marked(self) -> bool:
        """Whether the parameter was chosen on the clients that the row is judged by."""
        return self.chosen_on == ON_TEST


@dataclass(frozen=True)
class PublishedTable:
    """A published table: rows by the names that the methods have here."""

    document: str
    source: str
    rows: Mapping[str, PublishedRow]
    notes: tuple[str, ...] = ()


@cache
def _document(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("published", f"{name}.toml").read_text(encoding="utf-8"))


@cache
def table(place: str) -> PublishedTable:
    """The table at "document/table", for instance "journal/emnist-linear"."""
    document, name = place.split("/")
    content = _document(document)[name]
    rows = {
        method: PublishedRow(
            {figure: Spread(*map(float, pair)) for figure, pair in row.items() if figure not in _WORDS},
            *(row.get(word, "") for word in _WORDS),
        )
        for method, row in content["rows"].items()
    }
    return PublishedTable(_document(document)["document"], content["source"], rows, tuple(content.get("notes", ())))
