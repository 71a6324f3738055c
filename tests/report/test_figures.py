"""The figures: their numbers are those of the tables, plotly takes them all, and files for papers are drawn from them."""

import math
import sys
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from report_cases import (
    ALL_TRAINED,
    EVIL,
    FIGURES,
    OF_SEVERAL,
    clients,
    federated,
    known,
    private,
    regressed,
    softmax,
    under_attack,
)

import equipoise as eq
from equipoise import metrics
from equipoise.errors import ConfigError, InvalidParameter, NotWritten
from equipoise.report import export_figures, figures, histogram_picture, plot, series
from equipoise.report.formats import distinct_names, shorten
from equipoise.report.plot import COLOURS, DARK_COLOURS
from equipoise.report.static_figures import draw
from equipoise.report.study import GRID, Study


@pytest.fixture(scope="module")
def study(comparison):
    return Study.of(comparison.all_results)


def of_method(plot, index, *, mode="lines"):
    """The traces of a method that say something."""
    return [t for t in plot.data if t.get("legendgroup") == str(index) and t.get("hoverinfo") != "skip" and mode in t["mode"]]


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
    for values in ([1e-3, 1.0, 1e6], [2.0, 2.0, 2.0], [-1.0, 0.5, 3.0], [math.nan, math.inf, 1.0]):
        yield Study.of([replace(known(run, values, values[::-1]), error_is_loss=True)])


def test_plotly_and_matplotlib_accept_every_figure(study, attacked, run):
    for each in (study, Study.of([private(run) for run in attacked.all_results]), *odd_studies(run)):
        for found in figures.drawn(each).values():
            figure = found.json()
            for dark in (False, True):
                go.Figure(data=figure["data"], layout={**figure["layout"], "template": plot.template(dark=dark)})
            go.Figure(data=figure["data"], layout={**figure["layout"], **figure["narrow"]})
            assert draw(found).axes


def test_the_histogram_counts_every_client_once(study):
    found = figures.histogram(study)
    bars = [t for t in found.data if t["type"] == "bar"]
    for method, bar, panel in zip(study.methods, bars, found.panels, strict=True):
        assert sum(bar["y"]) == pytest.approx(100)
        edges = np.r_[np.array(bar["x"]) - np.array(bar["width"]) / 2, bar["x"][-1] + bar["width"][-1] / 2]
        shares = np.histogram(100 * method.pooled("error"), edges)[0] / len(method.pooled("error"))
        np.testing.assert_allclose(np.array(bar["y"]) / 100, shares, atol=1e-6)
        for words, key in (("mean", "mean"), ("90th percentile", "percentile_90")):
            (line,) = (t for t in found.data if t["name"] == words and t["yaxis"] == bar["yaxis"])
            assert line["x"] == [pytest.approx(100 * method.figures[key].mean, rel=1e-6)] * 9
            assert f"{words} {study.scale.value(method.figures[key].mean)}" in panel["note"]


def test_the_percentile_curve_is_that_of_the_clients(study, comparison):
    found = figures.percentiles(study)
    for index, runs in enumerate(comparison.results.values()):
        (line,) = of_method(found, index)
        for percent in (10, 50, 90):
            values = [metrics.percentile(run.clients.where("test").error, percent) for run in runs]
            assert line["y"][line["x"].index(percent)] == pytest.approx(100 * np.mean(values), rel=1e-6)
        method = study.methods[index]
        assert line["y"][line["x"].index(90)] == pytest.approx(100 * method.figures["percentile_90"].mean, rel=1e-6)
        assert method.percentile_curves().mean(axis=0)[list(GRID).index(50)] == pytest.approx(method.median(), abs=1e-12)


