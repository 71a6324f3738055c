"""What nodes and the server of a federation try to learn beyond their ε: each test is an attack over real client apps."""

from __future__ import annotations

import json
import logging
import threading

import numpy as np
import pytest
import torch
from fake_grid import federation, run_app
from killed_federation import DELTA, Campaign, Killed, private_tail, try_kill

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.node_ledger import AlreadyReleased, BudgetSpent, NodeLedger
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.secure.masked_sums import RoundSums
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.errors import EquipoiseNotice
from equipoise.privacy.accounting import gaussian_epsilon
from equipoise.privacy.ledger import read_entries, server_epsilon
from equipoise.types import Cohort
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
P, SEED = eq.privacy, 271828


def softmax():
    return eq.models.Softmax(4, 3)


def some_data(clients=8):
    return FederatedData(make_clients([8] * clients, features=4, classes=3), name="some")


def run(algorithm, grid=None, *, data=None, rounds=2, m=5, **options):
    data = data or some_data()
    grid, found = grid or federation(data, softmax), []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": SEED, "clients": len(data.train), **options}
    run_app(server_app(algorithm, model=softmax, rounds=rounds, clients_per_round=m, on_result=found.append, **options), grid)
    return found[0], grid


def requests(grid):
    return [(client, m.metadata.message_type, json.loads(m.content["call"]["values"])) for client, m in grid.sent]


CENTRAL = eq.Algorithm(privacy=P.DifferentialPrivacy(None, DELTA, 1.0, noise_multiplier=1.0, method="rdp"))
SECURE = eq.Algorithm(privacy=P.SecureAggregation())


# ------------------------------------------------------------------------------------------------------------- from the seed


@pytest.mark.parametrize("algorithm", [CENTRAL, private_tail(), SECURE], ids=["central", "distributed", "secure sums"])
def test_what_follows_from_the_seed_that_nodes_are_sent(algorithm):
    """A node that knows the run's seed draws cohorts, and everybody's batches, as the server does."""
    _, grid = run(algorithm)
    text = json.dumps([values for _, _, values in requests(grid)])
    assert str(SEED) not in text
    seeds = {}
    for client, action, values in requests(grid):
        if action != "query.hello":
            seeds.setdefault(client, set()).add(values["seed"])
    assert len(seeds) > 2
    assert len(set.union(*seeds.values())) == sum(map(len, seeds.values()))  # nobody has another's


def test_cohorts_from_the_seed():
    """With one seed a simulation repeats its cohorts; a federation under privacy does not, and a node cannot foresee them."""
    cohorts = []
    for _ in range(3):
        _, grid = run(CENTRAL, rounds=4)
        cohorts.append([{c for c, action, t in grid.log if action == "train.update" and t == index} for index in range(4)])
    alpha = torch.ones(8, dtype=torch.float64) / 8
    foreseen = []
    for t in range(4):
        clients = eq.sampling.Poisson()(t, alpha, clients_per_round=5, seed=SEED).clients
        foreseen.append({some_data().train.ids[k] for k in clients.tolist()})
    assert cohorts[0] != cohorts[1] or cohorts[1] != cohorts[2]  # alike by chance once in 2^60
    assert not all(found == foreseen for found in cohorts)


def test_a_plain_federation_still_follows_its_seed():
    first, second = (run(eq.Algorithm(), rounds=2)[0] for _ in range(2))
    wanted = eq.train(lambda seed: softmax(), some_data(), rounds=2, clients_per_round=5, seed=SEED, engine="loop")
    assert torch.equal(first.params, second.params)
    assert torch.equal(first.params, wanted.params)


def test_one_node_has_the_data_of_another_by_their_hash(tmp_path):
    """A hash without a key tells everybody who has the same data, or lets them try out guesses."""
    one, other = (NodeLedger(tmp_path / name, "client") for name in "ab")
    assert one.fingerprint("same data") != other.fingerprint("same data")
    assert NodeLedger(tmp_path / "a", "client").fingerprint("same data") == one.fingerprint("same data")
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "a").glob("*.secret"))
    grid = federation(some_data(3), softmax)
    run(eq.Algorithm(), grid, data=some_data(3), m=3)
    sent = [json.loads(reply.content["call"]["values"]) for _, action, reply in grid.replies if action == "query.hello"]
    assert all(len(values["fingerprint"]) == 64 for values in sent)


