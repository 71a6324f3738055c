"""A site reads in its own node's log why it is left out of a run, and what it can do; before, only the operator's said it."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from fake_grid import FakeGrid, federation, one_client
from lying_site import lie
from test_federation_points import BAD, SIZES, keyed, listing, run, softmax, some_data

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower import client_app
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.transport.messenger import TooFewClients
from made_clients import make_clients

EVERYONE = {f"client-{k}": f"client-{k}" for k in range(4)}


@pytest.fixture
def told(monkeypatch, caplog):
    """What nodes have been told, as their logs have it."""
    monkeypatch.setattr(logging.getLogger("equipoise.node"), "propagate", True)
    caplog.set_level("INFO")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "equipoise.node"]


def causes(grid: FakeGrid) -> list[tuple[str, str]]:
    """Which nodes were told which cause."""
    told = [(client, message.content["call"]["values"]) for client, message in grid.sent if is_told(message)]
    return [(client, values.split('"')[3]) for client, values in told]


def is_told(message) -> bool:
    return message.metadata.message_type == "query.left_out"


def test_a_site_is_told_that_its_update_was_too_long(told):
    grid = lie(federation(some_data(), softmax), "client-1", update=lambda own: 1e4 * own)
    run(grid, rounds=2)
    assert causes(grid) == [("client-1", left_out.LONG)]  # once
    assert left_out.LONG_UPDATE in told()


def test_every_cause_has_words_with_a_cure():
    for cause, words in left_out.WORDS.items():
        assert words.endswith("."), cause
        assert left_out.say_why(cause) == f"This node is left out of the run: {words}"
    for unknown in ("later", 3, None, ["data"]):
        assert left_out.say_why(unknown) == "This node is left out of the run: the operator's log says why."


def test_a_node_with_a_wrong_key_or_no_place_in_the_list_is_told(tmp_path, monkeypatch, told):
    keys = tmp_path / "keys"
    grid = keyed(EVERYONE, keys, monkeypatch, some_data())
    (tmp_path / "nodes.toml").write_text(
        listing(keys, {"client-0": "client-0", "client-1": "client-2", "client-2": "client-1"})
    )
    with pytest.raises(TooFewClients):
        run(grid, rounds=1, nodes=tmp_path / "nodes.toml", patience=20.0)
    assert sorted(causes(grid)) == [("client-1", "key"), ("client-2", "key"), ("client-3", "unlisted")]
    assert sum("node.key" in line and "--renew" in line for line in told()) == 2
    assert sum("not in the operator's list" in line and "equipoise flower site" in line for line in told()) == 1


def test_a_node_without_a_proof_of_its_key_is_told(tmp_path, monkeypatch, told):
    keys, data = tmp_path / "keys", some_data()
    keyed(EVERYONE, keys, monkeypatch, data)
    (tmp_path / "nodes.toml").write_text(listing(keys, EVERYONE))
    with pytest.raises(TooFewClients):
        run(federation(data, softmax), rounds=1, nodes=tmp_path / "nodes.toml", patience=20.0)
    assert sum("equipoise flower node --kit ." in line for line in told()) == 4


def test_a_node_with_another_ones_name_is_told(tmp_path, monkeypatch, told):
    data = some_data()
    grid = keyed(EVERYONE, tmp_path / "keys", monkeypatch, data)
    run(grid, rounds=1, folder=tmp_path / "runs" / "a")
    grid = keyed({"stranger": "client-0", **EVERYONE}, tmp_path / "keys", monkeypatch, data)
    run(grid, rounds=1, folder=tmp_path / "runs" / "b")
    assert causes(grid) == [("stranger", "taken")]
    twins = FakeGrid({n: client_app(model=softmax, load_data=lambda _: one_client(data, "client-0")) for n in ("a", "b")})
    with pytest.raises(TooFewClients):
        run(twins, rounds=1, clients_per_round=2, patience=20.0)
    assert [cause for _, cause in causes(twins)] == ["twice"]
    assert all(any(left_out.WORDS[cause] in line for line in told()) for cause in ("taken", "twice"))


def test_a_node_whose_data_have_changed_is_told_once(told):
    """In the middle of a run, where only its answers say so; it is not told in every round."""
    data, state = some_data(), {"data": some_data()}

    def load(context):
        name = str(context.node_config["client-id"])
        return one_client(state["data"] if name == BAD else data, name)

    apps = {name: client_app(model=softmax, load_data=load) for name in data.train.ids}
    grid = FakeGrid(apps)

    def restarted(delivery):
        if delivery.client == BAD and delivery.action == "train.update" and delivery.round == 1:
            state["data"] = FederatedData(make_clients(SIZES, seed=9), test=data.test, name="four")
            apps[BAD].setup.forget()
        return delivery.answer()

    grid.fault = restarted
    with pytest.warns(eq.errors.EquipoiseNotice, match="client-2 has other data"):
        run(grid, rounds=4)
    assert causes(grid) == [(BAD, "data")]
    assert sum("Put the earlier data back" in line for line in told()) == 1


def test_nodes_that_are_retired_or_have_a_new_key_are_told(tmp_path, monkeypatch, told):
    keys = tmp_path / "keys"
    grid = keyed({**EVERYONE, "renewed": "client-1"}, keys, monkeypatch, some_data())
    grid.offline.add("renewed")
    (tmp_path / "nodes.toml").write_text(listing(keys, EVERYONE))
    with_its_key, after = grid.fault, {"client-0": "client-0", "client-1": "renewed", "client-3": "client-3"}

    def change_the_list(delivery):
        if delivery.action == "train.update" and delivery.round == 1:
            (tmp_path / "nodes.toml").write_text(listing(keys, after))
        return with_its_key(delivery)

    grid.fault = change_the_list
    run(grid, rounds=5, nodes=tmp_path / "nodes.toml", minimum=2)
    assert sorted(causes(grid)) == [("client-1", "replaced"), (BAD, "retired")]
    assert all(any(left_out.WORDS[cause] in line for line in told()) for cause in ("retired", "replaced"))


def test_a_node_that_is_too_late_is_told(told):
    grid = federation(some_data(5), softmax)
    grid.offline.add("client-4")

    def joins(delivery):
        if delivery.action == "train.update" and delivery.round == 0:
            grid.offline.discard("client-4")
        return delivery.answer()

    grid.fault = joins
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.1, noise_multiplier=1.0)
    run(grid, eq.Algorithm(privacy=privacy, sampler=eq.sampling.Uniform()), rounds=4)
    assert causes(grid) == [("client-4", "late")]
    assert sum("takes part from the next run on" in line for line in told()) == 1


def test_a_latecomer_with_other_examples_is_told_and_stops_nobody(tmp_path, told):
    """Before, one node with inputs of another scale ended the run of all when it joined."""
    data = some_data(5)
    grid = federation(data, softmax)
    late = next(node for node, name in grid.names.items() if name == "client-4")

    def scaled(_):
        pixels, classes = torch.zeros(6, 4, dtype=torch.uint8), torch.tensor([0, 1, 2] * 2)
        return ClientSet.pack([("client-4", pixels, classes)], scale=1 / 255)

    grid.apps[late] = client_app(model=softmax, load_data=scaled)
    grid.offline.add("client-4")

    def joins(delivery):
        if delivery.action == "train.update" and delivery.round == 0:
            grid.offline.discard("client-4")
        return delivery.answer()

    grid.fault = joins
    options = {"clients": 5, "begin_with": 4, "clients_per_round": None, "patience": 20.0, "folder": tmp_path / "run"}
    found = run(grid, eq.Algorithm(sampler=eq.sampling.Full()), rounds=3, **options)
    assert [report.trained for report in found.history.rounds] == [4, 4, 4]
    assert causes(grid) == [("client-4", "kind")]
    assert any("another shape, type or scale" in line for line in told())


def test_a_node_that_cannot_say_who_it_is_reads_that_it_is_left_out(told):
    data = some_data()
    grid = federation(data, softmax)
    broken = next(node for node, name in grid.names.items() if name == BAD)
    grid.apps[broken] = client_app(model=softmax, load_data=lambda _: {"train": ([1.0], [0])})
    run(grid, rounds=1, clients_per_round=3)
    assert causes(grid) == []  # its own log has the reason
    line = next(line for line in told() if line.startswith("Refused, when asked who it is: InvalidParameter: "))
    assert line.endswith(
        " Until this is mended, the node is left out of the run: `equipoise flower check --kit .` looks for the fault."
    )


def test_a_node_that_is_refused_is_asked_again_after_growing_pauses(tmp_path, monkeypatch):
    """Before, one that proved a key was asked every two seconds, and each time the log said that it takes no part."""
    data = some_data()
    grid = keyed(EVERYONE, tmp_path / "keys", monkeypatch, data)
    run(grid, rounds=1, folder=tmp_path / "runs" / "a")
    grid = keyed({"stranger": "client-0", **EVERYONE}, tmp_path / "keys", monkeypatch, data)
    grid.offline.add("client-0")
    with pytest.raises(TooFewClients, match="3 nodes came"):
        run(grid, rounds=1, folder=tmp_path / "runs" / "b", patience=600.0)
    assert 5 <= sum((client, action) == ("stranger", "query.hello") for client, action, _ in grid.log) <= 10


def test_nodes_of_earlier_versions_are_told_nothing(tmp_path, monkeypatch):
    from equipoise.engines.flower.apps import node_answers

    before = node_answers.introduce
    silent = lambda session: ({k: v for k, v in before(session)[0].items() if k != "listens"}, {})  # noqa: E731
    monkeypatch.setitem(node_answers.HANDLERS, "query.hello", silent)
    monkeypatch.setattr("equipoise.engines.flower.apps.node_app.HANDLERS", dict(node_answers.HANDLERS))
    (tmp_path / "nodes.toml").write_text("")
    grid = federation(some_data(), softmax)
    with pytest.raises(TooFewClients):
        run(grid, rounds=1, nodes=tmp_path / "nodes.toml", patience=20.0)
    assert causes(grid) == []
