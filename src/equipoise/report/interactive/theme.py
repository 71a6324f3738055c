"""What the interactive figures share: light and dark colours, axes, legend, bands, and text that plotly shows as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from equipoise.report.data.results_by_method import Numbers, Study
from equipoise.report.data.series import Line
from equipoise.report.palette import COLOURS, DARK_COLOURS, FAINT, colour, palette_cycle, shorten, with_opacity

Json = dict[str, Any]

FULL, HALF = 1060, 470  # pixels inside a figure that takes the page's width, and one that takes half
NARROW = 560  # pixels: a figure less wide is laid out for a telephone
DASHES = ("solid", "dash", "dashdot", "dot")
MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down")
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
# One button, which saves the figure as SVG; dragging zooms and a double click shows all again.
CONFIG: Json = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage"]], "doubleClick": "reset"}
UNIFIED_HOVER: Json = {"hovermode": "x unified", "hoverdistance": -1}  # one text for all curves at a point of the x axis
BAR, BAND = 0.62, 0.18  # opacity of a bar of a histogram, and of the band of the seeds
_ROW, _AXIS = 20, 52  # pixels that a row of the legend, and an axis with its title, take


def template(*, dark: bool) -> Json:
    """A plotly template; what a figure draws in ink has no colour of its own and takes it from here."""
    ink, soft, line, card = (
        ("#e8ebf0", "#a3adbb", "#333c48", "#1d232c") if dark else ("#1c2430", "#5a6473", "#e6e9ee", "#ffffff")
    )
    axis = {
        "gridcolor": line, "linecolor": FAINT, "tickcolor": FAINT, "zeroline": False, "tickfont": {"color": ink},
        "title": {"font": {"color": ink, "size": 14}, "standoff": 8},
    }  # fmt: skip
    layout = {
        "paper_bgcolor": card, "plot_bgcolor": card, "colorway": [ink], "font": {"family": FONT, "size": 13, "color": ink},
        "xaxis": {**axis, "showline": True, "ticks": "outside", "ticklen": 4, "showgrid": False}, "yaxis": axis,
        "hoverlabel": {"bgcolor": card, "bordercolor": FAINT, "font": {"color": ink, "size": 13}, "align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": soft, "activecolor": ink},
        "annotationdefaults": {"showarrow": False, "font": {"color": ink}},
    }  # fmt: skip
    return {"layout": layout}


def dark_colours() -> dict[str, str]:
    """The colour on a dark ground by the colour on a light one, for all colours of methods and their bars and bands."""
    pairs = list(zip(COLOURS, DARK_COLOURS, strict=True))
    return dict(pairs) | {with_opacity(a, opacity): with_opacity(b, opacity) for a, b in pairs for opacity in (BAR, BAND)}


def escape_markup(text: str) -> str:
    """Text that plotly shows as it is: the HTML and TeX that plotly would read is escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")  # $…$ would be TeX


def label(name: str, most: int = 28) -> str:
    """A name that fits a legend, shown as it is."""
    return escape_markup(shorten(name, most))


def as_json(values: Iterable[float]) -> list[float | None]:
    """Floats of seven digits for JSON; None for NaN and infinity, which JSON cannot hold."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in map(float, values)]


def figure(data: list[Json], layout: Json, *, plot: int, width: int, narrow: Json | None = None) -> Json:
    """Traces and layout, with the layout's changes for a narrow screen; `plot` is the height inside the axes.

    The legend lies below the axes and gets the rows that its names need at the figure's `width` in pixels.
    """
    names = [trace["name"] for trace in data if trace.get("showlegend", True)] if layout.get("showlegend", True) else []
    names = names if len(names) > 1 else []

    def room(pixels: int, height: int) -> Json:
        across = max(1, pixels // (max((len(name) for name in names), default=1) * 8 + 58))
        below = _AXIS + _ROW * -(-len(names) // across) + 6 * bool(names)
        top = layout.get("margin", {}).get("t", 16)
        return {"height": height + below + top, "margin": {"l": 58, "r": 14, "t": top, "b": below}}

    shared = {
        "showlegend": bool(names), "hovermode": "closest", "dragmode": "zoom", "autosize": True, "uirevision": "same",
        "hoverdistance": 40,
        "legend": {"orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": 0, "yref": "container",
                   "yanchor": "bottom", "font": {"size": 13}, "itemwidth": 34, "tracegroupgap": 0},
    }  # fmt: skip
    small: Json = {"dragmode": False, **room(310, plot)}  # on a telephone a finger that drags wants to scroll
    if narrow is not None:
        small |= {**narrow, **room(310, narrow.get("height", plot))}
    return {"data": data, "layout": {**shared, **layout, **room(width, plot)}, "narrow": small}


def method_traces(line: Line, name: str, index: int, **more: Any) -> list[Json]:
    """The traces of a line in the unit shown: a band from the lowest to the highest seed, and the mean above it."""
    traces: list[Json] = []
    axes: Json = {key: more[key] for key in ("xaxis", "yaxis") if key in more}
    if line.seeds > 1 and len(line) > 1:
        traces.append(
            {
                "type": "scatter", "x": as_json(np.r_[line.x, line.x[::-1]]), "y": as_json(np.r_[line.high, line.low[::-1]]),
                "fill": "toself", "fillcolor": with_opacity(colour(index), BAND), "line": {"width": 0}, "mode": "lines",
                "hoverinfo": "skip", "showlegend": False, "legendgroup": str(index), "name": label(name), **axes,
            }
        )  # fmt: skip
    stroke = {"color": colour(index), "width": more.pop("width", 2.2), "dash": DASHES[palette_cycle(index) % len(DASHES)]}
    traces.append(
        {
            "type": "scatter", "x": as_json(line.x), "y": as_json(line.middle), "mode": more.pop("mode", "lines"),
            "line": stroke, "name": label(name), "legendgroup": str(index), **more,
        }
    )  # fmt: skip
    return traces


def value_axis(study: Study, title: str, values: Numbers, *, logarithmic: bool) -> Json:
    """An axis of errors in the unit shown: logarithmic if asked, and from 0 where that is near and nothing is below."""
    axis: Json = {"title": {"text": title}}
    known = values[np.isfinite(values)]
    if not len(known):
        return axis
    low, high = float(known.min()), float(known.max())
    if logarithmic and low > 0:
        room = 0.04 * math.log10(high / low) + 0.01
        return axis | log_axis(low, high) | {"range": [math.log10(low) - room, math.log10(high) + room]}
    if low >= 0 and low <= (high - low) / 2:
        axis["rangemode"] = "tozero"
    return axis


def log_axis(low: float, high: float) -> Json:
    """A logarithmic axis with numbers such as 20 and 500 instead of powers."""
    return {"type": "log", "tickmode": "array"} | log_ticks(low, high)


def round_axis(hover: str) -> Json:
    """The x axis of a curve over rounds; `hover` is the title of its hover text."""
    axis = {"hoverformat": "d", "tickformat": ",d", "rangemode": "tozero", "unifiedhovertitle": {"text": hover}}
    return {"title": {"text": "round"}, **axis}


def log_ticks(low: float, high: float, *, powers: bool = False) -> Json:
    """Ticks at round numbers from below `low` to above `high`; with `powers` at their logarithms, for an axis of these."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 200 * low else (1,)
    every = -(-len(decades) // 8)
    ticks = [m * 10.0**e for e in decades[::every] for m in steps]
    written = [f"{v:,.10g}" if 1e-4 <= v < 1e5 else f"{v:.0e}" for v in ticks]
    return {"tickvals": as_json(math.log10(v) for v in ticks) if powers else as_json(ticks), "ticktext": written}
