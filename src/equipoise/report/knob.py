"""The knob of a family, and the table of all clients: their numbers, and their HTML, which scripts make move.

For each member of a family the knob shows how clients fare, who gains and who loses beside the first member.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.metrics import summarise
from equipoise.report.html import asset, embedded, shown, table
from equipoise.report.notices import notice

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

BINS = 20
NBSP = "\u00a0"
FIRST_ROWS = 20  # of the table of clients, in the page itself
PAGE_SCRIPTS = ("charts.js", "knob.js", "clients.js")
NAMED = 8  # clients that are named among those that gain most, and lose most


@dataclass(frozen=True, eq=False)
class MemberClients:
    """A member of a family: the value of the knob, its name, and its table of clients."""

    value: float
    name: str
    clients: ClientTable


def knob_data(
    knob: str, members: Sequence[MemberClients], judged_on: str, *, error_is_loss: bool, private: bool = False
) -> dict[str, Any]:
    """The numbers of a knob as JSON, from the average to the tail; the first member is what gains and losses are against.

    With `private` there are no single clients in it: neither names nor a histogram.
    """
    ordered = sorted(members, key=lambda member: -member.value if knob == "tail" else member.value)
    tables = [member.clients.where(judged_on).benign for member in ordered]
    errors = [table.served_error.double() for table in tables]
    finite = torch.cat(errors)
    finite = finite[finite.isfinite()]
    percent = not error_is_loss and bool(((finite >= 0) & (finite <= 1)).all())
    edges = _edges(finite, percent)
    weights = tables[0].size.double() if judged_on == "train" else None
    made = []
    for member, error in zip(ordered, errors, strict=True):
        found = summarise(error, tables[0].size, weights)
        numbers = {
            "mean": found.mean, "percentile_90": found.percentiles[90], "worst_10": found.worst_10,
            "standard_deviation": found.standard_deviation,
        }  # fmt: skip
        about: dict[str, Any] = {"value": member.value, "name": member.name, "words": in_words(knob, member.value)}
        about |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if not private:
            about["counts"] = np.histogram(error[error.isfinite()].numpy(), edges)[0].tolist()
            about |= _moves(tables[0], errors[0], error)
        made.append(about)
    return {
        "knob": knob, "noun": "loss" if error_is_loss else "error", "percent": percent, "judged_on": judged_on,
        "clients": len(tables[0]), "unseen": not bool(tables[0].seen.any()), "private": private,
        "edges": [] if private else edges.tolist(), "members": made,
    }  # fmt: skip


def _edges(finite: Tensor, percent: bool) -> Any:
    if percent:
        return np.linspace(0.0, 1.0, BINS + 1)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return np.linspace(low, high if high > low else low + 1.0, BINS + 1)


def _moves(table: ClientTable, before: Tensor, after: Tensor) -> dict[str, Any]:
    """How many clients gain and lose beside the first member, and those that do most."""
    change = torch.nan_to_num(after - before, nan=0.0)
    # Loads of clients have the same change; among these the order is that of the table.
    order = torch.argsort(change, stable=True).tolist()

    def row(place: int) -> dict[str, Any]:
        return {
            "client": table.client[place], "examples": int(table.size[place]),
            "before": _finite(before[place]), "after": _finite(after[place]),
        }  # fmt: skip

    gain = [row(place) for place in order[:NAMED] if change[place] < -1e-12]
    lose = [row(place) for place in order[::-1][:NAMED] if change[place] > 1e-12]
    return {"gains": int((change < -1e-12).sum()), "loses": int((change > 1e-12).sum()), "gain": gain, "lose": lose}


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def in_words(knob: str, value: float) -> str:
    """What a value of the knob means.

    >>> in_words("tail", 1.0), in_words("tail", 0.5), in_words("tilt", -1.0)
    ('trained for the average client', 'trained for the worse 50 % of the clients', 'trained with tilt = -1')
    """
    if (knob == "tail" and value == 1.0) or (knob != "tail" and value == 0.0):
        return "trained for the average client"
    if knob == "tail":
        return f"trained for the worse {100 * value:.4g} % of the clients"
    return f"trained with {knob} = {value:g}"


def written(value: float | None, percent: bool) -> str:
    r"""A number as pages write it.

    >>> written(0.245, True), written(None, True)
    ('24.5\xa0%', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f}\u00a0%" if percent else f"{value:.4g}"


def knob_section(data: Mapping[str, Any]) -> Iterator[str]:
    """The knob of a family; `data` are those of `knob_data`."""
    members: Sequence[Mapping[str, Any]] = data["members"]
    percent, private, keys = data["percent"], data["private"], ("mean", "percentile_90", "worst_10")
    rows: list[list[object]] = []
    for member in members:
        moves = [] if private else [member["gains"], member["loses"]] if member is not members[0] else ["–", "–"]
        rows.append([f"{member['value']:g}", *(written(member[key], percent) for key in keys), *moves])
    heads = [data["knob"], f"mean {data['noun']}", "90th percentile", "worst tenth"]
    heads += [] if private else ["clients that gain", "clients that lose"]
    who = f"{data['clients']} {'unseen ' * data['unseen']}{data['judged_on']} clients"
    html = asset("knob.html")
    yield Template(re.sub(r"(?s)<!--clients-->.*?<!--/clients-->", "", html) if private else html).substitute(
        note=shown(notice("knob", who=who)),
        knob=shown(data["knob"]),
        noun=data["noun"],
        last=len(members) - 1,
        ticks="".join(f'<button type="button" tabindex="-1" aria-pressed="false">{row[0]}</button>' for row in rows),
        layout="stack" if private else "pair",
        table="".join(table("knob-table", "All positions of the knob", heads, rows)),
        data=embedded(data),
    )


def clients_table(
    columns: Mapping[str, Sequence[Any]], *, percent: bool, title: str = "All clients", note: str = ""
) -> Iterator[str]:
    """A table of all clients that can be sorted, searched and saved as CSV; without JavaScript, its first rows."""
    count = len(next(iter(columns.values())))

    def cell(name: str, value: Any) -> str:
        if name.startswith("change") and value is not None:
            return f"{'−' if value < 0 else '+'}{written(abs(value), percent).removesuffix(f'{NBSP}%')}"
        return shown(written(value, percent) if name.startswith(("error", "loss", "trivial", "change")) else value)

    lines = []
    for row in range(min(count, FIRST_ROWS)):
        first, *cells = (cell(name, values[row]) for name, values in columns.items())
        lines.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{each}</td>" for each in cells) + "</tr>")
    yield Template(asset("clients.html")).substitute(
        title=shown(title),
        note=shown(note),
        heads="".join(
            f'<th scope="col" aria-sort="none"><button type="button">{shown(name)}</button></th>' for name in columns
        ),
        rows="".join(lines),
        without=shown(notice("rows-in-page", shown=len(lines), all=count)),
        data=embedded({"columns": columns, "percent": percent}),
    )
