"""What is told of a run that waits for its nodes, and of options that it does not have."""

from __future__ import annotations

import json
import logging

import pytest
from fake_grid import federation, run_app
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.federation_commands import app as operators
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.template import write_app
from equipoise.engines.flower.operate.run_options import refuse_unknown_options
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import ConfigError
from made_clients import make_clients

DATA = FederatedData(make_clients([6, 9, 12]), test=make_clients([5, 9, 14], seed=1), name="three")


def softmax():
    return eq.models.Softmax(4, 3)


def test_status_names_who_is_here_and_who_was_turned_away(tmp_path, caplog, monkeypatch):
    """Before, the status of a run that waited, or had waited in vain, was an empty table."""
    monkeypatch.setattr(logging.getLogger("equipoise.node"), "propagate", True)
    grid = federation(DATA, softmax)
    other = federation(DATA, lambda: eq.models.Softmax(4, 5))
    node = next(node for node, name in grid.names.items() if name == "client-2")
    grid.apps[node] = other.apps[node]  # an app that was not brought up to date
    grid.offline.add("client-1")
    app = server_app(eq.Algorithm(), model=softmax, rounds=1, clients=3, folder=tmp_path / "run", patience=20.0)
    with caplog.at_level("INFO"), pytest.raises(TooFewClients, match=r"folder app/.* restarted"):
        run_app(app, grid)
    shown = "\n".join(RunView(tmp_path / "run").lines())
    assert "here: client-0 (1 of 3)" in shown
    assert "turned away: node 102: client-2 has another model" in shown
    assert json.loads((tmp_path / "run" / "status.json").read_text())["arrivals"]["there"] == ["client-0"]
    told = [record.getMessage() for record in caplog.records if record.name == "equipoise.node"]
    assert any("left out of the run" in line and "start the node again" in line for line in told)


def test_a_run_that_begins_forgets_who_it_waited_for(tmp_path):
    app = server_app(eq.Algorithm(), model=softmax, rounds=1, clients=3, folder=tmp_path / "run")
    run_app(app, federation(DATA, softmax))
    assert "arrivals" not in json.loads((tmp_path / "run" / "status.json").read_text())


def test_an_option_that_the_app_does_not_have_is_named(tmp_path):
    """Before, Flower said "Invalid run configuration", and not which option."""
    write_app(tmp_path / "my-app")
    refuse_unknown_options(tmp_path / "my-app", 'rounds=3 clients=4 nodes="nodes.toml" begin-with=2')
    with pytest.raises(ConfigError, match=r"'round'. Did you mean 'rounds'\?.*clients-per-round.*EQ412"):
        refuse_unknown_options(tmp_path / "my-app", "round=3")
    with pytest.raises(ConfigError, match=r"cannot be read.*EQ412"):
        refuse_unknown_options(tmp_path / "my-app", "rounds=a b")
    with pytest.raises(ConfigError, match="a text needs double quotes"):  # before, no such file or directory: 'rounds=5 …'
        refuse_unknown_options(tmp_path / "my-app", "rounds=5 nodes=nodes.toml")
    with pytest.raises(ConfigError, match="folder of the app"):
        refuse_unknown_options(tmp_path, "rounds=3")


def test_extend_refuses_fewer_rounds(tmp_path):
    """Before, 26 rounds for a run of 30 were taken without a word, and changed nothing."""
    run_app(server_app(eq.Algorithm(), model=softmax, rounds=3, clients=3, folder=tmp_path / "run"), federation(DATA, softmax))
    shown = CliRunner().invoke(operators, ["extend", str(tmp_path / "run"), "--rounds", "2"])
    assert shown.exit_code != 0
    assert "more than the 3 rounds" in str(shown.exception)
    assert not (tmp_path / "run" / "control.json").exists()


def test_an_alert_is_told_once_and_a_node_that_is_back_too(tmp_path, caplog):
    """Before, a node that was away was an alert anew in every round, and no line said that it was back."""
    grid = federation(DATA, softmax)

    class Away(eq.types.Observer):
        def on_round(self, report):
            (grid.offline.add if report.round < 5 else grid.offline.discard)("client-2")

    options = {"rounds": 8, "clients": 3, "minimum": 2, "folder": tmp_path / "run", "observers": [Away()]}
    with caplog.at_level("INFO", logger="flwr"):
        run_app(server_app(eq.Algorithm(), model=softmax, **options), grid)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Alert: client-2 has failed") for line in lines) == 1
    assert "client-2 is back." in lines
