"""What is said about single clients: intervals by their own examples, rows and clients, titles, and signs."""

from dataclasses import replace

import pytest
import torch
from report_cases import Page
from test_differences import FEDAVG, TAIL, made_of, trained  # noqa: F401 (a fixture)

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.errors import InvalidParameter
from equipoise.metrics import counts_wrong, share_interval
from equipoise.report import write_report
from equipoise.run_summary import metric_words


def table(errors, sizes):
    count = len(errors)
    return ClientTable(
        tuple(f"c{k}" for k in range(count)), ("test",) * count, torch.zeros(count, dtype=torch.bool), torch.tensor(sizes),
        loss=torch.ones(count), error=torch.tensor(errors, dtype=torch.float64),
    )  # fmt: skip


def test_worst_clients_have_the_interval_of_clopper_and_pearson():
    found = table([1.0, 2 / 3, 0.3], [2, 3, 100]).worst(2)
    # 2 of 2 wrong: the lower end p solves p² = 0.025, the upper one is 1.
    assert found[0]["error_low"] == pytest.approx(0.025**0.5)
    assert found[0]["error_high"] == 1.0
    # 2 of 3 wrong: P(≥ 2) = 3p² − 2p³ = 0.025 at the lower end; P(≤ 2) = 1 − p³ = 0.025 at the upper one.
    low, high = found[1]["error_low"], found[1]["error_high"]
    assert 3 * low**2 - 2 * low**3 == pytest.approx(0.025)
    assert high == pytest.approx(0.975 ** (1 / 3))
    text = str(found)
    assert "0.158 to 1.000" in text
    assert text.split()[:4] == ["client", "split", "size", "error"]  # the names of the columns: found[0]["size"]
    assert "size: the client's examples in this split." in text
    assert "covers the choice of the client's examples, and not the seed" in text


def test_clients_with_few_examples_can_be_left_out():
    clients = table([1.0, 2 / 3, 0.3], [2, 3, 100])
    assert [row["client"] for row in clients.worst(5, at_least=30)] == ["c2"]
    assert str(clients.worst(5, at_least=1000)) == "No client has 1000 examples or more."
    with pytest.raises(InvalidParameter, match="at_least"):
        clients.worst(5, at_least=-1)


def test_errors_that_are_no_shares_have_no_interval():
    assert "error_low" not in table([7.3, 0.2], [10, 10]).worst()[0]
    assert "interval" not in str(table([0.333, 0.21], [10, 10]).worst())
    assert not counts_wrong(torch.tensor([float("nan")]), torch.tensor([3]))
    assert share_interval(1.5, 3).low < 0.5 < share_interval(1.5, 3).high  # a mean over seeds


def test_the_page_shows_the_interval_by_examples_and_not_by_seeds(trained, tmp_path):  # noqa: F811
    # The same client is wrong on 10 of its 20 examples in all three seeds: by seeds, the interval was 50.0 to 50.0.
    made = made_of(trained, {"FedAvg": [[0.1] * 5 + [0.5]] * 3, "tail": [[0.1] * 5 + [0.5]] * 3})
    page = Page(made.report(tmp_path / "r.html"))
    first = page.rows["left-behind"][1]
    between = share_interval(10, 20)
    assert first[2] == f"50.0 {100 * between.low:.1f} to {100 * between.high:.1f}"
    caption = page.by_id["left-behind-caption"]
    assert "covers the choice of the client's examples, by their number, and not the seeds" in caption


def test_clients_of_seeds_that_split_again_are_not_counted_twice(trained, tmp_path):  # noqa: F811
    made = made_of(trained, {"FedAvg": FEDAVG, "tail": TAIL}, version=str)
    page = Page(made.report(tmp_path / "r.html"))
    assert "How many of the 6 clients of each of 3 seeds (18 in all) gain and pay" in page.by_id["table-gains-caption"]
    assert "(each seed has data or a split of its own)" in page.by_id["table-numbers-caption"]
    assert page.by_id["clients-note"] == "6 clients in 18 rows: a row for each client and seed."


def test_title_data_and_day_are_at_the_top(trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    run = trained.all_results[0]
    page = Page(run.report(tmp_path / "r.html", title="Shops <2026>"))
    assert "<h1>Shops &lt;2026&gt;</h1>" in page.source
    assert page.by_id["about"] == f"{run.data} · 1970-01-02"
    assert "<h1>How every client fares</h1>" in Page(run.report(tmp_path / "r.html")).source
    with pytest.raises(InvalidParameter, match="title must be a text"):
        write_report([run], tmp_path / "r.html", title=" ")


def test_subgroups_have_a_card_and_a_minus(trained, tmp_path):  # noqa: F811
    run = trained.all_results[0]
    rows = run.clients.where("test")
    rows = replace(
        rows, error=torch.tensor([0.1] * 3 + [0.2] * 3, dtype=torch.float64), attributes={"land": tuple("AAABBB")},
        trivial_error=None,
    )  # fmt: skip
    page = Page(replace(run, clients=rows).report(tmp_path / "r.html"))
    assert '<div class="card"><p class="caption" id="table-subgroups-0-caption">' in page.source
    assert [row[7] for row in page.rows["table-subgroups-0"]] == ["gap", "10.0", "−10.0"]


def test_no_sign_before_zero_in_a_summary(trained):  # noqa: F811
    run = trained.all_results[0]
    rows = run.clients.where("test")
    rows = replace(rows, loss=torch.full((6,), -1e-9, dtype=torch.float64))
    assert "-0.0000" not in str(replace(run, clients=rows).summary())


def test_a_metric_says_how_to_turn_it_round():
    found = eq.metrics.summarise_metric(torch.tensor([0.5, 0.6]), torch.ones(2))
    assert "metrics.Metric(function, higher_is_better=False)" in metric_words({"entropy": found})[0]
    assert metric_words({"entropy": replace(found, higher_is_better=False)}) == []


def test_the_table_of_a_family_says_by_which_examples_it_judges():
    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=4, examples=20)
    family = eq.train_family(eq.models.Softmax(20, 10), data, tails=[1.0, 0.5], rounds=1, clients_per_round=3)
    words = "over 4 unseen test clients, judged on half of their examples (the other half is for the choice), 1 seed"
    assert words in family.comparison().summary().splitlines()[0]


def test_the_worst_clients_with_own_models_have_one_error_under_one_name():
    shared = table([0.2, 0.4], [10, 10])
    own = replace(
        shared, personal_error=torch.tensor([0.9, float("nan")], dtype=torch.float64), personal_loss=torch.ones(2).double()
    )
    found = own.worst(2)
    # The first client is wrong on 9 of 10 by its own model; the second one has none, and is served the shared one.
    assert [row["served_error"] for row in found] == pytest.approx([0.9, 0.4])
    assert [row["error"] for row in found] == pytest.approx([0.2, 0.4])
    for row, wrong in zip(found, (9, 4), strict=True):
        between = share_interval(wrong, 10)
        assert (row["served_error_low"], row["served_error_high"]) == (between.low, between.high)
        assert "error_low" not in row
    assert str(found).splitlines()[0].split() == ["client", "split", "size", "own", "error", "95", "%", "interval"]
    assert "0.900" in str(found).splitlines()[1]
    assert "own error: of the model that the client is served, its own if it has one." in str(found)
    assert "own error" not in str(shared.worst(2))
