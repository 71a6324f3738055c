"""The figures: pure functions from a study to a `Plot`, which the page and the files for papers draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from equipoise.report import plot as draw
from equipoise.report import series
from equipoise.report.plot import FAINT, FULL, Json, Plot, as_json, colour, label, log_axis, method_traces, points, with_opacity
from equipoise.report.study import Study

MALICIOUS = "x"  # the mark of malicious clients; benign ones are discs
_POINT_NAMES = 5  # clients named at one point
_MOST_BARS = 60  # clients whose changes are drawn one by one
_LINES = (("mean", "mean", "solid"), ("percentile_90", "90th percentile", "dash"))


def histogram(study: Study) -> Plot:
    """A histogram of the error per method, one below the other on the same axes, with lines at mean and 90th percentile."""
    counted, methods = series.histogram(study), study.methods
    edges = np.log10(counted.edges) if counted.logarithmic else study.in_unit(counted.edges)
    top = 108 * max(float(share.max(initial=0.0)) for share in counted.shares) or 1.0
    data: list[Json] = []
    panels: list[Json] = []
    ticks = draw.log_ticks(*counted.edges[[0, -1]], powers=True) | {"tickmode": "array"} if counted.logarithmic else {}
    x_axis = {"title": {"text": study.axis_name}, "range": as_json(edges[[0, -1]]), **ticks}
    layout: Json = {"bargap": 0, "barmode": "overlay", "xaxis": x_axis}
    for index, (method, share) in enumerate(zip(methods, counted.shares, strict=True)):
        number = str(index + 1) if index else ""
        shared = {"yaxis": f"y{number}", "hoverinfo": "text"}
        data.append({
            **shared, "type": "bar", "x": as_json((edges[:-1] + edges[1:]) / 2), "y": as_json(100 * share),
            "width": as_json(np.diff(edges)), "name": label(method.name), "showlegend": False,
            "marker": {"color": with_opacity(colour(index), draw.BAR), "line": {"width": 0}},
            "hovertext": [f"{label(method.name)}<br>{100 * of:.1f} %, {study.scale.number(low)} to {study.scale.value(high)}"
                          for low, high, of in zip(counted.edges, counted.edges[1:], share, strict=False)],
        })  # fmt: skip
        if index:
            data.append({
                **shared, "type": "scatter", "mode": "lines", "x": as_json(edges), "hoverinfo": "skip",
                "y": as_json(100 * np.r_[counted.shares[0], counted.shares[0][-1]]), "showlegend": index == 1,
                "line": {"shape": "hv", "color": colour(0), "width": 1.2}, "name": f"outline: {label(methods[0].name)}",
            })  # fmt: skip
        written = []
        for key, words, style in _LINES:
            value = method.figures[key].mean
            written.append(f"{words} {study.scale.value(value)}")
            if math.isfinite(value) and not (counted.logarithmic and value <= 0):
                at = math.log10(value) if counted.logarithmic else 100 * value if study.scale.percent else value
                data.append({
                    **shared, "type": "scatter", "mode": "lines", "x": as_json([at] * 9), "y": as_json(np.linspace(0, top, 9)),
                    "line": {"width": 2, "dash": style}, "name": words, "showlegend": index == 0,
                    "hovertext": f"{label(method.name)}<br>{written[-1]}",
                })  # fmt: skip
        axis = {"range": [0, top], "fixedrange": True, "nticks": 4, "showline": False}
        layout[f"yaxis{number}"] = axis | ({"title": {"text": "share of clients (%)"}} if index == len(methods) // 2 else {})
        panels.append({"title": label(method.name), "note": " · ".join(written), "color": colour(index)})
    x_axis["anchor"] = f"y{len(methods)}" if len(methods) > 1 else "y"
    height = {1: 280, 2: 140, 3: 108}.get(len(methods), 84)
    return Plot(data, layout, FULL, height, panels)


def percentiles(study: Study) -> Plot:
    """The error at each percentile of the clients, a curve per method."""
    lines = [series.percentiles(method).in_unit(study) for method in study.methods]
    data: list[Json] = []
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        data += method_traces(line, method.name, index, **_hover(study, line))
    spread = np.concatenate([v for line in lines for v in (line.low, line.high)])
    layout = {
        "xaxis": {
            "title": {"text": "percentile of the clients, best to worst"}, "range": [0, 100], "tickmode": "array",
            "tickvals": [0, 25, 50, 75, 90, 100], "hoverformat": ".1~f",
            "unifiedhovertitle": {"text": f"%{{x}} % of the {'examples' if study.judged.weighted else 'clients'} see at most"},
        },
        "yaxis": draw.value_axis(study, spread, logarithmic=study.spans_decades()),
        **draw.UNIFIED_HOVER,
        "shapes": [{"type": "line", "x0": 90, "x1": 90, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
                    "line": {"color": FAINT, "width": 1.2, "dash": "dash"}}],
    }  # fmt: skip
    return Plot(data, layout)


def _hover(study: Study, line: series.Line, *, of_error: bool = True) -> Json:
    """What a point of a line says: its value, and the lowest and highest seed where there are several."""
    scale = study.scale if of_error else study.scale.fitting(float(np.max(line.middle, initial=0.0)), percent=False)
    digits = f"%{{y:.{scale.decimals}f}}{scale.unit}"
    if line.seeds == 1:
        return {"hovertemplate": digits}
    written = [[f"{end:.{scale.decimals}f}" for end in ends] for ends in zip(line.low, line.high, strict=True)]
    return {"customdata": written, "hovertemplate": f"{digits} (seeds %{{customdata[0]}} to %{{customdata[1]}})"}


def tradeoff(study: Study) -> Plot | None:
    """Mean against 90th percentile: one point per method with ± standard deviation over seeds, a small point per seed."""
    if len(study.methods) < 2:
        return None
    scale, noun = study.scale, study.scale.noun
    data: list[Json] = []
    for index, method in enumerate(study.methods):
        mean, tail = method.figures["mean"], method.figures["percentile_90"]
        bars: Json = {}
        if len(method.runs) > 1:
            x, y = method.mean_and_tail()
            words = [
                f"{label(method.name)}, seed {run.seed}<br>mean {scale.value(m)}<br>90th percentile {scale.value(t)}"
                for run, m, t in zip(method.runs, x, y, strict=True)
            ]
            small = {"size": 6, "opacity": 0.5}
            data.append(points(index, method.name, study.in_unit(x), study.in_unit(y), words, marker=small, showlegend=False))
            for axis, spread in (("x", mean), ("y", tail)):
                down, up = (as_json(study.in_unit(np.array([end]))) for end in spread.reach(within_shares=scale.percent))
                if up != [None]:
                    bar = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
                    bars[f"error_{axis}"] = {**bar, "thickness": 1.2, "width": 0, "color": colour(index)}
        texts = [scale.spread(value, len(method.runs)) + scale.unit for value in (mean, tail)]
        word = f"<b>{label(method.name)}</b><br>mean {noun} {texts[0]}<br>90th percentile {texts[1]}"
        mark = {"size": 13, "opacity": 1, "symbol": draw.MARKS[index % len(draw.MARKS)]}
        at = study.in_unit(np.array([mean.mean, tail.mean]))
        data.append(points(index, method.name, at[:1], at[1:], [word], marker=mark, **bars))
    layout = {
        "xaxis": {"title": {"text": f"mean {noun}{study.unit}"}, "showgrid": True, "nticks": 6},
        "yaxis": {"title": {"text": f"90th percentile{study.unit}"}, "nticks": 6},
    }
    return Plot(data, layout)


def own(study: Study) -> Plot | None:
    """The error of a client's own model over that of the shared one, with the line where both are equal.

    None if no client has a model of its own. Clients with the same two errors are one larger point.
    """
    if not study.personalised:
        return None
    scale, data = study.scale, list[Json]()
    for index, malicious, pairs in series.all_error_pairs(study):
        name = study.methods[index].name
        words = [
            f"{_whose(study, ids)}{' (malicious)' * malicious}<br>shared model {scale.value(shared)}<br>own model "
            f"{scale.value(mine)}<br>({label(name)})"
            for shared, mine, ids in zip(pairs.shared, pairs.own, pairs.clients, strict=True)
        ]
        mark = {"symbol": MALICIOUS if malicious else "circle",
                "size": as_json(min(26.0, 7 * math.sqrt(len(ids))) for ids in pairs.clients)}  # fmt: skip
        shown = f"{name}, malicious" if malicious else name
        data.append(points(index, shown, study.in_unit(pairs.shared), study.in_unit(pairs.own), words, marker=mark))
    seen = np.array([v for trace in data for axis in "xy" for v in trace[axis] if v is not None])
    seen = seen if len(seen) else np.array([0.0, 1.0])
    ends, log = (seen.min(), seen.max()), series.needs_log_axes(study, seen)
    data.insert(0, {
        "type": "scatter", "mode": "lines", "x": as_json(ends), "y": as_json(ends), "hoverinfo": "skip", "showlegend": False,
        "line": {"color": FAINT, "width": 1.2, "dash": "dash"}, "name": "the same",
    })  # fmt: skip
    x, y = (
        draw.value_axis(study, seen, logarithmic=log, title=f"{whose} model: {study.scale.noun}{study.unit}")
        for whose in ("shared", "own")
    )
    return Plot(data, {"xaxis": {"showgrid": True, **x}, "yaxis": y})


def _whose(study: Study, ids: Sequence[str]) -> str:
    """The clients of a point: their number, and their names unless a run protects them."""
    names = ", ".join(label(client, 24) for client in ids[:_POINT_NAMES]) + ", …" * (len(ids) > _POINT_NAMES)
    return f"clients: {len(ids)}" + f" ({names})" * study.names_clients


def _named(study: Study, clients: Sequence[str], numbers: str) -> Json:
    """What points of clients say under the pointer: the client, unless a run protects it, its numbers, and the method."""
    template = "client %{customdata}<br>" * study.names_clients + numbers + "<br>(%{fullData.name})<extra></extra>"
    named = [label(client, 40) for client in clients] if study.names_clients else []
    return {"customdata": named, "hovertemplate": template}


def sizes(study: Study) -> Plot | None:
    """Error against the clients' examples, with the mean in groups of clients of similar size. None if all sizes agree.

    Points of many methods would hide each other, so with more than two only those of the first are drawn, in grey.
    """
    size_range = series.size_range(study)
    if size_range is None:
        return None
    scale, crowded = study.scale, len(study.methods) > 2
    dots: list[Json] = []
    lines: list[Json] = []
    for index, method in enumerate(study.methods):
        if index == 0 or not crowded:
            rows, some = method.rows[0], series.sampled_clients(method)
            x, errors = rows.size[some].double().numpy(), rows.error[some].double().numpy()
            texts = _named(study, [rows.client[k] for k in some], "%{x:,} examples<br>%{y:.4~g}")
            mark = {"size": 5 if len(some) < 400 else 4, "opacity": 0.45} | ({"color": FAINT} if crowded else {})
            group = {"legendgroup": ""} if crowded else {}
            dots.append(
                points(index, method.name, x, study.in_unit(errors), [], marker=mark, showlegend=False, **group, **texts)
            )
        groups = series.by_size(method)
        words = [
            f"<b>{label(method.name)}</b><br>{low:,.0f} to {high:,.0f} examples, clients: {count:,.0f}<br>mean {scale.noun} "
            f"{scale.value(error)}"
            for error, low, high, count in zip(groups.error, groups.least, groups.most, groups.count, strict=True)
        ]
        line = series.Line(groups.size, study.in_unit(groups.error), groups.error, groups.error, 1)
        lines += method_traces(line, method.name, index, hoverinfo="text", hovertext=words)
    seen = np.array([v for trace in dots + lines for v in trace["y"] if v is not None])
    log = log_axis(*size_range) if size_range[1] > 8 * size_range[0] else {}
    layout = {
        "xaxis": {"title": {"text": "examples of the client"}, **log},
        "yaxis": draw.value_axis(study, seen, logarithmic=study.spans_decades()),
    }
    return Plot(dots + lines, layout)


def curves(study: Study) -> Plot | None:
    """Mean and tail over rounds, beside each other or, on a narrow screen, above each other. None if nothing was recorded."""
    panels = series.curves(study)
    if not panels:
        return None
    data: list[Json] = []
    layout: Json = {**draw.UNIFIED_HOVER}
    for at, panel in enumerate(panels):
        number = str(at + 1) if at else ""
        lines = [line.in_unit(study) if panel.of_error else line for line in panel.lines]
        for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
            data += method_traces(
                line, method.name, index, xaxis=f"x{number}", yaxis=f"y{number}", showlegend=at == 0,
                **_hover(study, line, of_error=panel.of_error),
            )  # fmt: skip
        spread = np.concatenate([v for line in lines for v in (line.low, line.high)])
        title = None if panel.of_error else "loss"
        y_axis = draw.value_axis(study, spread, logarithmic=panel.logarithmic, title=title)
        layout[f"yaxis{number}"] = {**y_axis, "anchor": f"x{number}"}
        layout[f"xaxis{number}"] = {**draw.round_axis("after round %{x}"), "anchor": f"y{number}"}
    return Plot(data, layout, FULL, panels=[{"title": panel.title} for panel in panels], beside=True)


def _by_round(study: Study, field: str, axis: str, hover: str, *, smoothed: bool, more: Sequence[Json] = ()) -> Plot | None:
    """A field of the rounds' reports, a curve per method, from 0. None if no curve has a point."""
    lines = [series.over_rounds(method, field, smoothed=smoothed) for method in study.methods]
    if not any(len(line) for line in lines):
        return None
    data, widths = list(more), series.line_widths(lines, 2.2, 9.0)
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        if len(line):
            ends = [f" (seeds {a:.4g} to {b:.4g})" * bool(a < b) for a, b in zip(line.low, line.high, strict=True)]
            text = f"{hover}%{{customdata}}"
            data += method_traces(line, method.name, index, width=widths[index], customdata=ends, hovertemplate=text)
    values = {"title": {"text": axis}, "rangemode": "tozero"}
    return Plot(data, {"xaxis": draw.round_axis("round %{x}"), "yaxis": values, **draw.UNIFIED_HOVER})


