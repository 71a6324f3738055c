"""The parts of a page: files that it holds inline, sections, tables and lists of notices. Everything else is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from equipoise.report.formats import minus
from equipoise.report.notices import Notice
from equipoise.report.plot import COLOURS


class Html(str):
    """A text that is HTML already; any other text is escaped."""


def asset(name: str) -> str:
    """A file of the page: its template, a style sheet or a script."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def shown(text: object) -> str:
    """A text as HTML, with non-breaking spaces between numbers and their units; HTML as it is."""
    if isinstance(text, Html):
        return text
    return escape(str(text)).replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def section(key: str, title: str, *parts: Iterable[str]) -> Iterator[str]:
    """A section with a heading; nothing if it has no content."""
    if content := [line for part in parts for line in part]:
        yield f'<section aria-labelledby="{key}"><h2 id="{key}">{shown(title)}</h2>'
        yield from content
        yield "</section>"


def notes(notices: Iterable[Notice], key: str = "") -> Iterator[str]:
    """Notices as paragraphs, each with its code; nothing without any."""
    if found := list(notices):
        yield f'<div id="{key}">' if key else "<div>"
        yield from (f'<p class="note {each.level}" data-code="{each.code}">{shown(each.text)}</p>' for each in found)
        yield "</div>"


def table(
    key: str,
    caption: str,
    heads: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    notices: Iterable[Notice] = (),
    kind: str = "",
    kinds: Sequence[str] = (),
) -> Iterator[str]:
    """A table under its caption and notices, in a box that scrolls. The first cell of a row heads it; `kinds` are of rows."""
    lines = list(rows)
    if not lines:
        return
    said = "".join(f' <span class="{each.level}" data-code="{each.code}">{shown(each)}</span>' for each in notices)
    yield f'<div class="card"><p class="caption" id="{key}-caption">{shown(caption)}{said}</p>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{key}-caption">'
    yield f'<table class="{kind}" id="{key}" aria-labelledby="{key}-caption"><thead><tr>'
    yield from (_head(head, "col") for head in heads)
    yield "</tr></thead><tbody>"
    for k, (first, *cells) in enumerate(lines):
        mark = f' class="{kinds[k]}"' if kinds and kinds[k] else ""
        yield f"<tr{mark}>{_head(first, 'row')}{''.join(_cell(cell) for cell in cells)}</tr>"
    yield "</tbody></table></div></div>"


def _head(text: object, scope: str) -> str:
    """The header cell of a row or column; only a long name may break."""
    kind = "" if len(str(text)) > 14 else ' class="short"'
    return f'<th scope="{scope}"{kind}>{shown(text)}</th>'


def _cell(text: object) -> str:
    return text if isinstance(text, Html) and text.startswith("<td") else f"<td>{shown(text)}</td>"


def figure_cell(key: str, text: str, *, best: bool = False) -> Html:
    """The cell of a figure, which says which one it is."""
    return Html(f'<td class="{"best" * best}" data-key="{key}">{shown(text)}</td>')


def named(index: int, name: str) -> Html:
    """The name of a method after a small square in its colour."""
    return Html(f'<span class="swatch" style="background:var(--method-{index % len(COLOURS)})"></span>{shown(name)}')


def small(text: str, interval: str = "", verdict: str = "") -> Html:
    """A number, and an interval and a verdict below it; nothing is below where they are empty or a dash."""
    below = f' <small class="below">{shown(minus(interval))}</small>' if interval.strip("– ") else ""
    words = f' <small class="below verdict">{shown(verdict)}</small>' if verdict else ""
    return Html(f"{shown(text)}{below}{words}")


def definitions(key: str, pairs: Iterable[tuple[object, object]]) -> Iterator[str]:
    """A list of words and what they mean, or of settings and their values."""
    if found := list(pairs):
        yield f'<dl id="{key}" class="{key}">'
        yield from (f"<dt>{shown(word)}</dt><dd>{shown(meaning)}</dd>" for word, meaning in found)
        yield "</dl>"