@pytest.mark.parametrize("algorithm", [private_tail(), SECURE], ids=["distributed", "secure sums"])
def test_who_else_takes_part_from_invitations_to_secure_sums(algorithm):
    """A node sees how many clients are in a sum. No message names another client, and names of one round tell no other's."""
    _, grid = run(algorithm)
    names, aliases = set(some_data().train.ids), {}
    for client, message in grid.sent:
        texts = [message.content["call"]["values"].encode(), *(array.data for array in message.content["tensors"].values())]
        assert not [other for other in names - {client} if any(other.encode() in text for text in texts)]
        if message.metadata.message_type == "train.keys":
            for array in (a for n, a in message.content["tensors"].items() if n.startswith("sum.")):
                terms = SumTerms.of_invitation(array.data)
                assert json.loads(message.content["call"]["values"])["alias"] in terms.clients
                aliases.setdefault((terms.round, terms.purpose), set()).update(terms.clients)
    assert {len(found) for (_, purpose), found in aliases.items() if purpose == "update"} == {5}
    first, second = (aliases[index, "update"] for index in (0, 1))
    assert not first & second


# ------------------------------------------------------------------------------------- from releases that are made twice


def watch_sums(monkeypatch, kill_after):
    """Every sum of updates that the server unmasks; it is killed after some of them."""
    released, original = [], RoundSums.updates

    def updates(self, cohort, *rest):
        found = original(self, cohort, *rest)
        released.append((cohort.round, found[0].clone(), found[1]))
        if cohort.round == 1 and kill_after:
            kill_after.pop()
            raise Killed
        return found

    monkeypatch.setattr(RoundSums, "updates", updates)
    return released


def test_several_noisy_sums_of_the_same_updates_after_kills(tmp_path, monkeypatch):
    released = watch_sums(monkeypatch, [1, 1, 1])
    campaign = Campaign(tmp_path, private_tail())
    while not campaign.serve():
        pass
    assert [t for t, _, _ in released] == [0, 1, 2]  # round 1 once
    campaign.check()
    (result,) = campaign.results
    assert result.privacy.releases == 6
    assert result.epsilon.epsilon_server == pytest.approx(server_epsilon(campaign.entries, DELTA))


def test_one_update_from_the_difference_of_two_exact_sums(tmp_path, monkeypatch):
    """With a client lost between a sum and its repetition, the difference of the two is the client's update."""
    released = watch_sums(monkeypatch, [1])
    campaign = Campaign(tmp_path, SECURE, per_round=5)
    assert not campaign.serve()
    lost = campaign.data.train.ids[2]
    campaign.grid.fault = lambda d: None if (d.client, d.action, d.round) == (lost, "train.masked", 1) else d.answer()
    assert campaign.serve()
    assert [t for t, _, _ in released] == [0, 1, 2]
    campaign.check()


def test_a_second_histogram_of_a_round_that_ditto_has_stopped():
    """Nodes are slow with their own models after the quantile of the round is out, and the round is tried again."""
    tail = private_tail()
    algorithm = eq.Algorithm(risk=tail.risk, sampler=tail.sampler, privacy=tail.privacy, personal=eq.personal.Ditto())
    grid, silent = federation(some_data(), softmax), [1, 1, 1]

    def fault(delivery):
        if delivery.action == "train.own" and delivery.round == 1 and silent:
            silent.pop()
            return None
        return delivery.answer()

    grid.fault = fault
    found, _ = run(algorithm, grid, minimum=4, retries=2)
    revealed = [t for _, action, t in grid.log if action == "train.reveal"]
    assert revealed.count(1) == 2 * 5  # one histogram and one sum of updates
    assert found.privacy.releases == 4


