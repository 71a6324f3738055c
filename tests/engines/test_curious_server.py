"""What a server that follows the protocol, and looks at all it gets, tries to learn of single clients under secure sums."""

from __future__ import annotations

import json
import logging
import math
import random
import time
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from fake_grid import federation, inflated, run_app
from flwr.app import Context

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.flower import client_app, server_app
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.secure import masked_sums, masks
from equipoise.engines.flower.transport import part_messages
from equipoise.engines.flower.transport.messages import expanded
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import EquipoiseNotice, IncompatibleParts
from equipoise.types import Cohort, Observer
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
P = eq.privacy
SIZES = [31, 47, 52, 68, 75, 83, 96, 104]


def softmax():
    return eq.models.Softmax(4, 3)


def run(algorithm, data, *, rounds=2, model=softmax, grid=None, **options):
    found, grid = [], grid or federation(data, model, only_sums=True)
    options = {"timeout": 300.0, "pause": 1.0, "retries": 0, "seed": 3, "clients_per_round": len(data.train), **options}
    run_app(server_app(algorithm, model=model, rounds=rounds, on_result=found.append, **options), grid)
    return found[0], grid


def tail(quantile, share=0.25, **more):
    return eq.Algorithm(risk=eq.risk.Superquantile(tail=share, quantile=quantile), privacy=P.SecureAggregation(**more))


# ------------------------------------------------------------------------------------------- who is in the tail, and losses


def test_who_is_in_the_tail_from_the_mass_of_the_sum(monkeypatch):
    """The mass of the tail is a sum of weights that the server has sent: with weights by examples one set of clients fits."""
    data = FederatedData(make_clients(SIZES, features=4, classes=3), name="eight")
    with pytest.raises(IncompatibleParts, match="SecureHistogram"):
        run(tail(P.SecureSums(iterations=5)), data)
    with pytest.raises(IncompatibleParts, match="who is in the tail"):
        eq.Algorithm(
            risk=eq.risk.Superquantile(quantile=P.SecureHistogram(2.0)), privacy=P.SecureAggregation(), weights="examples"
        )  # fmt: skip
    seen, original = {}, masked_sums.RoundSums.updates

    def watched(self, cohort, workers, ask, params, solver):
        total, survivors = original(self, cohort, workers, ask, params, solver)
        seen[cohort.round] = {client: ask(client)["base"] for client in survivors}, float(total[-1]) * 2.0**-24
        return total, survivors

    monkeypatch.setattr(masked_sums.RoundSums, "updates", watched)
    run(tail(P.SecureHistogram(bound=2.0, bins=64), 0.4), data, rounds=3)
    assert len(seen) == 3
    for base, mass in seen.values():
        sets = [s for k in range(1, 9) for s in combinations(base, k) if abs(sum(base[c] for c in s) - mass) < 8 * 2.0**-24]
        assert len(sets) == math.comb(8, round(mass))  # every set of as many clients: the mass says their number alone


def test_single_losses_from_the_sums_that_find_the_quantile(monkeypatch):
    """The server's only number about losses is a count in each bin; with wide bins it cannot tell two losses apart."""
    data = FederatedData(make_clients([40] * 6, features=4, classes=3), name="six")
    asked, totals = [], []
    original = masked_sums.RoundSums.total

    def watched(self, purpose, ask):
        total, survivors = original(self, purpose, ask)
        asked.append((purpose, ask(survivors[0])))
        totals.append(total)
        return total, survivors

    monkeypatch.setattr(masked_sums.RoundSums, "total", watched)
    run(tail(P.SecureHistogram(bound=2.0, bins=2), 0.5), data, rounds=2)
    assert [purpose for purpose, _ in asked] == ["histogram"] * 2  # no iterates that would narrow losses down
    assert all(set(ask) == {"kind", "bound", "bins"} for _, ask in asked)
    assert all(total.tolist() in ([0, 6], [1, 5], [2, 4], [3, 3], [4, 2], [5, 1], [6, 0]) for total in totals)