def selected(study: Study) -> Plot | None:
    """The number of clients trained in each round, and in grey of clients drawn.

    None if nothing was recorded, or if all methods always train all clients drawn, and as many in each round.
    """
    if series.trains_all_alike(study):
        return None
    drawn = max((series.over_rounds(m, "cohort") for m in study.methods), key=lambda line: (len(line), line.middle.sum()))
    grey = {
        "type": "scatter", "mode": "lines", "x": as_json(drawn.x), "y": as_json(drawn.middle), "name": "drawn",
        "line": {"color": FAINT, "width": 1.4, "dash": draw.DASHES[3]}, "hovertemplate": "%{y:,.4~g} drawn",
    }  # fmt: skip
    return _by_round(study, "trained", "clients", "%{y:,.4~g} trained", smoothed=True, more=[grey] if len(drawn) else [])


def privacy(study: Study) -> Plot | None:
    """ε spent after each round. None if no round reports it."""
    return _by_round(study, "epsilon", "ε spent", "ε = %{y:.4~g}", smoothed=False)


def participation(study: Study) -> Plot | None:
    """How often each client came back over the time of its work; None where clients work in rounds."""
    data: list[Json] = []
    for index, method in enumerate(study.methods):
        if (seen := series.participation(method)).clients:
            texts = _named(study, seen.clients, "time of a job %{x:.4~g}, jobs %{y}")
            data.append(points(index, method.name, seen.took, seen.jobs, [], **texts))
    if not data:
        return None
    took = [value for trace in data for value in trace["x"]]
    layout = {
        "xaxis": {"title": {"text": "simulated time of a job"}, "showgrid": True, **log_axis(min(took), max(took))},
        "yaxis": {"title": {"text": "jobs that came back"}, "rangemode": "tozero"},
    }
    return Plot(data, layout)


