"""What a server that does not follow the protocol tries on signed sums: its own keys, two lists of survivors, lies."""

from __future__ import annotations

import json
import logging
import stat

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fake_grid import FakeGrid, federation, run_app, splits_of
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.flower_commands import app as commands
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import client_app, server_app
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.secure import sum_messages
from equipoise.engines.flower.secure.identities import (
    Identity,
    default_colluders,
    read_identity,
    signed_threshold,
    write_identity,
)
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.masking_server import MaskingServer
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.engines.flower.transport import messages
from equipoise.errors import ConfigError, IncompatibleParts, InvalidParameter
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
NAMES = tuple(f"node-{k}" for k in range(7))
SUBJECT = b"s" * 32


class Sum:
    """A signed sum of seven clients; `send` hands a request to a client as the protocol would, or as the server likes."""

    def __init__(self, colluders=None, threshold=None, fewest=None):
        self.keys = {name: Ed25519PrivateKey.generate() for name in NAMES}
        self.public = {name: key.public_key().public_bytes_raw() for name, key in self.keys.items()}
        colluders = default_colluders(7) if colluders is None else colluders
        threshold = threshold or signed_threshold(7, colluders)
        self.terms = SumTerms("run", 0, "update", NAMES, 3, 2**32, threshold, fewest or threshold, colluders=colluders)
        self.server = MaskingServer(self.terms, self.public)
        self.requests = self.server.start()
        self.clients = {name: MaskingClient(self.requests[name], name, self.identity(name)) for name in NAMES}
        self.answers = {name: client.keys() for name, client in self.clients.items()}

    def identity(self, name):
        return Identity(self.keys[name], {other: key for other, key in self.public.items() if other != name})

    def step(self, subjects=None, silent=()):
        """The next exchange; the kind of the requests."""
        self.requests = self.server.advance(self.answers)
        self.answers = {
            name: self.clients[name].answer(request, np.full(3, 1), (subjects or {}).get(name, SUBJECT))
            for name, request in self.requests.items() if name not in silent
        }  # fmt: skip
        return sum_messages.read_kind(next(iter(self.requests.values())))


def test_a_signed_sum_is_the_sum_also_of_those_that_are_left():
    one = Sum()
    kinds = [one.step(), one.step(silent=["node-1"]), one.step(), one.step(silent=["node-2"])]
    assert kinds == [MessageKind.ROSTER, MessageKind.INBOX, MessageKind.CONFIRM, MessageKind.SURVIVORS]
    assert one.server.advance(one.answers) == {}
    assert one.server.total.tolist() == [6, 6, 6]
    assert set(one.server.faults) == {"node-1", "node-2"}


def test_thresholds_leave_no_room_for_two_lists():
    for clients in range(2, 40):
        for colluders in range(clients):
            threshold = signed_threshold(clients, colluders)
            assert 2 * threshold > clients + colluders  # honest ones sign once, colluders twice
            assert 2 * (threshold - 1) <= clients + colluders
        assert 3 * default_colluders(clients) < clients
    with pytest.raises(InvalidParameter, match="threshold"):
        SumTerms("run", 0, "update", NAMES, 3, 2**32, 4, 5, colluders=2)  # 2 · 4 is not more than 7 + 2


def test_the_masks_by_keys_of_the_servers_own():
    """A server that puts its own keys in the place of a client's could open all letters to it."""
    one = Sum()
    forged = MaskingClient(
        one.requests["node-3"], "node-3", Identity(Ed25519PrivateKey.generate(), one.identity("node-3").peers)
    )
    one.server.identities = {}  # a server that does not mind
    one.answers["node-3"] = forged.keys()
    one.requests = one.server.advance(one.answers)
    with pytest.raises(sum_messages.NotSigned, match="'node-3' do not have its signature"):
        one.clients["node-0"].answer(one.requests["node-0"])
    honest = Sum()
    honest.answers["node-3"] = honest.answers["node-3"][:-1] + bytes([honest.answers["node-3"][-1] ^ 1])
    honest.server.advance(honest.answers)
    assert isinstance(honest.server.faults["node-3"], sum_messages.NotSigned)  # left out before the others refuse the sum


