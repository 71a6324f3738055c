"""Updates that were left out, and privacy that was spent: the page says how many, whose, when, and what ε does not cover."""

import math
from dataclasses import replace

import pytest
from report_cases import (
    EVIL,
    Page,
    Spent,
    inside,
    offline,
    private,
    rejecting,
    softmax,
    with_rounds,
)  # fmt: skip

import equipoise as eq
from equipoise.compare import Comparison
from equipoise.report import write_report
from equipoise.report.data import series
from equipoise.report.data.over_seeds import malicious_clients
from equipoise.report.data.results_by_method import Study
from equipoise.report.interactive import figures as interactive
from equipoise.report.text.notes import NOT_COVERED
from equipoise.report.text.phrases import count_words, listed
from equipoise.report.text.tables import round_ranges

# -------------------------------------------------------------------------------------------------------------- left out


def test_updates_left_out_are_counted_named_and_dated(attacked, tmp_path):
    runs = [rejecting(run) if run.name == "Ditto" else run for run in attacked.all_results]
    page = Page(write_report(runs, tmp_path / "r.html"))
    offline(page)
    header, plain, ditto = page.rows["table-rejected"]
    assert header == ["method", "updates left out", "of malicious clients", "clients", "who", "rounds"]
    assert plain == ["FedAvg", "0", "0", "0", "–", "–"]
    bad = sum({"c1": 4, "c2": 1}.get(name, 0) for run in attacked.results["Ditto"] for name in malicious_clients(run))
    assert ditto == ["Ditto", "10", str(bad), "2", "c1 and c2", "1 to 3, 5"]  # two seeds, the one named more often first
    assert "table-rejected" not in Page(attacked.report(tmp_path / "none.html")).rows


def test_updates_left_out_of_a_real_run(tmp_path):
    data = eq.attacks.apply(inside(), eq.attacks.ModelReplacement(share=0.2, update="honest", factor=1e30))
    with pytest.warns(eq.errors.EquipoiseNotice, match="absurdly large"):
        run = eq.train(softmax(), data, rounds=4, clients_per_round=10, name="FedAvg")
    lost = [(r.round + 1, name) for r in run.history.rounds for name in r.rejected]
    assert {name for _, name in lost} <= set(malicious_clients(run))
    (row,) = Page(run.report(tmp_path / "r.html")).rows["table-rejected"][1:]
    assert row[1] == row[2] == str(len(lost))
    assert row[3] == str(len({name for _, name in lost}))
    assert f"FedAvg {len(lost)}." in Comparison({"FedAvg": [run]}).summary()


def test_hostile_names_of_clients_are_shown_as_they_are(run, tmp_path):
    odd = with_rounds(run, lambda t: {"rejected": (EVIL,)})
    page = Page(write_report([odd], tmp_path / "r.html"))
    offline(page)
    assert page.rows["table-rejected"] == [
        ["method", "updates left out", "clients", "who", "rounds"], ["this model", "4", "1", EVIL, "1 to 4"],
    ]  # fmt: skip


def test_words_for_rounds_names_and_counts():
    assert round_ranges({1, 2, 3, 7, 9, 10}) == "1 to 3, 7, 9, 10"
    assert round_ranges(set()) == "–"
    assert round_ranges(set(range(1, 40, 2)), most=3) == "1, 3, 5, … (20 rounds up to 39)"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 others"
    assert listed(["a", "b", "c"], most=2) == "a, b and c"  # "1 others" would be no shorter
    assert count_words([8, 7, 9]) == "7 to 9"


# ----------------------------------------------------------------------------------------------------------------- privacy


@pytest.mark.parametrize("protected", [True, False])
def test_the_page_of_a_protected_run_names_no_client(attacked, tmp_path, protected):
    """Before, lists of who fares worst and the texts of points named clients, their sizes and their errors."""
    runs = []
    for run in attacked.all_results:
        names = tuple(f"zebra {name}" for name in run.clients.client)
        algorithm = replace(run.algorithm, privacy=eq.privacy.SecureAggregation()) if protected else run.algorithm
        runs.append(replace(run, clients=replace(run.clients, client=names), algorithm=algorithm))
    for some in (runs, [run for run in runs if run.name == "Ditto"]):
        page = Page(write_report(some, tmp_path / "r.html"))
        assert ("zebra" in page.source) != protected
        assert ("Single clients are not named here" in page.source) == protected


def test_the_terminal_names_no_client_of_a_protected_run(run):
    from equipoise.cli.listing import worst_lines

    assert run.clients.where(run.judged_on).client[0] in " ".join(worst_lines(run, len(run.clients.where(run.judged_on)) - 1))
    protected = replace(run, algorithm=replace(run.algorithm, privacy=eq.privacy.SecureAggregation()))
    (line,) = worst_lines(protected)
    assert line.startswith("Single clients are not named")


