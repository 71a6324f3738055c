"""The figures for papers: pure functions from a study to a matplotlib Figure. A method has one colour in all figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.report.data import series
from equipoise.report.data.participation import participation as arrivals_of
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.palette import FAINT, INK, colour, distinct_names
from equipoise.report.static import drawing
from equipoise.report.static.drawing import draw_line, label, legend_height, log_axis, new_figure, render, style, value_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FIGURE_MAKERS", "curves", "gains", "histogram", "own", "participation", "percentiles", "privacy", "render", "selected",
    "sizes", "tradeoff", "with_short_names",
]  # fmt: skip

WIDTH, HEIGHT = 4.5, 2.9  # inches: about a column of a paper, in the size of its text


def with_short_names(study: Study) -> Study:
    """The study with names of methods that fit a figure and differ there."""
    names = distinct_names([method.name for method in study.methods])
    return replace(study, methods=tuple(replace(m, name=name) for m, name in zip(study.methods, names, strict=True)))


@style()
def histogram(study: Study, *, width: float = WIDTH, least_height: float = HEIGHT) -> Figure:
    """A histogram of the error per method, one below the other on the same axes, with lines at mean and 90th percentile."""
    methods, counted = study.methods, series.histogram(study)
    figure = new_figure(width, max(least_height, 0.85 + 1.15 * len(methods)))
    panels = figure.subplots(len(methods), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (axes, method, share) in enumerate(zip(panels, methods, counted.shares, strict=True)):
        axes.stairs(100 * share, counted.edges, fill=True, color=colour(index), alpha=0.55)
        if index:
            axes.stairs(100 * counted.shares[0], counted.edges, color=colour(0), linewidth=1.1)
        mean, tail = method.figures["mean"].mean, method.figures["percentile_90"].mean
        for value, line in ((mean, "-"), (tail, "--")):
            if np.isfinite(value):
                axes.axvline(value, color=INK, linewidth=1.6, linestyle=line)
        axes.set_title(label(method.name, int(4.4 * width)), color=colour(index), fontweight="bold")
        axes.set_title(f"mean {study.scale.value(mean)} · 90th pct. {study.scale.value(tail)}", loc="right", fontsize=9)
        axes.margins(x=0)
        axes.tick_params(axis="x", length=3)
    value_axis(panels[-1], study, "x")
    panels[-1].set_xlabel(study.axis_name)
    figure.supylabel("share of clients (%)", fontsize=9.5)
    _line_legend(figure, methods, int(3.2 * width))
    return figure


def _line_legend(figure: Figure, methods: tuple[MethodResults, ...], letters: int) -> None:
    """A legend of the lines in a histogram; names of methods have at most `letters` letters."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=INK, linewidth=1.6, label="mean"),
        Line2D([], [], color=INK, linewidth=1.6, linestyle="--", label="90th percentile"),
    ]
    if len(methods) > 1:
        handles.append(Line2D([], [], color=colour(0), linewidth=1.1, label=f"outline: {label(methods[0].name, letters)}"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.8, columnspacing=1.2)


def _axes(study: Study, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure with room for the names of the methods, and its axes."""
    figure = new_figure(WIDTH, height + legend_height(study, WIDTH))
    return figure, figure.subplots()


def _finish(axes: Any, study: Study, x: str, y: str, *, legend_always: bool = False) -> None:
    """The names of both axes, and of the methods."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    drawing.legend(axes, study, WIDTH, always=legend_always)


@style()
def percentiles(study: Study) -> Figure:
    """The error at each percentile of the clients: mean over seeds, and the band of the seeds."""
    figure, axes = _axes(study)
    for index, method in enumerate(study.methods):
        draw_line(axes, series.percentiles(method).in_unit(study), method.name, index, width=1.6)
    axes.axvline(90, color=FAINT, linewidth=1, linestyle="--")
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 25, 50, 75, 90, 100])
    value_axis(axes, study, "y", scaled=True)
    _finish(axes, study, "percentile of the clients, best to worst", study.axis_name)
    return figure