def test_the_update_by_partners_that_the_server_invents():
    names = ("node-0", "sybil-1", "sybil-2")
    one = Sum()
    terms = SumTerms("run", 0, "update", names, 3, 2**32, 2, 2, colluders=0)
    with pytest.raises(sum_messages.RefusedTerms, match="does not know the keys of sybil-1, sybil-2"):
        MaskingClient(terms.invitation, "node-0", one.identity("node-0"))
    plain = SumTerms("run", 0, "update", names, 3, 2**32, 2, 2)
    with pytest.raises(sum_messages.RefusedTerms, match="signed sums only"):
        MaskingClient(plain.invitation, "node-0", one.identity("node-0"))
    weak = SumTerms("run", 0, "update", NAMES, 3, 2**32, 4, 4, colluders=0)
    with pytest.raises(sum_messages.RefusedTerms, match="withstands 0 colluders, and 'node-0' demands 2"):
        MaskingClient(weak.invitation, "node-0", one.identity("node-0"))


def test_both_shares_of_a_client_by_two_lists_of_survivors():
    """Half of the clients are told that node-6 survived, the others that it left: shares of both its secrets would come out."""
    one = Sum()
    one.step()
    one.step()
    one.requests = one.server.advance(one.answers)  # all have survived
    told = sum_messages.pack_names(NAMES[:6]), sum_messages.pack_names(NAMES[6:])
    proof_of_subject = one.terms.read(one.requests["node-0"], MessageKind.CONFIRM, 3)[2]
    another = one.terms.write(MessageKind.CONFIRM, *told, proof_of_subject)
    lists = {name: another if name in NAMES[:3] else one.requests[name] for name in NAMES}
    signed = {name: one.clients[name].answer(lists[name]) for name in NAMES}
    proof = {name: (one.terms.read(message, MessageKind.SIGNED, 3)[2],) for name, message in signed.items()}
    table = sum_messages.pack_table(proof)
    for name, (alive, gone) in (("node-0", (NAMES[:6], NAMES[6:])), ("node-5", (NAMES, ()))):
        lie = one.terms.write(MessageKind.SURVIVORS, sum_messages.pack_names(alive), sum_messages.pack_names(gone), table)
        with pytest.raises(sum_messages.RefusedToReveal, match=r"[34] clients signed the same survivors"):
            one.clients[name].answer(lie)
    # A list other than the one that was signed is not answered, nor is a second one signed.
    with pytest.raises(sum_messages.RefusedToReveal, match="has signed another list"):
        one.clients["node-0"].answer(one.terms.write(MessageKind.SURVIVORS, *one.server._survivors_and_gone(), table))
    with pytest.raises(sum_messages.OutOfOrder):
        one.clients["node-0"].answer(lists["node-5"])


def test_the_update_of_a_client_by_asking_the_others_something_else():
    """One client gets the model, the others a request for which their updates are known, such as a step of 0.

    All others agree, and could unmask the sum without the one: so each looks whether *all* have signed what it was sent.
    """
    one = Sum()
    one.step()
    one.step(subjects=dict.fromkeys(NAMES[1:], b"o" * 32))
    with pytest.raises(sum_messages.LostSecret, match="'node-0' were sent something else"):
        one.server.advance(one.answers)  # a server that does not mean to
    one.server.survivors = NAMES  # and one that does
    table = sum_messages.pack_table({name: (signature,) for name, (_, signature) in one.server._subjects.items()})
    request = one.terms.write(MessageKind.CONFIRM, *one.server._survivors_and_gone(), table)
    for name in NAMES:
        with pytest.raises(sum_messages.RefusedToReveal, match="has not signed that it was sent the model"):
            one.clients[name].answer(request)


def test_a_client_reveals_once_and_its_state_survives_between_messages():
    one = Sum()
    for _ in range(4):
        one.step()
        one.clients = {name: MaskingClient.load(c.save(), one.identity(name)) for name, c in one.clients.items()}
    for client in one.clients.values():
        assert client._held == {}
        with pytest.raises(sum_messages.OutOfOrder):
            client.answer(one.requests[client.me])
    one.server.advance(one.answers)
    assert one.server.total.tolist() == [7, 7, 7]


# ------------------------------------------------------------------------------------------------------------- in a federation

DATA = FederatedData(make_clients([6, 9, 12, 15]), test=make_clients([5, 9, 14, 3], seed=1), name="four")
TAIL = eq.Algorithm(
    risk=eq.risk.Superquantile(0.5, quantile=eq.privacy.SecureHistogram(bound=2.0, bins=64)),
    privacy=eq.privacy.SecureAggregation(),
)


def softmax():
    return eq.models.Softmax(4, 3)


