"""The page as text: its numbers are those of the clients, it opens offline, and odd runs get a page too."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from report_cases import (
    ALL_TRAINED,
    EVIL,
    FIGURES,
    METHODS,
    OF_SEVERAL,
    Page,
    clients,
    federated,
    numbers,
    offline,
    regressed,
    softmax,
)

import equipoise as eq
from equipoise import metrics
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.report import write_report
from equipoise.report.interactive.assets import embedded, plotly_js


def test_comparison_page_shows_everything(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "compare.html"))
    offline(page)
    assert page.figures == FIGURES
    order = ['id="headline"', 'id="figure-histogram"', 'id="table-numbers"', 'id="figure-curves"', 'id="left-behind"',
             'id="settings"', 'id="figure-data"']  # fmt: skip
    places = [page.source.index(mark) for mark in order]
    assert places == sorted(places)
    assert "Superquantile(tail=0.5" in page.source
    assert "nine of ten clients fare at least this well" in page.source
    assert f"equipoise {eq.__version__}" in page.source
    assert "0, 1" in page.source


def test_only_the_pages_own_scripts_may_run(run, tmp_path):
    whole = run.report(tmp_path / "r.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', whole).group(1)
    assert "default-src 'none'" in policy
    assert len(re.findall("sha256-", policy)) == 2
    assert "script-src 'unsafe" not in policy
    assert "\r" not in plotly_js()
    assert "</script" not in plotly_js()


def test_embedded_json_cannot_end_its_element():
    import json

    text = embedded({EVIL: [EVIL, 1.5, None]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {EVIL: [EVIL, 1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("nan")])


def test_one_run(run, tmp_path):
    page = Page(run.report(str(tmp_path / "new" / "folder" / "run.html")))
    offline(page)
    assert page.figures == FIGURES - OF_SEVERAL - ALL_TRAINED
    errors = run.clients.where("test").error
    assert numbers(page.headline) == [
        pytest.approx(100 * metrics.percentile(errors, 50), abs=0.051),
        numbers(page.cell("this model", "worst 10 %"))[0],
    ]
    worst = run.clients.where("test").worst(10)
    rows = page.rows["table-worst"][1:]
    assert [row[0] for row in rows] == [row["client"] for row in worst]
    assert [numbers(row[2])[0] for row in rows] == [pytest.approx(100 * r["error"], abs=0.051) for r in worst]


def test_clients_left_behind_before_and_after(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "r.html"))
    seeds = [[run.clients.where("test") for run in runs] for runs in comparison.results.values()]
    before, after = (torch.stack([table.error for table in tables]).mean(0) for tables in seeds)
    for name, means in (("left-behind", before), ("still-behind", after)):
        header, *rows = page.rows[name]
        assert header == ["client", "examples", *METHODS]
        at = [seeds[0][0].client.index(row[0]) for row in rows]
        assert [float(means[k]) for k in at] == sorted(means.tolist(), reverse=True)[:10]
        for k, row in zip(at, rows, strict=True):
            size = int(seeds[0][0].size[k])
            assert int(row[1].removesuffix(" *")) == size
            first, low, high = numbers(row[2])
            shown, *rest = numbers(row[3])
            assert first == pytest.approx(100 * float(before[k]), abs=0.051)
            assert shown == pytest.approx(100 * float(after[k]), abs=0.051)
            change = 100 * abs(float(after[k] - before[k]))
            assert change < 0.051 if "±0" in row[3] else rest[0] == pytest.approx(change, abs=0.051)
            between = metrics.share_interval(float(before[k]) * size, size)  # by the client's examples
            assert [low, high] == pytest.approx([100 * between.low, 100 * between.high], abs=0.051)


def test_other_seeds_and_other_clients_are_not_compared(run, tmp_path):
    other = replace(run, name="other", seed=7)
    page = Page(write_report([run, other], tmp_path / "seed.html"))
    assert page.rows["left-behind"][0] == ["client", "examples", "run"]
    assert page.rows["still-behind"][0] == ["client", "examples", "other"]
    grown = replace(run, name="grown", clients=replace(run.clients, size=run.clients.size + 1))
    page = Page(write_report([run, grown], tmp_path / "size.html"))
    assert {row[3] for row in page.rows["left-behind"][1:]} == {"–"}


def test_no_rounds(tmp_path):
    page = Page(eq.train(softmax(), federated(), rounds=0, clients_per_round=4).report(tmp_path / "r.html"))
    offline(page)
    assert not page.figures & {"curves", "selected"}


def test_regression_is_in_plain_numbers(tmp_path):
    page = Page(regressed().report(tmp_path / "r.html"))
    offline(page)
    assert page.figures == FIGURES - ALL_TRAINED
    assert "of the loss over 20 unseen test clients" in page.headline
    assert "%" not in page.headline
    assert "in %" not in page.source
    one = Page(regressed().results["mean"][0].report(tmp_path / "one.html"))
    assert one.rows["table-worst"][0] == ["client", "examples", "loss"]


def test_names_are_escaped_and_shown_as_they_are(tmp_path):
    test = clients(3, prefix="t")
    data = eq.FederatedData(clients(6), test=replace(test, ids=(EVIL, "<b>", "c")))
    methods = {EVIL: eq.Algorithm(), "_$x$ %s": eq.Algorithm(), "方法 Δ": eq.Algorithm()}
    page = Page(eq.compare(methods, softmax(), data, rounds=2, clients_per_round=4).report(tmp_path / "r.html"))
    offline(page)
    assert not any(tag == "b" for tag, _ in page.tags)
    assert {row[0] for row in page.rows["left-behind"][1:]} == {EVIL, "<b>", "c"}
    assert [row[0] for row in page.rows["table-numbers"][1:]] == [*methods, "most frequent class"]
    # plotly reads a little HTML, TeX between dollars, and %{…} in templates: none of these is left in what it is given.
    names = [trace["name"] for trace in page.data["figures"]["percentiles"]["data"]]
    assert names[1:] == ["_&#36;x&#36; %s", "方法 Δ"]
    assert not any(set("<>$") & set(name) for name in names)
    for figure in page.data["figures"].values():
        for trace in figure["data"]:
            assert "alert" not in trace.get("hovertemplate", "")


def test_many_methods_with_long_names(run, tmp_path):
    many = [replace(run, name=f"a method with quite a long name, number {k}") for k in range(9)]
    page = Page(write_report(many, tmp_path / "r.html"))
    offline(page)
    names = [trace["name"] for trace in page.data["figures"]["percentiles"]["data"]]
    assert [name[-8:] for name in names] == [f"number {k}" for k in range(9)]
    assert 'class="best"' not in page.source  # all alike


def test_thousands_of_clients_and_rounds_make_no_large_page(run, tmp_path):
    count = 20_000
    error = torch.linspace(0, 1, count, dtype=torch.float64)
    table = replace(
        run.clients, client=tuple(f"client-{k}" for k in range(count)), split=("test",) * count,
        seen=torch.zeros(count, dtype=torch.bool), size=1 + torch.arange(count) % 501, error=error, loss=2 * error,
        trivial_error=None,
    )  # fmt: skip
    history = replace(run.history, rounds=run.history.rounds * 1000)
    results = [replace(run, name=name, clients=table, history=history) for name in "ab"]
    page = Page(write_report(results, tmp_path / "r.html"))
    offline(page)
    table_of_all = len(page.by_id["clients-data"].encode())
    assert len(page.source.encode()) - table_of_all < 250_000
    assert table_of_all < 45 * count
    assert "some of the clients" in page.source


def test_a_training_split_is_weighted_and_said_to_be(tmp_path):
    page = Page(eq.train(softmax(), eq.FederatedData(clients(9)), rounds=2, clients_per_round=4).report(tmp_path / "r.html"))
    assert "of the examples" in page.data["figures"]["histogram"]["data"][0]["hovertext"][0]
    assert "of the examples" in page.data["figures"]["percentiles"]["layout"]["xaxis"]["unifiedhovertitle"]["text"]


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
        assert not change or "No method clearly" in page.headline or written[2] == pytest.approx(abs(change))
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
        "Δ-FL 0.5 lowers the 90th percentile of the error over 20 unseen test clients from 50.0 % to 20.0 %, "
        "against FedAvg (one seed, which does not rule out chance). The mean error rises from 16.0 % to 22.0 %."
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


def test_the_same_results_give_the_same_bytes(run, tmp_path):
    assert run.report(tmp_path / "a.html").read_bytes() == run.report(tmp_path / "b.html").read_bytes()


def test_sizes_are_drawn_only_if_they_differ(tmp_path):
    result = eq.train(softmax(), federated(spread=False), rounds=2, clients_per_round=4)
    assert "sizes" not in Page(result.report(tmp_path / "r.html")).figures


def test_one_client(tmp_path):
    result = eq.train(softmax(), federated(train=1, test=1), rounds=1, clients_per_round=1)
    page = Page(result.report(tmp_path / "r.html"))
    offline(page)
    assert page.headline.startswith("The one unseen test client sees an error of")
    assert page.cell("this model", "standard deviation") == "0.0"


def test_without_a_test_split_training_clients_are_weighted(tmp_path):
    result = eq.train(softmax(), eq.FederatedData(clients(9)), rounds=2, clients_per_round=4)
    page = Page(result.report(tmp_path / "r.html"))
    offline(page)
    assert "9 training clients, weighted by their examples," in page.headline
    rows = result.clients
    assert numbers(page.cell("this model", "mean"))[0] == pytest.approx(
        100 * metrics.mean(rows.error, rows.size.double()), abs=0.051
    )


def test_a_loss_that_spans_decades(run, tmp_path):
    table = run.clients.where("test")
    values = torch.logspace(-3, 6, len(table), dtype=torch.float64)
    page = Page(write_report([replace(run, clients=replace(table, error=values, loss=values))], tmp_path / "r.html"))
    offline(page)


def test_numbers_that_are_not_finite_are_dashes(run, comparison, tmp_path):
    def broken(result, value):
        error, loss = result.clients.error.clone(), result.clients.loss.clone()
        error[-3:], loss[-3:] = value, value
        return replace(result, clients=replace(result.clients, error=error, loss=loss))

    for value in (float("nan"), float("inf")):
        page = Page(write_report([broken(run, value)], tmp_path / "r.html"))
        offline(page)
        assert page.cell("this model", "mean") == "–"
        assert "not finite" in page.headline
        offline(Page(write_report([broken(r, value) for r in comparison.all_results], tmp_path / "s.html")))


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


def test_matplotlib_and_plotly_are_imported_only_to_draw():
    code = "import sys, equipoise.report.interactive.page; sys.exit('matplotlib' in sys.modules or 'plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
