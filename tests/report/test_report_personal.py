"""Personal models and attacks: the page and the tables say of whom, and of which model, they speak."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from report_cases import (
    ALL_TRAINED,
    DITTO,
    FIGURES,
    Page,
    clients,
    federated,
    inside,
    numbers,
    offline,
    private,
    softmax,
    squared,
    under_attack,
)  # fmt: skip
from torch import nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.compare import Comparison, figures_of
from equipoise.observers import EvaluationPoint, JsonLines
from equipoise.report import export_figures, write_report
from equipoise.report.data import series
from equipoise.report.data.results_by_method import Study
from equipoise.report.interactive import figures as interactive
from equipoise.report.static import figures as static

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


def known(run, own, shared, malicious=()):
    """The run with ten test clients whose errors at their own and at the shared model are given."""
    n = len(shared)
    names = tuple(f"c{k}" for k in range(n))
    own_error = None if own is None else torch.tensor(own, dtype=torch.float64)
    table = ClientTable(
        names, ("test",) * n, torch.ones(n, dtype=torch.bool), torch.arange(10, 10 + n),
        loss=torch.tensor(shared, dtype=torch.float64), error=torch.tensor(shared, dtype=torch.float64),
        malicious=torch.tensor([name in malicious for name in names]), personal_loss=own_error, personal_error=own_error,
    )  # fmt: skip
    return replace(run, clients=table)


@pytest.fixture(scope="module")
def ditto(attacked):
    return attacked.results["Ditto"][0]


def below(page, method):
    """The row under a method's."""
    rows = page.rows["table-numbers"]
    return rows[next(k for k, row in enumerate(rows) if row[0] == method) + 1]


# ---------------------------------------------------------------------------------------------------------------- the numbers


def test_headline_table_and_parquet_agree(ditto, tmp_path):
    page = Page(ditto.report(tmp_path / "r.html"))
    offline(page)
    column = parquet(ditto, tmp_path)
    benign = ~column["malicious"]
    assert 0 < benign.sum() < len(benign)
    own, shared = column["personal_error"][benign], column["error"][benign]
    assert not np.allclose(own, shared)
    row = below(page, "Ditto")
    assert row[0] == "shared model"
    for place, (title, mine, theirs) in enumerate(zip(COLUMNS, four(own), four(shared), strict=True)):
        assert numbers(page.cell("Ditto", title))[0] == pytest.approx(100 * mine, abs=0.051)
        assert numbers(row[1 + place])[0] == pytest.approx(100 * theirs, abs=0.051)
    median, worst, shared_median, shared_worst = numbers(page.headline)
    assert worst == numbers(page.cell("Ditto", "worst 10 %"))[0]
    assert shared_worst == numbers(row[3])[0]
    for shown, values in ((median, own), (shared_median, shared)):
        assert shown == pytest.approx(100 * np.sort(values)[math.ceil(len(values) / 2) - 1], abs=0.051)
    assert f"Half of the {benign.sum()} benign test clients" in page.headline
    worse = int((own > shared).sum())
    assert f"Own models have a larger error than the shared model for {worse} of {benign.sum()} clients." in page.by_id["note"]
    listed = json.loads(page.by_id["clients-data"])["columns"]
    assert listed["error, shared model"][: benign.sum()] == pytest.approx(shared.tolist(), abs=1e-6)
    assert listed["error"][: benign.sum()] == pytest.approx(own.tolist(), abs=1e-6)


