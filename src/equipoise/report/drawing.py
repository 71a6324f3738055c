"""What all figures share: style, colours, bins, smoothing, and turning a figure into bytes."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.report.study import Method, Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; yellow is left out, being faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("-", "--", "-.", ":")
INK, FAINT = "#1c2430", "#8a94a3"
_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "text.parse_math": False,  # a method may be called "$"
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "grid.color": "#e6e9ee",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text: small, selectable, in a font the reader has
    "svg.hashsalt": "equipoise",  # the same results give the same bytes
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib as shipped plus our style, whatever the user's own settings are; theirs come back afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the reader's fonts will have it
        yield


def blank(width: float, height: float) -> Figure:
    """A white figure of `width` × `height` inches that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


@style()
def render(figure: Figure, kind: str, dpi: int = 150) -> bytes:
    """The figure as "png" or "svg"."""
    file = io.BytesIO()
    metadata: dict[str, None] = {"Software": None} if kind == "png" else dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an <svg> element for a page: ids made unique by `prefix`, no fixed size, no outside names.

    `label` must be escaped already.
    """
    text = render(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    return f'<svg {box.group() if box else ""} role="img" aria-label="{label}">{body.strip()}'


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Line styles tell methods apart once the colours repeat."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def short(name: str, most: int = 28) -> str:
    """A name that fits a figure: of a long one the beginning and the end, where names tend to differ."""
    name = " ".join(name.split())
    if len(name) > most:
        name = f"{name[: most // 2].rstrip()}…{name[most // 2 + 1 - most :].lstrip()}"
    # Matplotlib hides labels that begin with an underscore.
    return f"\u200b{name}" if name.startswith("_") else name


def plain_logarithm(axes: Any, which: str) -> None:
    """A logarithmic axis with numbers such as 20 and 500 instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e5 else f"{value:.0e}")
    axis.set_minor_formatter(NullFormatter())


def bins(values: Numbers, *, percent: bool, logarithmic: bool) -> Numbers:
    """Edges of at most about 33 bins with round numbers; a value at an edge belongs to the bin above, the last to the last."""
    low, high = float(values.min()), float(values.max())
    if logarithmic:
        return np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), 31)
    if low >= 0 and low < high / 2:
        low = 0.0
    span = high - low or (0.1 if percent else abs(high) or 1.0)
    step = _round_step(span / 33)
    first = math.floor(low / step + 1e-6)
    last = max(first + 1, math.ceil(high / step - 1e-6))
    if last - first < 5:  # all values alike: leave room around the bar
        first, last = (max(0, first - 5) if low >= 0 else first - 5), last + 5
    edges: Numbers = np.arange(first, last + 1, dtype=np.float64) * step
    edges[:-1] -= 1e-6 * step
    edges[-1] += 1e-6 * step
    return edges


def _round_step(least: float) -> float:
    power = float(10.0 ** math.floor(math.log10(least)))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= least * (1 - 1e-9))


def smoothing(rounds: int) -> int:
    """Over how many rounds a curve is averaged: an odd number, about a fortieth of them; short runs stay as they are."""
    return 2 * (rounds // 80) + 1


def smooth(curves: Numbers, window: int) -> Numbers:
    """The moving average of each row over the finite values within ± window/2; NaN where there is none."""
    finite = np.isfinite(curves)
    kernel = np.ones(window)
    clean = np.where(finite, curves, 0.0)
    sums = np.stack([np.convolve(row, kernel, mode="full") for row in clean])
    counts = np.stack([np.convolve(row.astype(np.float64), kernel, mode="full") for row in finite])
    begin = window // 2
    part = slice(begin, begin + curves.shape[1])
    means: Numbers = np.divide(sums[:, part], counts[:, part], out=np.full_like(clean, np.nan), where=counts[:, part] > 0.5)
    return means


def draw_curves(axes: Any, method: Method, field: str, index: int, *, width: float) -> None:
    """A method's `field` over rounds: the mean over seeds, and a band from the lowest seed to the highest."""
    curves = method.over_rounds(field)
    if curves.shape[1] == 0:
        return
    curves = smooth(curves, smoothing(curves.shape[1]))
    rounds = np.arange(1, curves.shape[1] + 1)
    known = np.isfinite(curves).any(axis=0)
    rounds, curves = rounds[known], curves[:, known]
    if len(rounds) == 0:
        return
    keep = np.unique(np.linspace(0, len(rounds) - 1, min(len(rounds), 400)).astype(int))
    rounds, curves = rounds[keep], curves[:, keep]
    marker = "o" if len(rounds) == 1 else None
    axes.plot(
        rounds, np.nanmean(curves, axis=0), color=colour(index), linestyle=dash(index), linewidth=width,
        marker=marker, label=short(method.name),
    )  # fmt: skip
    if len(curves) > 1:
        low, high = np.nanmin(curves, axis=0), np.nanmax(curves, axis=0)
        axes.fill_between(rounds, low, high, color=colour(index), alpha=0.18, linewidth=0)
