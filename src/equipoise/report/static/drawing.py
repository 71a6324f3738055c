"""What the figures for papers share: matplotlib's style, axes, curves, and a figure as bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.report.data.results_by_method import Study
from equipoise.report.data.series import Line
from equipoise.report.palette import colour, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", "-.", ":")
MARKS = "osD^v"
_METADATA = {
    "png": ("Software",),
    "svg": ("Date", "Creator", "Format", "Type"),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
_STYLE = Path(__file__).with_name("paper.mplstyle")


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib as shipped plus our style, whatever the user's own settings are; theirs come back afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # the reader's fonts will have it
        yield


def new_figure(width: float, height: float) -> Figure:
    """A white figure of `width` × `height` inches that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


@style()
def render(figure: Figure, kind: str, dpi: int = 150) -> bytes:
    """The figure as "png", "svg" or "pdf", without the day and the program, so that the same results give the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=dpi, metadata=dict.fromkeys(_METADATA[kind]))
    return file.getvalue()


def dash(index: int) -> str:
    """The dashes of a method, so that lines that coincide are both seen, and are told apart in print without colours."""
    return DASHES[index % len(DASHES)]  # 7 colours and 4 dashes: 28 different lines


def label(name: str, most: int = 28) -> str:
    """A short name; matplotlib hides labels that begin with an underscore."""
    return f"\u200b{text}" if (text := shorten(name, most)).startswith("_") else text


def log_axis(axes: Any, which: str) -> None:
    """Make an axis ("x" or "y") logarithmic, with numbers such as 20 and 500 instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e5 else f"{value:.0e}")
    axis.set_minor_formatter(NullFormatter())


def integer_axis(axes: Any) -> None:
    """Ticks of the x axis at integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def value_axis(axes: Any, study: Study, which: str, *, scaled: bool = False) -> None:
    """Set up an axis of errors: logarithmic if they span decades, from 0 if none is negative.

    `scaled` says that the values are in the unit shown already; else ticks are.
    """
    if study.spans_decades():
        log_axis(axes, which)
    elif scaled:
        low, high = getattr(axes, f"get_{which}lim")()
        smallest = min((method.pooled("error").min(initial=np.inf) for method in study.methods), default=0.0)
        if smallest >= 0:
            getattr(axes, f"set_{which}lim")(0 if low < high / 3 else low, high)
    elif study.scale.percent:
        getattr(axes, f"{which}axis").set_major_formatter(lambda value, _: f"{100 * value:.10g}")


def draw_line(axes: Any, line: Line, name: str, index: int, *, width: float = 1.8) -> None:
    """Draw the mean over seeds, and a band from the lowest seed to the highest."""
    if not len(line):
        return
    axes.plot(
        line.x, line.middle, color=colour(index), linestyle=dash(index), linewidth=width,
        marker="o" if len(line) == 1 else None, label=label(name),
    )  # fmt: skip
    if line.seeds > 1:
        axes.fill_between(line.x, line.low, line.high, color=colour(index), alpha=0.18, linewidth=0)


def halo() -> list[Any]:
    """A white outline that sets a line apart from points behind it."""
    from matplotlib import patheffects

    return [patheffects.Stroke(linewidth=4, foreground="white"), patheffects.Normal()]


def legend_columns(study: Study, width: float) -> int:
    """The number of columns of names that fit beside each other, at most three."""
    longest = max(len(shorten(method.name)) for method in study.methods)
    return max(1, min(3, len(study.methods), int(12 * width) // (longest + 6)))


def legend_height(study: Study, width: float) -> float:
    """The height in inches of the names above a figure."""
    return 0.17 * -(-len(study.methods) // legend_columns(study, width)) if len(study.methods) > 1 else 0.0


def legend(axes: Any, study: Study, width: float, *, always: bool = False) -> None:
    """Draw the names of the methods above the axes, if there is more than one method (or always)."""
    if len(study.methods) > 1 or always:
        axes.figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper left", ncols=legend_columns(study, width), handlelength=2.4,
            columnspacing=1.2, labelspacing=0.3,
        )  # fmt: skip
