"""What a server asks of nodes whose owners do not allow it: each clause of a policy, the app that runs, and what is told."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from fake_grid import federation, run_app
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import client_app, flower_internals, server_app
from equipoise.engines.flower.apps import federated_run, node_app, owned_app
from equipoise.engines.flower.apps.node_ledger import BudgetSpent, NodeLedger
from equipoise.engines.flower.apps.node_policy import NodePolicy, PolicyRefusal, noise_multiplier_of, read_policy
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.masking_server import MaskingServer
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.engines.flower.transport import messages
from equipoise.errors import ConfigError, EquipoiseNotice
from equipoise.privacy.private_quantile import client_contributions
from equipoise.privacy.random_source import SystemSource
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
P = eq.privacy
DATA = FederatedData(make_clients([6, 9, 12, 15]), test=make_clients([5, 9, 14, 3], seed=1), name="four")
OPEN = NodePolicy(only_sums=False, minimum_crowd=2)


def softmax():
    return eq.models.Softmax(4, 3)


def run(algorithm, policy, *, rounds=1, keep=None, **options):
    found, grid = [], federation(DATA, softmax, policy=policy, keep=keep)
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients_per_round": 4, **options}
    run_app(server_app(algorithm, model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[0], grid


def private(noise, *, risk=None, clip=0.5):
    return eq.Algorithm(
        risk=risk or eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=4)), sampler=eq.sampling.Uniform(),
        privacy=P.DifferentialPrivacy(None, 1e-2, clip, noise_multiplier=noise, noise="distributed"),
    )  # fmt: skip


SECURE = eq.Algorithm(privacy=P.SecureAggregation())
TAIL = eq.Algorithm(
    risk=eq.risk.Superquantile(0.5, quantile=P.SecureHistogram(bound=2.0, bins=1024)), privacy=P.SecureAggregation()
)  # fmt: skip
NOISY = NodePolicy(noise_multiplier=0.5, evaluate=False)
ASKED = {  # the policy, an algorithm that it allows, one that it does not, and the reason
    "noise": (NOISY, private(4.0), private(0.2, risk=eq.risk.Mean()), "noise multiplier"),
    "noise at all": (NOISY, private(4.0), SECURE, "has noise_multiplier = 0.5, which demands noise"),
    "clip": (NodePolicy(clip=0.5), private(4.0), private(4.0, risk=eq.risk.Mean(), clip=0.6), "clipped to 0.6"),
    "clip at all": (NodePolicy(clip=0.5), private(4.0), SECURE, "has clip = 0.5, which demands a clip bound"),
    "parts": (
        NodePolicy(parts=("risk.mean", "aggregator.weighted_mean", "solver.sgd")), SECURE, TAIL, "the part risk.superquantile",
    ),
    "parts in parts": (
        NodePolicy(parts=("risk.superquantile", "aggregator.weighted_mean", "solver.sgd", "quantile.private")), private(1.0),
        TAIL, "the part quantile.secure_histogram",
    ),
}  # fmt: skip


def test_a_refusal_of_single_values_names_the_key_that_the_owner_wrote():
    with pytest.raises(PolicyRefusal, match="The policy has epsilon = 3, which demands noise, and a single update or loss has"):
        NodePolicy(only_sums=False, epsilon=3.0).check_single()
    with pytest.raises(PolicyRefusal, match=r"has noise_multiplier = 0\.5, clip = 2, which demands noise"):
        NodePolicy(only_sums=False, noise_multiplier=0.5, clip=2.0).check_single()


def test_one_owner_who_allows_sums_alone_does_not_stop_the_others(tmp_path, caplog):
    """His node refuses, like one whose policy demands noise; the run goes on if `minimum` clients are left."""

    def go_on(algorithm, **options):
        grid = federation(DATA, softmax, policy=OPEN)
        grid.apps[102].setup.policy = NodePolicy(only_sums=True)
        options = {"timeout": 30.0, "pause": 1.0, "retries": 1, "clients": 4, "minimum": 3, **options}
        run_app(server_app(algorithm, model=softmax, rounds=2, on_result=found.append, **options), grid)

    found: list = []
    with caplog.at_level("WARNING", logger="flwr"):
        go_on(eq.Algorithm(risk=eq.risk.Superquantile(0.5)), folder=tmp_path / "run")
    said = "client-2 takes part in secure sums only, and this algorithm asks for single updates (only_sums in policy.toml)"
    assert any(f"{said}: the run goes on without it." in record.getMessage() for record in caplog.records)
    assert said in (tmp_path / "run" / "events.jsonl").read_text()
    assert [set(report.missing) for report in found[0].history.rounds] == [{"client-2"}] * 2
    assert set(found[0].clients.client) == {"client-0", "client-1", "client-3"}
    assert found[0].clients.not_evaluated["test"] == {"client-2": "allows no evaluations by its policy"}
    with pytest.raises(eq.errors.IncompatibleParts) as failure:
        go_on(eq.Algorithm(risk=eq.risk.Superquantile(0.5)), minimum=4)
    assert "3 of 4 clients are left, and minimum is 4" in str(failure.value)
    assert "Give it quantile=privacy.SecureHistogram" in str(failure.value)  # else the cure would be refused in turn


@pytest.mark.parametrize("clause", ASKED)
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_what_goes_below_the_policy_is_refused_with_the_reason_in_the_nodes_own_log(clause, caplog):
    policy, allowed, refused, reason = ASKED[clause]
    run(allowed, policy)
    with caplog.at_level("WARNING"), pytest.raises(eq.errors.EquipoiseError) as failure:
        run(refused, policy)
    assert ("PartNotAllowed" if "parts" in clause else "PolicyRefusal") in str(failure.value)
    assert reason not in str(failure.value)
    assert any(reason in record.getMessage() for record in caplog.records if record.name == "equipoise.node")


def test_the_noise_that_a_policy_counts_is_that_of_the_mechanism():
    """By hand: four shares of standard deviation 30 on a histogram of 4 bins and scale 2, which a client moves by 2√2."""
    asked = {"sigma": 30.0, "scale": 2, "bins": 4}
    assert noise_multiplier_of("histogram", asked, 4, 6) == pytest.approx(2 * 30 / (2 * 2**0.5))
    assert noise_multiplier_of("private update", {"variance": [900, 4], "norm_bound": 5.0}, 4, 9) == pytest.approx(2 * 15 / 5)
    assert noise_multiplier_of("weight", {"variance": [900, 4], "scale": 3}, 4, 1) == pytest.approx(2 * 15 / 3)
    for bad in ({}, {"variance": [1, 0], "norm_bound": 1.0}, {"variance": ["x", 1], "norm_bound": 1.0}):
        with pytest.raises(PolicyRefusal):
            noise_multiplier_of("private update", bad, 4, 9)
    assert noise_multiplier_of("private update", {"variance": [900, 4], "norm_bound": -1.0}, 4, 9) == 0


def test_exact_counts_by_noise_that_is_narrower_than_a_step(tmp_path):
    """64 shares of 1/8 have the variance of one Gaussian, which a client moves by 1; but each is 0, and so is the sum."""
    asked = {"sigma": 1 / 8, "scale": 1, "bins": 2}
    rows = client_contributions(
        torch.tensor([0.2] * 40 + [0.9] * 24), bound=1.0, bins=2, sigma=1 / 8, scale=1, source=SystemSource()
    )
    assert rows.sum(0).tolist() == [40, 24]  # a server that asks for such shares has the counts
    terms = SumTerms("run", 0, "quantile", tuple(f"c{i:02}" for i in range(64)), 2, 2**32, 33, 64)
    with pytest.raises(PolicyRefusal, match="noise multiplier of 0"):
        NodePolicy(noise_multiplier=0.5).check_sum("histogram", asked, terms)
    wide = {**asked, "sigma": 125.0, "scale": 1000}
    NodePolicy(noise_multiplier=0.5).check_sum("histogram", wide, terms)  # the same multiplier on a fine grid
    with pytest.raises(BudgetSpent):
        NodeLedger(tmp_path, "c00").check_budget(noise_multiplier_of("histogram", asked, 64, 2), 100.0, 1e-5)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_releases_beyond_the_epsilon_that_the_owner_allows(tmp_path):
    """The budget is that of one round, with a little to spare: the second is refused, and so is a sum without noise."""
    run(private(4.0), NodePolicy(epsilon=100.0, evaluate=False), keep=tmp_path / "one")
    spent = NodeLedger(tmp_path / "one", "client-0").epsilon(1e-5)
    policy = NodePolicy(epsilon=1.1 * spent, evaluate=False)
    run(private(4.0), policy, keep=tmp_path / "two")
    with pytest.raises(eq.errors.EquipoiseError, match="BudgetSpent"):  # in another run, as in the next round
        run(private(4.0), policy, keep=tmp_path / "two")
    assert spent <= NodeLedger(tmp_path / "two", "client-0").epsilon(1e-5) <= 1.1 * spent
    with pytest.raises(eq.errors.EquipoiseError, match="PolicyRefusal"):
        run(SECURE, policy, keep=tmp_path / "three")


@pytest.mark.parametrize("demand", [{"epsilon": 100.0}, {"noise_multiplier": 0.5}], ids=["epsilon", "noise"])
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_a_policy_that_demands_noise_refuses_exact_evaluations_unless_its_owner_allows_them(demand, tmp_path):
    def exact(policy, keep):
        found, _ = run(private(4.0), policy, keep=tmp_path / keep)
        ledger = NodeLedger(tmp_path / keep, "client-0").ledger
        assert any(entry.kind == "release" for entry in ledger)  # it trained
        return found, [entry.purpose for entry in ledger if entry.kind == "exact"]

    found, purposes = exact(NodePolicy(**demand), "silent")
    assert purposes == []
    assert found.clients.client == ("not evaluated",)
    _, purposes = exact(NodePolicy(**demand, evaluate=True), "open")
    assert {"scores train", "scores test"} <= set(purposes)
    with pytest.raises(PolicyRefusal, match=r"demands noise, and an evaluation is exact.*write evaluate = true"):
        NodePolicy(**demand).check_evaluation()


def test_an_app_does_not_allow_evaluations_in_the_name_of_the_nodes_owner():
    noisy, asks = NodePolicy(epsilon=5.0), NodePolicy(evaluate=True)
    assert not asks.stricter(noisy).evaluates
    assert NodePolicy().stricter(NodePolicy(epsilon=5.0, evaluate=True)).evaluates
    assert not NodePolicy(evaluate=False).stricter(NodePolicy(epsilon=5.0, evaluate=True)).evaluates
    assert NodePolicy().stricter(NodePolicy()).evaluates


def test_a_nodes_ledger_has_what_plain_rounds_reveal(tmp_path):
    """Two rounds of a tail risk ask for a loss and perhaps an update each, and the end of the run for scores."""
    tail = eq.Algorithm(risk=eq.risk.Superquantile(0.5))
    run(tail, OPEN, rounds=2, keep=tmp_path)
    ledgers = [NodeLedger(tmp_path, f"client-{k}").ledger for k in range(4)]
    made = [[(entry.round, entry.purpose) for entry in ledger if entry.kind == "exact"] for ledger in ledgers]
    assert all({(0, "single loss"), (1, "single loss")} <= set(each) for each in made)
    assert any((1, "single update") in each for each in made)
    assert all(len([1 for _, purpose in each if purpose.startswith("evaluation shared")]) == 1 for each in made)
    assert NodeLedger(tmp_path, "client-0").epsilon(1e-5) == 0  # no ε: nothing of it has noise


def test_rounds_beyond_the_last_are_refused():
    run(SECURE, NodePolicy(rounds=2), rounds=2)
    with pytest.raises(eq.errors.EquipoiseError, match="PolicyRefusal") as failure:
        run(SECURE, NodePolicy(rounds=2), rounds=3)
    said = str(failure.value)
    assert said.count("its own log says why") == 1  # once, and not for each of four sites
    assert "It is not tried again" in said
    assert "; try again" not in said
    with pytest.raises(eq.errors.EquipoiseError, match="PolicyRefusal"):
        run(eq.Algorithm(), NodePolicy(only_sums=False, rounds=2), rounds=3)


def test_one_refusal_that_leaves_a_crowd_too_small_is_not_tried_again():
    """`minimum` would go on without the node, and the owners' crowd of four does not: another try would ask the same."""
    found, grid = [], federation(DATA, softmax, policy=NodePolicy(minimum_crowd=4))
    grid.apps[101].setup.policy = NodePolicy(minimum_crowd=4, rounds=2)
    plan = {"timeout": 30.0, "pause": 60.0, "retries": 2, "seed": 3, "clients_per_round": 4, "minimum": 3}
    with pytest.raises(eq.errors.EquipoiseError, match=r"says why\. It is not tried again") as failure:
        run_app(server_app(SECURE, model=softmax, rounds=3, on_result=found.append, **plan), grid)
    assert "Round 3" in str(failure.value)
    assert ".." not in str(failure.value)