@pytest.mark.usefixtures("batches_of_the_simulation")
def test_the_histogram_is_that_of_the_simulation():
    data = FederatedData(make_clients(SIZES, features=4, classes=3), name="eight")
    algorithm = tail(P.SecureHistogram(bound=2.0, bins=256), 0.4)
    found, _ = run(algorithm, data, rounds=3)
    wanted = eq.train(lambda seed: softmax(), data, algorithm, rounds=3, clients_per_round=8, seed=3, engine="loop")
    assert float((found.params - wanted.params).abs().max()) < 3e-6


def test_the_update_of_a_tail_of_one():
    """With the worst of eight clients alone in the tail, the sum of the tail is its update: it is not unmasked."""
    data = FederatedData(make_clients(SIZES, features=4, classes=3), name="eight")
    algorithm = tail(P.SecureHistogram(bound=2.0, bins=4096), 0.01)
    model = _trained_a_little()  # at zeros all losses are equal
    nobody = pytest.warns(EquipoiseNotice, match="Nobody was trained")
    with nobody, pytest.warns(EquipoiseNotice, match="the tail has 1 of at least 2 clients"):
        found, grid = run(algorithm, data, model=lambda: model, rounds=1)
    assert not [1 for _, action, reply in grid.replies if action == "train.masked" and "sum.update" in reply.content["tensors"]]
    assert found.history.rounds[0].trained == 0
    nobody = pytest.warns(EquipoiseNotice, match="Nobody was trained")
    with nobody, pytest.warns(EquipoiseNotice, match="leaves the model as it is"):  # and neither is it in a simulation
        simulated = eq.train(model, data, algorithm, rounds=1, clients_per_round=8, seed=3, engine="loop")
    assert torch.equal(simulated.params, found.params)


def test_one_loss_from_two_evaluations_of_the_same_model(monkeypatch):
    """A round leaves the model as it is, and a client is away at the second evaluation: the difference would be its loss."""
    data = FederatedData(make_clients(SIZES, features=4, classes=3), name="eight")
    model, grid = _trained_a_little(), federation(data, softmax, only_sums=True)
    sums, original = [], masked_sums.MaskedSums.totals

    def watched(self, purposes, base, begin=None):
        found = original(self, purposes, base, begin)
        sums.extend((purpose, *found[purpose]) for purpose in purposes if purpose.startswith("scores"))
        return found

    def leave(delivery):
        if delivery.round == 2 and delivery.client == "client-3":
            grid.offline.add("client-3")
            return None
        return delivery.answer()

    monkeypatch.setattr(masked_sums.MaskedSums, "totals", watched)
    grid.fault = leave
    algorithm = tail(P.SecureHistogram(bound=2.0, bins=4096), 0.01)  # a tail of one: nobody is trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        found, _ = run(algorithm, data, model=lambda: model, rounds=3, grid=grid, evaluate_every=1)
    assert [purpose for purpose, *_ in sums] == ["scores train"]  # one evaluation of one model
    assert [len(who) for *_, who in sums] == [8]
    assert found.clients.client == ("mean of 8 clients",)  # what it gave stands for the later ones
    assert not bool(found.clients.loss.isnan().any())


class Models(Observer):
    """The shared model after each round, which the server has."""

    def __init__(self):
        self.seen = []

    def on_state(self, state):
        self.seen.append(state.params.clone().double())


def differences(crowd, **options):
    """Two rounds and evaluations by secure sums over four clients; client-3 is in the first of each alone."""
    data = FederatedData(make_clients([8] * 4), name="four")
    model, models = _trained_a_little(), Models()
    grid = federation(data, softmax, policy=NodePolicy(minimum_crowd=crowd))
    grid.fault = lambda d: None if d.client == "client-3" and d.action == "train.keys" and d.count > 2 else d.answer()
    solver = eq.solvers.SGD(lr=0.01, batch_size=8, epochs=1)
    algorithm = eq.Algorithm(solver=solver, weights="uniform", privacy=P.SecureAggregation())
    found, _ = run(algorithm, data, model=lambda: model, rounds=2, grid=grid, evaluate_every=1, observers=[models], **options)
    return found, data, models.seen


