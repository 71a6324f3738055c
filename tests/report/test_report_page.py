"""The page: its numbers are those of the clients, it opens offline, and odd runs get a page too."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import metrics
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.report import histogram_picture, write_report
from equipoise.report.drawing import bins, smooth, smoothing
from equipoise.report.study import GRID, Study

VOID = {"meta", "br", "hr", "img", "link", "input"}
FIGURES = {"histogram", "percentiles", "tradeoff", "sizes", "losses", "trained"}


class Page(HTMLParser):
    """The text by id, the rows of the tables, every tag with its attributes; refuses tags that do not nest."""

    def __init__(self, path):
        super().__init__()
        self.source = Path(path).read_text(encoding="utf-8")
        self.tags, self.rows, self.by_id, self._open = [], {"numbers": [], "worst": []}, {}, []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
        if tag == "tr":
            table = next(a["class"] for t, a in reversed(self._open) if t == "table")
            self._row = []
            self.rows[table].append(self._row)
        elif tag in ("td", "th"):
            self._row.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        text = data.replace("\u00a0", " ")
        if any(t in ("td", "th") for t, _ in self._open):
            self._row[-1] += text
        for _, attrs in self._open:
            if "id" in attrs:
                self.by_id[attrs["id"]] = self.by_id.get(attrs["id"], "") + text

    @property
    def headline(self):
        return self.by_id["headline"]

    @property
    def figures(self):
        return {a["id"].removeprefix("figure-") for t, a in self.tags if t == "figure"}

    def cell(self, method, column):
        header, *rows = self.rows["numbers"]
        row = next(r for r in rows if r[0] == method)
        return row[header.index(column)]


def clients(count, classes=3, *, prefix="c", seed=0, spread=True, regression=False):
    """Clients whose classes and sizes differ."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for k in range(count):
        size = 8 + (5 * k) % 17 if spread else 12
        y = (torch.rand(size, generator=generator) ** (1 + k % 3) * classes).long()
        x = torch.randn(size, 4, generator=generator) + nn.functional.one_hot(y, 4) * (1.5 if k % 4 else 0.3)
        made.append((f"{prefix}{k}", x, 3 * x.sum(1) + k if regression else y))
    return eq.ClientSet.pack(made)


def federated(train=12, test=20, **options):
    return eq.FederatedData(clients(train, **options), test=clients(test, prefix="t", seed=1, **options))


def softmax():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


METHODS = {"FedAvg": eq.Algorithm(), "Δ-FL 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}


@pytest.fixture(scope="module")
def comparison():
    return eq.compare(METHODS, softmax(), federated(), rounds=6, clients_per_round=6, seeds=2)


@pytest.fixture(scope="module")
def run():
    return eq.train(softmax(), federated(), rounds=4, clients_per_round=6)


def numbers(text):
    return [float(n) for n in re.findall(r"\d+\.\d+", text)]


def offline(page):
    """Nothing is fetched, nothing runs, and no number that does not exist is shown."""
    assert not any(tag in {"script", "link", "iframe", "object", "embed", "base", "form"} for tag, _ in page.tags)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "@import" not in page.source
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attrs)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page.source))
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", page.source)
    assert "mathdefault" not in page.source
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def test_comparison_page_shows_everything(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "compare.html"))
    offline(page)
    assert page.figures == FIGURES
    assert sum(tag == "svg" for tag, _ in page.tags) == len(FIGURES)
    assert page.source.index('id="headline"') < page.source.index("<table") < page.source.index("<svg") < page.source.index(
        'class="worst"') < page.source.index('id="settings"')  # fmt: skip
    assert "Superquantile(tail=0.5" in page.source
    assert "nine of ten clients fare at least this well" in page.source
    assert f"equipoise {eq.__version__}" in page.source
    assert "0, 1" in page.source