def test_privacy_spent_is_said_and_drawn(run, tmp_path):
    page = Page(write_report([private(run)], tmp_path / "r.html"))
    offline(page)
    assert page.by_id["epsilon"] == f"{Spent(2.0)}."
    assert NOT_COVERED in page.source
    assert "not covered by ε" in NOT_COVERED
    (line,) = page.data["figures"]["privacy"]["data"]
    assert line["x"] == [1, 2, 3, 4]
    assert line["y"] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert "own models are not covered" not in page.source


def test_privacy_of_one_method_beside_another(attacked, tmp_path):
    first, second = attacked.results["Ditto"]
    runs = [*attacked.results["FedAvg"], private(first, 2.0), private(second, 3.0)]
    page = Page(write_report(runs, tmp_path / "r.html"))
    offline(page)
    assert "FedAvgNo privacy is promised." in page.by_id["epsilon"]
    assert f"{Spent(3.0)}. This is the most of 2 seeds." in page.by_id["epsilon"]
    assert "own models are not covered either" in page.source
    assert {trace["legendgroup"] for trace in page.data["figures"]["privacy"]["data"]} == {"1"}
    some = Page(write_report([*attacked.results["FedAvg"], private(first), second], tmp_path / "s.html"))
    assert "DittoNo privacy is promised." in some.by_id["epsilon"]  # one seed is without


def test_the_curve_of_epsilon_is_neither_smoothed_nor_cut(run):
    reports = [replace(run.history.rounds[0], round=t, epsilon=(t + 1) ** 2) for t in range(1000)]
    long = replace(run, history=replace(run.history, rounds=reports))
    (line,) = interactive.FIGURE_MAKERS["privacy"](Study.of([long]))["data"]
    assert line["x"][-1] == 1000
    assert len(line["x"]) <= series.MOST_ROUNDS
    assert line["y"] == [pytest.approx(x**2) for x in line["x"]]


def test_without_privacy_or_with_gaps_nothing_is_drawn(run, tmp_path):
    for value in (None, math.nan):  # a log holds null, which may come back as NaN
        odd = with_rounds(run, lambda t, value=value: {"epsilon": value})
        page = Page(write_report([odd], tmp_path / "r.html"))
        assert "privacy" not in page.figures
        assert "epsilon" not in page.by_id
    hostile = replace(run, epsilon=type("Odd", (), {"__str__": lambda self: EVIL, "epsilon": 1.0, "epsilon_server": 1.0})())
    page = Page(write_report([hostile], tmp_path / "h.html"))
    offline(page)
    assert page.by_id["epsilon"] == f"{EVIL.rstrip()}."


def test_a_federated_run_shows_bytes_by_node_and_who_failed(run, tmp_path):
    rounds = [
        replace(
            report, bytes_sent=3000, bytes_received=1500, bytes_by_client={"north": (2000, 1000), "south": (1000, 500)},
            missing={"south": "no <reply>"} if report.round == 1 else {},
        )
        for report in run.history.rounds
    ]  # fmt: skip
    federated = replace(run, history=replace(run.history, rounds=rounds))
    page = federated.report(tmp_path / "federated.html").read_text(encoding="utf-8")
    count = len(rounds)
    assert f"<td>north</td><td>{2 * count:.1f} kB</td><td>{count:.1f} kB</td><td>0</td><td></td>" in page
    assert f"<td>south</td><td>{count:.1f} kB</td>" in page
    assert "<td>1</td><td>no &lt;reply&gt;</td>" in page
    assert "Over the network" not in run.report(tmp_path / "plain.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("protection", ["noise", "sums"])
def test_who_took_part_from_the_page_of_a_private_federation(run, protection, tmp_path):
    rounds = [
        replace(
            report, bytes_sent=3000, bytes_received=1500,
            bytes_by_client={"ward north 7": (2000, 1000), "ward south 9": (1000, 500)},
            missing={"ward south 9": "did not answer"},
        )
        for report in run.history.rounds
    ]  # fmt: skip
    spent = type("Spent", (), {"__str__": lambda self: "ε = 1", "epsilon": 1.0, "epsilon_server": 1.0})()
    protected = (
        {"epsilon": spent} if protection == "noise" else {"algorithm": eq.Algorithm(privacy=eq.privacy.SecureAggregation())}
    )
    table = replace(run.clients, not_evaluated={run.judged_on: {"ward south 9": "did not answer"}})
    private = replace(run, history=replace(run.history, rounds=rounds), clients=table, **protected)
    page = private.report(tmp_path / "private.html").read_text(encoding="utf-8")
    assert "Over the network" in page
    assert "rounds.jsonl" in page
    assert not any(word in page for word in ("ward north 7", "ward south 9", "did not answer"))
