"""The figures of the page: pure functions from a study to a plotly figure as plain JSON. A method has one colour in all.

A figure is {"data": traces, "layout": …, "narrow": changes of the layout on a telephone}. Traces of a method carry its
number as `legendgroup`, so that the page hides a method in all figures at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from equipoise.report.data import series
from equipoise.report.data.results_by_method import MethodResults, Numbers, Study
from equipoise.report.interactive import optional_figures as special
from equipoise.report.interactive import theme
from equipoise.report.interactive.gains_figure import gains
from equipoise.report.interactive.theme import FULL, HALF, Json, as_json, figure, label, method_traces
from equipoise.report.palette import FAINT, colour, with_opacity
from equipoise.report.text.phrases import plural


def histogram(study: Study) -> Json:
    """A histogram of the error per method, one below the other on the same axes, with lines at mean and 90th percentile."""
    counted, methods = series.histogram(study), study.methods
    edges = np.log10(counted.edges) if counted.logarithmic else study.in_unit(counted.edges)
    top = 108 * max(float(share.max(initial=0.0)) for share in counted.shares) or 1.0
    panel, gap, small_gap = {1: 280, 2: 140, 3: 108}.get(len(methods), 84), 34, 52
    data: list[Json] = []
    axes: Json = {}
    for index, (method, share) in enumerate(zip(methods, counted.shares, strict=True)):
        y = "y" if index == 0 else f"y{index + 1}"
        data.append({
            "type": "bar", "x": as_json((edges[:-1] + edges[1:]) / 2), "y": as_json(100 * share), "yaxis": y,
            "width": as_json(np.diff(edges)),
            "marker": {"color": with_opacity(colour(index), theme.BAR), "line": {"width": 0}}, "name": label(method.name),
            "showlegend": False, "hovertext": _bar_texts(study, method, counted, share), "hoverinfo": "text",
        })  # fmt: skip
        if index:
            data.append({
                "type": "scatter", "mode": "lines", "x": as_json(edges), "yaxis": y, "hoverinfo": "skip",
                "y": as_json(100 * np.r_[counted.shares[0], counted.shares[0][-1]]),
                "line": {"shape": "hv", "color": colour(0), "width": 1.2}, "showlegend": index == 1,
                "name": f"outline: {label(methods[0].name)}",
            })  # fmt: skip
        for key, words, dash in (("mean", "mean", "solid"), ("percentile_90", "90th percentile", "dash")):
            value = method.figures[key].mean
            if math.isfinite(value):
                at = math.log10(value) if counted.logarithmic and value > 0 else 100 * value if study.scale.percent else value
                data.append({
                    "type": "scatter", "mode": "lines", "x": as_json([at] * 9), "y": as_json(np.linspace(0, top, 9)),
                    "yaxis": y, "line": {"width": 2, "dash": dash}, "name": words, "showlegend": index == 0,
                    "hoverinfo": "text", "hovertext": f"{label(method.name)}<br>{words} {study.scale.value(value)}",
                })  # fmt: skip
        axes["yaxis" if index == 0 else f"yaxis{index + 1}"] = {
            "range": [0, top], "fixedrange": True, "nticks": 4, "showline": False,
        }  # fmt: skip
    ticks = theme.log_ticks(*counted.edges[[0, -1]], powers=True) | {"tickmode": "array"} if counted.logarithmic else {}
    x_axis = {
        "title": {"text": study.axis_name}, "range": as_json(edges[[0, -1]]), **ticks,
        "anchor": "y" if len(methods) == 1 else f"y{len(methods)}",
    }  # fmt: skip
    wide = _panels(study, axes, panel, gap, wrap=False)
    narrow = _panels(study, axes, max(96, panel - 30), small_gap, wrap=True)
    layout = {"xaxis": x_axis, "bargap": 0, "barmode": "overlay", "margin": {"t": 6}, **wide}
    return figure(data, layout, plot=wide.pop("height"), width=FULL, narrow=narrow)


def _panels(study: Study, axes: Json, panel: int, gap: int, *, wrap: bool) -> Json:
    """The place of each panel, under the name and numbers of its method; these take two lines with `wrap`."""
    count = len(study.methods)
    height = count * (panel + gap)
    layout: Json = {}
    notes: list[Json] = [
        {
            "text": "share of clients (%)", "xref": "paper", "yref": "paper", "x": 0, "xanchor": "right", "xshift": -34,
            "y": (panel * count + gap * (count - 1)) / height / 2, "yanchor": "middle", "textangle": -90, "font": {"size": 14},
        }
    ]  # fmt: skip
    for index, (method, name) in enumerate(zip(study.methods, axes, strict=True)):
        low = (count - 1 - index) * (panel + gap) / height
        high = low + panel / height
        layout[name] = {**axes[name], "domain": [low, high]}
        written = " · ".join(
            f"{words} {study.scale.value(method.figures[key].mean)}"
            for key, words in (("mean", "mean"), ("percentile_90", "90th percentile"))
        )
        title = f"<b>{label(method.name, 26 if wrap else 48)}</b>"
        above = {"xref": "paper", "yref": "paper", "y": high, "yanchor": "bottom", "yshift": 3}
        first = {"text": title, "x": 0, "xanchor": "left", "font": {"color": colour(index), "size": 15}, "align": "left"}
        second = {"text": written, "x": 1, "xanchor": "right", "font": {"size": 13}}
        if wrap:
            first["yshift"], second["x"], second["xanchor"] = 20, 0, "left"
        notes += [{**above, **first}, {**above, **second}]
    return {**layout, "annotations": notes, "height": height}


def _bar_texts(study: Study, method: MethodResults, counted: series.Histogram, share: Numbers) -> list[str]:
    """The hover text of each bar: its range of errors, and the share of clients in it."""
    whose = "of the examples" if method.weighted else "of the clients"
    edges = [study.scale.number(edge) for edge in counted.edges]
    if len(set(edges)) < len(edges):  # finer than the digits of the table
        edges = [f"{edge:.4g}" for edge in study.in_unit(counted.edges)]
    first = f"{label(method.name)}<br>{study.scale.noun} "
    return [f"{first}{edges[k]} to {edges[k + 1]}{study.scale.unit}:<br>{100 * s:.1f} % {whose}" for k, s in enumerate(share)]


def percentiles(study: Study) -> Json:
    """The error at each percentile of the clients, a curve per method."""
    lines = [series.percentiles(method).in_unit(study) for method in study.methods]
    data: list[Json] = []
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        data += method_traces(line, method.name, index, **_hover(study, line))
    spread = np.concatenate([v for line in lines for v in (line.low, line.high)])
    who = "clients with %{x} % of the examples see" if study.judged.weighted else "%{x} % of the clients see"
    layout = {
        "xaxis": {
            "title": {"text": "percentile of the clients, best to worst"}, "range": [0, 100], "tickmode": "array",
            "tickvals": [0, 25, 50, 75, 90, 100], "hoverformat": ".1~f",
            "unifiedhovertitle": {"text": f"{who} at most"},
        },
        "yaxis": theme.value_axis(study, study.axis_name, spread, logarithmic=study.spans_decades()),
        **theme.UNIFIED_HOVER,
        "shapes": [{"type": "line", "x0": 90, "x1": 90, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
                    "line": {"color": FAINT, "width": 1.2, "dash": "dash"}}],
    }  # fmt: skip
    return figure(data, layout, plot=270, width=HALF)


def _hover(study: Study, line: series.Line, *, of_error: bool = True) -> Json:
    """What a point of a line says: its value, and the lowest and highest seed where there are several."""
    scale = study.scale if of_error else study.scale.fitting(float(np.max(line.middle, initial=0.0)), percent=False)
    digits = f"%{{y:.{scale.decimals}f}}{scale.unit}"
    if line.seeds == 1:
        return {"hovertemplate": digits}
    spans = np.stack([line.low, line.high], axis=1)
    written = [[f"{low:.{scale.decimals}f}", f"{high:.{scale.decimals}f}"] for low, high in spans]
    return {"customdata": written, "hovertemplate": f"{digits} (seeds %{{customdata[0]}} to %{{customdata[1]}})"}


def tradeoff(study: Study) -> Json | None:
    """Mean against 90th percentile: one point per method with ± standard deviation over seeds, a small point per seed."""
    if len(study.methods) < 2:
        return None
    scale, noun = study.scale, study.scale.noun
    data: list[Json] = []
    for index, method in enumerate(study.methods):
        mean, tail = method.figures["mean"], method.figures["percentile_90"]
        if len(method.runs) > 1:
            x, y = method.mean_and_tail()
            words = [
                f"{label(method.name)}, seed {run.seed}<br>mean {scale.value(m)}<br>90th percentile {scale.value(t)}"
                for run, m, t in zip(method.runs, x, y, strict=True)
            ]
            data.append({
                "type": "scatter", "mode": "markers", "x": as_json(study.in_unit(x)), "y": as_json(study.in_unit(y)),
                "marker": {"color": colour(index), "size": 6, "opacity": 0.5}, "hoverinfo": "text", "hovertext": words,
                "showlegend": False, "legendgroup": str(index), "name": label(method.name),
            })  # fmt: skip
        spread = study.in_unit(np.array([mean.mean, tail.mean]))
        reaches = {"x": mean.reach(within_shares=scale.percent), "y": tail.reach(within_shares=scale.percent)}
        bars = {
            f"error_{axis}": {
                "type": "data", "symmetric": False, "array": as_json(study.in_unit(np.array([up]))),
                "arrayminus": as_json(study.in_unit(np.array([down]))), "thickness": 1.2, "width": 0, "color": colour(index),
            }
            for axis, (down, up) in reaches.items()
            if len(method.runs) > 1 and math.isfinite(up)
        }  # fmt: skip
        written = [scale.spread(value, len(method.runs)) + scale.unit for value in (mean, tail)]
        data.append({
            "type": "scatter", "mode": "markers", "x": as_json(spread[:1]), "y": as_json(spread[1:]), **bars,
            "marker": {"color": colour(index), "size": 13, "symbol": theme.MARKS[index % len(theme.MARKS)]},
            "hoverinfo": "text", "name": label(method.name), "legendgroup": str(index),
            "hovertext": f"<b>{label(method.name)}</b><br>mean {noun} {written[0]}<br>90th percentile {written[1]}",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"mean {noun}{study.unit}"}, "showgrid": True, "nticks": 6},
        "yaxis": {"title": {"text": f"90th percentile{study.unit}"}, "nticks": 6},
    }
    return figure(data, layout, plot=270, width=HALF)


def sizes(study: Study) -> Json | None:
    """Error against the clients' examples, with the mean in groups of clients of similar size. None if all sizes agree.

    Points of many methods would hide each other, so with more than two only those of the first are drawn, in grey.
    """
    size_range = series.size_range(study)
    if size_range is None:
        return None
    scale, crowded = study.scale, len(study.methods) > 2
    points: list[Json] = []
    lines: list[Json] = []
    for index, method in enumerate(study.methods):
        if index == 0 or not crowded:
            points.append(_client_points(study, method, index, crowded=crowded))
        groups = series.by_size(method)
        words = [
            f"{'mean of ' if count > 1 else ''}{count:,.0f} {plural('client', count)} with "
            f"{f'{low:,.0f} to {high:,.0f}' if low < high else f'{low:,.0f}'} examples:<br>{scale.noun} {scale.value(error)}"
            for error, low, high, count in zip(groups.error, groups.least, groups.most, groups.count, strict=True)
        ]
        line = series.Line(groups.size, study.in_unit(groups.error), groups.error, groups.error, 1)
        lines += method_traces(
            line, method.name, index, mode="lines+markers", marker={"color": colour(index), "size": 7},
            hoverinfo="text", hovertext=[f"<b>{label(method.name)}</b><br>{text}" for text in words],
        )  # fmt: skip
    seen = np.array([v for trace in points + lines for v in trace["y"] if v is not None])
    x_axis: Json = {"title": {"text": "examples of the client"}}
    if size_range[1] > 8 * size_range[0]:
        x_axis |= theme.log_axis(*size_range)
    layout = {
        "xaxis": x_axis,
        "yaxis": theme.value_axis(study, study.axis_name, seen, logarithmic=study.spans_decades()),
    }  # fmt: skip
    return figure(points + lines, layout, plot=270, width=HALF)


def _client_points(study: Study, method: MethodResults, index: int, *, crowded: bool) -> Json:
    """A point per client of the first seed; in grey if the figure is `crowded`."""
    rows, some = method.rows[0], series.sampled_clients(method)
    digits = f"%{{y:.{study.scale.decimals}f}}{study.scale.unit}"
    return {
        "type": "scatter", "mode": "markers", "x": as_json(rows.size[some].tolist()),
        "y": as_json(study.in_unit(rows.error[some].double().numpy())),
        "marker": {"color": FAINT if crowded else colour(index), "size": 5 if len(some) < 400 else 4, "opacity": 0.45},
        "customdata": [label(rows.client[k], 40) if study.names_clients else "" for k in some],
        "showlegend": False, "name": label(method.name),
        "legendgroup": "" if crowded else str(index),
        "hovertemplate": f"{'client %{customdata}<br>' * study.names_clients}%{{x:,}} examples<br>{study.scale.noun} {digits}"
        "<br>(%{fullData.name})<extra></extra>",
    }  # fmt: skip


def curves(study: Study) -> Json | None:
    """Mean and tail over rounds, beside each other or, on a narrow screen, above each other. None if nothing was recorded."""
    panels = series.curves(study)
    if not panels:
        return None
    data: list[Json] = []
    wide: Json = {"annotations": []}
    narrow: Json = {"annotations": [], "height": 460}
    for at, panel in enumerate(panels):
        lines = [line.in_unit(study) if panel.of_error else line for line in panel.lines]
        suffix = "" if at == 0 else str(at + 1)
        for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
            data += method_traces(
                line, method.name, index, xaxis=f"x{suffix}", yaxis=f"y{suffix}", showlegend=at == 0,
                mode="lines+markers" if len(line) <= 12 else "lines", marker={"color": colour(index), "size": 6},
                **_hover(study, line, of_error=panel.of_error),
            )  # fmt: skip
        spread = np.concatenate([v for line in lines for v in (line.low, line.high)])
        title = study.axis_name if panel.of_error else "loss"
        y_axis = theme.value_axis(study, title, spread, logarithmic=panel.logarithmic) | {"anchor": f"x{suffix}"}
        x_axis = theme.round_axis("after round %{x}") | {"anchor": f"y{suffix}"}
        left, low = (0.54, 0.0) if at else (0.0, 0.58)
        note = {"text": f"<b>{panel.title}</b>", "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        wide[f"xaxis{suffix}"] = {**x_axis, "domain": [left, left + 0.46 if len(panels) > 1 else 1.0]}
        wide[f"yaxis{suffix}"] = {**y_axis, "domain": [0, 1]}
        wide["annotations"].append({**note, "x": left, "y": 1, "yshift": 6})
        narrow[f"xaxis{suffix}"] = {**x_axis, "domain": [0, 1]} | ({} if at else {"title": {"text": ""}})
        narrow[f"yaxis{suffix}"] = {**y_axis, "domain": [low, low + 0.42]}
        narrow["annotations"].append({**note, "x": 0, "y": low + 0.42, "yshift": 6})
    return figure(data, {**wide, **theme.UNIFIED_HOVER, "margin": {"t": 34}}, plot=270, width=FULL, narrow=narrow)


def selected(study: Study) -> Json | None:
    """The number of clients trained in each round, and in grey of clients drawn.

    None if nothing was recorded, or if all methods always train all clients drawn, and as many in each round.
    """
    lines = [series.over_rounds(method, "trained") for method in study.methods]
    if not any(len(line) for line in lines) or series.trains_all_alike(study):
        return None
    data: list[Json] = []
    widths = series.line_widths(lines, 2.2, 9.0)
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        exact = np.array_equal(line.middle, line.middle.round())
        seeds = [
            f" (seeds {low:.4g} to {high:.4g})" if low < high else "" for low, high in zip(line.low, line.high, strict=True)
        ]
        data += method_traces(
            line, method.name, index, customdata=seeds, width=widths[index],
            hovertemplate=f"%{{y:,.{0 if exact else 1}f}} clients trained%{{customdata}}",
            mode="lines+markers" if len(line) == 1 else "lines",
        )  # fmt: skip
    drawn = max(
        (series.over_rounds(method, "cohort") for method in study.methods), key=lambda line: (len(line), line.middle.sum())
    )
    if any(len(line) and line.middle.min() < drawn.middle.max() for line in lines):
        data.insert(0, {
            "type": "scatter", "mode": "lines", "x": as_json(drawn.x), "y": as_json(drawn.middle), "name": "drawn",
            "line": {"color": FAINT, "width": 1.4, "dash": theme.DASHES[3]}, "hovertemplate": "%{y:,.4~g} clients",
        })  # fmt: skip
    top = max(1.0, *(float(np.max(line.high, initial=0.0)) for line in (*lines, drawn)))
    layout = {
        "xaxis": theme.round_axis("in round %{x}"),
        "yaxis": {"title": {"text": "clients"}, "range": [0, 1.1 * top]}, **theme.UNIFIED_HOVER,
    }  # fmt: skip
    return figure(data, layout, plot=270, width=HALF)


FIGURE_MAKERS: dict[str, Callable[[Study], Json | None]] = {
    "histogram": histogram,
    "percentiles": percentiles,
    "tradeoff": tradeoff,
    "own": special.own,
    "curves": curves,
    "sizes": sizes,
    "selected": selected,
    "participation": special.participation,
    "privacy": special.privacy,
    "gains": gains,
}