@pytest.mark.parametrize("algorithm", [SECURE, eq.Algorithm()], ids=["sums", "plain"])
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_more_evaluations_than_the_owner_allows(algorithm, tmp_path):
    """Three rounds, an evaluation after each: three. A run with more is refused before it begins, and so is a server that asks.

    Each run has a name of its own, so that a second run may have as many.
    """
    policy = NodePolicy(only_sums=algorithm is SECURE, minimum_crowd=2, evaluations=3)
    for _ in range(2):
        run(algorithm, policy, rounds=3, evaluate_every=1, keep=tmp_path / "node")
    with pytest.raises(
        eq.errors.IncompatibleParts, match=r"4 evaluations, and the policies of client-0.*allow fewer, the strictest only 3"
    ):
        run(algorithm, policy, rounds=4, evaluate_every=1, keep=tmp_path / "node")
    run(algorithm, policy, rounds=6, evaluate_every=2, keep=tmp_path / "node")
    refused = pytest.raises(eq.errors.EquipoiseError, match="PolicyRefusal")
    with mock.patch.object(federated_run, "refuse_many_evaluations"), refused:
        run(algorithm, policy, rounds=4, evaluate_every=1, keep=tmp_path / "other")
    ledger = NodeLedger(tmp_path / "other", "client-0").ledger
    made = {entry.round for entry in ledger if "scores" in entry.purpose or "evaluation" in entry.purpose}
    assert len(made) == 3  # no more have left the node


