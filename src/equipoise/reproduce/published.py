"""Published numbers, read from the TOML files in `published/`; each table names its document and where it stands there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from equipoise.core.plain_text import parse_toml
from equipoise.report.over_seeds import Spread

_TEXT_KEYS = ("parameter", "chosen_on")  # the keys of a row that are no figures


@dataclass(frozen=True)
class PublishedRow:
    """The published figures of a method, its parameter, and the clients that this was chosen on ("" if none was chosen)."""

    figures: Mapping[str, Spread]
    parameter: str = ""
    chosen_on: str = ""
    means_only: tuple[str, ...] = ()  # figures without a published standard deviation

    @property
    def chosen_on_test(self) -> bool:
        """Whether the parameter was chosen on the test clients that the row is judged by."""
        return self.chosen_on == "test clients"


@dataclass(frozen=True)
class PublishedTable:
    """A published table: where it stands, and its rows by the name of the method."""

    document: str
    source: str
    rows: Mapping[str, PublishedRow]
    notes: tuple[str, ...] = ()


@cache
def _document(name: str) -> dict[str, Any]:
    """All tables of one document."""
    return parse_toml(resources.files(__package__).joinpath("published", f"{name}.toml").read_bytes())


@cache
def table(reference: str) -> PublishedTable:
    """The table that "document/table" names, e.g. "journal/emnist-linear"."""
    document, name = reference.split("/")
    content = _document(document)[name]
    rows = {
        method: PublishedRow(
            {figure: Spread(float(pair[0]), float(pair[-1]) if len(pair) > 1 else 0.0) for figure, pair in numbers.items()},
            **{word: row.get(word, "") for word in _TEXT_KEYS},
            means_only=tuple(figure for figure, pair in numbers.items() if len(pair) == 1),
        )
        for method, row in content["rows"].items()
        for numbers in [{figure: pair for figure, pair in row.items() if figure not in _TEXT_KEYS}]
    }
    return PublishedTable(_document(document)["document"], content["source"], rows, tuple(content.get("notes", ())))