def test_the_tradeoff_is_the_table(study, comparison):
    found = figures.tradeoff(study)
    for index, method in enumerate(study.methods):
        seeds, point = of_method(found, index, mode="markers")
        mean, tail = method.figures["mean"], method.figures["percentile_90"]
        assert (point["x"], point["y"]) == ([pytest.approx(100 * mean.mean)], [pytest.approx(100 * tail.mean)])
        assert point["error_x"]["array"] == [pytest.approx(100 * min(mean.deviation, 1 - mean.mean))]
        assert point["error_y"]["arrayminus"] == [pytest.approx(100 * min(tail.deviation, tail.mean))]
        assert np.mean(seeds["x"]) == pytest.approx(100 * mean.mean)
    assert figures.tradeoff(Study.of(study.methods[0].runs)) is None

    def flat(run, value):
        return replace(run, clients=replace(run.clients, error=torch.full_like(run.clients.error, value), trivial_error=None))

    shares = Study.of([flat(run, (0.7, 1.0)[run.seed]) for run in comparison.all_results])  # 0.85 ± 0.21, cut off at 1
    bars = of_method(figures.tradeoff(shares), 0, mode="markers")[1]["error_x"]
    assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(15.0)], [pytest.approx(100 * 0.15 * 2**0.5)])


def test_the_curves_end_at_the_table(study, attacked):
    for each in (study, Study.of(attacked.all_results)):
        found = figures.curves(each)
        for index, method in enumerate(each.methods):
            mean, tail = of_method(found, index)
            assert mean["x"] == tail["x"] == [2, 4, 6]
            assert mean["y"][-1] == pytest.approx(100 * method.figures["mean"].mean, rel=1e-6)
            assert tail["y"][-1] == pytest.approx(100 * method.figures["percentile_90"].mean, rel=1e-6)
            firsts = [run.history.points[0].splits["test"]["error"] for run in method.runs]
            assert mean["y"][0] == pytest.approx(100 * np.mean(firsts), rel=1e-6)
            bands = [t for t in found.data if t.get("legendgroup") == str(index) and t.get("fill")]
            assert bands[0]["y"][0] == pytest.approx(100 * max(firsts), rel=1e-6)


def test_without_evaluations_the_curves_are_those_of_the_rounds(run):
    study = Study.of([run])
    mean, tail = of_method(figures.curves(study), 0)
    assert mean["y"] == [pytest.approx(report.loss, rel=1e-6) for report in run.history.rounds]
    assert tail["y"] == [pytest.approx(report.tail_loss, rel=1e-6) for report in run.history.rounds]
    assert mean["x"] == [1, 2, 3, 4]
    assert study.evaluated is False  # the evaluation at the end makes no curve


def test_gaps_in_logs_and_rounds_of_some_seeds_alone(comparison):
    runs = comparison.results["FedAvg"]
    first, *others = runs[0].history.points
    hole = replace(first, splits={"test": {"error": None, "error_90": None}})
    study = Study.of([replace(runs[0], history=replace(runs[0].history, points=[hole, *others]))])
    assert of_method(figures.curves(study), 0)[0]["x"] == [4, 6]
    fewer = replace(runs[1], history=replace(runs[1].history, points=runs[1].history.points[1:]))
    rounds, values = Study.of([runs[0], fewer]).methods[0].evaluations("error")
    assert (list(rounds), values.shape) == ([4, 6], (2, 2))


def test_points_are_the_clients(run):
    study = Study.of([run])
    found = figures.sizes(study)
    rows = run.clients.where("test")
    points = next(t for t in found.data if t["mode"] == "markers")
    assert points["customdata"] == list(rows.client)
    assert points["x"] == rows.size.tolist()
    np.testing.assert_allclose(points["y"], 100 * rows.error, rtol=1e-6)
    (line,) = of_method(found, 0)
    counts = series.by_size(study.methods[0]).count
    assert counts.sum() == len(rows)
    assert (counts * np.array(line["y"])).sum() / len(rows) == pytest.approx(100 * float(rows.error.mean()), rel=1e-5)
    assert figures.sizes(Study.of([eq.train(softmax(), federated(spread=False), rounds=0, clients_per_round=4)])) is None