def test_table_and_headline_are_the_numbers_of_the_clients(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "compare.html"))
    tails = {}
    for method, runs in comparison.results.items():
        errors = [run.clients.where("test").error for run in runs]
        for column, figure in {
            "mean": metrics.mean,
            "90th percentile": lambda e: metrics.percentile(e, 90),
            "worst 10 %": lambda e: metrics.worst(e, 0.1),
            "standard deviation": metrics.standard_deviation,
        }.items():
            shown, deviation = numbers(page.cell(method, column))
            values = torch.tensor([figure(e) for e in errors])
            assert shown == pytest.approx(100 * float(values.mean()), abs=0.051)
            assert deviation == pytest.approx(100 * float(values.std()), abs=0.051)
            if column == "90th percentile":
                tails[method] = shown
    written = numbers(page.headline.replace("Δ-FL 0.5", ""))
    if tails["Δ-FL 0.5"] < tails["FedAvg"]:
        assert written[:2] == [tails["FedAvg"], tails["Δ-FL 0.5"]]
        change = numbers(page.cell("Δ-FL 0.5", "mean"))[0] - numbers(page.cell("FedAvg", "mean"))[0]
        assert not change or written[2] == pytest.approx(abs(change))
    else:
        assert written == [tails["FedAvg"]]
    assert "20 unseen test clients" in page.headline


def test_headline_follows_known_errors(comparison, tmp_path):
    """With errors set by hand the sentence is known in full."""

    def with_errors(result, errors):
        table = result.clients.where("test")
        return replace(result, clients=replace(table, error=torch.tensor(errors, dtype=torch.float64)))

    first, second = (runs[0] for runs in comparison.results.values())
    results = [with_errors(first, [0.1] * 17 + [0.5] * 3), with_errors(second, [0.2] * 18 + [0.4] * 2)]
    page = Page(write_report(results, tmp_path / "r.html"))
    assert page.headline == (
        "Δ-FL 0.5 lowers the 90th percentile of the error over 20 unseen test clients from 50.0 % to 20.0 % "
        "at +6.0 points of mean error, against FedAvg."
    )
    assert page.cell("FedAvg", "90th percentile") == "50.0"
    assert page.cell("Δ-FL 0.5", "mean") == "22.0"
    results = [with_errors(first, [0.1] * 20), with_errors(second, [0.2] * 20)]
    page = Page(write_report(results, tmp_path / "worse.html"))
    assert page.headline.startswith("No method lowers")


def test_identical_methods_improve_nothing(tmp_path):
    same = {"FedAvg": eq.Algorithm(), "FedAvg again": eq.Algorithm()}
    page = Page(eq.compare(same, softmax(), federated(), rounds=2, clients_per_round=4).report(tmp_path / "same.html"))
    assert page.headline.startswith("No method lowers the 90th percentile")
    assert page.cell("FedAvg", "90th percentile") in page.headline


def test_one_run(run, tmp_path):
    page = Page(run.report(str(tmp_path / "new" / "folder" / "run.html")))
    offline(page)
    assert page.figures == FIGURES - {"tradeoff"}
    errors = run.clients.where("test").error
    assert numbers(page.headline) == [
        pytest.approx(100 * metrics.percentile(errors, 50), abs=0.051),
        numbers(page.cell("run", "worst 10 %"))[0],
    ]
    worst = run.clients.where("test").worst(10)
    assert [row[0] for row in page.rows["worst"][1:]] == [row["client"] for row in worst]
    assert [float(row[2]) for row in page.rows["worst"][1:]] == [pytest.approx(100 * r["error"], abs=0.051) for r in worst]


def test_the_same_results_give_the_same_bytes(run, tmp_path):
    assert run.report(tmp_path / "a.html").read_bytes() == run.report(tmp_path / "b.html").read_bytes()


def test_the_curve_at_90_is_the_table(comparison):
    study = Study.of(comparison.all_results)
    for method in study.methods:
        for percent in (50, 90):
            drawn = method.percentile_curves().mean(axis=0)[list(GRID).index(percent)]
            assert drawn == pytest.approx(method.percentile(percent).mean, abs=1e-12)
        assert method.percentile(90).mean == pytest.approx(method.figures["percentile_90"].mean)


