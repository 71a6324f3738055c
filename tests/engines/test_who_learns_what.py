"""The cells of "Who learns what" (docs/privacy.md) that are about messages: what travels beside what the table says?"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from dataclasses import replace

import httpx
import pytest
import torch
from fake_grid import federation, run_app
from killed_federation import DELTA, private_tail

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.run_control import give_order
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.engines.flower.transport.messages import read_message
from equipoise.errors import CheckpointError, EquipoiseNotice
from equipoise.privacy.ledger import read_entries
from equipoise.serve.guard import Access
from equipoise.serve.status_server import status_app
from equipoise.types import Observer
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
P, CLIENTS = eq.privacy, 6


def softmax():
    return eq.models.Softmax(4, 3)


def some_data(spoil=None):
    """Clients of equal size; `spoil` has other examples in one of them."""
    made = make_clients([8] * CLIENTS, features=4, classes=3)
    if spoil is not None:
        x, y, rows = made.x.clone(), made.y.clone(), slice(int(made.offsets[spoil]), int(made.offsets[spoil + 1]))
        x[rows], y[rows] = 7 - 3 * x[rows], (y[rows] + 1) % 3
        made = replace(made, x=x, y=y)
    return FederatedData(made, name="some")


def run(algorithm, data=None, grid=None, *, rounds=2, **options):
    grid, found = grid or federation(data or some_data(), softmax), []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 5, "clients": CLIENTS, **options}
    options.setdefault("clients_per_round", CLIENTS)
    run_app(server_app(algorithm, model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[-1] if found else None, grid


FULL = eq.sampling.Full()
TAIL = eq.risk.Superquantile(0.5)
HISTOGRAM = eq.risk.Superquantile(0.5, quantile=P.SecureHistogram(bound=2.0, bins=4))
CENTRAL = P.DifferentialPrivacy(None, DELTA, 1.0, noise_multiplier=1.0, method="rdp")
KINDS = {
    "FedAvg": eq.Algorithm(),
    "tail": eq.Algorithm(risk=TAIL),
    "secure sums": eq.Algorithm(risk=HISTOGRAM, privacy=P.SecureAggregation()),
    "central noise": eq.Algorithm(privacy=CENTRAL, sampler=FULL),
    "distributed noise": replace(private_tail(), sampler=FULL),
    "coins of nodes": replace(private_tail(), sampler=eq.sampling.NodePoisson()),
}


# ---------------------------------------------------------------------------------------------------------------- the server


@pytest.mark.parametrize("kind", ["FedAvg", "tail", "central noise"])
def test_what_a_node_sends_beside_its_loss_and_its_update(kind):
    """In the open a server gets losses, updates and scores, and nothing else: no example, no label, no count of its own."""
    _, grid = run(KINDS[kind])
    sent = defaultdict(set)
    for _, action, reply in grid.replies:
        said = json.loads(reply.content["call"]["values"])
        if action == "query.hello":
            assert set(said["splits"]) == {"train"}
            continue
        assert not said
        sent[action].update((name, len(array.data)) for name, array in reply.content["tensors"].items())
    parameters = 4 * 15
    allowed = {
        "train.losses": {("loss", 8)},
        "train.update": {("loss", 8), ("update", parameters)},
        "evaluate.scores": {("train", 16)},
    }
    assert dict(sent) == {action: allowed[action] for action in sent}
    assert ("train.losses" in sent) == (kind == "tail")


@pytest.mark.parametrize("kind", ["secure sums", "distributed noise", "coins of nodes"])
def test_a_single_clients_number_under_secure_sums(kind):
    """No answer but keys, sealed shares, masked values and revealed shares, and equal numbers are masked anew in each run."""
    masked = []
    for _ in range(2):
        _, grid = run(KINDS[kind], rounds=1)
        masked.append({})
        for client, action, reply in grid.replies:
            if action == "query.hello":
                continue
            assert action in ("train.keys", "train.shares", "train.masked", "train.reveal")
            assert json.loads(reply.content["call"]["values"]) == {}
            assert all(name.startswith("sum.") for name in reply.content["tensors"])
            if action == "train.masked":
                for name, array in reply.content["tensors"].items():
                    masked[-1][client, name] = array.data[-24:]  # behind the tag; masks are as large as the numbers' range
    assert masked[0].keys() == masked[1].keys()
    assert all(data != masked[1][key] for key, data in masked[0].items())
    assert len(set(masked[0].values())) == len(masked[0])


# ------------------------------------------------------------------------------------------------------------- other nodes


def seen_by(grid, client):
    """What a node is asked, without what is drawn anew in every run: action, values, and names and sizes of tensors."""
    seen = []
    for who, message in grid.sent:
        if who == client:
            values = json.loads(message.content["call"]["values"])
            for drawn in ("seed", "run", "alias", "model"):
                values.pop(drawn, None)
            released = [values.get("sum", {}).pop(name, None) for name in ("public", "kept")]
            tensors = {name: len(array.data) for name, array in message.content["tensors"].items()}
            params = message.content["tensors"]["params"].data if "params" in tensors else b""
            seen.append((message.metadata.message_type, message.metadata.group_id, values, tensors, params, released))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_node_learns_of_anothers_data(kind):
    """With other examples in one client, what another node is asked differs by the model, the quantile and its count alone.

    In the open it also differs by whether that node is asked for its update: a node is told whether it is in the tail itself.
    Neither the quantile nor the count of the tail goes to nodes in the open, nor the count under differential privacy.
    """
    one, other = (seen_by(run(KINDS[kind], some_data(spoil))[1], "client-0") for spoil in (None, 3))
    if kind == "tail":
        one, other = ([each for each in seen if each[0] != "train.update"] for seen in (one, other))
    assert [each[:4] for each in one] == [each[:4] for each in other]
    models = [[each[4] for each in seen if each[4]] for seen in (one, other)]
    assert models[0][0] == models[1][0]  # the first model is the same
    assert models[0][1:] != models[1][1:]  # later ones tell that the data differ: otherwise nothing was tried
    released = [each[5] for each in one]
    if kind in ("FedAvg", "tail", "central noise"):
        assert all(each == [None, None] for each in released)
    elif kind != "secure sums":
        assert all(kept is None for _, kept in released)


# --------------------------------------------------------------------------------------------------- when a run is not straight


class Order(Observer):
    """Gives a run's operator's order after a round."""

    def __init__(self, folder, at, **order):
        self.folder, self.at, self.order = folder, at, order

    def on_round(self, report):
        if report.round == self.at:
            give_order(self.folder, **self.order)


@pytest.mark.parametrize("kind", ["central noise", "distributed noise", "coins of nodes"])
@pytest.mark.parametrize("meanwhile", [True, False], ids=["meanwhile", "after its end"])
def test_more_rounds_than_the_noise_was_made_for(kind, meanwhile, tmp_path):
    """A private run is not extended: its noise was set for its rounds. Nothing is asked of any node in the try."""
    folder, grid = tmp_path / "run", federation(some_data(), softmax)
    watch = {"observers": [Order(folder, 0, rounds=4)]} if meanwhile else {}
    with pytest.raises(CheckpointError, match="rounds") if meanwhile else pytest.MonkeyPatch.context():
        run(KINDS[kind], grid=grid, folder=folder, **watch)
    if not meanwhile:
        grid.new_run()
        with pytest.raises(CheckpointError, match="rounds"):
            run(KINDS[kind], grid=grid, folder=folder, rounds=4)
    assert max(t for _, action, t in grid.log if action.startswith("train.")) <= 2  # 2: the evaluation after the last round
    assert {e.round for e in read_entries(folder / "ledger.jsonl") if e.kind == "release"} == {0, 1}


def test_a_round_again_by_stopping_and_going_on(tmp_path):
    """Stopped by its operator and begun again, a run asks for each sum once."""
    folder, grid = tmp_path / "run", federation(some_data(), softmax)
    with pytest.raises(Exception, match=r"stop|Stop"):
        run(KINDS["distributed noise"], grid=grid, folder=folder, rounds=3, observers=[Order(folder, 0, state="stop")])
    give_order(folder, state="run")
    grid.new_run()
    with pytest.warns(EquipoiseNotice, match="Going on"):
        found, _ = run(KINDS["distributed noise"], grid=grid, folder=folder, rounds=3)
    assert found.privacy.releases == 6
    reveals = [(client, t) for client, action, t in grid.log if action == "train.reveal" and t < 3]
    assert len(reveals) == 2 * 3 * CLIENTS
    entries = [(e.round, e.purpose) for e in read_entries(folder / "ledger.jsonl") if e.kind == "release"]
    assert len(entries) == len(set(entries)) == 6


def test_a_latecomers_data_in_a_private_run(tmp_path):
    """A node that comes after a private run has begun is asked for nothing in it: noise and rates were set without it."""
    data = some_data()
    grid = federation(data, softmax)
    grid.offline = {"client-5"}

    class Comes(Observer):
        def on_round(self, report):
            grid.offline = set()

    algorithm = replace(private_tail(), sampler=FULL)
    found, _ = run(algorithm, grid=grid, rounds=3, clients=5, clients_per_round=5, folder=tmp_path / "run", observers=[Comes()])
    assert {action for client, action, _ in grid.log if client == "client-5"} <= {"query.hello", "query.left_out"}
    told = [read_message(reply.content) for client, action, reply in grid.replies if action == "query.left_out"]
    assert [(answer.values, answer.arrays, answer.data) for answer in told] == [({}, {}, "")]  # told why, it says nothing
    assert found.privacy.releases == 6
    assert torch.isfinite(found.params).all()


# --------------------------------------------------------------------------------------------------------- the operator's page


@pytest.mark.parametrize("kind", ["FedAvg", "central noise"])
def test_who_took_part_from_the_status_page_of_a_private_federation(kind, tmp_path):
    """Whoever reaches the port of `status --serve` reads it; the operator's own command reads a file of the operator's."""
    folder = tmp_path / "run"
    run(KINDS[kind], folder=folder)
    give = RunView(folder).read()
    assert {entry["rounds"] for entry in give["clients"].values()} == {2}
    assert (folder / "status.json").stat().st_mode & 0o077 == 0
    assert (folder / "events.jsonl").stat().st_mode & 0o077 == 0
    give["alerts"], give["text"] = [{"time": "now", "client": "client-3", "text": "failed three times"}], "client-3 failed"
    (folder / "status.json").write_text(json.dumps(give))
    transport = httpx.ASGITransport(status_app(RunView(folder), Access(frozenset({"operator"}))))

    async def ask(page):
        async with httpx.AsyncClient(transport=transport, base_url="http://operator") as client:
            return await client.get(page)

    for page in ("/", "/metrics", "/status.json"):
        answer = asyncio.run(ask(page))
        assert answer.status_code == 200
        assert ("client-3" in answer.text) == (kind == "FedAvg")
        assert "failed three times" not in answer.text or kind == "FedAvg"
