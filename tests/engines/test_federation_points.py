"""What broke in the first federation, point by point, at the level of messages; each test fails on the version before."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from fake_grid import FakeGrid, federation, run_app
from flwr.app import Context, RecordDict

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

import equipoise as eq
from equipoise.core.files import locked
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import client_app, server_app
from equipoise.engines.flower.apps import node_keys
from equipoise.engines.flower.apps.federated_run import LOCK
from equipoise.engines.flower.apps.run_control import StoppedByOperator, give_order
from equipoise.engines.flower.apps.server import ServerPlan
from equipoise.engines.flower.apps.template import render_app
from equipoise.engines.flower.operate.authority import Authority, new_node_key
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.engines.flower.transport.messenger import Messenger, TooFewClients
from equipoise.errors import ConfigError, EquipoiseNotice
from equipoise.experiment.folder import read_record
from equipoise.types import Observer
from made_clients import make_clients

BAD = "client-2"
SIZES = [6, 9, 12, 15]


def some_data(clients: int = 4) -> FederatedData:
    sizes = [*SIZES, 7][:clients]
    return FederatedData(make_clients(sizes), test=make_clients([5, 9, 14, 3, 8][:clients], seed=1), name="four")


def softmax() -> torch.nn.Module:
    return eq.models.Softmax(4, 3)


def run(grid: FakeGrid, algorithm: eq.Algorithm | None = None, *, rounds: int = 2, **options: object) -> eq.Result:
    found: list[eq.Result] = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients_per_round": 4, **options}
    run_app(server_app(algorithm or eq.Algorithm(), model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[0]


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------- 2: a hanging node costs one timeout


def test_a_hanging_node_costs_one_timeout_and_not_one_in_every_round():
    """Six rounds and an evaluation by a node that never answers after its introduction: 30 s, where it was 7 · 30 and more."""
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: d.answer() if d.client != BAD or (d.action == "query.hello" and d.count == 1) else None
    with pytest.warns(EquipoiseNotice, match="1 client could not be evaluated: client-2"):
        found = run(grid, rounds=6, retries=2)
    assert [set(report.missing) for report in found.history.rounds] == [{BAD}] * 6
    assert found.history.rounds[0].missing[BAD] == "did not answer within 30 s"
    assert found.history.rounds[1].missing[BAD] == "rests, as it did not answer before"
    # One timeout of 30 s; hellos wait 5 s each and grow apart (2, 4, 8 … s), and the evaluation's two pauses take 1 s each.
    assert grid.clock.now < 30 + 60
    assert sum(client == BAD and action == "train.update" for client, action, _ in grid.log) == 1


def test_a_node_that_hangs_does_not_keep_the_next_run_from_beginning():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: d.answer() if d.client != BAD else None
    assert run(grid, rounds=1, clients_per_round=3).history.rounds[0].trained == 3
    assert grid.clock.now < 30  # before, the first look alone waited a whole timeout for it


def test_a_client_that_fails_again_and_again_rests_longer_each_time():
    messenger = Messenger(federation(some_data(), softmax), timeout=10.0)
    rests = []
    for _ in range(4):
        messenger.rest(BAD)
        rests.append(messenger.resting[BAD].until)
    gaps = [round(later - rests[0], 1) for later in rests[1:]]
    assert gaps == [10.0, 20.0, 40.0]


def test_a_node_that_was_silent_comes_back_also_where_rounds_are_long():
    """A round takes 28 s of the 30 that an answer may take, and the node says who it is after 8 s, so while a round goes on."""
    grid = federation(some_data(), softmax)

    def slow(delivery):
        if delivery.client == BAD and delivery.action == "train.update" and delivery.count == 1:
            return None
        if delivery.client == BAD and delivery.action == "query.hello" and delivery.count > 1:
            grid.clock.wait_until(grid.clock.now + 8.0)
        if delivery.client != BAD and delivery.action == "train.update":
            grid.clock.wait_until(grid.clock.now + 28.0)
        return delivery.answer()

    grid.fault = slow
    found = run(grid, rounds=6)
    missing = [BAD in report.missing for report in found.history.rounds]
    assert missing[0]
    assert not any(missing[3:]), missing


# ----------------------------------------------------------------------------------------------- 4: names belong to their keys


def keyed(grid_names: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, data: FederatedData) -> FakeGrid:
    """Nodes that each prove a key of their own: {name in the grid: client that it says it is}."""
    for name in grid_names:
        if not (folder / name).exists():
            new_node_key(folder / name, folder / f"{name}.pub")

    def app_of(name: str, client: str):
        def load(context):
            one = [data.train.ids.index(client)]
            return FederatedData(data.train.take(one), test=data.test.take(one), classes=3)

        return client_app(model=softmax, load_data=load)

    grid = FakeGrid({name: app_of(name, client) for name, client in grid_names.items()})
    sign = node_keys.prove_name
    busy = __import__("threading").Lock()

    def with_its_key(delivery):
        with busy:  # the environment is the whole process's
            monkeypatch.setenv(node_keys.NODE_KEY, str(folder / delivery.client))
            return delivery.answer()

    assert sign is node_keys.prove_name
    grid.fault = with_its_key
    return grid


def test_a_stranger_cannot_take_a_name_that_belongs_to_another_key(tmp_path, monkeypatch, caplog):
    """The first node with a name keeps it over runs; a stranger neither blocks the start nor takes an absent node's place."""
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed(everyone, keys, monkeypatch, data)
    run(grid, rounds=1, folder=tmp_path / "runs" / "a")
    assert set(json.loads((tmp_path / "runs" / node_keys.KNOWN_NODES).read_text())) == set(everyone)
    grid = keyed({"stranger": "client-0", **everyone}, keys, monkeypatch, data)
    found = run(grid, rounds=1, folder=tmp_path / "runs" / "b")
    assert found.history.rounds[0].trained == 4
    assert ("stranger", "train.update", 0) not in grid.log
    grid = keyed({"stranger": "client-0", **everyone}, keys, monkeypatch, data)
    grid.offline.add("client-0")
    with pytest.raises(TooFewClients, match=r"3 nodes came .* client-0 is the name of another node"):
        run(grid, rounds=1, folder=tmp_path / "runs" / "c", patience=20.0)