@pytest.mark.parametrize("algorithm", [SECURE, eq.Algorithm()], ids=["sums", "plain"])
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_a_run_that_goes_on_counts_its_evaluations_and_asks_for_policies_anew(algorithm, tmp_path):
    """Eight rounds, an evaluation after 3, 6 and 8. A ninth round has a fourth: the owners must allow it."""
    limits = {"only_sums": algorithm is SECURE, "evaluations": 3}
    more = {"evaluate_every": 3, "keep": tmp_path / "nodes", "folder": str(tmp_path / "run"), "clients": 4}
    run(algorithm, NodePolicy(minimum_crowd=2, **limits), rounds=8, **more)
    with pytest.raises(
        eq.errors.IncompatibleParts, match=r"4 evaluations, 3 of them made, and the policies of .*the strictest only 3"
    ):
        run(algorithm, NodePolicy(minimum_crowd=2, **limits), rounds=9, **more)
    limits["evaluations"] = 4
    found, _ = run(algorithm, NodePolicy(minimum_crowd=3, **limits), rounds=9, **more)  # another crowd is no other data
    assert found.history.points[-1].round == 9
    ledger = NodeLedger(tmp_path / "nodes", "client-0").ledger
    made = {entry.round for entry in ledger if "scores" in entry.purpose or "evaluation" in entry.purpose}
    assert len(made) == 4