def test_own_models_are_drawn_against_the_shared_one(attacked):
    study = Study.of(attacked.all_results)
    rows = attacked.results["Ditto"][0].clients.where("test")
    line, benign, malicious = figures.own(study).data
    assert line["x"] == line["y"]
    assert benign["marker"]["symbol"] != malicious["marker"]["symbol"]
    for trace, bad in ((benign, False), (malicious, True)):
        pairs = series.error_pairs(study.methods[1], malicious=bad)
        names = [name for ids in pairs.clients for name in ids]
        assert sorted(names) == sorted(n for n, m in zip(rows.client, rows.malicious.tolist(), strict=True) if m == bad)
        drawn = zip(trace["x"], trace["y"], pairs.clients, trace["marker"]["size"], trace["hovertext"], strict=True)
        for x, y, ids, size, words in drawn:
            k = rows.client.index(ids[0])
            assert (x, y) == pytest.approx((100 * float(rows.error[k]), 100 * float(rows.personal_error[k])), rel=1e-6)
            assert ids[0] in words
            assert ("(malicious)" in words) == bad
            assert size == pytest.approx(min(26, 7 * len(ids) ** 0.5), rel=1e-6)
    assert figures.own(Study.of(attacked.results["FedAvg"])) is None
    _, together = figures.own(Study.of([known(attacked.results["Ditto"][0], [0.1] * 4 + [0.5], [0.2] * 4 + [0.5])])).data
    assert together["marker"]["size"] == [14.0, 7.0]


def test_selected_clients_are_those_of_the_reports(study):
    found = figures.selected(study)
    for index, method in enumerate(study.methods):
        (line,) = of_method(found, index)
        assert np.mean(line["y"]) == pytest.approx(method.figures["trained"].mean, rel=1e-6)
    assert set(next(t for t in found.data if t["name"] == "drawn")["y"]) == {6}
    assert figures.selected(Study.of(study.methods[0].runs)) is None  # FedAvg trains the six that are drawn


def test_the_curve_of_epsilon_is_neither_smoothed_nor_cut(run):
    reports = [replace(run.history.rounds[0], round=t, epsilon=(t + 1) ** 2) for t in range(1000)]
    (line,) = figures.privacy(Study.of([replace(run, history=replace(run.history, rounds=reports))])).data
    assert line["x"][-1] == 1000
    assert len(line["x"]) <= series.MOST_ROUNDS
    assert line["y"] == [pytest.approx(x**2) for x in line["x"]]
    assert figures.privacy(Study.of([run])) is None


def test_changes_are_sorted_and_private_clients_have_no_name(comparison):
    study = Study.of(comparison.all_results)
    (curve,) = figures.gains(study).data
    before, after = (
        np.mean([run.clients.where("test").error.numpy() for run in runs], 0) for runs in comparison.results.values()
    )
    assert curve["y"] == pytest.approx(sorted(100 * (after - before)), abs=1e-4)
    assert set(curve["customdata"]) == set(comparison.all_results[0].clients.where("test").client)
    hidden = Study.of([private(run) for run in comparison.all_results])
    ids = {*comparison.all_results[0].clients.client}
    for name, found in figures.drawn(hidden).items():
        for trace in found.data:
            assert not ids & {*map(str, trace.get("customdata", ()))}, name
            assert not any("client " in text for text in trace.get("hovertext", ())), name


def test_a_method_has_one_colour_everywhere_and_names_are_plain_text(study):
    for name, found in figures.drawn(study).items():
        for trace in found.data:
            if trace.get("legendgroup"):
                shade = trace.get("fillcolor") or trace.get("line", trace.get("marker"))["color"]
                expected = COLOURS[int(trace["legendgroup"])]
                assert shade in (expected, *(plot.with_opacity(expected, each) for each in (plot.BAND, plot.BAR))), name
    assert len(set(COLOURS)) == len(COLOURS) == len(set(DARK_COLOURS))
    assert len({(plot.colour(index), plot.dash(index)) for index in range(28)}) == 28
    assert plot.label('<a href="x">$1$ & %{y}') == '&lt;a href="x"&gt;&#36;1&#36; &amp; %{y}'
    assert (shorten("  a \n b "), len(shorten("x" * 99))) == ("a b", 28)
    names = [f"method number {i} with a rather long name of its own" for i in range(1, 10)]
    assert [text[:7] for text in distinct_names(names)] == [f"…{i} with" for i in range(1, 10)]
    assert [text[:3] for text in distinct_names(["x" * 20 + str(i) + "y" * 20 for i in (1, 2)])] == ["1: ", "2: "]
    assert plot.as_json([1.0, float("nan"), 1 / 3]) == [1.0, None, 0.3333333]
    assert plot.log_ticks(2, 80)["tickvals"] == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert len(plot.log_ticks(1e-3, 1e20)["tickvals"]) <= 9


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