def test_the_operators_list_wins(tmp_path, monkeypatch):
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed({"stranger": "client-0", **everyone}, keys, monkeypatch, data)
    listed = "".join(f'{name} = "{(keys / f"{name}.pub").read_text().strip()}"\n' for name in everyone)
    (tmp_path / "nodes.toml").write_text(listed)
    found = run(grid, rounds=1, nodes=tmp_path / "nodes.toml")
    assert found.history.rounds[0].trained == 4
    assert ("stranger", "train.update", 0) not in grid.log
    (tmp_path / "nodes.toml").write_text(listed.replace("client-3 =", "client-9 ="))
    with pytest.raises(TooFewClients, match="client-3 is not in the operator's list"):
        run(keyed(everyone, keys, monkeypatch, data), rounds=1, nodes=tmp_path / "nodes.toml", patience=20.0)


def listing(keys: Path, names: dict[str, str]) -> str:
    """The operator's list: {name: whose key it has}."""
    return "".join(f'{name} = "{(keys / f"{key}.pub").read_text().strip()}"\n' for name, key in names.items())


def test_a_retired_key_is_asked_nothing_from_the_next_round_on(tmp_path, monkeypatch, caplog):
    """Before, the list was looked at only when a node came: a retired one trained on for as long as it stayed connected."""
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed(everyone, keys, monkeypatch, data)
    (tmp_path / "nodes.toml").write_text(listing(keys, everyone))
    with_its_key = grid.fault

    def retire_in_round_two(delivery):
        if delivery.action == "train.update" and delivery.round == 1:
            (tmp_path / "nodes.toml").write_text(listing(keys, {name: name for name in everyone if name != BAD}))
        return with_its_key(delivery)

    grid.fault = retire_in_round_two
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # Flower takes its log off the others'
    with caplog.at_level("WARNING", logger="flwr"):
        found = run(grid, rounds=7, nodes=tmp_path / "nodes.toml", folder=tmp_path / "runs" / "a", minimum=2, retries=2)
    asked = [(action, number) for client, action, number in grid.log if client == BAD]
    assert asked == [("query.hello", 0), ("train.update", 0), ("train.update", 1), ("query.left_out", 0)]  # the last tells why
    assert [report.missing for report in found.history.rounds[2:]] == [{BAD: "was retired by the operator"}] * 5
    assert sum(BAD in line and "retired" in line for line in caplog.messages) == 1
    status = json.loads((tmp_path / "runs" / "a" / "status.json").read_text())
    assert status["alerts"] == []
    assert status["clients"][BAD]["state"] == "retired"
    assert not any(line["event"] == "alert" for line in events(tmp_path / "runs" / "a"))
    began = grid.clock.now  # going on with the run, nobody waits for the retired site
    run(grid, rounds=8, nodes=tmp_path / "nodes.toml", folder=tmp_path / "runs" / "a", minimum=2)
    assert grid.clock.now - began < 10