def test_a_comparison_over_seeds_has_own_and_shared_beside_each_other(attacked, tmp_path):
    page = Page(attacked.report(tmp_path / "r.html"))
    offline(page)
    assert page.figures == FIGURES - ALL_TRAINED | {"own"}
    assert [row[0] for row in page.rows["table-numbers"]] == [
        "method", "FedAvg", "Ditto", "shared model", "most frequent class",
    ]  # fmt: skip
    for method, cells, key in (
        ("FedAvg", page.rows["table-numbers"][1], "error"),
        ("Ditto", page.rows["table-numbers"][2], "personal_error"),
        ("Ditto", page.rows["table-numbers"][3], "error"),
    ):
        columns = [parquet(run, tmp_path) for run in attacked.results[method]]
        seeds = np.array([four(c[key][~c["malicious"]]) for c in columns])  # (2, 4)
        for place in range(4):
            shown, deviation = numbers(cells[1 + place])
            assert shown == pytest.approx(100 * seeds[:, place].mean(), abs=0.051)
            assert deviation == pytest.approx(100 * seeds[:, place].std(ddof=1), abs=0.051)
    # The shared model of Ditto is FedAvg's, so personalisation is all that differs.
    assert page.rows["table-numbers"][1][1:5] == page.rows["table-numbers"][3][1:5]


def test_headlines_follow_known_errors(attacked, tmp_path):
    plain, personal = (attacked.results[name][0] for name in ("FedAvg", "Ditto"))
    shared, own = [0.4] * 8 + [0.9, 0.9], [0.1] * 8 + [0.3, 1.0]
    page = Page(write_report([known(plain, None, shared, {"c9"}), known(personal, own, shared, {"c9"})], tmp_path / "r.html"))
    # Nine benign clients: 0.4 eight times and 0.9 once; the smallest value with 90 % at or below it is the ninth.
    assert page.headline == (
        "Ditto lowers the 90th percentile of the error over 9 benign test clients from 90.0 % to 30.0 %, against FedAvg "
        "(one seed, which does not rule out chance). The mean error falls from 45.6 % to 12.2 %. Its clients are served "
        "their own models; with its shared model the percentile is 90.0 %."
    )
    assert page.by_id["note"] == (
        "1 of 10 training clients is malicious, and figures are of the benign ones. "
        "Under Ditto, each client is served a model of its own. "
        "All 9 benign test clients have fewer than 30 examples: much of their error may be chance. "
        "There are only 9 benign test clients: of fewer than 10, the 90th percentile is the one that fares worst, as is the "
        "worst 10 %."
    )
    assert page.cell("Ditto", "mean") == "12.2"
    assert below(page, "Ditto")[1] == "45.6"
    alone = Page(write_report([known(personal, own, shared)], tmp_path / "one.html"))
    assert alone.headline == (
        "Half of the 10 test clients see an error of 10.0 % or less; the one that fares worst sees 100.0 %. "
        "With the shared model in place of their own these are 40.0 % and 90.0 %."
    )
    assert "malicious" not in alone.source
    # Of the benign clients' shared errors 0.1, 0.2, 0.3 the median is the second, as if the malicious one's 0.0 were not there.
    some = Page(write_report([known(personal, [0.1] * 4, [0.0, 0.3, 0.2, 0.1], {"c0"})], tmp_path / "some.html"))
    assert some.headline.endswith("these are 20.0 % and 30.0 %.")
    broken = Page(write_report([known(personal, own, [math.nan] * 10)], tmp_path / "nan.html"))
    offline(broken)
    assert broken.headline.endswith("With the shared model in place of their own some have an error that is not finite.")
    assert below(broken, "Ditto")[1:5] == ["–"] * 4


def test_one_client_with_its_own_model(ditto, tmp_path):
    page = Page(write_report([known(ditto, [0.25], [0.5])], tmp_path / "r.html"))
    assert page.headline == "The one test client sees an error of 25.0 %. With the shared model it is 50.0 %."


