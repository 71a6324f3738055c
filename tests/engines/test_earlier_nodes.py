"""Nodes of an earlier version, at the level of messages; test_previous_version.py has one as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from fake_grid import federation, run_app
from test_federation_points import BAD, run, softmax, some_data
from test_flower_faults import altered, introduce_as

import equipoise as eq
from equipoise.engines.flower import server_app
from equipoise.engines.flower.transport.part_messages import ADDED, pack_part
from equipoise.experiment import catalog
from equipoise.experiment.part_config import PartConfig, as_config

BEFORE = json.loads(Path(__file__).with_name("parts_before.json").read_text())  # parts and parameters of commit ad1fb4b
NEEDS_THIS_VERSION = {
    "secure sums": eq.Algorithm(privacy=eq.privacy.SecureAggregation()),
    "own models": eq.Algorithm(personal=eq.personal.Ditto()),
    "kept numbers": eq.Algorithm(solver=eq.solvers.Scaffold(eq.solvers.SGD())),
}


def with_an_earlier_node():
    grid = federation(some_data(), softmax)
    hello = lambda d: d.client == BAD and d.action == "query.hello"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), introduce_as(versions=None, compact=None)) if hello(d) else d.answer()
    return grid


@pytest.mark.parametrize("kind", BEFORE)
def test_parameters_that_are_new_are_left_out_at_their_defaults(kind):
    """Or a node that does not know them refuses every message, as it did for SGD's dampening."""
    for name, known in BEFORE[kind].items():
        added = {p.name: as_config(p.default, p) for p in catalog.part(kind, name).parameters.values() if p.name not in known}
        new = {key: value for key, value in PartConfig(kind, name, added).table().items() if key != "name"}  # as they travel
        assert new == ADDED.get(name, {}), f"{kind}.{name}: write the new parameters into ADDED of part_messages.py"


def test_a_new_parameter_travels_where_it_matters():
    assert "dampening" not in pack_part("solver", eq.solvers.SGD(momentum=0.5), {})["table"]
    assert pack_part("solver", eq.solvers.SGD(momentum=0.5, dampening=0.5), {})["table"]["dampening"] == 0.5
    nested = pack_part("solver", eq.solvers.FedDyn(solver=eq.solvers.SGD()), {})
    assert "dampening" not in json.dumps(nested)


def test_an_earlier_node_takes_part_in_a_plain_run():
    assert run(with_an_earlier_node(), rounds=1).history.rounds[0].trained == 4


def test_an_earlier_node_is_sent_messages_that_it_can_read():
    """Tensors beside the call; all others get them inside it."""
    grid = with_an_earlier_node()
    run(grid, rounds=1)
    beside = {name for name, message in grid.raw if message.metadata.message_type != "query.hello" and len(message.content) > 1}
    assert beside == {BAD}


def test_a_node_that_goes_back_to_an_earlier_version_misses_one_round():
    """It has Flower's id of before, and does not know tensors inside a call."""
    grid = federation(some_data(), softmax)

    def went_back(delivery):
        if delivery.client == BAD and delivery.round == 1 and len(delivery.message.content) == 1:
            return altered(delivery.answer(), refused_as("BadMessage"))
        return delivery.answer()

    grid.fault = went_back
    found = run(grid, rounds=3, retries=0)
    assert [set(report.missing) for report in found.history.rounds] == [set(), {BAD}, set()]
    last = [message for name, message in grid.raw if name == BAD][-1]
    assert len(last.content) == 2


def refused_as(reason: str):
    """A change that makes an answer a refusal."""

    def change(content):
        content["call"]["values"] = json.dumps({"refused": reason})

    return change


@pytest.mark.parametrize("name", NEEDS_THIS_VERSION)
def test_an_earlier_node_is_refused_by_name_with_the_cure_where_it_would_answer_otherwise(name, caplog):
    """The others train without it."""
    app = server_app(NEEDS_THIS_VERSION[name], model=softmax, rounds=1, clients_per_round=3, timeout=30.0)
    grid = with_an_earlier_node()
    with caplog.at_level("WARNING", "flwr"):
        run_app(app, grid)
    assert f"{BAD} has an earlier version of Equipoise" in caplog.text
    assert "Install the server's version on it, and start it again" in caplog.text
    assert {action for client, action, _ in grid.log if client == BAD} == {"query.hello"}
