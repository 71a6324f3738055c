"""Secure sums over the network: agreement with the loop engine, what the server sees, lost clients, and distributed noise."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from fake_grid import federation, run_app
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.secure import secure_node
from equipoise.engines.flower.transport import messages
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import IncompatibleParts
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
pytestmark = pytest.mark.usefixtures("batches_of_the_simulation")
SGD, P = eq.solvers.SGD, eq.privacy
SIZES = [6, 9, 12, 15]


def some_data(features=4, classes=3):
    kind = {"features": features, "classes": classes}
    return FederatedData(make_clients(SIZES, **kind), test=make_clients([5, 9, 14, 3], seed=1, **kind), name="four")


def softmax():
    return eq.models.Softmax(4, 3)


def run(algorithm, grid=None, *, model=softmax, rounds=2, **options):
    found = []
    grid = grid or federation(some_data(), model)
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, **options}
    app = server_app(algorithm, model=model, rounds=rounds, clients_per_round=4, on_result=found.append, **options)
    run_app(app, grid)
    return found[0], grid


def simulate(algorithm, data=None, rounds=2, clients_per_round=4):
    data = data or some_data()
    return eq.train(
        lambda seed: softmax(), data, algorithm, rounds=rounds, clients_per_round=clients_per_round, seed=3, engine="loop"
    )  # fmt: skip


def by_counts(tail, **more):
    return eq.risk.Superquantile(tail=tail, quantile=P.SecureHistogram(bound=2.0, bins=256), **more)


SECURE = {
    "FedAvg": eq.Algorithm(privacy=P.SecureAggregation()),
    "Δ-FL": eq.Algorithm(risk=by_counts(0.5), privacy=P.SecureAggregation()),
    "tilted": eq.Algorithm(risk=eq.risk.Tilted(tilt=1.0), privacy=P.SecureAggregation(loss_bound=3.0)),
    "clipped, stragglers dropped": eq.Algorithm(
        aggregator=eq.aggregators.NormClip(0.2), solver=SGD(straggler_share=0.5, stragglers="drop"),
        privacy=P.SecureAggregation(),
    ),
}  # fmt: skip


def masked_alone(grid):
    """All that the server got from clients in rounds and evaluations was bytes of the masking protocol."""
    for client, action, reply in grid.replies:
        values = json.loads(reply.content["call"]["values"])
        if action == "query.hello":
            assert not reply.content["tensors"]
            continue
        assert action in ("train.keys", "train.shares", "train.masked", "train.reveal", "train.own"), (client, action)
        assert values == {}
        assert all(name.startswith("sum.") and array.dtype == "uint8" for name, array in reply.content["tensors"].items())


@pytest.mark.parametrize("name", SECURE)
def test_secure_sums_agree_with_the_loop_engine_within_rounding(name):
    rounds = 2
    wanted = simulate(SECURE[name], rounds=rounds)
    found, grid = run(SECURE[name], rounds=rounds)
    # Each of four clients is rounded by less than a step in both runs, in the sum and in the weight that divides it.
    light = 0.1 if name == "tilted" else 0.5  # the sum of the weights is at least 4 of these
    bound = rounds * 2 * 4 * 2.0**-24 / (4 * light) * 2
    assert float((found.params - wanted.params).abs().max()) <= bound
    assert all(not report.missing for report in found.history.rounds)
    masked_alone(grid)


def test_the_tail_is_that_of_the_same_quantile_source():
    """The loop engine filters by the same number, up to rounding: who trains on the nodes is who trains there."""
    wanted = simulate(SECURE["Δ-FL"], rounds=2)
    trained = []
    grid = federation(some_data(), softmax)
    original = secure_node.make_update_row

    def watched(session, ask, modulus, clients):
        row = original(session, ask, modulus, clients)
        trained.append((session.request.round, session.client, bool(row[-1] > 0)))
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_node, "make_update_row", watched)
        found, _ = run(SECURE["Δ-FL"], grid)
    for t, report in enumerate(wanted.history.rounds):
        assert sum(worked for round_index, _, worked in trained if round_index == t) == report.trained
        assert found.history.rounds[t].loss == pytest.approx(report.loss, abs=2 / 256)  # the histogram tells it to a bin
    assert len(trained) == 8  # everybody sent something
    assert not all(worked for _, _, worked in trained)


def test_what_a_filtered_client_sends_looks_like_any_other():
    """Zeros under a mask: as long as everybody's, and with bytes as even as chance makes them."""
    data = some_data(features=199, classes=5)
    grid = federation(data, lambda: eq.models.Softmax(199, 5))
    zeros = {}
    original = secure_node.make_update_row

    def watched(session, ask, modulus, clients):
        row = original(session, ask, modulus, clients)
        zeros[session.client] = bool((row == 0).all())
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_node, "make_update_row", watched)
        run(eq.Algorithm(risk=by_counts(0.3), privacy=P.SecureAggregation()), grid, model=lambda: eq.models.Softmax(199, 5),
            rounds=2)  # fmt: skip
    last = [each for each in grid.replies if each[1] == "train.masked" and "sum.update" in each[2].content["tensors"]][-4:]
    sent = {client: reply.content["tensors"]["sum.update"].data for client, _, reply in last}
    assert any(zeros.values())
    assert not all(zeros.values())
    assert len({len(data) for data in sent.values()}) == 1
    for client, data in sent.items():
        assert len(data) > 6 * 1001  # six bytes a number
        counts = torch.bincount(torch.frombuffer(bytearray(data[-6000:]), dtype=torch.uint8).long(), minlength=256)
        expected = 6000 / 256
        chi = float(((counts - expected) ** 2 / expected).sum())  # mean 255, standard deviation 22.6
        assert abs(chi - 255) < 6 * 22.6, (client, zeros[client])