def test_a_node_that_never_says_who_it_is_is_named_as_it_was_registered(tmp_path, monkeypatch, caplog):
    """Flower's number of twenty digits says nothing to an operator."""
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed(everyone, keys, monkeypatch, data)
    (tmp_path / "nodes.toml").write_text(listing(keys, everyone))
    node_keys.write_node_names(tmp_path, grid.names)
    with_its_key = grid.fault
    grid.fault = lambda d: with_its_key(d) if d.client != BAD else 1 / 0
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level("WARNING", logger="flwr"):
        run(grid, rounds=1, clients_per_round=3, nodes=tmp_path / "nodes.toml")
    assert any(line.startswith(f"Not taking part: {BAD} (node ") for line in caplog.messages), caplog.messages


def test_a_replaced_key_is_asked_nothing_and_its_site_comes_back_with_the_new_one(tmp_path, monkeypatch):
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed({**everyone, "renewed": BAD}, keys, monkeypatch, data)
    grid.offline.add("renewed")
    (tmp_path / "nodes.toml").write_text(listing(keys, everyone))
    with_its_key = grid.fault

    def renew(delivery):
        if delivery.action == "train.update" and delivery.round == 1:
            (tmp_path / "nodes.toml").write_text(listing(keys, everyone | {BAD: "renewed"}))
        if delivery.action == "train.update" and delivery.round == 3:
            grid.offline.discard("renewed")
        return with_its_key(delivery)

    grid.fault = renew
    found = run(grid, rounds=6, nodes=tmp_path / "nodes.toml", minimum=2)
    missing = [report.missing.get(BAD, "") for report in found.history.rounds]
    assert missing == ["", "", *["has a new key, and has not come with it"] * 2, "", ""]
    assert [number for client, action, number in grid.log if (client, action) == (BAD, "train.update")] == [0, 1]
    assert [number for client, action, number in grid.log if (client, action) == ("renewed", "train.update")] == [4, 5]


def test_a_list_that_is_damaged_while_a_run_goes_on_changes_nothing(tmp_path, monkeypatch, caplog):
    data, keys = some_data(), tmp_path / "keys"
    everyone = {f"client-{k}": f"client-{k}" for k in range(4)}
    grid = keyed(everyone, keys, monkeypatch, data)
    (tmp_path / "nodes.toml").write_text(listing(keys, everyone))
    with_its_key = grid.fault

    def damage(delivery):
        if delivery.action == "train.update":
            (tmp_path / "nodes.toml").write_text("client-0 = ")
        return with_its_key(delivery)

    grid.fault = damage
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # Flower takes its log off the others'
    with caplog.at_level("WARNING", logger="flwr"):
        assert run(grid, rounds=3, nodes=tmp_path / "nodes.toml").history.rounds[2].trained == 4
    assert sum("goes on with the list that it has read before" in line for line in caplog.messages) == 1


def test_a_signature_of_another_question_proves_nothing(tmp_path, monkeypatch):
    from equipoise.engines.flower.transport.messages import BadMessage, MessageContent

    new_node_key(tmp_path / "key", tmp_path / "key.pub")
    monkeypatch.setenv(node_keys.NODE_KEY, str(tmp_path / "key"))
    proof = node_keys.prove_name("0123", "a")
    assert node_keys.read_proof(MessageContent(0, "0123", proof), "a").startswith("ecdsa-sha2-nistp384 ")
    for token, client in (("4567", "a"), ("0123", "b")):
        with pytest.raises(BadMessage, match="does not have the key"):
            node_keys.read_proof(MessageContent(0, token, proof), client)


# ------------------------------------------------------------------------------------------------- 5: changed data are noticed


