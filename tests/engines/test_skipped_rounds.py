"""Rounds of secure sums that are skipped say why, in log, events, report and card; what only means tell is not invented."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.secure.masked_sums import MaskedSums
from equipoise.export.model_card import card, card_markdown
from equipoise.report.notices import skipped_rounds
from made_clients import make_clients

SECURE = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")


def softmax():
    return eq.models.Softmax(4, 3)


@pytest.fixture
def grid(tmp_path):
    data = FederatedData(make_clients([6, 9, 12, 15]), test=make_clients([5, 9, 14, 3], seed=1), name="four")
    return federation(data, softmax, keep=tmp_path / "nodes")


def run(grid, folder, rounds=3, **options):
    found = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients_per_round": 4, "clients": 4, **options}
    options |= {"folder": str(folder), "on_result": found.append}
    run_app(server_app(SECURE, model=softmax, rounds=rounds, **options), grid)
    return found[0]


def test_a_round_whose_sum_was_lost_in_a_kill_says_why_it_is_skipped(tmp_path, grid, caplog):
    """The server is killed when round 2 is about to be unmasked: its sum is not asked for again."""
    exchange = MaskedSums._exchange

    def killed(self, action, *more):
        if action == "train.reveal" and self.round == 1 and "update" in more[0]:
            raise KeyboardInterrupt
        return exchange(self, action, *more)

    folder = tmp_path / "run"
    with mock.patch.object(MaskedSums, "_exchange", killed), pytest.raises(KeyboardInterrupt):
        run(grid, folder)
    grid.fault = lambda d: None if d.client == "client-3" and d.action == "train.keys" and d.round == 2 else d.answer()
    caplog.clear()
    with caplog.at_level("INFO", logger="flwr"):
        found = run(grid, folder, minimum=3)
    said = [record.getMessage() for record in caplog.records]
    assert any("Only sums are visible" in line for line in said)  # of the resumed run, too
    assert any(line.startswith("Round 2 is skipped") and "begun and lost" in line for line in said)
    reports = found.history.rounds
    assert [bool(report.skipped) for report in reports] == [False, True, False]
    assert [report.trained for report in reports] == [4, 0, 3]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert ["skipped" in event for event in events if event["event"] == "round"] == [False, True, False]
    assert "rounds 2 (a sum" in str(skipped_rounds(found)[0])
    assert "rounds 2 (a sum of this round was begun and lost" in (folder / "report.html").read_text()
    content = card(found)
    assert content["method"]["took_part"].startswith("Rounds in which nobody trained: 1 of 3;")
    assert content["data"]["clients"] == {"train": 4, "test": 4}  # also those that the last evaluation lacks
    assert content["metrics"]["test"]["clients"] == 4 - content["not_evaluated"].get("test", 0)
    assert "Rounds in which nobody trained: 1 of 3;" in card_markdown(content).decode()


def test_a_site_that_misses_the_evaluation_is_still_one_of_the_data(tmp_path, grid):
    grid.fault = lambda d: None if d.client == "client-3" and d.action == "train.keys" and d.round == 3 else d.answer()
    content = card(run(grid, tmp_path / "run", minimum=3))
    assert content["data"]["clients"] == {"train": 4, "test": 4}
    assert content["metrics"]["test"]["clients"] == 3
    assert content["method"]["took_part"] == ""


def test_of_means_the_log_has_no_percentile_and_no_histogram(tmp_path, grid):
    run(grid, tmp_path / "run", rounds=2, evaluate_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert len(evaluations) == 2
    for line in evaluations:
        assert line["histogram"] is None
        for figures in line["splits"].values():
            assert figures["error_90"] is None
            assert 0 <= figures["error"] <= 1


def test_the_card_says_what_its_means_are_over(tmp_path, grid):
    text = card_markdown(card(run(grid, tmp_path / "run", rounds=1))).decode()
    assert "Figures of train clients are over examples" in text