def test_malicious_clients_count_nowhere_but_where_it_says_so(attacked, tmp_path):
    """Their errors are changed; all else on the page stays as it is, byte for byte."""

    def worse(run):
        bad = run.clients.malicious & torch.tensor([split == "test" for split in run.clients.split])
        changed = {
            name: torch.where(bad, torch.ones_like(values), values)
            for name in ("error", "personal_error") if (values := getattr(run.clients, name)) is not None
        }  # fmt: skip
        assert bool(bad.any())
        return replace(run, clients=replace(run.clients, **changed))

    one = Page(attacked.report(tmp_path / "a.html"))
    two = Page(write_report([worse(run) for run in attacked.all_results], tmp_path / "b.html"))
    assert one.headline == two.headline
    for name, figure in one.data["figures"].items():
        assert (figure == two.data["figures"][name]) == (name != "own"), name
    for name, rows in one.rows.items():
        assert (rows == two.rows[name]) == (name != "table-malicious"), name
    assert [row[2] for row in two.rows["table-malicious"][1:]] == ["100.0 ± 0.0"] * 2
    for row, method in zip(one.rows["table-malicious"][1:], attacked.results, strict=True):
        assert row[0] == method
        assert row[1] == one.cell(method, "mean")
        columns = [parquet(run, tmp_path) for run in attacked.results[method]]
        means = [c["personal_error" if method == "Ditto" else "error"][c["malicious"]].mean() for c in columns]
        assert numbers(row[2])[0] == pytest.approx(100 * np.mean(means), abs=0.051)


def test_training_clients_are_weighted_also_the_malicious_ones(tmp_path):
    data = eq.attacks.apply(eq.FederatedData(clients(9)), eq.attacks.LabelPoisoning(share=0.3))
    run = eq.train(softmax(), data, DITTO, rounds=3, clients_per_round=5)
    rows, bad = run.clients, run.clients.malicious
    assert bool((rows.personal_error != rows.error).any())
    mean = float((rows.personal_error * rows.size)[bad].sum() / rows.size[bad].sum())
    assert figures_of([run])["malicious_mean"].mean == pytest.approx(mean)
    page = Page(run.report(tmp_path / "r.html"))
    offline(page)
    assert "6 benign training clients, weighted by their examples" in page.headline
    assert numbers(page.rows["table-malicious"][1][2])[0] == pytest.approx(100 * mean, abs=0.051)
    assert "trained on these very examples" in page.by_id["figure-own"]
    assert "may be poisoned" in page.source


def test_the_worst_clients_are_benign_and_have_both_errors(ditto, tmp_path):
    page = Page(ditto.report(tmp_path / "r.html"))
    header, *rows = page.rows["table-worst"]
    assert header == ["client", "examples", "own error (%)", "shared error (%)", "trivial error (%)", "own loss"]
    column = parquet(ditto, tmp_path)
    place = {name: k for k, name in enumerate(column["client"])}
    benign = [k for k in range(len(column["client"])) if not column["malicious"][k]]
    worst = sorted(benign, key=lambda k: (column["personal_error"][k], column["personal_loss"][k]), reverse=True)[:10]
    assert [row[0] for row in rows] == [column["client"][k] for k in worst]
    for row in rows:
        k = place[row[0]]
        assert [float(cell.split()[0]) for cell in row[2:]] == [  # without the interval
            pytest.approx(100 * column["personal_error"][k], abs=0.051), pytest.approx(100 * column["error"][k], abs=0.051),
            pytest.approx(100 * column["trivial_error"][k], abs=0.051), pytest.approx(column["personal_loss"][k], abs=0.0051),
        ]  # fmt: skip


def test_before_and_after_are_of_what_clients_are_served(attacked, tmp_path):
    page = Page(attacked.report(tmp_path / "r.html"))
    seeds = [parquet(run, tmp_path) for run in attacked.results["Ditto"]]
    for name in ("left-behind", "still-behind"):
        for row in page.rows[name][1:]:
            k = list(seeds[0]["client"]).index(row[0])
            assert not seeds[0]["malicious"][k]
            own, shared = (100 * np.mean([mine[key][k] for mine in seeds]) for key in ("personal_error", "error"))
            assert numbers(row[3])[0] == pytest.approx(own, abs=0.051)
            assert numbers(row[2])[0] == pytest.approx(shared, abs=0.051)  # the shared model is FedAvg's
        assert "benign" in page.by_id[f"{name}-caption"]


# ---------------------------------------------------------------------------------------------------------------- the figures