def test_evaluation_shows_means_alone():
    wanted, (found, grid) = simulate(SECURE["FedAvg"]), run(SECURE["FedAvg"])
    masked_alone(grid)
    assert found.clients.split == ("train", "test")
    for row, split in enumerate(found.clients.split):
        rows = wanted.clients.where(split)
        weights = rows.size.double() if split == "train" else torch.ones(4, dtype=torch.float64)
        for column in ("loss", "error"):
            mean = float((weights / weights.sum()) @ rows[column])
            assert float(found.clients[column][row]) == pytest.approx(mean, abs=1e-6)
    assert found.summary().error.clients == 1


def test_own_models_go_with_secure_sums():
    algorithm = eq.Algorithm(risk=by_counts(0.5), privacy=P.SecureAggregation(), personal=eq.personal.Ditto())
    wanted, (found, grid) = simulate(algorithm), run(algorithm)
    assert float((found.params - wanted.params).abs().max()) < 2e-6
    own = wanted.clients.where("test").personal_loss.mean()
    assert float(found.clients.where("test").personal_loss[0]) == pytest.approx(float(own), abs=1e-5)
    masked_alone(grid)


def test_nodes_may_take_part_in_secure_sums_only():
    grid = federation(some_data(), softmax, only_sums=True)
    with pytest.raises(IncompatibleParts, match="secure sums only"):
        run(eq.Algorithm(), grid)
    found, _ = run(SECURE["FedAvg"], grid)
    assert float((found.params - simulate(SECURE["FedAvg"]).params).abs().max()) < 2e-6
    # A server that asks all the same gets nothing.
    TaskIdentity.run_id = 7
    values = {"seed": 3, "model": 3, "classes": 3, "run": "x", "since": 0}
    params = torch.zeros(15)
    for action in ("train.losses", "train.update", "evaluate.scores", "evaluate.own"):
        message = Message(messages.write_message(0, "t", values, {"params": params}), 100, action)
        message.metadata.__dict__["_message_id"] = "m"
        reply = messages.read_message(grid.answer(100, message).content)
        assert reply.values["refused"] == "SumsOnly"
        assert not reply.arrays


# --------------------------------------------------------------------------------------------------------------- lost clients