def test_a_changed_policy_takes_effect_without_a_restart_of_the_node(tmp_path, caplog):
    file, grid = tmp_path / "policy.toml", federation(DATA, softmax)
    file.write_text("only_sums = false\n")
    for app in grid.apps.values():
        owned_app.OwnedApp(policy=read_policy(file), file=file).hold(app)

    def again():
        options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients_per_round": 4, "patience": 5.0}
        run_app(server_app(eq.Algorithm(), model=softmax, rounds=1, **options), grid)

    again()
    file.write_text("only_sums = true\n")
    with pytest.raises(eq.errors.IncompatibleParts, match="take part in secure sums only"):
        again()
    file.write_text("only_sums = fal")  # an editor at work: nothing is answered
    with caplog.at_level("WARNING"), pytest.raises(eq.errors.EquipoiseError, match="ConfigError"):
        again()
    assert any("is not valid TOML" in record.getMessage() for record in caplog.records if record.name == "equipoise.node")
    file.write_text("only_sums = false\n")
    again()


def test_an_evaluation_is_counted_once_however_often_it_is_asked_for(tmp_path):
    ledger = NodeLedger(tmp_path, "a")
    for subject in ("one", "one", "two", "one"):
        ledger.begin_evaluation("run", "shared", subject, 2)
    ledger.begin_evaluation("run", "own", "one", 2)  # of the same evaluation
    with pytest.raises(PolicyRefusal, match="has had 2 evaluations, and the policy allows 2"):
        NodeLedger(tmp_path, "a").begin_evaluation("run", "shared", "three", 2)  # after a restart, too
    NodeLedger(tmp_path, "a").begin_evaluation("another run", "shared", "three", 2)