@style()
def tradeoff(study: Study) -> Figure | None:
    """Mean against 90th percentile: one point per method with ± standard deviation over seeds, a small point per seed.

    None for one method.
    """
    if len(study.methods) < 2:
        return None
    figure, axes = _axes(study)
    for index, method in enumerate(study.methods):
        x, y = (study.in_unit(values) for values in method.mean_and_tail())
        if len(x) > 1:
            axes.plot(x, y, "o", color=colour(index), markersize=4, alpha=0.45, linewidth=0, markeredgewidth=0)
            across, up = (
                study.in_unit(np.array(method.figures[key].reach(within_shares=study.scale.percent)))[:, None]
                for key in ("mean", "percentile_90")
            )
            axes.errorbar(x.mean(), y.mean(), xerr=across, yerr=up, color=colour(index), linewidth=1, fmt="none")
        axes.plot(
            x.mean(), y.mean(), drawing.MARKS[index % len(drawing.MARKS)], color=colour(index), markersize=9,
            markeredgecolor="white", linewidth=0, label=label(method.name),
        )  # fmt: skip
    axes.margins(0.12)
    _finish(axes, study, f"mean {study.scale.noun}{study.unit}", f"90th percentile{study.unit}")
    return figure


@style()
def own(study: Study) -> Figure | None:
    """The error of a client's own model over that of the shared one; crosses are malicious clients, larger marks several.

    None if no client has a model of its own.
    """
    if not study.personalised:
        return None
    figure, axes = _axes(study, HEIGHT + 0.4)
    drawn = series.all_error_pairs(study)
    for index, malicious, pairs in drawn:
        axes.scatter(
            study.in_unit(pairs.shared), study.in_unit(pairs.own), s=[12.0 * min(12, len(ids)) for ids in pairs.clients],
            marker="x" if malicious else "o", linewidths=1.2 if malicious else 0, color=colour(index), alpha=0.6,
            label=None if malicious else label(study.methods[index].name),
        )  # fmt: skip
    crosses = any(malicious for _, malicious, _ in drawn)
    if crosses:
        axes.scatter([], [], marker="x", linewidths=1.2, color=FAINT, label="malicious client")
    values = [np.zeros(0), *(v for *_, pairs in drawn for v in (pairs.shared, pairs.own))]
    if series.needs_log_axes(study, np.concatenate(values)):
        log_axis(axes, "x")
        log_axis(axes, "y")
    low, high = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([low, high], [low, high], color=FAINT, linewidth=1, linestyle="--")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    noun = study.axis_name
    _finish(axes, study, f"shared model: {noun}", f"own model: {noun}", legend_always=crosses)
    return figure


@style()
def sizes(study: Study) -> Figure | None:
    """Error against the clients' examples, with the mean in groups of clients of similar size. None if all sizes agree.

    Points of many methods would hide each other, so with more than two only those of the first are drawn, in grey.
    """
    size_range = series.size_range(study)
    if size_range is None:
        return None
    figure, axes = _axes(study)
    crowded = len(study.methods) > 2
    for index, method in enumerate(study.methods):
        if index == 0 or not crowded:
            rows, some = method.rows[0], series.sampled_clients(method)
            axes.plot(
                rows.size[some].numpy(), study.in_unit(rows.error[some].double().numpy()), "o",
                color=FAINT if crowded else colour(index), alpha=0.35, linewidth=0,
                markersize=3.5 if len(some) < 400 else 2.5, markeredgewidth=0,
            )  # fmt: skip
        groups = series.by_size(method)
        axes.plot(
            groups.size, study.in_unit(groups.error), color=colour(index), linestyle=drawing.dash(index), linewidth=2,
            marker="o" if len(groups.size) == 1 else None, label=label(method.name), path_effects=drawing.halo(),
        )  # fmt: skip
    if size_range[1] > 8 * size_range[0]:
        log_axis(axes, "x")
    value_axis(axes, study, "y", scaled=True)
    _finish(axes, study, "examples of the client", study.axis_name)
    return figure