def test_a_server_that_has_lost_its_ledger_asks_again(tmp_path):
    """Nodes have ledgers of their own, and keep what they have revealed."""
    campaign = Campaign(tmp_path, private_tail(), rounds=1)
    assert campaign.serve()
    run_name = json.loads((tmp_path / "run" / "federation.json").read_text())["run"]
    for client in campaign.data.train.ids:
        ledger = NodeLedger(tmp_path / "nodes" / client, client)
        answered = [(entry.round, entry.purpose) for entry in ledger.ledger if entry.kind == "release"]
        if answered:
            with pytest.raises(AlreadyReleased):
                ledger.begin(run_name, *answered[0], 1.0)
    (tmp_path / "run" / "ledger.jsonl").unlink()
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    (tmp_path / "run" / "checkpoint" / "state.safetensors").unlink()
    campaign.grid.new_run()
    with pytest.warns(EquipoiseNotice):
        campaign.serve()
    assert not campaign.results[-1].params.any()  # it has learnt nothing more
    reveals = [(who, terms.round, terms.purpose) for terms, all_of in campaign.all_reveals() for who in all_of]
    assert len(reveals) == len(set(reveals))


def test_more_than_a_nodes_own_budget(tmp_path):
    ledger = NodeLedger(tmp_path, "client")
    ledger.check_budget(1.0, 5.0, 1e-3)
    ledger.begin("run", 0, "update", 1.0)
    assert ledger.epsilon(1e-3) == pytest.approx(gaussian_epsilon(1.0, 1e-3))
    again = NodeLedger(tmp_path, "client")  # in another process, for another run
    with pytest.raises(BudgetSpent, match="of 5"):
        again.check_budget(0.5, 5.0, 1e-3)
    again.begin("other", 0, "scores train", None)
    assert NodeLedger(tmp_path, "client").epsilon(1e-3) == ledger.epsilon(1e-3)  # exact ones have no ε


def test_one_release_twice_by_asking_two_processes_of_a_node(tmp_path):
    """Each has read the node's ledger before either writes: still one of them answers, and one budget is spent once."""
    ledgers = [NodeLedger(tmp_path, "client") for _ in range(4)]
    start, outcomes = threading.Barrier(4), []

    def reveal(ledger):
        start.wait()
        try:
            ledger.begin("run", 0, "update", 1.0)
            outcomes.append("answered")
        except AlreadyReleased:
            outcomes.append("refused")

    threads = [threading.Thread(target=reveal, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["answered", "refused", "refused", "refused"]
    budget = gaussian_epsilon(1.0, 1e-3) * 1.2
    for ledger in ledgers:
        with pytest.raises(BudgetSpent):
            ledger.begin("other", 0, "update", 1.0, epsilon=budget, delta=1e-3)
    assert len(read_entries(next(tmp_path.glob("*.ledger.jsonl")))) == 1


@pytest.mark.parametrize("moment", [17, 31, 44])
def test_kills_at_any_moment_leave_a_true_ledger(moment, tmp_path):
    try_kill(tmp_path, moment, np.random.default_rng(moment))


# In the evaluation after the last round, and in the first round.
@pytest.mark.parametrize("moment", [100, pytest.param(8, marks=pytest.mark.long)])
def test_a_node_that_comes_back_while_its_old_self_seems_connected_does_not_hold_up_the_run(moment, tmp_path):
    """After SIGKILL a node has another id, and Flower takes a while to notice that the old one is gone."""
    campaign = Campaign(tmp_path, private_tail())
    campaign.grid.lingers, campaign.grid.restart_at[moment] = 120.0, ("client-2", False)
    assert campaign.serve()
    campaign.check()
    assert campaign.results[-1].rounds == campaign.rounds
    assert campaign.grid.calls > moment
    assert campaign.grid.clock.now < 2 * 30.0 + 10.0  # one timeout of 30 s, and time to say hello


# ------------------------------------------------------------------------------------------------- from who is named


def test_who_has_a_loss_that_is_not_finite():
    """Under privacy it counts as the bound, and nobody is named for it."""
    tail = private_tail()
    grid = federation(some_data(), softmax)
    algorithm = eq.Algorithm(risk=tail.risk, privacy=P.GaussianMechanism(1.0, 1.0), sampler=eq.sampling.Full())
    original = eq.engines.loop.LoopEngine.losses

    def losses(self, params, cohort, solver=None):
        found = original(self, params, cohort, solver)
        return found * float("nan") if self.data.train.ids == ("client-3",) else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eq.engines.loop.LoopEngine, "losses", losses)
        found, _ = run(algorithm, grid, m=8)
    assert all(report.missing == {} and report.rejected == () for report in found.history.rounds)


def test_what_the_table_of_a_federation_says():
    found, _ = run(private_tail())
    table = found.privacy
    assert not table.nominal
    assert table["server"].epsilon is None
    assert "scores train" in table["server"].assumes
    with pytest.warns(EquipoiseNotice, match="not evaluated"):
        silent, _ = run(private_tail(), federation(some_data(), softmax, policy=NodePolicy(evaluate=False)))
    assert silent.privacy["server"].epsilon == pytest.approx(silent.epsilon.epsilon_server)
    assert silent.privacy["server"].adjacency == "one client's contribution zeroed"


# ------------------------------------------------------------------------------------- coins that nodes keep to themselves


def hidden_coins(multiplier=1.0, **more):
    options = {"noise": "distributed", "noise_multiplier": multiplier, "method": "rdp", **more}
    return eq.Algorithm(
        risk=eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=2)), sampler=eq.sampling.NodePoisson(),
        privacy=P.DifferentialPrivacy(None, DELTA, 1.0, **options),
    )  # fmt: skip