def test_invitations_to_many_evaluations_at_once_do_not_get_round_the_limit(tmp_path):
    """All are invited to before any is released: each release is counted, under one lock."""
    ledgers = [NodeLedger(tmp_path, "a") for _ in range(3)]
    for round_index, ledger in enumerate(ledgers):
        ledger.check_evaluations("run", round_index, 2)
    for split in ("train", "test"):  # two sums of one evaluation
        ledgers[0].begin("run", 0, f"scores {split}", None, evaluations=2)
    ledgers[1].begin("run", 1, "scores train", None, evaluations=2)
    with pytest.raises(PolicyRefusal):
        ledgers[2].begin("run", 2, "scores train", None, evaluations=2)


def test_the_limit_of_rounds_is_not_one_of_evaluations():
    """After the last round that the owner allows, own models are evaluated: that is no further round."""
    ditto = eq.Algorithm(personal=eq.personal.Ditto())
    found, _ = run(ditto, NodePolicy(only_sums=False, rounds=2), rounds=2)
    assert found.clients.has_own


@pytest.mark.usefixtures("batches_of_the_simulation")
def test_a_tail_that_is_smaller_than_the_owner_demands():
    """At first all losses are alike and all four clients in the tail; then there are three."""
    run(TAIL, NodePolicy(minimum_tail=3), rounds=2)
    run(TAIL, NodePolicy(minimum_tail=4), rounds=1)
    with pytest.raises(eq.errors.EquipoiseError, match="PolicyRefusal"):
        run(TAIL, NodePolicy(minimum_tail=4), rounds=2)


def test_a_run_without_evaluations_ends_with_unknown_scores():
    test = pytest.warns(EquipoiseNotice, match="test examples are not evaluated")
    with test, pytest.warns(EquipoiseNotice, match="train examples are not evaluated"):
        found, grid = run(SECURE, NodePolicy(evaluate=False))
    assert "nan" in str(found.summary())
    assert found.clients.client == ("not evaluated",)
    assert bool(found.clients.loss.isnan().all())
    assert not [1 for _, _, reply in grid.replies if any("scores" in name for name in reply.content["tensors"])]