def without(*names):
    """The run of the loop engine without some clients."""
    data = some_data()
    keep = [k for k, name in enumerate(data.train.ids) if name not in names]
    rest = FederatedData(data.train.take(keep), test=data.test)
    return simulate(SECURE["FedAvg"], rest, rounds=1, clients_per_round=len(keep)).params


@pytest.mark.parametrize("step", ["train.keys", "train.shares", "train.masked"])
def test_a_client_lost_before_its_values_came_is_not_in_the_sum(step):
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if (d.client, d.action) == ("client-1", step) and d.count == 1 else d.answer()
    found, _ = run(SECURE["FedAvg"], grid, rounds=1)
    assert found.history.rounds[0].missing == {"client-1": "did not answer within 30 s"}
    assert float((found.params - without("client-1")).abs().max()) < 1e-6


def test_a_client_lost_after_its_values_came_is_in_the_sum():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if (d.client, d.action) == ("client-1", "train.reveal") and d.count == 1 else d.answer()
    found, _ = run(SECURE["FedAvg"], grid, rounds=1)
    assert found.history.rounds[0].missing == {}
    assert float((found.params - without()).abs().max()) < 1e-6


def test_garbage_is_not_in_the_sum():
    grid = federation(some_data(), softmax)

    def garbled(delivery):
        reply = delivery.answer()
        if (delivery.client, delivery.action) == ("client-3", "train.masked") and delivery.count == 1:
            data = bytearray(reply.content["tensors"]["sum.update"].data)
            data[0] ^= 255
            content = messages.write_message(
                0, messages.read_message(reply.content).token, {}, {"sum.update": messages.bytes_to_tensor(bytes(data))}
            )
            return Message(content, reply_to=delivery.message)
        return reply

    grid.fault = garbled
    found, _ = run(SECURE["FedAvg"], grid, rounds=1)
    assert set(found.history.rounds[0].missing) == {"client-3"}
    assert float((found.params - without("client-3")).abs().max()) < 1e-6


def test_below_the_threshold_nothing_is_summed_and_the_round_is_tried_again():
    lost = ("client-1", "client-2")
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.client in lost and d.action == "train.masked" and d.count == 1 else d.answer()
    with pytest.raises(TooFewClients, match="2 clients are left, but 3 are needed"):
        run(SECURE["FedAvg"], grid, rounds=1)
    assert not [each for each in grid.log if each[1] == "train.reveal"]  # nobody gave anything away
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.client in lost and d.action == "train.masked" and d.count == 1 else d.answer()
    found, _ = run(SECURE["FedAvg"], grid, rounds=1, retries=1)
    assert float((found.params - without()).abs().max()) < 1e-6


def test_a_node_answers_each_step_of_a_sum_once():
    """A server that asks for other values under the same mask would learn their difference."""
    grid = federation(some_data(), softmax)
    run(SECURE["FedAvg"], grid, rounds=1)
    client, request = next(each for each in grid.sent if each[1].metadata.message_type == "train.masked")
    node = next(n for n, name in grid.names.items() if name == client)
    again = messages.read_message(grid.answer(node, request).content)
    assert "refused" in again.values
    assert not again.arrays


def test_what_would_show_single_clients_is_refused():
    with pytest.raises(IncompatibleParts, match="not summed securely"):
        run(eq.Algorithm(privacy=P.SecureAggregation(), personal=eq.personal.Mapper()))


# ---------------------------------------------------------------------------------------------------- distributed privacy


def private(risk=None, *, z=0.0, **more):
    options = {
        "delta": 1e-2,
        "clip": 0.3,
        "noise": "distributed",
        "step": 2.0**-20,
        "noise_multiplier": z,
        **more,
    }
    return eq.Algorithm(
        risk=risk or eq.risk.Mean(), sampler=eq.sampling.Uniform(), privacy=P.DifferentialPrivacy(None, **options)
    )  # fmt: skip