def test_points_are_the_clients_at_both_models(attacked):
    study = Study.of(attacked.all_results)
    figure = interactive.FIGURE_MAKERS["own"](study)
    rows = attacked.results["Ditto"][0].clients.where("test")
    line, benign, malicious, key = figure["data"]
    assert line["x"] == line["y"]
    assert figure["layout"]["xaxis"]["range"] == figure["layout"]["yaxis"]["range"] == pytest.approx(line["x"])
    assert key["name"] == "malicious client"
    assert benign["marker"]["symbol"] != malicious["marker"]["symbol"] == key["marker"]["symbol"]
    for trace, bad in ((benign, False), (malicious, True)):
        pairs = series.error_pairs(study.methods[1], malicious=bad)
        names = [name for ids in pairs.clients for name in ids]
        assert sorted(names) == sorted(n for n, m in zip(rows.client, rows.malicious.tolist(), strict=True) if m == bad)
        for x, y, ids, size, words in zip(
            trace["x"], trace["y"], pairs.clients, trace["marker"]["size"], trace["hovertext"], strict=True
        ):
            for name in ids:
                k = rows.client.index(name)
                assert (x, y) == pytest.approx((100 * float(rows.error[k]), 100 * float(rows.personal_error[k])), rel=1e-6)
            assert ids[0] in words
            assert words.startswith("malicious client" if bad else "client")
            assert size == pytest.approx(min(26, 7 * len(ids) ** 0.5), rel=1e-6)
    assert interactive.FIGURE_MAKERS["own"](Study.of(attacked.results["FedAvg"])) is None


def test_the_caption_counts_who_is_better_off(ditto, tmp_path):
    own, shared = [0.1, 0.2, 0.3, 0.4, math.nan], [0.2, 0.2, 0.2, 0.5, 0.3]
    page = Page(write_report([known(ditto, own, shared)], tmp_path / "r.html"))
    assert "Better with their own model: 2 of 4 clients (1 worse, 1 alike)." in page.by_id["figure-own"]
    assert "a model of its own where it has one" in page.by_id["note"]
    assert "served: its own, where it has one, else the shared one" in page.by_id["figure-histogram"]
    assert page.rows["table-worst"][0][2:4] == ["served error (%)", "shared error (%)"]
    assert {row[0]: row[2] for row in page.rows["table-worst"][1:]}["c4"] == "30.0"
    bad = Page(write_report([known(ditto, own, shared, {"c0"})], tmp_path / "bad.html"))
    assert "1 of 3 benign clients (1 worse, 1 alike)." in bad.by_id["figure-own"]


def test_clients_that_coincide_are_one_larger_point(ditto):
    study = Study.of([known(ditto, [0.1] * 4 + [0.5], [0.2] * 4 + [0.5])])
    _, points = interactive.FIGURE_MAKERS["own"](study)["data"]
    assert points["marker"]["size"] == [14.0, 7.0]
    assert points["hovertext"][0].startswith("clients c0, c1, c2 and c3<br>shared model 20.0 %<br>own model 10.0 %")


@pytest.mark.parametrize("values", [[1e-3, 1.0, 1e6], [2.0, 2.0, 2.0], [-1.0, 0.5, 3.0], [math.nan, math.inf, 1.0]])
def test_losses_of_any_size_are_drawn(ditto, values, tmp_path):
    run = replace(known(ditto, values, values[::-1]), error_is_loss=True)
    offline(Page(write_report([run], tmp_path / "r.html")))
    assert static.render(static.own(Study.of([run])), "svg", dpi=80).startswith(b"<?xml")


def test_own_errors_beyond_1_are_no_percentages(ditto, tmp_path):
    page = Page(write_report([known(ditto, [0.5, 2.0], [0.5, 0.5])], tmp_path / "r.html"))
    assert "%" not in page.headline.replace("10 %", "")
    assert page.cell("Ditto", "mean") == "1.25"