@style()
def curves(study: Study) -> Figure | None:
    """Mean and tail over rounds: of the error at evaluations if there are several, else of the training loss; None without."""
    drawn = series.curves(study)
    if not drawn:
        return None
    figure = new_figure(WIDTH, 4.1 + legend_height(study, WIDTH))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, panel in zip(panels, drawn, strict=True):
        for index, (method, line) in enumerate(zip(study.methods, panel.lines, strict=True)):
            draw_line(axes, line.in_unit(study) if panel.of_error else line, method.name, index, width=1.6)
        axes.set_title(panel.title)
        axes.set_ylabel(study.axis_name if panel.of_error else "loss")
        if panel.logarithmic:
            log_axis(axes, "y")
    drawing.integer_axis(panels[1])
    panels[1].set_xlabel("round")
    drawing.legend(panels[0], study, WIDTH)
    return figure


@style()
def selected(study: Study) -> Figure | None:
    """The number of clients trained in each round. None if nothing was recorded, or if all clients drawn always were."""
    if series.trains_all_alike(study):
        return None
    lines = [series.over_rounds(method, "trained") for method in study.methods]
    top = 1.15 * max(1.0, *(float(np.max(line.high, initial=0.0)) for line in lines))
    return _by_round(study, lines, "clients trained", top)


@style()
def privacy(study: Study) -> Figure | None:
    """ε spent after each round. None if no round reports it."""
    return _by_round(study, [series.over_rounds(method, "epsilon", smoothed=False) for method in study.methods], "ε spent")


@style()
def participation(study: Study) -> Figure | None:
    """How often each client came back over the time of its work; None where clients work in rounds."""
    seen = [arrivals_of(method) for method in study.methods]
    if not any(each.clients for each in seen):
        return None
    figure, axes = _axes(study)
    for index, (method, each) in enumerate(zip(study.methods, seen, strict=True)):
        if each.clients:
            axes.scatter(each.took, each.jobs, color=colour(index), alpha=0.6, s=14, label=label(method.name))
    log_axis(axes, "x")
    axes.set_ylim(bottom=0)
    _finish(axes, study, "simulated time of a job", "jobs that came back")
    return figure


def _by_round(study: Study, lines: list[series.Line], y: str, top: float | None = None) -> Figure | None:
    """A curve per method over the rounds, from 0 to `top`. None if no curve has a point."""
    if not any(len(line) for line in lines):
        return None
    figure, axes = _axes(study)
    widths = series.line_widths(lines, 1.6, 7.0)
    for index, (method, line) in enumerate(zip(study.methods, lines, strict=True)):
        draw_line(axes, line, method.name, index, width=widths[index])
    axes.set_ylim(0, top)
    drawing.integer_axis(axes)
    _finish(axes, study, "round", y)
    return figure


@style()
def gains(study: Study) -> Figure | None:
    """The change of every client against the first method, clients sorted by it; None if no client can be compared."""
    lines = series.sorted_changes(study)
    if not lines:
        return None
    figure, axes = _axes(study)
    axes.axhline(0, color=FAINT, linewidth=1)
    for line in lines:
        axes.plot(
            line.share, study.in_unit(line.change), color=colour(line.method), linestyle=drawing.dash(line.method),
            label=label(study.methods[line.method].name),
        )  # fmt: skip
    axes.set_xlim(0, 100)
    unit = " (points)" if study.scale.percent else ""
    _finish(axes, study, "share of the clients (%), sorted", f"change against {label(study.methods[0].name, 16)}{unit}")
    return figure


FIGURE_MAKERS: dict[str, Callable[[Study], Figure | None]] = {
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