PRIVATE = {
    "FedAvg": private(),
    "Δ-FL": private(eq.risk.Superquantile(tail=0.5, quantile=P.PrivateQuantile(bound=2.0, bins=4))),
    "tilted": private(eq.risk.Tilted(tilt=1.0), loss_bound=2.0),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_without_noise_distributed_privacy_agrees_with_the_loop_engine(name):
    wanted, (found, grid) = simulate(PRIVATE[name]), run(PRIVATE[name])
    fixed = {"FedAvg": 4.0, "Δ-FL": 2.0, "tilted": 1.0}[name]  # what the sum is divided by, or the least that it may be
    slack = 2e-5 if name == "tilted" else 0.0  # the weights' sum is rounded, too
    assert float((found.params - wanted.params).abs().max()) <= 2 * 2 * 4 * 2.0**-20 / fixed + slack + 1e-6
    masked_alone(grid)
    assert found.epsilon is not None


@pytest.mark.parametrize("lost", [(), ("client-2",)])
def test_the_noise_has_as_many_shares_as_clients_were_expected(lost):
    """Nobody trains, so that the model moves by noise alone; a share that is lost with its client is made up for."""
    algorithm = eq.Algorithm(
        solver=SGD(steps=0), sampler=eq.sampling.Uniform(),
        privacy=P.DifferentialPrivacy(None, 1e-2, 1.0, noise="distributed", noise_multiplier=1.0),
    )  # fmt: skip
    model = lambda: eq.models.Softmax(199, 5)  # noqa: E731 — 1000 parameters
    grid = federation(some_data(features=199, classes=5), model)
    grid.fault = lambda d: None if d.client in lost and d.action == "train.masked" else d.answer()
    shares = []
    original = secure_node.make_private_update_row

    def watched(session, ask, modulus, clients):
        row = original(session, ask, modulus, clients)
        shares.append((row, ask))
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_node, "make_private_update_row", watched)
        found, _ = run(algorithm, grid, model=model, rounds=1)
    ask = shares[0][1]
    sigma = math.sqrt(ask["variance"][0] / ask["variance"][1])
    # Three of four may be left: replacing one moves the sum by two bounds, and three shares hide it.
    assert sigma >= 1.0 * 2 * ask["norm_bound"] / math.sqrt(3)
    for row, _ in shares:
        assert float(row.double().std()) == pytest.approx(sigma, rel=0.15)
    moved = found.params.double()
    assert float(moved.std()) == pytest.approx(math.sqrt(4) * sigma * ask["step"] / 4, rel=0.15)
    assert abs(float(moved.mean())) < 5 * float(moved.std()) / math.sqrt(1000)


def test_a_round_that_has_released_a_quantile_does_not_release_another():
    grid = federation(some_data(), softmax)

    def fault(delivery):
        is_update = '"kind":"private update"' in messages_text(delivery.message)
        return None if is_update and delivery.round == 1 and delivery.client in ("client-1", "client-2") else delivery.answer()

    grid.fault = fault
    found, _ = run(PRIVATE["Δ-FL"], grid, rounds=2, retries=2)
    first, _ = run(PRIVATE["Δ-FL"], rounds=1)
    assert set(found.history.rounds[1].missing) == {"client-1", "client-2"}
    assert sum(action == "train.keys" and t == 1 for _, action, t in grid.log) == 12  # three tries
    assert sum(action == "train.reveal" and t == 1 for _, action, t in grid.log) == 4  # of one sum
    assert float((found.params - first.params).abs().max()) < 1e-4  # the second round did nothing
    assert found.epsilon.rounds == 2  # but was paid for


def messages_text(message):
    return message.content["call"]["values"]


@pytest.mark.parametrize("noise", ["distributed", "central"])
def test_noise_by_a_seed_is_refused(noise):
    with pytest.raises(IncompatibleParts, match="noise_seed"):
        run(private(z=0.5, noise_seed=0, noise=noise))


def test_cohorts_of_random_size_are_refused_with_distributed_noise():
    algorithm = eq.Algorithm(privacy=P.DifferentialPrivacy(None, 1e-2, 1.0, noise="distributed", noise_multiplier=1.0))
    with pytest.raises(IncompatibleParts, match="Poisson"):
        run(algorithm)