def test_what_two_sums_tell_of_a_client_that_is_in_one_of_them():
    """The guide says that secure sums do not hide this: 4 m_4 - 3 m_3 is nearly the client's own loss, and so its update."""
    found, data, (start, first, second) = differences(3, minimum=3)
    with_all, without = found.history.points
    assert without.not_evaluated["train"].keys() == {"client-3"}
    guess = 4 * with_all.splits["train"]["loss"] - 3 * without.splits["train"]["loss"]
    task = Task.of(_trained_a_little())
    engine = Loop().start(task, data)
    losses, _ = engine.evaluate(first.float(), data.train)
    assert guess == pytest.approx(float(losses[3]), rel=0.05)
    assert int((losses - guess).abs().argmin()) == 3
    even = torch.ones(4, dtype=torch.float64)
    true = engine.updates(start.float(), Cohort(0, 3, torch.arange(4), even, even), eq.solvers.SGD(0.01, batch_size=8)).update
    estimate = 4 * (first - start) - 3 * (second - first)
    alike = torch.cosine_similarity(estimate, true[3].double(), 0)
    assert float(alike) > 0.95
    assert float(alike) > max(float(torch.cosine_similarity(estimate, other.double(), 0)) for other in true[:3]) + 0.05


def test_a_crowd_of_all_sites_leaves_no_two_sums_that_differ_by_one_client():
    """What the guide advises: with minimum_crowd = 4 of four sites, a sum without one of them is not released."""
    with pytest.raises(TooFewClients):
        differences(4, minimum=3)


def _trained_a_little():
    model = softmax()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(generator=torch.Generator().manual_seed(5))
    return model


# ---------------------------------------------------------------------------------------------------------------- answer times


def test_who_is_in_the_tail_from_answer_times(monkeypatch):
    """8 clients of equal size, 200 answers of each under distributed privacy: the upper 95 % limit of the AUC is below 0.6.

    The request for the sum of updates is answered again and again, with a loss above or below the quantile by chance. Time is
    that of the process, of one node at a time. Keys are agreed without a curve, which takes long and has no part in this.
    """
    monkeypatch.setattr(masks, "agreed_key", lambda private, public: bytes(32))
    data = FederatedData(make_clients([60] * 8, features=4, classes=3), name="eight")
    algorithm = eq.Algorithm(
        risk=eq.risk.Superquantile(tail=0.4, quantile=P.PrivateQuantile(bound=1.5, bins=8)), sampler=eq.sampling.Uniform(),
        solver=eq.solvers.SGD(epochs=1, batch_size=10),
        privacy=P.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=0.3, noise="distributed"),
    )  # fmt: skip
    grid, asked = federation(data, softmax, only_sums=True), {}

    def remember(delivery):
        if '"private update"' in delivery.message.content["call"]["values"]:
            state = inflated(grid.contexts[delivery.node].state)
            asked[delivery.node] = delivery.message, state, state["equipoise.masks"]["sum.update"]
        return delivery.answer()

    grid.fault = remember
    run(algorithm, data, rounds=1, grid=grid)
    generator, took = random.Random(4), {True: [], False: []}
    for _ in range(200):
        for node in generator.sample(sorted(asked), 8):
            message, state, kept = asked[node]
            inside = generator.random() < 0.4
            state["equipoise.round"]["loss"] = 1.5 if inside else 0.0
            state["equipoise.masks"]["sum.update"] = kept
            context = Context(7, node, grid.contexts[node].node_config, state, {})
            began = time.process_time()
            answer = grid.apps[node](message, context)
            took[inside].append(time.process_time() - began)
            assert "sum.update" in expanded(answer.content)["tensors"]
    area, error = area_under_curve(np.array(took[True]), np.array(took[False]))
    assert max(area, 1 - area) + 1.645 * error < 0.6, (area, error)


def area_under_curve(first, second):
    """The probability that one of the first is larger than one of the second, and its standard error (Hanley, McNeil 1982)."""
    values = np.concatenate([first, second])
    ranks = np.empty(len(values))
    ranks[values.argsort()] = np.arange(1, len(values) + 1)
    n, m = len(first), len(second)
    area = (ranks[:n].sum() - n * (n + 1) / 2) / (n * m)
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (n - 1) * (one - area**2) + (m - 1) * (two - area**2)
    return area, math.sqrt(variance / (n * m))