def test_the_exact_update_by_inventing_the_partners():
    """A server that plays the other clients itself: the fewest that it may invent are the owner's word, not 2."""

    def answers(crowd):
        grid = federation(DATA, softmax, only_sums=True, minimum_crowd=crowd)
        TaskIdentity.run_id = 7
        names = ("client-0", "invented")
        server = MaskingServer(SumTerms("run", 0, "update", names, 16, 2**48, 2, 2))
        requests = server.start()
        other = MaskingClient(requests["invented"], "invented")
        parts = {"solver": "sgd", "risk": "mean", "aggregator": "weighted_mean"}
        values = {"seed": 3, "model": 3, "classes": 3, "run": "run", "first": True, "effort": None, "alias": "client-0"}
        values |= {kind: {"kind": kind, "table": {"name": name}} for kind, name in parts.items()}
        values["sum"] = {"kind": "update", "step": 2.0**-24, "public": 0.0, "kept": 0, "base": 1.0}
        replies = {"invented": other.keys()}
        for action in ("train.keys", "train.shares", "train.masked", "train.reveal"):
            tensors = {"sum.update": messages.bytes_to_tensor(requests["client-0"]), "params": torch.zeros(15)}
            message = Message(messages.write_message(0, "t", values, tensors), 100, action)
            message.metadata.__dict__["_message_id"] = "m"
            content = messages.read_message(grid.answer(100, message).content)
            if "refused" in content.values:
                return content.values["refused"]
            replies["client-0"] = content.raw_bytes("sum.update", 1 << 20)
            requests = server.advance(replies)
            if requests:
                replies = {"invented": other.answer(requests["invented"], np.zeros(16, np.int64))}
        return server.total

    assert isinstance(answers(2), np.ndarray)  # of a crowd of two one is invented
    assert answers(3) == "PolicyRefusal"


def test_a_sum_is_over_as_many_clients_as_the_owners_demand():
    """The server asks for what nodes demand: a client that leaves makes the sum too small, not smaller than allowed."""
    found, grid = [], federation(DATA, softmax, only_sums=True, minimum_crowd=4)
    grid.fault = lambda d: None if (d.client, d.action) == ("client-1", "train.masked") else d.answer()
    with pytest.raises(eq.errors.EquipoiseError, match="3 clients are left, but 4 are needed"):
        run_app(
            server_app(SECURE, model=softmax, rounds=1, clients_per_round=4, retries=0, timeout=30.0, on_result=found.append),
            grid,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ which app runs


def handed_over(choice, bundle, pushed):
    """Flower's runtime of one message, with what it does over the network replaced, and an evil bundle from the server."""
    message = Message(RecordDict({"call": ConfigRecord({})}), 100, "query.steal")
    message.metadata.__dict__["_message_id"] = "m"
    TaskIdentity.run_id, TaskIdentity.node_id = 7, 100
    context = Context(7, 100, {"client-id": "client-0"}, RecordDict(), {"file": "/etc/shadow"})
    unpacked = []
    evil = ClientApp()

    @evil.query("steal")
    def steal(message, context):
        return Message(RecordDict({"data": ConfigRecord({"patients": "all of them"})}), reply_to=message)

    handed = SimpleNamespace(run_id=7, fab_id="evil/app", fab_version="1")
    fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
    with mock.patch.multiple(
        run_clientapp, RuntimeHttpClient=mock.Mock(), HeartbeatSender=mock.Mock(), register_signal_handlers=mock.Mock(),
        event=mock.Mock(), flwr_exit=mock.Mock(), log=mock.Mock(), pull_task_input=lambda _: (message, context, handed, fab),
        push_message=lambda client, reply, context: pushed.append(reply), push_task_output=mock.Mock(),
        Error=run_clientapp.Error, install_from_fab=lambda content, **_: unpacked.append(content), get_project_dir=mock.Mock(),
        get_load_client_app_fn=lambda **_: lambda *_: evil,
    ):  # fmt: skip
        flower_internals.replace_loading(vars(run_clientapp), choice)
        run_clientapp.run_clientapp("127.0.0.1:1", "token", True, runtime_dependency_install=False)
    return unpacked


def test_raw_data_by_an_app_that_the_server_hands_over():
    bundle, pushed = b"an app that sends all data home", []
    assert handed_over(owned_app.OwnedApp(), bundle, pushed) == [bundle]  # the stock behaviour: it is unpacked and run
    assert pushed[0].content["data"]["patients"] == "all of them"
    mine = client_app(model=softmax, load_data=lambda context: None)
    assert handed_over(owned_app.OwnedApp(installed=mine), bundle, pushed) == []
    assert pushed[1].has_error()  # the owner's app has no such function
    other = hashlib.sha256(b"the app that the owner has looked at").hexdigest()
    assert handed_over(owned_app.OwnedApp(pinned=other), bundle, pushed) == []
    assert pushed[2].error.reason == "NotPinned"  # the type, and no text
    same = hashlib.sha256(bundle).hexdigest()
    assert handed_over(owned_app.OwnedApp(pinned=same), bundle, pushed) == [bundle]


def test_data_elsewhere_by_the_servers_run_configuration():
    """An owner's app does not see what the server writes into the configuration of the run."""
    seen = []

    def load(context):
        seen.append((dict(context.run_config), dict(context.node_config)))
        return {"id": "client-0", "train": (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))}

    app = client_app(model=softmax, load_data=load)
    context = Context(7, 100, {"client-id": "client-0"}, RecordDict(), {"file": "/etc/shadow"})
    app.setup.data(context)
    app.setup.loaded.clear()
    app.own(None)
    app.setup.data(context)
    assert seen == [({"file": "/etc/shadow"}, {"client-id": "client-0"}), ({}, {"client-id": "client-0"})]


