"""The interactive figures: plotly accepts them, and what they draw are the numbers of the table and of the clients."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from report_cases import EVIL, clients, federated, regressed, softmax

import equipoise as eq
from equipoise import metrics
from equipoise.report.data import series
from equipoise.report.data.results_by_method import GRID, Study
from equipoise.report.interactive import figures as interactive
from equipoise.report.interactive import theme
from equipoise.report.palette import COLOURS, DARK_COLOURS, shorten
from equipoise.report.static import figures as static


@pytest.fixture(scope="module")
def study(comparison):
    return Study.of(comparison.all_results)


def drawn(study):
    return {name: figure for name, draw in interactive.FIGURE_MAKERS.items() if (figure := draw(study)) is not None}


def of_method(figure, index, *, mode="lines"):
    """The traces of a method that say something."""
    return [
        t for t in figure["data"] if t.get("legendgroup") == str(index) and t.get("hoverinfo") != "skip" and mode in t["mode"]
    ]


def odd_studies(run):
    table = run.clients.where("test")
    decades = torch.logspace(-3, 6, len(table), dtype=torch.float64)
    broken = table.error.clone()
    broken[:3] = float("nan")
    nothing = torch.full_like(table.error, float("inf"))
    yield Study.of([run])
    yield Study.of([replace(run, clients=replace(table, error=decades, loss=decades))])
    yield Study.of([replace(run, clients=replace(table, error=broken))])
    yield Study.of([replace(run, clients=replace(table, error=nothing, loss=nothing)), replace(run, name="other")])
    yield Study.of([replace(run, name=f"{EVIL} {k}") for k in range(9)])
    yield Study.of(regressed().all_results)
    yield Study.of([eq.train(softmax(), federated(train=1, test=1), rounds=1, clients_per_round=1)])
    yield Study.of([eq.train(softmax(), eq.FederatedData(clients(5)), rounds=0, clients_per_round=2)])


def test_plotly_accepts_every_figure(study, run):
    for each in (study, *odd_studies(run)):
        for figure in drawn(each).values():
            for dark in (False, True):
                template = theme.template(dark=dark)
                go.Figure(data=figure["data"], layout={**figure["layout"], "template": template})
            go.Figure(data=figure["data"], layout={**figure["layout"], **figure["narrow"]})


def test_the_histogram_counts_every_client_once(study):
    figure = interactive.histogram(study)
    bars = [t for t in figure["data"] if t["type"] == "bar"]
    for method, bar in zip(study.methods, bars, strict=True):
        assert sum(bar["y"]) == pytest.approx(100)
        edges = np.r_[np.array(bar["x"]) - np.array(bar["width"]) / 2, bar["x"][-1] + bar["width"][-1] / 2]
        shares = np.histogram(100 * method.pooled("error"), edges)[0] / len(method.pooled("error"))
        np.testing.assert_allclose(np.array(bar["y"]) / 100, shares, atol=1e-6)
        for words, key in (("mean", "mean"), ("90th percentile", "percentile_90")):
            lines = [t for t in figure["data"] if t["name"] == words and t["yaxis"] == bar["yaxis"]]
            assert lines[0]["x"] == [pytest.approx(100 * method.figures[key].mean, rel=1e-6)] * 9
            assert study.scale.value(method.figures[key].mean) in lines[0]["hovertext"]
            notes = figure["layout"]["annotations"]
            assert sum(f"{words} {study.scale.value(method.figures[key].mean)}" in note["text"] for note in notes) >= 1


def test_the_percentile_curve_is_that_of_the_clients(study, comparison):
    figure = interactive.percentiles(study)
    for index, runs in enumerate(comparison.results.values()):
        (line,) = of_method(figure, index)
        for percent in (10, 50, 90):
            drawn_there = line["y"][line["x"].index(percent)]
            values = [metrics.percentile(run.clients.where("test").error, percent) for run in runs]
            assert drawn_there == pytest.approx(100 * np.mean(values), rel=1e-6)
        assert line["y"][line["x"].index(90)] == pytest.approx(
            100 * study.methods[index].figures["percentile_90"].mean, rel=1e-6
        )


def test_the_curve_at_90_is_the_table(study):
    for method in study.methods:
        for percent in (50, 90):
            at = method.percentile_curves().mean(axis=0)[list(GRID).index(percent)]
            assert at == pytest.approx(method.percentile(percent).mean, abs=1e-12)
        assert method.percentile(90).mean == pytest.approx(method.figures["percentile_90"].mean)


def test_the_tradeoff_is_the_table(study):
    figure = interactive.tradeoff(study)
    for index, method in enumerate(study.methods):
        seeds, point = of_method(figure, index, mode="markers")
        mean, tail = method.figures["mean"], method.figures["percentile_90"]
        assert (point["x"], point["y"]) == ([pytest.approx(100 * mean.mean)], [pytest.approx(100 * tail.mean)])
        assert point["error_x"]["array"] == [pytest.approx(100 * min(mean.deviation, 1 - mean.mean))]
        assert point["error_y"]["array"] == [pytest.approx(100 * min(tail.deviation, 1 - tail.mean))]
        assert point["error_y"]["arrayminus"] == [pytest.approx(100 * min(tail.deviation, tail.mean))]
        assert study.scale.spread(mean, 2) in point["hovertext"]
        assert np.mean(seeds["x"]) == pytest.approx(100 * mean.mean)
    assert interactive.tradeoff(Study.of(study.methods[0].runs)) is None


def test_bars_of_shares_end_at_all_of_them(comparison):
    def with_errors(run, value):
        rows = run.clients
        return replace(run, clients=replace(rows, error=torch.full_like(rows.error, value), trivial_error=None))

    runs = [with_errors(run, (0.7, 1.0)[run.seed]) for run in comparison.all_results]  # 0.85 ± 0.21
    bars = of_method(interactive.tradeoff(Study.of(runs)), 0, mode="markers")[1]["error_x"]
    assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(15.0)], [pytest.approx(100 * 0.15 * 2**0.5)])
    (drawing,) = static.tradeoff(Study.of(runs)).axes
    ends = [segment for lines in drawing.collections for segment in lines.get_segments()]
    assert max(float(end.max()) for end in ends) == pytest.approx(100.0)


def test_the_curves_end_at_the_table(study):
    figure = interactive.curves(study)
    for index, method in enumerate(study.methods):
        mean, tail = of_method(figure, index)
        assert mean["x"] == tail["x"] == [2, 4, 6]
        assert mean["y"][-1] == pytest.approx(100 * method.figures["mean"].mean, rel=1e-6)
        assert tail["y"][-1] == pytest.approx(100 * method.figures["percentile_90"].mean, rel=1e-6)
        firsts = [run.history.points[0].splits["test"]["error"] for run in method.runs]
        assert mean["y"][0] == pytest.approx(100 * np.mean(firsts), rel=1e-6)
        bands = [t for t in figure["data"] if t.get("legendgroup") == str(index) and t.get("fill")]
        assert max(bands[0]["y"][:1]) == pytest.approx(100 * max(firsts), rel=1e-6)


def test_without_evaluations_the_curves_are_those_of_the_rounds(run):
    study = Study.of([run])
    mean, tail = of_method(interactive.curves(study), 0)
    assert mean["y"] == [pytest.approx(report.loss, rel=1e-6) for report in run.history.rounds]
    assert tail["y"] == [pytest.approx(report.tail_loss, rel=1e-6) for report in run.history.rounds]
    assert mean["x"] == [1, 2, 3, 4]
    assert study.evaluated is False  # the evaluation at the end makes no curve


def test_numbers_missing_in_a_log_are_gaps(comparison):
    (run, _), _ = comparison.results.values()
    first, *others = run.history.points
    hole = replace(first, splits={"test": {"error": None, "error_90": None}})
    study = Study.of([replace(run, history=replace(run.history, points=[hole, *others]))])
    mean, _ = of_method(interactive.curves(study), 0)
    assert mean["x"] == [4, 6]


def test_seeds_share_the_rounds_at_which_both_were_evaluated(comparison):
    runs = comparison.results["FedAvg"]
    fewer = replace(runs[1], history=replace(runs[1].history, points=runs[1].history.points[1:]))
    rounds, values = Study.of([runs[0], fewer]).methods[0].evaluations("error")
    assert list(rounds) == [4, 6]
    assert values.shape == (2, 2)


def test_points_are_the_clients(run):
    study = Study.of([run])
    figure = interactive.sizes(study)
    rows = run.clients.where("test")
    points = next(t for t in figure["data"] if t["mode"] == "markers")
    assert points["customdata"] == list(rows.client)
    assert points["x"] == rows.size.tolist()
    np.testing.assert_allclose(points["y"], 100 * rows.error, rtol=1e-6)
    (line,) = of_method(figure, 0)
    counts = series.by_size(study.methods[0]).count
    assert counts.sum() == len(rows)
    assert (counts * np.array(line["y"])).sum() / len(rows) == pytest.approx(100 * float(rows.error.mean()), rel=1e-5)


def test_selected_clients_are_those_of_the_reports(study):
    figure = interactive.selected(study)
    for index, method in enumerate(study.methods):
        (line,) = of_method(figure, index)
        assert np.mean(line["y"]) == pytest.approx(method.figures["trained"].mean, rel=1e-6)
    grey = next(t for t in figure["data"] if t["name"] == "drawn")
    assert set(grey["y"]) == {6}


def test_a_method_has_one_colour_everywhere(study):
    for name, figure in drawn(study).items():
        for trace in figure["data"]:
            if trace.get("legendgroup"):
                shade = trace.get("fillcolor") or trace.get("line", trace.get("marker"))["color"]
                expected = COLOURS[int(trace["legendgroup"])]
                assert shade in (expected, *(theme.with_opacity(expected, each) for each in (theme.BAND, theme.BAR))), name
    assert len(set(COLOURS)) == len(COLOURS) == len(set(DARK_COLOURS))
    assert theme.dark_colours()[COLOURS[0]] == DARK_COLOURS[0]


def test_text_for_plotly_and_short_names():
    assert theme.escape_markup('<a href="x">$1$ & %{y}') == '&lt;a href="x"&gt;&#36;1&#36; &amp; %{y}'
    assert shorten("  a \n b ") == "a b"
    assert len(shorten("x" * 99)) == 28
    assert theme.as_json([1.0, float("nan"), 1 / 3]) == [1.0, None, 0.3333333]


def test_logarithmic_ticks_are_round():
    assert theme.log_ticks(2, 80)["tickvals"] == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    wide = theme.log_ticks(1e-3, 1e20)
    assert len(wide["tickvals"]) <= 9
    assert "1e+05" in theme.log_ticks(1, 1e6)["ticktext"]


@pytest.mark.parametrize(
    "values", [[0.0, 0.15, 0.3, 1.0], [0.5], [0.0, 0.0], [3.0, 3.0], [-4.0, 2.0], [1e-9, 2e-9], [1e8, 3e9], [0.95, 1.0]]
)
def test_bins_hold_every_value_at_round_numbers(values):
    edges = series.bins(np.array(values), percent=max(values) <= 1, logarithmic=False)
    assert np.histogram(values, edges)[0].sum() == len(values)
    assert (np.diff(edges) > 0).all()
    assert 2 <= len(edges) <= 45
    if values == [0.0, 0.15, 0.3, 1.0]:  # a value at an edge is counted above it, however it was rounded
        assert [int(np.searchsorted(edges, v, side="right")) - 1 for v in values[:3]] == [0, 3, 6]


def test_smoothing_keeps_constants_and_skips_what_is_missing():
    constant = np.full((2, 9), 3.0)
    constant[0, 4] = np.nan
    np.testing.assert_allclose(series.smooth(constant, 3), 3.0)
    np.testing.assert_array_equal(series.smooth(constant, 1), constant)
    assert np.isnan(series.smooth(np.full((1, 3), np.nan), 3)).all()
    assert [series.smoothing_window(r) for r in (0, 79, 80, 1000)] == [1, 1, 3, 25]


def test_curves_that_coincide_lie_inside_each_other():
    flat, other = (series.Line.of(np.arange(3), np.full((1, 3), level)) for level in (5.0, 4.0))
    assert series.line_widths([flat, other], 2.0, 9.0) == [2.0, 2.0]
    nested = series.line_widths([flat] * 6, 2.0, 9.0)
    assert nested == sorted(nested, reverse=True)
    assert len(set(nested)) == 6
    assert (nested[0], nested[-1]) == (9.0, 2.0)
    assert series.line_widths([flat], 2.0, 9.0) == [2.0]


def test_methods_that_always_train_all_clients_drawn_have_no_figure_of_it(study):
    alone = Study.of(study.methods[0].runs)  # FedAvg trains the six that are drawn
    assert interactive.selected(alone) is None
    assert static.selected(alone) is None
    assert interactive.selected(study) is not None