def gains(study: Study) -> Plot | None:
    """The change of every client against the first method, clients sorted by it; None if no client can be compared."""
    found = series.sorted_changes(study)
    if not found:
        return None
    data: list[Json] = []
    for curve in found:
        name, shade, few = study.methods[curve.method].name, colour(curve.method), len(curve.clients) <= _MOST_BARS
        texts = _named(study, curve.clients, "%{y:+.4~g}")
        drawn: Json = points(curve.method, name, curve.share, study.in_unit(curve.change), [], **texts)
        if len(found) == 1 and few:
            drawn = {key: value for key, value in drawn.items() if key != "mode"}
            drawn |= {"type": "bar", "width": 92 / len(curve.clients), "marker": {"color": with_opacity(shade, draw.BAR)}}
        else:
            area = {"fill": "tozeroy", "fillcolor": with_opacity(shade, draw.BAND)} if len(found) == 1 else {}
            drawn |= {
                "mode": "lines+markers" if few else "lines",
                "line": {"color": shade, "dash": draw.dash(curve.method)},
                **area,
            }
        data.append(drawn)
    seen = np.r_[0.0, np.concatenate([study.in_unit(curve.change) for curve in found])]
    room = 0.06 * (float(np.ptp(seen)) or 1.0)
    layout = {
        "bargap": 0,
        "xaxis": {"title": {"text": "share of the clients (%), sorted"}, "range": [0, 100]},
        "yaxis": {
            "title": {"text": f"change against {label(study.methods[0].name, 16)}{' (points)' * study.scale.percent}"},
            "nticks": 7,
            "zeroline": True, "zerolinecolor": FAINT, "zerolinewidth": 1.6,
            "range": as_json([seen.min() - room, seen.max() + room]),
        },
    }  # fmt: skip
    return Plot(data, layout, FULL)


FIGURE_MAKERS: dict[str, Callable[[Study], Plot | None]] = {
    "histogram": histogram,
    "percentiles": percentiles,
    "tradeoff": tradeoff,
    "own": own,
    "curves": curves,
    "sizes": sizes,
    "selected": selected,
    "participation": participation,
    "privacy": privacy,
    "gains": gains,
}


def drawn(study: Study) -> dict[str, Plot]:
    """All figures that the study has something for, with names of methods that fit and differ; of means alone only curves."""
    short = study.with_short_names()
    plots = {name: plot for name, make in FIGURE_MAKERS.items() if (plot := make(short)) is not None}
    return {name: plot for name, plot in plots.items() if not study.judged.means or name not in OF_SINGLE_CLIENTS}


OF_SINGLE_CLIENTS = ("histogram", "percentiles", "tradeoff", "sizes", "own", "gains")
