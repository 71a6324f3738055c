"""The report's figures: pure functions from a study to a matplotlib Figure. Methods keep their colour throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.report.drawing import (
    FAINT,
    INK,
    bins,
    blank,
    colour,
    dash,
    draw_curves,
    inline_svg,
    plain_logarithm,
    render,
    short,
    style,
)
from equipoise.report.study import GRID, Method, Numbers, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["histogram", "inline_svg", "loss_curves", "percentile_curve", "render", "sizes", "tradeoff", "trained"]

WIDTH = 4.5  # inches: at this size the text is readable on a telephone, and not huge when the page is wide
HEIGHT = 2.9
MOST_POINTS = 1500  # of a scatter; more would only be a large file and a blot


@style()
def histogram(study: Study, *, width: float = WIDTH, least_height: float = HEIGHT) -> Figure:
    """One panel per method above each other, on the same axes, so that the lines at mean and 90th percentile compare."""
    methods = study.methods
    pooled = [method.pooled("error") for method in methods]
    figure = blank(width, max(least_height, 0.85 + 1.15 * len(methods)))
    panels = figure.subplots(len(methods), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    everything = np.concatenate(pooled)
    edges = (
        bins(everything, percent=study.scale.percent, logarithmic=study.spans_decades()) if len(everything) else np.r_[0, 1.0]
    )
    baseline = np.histogram(pooled[0], edges, weights=methods[0].weights)[0]
    for index, (axes, method, values) in enumerate(zip(panels, methods, pooled, strict=True)):
        share = np.histogram(values, edges, weights=method.weights)[0]
        axes.stairs(100 * share, edges, fill=True, color=colour(index), alpha=0.55)
        if index:
            axes.stairs(100 * baseline, edges, color=colour(0), linewidth=1.1)
        mean, tail = method.figures["mean"].mean, method.figures["percentile_90"].mean
        for value, line in ((mean, "-"), (tail, "--")):
            if np.isfinite(value):
                axes.axvline(value, color=INK, linewidth=1.6, linestyle=line)
        axes.set_title(short(method.name, int(4.4 * width)), color=colour(index), fontweight="bold")
        axes.set_title(f"mean {study.scale.value(mean)} · 90th pct. {study.scale.value(tail)}", loc="right", fontsize=9)
        axes.margins(x=0)
        axes.tick_params(axis="x", length=3)
    _value_axis(panels[-1], study, "x")
    panels[-1].set_xlabel(f"{study.scale.noun} of a client{_unit(study)}")
    figure.supylabel("share of clients (%)", fontsize=9.5)
    _key(figure, methods, int(3.2 * width))
    return figure


def _key(figure: Figure, methods: tuple[Method, ...], letters: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=INK, linewidth=1.6, label="mean"),
        Line2D([], [], color=INK, linewidth=1.6, linestyle="--", label="90th percentile"),
    ]
    if len(methods) > 1:
        handles.append(Line2D([], [], color=colour(0), linewidth=1.1, label=f"outline: {short(methods[0].name, letters)}"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.8, columnspacing=1.2)


@style()
def percentile_curve(study: Study) -> Figure:
    """The error at each percentile of the clients: mean over seeds, and the band of the seeds."""
    figure = blank(WIDTH, HEIGHT + _legend_height(study))
    axes = figure.subplots()
    for index, method in enumerate(study.methods):
        curves = method.percentile_curves()
        known = np.isfinite(curves).all(axis=0)
        axes.plot(
            GRID[known], _shown(study, curves[:, known].mean(axis=0)), color=colour(index), linestyle=dash(index),
            linewidth=2, label=short(method.name),
        )  # fmt: skip
        if len(curves) > 1:
            low, high = (_shown(study, edge(curves[:, known], axis=0)) for edge in (np.min, np.max))
            axes.fill_between(GRID[known], low, high, color=colour(index), alpha=0.18, linewidth=0)
    axes.axvline(90, color=FAINT, linewidth=1, linestyle="--")
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 25, 50, 75, 90, 100])
    axes.set_xlabel("percentile of the clients, best to worst")
    axes.set_ylabel(f"{study.scale.noun}{_unit(study)}")
    _value_axis(axes, study, "y", scaled=True)
    _legend(axes, study)
    return figure


@style()
def tradeoff(study: Study) -> Figure | None:
    """Mean against 90th percentile: a small point per seed, a large one per method. None for one method."""
    if len(study.methods) < 2:
        return None
    figure = blank(WIDTH, HEIGHT + _legend_height(study))
    axes = figure.subplots()
    for index, method in enumerate(study.methods):
        errors = [run.summary().error for run in method.runs]
        x = _shown(study, np.array([e.mean for e in errors]))
        y = _shown(study, np.array([e.percentiles[90] for e in errors]))
        if len(errors) > 1:
            axes.plot(x, y, "o", color=colour(index), markersize=4, alpha=0.45, linewidth=0, markeredgewidth=0)
        axes.plot(
            x.mean(), y.mean(), "osD^v"[index // 7 % 5], color=colour(index), markersize=10, markeredgecolor="white",
            linewidth=0, label=short(method.name),
        )  # fmt: skip
    axes.margins(0.12)
    axes.set_xlabel(f"mean {study.scale.noun}{_unit(study)}")
    axes.set_ylabel(f"90th percentile{_unit(study)}")
    _legend(axes, study)
    return figure


@style()
def sizes(study: Study) -> Figure | None:
    """Error against the clients' examples, with the mean in groups of clients of similar size. None if all sizes agree.

    Points of many methods would hide each other, so with more than two only those of the first are drawn, in grey.
    """
    every = np.concatenate([method.pooled("size") for method in study.methods])
    if len(every) == 0 or every.min() == every.max():
        return None
    figure = blank(WIDTH, HEIGHT + _legend_height(study))
    axes = figure.subplots()
    crowded = len(study.methods) > 2
    for index, method in enumerate(study.methods):
        size, error = method.pooled("size"), _shown(study, method.pooled("error"))
        first = int(np.isfinite(method.rows[0].error.numpy()).sum())  # the points of one seed; the line is of all
        if index == 0 or not crowded:
            some = slice(0, first, -(-first // MOST_POINTS) or 1)
            axes.plot(
                size[some], error[some], "o", color=FAINT if crowded else colour(index), alpha=0.35, linewidth=0,
                markersize=3.5 if first < 400 else 2.5, markeredgewidth=0,
            )  # fmt: skip
        x, y = _grouped(size, error)
        axes.plot(
            x, y, color=colour(index), linestyle=dash(index), linewidth=2, marker="o" if len(x) == 1 else None,
            label=short(method.name), path_effects=_halo(),
        )  # fmt: skip
    if every.max() > 8 * every.min():
        plain_logarithm(axes, "x")
    axes.set_xlabel("examples of the client")
    axes.set_ylabel(f"{study.scale.noun}{_unit(study)}")
    _value_axis(axes, study, "y", scaled=True)
    _legend(axes, study)
    return figure


def _grouped(size: Numbers, error: Numbers) -> tuple[Numbers, Numbers]:
    """Mean size and mean error of up to eight groups of clients of similar size, never parting clients of equal size."""
    if len(size) == 0:
        return size, error
    cuts = np.unique(np.quantile(size, np.linspace(0, 1, 9)[1:-1]))
    group = np.searchsorted(cuts, size)
    names = np.unique(group)
    return np.array([size[group == g].mean() for g in names]), np.array([error[group == g].mean() for g in names])


@style()
def loss_curves(study: Study) -> Figure | None:
    """The cohort's mean loss and the mean of its worst 10 % over rounds. None if nothing was recorded."""
    if not any(np.isfinite(method.over_rounds("loss")).any() for method in study.methods):
        return None
    figure = blank(WIDTH, 4.1 + _legend_height(study))
    panels = figure.subplots(2, 1, sharex=True)
    titles = {"loss": "mean of the round's clients", "tail_loss": "worst 10 % of the round's clients"}
    for axes, (field, title) in zip(panels, titles.items(), strict=True):
        for index, method in enumerate(study.methods):
            draw_curves(axes, method, field, index, width=1.6)
        axes.set_title(title)
        axes.set_ylabel("loss")
        shown = np.concatenate([line.get_ydata() for line in axes.lines] or [np.ones(1)])
        if shown.min() > 0 and shown.max() > 30 * shown.min():
            plain_logarithm(axes, "y")
    panels[1].set_xlabel("round")
    _legend(panels[0], study)
    return figure