@pytest.mark.parametrize(
    "values", [[0.0, 0.15, 0.3, 1.0], [0.5], [0.0, 0.0], [3.0, 3.0], [-4.0, 2.0], [1e-9, 2e-9], [1e8, 3e9], [0.95, 1.0]]
)
def test_bins_hold_every_value_at_round_numbers(values):
    edges = bins(np.array(values), percent=max(values) <= 1, logarithmic=False)
    assert np.histogram(values, edges)[0].sum() == len(values)
    assert (np.diff(edges) > 0).all()
    assert 2 <= len(edges) <= 45
    if values == [0.0, 0.15, 0.3, 1.0]:  # a value at an edge is counted above it, however it was rounded
        assert [int(np.searchsorted(edges, v, side="right")) - 1 for v in values[:3]] == [0, 3, 6]


def test_smoothing_keeps_constants_and_skips_what_is_missing():
    constant = np.full((2, 9), 3.0)
    constant[0, 4] = np.nan
    np.testing.assert_allclose(smooth(constant, 3), 3.0)
    np.testing.assert_array_equal(smooth(constant, 1), constant)
    assert np.isnan(smooth(np.full((1, 3), np.nan), 3)).all()
    assert [smoothing(r) for r in (0, 79, 80, 1000)] == [1, 1, 3, 25]


def test_sizes_are_drawn_only_if_they_differ(tmp_path):
    result = eq.train(softmax(), federated(spread=False), rounds=2, clients_per_round=4)
    assert "sizes" not in Page(result.report(tmp_path / "r.html")).figures


def test_one_client(tmp_path):
    result = eq.train(softmax(), federated(train=1, test=1), rounds=1, clients_per_round=1)
    page = Page(result.report(tmp_path / "r.html"))
    offline(page)
    assert page.headline.startswith("The one unseen test client sees an error of")
    assert page.cell("run", "standard deviation") == "0.0"


def test_no_rounds(tmp_path):
    page = Page(eq.train(softmax(), federated(), rounds=0, clients_per_round=4).report(tmp_path / "r.html"))
    offline(page)
    assert not page.figures & {"losses", "trained"}


def test_without_a_test_split_training_clients_are_weighted(tmp_path):
    result = eq.train(softmax(), eq.FederatedData(clients(9)), rounds=2, clients_per_round=4)
    page = Page(result.report(tmp_path / "r.html"))
    offline(page)
    assert "9 training clients, weighted by their examples," in page.headline
    rows = result.clients
    assert numbers(page.cell("run", "mean"))[0] == pytest.approx(100 * metrics.mean(rows.error, rows.size.double()), abs=0.051)


def test_regression_is_in_plain_numbers(tmp_path):
    def squared(outputs, targets):
        return (outputs.squeeze(1) - targets).square()

    torch.manual_seed(0)
    algorithms = {"mean": eq.Algorithm(solver=eq.solvers.SGD(lr=0.01)), "same": eq.Algorithm(solver=eq.solvers.SGD(lr=0.02))}
    both = eq.compare(algorithms, nn.Linear(4, 1), federated(regression=True), rounds=4, clients_per_round=6, loss=squared)
    page = Page(both.report(tmp_path / "r.html"))
    offline(page)
    assert page.figures == FIGURES
    assert "of the loss over 20 unseen test clients" in page.headline
    assert "%" not in page.headline
    assert "in %" not in page.source
    assert page.rows["worst"][0] == ["client", "examples", "loss"]


def test_a_loss_that_spans_decades(run, tmp_path):
    table = run.clients.where("test")
    values = torch.logspace(-3, 6, len(table), dtype=torch.float64)
    page = Page(write_report([replace(run, clients=replace(table, error=values, loss=values))], tmp_path / "r.html"))
    offline(page)