def test_a_node_whose_data_change_in_the_middle_of_a_run_is_left_out():
    """The node keeps Flower's id, as an authenticated one does when it is started again."""
    data = some_data()
    changed = FederatedData(make_clients(SIZES, seed=9), test=data.test, name="four")
    state = {"data": data}

    def load(context):
        one = [data.train.ids.index(str(context.node_config["client-id"]))]
        source = state["data"] if context.node_config["client-id"] == BAD else data
        return FederatedData(source.train.take(one), test=data.test.take(one), classes=3)

    apps = {name: client_app(model=softmax, load_data=load) for name in data.train.ids}
    grid = FakeGrid(apps)

    def restarted(delivery):
        if delivery.client == BAD and delivery.action == "train.update" and delivery.round == 2:
            state["data"] = changed
            apps[BAD].setup.forget()
        return delivery.answer()

    grid.fault = restarted
    with pytest.warns(EquipoiseNotice, match="client-2 has other data"):
        found = run(grid, rounds=4)
    missing = [report.missing for report in found.history.rounds]
    assert [set(each) for each in missing] == [set(), set(), {BAD}, {BAD}]
    assert missing[2][BAD] == "has other data than when the run began"


# -------------------------------------------------------------------------------------- 6: nodes are asked again; latecomers


def test_a_node_that_was_mended_is_asked_again():
    grid = federation(some_data(), softmax)
    broken = lambda d: d.client == BAD and d.action == "query.hello" and d.count <= 3  # noqa: E731
    grid.fault = lambda d: None if broken(d) and d.count == 2 else 1 / 0 if broken(d) else d.answer()
    assert run(grid, rounds=1).history.rounds[0].trained == 4


def test_a_latecomer_joins_between_rounds(tmp_path, caplog):
    """Five clients, of which the fifth comes after two rounds: from then on all five train, from the checkpoint."""
    data, everyone = some_data(5), eq.Algorithm(sampler=eq.sampling.Full())
    grid = federation(data, softmax)
    grid.offline.add("client-4")

    def joins(delivery):
        if delivery.action == "train.update" and delivery.round == 1:
            grid.offline.discard("client-4")
        return delivery.answer()

    grid.fault = joins
    folder = tmp_path / "run"
    with caplog.at_level("INFO", "flwr"), pytest.warns(EquipoiseNotice, match="Going on from round 2"):
        found = run(grid, everyone, rounds=4, clients=5, begin_with=4, clients_per_round=None, patience=20.0, folder=folder)
    assert [report.trained for report in found.history.rounds] == [4, 4, 5, 5]
    assert "client-4 at node 104 was not there when the run began, and joins before the next round" in caplog.text
    assert [entry["client"] for entry in json.loads((tmp_path / "run" / "federation.json").read_text())["clients"]] == [
        f"client-{k}" for k in range(5)
    ]
    without = run(federation(some_data(5), softmax), everyone, rounds=4, clients=5, clients_per_round=None)
    assert not torch.equal(found.params, without.params)  # it did miss two rounds


def test_where_noise_was_set_for_those_who_began_a_latecomer_waits_for_the_next_run(tmp_path, caplog):
    data = some_data(5)
    grid = federation(data, softmax)
    grid.offline.add("client-4")

    def joins(delivery):
        if delivery.action == "train.update" and delivery.round == 0:
            grid.offline.discard("client-4")
        return delivery.answer()

    grid.fault = joins
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.1, noise_multiplier=1.0)
    private = eq.Algorithm(privacy=privacy, sampler=eq.sampling.Uniform())
    with caplog.at_level("INFO", "flwr"):
        run(grid, private, rounds=2, folder=tmp_path / "run")
    assert "client-4 at node 104 was not there when the run began, and takes part from the next run on" in caplog.text
    assert not any(client == "client-4" and not action.startswith("query.") for client, action, _ in grid.log)


# ----------------------------------------------------------------------------------------------------- 9: the authority is kept