def test_smoothing_keeps_constants_and_curves_that_coincide_are_both_seen():
    constant = np.full((2, 9), 3.0)
    constant[0, 4] = np.nan
    np.testing.assert_allclose(series.smooth(constant, 3), 3.0)
    np.testing.assert_array_equal(series.smooth(constant, 1), constant)
    assert np.isnan(series.smooth(np.full((1, 3), np.nan), 3)).all()
    assert [series.smoothing_window(r) for r in (0, 79, 80, 1000)] == [1, 1, 3, 25]
    flat, other = (series.Line.of(np.arange(3), np.full((1, 3), level)) for level in (5.0, 4.0))
    assert series.line_widths([flat, other], 2.0, 9.0) == [2.0, 2.0]
    nested = series.line_widths([flat] * 6, 2.0, 9.0)
    assert (nested[0], nested[-1], len(set(nested))) == (9.0, 2.0, 6)


# ----------------------------------------------------------------------------------------------------------------- as files


def test_pictures_and_every_format(comparison, run, tmp_path):
    png = histogram_picture(comparison.all_results, tmp_path / "deep" / "h.png").read_bytes()
    assert tuple(int.from_bytes(png[i : i + 4], "big") for i in (16, 20)) == (1200, 500)
    assert "Δ-FL 0.5" in histogram_picture(comparison.all_results, tmp_path / "h.SVG").read_text()
    written = export_figures(comparison.all_results, tmp_path / "figures")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    for name in FIGURES - {"gains"}:
        assert "Δ-FL 0.5" in (tmp_path / "figures" / f"{name}.svg").read_text()
    assert "error (%)" in (tmp_path / "figures" / "curves.svg").read_text()  # evaluated on the way: not the training loss
    alone = run.figures(tmp_path / "alone", format=["png", "svg"])
    assert {path.stem for path in alone} == FIGURES - OF_SEVERAL - ALL_TRAINED
    bare = eq.train(softmax(), federated(spread=False), rounds=0, clients_per_round=4)
    assert [path.name for path in export_figures([bare], tmp_path, ["svg"])] == ["histogram.svg", "percentiles.svg"]


def test_pdf_has_embedded_truetype_fonts_and_the_same_bytes_again(comparison, tmp_path):
    written = comparison.figures(tmp_path / "pdf")
    for path in written:
        content = path.read_bytes()
        # Type 42 is a TrueType font, in a stream FontFile2; Type 3 is what conferences refuse.
        assert (content[:4], b"/FontFile2" in content, b"/Type3" in content) == (b"%PDF", True, False)
    again = comparison.figures(tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_own_models_attacks_and_privacy_as_files(tmp_path):
    methods = {"a _method_ of $1": eq.Algorithm(personal=eq.personal.Ditto(strength=0.5))}
    made = eq.compare(methods, softmax(), under_attack(), rounds=2, clients_per_round=8)
    written = {path.name for path in export_figures([private(run) for run in made.all_results], tmp_path, "svg")}
    assert {"own.svg", "privacy.svg"} <= written
    assert "a _method_ of $1, malicious" in (tmp_path / "own.svg").read_text()


def test_what_cannot_be_written_is_refused_with_its_cure(run, tmp_path, monkeypatch):
    for formats in ((), "eps", ("svg", "gif"), 3):
        with pytest.raises(InvalidParameter, match="pdf, svg, png"):
            export_figures([run], tmp_path / "new", formats)
    with pytest.raises(InvalidParameter, match="path"):
        histogram_picture([run], tmp_path / "h.pdf")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotWritten, match=str(tmp_path / "file")):
        export_figures([run], tmp_path / "file", ("svg",))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        run.figures(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_users_matplotlib_settings_neither_reach_the_figures_nor_change(run, tmp_path):
    import matplotlib

    plain = [path.read_bytes() for path in export_figures([run], tmp_path / "a", "svg")]
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "svg.fonttype": "path"}):
        assert [path.read_bytes() for path in export_figures([run], tmp_path / "b", "svg")] == plain
        assert matplotlib.rcParams["font.size"] == 30