@style()
def trained(study: Study) -> Figure | None:
    """How many clients were trained in each round. None if nothing was recorded."""
    if all(method.over_rounds("trained").shape[1] == 0 for method in study.methods):
        return None
    figure = blank(WIDTH, HEIGHT + _legend_height(study))
    axes = figure.subplots()
    for index, method in enumerate(study.methods):
        # Methods whose curves coincide are drawn as lines inside each other, so that none disappears.
        width = min(5.0, 1.6 + 1.1 * (len(study.methods) - 1 - index))
        draw_curves(axes, method, "trained", index, width=width)
    axes.set_ylim(0, 1.15 * max(1.0, max(float(np.max(line.get_ydata(), initial=0.0)) for line in axes.lines)))
    axes.set_xlabel("round")
    axes.set_ylabel("clients trained")
    _legend(axes, study)
    return figure


def _shown(study: Study, values: Numbers) -> Numbers:
    return 100 * values if study.scale.percent else values


def _unit(study: Study) -> str:
    return " (%)" if study.scale.percent else ""


def _value_axis(axes: Any, study: Study, which: str, *, scaled: bool = False) -> None:
    """An axis of errors: logarithmic if they span decades; percentages as such; from 0 where nothing is below."""
    axis = getattr(axes, f"{which}axis")
    if study.spans_decades():
        plain_logarithm(axes, which)
    elif scaled:
        low, high = getattr(axes, f"get_{which}lim")()
        smallest = min((method.pooled("error").min(initial=np.inf) for method in study.methods), default=0.0)
        if smallest >= 0:
            getattr(axes, f"set_{which}lim")(0 if low < high / 3 else low, high)
    elif study.scale.percent:
        axis.set_major_formatter(lambda value, _: f"{100 * value:.10g}")


def _halo() -> list[Any]:
    from matplotlib import patheffects

    return [patheffects.Stroke(linewidth=4, foreground="white"), patheffects.Normal()]


def _legend_columns(study: Study) -> int:
    """As many columns of names as fit beside each other, at most three."""
    longest = max(len(short(method.name)) for method in study.methods)
    return max(1, min(3, len(study.methods), int(10.5 * WIDTH) // (longest + 5)))


def _legend_height(study: Study) -> float:
    """The inches that the names take above a figure."""
    return 0.17 * -(-len(study.methods) // _legend_columns(study)) if len(study.methods) > 1 else 0.0


def _legend(axes: Any, study: Study) -> None:
    """Names of the methods, where there is more than one; outside the axes, where they cover nothing."""
    if len(study.methods) > 1:
        axes.figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper left", ncols=_legend_columns(study), handlelength=1.5,
            columnspacing=1.2, labelspacing=0.3,
        )  # fmt: skip