def test_the_authority_is_made_once_and_the_certificate_renewed(tmp_path):
    authority = Authority(tmp_path)
    assert len(authority.prepare(["a.example.org", "127.0.0.1"])) == 2
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert authority.prepare(["127.0.0.1", "a.example.org"]) == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (text,) = authority.prepare(["127.0.0.1", "a.example.org"], renew=True)
    assert "it was asked for" in text
    assert authority.certificate.read_bytes() == before["ca.crt"]
    assert authority.server.read_bytes() != before["server.pem"]
    assert {file.stat().st_mode & 0o777 for file in (authority.key, authority.server_key)} == {0o600}
    authority.key.unlink()
    with pytest.raises(ConfigError, match="a new authority would lock out all nodes"):
        authority.prepare(["127.0.0.1"])
    from cryptography import x509

    ca, server = (x509.load_pem_x509_certificate(f.read_bytes()) for f in (authority.certificate, authority.server))
    server.verify_directly_issued_by(ca)
    assert (ca.not_valid_after_utc - ca.not_valid_before_utc).days >= 3650


# ------------------------------------------------------------------------------------------------------ 10: run configuration


def test_every_option_of_the_run_configuration_is_in_the_template():
    """Flower refuses keys that the app's configuration does not have."""
    from typing import get_type_hints

    from equipoise.experiment.values import in_toml

    config = tomllib.loads(render_app("a-federation")["pyproject.toml"])["tool"]["flwr"]["app"]["config"]
    taken = {key.replace("_", "-") for key, kind in get_type_hints(ServerPlan).items() if in_toml(kind) is not None}
    assert taken == set(config)
    app_plan = server_app(eq.Algorithm(), model=softmax, rounds=1, clients_per_round=2)
    assert app_plan is not None
    plan = ServerPlan(eq.Algorithm(), softmax, 1, 2, None, 0, None, None, None, None, 1.0, 1, 0, 0.0, 1.0, False, None, 9, "d",
                      None, (), None)  # fmt: skip
    done = plan.configured(config)
    assert (done.evaluate_every, done.clients, done.name, done.nodes, done.begin_with, done.colluders) == (None,) * 6
    assert plan.configured({**config, "evaluate-every": 5, "clients": 7, "name": "x"}).evaluate_every == 5


# ------------------------------------------------------------------------------------------------ 11: one server in one folder


def test_a_second_run_into_one_folder_is_refused_before_it_touches_anything(tmp_path):
    grid = federation(some_data(), softmax)
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(folder / LOCK, wait=False), pytest.raises(ConfigError, match="Another process works in"):
        run(grid, folder=folder)
    assert [file.name for file in folder.iterdir()] == [LOCK]
    seen = []

    class Second(Observer):
        def on_round(self, report):
            before = {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
            with pytest.raises(ConfigError, match="Another process works in"):
                run_app(server_app(eq.Algorithm(), model=softmax, rounds=1, clients_per_round=4, folder=folder), grid)
            seen.append(before == {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()})

    run(grid, rounds=1, folder=folder, observers=[Second()])
    assert seen == [True]


def test_a_second_run_is_refused_while_the_first_waits_for_its_nodes(tmp_path):
    """Before, the second one took the folder, and the first one failed when all its nodes were there."""
    grid, folder = federation(some_data(), softmax), tmp_path / "run"
    refused: list[str] = []

    def begin_another(delivery):
        if delivery.action == "query.hello" and not refused:
            before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
            second = server_app(eq.Algorithm(), model=softmax, rounds=1, clients_per_round=4, folder=folder)
            with pytest.raises(ConfigError, match="Another process works in") as failure:
                second(grid=federation(some_data(), softmax), context=Context(7, 1, {}, RecordDict(), {}))
            refused.append(str(failure.value))
            assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        return delivery.answer()

    grid.fault = begin_another
    assert run(grid, rounds=1, folder=folder).history.rounds[0].trained == 4
    assert len(refused) >= 1


# --------------------------------------------------------------------------------------------------------- 13: counts and logs


def test_counts_and_logs_tell_who_was_left_out_and_what_was_tried_again(tmp_path, caplog):
    grid = federation(some_data(), softmax)

    def fault(delivery):
        if delivery.action == "train.update" and delivery.round == 1 and delivery.count == 2:
            return None  # nobody answers, once
        wrong = delivery.client == BAD and delivery.round == 0 and delivery.action == "train.update"
        return 1 / 0 if wrong else delivery.answer()

    grid.fault = fault
    with caplog.at_level("INFO", "flwr"):
        found = run(grid, rounds=2, minimum=2, retries=1, folder=tmp_path / "run")
    first, second = found.history.rounds
    assert (first.trained, second.trained) == (3, 4)
    assert len(second.failed_tries) == 1
    logged = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [event["failed_tries"] for event in logged if event["event"] == "round"] == [[], list(second.failed_tries)]
    assert "It is tried again in 1 s." in caplog.text
    assert "3 trained" in caplog.text
    times = [event["time"] for event in events(tmp_path / "run")]
    assert all(time.endswith("Z") for time in times)
    assert [event["event"] for event in events(tmp_path / "run")][-1] == "finished"


def test_a_rejected_client_is_in_the_log(caplog):
    from test_flower_faults import NAN, altered, swap_update

    grid = federation(some_data(), softmax)
    bad = lambda d: d.client == BAD and d.action == "train.update"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), swap_update(data=NAN)) if bad(d) else d.answer()
    with caplog.at_level("WARNING", "flwr"), pytest.warns(EquipoiseNotice):
        assert run(grid, rounds=1).history.rounds[0].trained == 3
    assert "without the update of client-2" in caplog.text