def test_who_takes_part_where_nodes_flip_the_coins():
    """Every node gets and sends the same messages in every round, of the same sizes, whatever its coin says."""
    policy = NodePolicy(evaluate=False)
    with pytest.warns(EquipoiseNotice, match="not evaluated"):
        found, grid = run(hidden_coins(), federation(some_data(), softmax, policy=policy), rounds=3, m=3)
    sizes = {}
    for client, action, reply in grid.replies:
        if action != "query.hello":
            lengths = [(name, len(array.data)) for name, array in reply.content["tensors"].items()]
            sizes.setdefault(client, []).append((action, lengths, len(reply.content["call"]["values"])))
    assert len(sizes) == 8
    assert all(sent == sizes["client-0"] for sent in sizes.values())
    assert [len(sent) for sent in sizes.values()] == [3 * 6] * 8
    table = found.privacy  # of 8 nodes 5 must answer, and 8 did: the server's ε is amplified, as is the public's
    assert table.known.rate == 3 / 8
    assert table["server"].epsilon == pytest.approx(table["public"].epsilon, rel=1e-6)
    assert table["server"].epsilon < gaussian_epsilon(1.0 / 3**0.5, DELTA) / 1.3
    assert "coins" in table["server"].assumes


def test_coins_of_nodes_decide_alone_and_once(tmp_path):
    """The sum has the updates of the nodes whose coins show heads; a coin is the same for all sums and tries of a round."""
    canary = FederatedData(make_clients([8] * 6, features=4, classes=3), name="six")
    algorithm = eq.Algorithm(
        sampler=eq.sampling.NodePoisson(), privacy=P.DifferentialPrivacy(
            None, DELTA, 1e-3, noise_multiplier=1e-4, noise="distributed", method="rdp"))  # fmt: skip
    grid = federation(canary, softmax, keep=tmp_path)
    found, _ = run(algorithm, grid, data=canary, rounds=6, m=3)
    name = requests(grid)[-1][2]["run"]
    ledgers = [NodeLedger(tmp_path, client) for client in canary.train.ids]
    heads = torch.tensor([[ledger.coin(name, t) < 0.5 for ledger in ledgers] for t in range(6)])
    assert heads.any()
    assert not heads.all()
    assert len({ledger.coin(name, 0) for ledger in ledgers}) == 6
    assert [report.cohort for report in found.history.rounds] == [6] * 6  # all are asked
    assert torch.allclose(found.params, train_by_heads(algorithm, grid, canary, heads), atol=2e-5)


def train_by_heads(algorithm, grid, data, heads):
    """The model of plain arithmetic: each round adds the clipped updates of those with heads, over the expected number."""
    seeds = {client: values["seed"] for client, action, values in requests(grid) if action == "train.masked"}
    task = try_task(Task.of(softmax(), None, None), data)
    engine, params = Loop().start(task, data), task.read_model()
    for t, here in enumerate(heads):
        total = torch.zeros_like(params)
        for k in here.nonzero().flatten().tolist():
            one = torch.ones(1, dtype=torch.float64)
            cohort = Cohort(t, seeds[data.train.ids[k]], torch.tensor([k]), one, one)
            update = engine.updates(params, cohort, algorithm.solver).update[0]
            total += update * (1e-3 / float(update.norm()))
        params = params + total / 3
    return params