def test_curves_end_at_the_table_and_points_know_both_models(attacked):
    study = Study.of(attacked.all_results)
    figure = interactive.curves(study)
    for index, method in enumerate(study.methods):
        mean, tail = (t for t in figure["data"] if t.get("legendgroup") == str(index) and t.get("hoverinfo") != "skip")
        assert mean["y"][-1] == pytest.approx(100 * method.figures["mean"].mean, rel=1e-6)
        assert tail["y"][-1] == pytest.approx(100 * method.figures["percentile_90"].mean, rel=1e-6)
    point, plain = (attacked.results[name][0].history.points[0].splits["test"] for name in ("Ditto", "FedAvg"))
    assert {key.removeprefix("shared_"): value for key, value in point.items() if key.startswith("shared_")} == plain
    assert point["error"] != plain["error"]


def test_models_made_after_training_are_said_to_be_in_the_last_point_only(tmp_path):
    tuned = eq.Algorithm(personal=eq.personal.Finetuning(epochs=2))
    run = eq.train(softmax(), inside(), tuned, rounds=4, clients_per_round=6, evaluate_every=2, name="tuned")
    first, last = (point.splits["test"] for point in run.history.points)
    assert "shared_error" not in first
    assert "shared_error" in last
    page = Page(run.report(tmp_path / "r.html"))
    assert "Under tuned, own models are made after the last round: earlier points are of the" in page.by_id["figure-curves"]
    kept = eq.train(softmax(), inside(), DITTO, rounds=4, clients_per_round=6, evaluate_every=2)
    assert "after the last round" not in Page(kept.report(tmp_path / "d.html")).by_id["figure-curves"]


def test_training_losses_say_whose_they_are(tmp_path):
    run = eq.train(softmax(), under_attack(), DITTO, rounds=2, clients_per_round=6)
    caption = Page(run.report(tmp_path / "r.html")).by_id["figure-curves"]
    assert "These are losses of the shared model, with malicious clients among those drawn." in caption


def test_every_caption_says_whose_error_it_shows(attacked, tmp_path):
    page = Page(attacked.report(tmp_path / "r.html"))
    of_errors = ["figure-histogram", "figure-percentiles", "figure-tradeoff", "figure-curves", "figure-sizes",
                 "table-numbers-caption", "left-behind-caption", "still-behind-caption"]  # fmt: skip
    for name in of_errors:
        assert "benign" in page.by_id[name], name
        assert "the model that a client is served" in page.by_id[name], name
    assert "own under Ditto, else the shared one" in page.by_id["figure-histogram"]


def test_figures_are_exported(attacked, tmp_path):
    runs = [private(run) for run in attacked.all_results]
    written = {path.name for path in export_figures(runs, tmp_path, "svg")}
    assert written == {f"{name}.svg" for name in FIGURES - ALL_TRAINED | {"own", "privacy"}}
    assert "malicious client" in (tmp_path / "own.svg").read_text()
    assert "ε spent" in (tmp_path / "privacy.svg").read_text()


# ----------------------------------------------------------------------------------------------------------- nothing to say


def test_plain_runs_look_as_they_did(run, comparison, tmp_path):
    """Columns that say nothing change nothing, and words of personal models, attacks and privacy are not there."""
    nobody = torch.zeros(len(run.clients), dtype=torch.bool)
    none = torch.full((len(run.clients),), math.nan, dtype=torch.float64)
    empty = replace(run, clients=replace(run.clients, malicious=nobody, personal_loss=none, personal_error=none))
    before, after = run.report(tmp_path / "a.html"), empty.report(tmp_path / "b.html")
    assert before.read_bytes() == after.read_bytes()
    for path in (before, comparison.report(tmp_path / "c.html")):
        page = Page(path)
        text = page.source[page.source.index("<body>") : page.source.index('<section aria-labelledby="settings">')]
        for word in ("benign", "malicious", "own model", "shared model", "served", "ε", "left out"):
            assert word not in text, word
        assert page.by_id["note"].startswith("All 20 test clients have fewer than 30 examples: ")  # and nothing else
        assert page.by_id["note"].count(".") == 1
        assert page.figures <= FIGURES
    both = Comparison({"a": [replace(run, name="a")], "b": [replace(empty, name="b")]})
    assert both.summary().count("\n") == 5
    assert both.table()["a"].keys() == both.table()["b"].keys()


