"""What figures share: colours, names that fit, axes, and a `Plot`, the one description that the page and the files draw."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import unescape
from typing import Any

import numpy as np

from equipoise.report.formats import shorten
from equipoise.report.series import Line
from equipoise.report.study import Numbers, Study

Json = dict[str, Any]

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; yellow is left out, being faint on white,
# and black is a grey that is seen on white and on a dark ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
DARK_COLOURS = ("#4DA6E0", "#F0804A", "#2FC49A", "#E0A0C4", "#F0B840", "#9ADCF8", "#B4B4B4")  # the same, on a dark ground
INK, FAINT = "#1c2430", "#8a94a3"
FULL, HALF = 1060, 470  # pixels inside a figure that takes the page's width, and one that takes half
NARROW = 560  # pixels: a figure less wide is laid out for a telephone
DASHES = ("solid", "dash", "dashdot", "dot")
MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down")
# One button, which saves the figure as SVG; dragging zooms and a double click shows all again.
CONFIG: Json = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage"]], "doubleClick": "reset"}
UNIFIED_HOVER: Json = {"hovermode": "x unified", "hoverdistance": -1}  # one text for all curves at a point of the x axis
BAR, BAND = 0.62, 0.18  # opacity of a bar of a histogram, and of the band of the seeds
_ROW, _AXIS = 20, 52  # pixels that a row of the legend, and an axis with its title, take


@dataclass(frozen=True)
class Plot:
    """Traces and axes as plotly has them, and where several y axes share a figure, the title and the note of each panel.

    Traces of a method carry its number as `legendgroup`, so that the page hides a method in all figures at once.
    """

    data: list[Json]
    layout: Json
    width: int = HALF
    height: int = 270  # inside the axes, of each panel
    panels: list[Json] = field(default_factory=list)  # "title", perhaps "note" and "color"
    beside: bool = False  # whether panels, each with its x axis, are beside each other on a wide screen

    @property
    def names(self) -> list[str]:
        """The names in the legend; none if there is a single one."""
        names = [trace["name"] for trace in self.data if trace.get("showlegend", True)]
        return names if len(names) > 1 else []

    def json(self) -> Json:
        """The figure as the page holds it, with "narrow", its changes of the layout on a telephone."""
        shared = {
            "showlegend": bool(self.names), "hovermode": "closest", "dragmode": "zoom", "autosize": True,
            "uirevision": "same", "hoverdistance": 40,
            "legend": {"orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": 0, "yref": "container",
                       "yanchor": "bottom", "font": {"size": 13}, "itemwidth": 34, "tracegroupgap": 0},
        }  # fmt: skip
        wide, narrow = ({**self._placed(small), **self._room(small)} for small in (False, True))
        return {"data": self.data, "layout": {**shared, **self.layout, **wide}, "narrow": {"dragmode": False, **narrow}}

    def _height(self, narrow: bool) -> tuple[int, int, int]:
        """The height inside the axes of the whole figure, of a panel, and of the gap above it."""
        panel, gap = self.height - 30 * (narrow and bool(self.panels)), 62 if narrow or self.beside else 34
        stacked = len(self.panels) and (narrow or not self.beside)
        return (len(self.panels) * (panel + gap) if stacked else panel), panel, gap

    def _room(self, narrow: bool) -> Json:
        """Margins and height, with as many rows for the legend as its names need."""
        across = max(
            1, (310 if narrow else self.width) // (max((len(unescape(name)) for name in self.names), default=1) * 8 + 58)
        )
        below = _AXIS + _ROW * -(-len(self.names) // across) + 6 * bool(self.names)
        top = 34 if self.beside else 6 if self.panels else 16
        return {"height": self._height(narrow)[0] + below + top, "margin": {"l": 58, "r": 14, "t": top, "b": below}}

    def _placed(self, narrow: bool) -> Json:
        """The places of the panels, beside or below each other, each under its title and note."""
        count, beside = len(self.panels), self.beside and not narrow
        height, panel, gap = self._height(narrow)
        placed: Json = {"annotations": []} if count else {}
        for k, each in enumerate(self.panels):
            suffix = str(k + 1) if k else ""
            low = 0.0 if beside else (count - 1 - k) * (panel + gap) / height
            high = 1.0 if beside else low + panel / height
            left = 0.54 * k if beside else 0.0
            placed[f"yaxis{suffix}"] = {**self.layout[f"yaxis{suffix}"], "domain": [low, high]}
            if self.beside:
                across = [left, left + 0.46] if beside and count > 1 else [0, 1]
                placed[f"xaxis{suffix}"] = {**self.layout[f"xaxis{suffix}"], "domain": across}
            above = {
                "xref": "paper",
                "yref": "paper",
                "x": left,
                "xanchor": "left",
                "y": high,
                "yanchor": "bottom",
                "yshift": 4,
            }
            note = {} if narrow else {"x": 1, "xanchor": "right"}
            if "note" in each:
                placed["annotations"].append({**above, **note, "yshift": 4, "text": each["note"], "font": {"size": 13}})
            shift = 22 if narrow and "note" in each else 4
            font = {"size": 15, **({"color": each["color"]} if "color" in each else {})}
            placed["annotations"].append({**above, "yshift": shift, "text": f"<b>{each['title']}</b>", "font": font})
        return placed


def template(*, dark: bool) -> Json:
    """A plotly template; what a figure draws in ink has no colour of its own and takes it from here."""
    ink, soft, line, card = ("#e8ebf0", "#a3adbb", "#333c48", "#1d232c") if dark else (INK, "#5a6473", "#e6e9ee", "#ffffff")
    axis = {
        "gridcolor": line, "linecolor": FAINT, "tickcolor": FAINT, "zeroline": False, "tickfont": {"color": ink},
        "title": {"font": {"color": ink, "size": 14}, "standoff": 8},
    }  # fmt: skip
    family = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
    layout = {
        "paper_bgcolor": card, "plot_bgcolor": card, "colorway": [ink], "font": {"family": family, "size": 13, "color": ink},
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


def colour(index: int) -> str:
    """The colour of a method by its number, as #rrggbb."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """The dashes of a method: with as many colours, 28 lines differ."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def with_opacity(shade: str, opacity: float) -> str:
    """A colour #rrggbb as rgba(…) with an opacity between 0 and 1."""
    red, green, blue = (int(shade[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def label(name: str, most: int = 28) -> str:
    """A name that fits a legend, shown as it is: the HTML and TeX that plotly would read is escaped."""
    text = shorten(name, most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("$", "&#36;")  # $…$ would be TeX


def as_json(values: Iterable[float]) -> list[float | None]:
    """Floats of seven digits for JSON; None for NaN and infinity, which JSON cannot hold."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in map(float, values)]


def method_traces(line: Line, name: str, index: int, **more: Any) -> list[Json]:
    """The traces of a line in the unit shown: a band from the lowest to the highest seed, and the mean above it."""
    traces: list[Json] = []
    shared = {"type": "scatter", "name": label(name), "legendgroup": str(index)}
    if line.seeds > 1 and len(line) > 1:
        axes: Json = {key: more[key] for key in ("xaxis", "yaxis") if key in more}
        traces.append({
            **shared, "x": as_json(np.r_[line.x, line.x[::-1]]), "y": as_json(np.r_[line.high, line.low[::-1]]),
            "fill": "toself", "fillcolor": with_opacity(colour(index), BAND), "line": {"width": 0}, "mode": "lines",
            "hoverinfo": "skip", "showlegend": False, **axes,
        })  # fmt: skip
    stroke = {"color": colour(index), "width": more.pop("width", 2.2), "dash": dash(index)}
    more = {"mode": "lines+markers" if len(line) <= 12 else "lines", "marker": {"color": colour(index), "size": 6}} | more
    traces.append({**shared, "x": as_json(line.x), "y": as_json(line.middle), "line": stroke, **more})
    return traces


def points(index: int, name: str, x: Iterable[float], y: Iterable[float], texts: list[str], **more: Any) -> Json:
    """Points of a method with a hover text each; `more` may change the marker."""
    marker = {"color": colour(index), "size": 7, "opacity": 0.6} | more.pop("marker", {})
    return {
        "type": "scatter", "mode": "markers", "x": as_json(x), "y": as_json(y), "marker": marker, "hoverinfo": "text",
        "hovertext": texts, "name": label(name), "legendgroup": str(index), **more,
    }  # fmt: skip


def value_axis(study: Study, values: Numbers, *, logarithmic: bool, title: str | None = None) -> Json:
    """An axis of errors in the unit shown: logarithmic if asked, and from 0 where that is near and nothing is below."""
    axis: Json = {"title": {"text": study.axis_name if title is None else title}}
    known = values[np.isfinite(values)]
    if not len(known):
        return axis
    low, high = float(known.min()), float(known.max())
    if logarithmic and low > 0:
        room = 0.04 * math.log10(high / low) + 0.01
        return axis | log_axis(low, high) | {"range": [math.log10(low) - room, math.log10(high) + room]}
    return axis | ({"rangemode": "tozero"} if 0 <= low <= (high - low) / 2 else {})


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
