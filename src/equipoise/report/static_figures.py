"""Figures for papers: a `Plot`, as the page has it, drawn with matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.report.formats import shorten
from equipoise.report.plot import FAINT, INK, Json, Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.5, 2.9  # inches: about a column of a paper, in the size of its text
_LINES = {"solid": "-", "dash": "--", "dashdot": "-.", "dot": ":"}
_MARKS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "x": "x"}
_METADATA = {
    "png": ("Software",),
    "svg": ("Date", "Creator", "Format", "Type"),
    "pdf": ("CreationDate", "Creator", "Producer"),
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib as shipped plus our style, whatever the user's own settings are; theirs come back afterwards."""
    import matplotlib.style

    ours = Path(__file__).with_name("paper.mplstyle")
    with matplotlib.style.context(["default", ours]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the reader's fonts will have it
        yield


@style()
def render(plot: Plot, kind: str, *, dpi: int, width: float = WIDTH, least_height: float = HEIGHT) -> bytes:
    """The figure as "png", "svg" or "pdf", without the day and the program, so that the same results give the same bytes."""
    file = io.BytesIO()
    figure = draw(plot, width=width, least_height=least_height)
    figure.savefig(file, format=kind, dpi=dpi, metadata=dict.fromkeys(_METADATA[kind]))
    return file.getvalue()


@style()
def draw(plot: Plot, *, width: float = WIDTH, least_height: float = HEIGHT) -> Figure:
    """A white figure of `width` inches that belongs to no window; its panels are below each other."""
    from matplotlib.figure import Figure

    count, names = max(1, len(plot.panels)), [_text(name) for name in plot.names]
    columns = max(1, min(3, int(12 * width) // (max(map(len, names), default=1) + 6)))
    rows = 0 if plot.panels and not plot.beside else -(-len(names) // columns)
    height = max(least_height, 0.85 + (2.0 if plot.beside else 1.15) * count) + 0.17 * rows
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for trace in plot.data:
        _draw_trace(axes[int(trace.get("yaxis", "y")[1:] or 1) - 1], trace)
    for k, panel in enumerate(axes):
        _set_axis(panel, "y", plot.layout[f"yaxis{k + 1 if k else ''}"])
        if k < len(plot.panels):
            each = plot.panels[k]
            panel.set_title(_text(each["title"], int(4.4 * width)), color=each.get("color", INK), fontweight="bold")
            panel.set_title(each.get("note", "").replace("percentile", "pct."), loc="right", fontsize=9)
    _set_axis(axes[-1], "x", plot.layout["xaxis"])
    for shape in plot.layout.get("shapes", ()):
        axes[0].axvline(shape["x0"], color=FAINT, linewidth=1, linestyle="--")
    if names:
        handles = {handle.get_label(): handle for panel in axes for handle in panel.get_legend_handles_labels()[0]}
        figure.legend(handles=[*handles.values()], loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.2)
    return figure


def _text(name: str, most: int = 28) -> str:
    """A name as it is; matplotlib hides labels that begin with an underscore."""
    text = shorten(unescape(name), most)
    return f"\u200b{text}" if text.startswith("_") else text


def _colour(shade: str) -> Any:
    """A colour that matplotlib knows, of #rrggbb or rgba(…)."""
    if not shade.startswith("rgba("):
        return shade
    red, green, blue, opacity = map(float, shade[5:-1].split(","))
    return (red / 255, green / 255, blue / 255, opacity)


def _draw_trace(axes: Any, trace: Json) -> None:
    """Draw bars, a band, an area, a line, points, or several of these."""
    x, y = (np.array(trace[axis], dtype=np.float64) for axis in "xy")
    marker, stroke = trace.get("marker", {}), trace.get("line", {})
    shade = _colour(stroke.get("color") or marker.get("color") or INK)
    name: Any = {"label": _text(trace["name"])} if trace.get("showlegend", True) else {}
    if trace["type"] == "bar":
        axes.bar(x, y, width=trace["width"], color=_colour(marker["color"]), **name)
        return
    if trace.get("fill") == "toself":
        axes.fill(x, y, color=_colour(trace["fillcolor"]), linewidth=0)
        return
    if trace.get("fill") == "tozeroy":
        axes.fill_between(x, y, color=_colour(trace["fillcolor"]), linewidth=0)
    if "lines" in trace["mode"]:
        steps = {"drawstyle": "steps-post"} if stroke.get("shape") == "hv" else {}
        width = 0.75 * stroke.get("width", 2.0)
        alone = {"marker": "o"} if len(x) == 1 else {}
        group = trace.get("legendgroup") or ""  # in print, lines of methods are told apart without colours
        style = [*_LINES.values()][int(group) % 4] if group else _LINES[stroke.get("dash", "solid")]
        axes.plot(x, y, color=shade, linewidth=width, linestyle=style, **steps, **alone, **name)
        return
    mark, size = _MARKS[marker.get("symbol", "circle")], np.array(marker["size"], dtype=np.float64)
    edge = {} if mark == "x" else {"edgecolors": "none"}
    axes.scatter(x, y, s=(0.65 * size) ** 2, color=shade, marker=mark, alpha=marker.get("opacity"), **edge, **name)
    for axis in "xy":
        if bar := trace.get(f"error_{axis}"):
            ends = np.array([bar["arrayminus"], bar["array"]], dtype=np.float64)
            axes.errorbar(x, y, **{f"{axis}err": ends}, color=shade, linewidth=1, fmt="none")


def _set_axis(axes: Any, which: str, axis: Json) -> None:
    """The title, scale, range and ticks of an axis."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

    at, limit = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}lim")
    getattr(axes, f"set_{which}label")(unescape(axis.get("title", {}).get("text", "")))
    logarithmic = axis.get("type") == "log"
    if logarithmic:
        getattr(axes, f"set_{which}scale")("log")
        at.set_minor_formatter(NullFormatter())
        at.set_minor_locator(NullLocator())
    low, high = getattr(axes, f"get_{which}lim")()
    if "range" in axis:
        low, high = (10**end for end in axis["range"]) if logarithmic else axis["range"]
    elif axis.get("rangemode") == "tozero":
        low = 0
    if "tickvals" in axis:
        pairs = zip(axis["tickvals"], axis.get("ticktext", map(str, axis["tickvals"])), strict=True)
        at.set_ticks(*zip(*((tick, text) for tick, text in pairs if low <= tick <= high), strict=True))
    elif axis.get("tickformat") == ",d":
        at.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    limit(low, high)
    if axis.get("zeroline"):
        axes.axhline(0, color=FAINT, linewidth=1)