def test_unseen_clients_have_no_own_models_and_the_page_says_so(tmp_path):
    data = eq.attacks.apply(federated(), eq.attacks.LabelPoisoning(share=0.25))
    with pytest.warns(eq.errors.EquipoiseNotice, match="no models of their own"):
        run = eq.train(softmax(), data, DITTO, rounds=3, clients_per_round=6, name="Ditto")
    page = Page(run.report(tmp_path / "r.html"))
    offline(page)
    assert "own" not in page.figures
    assert [row[0] for row in page.rows["table-numbers"]] == ["method", "Ditto", "most frequent class"]
    assert "20 unseen test clients" in page.headline
    assert "no models of their own" in page.by_id["note"]
    assert "None of them is among the 20 unseen test clients" in page.source
    assert "table-malicious" not in page.rows
    assert numbers(page.cell("Ditto", "mean"))[0] == pytest.approx(
        100 * float(run.clients.where("test").error.mean()), abs=0.051
    )
    text = Comparison({"Ditto": [run]}).summary()
    assert text.splitlines()[-2] == (
        "Under Ditto, these clients have no models of their own, and are served the shared one. "
        "3 of 12 training clients are malicious."
    )


@pytest.mark.parametrize("split", [eq.personal.FedRep("1", 1), eq.personal.FedPer("1"), eq.personal.FedBABU("1")])
def test_kept_layers_of_a_shared_model_are_untrained_and_all_tables_say_so(split, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    algorithm = eq.Algorithm(personal=split)
    with pytest.warns(eq.errors.EquipoiseNotice, match=r"never trained.*without finetuning\. Split examples"):
        run = eq.train(model, federated(), algorithm, rounds=3, clients_per_round=6, name="kept")
    assert torch.equal(run.model[1].weight, model[1].weight)  # what the sentence says
    assert not torch.equal(run.model[0].weight, model[0].weight)
    said = "layers that clients keep were never trained in the shared model: they are as they began, and the figures"
    assert f"The {said}" in Comparison({"kept": [run]}).summary()
    assert f"The {said}" in Page(run.report(tmp_path / "r.html")).by_id["note"]
    plain = eq.train(model, federated(), rounds=3, clients_per_round=6, name="FedAvg")
    both = Comparison({"FedAvg": [plain], "kept": [run]})
    assert f"Under kept, the {said}" in both.summary()
    assert f"Under kept, the {said}" in Page(both.report(tmp_path / "b.html")).by_id["note"]
    seen = eq.train(model, inside(), algorithm, rounds=3, clients_per_round=6)  # here the row of the shared model is meant
    assert f"The {said}" in Comparison({"kept": [seen]}).summary()
    assert "never trained" not in Comparison({"FedAvg": [plain]}).summary()
    assert f"Under kept, the {said}" in both.to_latex()  # judged on clients without own models
    shown = Comparison({"FedAvg": [eq.train(model, inside(), rounds=1, clients_per_round=6)], "kept": [seen]})
    assert "never trained" not in shown.to_latex()  # which has no row of the shared model


def test_where_all_are_malicious_figures_are_of_them(ditto, tmp_path):
    run = known(ditto, [0.1, 0.3], [0.2, 0.2], {"c0", "c1"})
    page = Page(write_report([run], tmp_path / "r.html"))
    offline(page)
    assert "benign" not in page.headline
    assert "2 of 2 training clients are malicious: c0 and c1. No other clients are there to be judged on." in page.source
    assert page.cell("Ditto", "mean") == "20.0"


# ----------------------------------------------------------------------------------------------------------- text and tables


def test_the_summary_has_own_and_shared_rows_and_one_line_that_says_so(attacked):
    one = Comparison({name: runs[:1] for name, runs in attacked.results.items()})
    title, header, plain, ditto, shared, trivial, no_better, said, few = one.summary().splitlines()
    assert "no better than that of the trivial answer" in no_better
    assert few.startswith("All 16 benign test clients have fewer than 30 examples")
    columns = {name: runs[0].clients.where("test") for name, runs in one.results.items()}
    benign = ~columns["Ditto"].malicious
    assert title == f"0-1 error over {int(benign.sum())} benign test clients, 1 seed"
    assert header.split()[0] == "method"
    assert shared.startswith("  shared model")
    assert trivial.startswith("most frequent class")
    expected = {plain: columns["FedAvg"].error, ditto: columns["Ditto"].personal_error, shared: columns["Ditto"].error}
    for line, errors in expected.items():
        assert numbers(line)[:4] == [pytest.approx(v, abs=0.00051) for v in four(errors[benign])]
    theirs = [float(columns[n].served_error[~benign].mean()) for n in ("FedAvg", "Ditto")]
    worse = int((columns["Ditto"].personal_error > columns["Ditto"].error)[benign].sum())
    assert worse  # clients that would fare better with the shared model
    assert said == (
        "Under Ditto, clients are served their own models; the row below it is of the shared model. "
        f"Under Ditto, own models have a larger error than the shared model for {worse} of {int(benign.sum())} clients. "
        f"{int((~benign).sum())} of 20 training clients are malicious, and left out above; "
        f"their mean error: {theirs[0]:.3f} under FedAvg, {theirs[1]:.3f} under Ditto."
    )
    assert len({len(line) for line in (header, plain, ditto)}) == 1  # the columns are aligned
    assert "over 2 seeds" in attacked.summary()


def test_losses_where_there_is_no_error(tmp_path):
    torch.manual_seed(0)
    data = eq.attacks.apply(inside(regression=True), eq.attacks.RandomUpdates(share=0.2))
    solver = eq.solvers.SGD(lr=0.01)
    methods = {"mean": eq.Algorithm(solver=solver), "Ditto": eq.Algorithm(solver=solver, personal=eq.personal.Ditto(0.1))}
    found = eq.compare(methods, nn.Linear(4, 1), data, rounds=3, clients_per_round=6, loss=squared)
    page = Page(found.report(tmp_path / "r.html"))
    offline(page)
    assert "%" not in page.headline
    one = Page(found.results["Ditto"][0].report(tmp_path / "one.html"))
    assert one.rows["table-worst"][0] == ["client", "examples", "own loss", "shared loss"]
    assert found.summary().startswith("Loss (squared) over 16 benign test clients")


def test_logs_hold_both_models(tmp_path):
    path = tmp_path / "log.jsonl"
    run = eq.train(softmax(), inside(), DITTO, rounds=2, clients_per_round=6, observers=[JsonLines(path)])
    events = [json.loads(line) for line in path.read_text().splitlines()]
    logged = next(e for e in events if e["event"] == "evaluation")["splits"]["test"]
    rows = run.clients.where("test")
    assert logged["error"] == pytest.approx(float(rows.personal_error.mean()))
    assert logged["shared_error"] == pytest.approx(float(rows.error.mean()))
    assert logged["shared_loss"] == pytest.approx(float(rows.loss.mean()))
    assert EvaluationPoint.of(run.history.evaluations[-1]).splits["test"] == logged


def test_a_stored_run_gives_the_same_page(ditto, tmp_path):
    path = Path(ditto.clients.to_parquet(tmp_path / "clients.parquet"))
    again = replace(ditto, clients=ClientTable.from_parquet(path))
    assert again.report(tmp_path / "a.html").read_bytes() == ditto.report(tmp_path / "b.html").read_bytes()


def test_the_histogram_says_whose_percentile_the_line_is(tmp_path):
    options = {"rounds": 1, "clients_per_round": 6}
    runs = [eq.train(softmax(), federated(), seed=seed, **options) for seed in range(2)]
    one, two = (Page(write_report(part, tmp_path / "r.html")).by_id["figure-histogram"] for part in (runs[:1], runs))
    assert "dashed line: 90th percentile, to the left of which nine of ten lie." in one
    assert "dashed line: the 90th percentile, mean over seeds. All seeds together." in two
