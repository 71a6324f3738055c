"""The page: it opens offline, its numbers are those of the clients' tables, names are escaped, protected clients have none."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from report_cases import (
    ALL_TRAINED,
    DITTO,
    EVIL,
    FIGURES,
    METHODS,
    OF_SEVERAL,
    Page,
    Spent,
    clients,
    federated,
    inside,
    known,
    numbers,
    offline,
    private,
    regressed,
    rejecting,
    softmax,
    squared,
    with_errors,
    with_rounds,
)
from torch import nn

import equipoise as eq
from equipoise import metrics
from equipoise.client_table import ClientTable
from equipoise.errors import EquipoiseError, InvalidParameter, NotWritten
from equipoise.report import write_report
from equipoise.report.html import embedded
from equipoise.report.over_seeds import figures_of, malicious_clients
from equipoise.report.page import plotly_js

COLUMNS = ("mean", "90th percentile", "worst 10 %", "standard deviation")


def four(errors):
    """Mean, 90th percentile, worst 10 % and standard deviation of numbers, slowly: every number a hundred times, sorted."""
    many = np.sort(np.repeat(np.asarray(errors, dtype=np.float64), 100))
    tenth = len(many) // 10
    return many.mean(), many[len(many) - tenth - 1], many[-tenth:].mean(), many.std()


def parquet(run, folder):
    """The columns of the test clients, as another program would read them."""
    table = pyarrow.parquet.read_table(run.clients.to_parquet(folder / f"{run.name}.parquet")).to_pydict()
    here = [k for k, split in enumerate(table["split"]) if split == "test"]
    return {name: np.array([values[k] for k in here]) for name, values in table.items()}


def row_below(page, method):
    rows = page.rows["table-numbers"]
    return rows[next(k for k, row in enumerate(rows) if row[0] == method) + 1]


# ------------------------------------------------------------------------------------------------------------------ the page


def test_a_comparison_shows_everything_in_order(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "compare.html"))
    offline(page)
    assert page.figures == FIGURES
    order = ['id="headline"', 'id="figure-histogram"', 'id="table-numbers"', 'id="figure-curves"', 'id="left-behind"',
             'id="settings"', 'id="figure-data"']  # fmt: skip
    places = [page.source.index(mark) for mark in order]
    assert places == sorted(places)
    assert "Superquantile(tail=0.5" in page.source
    assert f"equipoise {eq.__version__}" in page.source


def test_only_the_pages_own_scripts_may_run(run, tmp_path):
    whole = run.report(tmp_path / "r.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', whole).group(1)
    assert "default-src 'none'" in policy
    assert len(re.findall("sha256-", policy)) == 2
    assert "script-src 'unsafe" not in policy
    assert "\r" not in plotly_js()
    assert "</script" not in plotly_js()
    text = embedded({EVIL: [EVIL, 1.5, None]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {EVIL: [EVIL, 1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("nan")])
    code = "import sys, equipoise.report.page; sys.exit('matplotlib' in sys.modules or 'plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_escaped_and_shown_as_they_are(run, tmp_path):
    data = eq.FederatedData(clients(6), test=replace(clients(3, prefix="t"), ids=(EVIL, "<b>", "c")))
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
        assert not any("alert" in trace.get("hovertemplate", "") for trace in figure["data"])
    odd = Page(write_report([with_rounds(run, lambda t: {"rejected": (EVIL,)})], tmp_path / "r.html"))
    offline(odd)
    assert odd.rows["table-rejected"][1] == ["this model", "4", "0", "1", EVIL, "1, 2, 3, 4"]
    hostile = replace(run, epsilon=type("Odd", (), {"__str__": lambda self: EVIL, "epsilon": 1.0, "epsilon_server": 1.0})())
    offline(page := Page(write_report([hostile], tmp_path / "h.html", title="Shops <2026>")))
    assert EVIL in page.by_id["epsilon"]
    assert "<h1>Shops &lt;2026&gt;</h1>" in page.source


def test_the_title_and_the_day_are_at_the_top_and_the_same_results_give_the_same_bytes(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert Page(run.report(tmp_path / "a.html")).by_id["about"] == f"{run.data} · 1970-01-02"
    assert run.report(tmp_path / "b.html").read_bytes() == (tmp_path / "a.html").read_bytes()
    again = replace(run, clients=ClientTable.from_parquet(Path(run.clients.to_parquet(tmp_path / "clients.parquet"))))
    assert again.report(tmp_path / "c.html").read_bytes() == (tmp_path / "a.html").read_bytes()
    nobody, none = torch.zeros(len(run.clients), dtype=torch.bool), torch.full((len(run.clients),), math.nan).double()
    empty = replace(run, clients=replace(run.clients, malicious=nobody, personal_loss=none, personal_error=none))
    assert empty.report(tmp_path / "d.html").read_bytes() == (tmp_path / "a.html").read_bytes()  # columns that say nothing
    with pytest.raises(InvalidParameter, match="title"):
        write_report([run], tmp_path / "r.html", title=" ")


def test_many_clients_rounds_and_methods_make_no_large_page(run, tmp_path):
    count = 20_000
    error = torch.linspace(0, 1, count, dtype=torch.float64)
    table = replace(
        run.clients, client=tuple(f"client-{k}" for k in range(count)), split=("test",) * count,
        seen=torch.zeros(count, dtype=torch.bool), size=1 + torch.arange(count) % 501, error=error, loss=2 * error,
        trivial_error=None,
    )  # fmt: skip
    history = replace(run.history, rounds=run.history.rounds * 1000)
    page = Page(write_report([replace(run, name=name, clients=table, history=history) for name in "ab"], tmp_path / "r.html"))
    offline(page)
    table_of_all = len(page.by_id["clients-data"].encode())
    assert len(page.source.encode()) - table_of_all < 250_000
    assert table_of_all < 45 * count
    many = [replace(run, name=f"a method with quite a long name, number {k}") for k in range(9)]
    page = Page(write_report(many, tmp_path / "r.html"))
    offline(page)
    names = [trace["name"] for trace in page.data["figures"]["percentiles"]["data"]]
    assert [name[-8:] for name in names] == [f"number {k}" for k in range(9)]


def test_what_does_not_belong_together_or_cannot_be_written_is_refused(run, tmp_path):
    stranger = replace(run, seed=1, algorithm=METHODS["Δ-FL 0.5"])
    only_train = replace(run, name="other", clients=run.clients.where("train"))
    for results in ([], [run, run], [run, stranger], [run, only_train], [run, replace(run, name="b", data="other")]):
        with pytest.raises(InvalidParameter) as caught:
            write_report(results, tmp_path / "r.html")
        assert caught.value.parameter == "results"
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "r.html", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(NotWritten, match=re.escape(str(path))) as refused:
            run.report(path)
        assert isinstance(refused.value, EquipoiseError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    (tmp_path / "file").write_text("old")
    assert run.report(tmp_path / "file").read_text().startswith("<!DOCTYPE html>")  # replaced, with nothing beside it
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


# --------------------------------------------------------------------------------------------------------------- the numbers


def test_one_run(run, tmp_path):
    page = Page(run.report(str(tmp_path / "new" / "folder" / "run.html")))
    offline(page)
    assert page.figures == FIGURES - OF_SEVERAL - ALL_TRAINED
    errors = run.clients.where("test").error
    median, tail, worst = numbers(page.headline)[:3]
    assert median == pytest.approx(100 * metrics.percentile(errors, 50), abs=0.051)
    assert [tail, worst] == [numbers(page.cell("this model", name))[0] for name in COLUMNS[1:3]]
    rows = page.rows["table-worst"][1:]
    worst = run.clients.where("test").worst(10)
    assert [row[0] for row in rows] == [row["client"] for row in worst]
    assert [numbers(row[2])[0] for row in rows] == [pytest.approx(100 * r["error"], abs=0.051) for r in worst]


def test_the_table_is_the_numbers_of_the_clients(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "compare.html"))
    for method, runs in comparison.results.items():
        seeds = np.array([four(run.clients.where("test").error) for run in runs])
        for place, column in enumerate(COLUMNS):
            shown, deviation = numbers(page.cell(method, column))
            assert shown == pytest.approx(100 * seeds[:, place].mean(), abs=0.051)
            assert deviation == pytest.approx(100 * seeds[:, place].std(ddof=1), abs=0.051)
    written = numbers(page.headline.replace("Δ-FL 0.5", ""))
    tails = [numbers(page.cell(method, COLUMNS[1]))[0] for method in comparison.results]
    assert written[:2] == tails


def test_the_headline_follows_known_errors(comparison, tmp_path):
    first, second = (runs[0] for runs in comparison.results.values())
    results = [with_errors(first, [0.1] * 17 + [0.5] * 3), with_errors(second, [0.2] * 18 + [0.4] * 2)]
    page = Page(write_report(results, tmp_path / "r.html"))
    assert numbers(page.headline.replace("0.5", "")) == [50.0, 20.0, 16.0, 22.0]
    assert "undecided (lower in 1 of 1 seeds" in page.headline  # one seed does not rule out chance
    assert page.cell("FedAvg", "90th percentile") == "50.0"
    assert page.cell("Δ-FL 0.5", "mean") == "22.0"


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


def test_all_clients_have_their_mean_and_change(comparison, tmp_path):
    page = Page(comparison.report(tmp_path / "r.html"))
    columns = json.loads(page.by_id["clients-data"])["columns"]
    assert list(columns) == [
        "client",
        "split",
        "examples",
        "error, FedAvg",
        "error, Δ-FL 0.5",
        "change, Δ-FL 0.5",
        "trivial error",
    ]
    tables = [[run.clients for run in runs] for runs in comparison.results.values()]
    k = tables[0][0].client.index("t3")
    before, after = (sum(float(table.error[k]) for table in each) / 2 for each in tables)
    at = columns["client"].index("t3")
    assert columns["error, FedAvg"][at] == pytest.approx(before, rel=1e-5)
    assert columns["change, Δ-FL 0.5"][at] == pytest.approx(after - before, abs=1e-6)
    assert columns["trivial error"][at] == pytest.approx(float(tables[0][0].trivial_error[k]), rel=1e-5)


def test_the_trivial_answer_and_who_is_worse_off(comparison, tmp_path):
    data = federated()
    answer = data.train.y.bincount().argmax()
    wanted = [float((data.test.client(at=k)[1] != answer).double().mean()) for k in range(len(data.test))]
    rows = comparison.results["FedAvg"][0].clients.where("test")
    assert rows.trivial_error.tolist() == pytest.approx(wanted)
    page = Page(comparison.report(tmp_path / "r.html"))
    assert numbers(page.cell("most frequent class", "mean"))[0] == pytest.approx(100 * sum(wanted) / len(wanted), abs=0.051)
    worse = [int((run.clients.where("test").error > rows.trivial_error).sum()) for run in comparison.results["FedAvg"]]
    assert f"FedAvg {sum(worse) / 2:.4g}," in page.by_code["trivial-row"]
    run = comparison.results["FedAvg"][0]
    for factor, said in ((2.0, {"mean", "90th percentile"}), (0.5, set())):
        table = replace(rows, error=factor * rows.trivial_error)
        found = [each for each in ("mean", "90th percentile") if f"at the {each}" in str(replace(run, clients=table).summary())]
        assert set(found) == said
        headline = Page(replace(run, clients=table).report(tmp_path / "t.html")).headline
        assert ("Not better than the trivial answer" in headline) == bool(said)


def test_errors_that_are_numbers_or_losses_are_never_percent(tmp_path):
    page = Page(regressed().report(tmp_path / "r.html"))
    offline(page)
    assert page.figures == FIGURES - ALL_TRAINED
    assert "in %" not in page.source
    assert "%" not in page.headline.replace("95 %", "")
    torch.manual_seed(0)
    data = eq.attacks.apply(inside(regression=True), eq.attacks.RandomUpdates(share=0.2))
    solver = eq.solvers.SGD(lr=0.01)
    run = eq.train(nn.Linear(4, 1), data, eq.Algorithm(solver=solver, personal=eq.personal.Ditto(0.1)), rounds=3,
                   clients_per_round=6, loss=squared)  # fmt: skip
    assert Page(run.report(tmp_path / "one.html")).rows["table-worst"][0] == [
        "client", "examples", "loss (squared)", "shared model", "mean of the targets",
    ]  # fmt: skip


def test_without_a_test_split_training_clients_are_weighted(tmp_path):
    result = eq.train(softmax(), eq.FederatedData(clients(9)), rounds=2, clients_per_round=4)
    page = Page(result.report(tmp_path / "r.html"))
    offline(page)
    assert "9 training clients, weighted by examples" in page.headline
    mean = metrics.mean(result.clients.error, result.clients.size.double())
    assert numbers(page.cell("this model", "mean"))[0] == pytest.approx(100 * mean, abs=0.051)
    assert "examples" in page.data["figures"]["percentiles"]["layout"]["xaxis"]["unifiedhovertitle"]["text"]


def test_numbers_that_are_not_finite_are_dashes(run, comparison, tmp_path):
    def broken(result, value):
        error, loss = result.clients.error.clone(), result.clients.loss.clone()
        error[-3:], loss[-3:] = value, value
        return replace(result, clients=replace(result.clients, error=error, loss=loss))

    for value in (float("nan"), float("inf")):
        page = Page(write_report([broken(run, value)], tmp_path / "r.html"))
        offline(page)
        assert page.cell("this model", "mean") == "–"
        assert ": 3." in page.by_code["nonfinite"]
        offline(Page(write_report([broken(r, value) for r in comparison.all_results], tmp_path / "s.html")))
    table = run.clients.where("test")
    values = torch.logspace(-3, 6, len(table), dtype=torch.float64)  # a loss that spans decades
    offline(Page(write_report([replace(run, clients=replace(table, error=values, loss=values))], tmp_path / "r.html")))
    offline(Page(eq.train(softmax(), federated(train=1, test=1), rounds=1, clients_per_round=1).report(tmp_path / "one.html")))


def test_intervals_of_errors_do_not_go_below_0(run, tmp_path):
    table = replace(run.clients.where("test").take(torch.arange(8)), trivial_error=None)
    runs = [
        replace(run, seed=seed, error_is_loss=False, error_name="absolute error",
                clients=replace(table, error=torch.tensor([error, *[1.0] * 7], dtype=torch.float64)))
        for seed, error in enumerate((2.0, 20.0, 45.0))
    ]  # fmt: skip
    page = Page(write_report(runs, tmp_path / "r.html"))
    assert page.rows["table-worst"][1][2].split() == ["22.3", "0.0", "to", "76.0"]
    below = [replace(each, clients=replace(each.clients, error=each.clients.error - 1.5)) for each in runs]
    assert "−" in Page(write_report(below, tmp_path / "r.html")).rows["table-worst"][1][2]


# ----------------------------------------------------------------------------------------------- own models, attacks, privacy


@pytest.fixture(scope="module")
def ditto(attacked):
    return attacked.results["Ditto"][0]


def test_own_and_shared_models_of_benign_clients(ditto, tmp_path):
    page = Page(ditto.report(tmp_path / "r.html"))
    offline(page)
    column = parquet(ditto, tmp_path)
    benign = ~column["malicious"]
    assert 0 < benign.sum() < len(benign)
    own, shared = column["personal_error"][benign], column["error"][benign]
    assert not np.allclose(own, shared)
    row = row_below(page, "Ditto")
    assert row[0] == "shared model"
    for place, (title, mine, theirs) in enumerate(zip(COLUMNS, four(own), four(shared), strict=True)):
        assert numbers(page.cell("Ditto", title))[0] == pytest.approx(100 * mine, abs=0.051)
        assert numbers(row[1 + place])[0] == pytest.approx(100 * theirs, abs=0.051)
    median, _, worst, shared_median, shared_worst = numbers(page.headline)
    assert (worst, shared_worst) == (numbers(page.cell("Ditto", "worst 10 %"))[0], numbers(row[3])[0])
    for found, values in ((median, own), (shared_median, shared)):
        assert found == pytest.approx(100 * np.sort(values)[math.ceil(len(values) / 2) - 1], abs=0.051)
    assert f"{benign.sum()} benign test clients" in page.headline
    assert f": {(own > shared).sum()} of {benign.sum()} (Ditto)" in page.by_code["own-worse"]
    listed = json.loads(page.by_id["clients-data"])["columns"]
    assert listed["error, shared model"][: benign.sum()] == pytest.approx(shared.tolist(), abs=1e-6)
    header, *rows = page.rows["table-worst"]
    assert header == ["client", "examples", "error", "shared model", "most frequent class", "loss"]
    order = [k for k in range(len(benign)) if benign[k]]
    worst = sorted(order, key=lambda k: (column["personal_error"][k], column["personal_loss"][k]), reverse=True)[:10]
    assert [row[0] for row in rows] == [column["client"][k] for k in worst]
    for row, k in zip(rows, worst, strict=True):
        assert [float(cell.split()[0]) for cell in row[2:4]] == [
            pytest.approx(100 * column[key][k], abs=0.051) for key in ("personal_error", "error")
        ]


def test_a_comparison_has_own_and_shared_beside_each_other(attacked, tmp_path):
    page = Page(attacked.report(tmp_path / "r.html"))
    offline(page)
    assert page.figures == FIGURES - ALL_TRAINED | {"own"}
    assert [row[0] for row in page.rows["table-numbers"]] == [
        "method",
        "FedAvg",
        "Ditto",
        "shared model",
        "most frequent class",
    ]
    # The shared model of Ditto is FedAvg's, so personalisation is all that differs.
    assert page.rows["table-numbers"][1][1:5] == page.rows["table-numbers"][3][1:5]
    seeds = [parquet(run, tmp_path) for run in attacked.results["Ditto"]]
    for name in ("left-behind", "still-behind"):
        for row in page.rows[name][1:]:
            k = list(seeds[0]["client"]).index(row[0])
            assert not seeds[0]["malicious"][k]
            own, shared = (100 * np.mean([mine[key][k] for mine in seeds]) for key in ("personal_error", "error"))
            assert numbers(row[3])[0] == pytest.approx(own, abs=0.051)
            assert numbers(row[2])[0] == pytest.approx(shared, abs=0.051)


def test_malicious_clients_count_nowhere_but_where_it_says_so(attacked, tmp_path):
    """Their errors are changed; all else on the page stays as it is, byte for byte."""

    def worse(run):
        bad = run.clients.malicious & torch.tensor([split == "test" for split in run.clients.split])
        changed = {
            name: torch.where(bad, torch.ones_like(values), values)
            for name in ("error", "personal_error") if (values := getattr(run.clients, name)) is not None
        }  # fmt: skip
        return replace(run, clients=replace(run.clients, **changed))

    one = Page(attacked.report(tmp_path / "a.html"))
    two = Page(write_report([worse(run) for run in attacked.all_results], tmp_path / "b.html"))
    assert (one.headline, one.rows) == (two.headline, two.rows)
    for name, figure in one.data["figures"].items():
        assert (figure == two.data["figures"][name]) == (name != "own"), name
    assert "FedAvg 100.0 %, Ditto 100.0 %" in two.by_code["malicious-error"]
    for method, runs in attacked.results.items():
        columns = [parquet(run, tmp_path) for run in runs]
        means = [c["personal_error" if method == "Ditto" else "error"][c["malicious"]].mean() for c in columns]
        assert figures_of(runs)["malicious_mean"].mean == pytest.approx(np.mean(means))
    data = eq.attacks.apply(eq.FederatedData(clients(9)), eq.attacks.LabelPoisoning(share=0.3))
    run = eq.train(softmax(), data, DITTO, rounds=3, clients_per_round=5)
    rows, bad = run.clients, run.clients.malicious  # training clients count by their examples
    assert figures_of([run])["malicious_mean"].mean == pytest.approx(
        float((rows.personal_error * rows.size)[bad].sum() / rows.size[bad].sum())
    )
    assert "trained-examples" in [each.code for each in captions_of(run)]


def captions_of(run):
    from equipoise.report.sections import captions
    from equipoise.report.study import Study

    return captions(Study.of([run]), "own")


def test_clients_with_and_without_own_models(ditto, tmp_path):
    own, shared = [0.1, 0.2, 0.3, 0.4, math.nan], [0.2, 0.2, 0.2, 0.5, 0.3]
    page = Page(write_report([known(ditto, own, shared)], tmp_path / "r.html"))
    assert "Ditto 2 of 4 (1 worse)" in page.by_id["figure-own"]
    assert {row[0]: row[2] for row in page.rows["table-worst"][1:]}["c4"] == "30.0"
    all_bad = Page(write_report([known(ditto, [0.1, 0.3], [0.2, 0.2], {"c0", "c1"})], tmp_path / "r.html"))
    assert all_bad.cell("Ditto", "mean") == "20.0"  # figures are of them
    beyond = Page(write_report([known(ditto, [0.5, 2.0], [0.5, 0.5])], tmp_path / "r.html"))
    assert beyond.cell("Ditto", "mean") == "1.25"  # errors beyond 1 are no percentages


def test_unseen_clients_have_no_own_models_and_the_page_says_so(tmp_path):
    data = eq.attacks.apply(federated(), eq.attacks.LabelPoisoning(share=0.25))
    with pytest.warns(eq.errors.EquipoiseNotice, match="no models of their own"):
        run = eq.train(softmax(), data, DITTO, rounds=3, clients_per_round=6, name="Ditto")
    page = Page(run.report(tmp_path / "r.html"))
    offline(page)
    assert "own" not in page.figures
    assert [row[0] for row in page.rows["table-numbers"]] == ["method", "Ditto", "most frequent class"]
    assert {"no-own-models", "attack"} <= page.by_code.keys()
    assert "malicious-error" not in page.by_code
    assert page.by_code["attack"].startswith("Malicious training clients: 3 of 12.")


@pytest.mark.parametrize("split", [eq.personal.FedRep("1", 1), eq.personal.FedPer("1"), eq.personal.FedBABU("1")])
def test_kept_layers_of_a_shared_model_are_untrained(split):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with pytest.warns(eq.errors.EquipoiseNotice, match="untrained"):
        run = eq.train(model, federated(), eq.Algorithm(personal=split), rounds=3, clients_per_round=6, name="kept")
    assert torch.equal(run.model[1].weight, model[1].weight)
    assert not torch.equal(run.model[0].weight, model[0].weight)
    assert "untrained-layers" in [each.code for each in run.summary().notices]
    plain = eq.train(model, federated(), rounds=3, clients_per_round=6)
    assert "untrained-layers" not in [each.code for each in plain.summary().notices]


def test_updates_left_out_are_counted_named_and_dated(attacked, tmp_path):
    runs = [rejecting(run) if run.name == "Ditto" else run for run in attacked.all_results]
    page = Page(write_report(runs, tmp_path / "r.html"))
    offline(page)
    header, plain, ditto = page.rows["table-rejected"]
    assert header == ["method", "updates left out", "of malicious clients", "clients", "who", "rounds"]
    assert plain == ["FedAvg", "0", "0", "0", "–", "–"]
    bad = sum({"c1": 4, "c2": 1}.get(name, 0) for run in attacked.results["Ditto"] for name in malicious_clients(run))
    assert ditto == ["Ditto", "10", str(bad), "2", "c1, c2", "1, 2, 3, 5"]  # two seeds, the one named more often first
    assert "Ditto 10" in page.by_code["rejected"]
    assert "table-rejected" not in Page(attacked.report(tmp_path / "none.html")).rows


@pytest.mark.parametrize("protected", [True, False])
def test_the_page_of_a_protected_run_names_no_client(attacked, tmp_path, protected):
    runs = []
    for run in attacked.all_results:
        names = tuple(f"zebra {name}" for name in run.clients.client)
        algorithm = replace(run.algorithm, privacy=eq.privacy.SecureAggregation()) if protected else run.algorithm
        runs.append(replace(run, clients=replace(run.clients, client=names), algorithm=algorithm))
    for some in (runs, [run for run in runs if run.name == "Ditto"]):
        page = Page(write_report(some, tmp_path / "r.html"))
        assert ("zebra" in page.source) != protected
        assert ("not-named" in page.by_code) == protected


def test_privacy_spent_is_said_and_drawn(run, attacked, tmp_path):
    page = Page(write_report([private(run)], tmp_path / "r.html"))
    offline(page)
    assert page.by_id["epsilon"].strip() == f"this model{Spent(2.0)}"
    assert "not-covered" in page.by_code
    (line,) = page.data["figures"]["privacy"]["data"]
    assert (line["x"], line["y"]) == ([1, 2, 3, 4], pytest.approx([0.5, 1.0, 1.5, 2.0]))
    first, second = attacked.results["Ditto"]
    several = Page(write_report([*attacked.results["FedAvg"], private(first, 2.0), private(second, 3.0)], tmp_path / "s.html"))
    assert f"Ditto{Spent(3.0)} The most of 2 seeds." in several.by_id["epsilon"]
    assert "FedAvgNo privacy is promised." in several.by_id["epsilon"]
    some = Page(write_report([*attacked.results["FedAvg"], private(first), second], tmp_path / "s.html"))
    assert "DittoNo privacy is promised." in some.by_id["epsilon"]  # one seed is without
    for value in (None, math.nan):  # a log holds null, which may come back as NaN
        odd = Page(write_report([with_rounds(run, lambda t, value=value: {"epsilon": value})], tmp_path / "r.html"))
        assert "privacy" not in odd.figures
        assert "epsilon" not in odd.by_id


@pytest.mark.parametrize("protection", ["none", "noise", "sums"])
def test_a_federation_shows_bytes_by_node_unless_a_run_protects_clients(run, protection, tmp_path):
    rounds = [
        replace(
            report, bytes_sent=3000, bytes_received=1500, bytes_by_client={"ward 7": (2000, 1000), "ward 9": (1000, 500)},
            missing={"ward 9": "no <reply>"} if report.round == 1 else {},
        )
        for report in run.history.rounds
    ]  # fmt: skip
    spent = type("Spent", (), {"__str__": lambda self: "ε = 1", "epsilon": 1.0, "epsilon_server": 1.0})()
    sums = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
    how = {"none": {}, "noise": {"epsilon": spent}, "sums": {"algorithm": sums}}[protection]
    table = replace(run.clients, not_evaluated={run.judged_on: {"ward 9": "did not answer"}})
    made = replace(run, history=replace(run.history, rounds=rounds), clients=table, **how)
    page = Page(made.report(tmp_path / "r.html"))
    whole = [f"{run.name}, seed 0", "all", "12.0 kB", "6.0 kB", "", ""]
    label = f"{run.name}, seed 0"
    nodes = [[label, "ward 7", "8.0 kB", "4.0 kB", "0", ""], [label, "ward 9", "4.0 kB", "2.0 kB", "1", "no <reply>"]]
    assert page.rows["traffic"][1:] == [whole, *(nodes if protection == "none" else [])]
    assert "not-evaluated" in page.by_code
    if protection != "none":
        assert "operator" in page.by_code
        assert not any(word in page.source for word in ("ward 7", "ward 9", "did not answer", "&lt;reply"))
    assert "traffic" not in Page(run.report(tmp_path / "plain.html")).rows


def test_subgroups_have_their_gap(run, tmp_path):
    rows = run.clients.where("test").take(torch.arange(6))
    land = {"land": tuple("AAABBB")}
    rows = replace(rows, error=torch.tensor([0.1] * 3 + [0.2] * 3, dtype=torch.float64), attributes=land, trivial_error=None)
    page = Page(replace(run, clients=rows).report(tmp_path / "r.html"))
    assert [row[5].split()[0] for row in page.rows["table-subgroups-0"]] == ["gap", "10.0", "−10.0"]