def signed_federation(folder, *, crowd=3):
    """A grid of four nodes, each with a key and the keys of the others, exchanged by their owners."""
    public = {name: write_identity(folder / name) for name in DATA.train.ids}
    apps = {}
    for name in public:
        peers = folder / f"{name}.toml"
        peers.write_text("".join(f'"{other}" = "{key}"\n' for other, key in public.items() if other != name))
        policy = NodePolicy(minimum_crowd=crowd, key=str(folder / name), peers=str(peers))
        apps[name] = client_app(model=softmax, load_data=lambda _, name=name: splits_of(DATA, name), policy=policy)
    return FakeGrid(apps)


def run(algorithm, grid, **options):
    found = []
    options = {"timeout": 30.0, "retries": 0, "seed": 3, "signed": True, **options}
    app = server_app(algorithm, model=softmax, rounds=2, clients_per_round=4, on_result=found.append, **options)
    run_app(app, grid)
    return found[0]


@pytest.mark.usefixtures("batches_of_the_simulation")
def test_a_signed_run_is_that_of_the_simulation(tmp_path):
    grid = signed_federation(tmp_path)
    found = run(TAIL, grid)
    wanted = eq.train(lambda seed: softmax(), DATA, TAIL, rounds=2, clients_per_round=4, seed=3, engine="loop")
    assert float((found.params - wanted.params).abs().max()) < 2e-6
    assert found.clients.client == ("mean of 4 clients", "mean of 4 clients")
    assert "train.confirm" in {action for _, action, _ in grid.log}


@pytest.mark.parametrize("what", ["another model", "another weight", "weights of zero for the others"])
def test_the_server_isolates_a_node_by_what_it_sends(tmp_path, what):
    """Requests are changed on their way, as a server would: the round has no sum, and nobody reveals anything."""
    grid = signed_federation(tmp_path)

    def tampered(delivery):
        message = delivery.message
        if delivery.action != "train.masked" or '"kind":"update"' not in message.content["call"]["values"]:
            return delivery.answer()
        values, arrays = messages.read_message(message.content).values, dict(message.content["tensors"])
        if what == "another model" and delivery.client != "client-0":
            arrays["params"] = messages.tensor_to_array(torch.full((15,), 0.5))
        if what == "another weight" and delivery.client != "client-0":
            values["each"]["client-0"]["sum"] = {**values["sum"], "base": 0.5}
        if what == "weights of zero for the others":
            bases = {name: float(name == "client-0") for name in DATA.train.ids}
            values["each"] = {name: {"sum": {**values["sum"], "base": base}} for name, base in bases.items()}
        call = ConfigRecord({**message.content["call"], "values": json.dumps(values)})
        message.content = RecordDict({"call": call, "tensors": ArrayRecord(arrays)})
        return delivery.answer()

    grid.fault = tampered
    with pytest.raises(eq.errors.EquipoiseError):
        run(TAIL, grid)
    revealed = [reply for _, action, reply in grid.replies if action in ("train.confirm", "train.reveal")]
    assert revealed  # of the histogram, which was not tampered with
    assert not any("sum.update" in reply.content["tensors"] for reply in revealed)


def test_runs_and_nodes_must_both_be_signed(tmp_path):
    with pytest.raises(IncompatibleParts, match="take part in signed sums only"):
        run(TAIL, signed_federation(tmp_path), signed=False)
    with pytest.raises(IncompatibleParts, match="have no key to sign sums with"):
        run(TAIL, federation(DATA, softmax))
    with pytest.raises(IncompatibleParts, match="signed=True is for secure sums"):
        run(eq.Algorithm(), federation(DATA, softmax))


# ------------------------------------------------------------------------------------------------------------------- key files


def test_keys_are_made_once_and_read_by_their_owner_alone(tmp_path):
    said = CliRunner().invoke(commands, ["key", str(tmp_path / "keys" / "hospital-a")])
    assert said.exit_code == 0
    key, peers = tmp_path / "keys" / "hospital-a", tmp_path / "peers.toml"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    peers.write_text(said.output)
    identity = read_identity(key, peers, 1)
    assert identity.peers == {"hospital-a": identity.public}
    assert identity.has_signed("hospital-a", b"text", identity.sign(b"text"))
    assert not identity.has_signed("hospital-a", b"other", identity.sign(b"text"))
    with pytest.raises(ConfigError, match="is there already"):
        write_identity(key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_identity(key, peers)
    key.chmod(0o600)
    peers.write_text('a = "short"')
    with pytest.raises(ConfigError, match="The key of 'a' must be 32 bytes"):
        read_identity(key, peers)
    peers.write_text("[")
    with pytest.raises(ConfigError, match="cannot be read: it is not valid TOML"):
        read_identity(key, peers)
    with pytest.raises(ConfigError, match="none does not exist"):
        read_identity(tmp_path / "none", peers)