def test_a_finished_run_can_be_extended(tmp_path):
    """Two rounds and then two more are four rounds, bit for bit."""
    whole = run(federation(some_data(), softmax), rounds=4)
    run(federation(some_data(), softmax), rounds=2, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="has ended"):
        run(federation(some_data(), softmax), rounds=2, folder=tmp_path / "run")
    with pytest.warns(EquipoiseNotice, match="Going on from round 2"):
        found = run(federation(some_data(), softmax), rounds=4, folder=tmp_path / "run")
    assert torch.equal(found.params, whole.params)
    assert len(found.history.rounds) == 4
    assert "rounds = 4" in (tmp_path / "run" / "config.toml").read_text()


# ----------------------------------------------------------------------------------------------------------- control and status


class Orders(Observer):
    def __init__(self, folder: Path, at: int, **order: object) -> None:
        self.folder, self.at, self.order = folder, at, order

    def on_round(self, report) -> None:
        if report.round == self.at:
            give_order(self.folder, **self.order)


def test_a_run_is_stopped_and_goes_on_and_is_extended_meanwhile(tmp_path):
    folder = tmp_path / "run"
    whole = run(federation(some_data(), softmax), rounds=5)
    with pytest.raises(StoppedByOperator):
        run(federation(some_data(), softmax), rounds=3, folder=folder, observers=[Orders(folder, 1, state="stop")])
    assert RunView(folder).read()["exit_code"] == 3
    with pytest.warns(EquipoiseNotice, match="Going on"):
        found = run(federation(some_data(), softmax), rounds=3, folder=folder, observers=[Orders(folder, 2, rounds=5)])
    assert torch.equal(found.params, whole.params)
    about = RunView(folder).read()
    assert (about["state"], about["round"], about["exit_code"]) == ("finished", 5, 0)
    assert {name: entry["rounds"] for name, entry in about["clients"].items()} == {f"client-{k}": 5 for k in range(4)}


def test_log_events_and_status_count_rounds_from_one(tmp_path, caplog):
    """Users see one convention; the record of a round, in rounds.jsonl and in Python, keeps its index."""
    folder = tmp_path / "run"
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.client == BAD and d.action == "train.update" and d.round == 1 else d.answer()
    with caplog.at_level("INFO", "flwr"):
        found = run(grid, rounds=3, folder=folder, timeout=0.5)
    logged = [int(number) for number in re.findall(r"Round (\d+): loss", caplog.text)]
    assert logged == [event["round"] for event in events(folder) if event["event"] == "round"] == [1, 2, 3]
    assert re.findall(rf"Round (\d+) goes on without {BAD}", caplog.text) == ["2"]
    assert RunView(folder).read()["round"] == 3
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [event for event in events(folder) if event["event"] == "round"]
    assert [(event["clients_trained"], event["clients_drawn"]) for event in rounds] == [(4, 4), (3, 4), (4, 4)]
    assert all(event["trained"] == event["clients_trained"] for event in rounds)  # the name of earlier versions
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.client == BAD and d.action == "train.losses" else d.answer()
    run(grid, eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5)), rounds=1, folder=tmp_path / "tail", timeout=0.5)
    (event,) = [event for event in events(tmp_path / "tail") if event["event"] == "round"]
    assert (event["clients_drawn"], event["cohort"]) == (4, 3)  # one was drawn, and failed before it could train
    assert [line["round"] for line in lines if line["event"] == "round"] == [r.round for r in found.history.rounds] == [0, 1, 2]


