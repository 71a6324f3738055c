"""Figures that only some runs have: clients' own models, privacy spent, participation on a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equipoise.report.data import series
from equipoise.report.data.participation import participation as arrivals_of
from equipoise.report.data.results_by_method import Numbers, Study
from equipoise.report.interactive import theme
from equipoise.report.interactive.theme import FULL, HALF, Json, as_json, figure, label, log_axis, method_traces
from equipoise.report.palette import FAINT, colour
from equipoise.report.text.phrases import listed, plural

MALICIOUS = "x"  # the mark of malicious clients; benign ones are discs
_POINT_NAMES = 5  # clients named at one point


def own(study: Study) -> Json | None:
    """The error of a client's own model over that of the shared one, with the line where both are equal.

    None if no client has a model of its own. Clients with the same two errors are one larger point.
    """
    if not study.personalised:
        return None
    data = [_points(study, index, pairs, malicious=malicious) for index, malicious, pairs in series.all_error_pairs(study)]
    if any(trace["marker"]["symbol"] == MALICIOUS for trace in data):
        mark = {"symbol": MALICIOUS, "color": FAINT, "size": 8}
        data.append(
            {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": "malicious client", "marker": mark}
        )
    seen = np.array([v for trace in data for axis in "xy" for v in trace[axis] if v is not None])
    axis, ends = _both_axes(study, seen)
    data.insert(0, {
        "type": "scatter", "mode": "lines", "x": as_json(ends), "y": as_json(ends), "hoverinfo": "skip", "showlegend": False,
        "line": {"color": FAINT, "width": 1.2, "dash": "dash"}, "name": "the same",
    })  # fmt: skip
    noun = f"{study.scale.noun}{study.unit}"
    layout = {
        "xaxis": {"title": {"text": f"shared model: {noun}"}, "showgrid": True, **axis},
        "yaxis": {"title": {"text": f"own model: {noun}"}, **axis},
    }
    return figure(data, layout, plot=270, width=HALF)


def _points(study: Study, index: int, pairs: series.ErrorPairs, *, malicious: bool) -> Json:
    """A point per pair of errors; larger where several clients share a pair."""
    scale, name, kind = study.scale, label(study.methods[index].name), "malicious client" if malicious else "client"
    words = [
        f"{_whose(study, kind, ids)}<br>shared model {scale.value(shared)}<br>own model {scale.value(mine)}<br>({name})"
        for shared, mine, ids in zip(pairs.shared, pairs.own, pairs.clients, strict=True)
    ]
    return {
        "type": "scatter", "mode": "markers", "x": as_json(study.in_unit(pairs.shared)), "y": as_json(study.in_unit(pairs.own)),
        "marker": {"color": colour(index), "opacity": 0.6, "symbol": MALICIOUS if malicious else "circle",
                   "size": as_json(min(26.0, 7 * math.sqrt(len(ids))) for ids in pairs.clients)},
        "hoverinfo": "text", "hovertext": words, "name": name, "legendgroup": str(index), "showlegend": not malicious,
    }  # fmt: skip


def _whose(study: Study, kind: str, ids: Sequence[str]) -> str:
    """The clients of a point: by name, or their number where a run protects them."""
    if not study.names_clients:
        return f"{len(ids)} {plural(kind, len(ids))}"
    return f"{plural(kind, len(ids))} {listed([label(client, 24) for client in ids], _POINT_NAMES)}"


def _both_axes(study: Study, seen: Numbers) -> tuple[Json, tuple[float, float]]:
    """One axis for both errors, with a little room, and the ends of the line where both are equal."""
    if not len(seen):
        return {}, (0.0, 1.0)
    low, high = float(seen.min()), float(seen.max())
    if series.needs_log_axes(study, seen):
        room = 0.04 * math.log10(high / low)
        ends = (math.log10(low) - room, math.log10(high) + room)
        return log_axis(low, high) | {"range": list(ends)}, (10 ** ends[0], 10 ** ends[1])
    low = 0.0 if 0 <= low < high / 2 else low
    room = 0.05 * (high - low or abs(high) or 1.0)
    ends = (low - room, high + room)
    return {"range": list(ends), "nticks": 6}, ends


def privacy(study: Study) -> Json | None:
    """ε spent after each round. None if no round reports it."""
    lines = [series.over_rounds(method, "epsilon", smoothed=False) for method in study.methods]
    if not any(len(line) for line in lines):
        return None
    data: list[Json] = []
    widths = series.line_widths(lines, 2.2, 9.0)
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        if len(line):
            data += method_traces(
                line, method.name, index, width=widths[index], hovertemplate="ε = %{y:.4~g}",
                mode="lines+markers" if len(line) <= 12 else "lines", marker={"color": colour(index), "size": 6},
            )  # fmt: skip
    layout = {
        "xaxis": theme.round_axis("after round %{x}"),
        "yaxis": {"title": {"text": "ε spent"}, "rangemode": "tozero"}, **theme.UNIFIED_HOVER,
    }  # fmt: skip
    return figure(data, layout, plot=200, width=FULL)


def participation(study: Study) -> Json | None:
    """How often each client came back over the time of its work; None where clients work in rounds."""
    data: list[Json] = []
    for index, method in enumerate(study.methods):
        seen = arrivals_of(method)
        if not seen.clients:
            continue
        words = [
            f"client {label(client, 24)}<br>{took:.4g} per job, {plural('job', jobs)}<br>mean staleness {age:.2g}"
            for client, took, jobs, age in zip(*seen, strict=True)
        ]
        data.append({
            "type": "scatter", "mode": "markers", "x": as_json(seen.took), "y": as_json(seen.jobs), "name": label(method.name),
            "marker": {"color": colour(index), "opacity": 0.6, "size": 7}, "hoverinfo": "text", "hovertext": words,
            "legendgroup": str(index),
        })  # fmt: skip
    if not data:
        return None
    took = [value for trace in data for value in trace["x"]]
    layout = {
        "xaxis": {"title": {"text": "simulated time of a job"}, "showgrid": True, **log_axis(min(took), max(took))},
        "yaxis": {"title": {"text": "jobs that came back"}, "rangemode": "tozero"},
    }
    return figure(data, layout, plot=270, width=HALF)
