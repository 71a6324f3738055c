"""The HTML of the knob and of the table of all clients. Both are tables without JavaScript; scripts make them move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from equipoise.report.interactive.assets import embedded

TILES = {"mean": "mean {noun}", "percentile_90": "90th percentile", "worst_10": "worst tenth"}
NBSP = "\u00a0"
FIRST_ROWS = 20  # of the table of clients, in the page itself
PAGE_SCRIPTS = ("charts.js", "knob.js", "clients.js")


def shown(value: float | None, percent: bool) -> str:
    r"""A number as the page writes it.

    >>> shown(0.245, True), shown(None, True)
    ('24.5\xa0%', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f}\u00a0%" if percent else f"{value:.4g}"


def knob_section(data: Mapping[str, Any], *, note: str = "") -> Iterator[str]:
    """The knob of a family; `data` are those of `knob_data`."""
    members: Sequence[Mapping[str, Any]] = data["members"]
    noun, percent, knob = data["noun"], data["percent"], escape(data["knob"])
    who = f"{data['clients']} {'unseen ' if data['unseen'] else ''}{escape(data['judged_on'])} clients"
    yield '<section class="knob" aria-labelledby="knob-title"><h2 id="knob-title">Turn the knob</h2>'
    yield f'<p class="note">Each position is a model of its own; the numbers are over {who}. {escape(note)}</p>'
    yield '<div id="knob-live" class="card" hidden><div class="turn">'
    yield '<label for="knob-slider">From the average client to the tail: <output id="knob-value"'
    yield f' for="knob-slider">{knob}</output></label>'
    yield f'<input type="range" id="knob-slider" min="0" max="{len(members) - 1}" step="1" value="0">'
    yield '<div id="knob-ticks">'
    yield from (f'<button type="button" tabindex="-1" aria-pressed="false">{member["value"]:g}</button>' for member in members)
    yield '</div></div><p id="knob-words" role="status"></p><div class="tiles">'
    for key, title in TILES.items():
        yield f'<div class="tile"><span>{title.format(noun=noun)}</span><output id="knob-{key}"></output>'
        yield f'<small id="knob-{key}-change"></small></div>'
    yield "</div>"
    yield f'<div class="{"stack" if data["private"] else "pair"}">'
    if not data["private"]:
        yield f"<figure><h3>How the {noun} is spread over clients</h3>"
        yield f'<svg id="knob-histogram" role="img" aria-label="Histogram of the {noun} of clients; the numbers are in'
        yield ' the table below"></svg>'
        yield "<figcaption>Lines: mean (solid) and 90th percentile (dashed). Outline: the start of the knob.</figcaption>"
        yield "</figure>"
    yield "<figure><h3>What the tail gains and the average pays</h3>"
    yield '<svg id="knob-tradeoff" role="img" aria-label="Mean against 90th percentile for every position; the'
    yield ' numbers are in the table below"></svg>'
    yield "<figcaption>Lower is better in both directions. The large point is where the knob stands.</figcaption>"
    yield "</figure></div>"
    if data["private"]:
        yield '<p class="note">This run protects single clients, so none of them is shown.</p>'
    else:
        yield '<div class="pair moves"><div><h3 id="knob-gains">Clients that gain</h3><ul id="knob-gain"'
        yield ' aria-labelledby="knob-gains"></ul></div>'
        yield '<div><h3 id="knob-loses">Clients that lose</h3><ul id="knob-lose" aria-labelledby="knob-loses"></ul></div></div>'
    yield "</div>"
    yield "<h3>All positions of the knob</h3>"
    yield '<div class="card scroll" tabindex="0" role="region" aria-label="All positions of the knob"><table'
    yield ' id="knob-table"><thead><tr>'
    yield f'<th scope="col">{knob}</th>'
    yield from (f'<th scope="col">{title.format(noun=noun)}</th>' for title in TILES.values())
    if not data["private"]:
        yield '<th scope="col">clients that gain</th><th scope="col">clients that lose</th>'
    yield "</tr></thead><tbody>"
    for member in members:
        cells = [shown(member[key], percent) for key in TILES]
        if not data["private"]:
            cells += [str(member["gains"]), str(member["loses"])] if member is not members[0] else ["–", "–"]
        yield f'<tr><th scope="row">{member["value"]:g}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
    yield f'<script type="application/json" id="knob-data">{embedded(data)}</script></section>'


def clients_section(
    columns: Mapping[str, Sequence[Any]], *, percent: bool, title: str = "All clients", note: str = ""
) -> Iterator[str]:
    """A table of all clients that can be sorted, searched and saved as CSV; without JavaScript, its first rows."""
    names = list(columns)
    count = len(columns[names[0]])
    yield f'<section class="clients" aria-labelledby="clients-title"><h2 id="clients-title">{escape(title)}</h2>'
    if note:
        yield f'<p class="note" id="clients-note">{escape(note)}</p>'
    yield '<p id="clients-tools" class="tools" hidden><label for="clients-search">Search</label> '
    yield '<input type="search" id="clients-search" autocomplete="off"> <button type="button"'
    yield ' id="clients-save">Save as CSV</button> '
    yield '<span id="clients-status" role="status"></span></p>'
    yield '<div class="card scroll" tabindex="0" role="region" aria-label="All clients"><table id="clients-table"><thead><tr>'
    yield from (f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>' for name in names)
    yield "</tr></thead><tbody>"
    for row in range(min(count, FIRST_ROWS)):
        cells = []
        for name in names:
            value = columns[name][row]
            if name.startswith("change") and value is not None:
                cells.append(f"{'−' if value < 0 else '+'}{shown(abs(value), percent).removesuffix(f'{NBSP}%')}")
            else:
                number = name.startswith(("error", "loss", "trivial", "change"))
                cells.append(shown(value, percent) if number else escape(str(value)))
        yield f'<tr><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>"
    yield '</tbody></table></div><p><button type="button" id="clients-more" hidden>Show more</button></p>'
    if count > FIRST_ROWS:
        yield f"<noscript><p>The first {FIRST_ROWS} of {count} rows; sorting and searching need JavaScript.</p></noscript>"
    yield '<script type="application/json"'
    yield f' id="clients-data">{embedded({"columns": columns, "percent": percent})}</script></section>'