@pytest.mark.parametrize("rounds", [3, 5])
def test_a_stopped_run_ends_with_other_rounds_and_its_record_can_be_read(tmp_path, rounds):
    """The folder's configuration once kept the first number of rounds, and its log seemed damaged."""
    folder = tmp_path / "run"
    with pytest.raises(StoppedByOperator):
        run(federation(some_data(), softmax), rounds=4, folder=folder, observers=[Orders(folder, 1, state="stop")])
    with pytest.warns(EquipoiseNotice, match="Going on"):
        run(federation(some_data(), softmax), rounds=rounds, folder=folder)
    assert read_record(folder).rounds == rounds


def test_a_federation_without_a_number_of_clients_per_round_asks_all_of_them():
    """0 in the run's configuration stands for None, also where the app says a number."""
    found: list[eq.Result] = []
    app = server_app(eq.Algorithm(), model=softmax, rounds=1, clients_per_round=2, seed=3, on_result=found.append)
    run_app(app, federation(some_data(), softmax), **{"clients-per-round": 0, "clients": 4})
    assert found[0].history.rounds[0].cohort == 4


def test_a_paused_run_waits_and_goes_on(tmp_path):
    import threading

    folder = tmp_path / "run"
    folder.mkdir(parents=True)
    grid = federation(some_data(), softmax)
    states = []

    def watch():
        import time

        for _ in range(2000):
            with suppress(ConfigError):
                states.append(RunView(folder).read()["state"])
            if states and states[-1] == "paused":
                give_order(folder, state="run")
                return
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = run(grid, rounds=3, folder=folder, observers=[Orders(folder, 0, state="pause")])
    watcher.join()
    assert states[-1] == "paused"
    assert found.rounds == 3


def test_status_page_and_metrics_tell_of_faults_and_alerts(tmp_path):
    folder = tmp_path / "run"
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: 1 / 0 if d.client == BAD and d.action == "train.update" else d.answer()
    run(grid, rounds=4, folder=folder)
    view = RunView(folder)
    about = view.read()
    assert about["exit_code"] == 4  # finished, with an alert
    assert about["alerts"][0]["client"] == BAD
    assert "has failed in 4 rounds in a row" in about["alerts"][0]["text"]
    assert about["clients"][BAD]["failed"] == 4
    assert about["clients"]["client-0"]["versions"]["torch"] == torch.__version__
    assert 'equipoise_client_failed_total{client="client-2"} 4' in view.metrics()
    assert "failed in 4 rounds in a row" in view.page()
    assert any(BAD in line for line in view.lines())
    assert (folder / "status.json").stat().st_mode & 0o777 == 0o600
    assert (folder / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_nodes_are_named_in_log_and_status_also_when_a_run_goes_on(tmp_path, caplog):
    """An operator knows sites, and Flower numbers: a node that has not yet said who it is has the name that it had before."""
    folder = tmp_path / "run"
    run(federation(some_data(), softmax), rounds=1, folder=folder)
    view = RunView(folder)
    assert view.read()["clients"][BAD]["node"] == "102"
    assert any(line.startswith(BAD) and " 102" in line for line in view.lines())
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: 1 / 0 if d.client == BAD else d.answer()
    with caplog.at_level("WARNING", "flwr"), pytest.warns(EquipoiseNotice):
        run(grid, rounds=2, minimum=3, folder=folder)
    assert f"Not taking part: {BAD} (node 102): failed: " in caplog.text


def test_seconds_and_bytes_of_the_status_are_those_of_the_last_round(tmp_path):
    folder = tmp_path / "run"
    run(federation(some_data(), softmax), rounds=3, folder=folder)
    entry = RunView(folder).read()["clients"][BAD]
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["event"] == "round"][-1]
    assert [entry["last_sent"], entry["last_received"]] == last["bytes_by_client"][BAD]
    assert entry["sent"] > 2 * entry["last_sent"] > 0


def test_under_protection_the_status_holds_no_scores(tmp_path):
    folder = tmp_path / "run"
    private = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
    run(federation(some_data(), softmax), private, rounds=1, folder=folder)
    text = (folder / "status.json").read_text() + (folder / "events.jsonl").read_text()
    assert '"loss"' not in text
    assert '"error"' not in text