def test_names_are_escaped_and_drawn_as_they_are(tmp_path):
    evil = '<b>&"x"</b><script>alert(1)</script>'
    test = clients(3, prefix="t")
    data = eq.FederatedData(clients(6), test=replace(test, ids=(evil, "<b>", "c")))
    methods = {evil: eq.Algorithm(), "_$x$ %s": eq.Algorithm(), "方法": eq.Algorithm()}
    page = Page(eq.compare(methods, softmax(), data, rounds=2, clients_per_round=4).report(tmp_path / "r.html"))
    offline(page)
    assert not any(tag == "b" for tag, _ in page.tags)
    assert {row[0] for row in page.rows["worst"][1:]} == {evil, "<b>", "c"}
    assert [row[0] for row in page.rows["numbers"][1:]] == list(methods)
    assert "_$x$ %s" in page.by_id["figure-percentiles"].replace("\u200b", "")


def test_numbers_that_are_not_finite_are_dashes(run, comparison, tmp_path):
    def broken(result, value):
        error, loss = result.clients.error.clone(), result.clients.loss.clone()
        error[-3:], loss[-3:] = value, value
        return replace(result, clients=replace(result.clients, error=error, loss=loss))

    for value in (float("nan"), float("inf")):
        page = Page(write_report([broken(run, value)], tmp_path / "r.html"))
        offline(page)
        assert page.cell("run", "mean") == "–"
        assert "not finite" in page.headline
        offline(Page(write_report([broken(r, value) for r in comparison.all_results], tmp_path / "s.html")))


def test_many_methods_with_long_names(run, tmp_path):
    many = [replace(run, name=f"a method with quite a long name, number {k}") for k in range(9)]
    page = Page(write_report(many, tmp_path / "r.html"))
    offline(page)
    assert all(f"number {k}" in page.by_id["figure-percentiles"] for k in range(9))
    assert 'class="best"' not in page.source  # all alike
    histogram_picture(many, tmp_path / "r.png")


def test_results_that_do_not_belong_together_are_refused(run, comparison, tmp_path):
    with pytest.raises(InvalidParameter, match="at least one"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(InvalidParameter, match="different seeds"):
        write_report([run, run], tmp_path / "r.html")
    stranger = replace(run, seed=1, algorithm=METHODS["Δ-FL 0.5"])
    with pytest.raises(InvalidParameter, match="same algorithm"):
        write_report([run, stranger], tmp_path / "r.html")
    only_train = replace(run, name="other", clients=run.clients.where("train"))
    with pytest.raises(InvalidParameter, match="same split"):
        write_report([run, only_train], tmp_path / "r.html")


def test_pictures(comparison, tmp_path):
    png = histogram_picture(comparison.all_results, tmp_path / "deep" / "h.png").read_bytes()
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    assert png.startswith(b"\x89PNG")
    assert (width, height) == (1200, 500)
    svg = histogram_picture(comparison.all_results, tmp_path / "h.SVG").read_text()
    assert "<svg" in svg
    assert "Δ-FL 0.5" in svg
    with pytest.raises(InvalidParameter, match=r"\.png or \.svg"):
        histogram_picture(comparison.all_results, tmp_path / "h.pdf")


def test_a_path_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "r.html", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(NotWritten, match=re.escape(str(path))) as caught:
            run.report(path)
        assert isinstance(caught.value, EquipoiseError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_report_is_replaced_and_leaves_nothing_beside_it(run, tmp_path):
    path = tmp_path / "r.html"
    path.write_text("old")
    assert run.report(path) == path
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_users_matplotlib_settings_neither_reach_the_figures_nor_change(run, tmp_path):
    import matplotlib

    plain = run.report(tmp_path / "a.html").read_bytes()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "svg.fonttype": "path"}):
        assert run.report(tmp_path / "b.html").read_bytes() == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, equipoise, equipoise.report.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to open the page with")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_it(comparison, tmp_path, width):
    page = comparison.report(tmp_path / "r.html")
    picture = tmp_path / "shot.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
             f"--screenshot={picture}", f"--window-size={width},2400"]  # fmt: skip
    subprocess.run([BROWSER, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)
    shot = picture.read_bytes()
    assert int.from_bytes(shot[16:20], "big") == width
    assert len(shot) > 50_000  # an empty page is a few kilobytes
