"""Secure sums of few sites: which setting demands how many of them, and what the operator is told."""

from __future__ import annotations

import json

import pytest
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import IncompatibleParts
from made_clients import make_clients

SECURE = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
DATA = FederatedData(make_clients([6, 9, 12]), name="three")
DEMAND = "minimum_crowd = 3 in the policy of client-0"


def softmax():
    return eq.models.Softmax(4, 3)


def run(grid, *, clients=3, **options):
    found = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 1, "seed": 3, "minimum": 2, **options}
    options = {"rounds": 2, **options}
    run_app(server_app(SECURE, model=softmax, clients=clients, on_result=found.append, **options), grid)
    return found[0]


def test_three_sites_whose_policies_demand_three(tmp_path, caplog):
    grid = federation(DATA, softmax, only_sums=True, minimum_crowd=3)
    grid.fault = lambda d: None if d.client == "client-1" and d.round == 1 and d.action == "train.keys" else d.answer()
    with caplog.at_level("WARNING", logger="flwr"), pytest.raises(TooFewClients, match=f"3 are demanded by {DEMAND}"):
        run(grid, retries=0, folder=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records]
    assert any("minimum=2 has no effect" in text and DEMAND in text for text in said)
    clients = json.loads((tmp_path / "run" / "status.json").read_text())["clients"]
    assert (clients["client-1"]["state"], clients["client-1"]["failed"]) == ("failed", 1)
    assert clients["client-1"]["fault"]
    assert clients["client-0"]["failed"] == 0


def test_a_node_that_comes_back_in_time_is_waited_for():
    grid = federation(DATA, softmax, only_sums=True, minimum_crowd=3)
    grid.fault = lambda d: None if d.client == "client-1" and d.action == "train.masked" and d.count == 0 else d.answer()
    assert [report.trained for report in run(grid).history.rounds] == [3, 3]


def test_exact_sums_over_changing_clients_are_told_of_once(tmp_path, caplog):
    """Before, a client that was absent in between was silent: the difference of two rounds is about its update."""
    grid = federation(DATA, softmax, only_sums=True, minimum_crowd=2)
    grid.fault = lambda d: None if d.client == "client-1" and d.round == 1 and d.action.startswith("train.") else d.answer()
    with caplog.at_level("WARNING", logger="flwr"):
        run(grid, folder=tmp_path / "run", rounds=4)
    told = [record.getMessage() for record in caplog.records if "not those of the round before" in record.getMessage()]
    assert len(told) == 1
    assert "The clients of round 2" in told[0]
    assert "without client-1" in told[0]
    assert any(line == f"note: {told[0]}" for line in RunView(tmp_path / "run").lines())
    run(federation(DATA, softmax, only_sums=True, minimum_crowd=2), folder=tmp_path / "steady")
    assert not any(line.startswith("note") for line in RunView(tmp_path / "steady").lines())


def test_three_sites_whose_policies_allow_two_go_on_without_one(caplog):
    grid = federation(DATA, softmax, only_sums=True, minimum_crowd=2)
    grid.fault = lambda d: None if d.client == "client-1" and d.action == "train.masked" else d.answer()
    with caplog.at_level("WARNING", logger="flwr"):
        found = run(grid)
    assert found.history.rounds[0].trained == 2
    assert not any("no effect" in record.getMessage() for record in caplog.records)


def test_sums_that_no_round_can_have_are_refused_at_the_start():
    grid = federation(DATA, softmax, only_sums=True, minimum_crowd=4)
    with pytest.raises(IncompatibleParts, match="minimum_crowd = 4 in the policy of client-0"):
        run(grid)
    assert not any(action.startswith("train") for _, action, _ in grid.log)


def test_an_owner_who_forbids_evaluations_does_not_raise_the_crowd_of_those_who_allow_them():
    """Four owners demand a crowd of 3, and the fifth, who is not evaluated, one of 5."""
    grid = federation(FederatedData(make_clients([6, 9, 12, 15, 20]), name="five"), softmax, only_sums=True, minimum_crowd=3)
    grid.apps[101].setup.policy = NodePolicy(only_sums=True, minimum_crowd=5, evaluate=False)
    table = run(grid, clients=5).clients
    assert table.clients_in_mean == 4
    assert table.not_evaluated["train"].keys() == {"client-1"}
