"""The figure of changes: every client's error under a method against the first one, clients sorted by their change."""

from __future__ import annotations

import numpy as np

from equipoise.report.data import series
from equipoise.report.data.results_by_method import Study
from equipoise.report.interactive.theme import BAND, BAR, DASHES, FULL, Json, as_json, figure, label
from equipoise.report.palette import FAINT, colour, palette_cycle, with_opacity
from equipoise.report.text.client_numbers import signed

_MOST_BARS = 60  # clients that are drawn one by one


def gains(study: Study) -> Json | None:
    """A curve per method over the share of clients; None for one method, or if no client can be compared."""
    curves = series.sorted_changes(study)
    if not curves:
        return None
    named = not any(run.algorithm.privacy is not None for run in study.runs)
    unit = "points" if study.scale.percent else ""
    data: list[Json] = []
    for curve in curves:
        name = label(study.methods[curve.method].name)
        words = [
            f"{f'client {label(client, 40)}<br>' * named}{signed(study, change)} {unit}<br>({name})".replace(" <br>", "<br>")
            for client, change in zip(curve.clients, curve.change, strict=True)
        ]
        data.append({
            "x": as_json(curve.share), "y": as_json(study.in_unit(curve.change)), "name": name, "hoverinfo": "text",
            "hovertext": words, "legendgroup": str(curve.method), **_drawn(curve, alone=len(curves) == 1),
        })  # fmt: skip
    seen = np.concatenate([study.in_unit(curve.change) for curve in curves])
    room = 0.06 * (max(0.0, float(seen.max())) - min(0.0, float(seen.min())) or 1.0)
    layout = {
        "bargap": 0,
        "xaxis": {"title": {"text": "share of the clients (%), sorted"}, "range": [0, 100]},
        "yaxis": {
            "title": {"text": f"change of the {study.scale.noun}{' (points)' * study.scale.percent}"}, "nticks": 7,
            "zeroline": True, "zerolinecolor": FAINT, "zerolinewidth": 1.6,
            "range": [min(0.0, float(seen.min())) - room, max(0.0, float(seen.max())) + room],
        },
    }  # fmt: skip
    return figure(data, layout, plot=270, width=FULL)


def _drawn(curve: series.ChangeCurve, *, alone: bool) -> Json:
    """Bars for the clients of one method if they are few, else a line; it has an area below it if it is alone."""
    shade, count = colour(curve.method), len(curve.clients)
    if alone and count <= _MOST_BARS:
        return {"type": "bar", "width": 92 / count, "marker": {"color": with_opacity(shade, BAR), "line": {"width": 0}}}
    area = {"fill": "tozeroy", "fillcolor": with_opacity(shade, BAND)} if alone else {}
    stroke = {"color": shade, "width": 2.2, "dash": DASHES[palette_cycle(curve.method) % len(DASHES)]}
    marks = {"mode": "lines+markers" if count <= _MOST_BARS else "lines", "marker": {"color": shade, "size": 6}}
    return {"type": "scatter", "line": stroke, **marks, **area}