def test_clients_outside_the_tail_send_as_many_messages_and_bytes():
    data = FederatedData(make_clients(SIZES, features=4, classes=3), name="eight")
    _, grid = run(tail(P.SecureHistogram(bound=2.0, bins=64)), data, rounds=2)
    sizes = {}
    for client, action, reply in grid.replies:
        if action != "query.hello":
            lengths = [(name, len(array.data)) for name, array in reply.content["tensors"].items()]
            sizes.setdefault(client, []).append((action, lengths, len(reply.content["call"]["values"])))
    assert all(sent == sizes["client-0"] for sent in sizes.values())


# ------------------------------------------------------------------------------------------------------ one client's own score


def test_the_score_of_the_only_client_with_test_examples():
    """A mean over one client is its score: the split is left out of the table, and the client never asked."""
    test = make_clients([7, 5, 6, 9, 9], features=4, classes=3, seed=1)
    data = FederatedData(make_clients([8, 9, 10, 11, 12], features=4, classes=3), test=test.take([3]), name="five")
    with pytest.warns(EquipoiseNotice, match="test examples are not evaluated"):
        found, grid = run(eq.Algorithm(privacy=P.SecureAggregation()), data)
    assert found.clients.split == ("train",)
    assert not [1 for _, _, reply in grid.replies if "sum.scores test" in reply.content["tensors"]]
    data = FederatedData(data.train, test=test.take([1, 2, 3]), name="five")  # three of them are a crowd of two
    found, _ = run(eq.Algorithm(privacy=P.SecureAggregation()), data)
    assert found.clients.split == ("train", "test")
    assert found.clients.client == ("mean of 5 clients", "mean of 3 clients")
    rows = [torch.nn.functional.cross_entropy(found.model(x), y).detach() for x, y in map(data.test.client, data.test.ids)]
    assert float(found.clients.where("test").loss[0]) == pytest.approx(float(sum(rows)) / 3, abs=1e-6)


# ----------------------------------------------------------------------------------------------------------- texts of errors


@pytest.mark.parametrize("error", [ValueError, eq.errors.InvalidData])
def test_a_patient_from_the_text_of_an_error(error, caplog):
    """What goes wrong on a node is in its own log; over the network goes the type."""
    data = FederatedData(make_clients([8, 9, 10, 11], features=4, classes=3), name="four")
    grid = federation(data, softmax)

    def load(context):
        raise error("patient Q4711: row 12 has no date of birth")

    bad = next(node for node, name in grid.names.items() if name == "client-2")
    grid.apps[bad] = client_app(model=softmax, load_data=load)
    with caplog.at_level("WARNING"), pytest.raises(eq.errors.EquipoiseError) as failure:
        run(eq.Algorithm(), data, grid=grid, patience=1.0)
    assert error.__name__ in str(failure.value)
    assert "Q4711" not in str(failure.value)
    told = [record for record in caplog.records if record.name == "equipoise.node"]
    assert any("patient Q4711" in record.getMessage() for record in told)
    for _, _, reply in grid.replies:
        assert not reply.has_error()
        assert "Q4711" not in json.dumps(dict(reply.content["call"]), default=str)


# ----------------------------------------------------------------------------------------------------------- classes of others


@pytest.mark.parametrize(
    "path",
    [
        "equipoise.risk.quantile_sources:torch.utils._pytree.LeafSpec",
        "equipoise.solvers.sgd:torch.utils.data.dataset.Subset",
        "equipoise.privacy.accounting:math",
        "equipoise.risk:RiskValue.__class__",
    ],
)
def test_classes_of_other_packages_by_attributes_of_ours(path):
    with pytest.raises(part_messages.PartNotSent):
        part_messages.unpack_part({"class": path, "fields": {}}, {})


def test_what_is_allowed_is_where_a_class_comes_from():
    assert part_messages.find_allowed_class("equipoise.solvers:SGD", ()) is eq.solvers.SGD  # re-exported by its package
    assert part_messages.find_allowed_class("equipoise.solvers.sgd:SGD", ()) is eq.solvers.SGD