def test_the_command_line_chooses_an_app_and_a_policy(tmp_path, monkeypatch):
    (tmp_path / "hospital_app.py").write_text(
        "from equipoise.engines.flower import client_app\nimport equipoise as eq\n"
        "app = client_app(model=lambda: eq.models.Softmax(4, 3), load_data=lambda context: None)\nother = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = tmp_path / "policy.toml"
    policy.write_text("minimum_crowd = 7\nallow = ['my_parts']\n")
    choice = owned_app.OwnedApp.choose("hospital_app:app", None, policy)
    assert isinstance(choice.installed, node_app.NodeApp)
    assert choice.installed.setup.policy == NodePolicy(only_sums=True, minimum_crowd=7, allow=("my_parts",))
    assert choice.installed.setup.owned
    for app, pin, file, said in (
        (None, None, policy, "--policy needs --app or --pin"),
        ("hospital_app:app", "0" * 64, None, "Give one of them"),
        ("hospital_app:other", None, None, "is no ClientApp"),
        ("no_such_module:app", None, None, "cannot be loaded"),
        ("hospital_app", None, None, "must be package.module:name"),
        (None, "abc", None, "64 hexadecimal digits"),
        ("hospital_app:app", None, tmp_path / "none.toml", "The policy .*none.toml does not exist"),
    ):
        with pytest.raises(eq.errors.EquipoiseError, match=said):
            owned_app.OwnedApp.choose(app, pin, file)
    with pytest.raises(ConfigError, match="A policy can hold only an app"):
        owned_app.OwnedApp(policy=OPEN).hold(ClientApp())


def test_a_policy_file_is_checked(tmp_path):
    file = tmp_path / "policy.toml"
    for text, said in (
        ("minimum_crow = 3", "has the key 'minimum_crow', which is none of: only_sums, minimum_crowd"),
        ("minimum_crowd = 1", "minimum_crowd"),
        ("minimum_crowd = 'many'", "minimum_crowd of the policy .* must be a whole number"),
        ("clip = -1.0", "clip"),
        ("only_sums = 1", "only_sums of the policy .* must be true or false"),
        ("key = 'mine'", "and peers must be given together"),
        ("[", "policy.toml cannot be read: it is not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(eq.errors.EquipoiseError, match=said):
            read_policy(file)
    file.write_text("parts = ['risk.mean']\nrounds = 3\nkey = 'a'\npeers = 'b.toml'\n")
    wanted = NodePolicy(parts=("risk.mean",), rounds=3, key=str(tmp_path / "a"), peers=str(tmp_path / "b.toml"))
    assert read_policy(file) == wanted


def test_two_policies_refuse_what_either_does():
    first = NodePolicy(
        only_sums=False, minimum_crowd=5, rounds=9, evaluations=7, parts=("a.b", "a.c"), clip=1.0, answer_after=2.0
    )
    second = NodePolicy(minimum_crowd=3, rounds=4, parts=("a.c",), noise_multiplier=2.0, evaluate=False)
    both = NodePolicy(True, 5, 2, 4, 2.0, 1.0, evaluate=False, parts=("a.c",), answer_after=2.0, evaluations=7)
    assert first.stricter(second) == second.stricter(first) == both


def test_the_delta_of_a_budget_is_the_one_beside_it():
    """The app's policy without a budget has a default δ, which replaced the one that the owner had written."""
    owner = NodePolicy(epsilon=2.5, delta=1e-3)
    assert NodePolicy().stricter(owner).delta == owner.stricter(NodePolicy()).delta == 1e-3
    assert NodePolicy().stricter(NodePolicy(epsilon=2.5, delta=1e-7)).delta == 1e-7
    assert NodePolicy(epsilon=3.0).stricter(owner).budget_delta == 1e-5  # two budgets: what refuses more
    assert NodePolicy(epsilon=1.0).stricter(NodePolicy(delta=1e-8)).budget_delta == 1e-8  # nor does the app's default loosen it
    assert NodePolicy(delta=1e-3).stricter(NodePolicy(epsilon=1.0)).budget_delta == 1e-5
    assert NodePolicy().stricter(NodePolicy()) == NodePolicy()


def test_an_answer_leaves_at_a_multiple_of_its_time(monkeypatch):
    slept = []
    times = iter([0.0, 1.5, 10.0, 18.5])
    monkeypatch.setattr(node_app, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=slept.append))
    grid = federation(DATA, softmax, answer_after=5.0)
    TaskIdentity.run_id = 7
    values = {"seed": 3, "model": 3, "classes": 3, "run": "x"}
    for _ in range(2):
        message = Message(messages.write_message(0, "t", values, {"params": torch.zeros(15)}), 100, "train.losses")
        message.metadata.__dict__["_message_id"] = "m"
        grid.answer(100, message)
    assert slept == [3.5, 1.5]


def test_the_guides_recipe_for_secure_sums_runs_with_its_policy(tmp_path, caplog):
    """The algorithm and the policy of the section on secure sums; the log says what the server sees."""
    guide = (Path(__file__).parents[2] / "docs" / "operate-federation.md").read_text(encoding="utf-8")
    part = guide.partition("## Secure sums")[2].partition("## Differential privacy")[0]
    names = {"eq": eq}
    exec(part.partition("```python\n")[2].partition("```")[0], names)  # noqa: S102
    (tmp_path / "policy.toml").write_text(part.partition("```toml\n")[2].partition("```")[0])
    with caplog.at_level("INFO", logger="flwr"):
        found, _ = run(names["algorithm"], read_policy(tmp_path / "policy.toml"), rounds=1, clients_per_round=4)
    assert found.history.rounds[0].missing == {}
    assert any("Only sums are visible" in record.getMessage() for record in caplog.records)


def test_the_guides_recipe_for_privacy_runs_with_its_policy(tmp_path):
    """The algorithm and the policy that docs/operate-federation.md shows, at nodes that refuse all parts but those."""
    guide = (Path(__file__).parents[2] / "docs" / "operate-federation.md").read_text(encoding="utf-8")
    part = guide.partition("## Differential privacy")[2].partition("## Ten hospitals")[0]
    names = {"eq": eq}
    exec(part.partition("```python\n")[2].partition("```")[0], names)  # noqa: S102
    (tmp_path / "policy.toml").write_text(part.partition("```toml\n")[2].partition("```")[0])
    policy = read_policy(tmp_path / "policy.toml")
    with pytest.warns(EquipoiseNotice, match="16 bins count the 3 clients"):  # the guide's are more
        found, _ = run(names["algorithm"], policy, rounds=2, clients_per_round=3)
    assert found.epsilon.epsilon <= 5.0
    assert [report.missing for report in found.history.rounds] == [{}, {}]
