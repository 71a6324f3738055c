"""Faults of nodes, one by one, at the level of messages: the round goes on with the rest, and the report names the node."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from fake_grid import federation, run_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import equipoise as eq
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop
from equipoise.engines.flower import server_app
from equipoise.engines.flower.transport import messages, messenger
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import EquipoiseNotice
from equipoise.experiment.folder import RunFolder
from equipoise.runs.checkpoint import read_checkpoint
from equipoise.types import Cohort
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
BAD = "client-2"
SIZES = [6, 9, 12, 15]


def some_data():
    return FederatedData(make_clients(SIZES), test=make_clients([5, 9, 14, 3], seed=1), name="four")


def softmax():
    return eq.models.Softmax(4, 3)


def run(grid, algorithm=None, *, rounds=2, **options):
    """All four clients in every round."""
    found = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, **options}
    app = server_app(
        algorithm or eq.Algorithm(), model=softmax, rounds=rounds, clients_per_round=4, on_result=found.append, **options
    )  # fmt: skip
    run_app(app, grid)
    return found[0]


def averaged(data, rounds, left_out=lambda t: ()):
    """FedAvg by hand: in round t the examples' weighted mean of all updates but those of some clients."""
    task = Task.of(softmax())
    engine, params = Loop().start(task, data), task.layout.read(task.module)
    everyone, even = torch.arange(len(SIZES)), torch.ones(len(SIZES), dtype=torch.float64)
    for t in range(rounds):
        work = engine.updates(params, Cohort(t, 3, everyone, even, even), eq.solvers.SGD())
        weights = torch.tensor([float(n) for n in SIZES])
        weights[[k for k in range(len(SIZES)) if f"client-{k}" in left_out(t)]] = 0
        params = params + (weights / weights.sum()) @ work.update
    return params


def altered(reply, change):
    """The same reply with other content."""
    content = RecordDict({key: record.copy() for key, record in reply.content.items()})
    change(content)
    reply.content = content
    return reply


def swap_update(**change):
    """A change of the update that a reply brings."""

    def alter(content):
        array = content["tensors"]["update"]
        fields = {"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data, **change}
        content["tensors"] = ArrayRecord({**content["tensors"], "update": Array(**fields)})

    return alter


NAN = torch.full((15,), float("nan")).numpy().tobytes()


def garbage(content):
    content.clear()
    content["junk"] = ConfigRecord({"bytes": bytes(range(256)), "text": "\x00{[", "numbers": [1.5, 2.5]})


def another_token(content):
    content["call"]["token"] = "0" * 16


def another_protocol(content):
    content["call"]["protocol"] = 2


# What a node does to its answer, and what the report says of it.
CHANGES = {
    "a wrong shape": (swap_update(shape=(3, 5)), "shape"),
    "too many numbers": (swap_update(shape=(10**6,), data=bytes(4 * 10**6)), "shape"),
    "a wrong type": (swap_update(dtype="float64", data=bytes(120)), "float64"),
    "bytes cut short": (swap_update(data=bytes(59)), "59 bytes"),
    "a pickle": (swap_update(stype="pickle", data=b"\x80\x04N."), "pickle"),
    "no update": (lambda content: content["tensors"].pop("update"), "no 'update'"),
    "garbage": (garbage, "cannot be read"),
    "another request's token": (another_token, "another request"),
    "another protocol": (another_protocol, "cannot be read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_node_that_sends_something_else_is_left_out_of_the_round(name):
    change, said = CHANGES[name]
    data, grid = some_data(), federation(some_data(), softmax)
    wrong = lambda d: d.client == BAD and d.action == "train.update" and d.round == 1  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), change) if wrong(d) else d.answer()
    found = run(grid, rounds=3)
    reports = found.history.rounds
    assert [set(report.missing) for report in reports] == [set(), {BAD}, set()]
    assert said in reports[1].missing[BAD]
    wanted = averaged(data, 3, lambda t: (BAD,) if t == 1 else ())
    torch.testing.assert_close(found.params, wanted, rtol=1e-6, atol=1e-7)


def test_a_node_that_sends_nan_is_named():
    data, grid = some_data(), federation(some_data(), softmax)
    grid.fault = lambda d: (
        altered(d.answer(), swap_update(data=NAN)) if (d.client, d.action) == (BAD, "train.update") else d.answer()
    )
    with pytest.warns(EquipoiseNotice, match="left out: client-2"):
        found = run(grid)
    assert [report.rejected for report in found.history.rounds] == [(BAD,)] * 2
    torch.testing.assert_close(found.params, averaged(data, 2, lambda t: (BAD,)), rtol=1e-6, atol=1e-7)


class Midrange:
    """The middle of each coordinate: an aggregator of the user's own that knows nothing of NaN."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        assert len(updates) == len(weights) == 3
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        return (updates.min(0).values + updates.max(0).values) / 2, state


def test_an_aggregator_of_ones_own_does_not_get_what_a_node_sends_as_nan():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: (
        altered(d.answer(), swap_update(data=NAN)) if (d.client, d.action) == (BAD, "train.update") else d.answer()
    )
    with pytest.warns(EquipoiseNotice, match="left out: client-2"):
        found = run(grid, eq.Algorithm(aggregator=Midrange()))
    assert [report.rejected for report in found.history.rounds] == [(BAD,)] * 2
    assert bool(found.params.isfinite().all())


def test_a_node_whose_loss_is_nan_is_named_and_the_tail_is_that_of_the_others():
    data, grid = some_data(), federation(some_data(), softmax)

    def lost(content):
        content["tensors"] = ArrayRecord({"loss": messages.tensor_to_array(torch.tensor([float("nan")], dtype=torch.float64))})

    grid.fault = lambda d: altered(d.answer(), lost) if (d.client, d.action) == (BAD, "train.losses") else d.answer()
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), weights="uniform")
    found = run(grid, algorithm, rounds=3)
    assert all(report.missing == {BAD: "has a loss that is not finite"} for report in found.history.rounds)
    assert all(report.cohort == 3 for report in found.history.rounds)
    rest = FederatedData(data.train.take([0, 1, 3]), test=data.test)
    wanted = eq.train(lambda seed: softmax(), rest, algorithm, rounds=3, clients_per_round=3, seed=3, engine="loop")
    assert torch.equal(found.params, wanted.params)


@pytest.mark.parametrize("stage", ["train.losses", "train.update"])
def test_a_node_that_dies_is_left_out(stage):
    grid = federation(some_data(), softmax)

    def dies(delivery):
        if delivery.client == BAD and delivery.action == stage and delivery.round == 1:
            grid.offline.add(BAD)
        return delivery.answer()

    grid.fault = dies
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=1.0))
    with pytest.warns(EquipoiseNotice, match="1 client could not be evaluated: client-2 is not connected"):
        found = run(grid, algorithm, rounds=3)
    assert [set(report.missing) for report in found.history.rounds] == [set(), {BAD}, {BAD}]
    assert found.history.rounds[1].missing[BAD] == "lost its connection"
    assert found.history.rounds[2].missing[BAD] == "is not connected"
    torch.testing.assert_close(
        found.params, averaged(some_data(), 3, lambda t: (BAD,) if t else ()), rtol=1e-6, atol=1e-7
    )  # fmt: skip
    assert BAD not in found.clients.client


def test_a_late_answer_is_not_taken_for_one_of_the_next_round():
    data, grid = some_data(), federation(some_data(), softmax)

    def late(delivery):
        answer = delivery.answer()
        if delivery.client == BAD and delivery.action == "train.update" and delivery.round == 0:
            grid.clock.wait_until(grid.clock.now + 45.0)
        if delivery.client == "client-0" and delivery.action == "train.update":
            grid.clock.wait_until(grid.clock.now + 20.0)  # rounds take their time
        return answer

    grid.fault = late
    found = run(grid, rounds=5)
    reports = found.history.rounds
    assert reports[0].missing == {BAD: "did not answer within 30 s"}
    # The node is busy for a while; whenever it is back, its answers are those of the round that asks.
    wanted = averaged(data, 5, lambda t: tuple(reports[t].missing))
    assert any(report.missing == {} for report in reports[1:])  # how soon it is back depends on the machine's threads
    torch.testing.assert_close(found.params, wanted, rtol=1e-6, atol=1e-7)


def test_an_answer_of_an_earlier_round_is_refused():
    data, grid = some_data(), federation(some_data(), softmax)
    kept = []

    def replays(delivery):
        answer = delivery.answer()
        if (delivery.client, delivery.action) != (BAD, "train.update"):
            return answer
        kept.append(answer.content)
        return altered(answer, lambda content: None) if len(kept) == 1 else Message(kept[0], reply_to=delivery.message)

    grid.fault = replays
    found = run(grid, rounds=2)
    assert found.history.rounds[1].missing == {BAD: "sent the answer to another request (of round 1, asked in round 2)"}
    torch.testing.assert_close(found.params, averaged(data, 2, lambda t: (BAD,) if t else ()), rtol=1e-6, atol=1e-7)


def test_an_answer_in_another_nodes_name_is_refused():
    grid = federation(some_data(), softmax)

    def forged(delivery):
        answer = delivery.answer()
        if (delivery.client, delivery.action) == (BAD, "train.update"):
            answer.metadata.__dict__["_src_node_id"] = 100
        return answer

    grid.fault = forged
    assert run(grid, rounds=1).history.rounds[0].missing == {BAD: "answered in another node's name"}


def test_errors_of_flower_and_of_the_node_are_reported():
    grid = federation(some_data(), softmax)

    def fails(delivery):
        if delivery.action == "train.update" and delivery.client == BAD:
            return Message(Error(2, "the app\nwas killed " + "x" * 1000), reply_to=delivery.message)
        if delivery.action == "train.update" and delivery.client == "client-1":
            raise RuntimeError("out of memory")
        return delivery.answer()

    grid.fault = fails
    missing = run(grid, rounds=1).history.rounds[0].missing
    assert missing[BAD] == "failed: its app raised an error; its own log says which"  # nothing that it says is repeated
    assert missing["client-1"] == "failed: its app could not be loaded; its own log says why"


def test_errors_that_flower_makes_itself_are_shown_in_bounds():
    grid = federation(some_data(), softmax)
    reason = "Precondition\n" + "x" * 1000
    codes = {BAD: 6, "client-1": 5}  # 6 is one that we have no words for
    wrong = lambda d: d.action == "train.update" and d.client in codes  # noqa: E731
    grid.fault = lambda d: Message(Error(codes[d.client], reason), reply_to=d.message) if wrong(d) else d.answer()
    missing = run(grid, rounds=1).history.rounds[0].missing
    assert missing["client-1"] == "failed: it has lost its connection"
    assert missing[BAD].startswith("failed: Precondition xxx")
    assert len(missing[BAD]) <= messages.LARGEST_REASON


def test_a_client_that_fails_its_own_models_work_is_not_asked_again_in_that_round():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if (d.client, d.action, d.round) == (BAD, "train.own", 0) else d.answer()
    algorithm = eq.Algorithm(personal=eq.personal.Ditto())
    found = run(grid, algorithm, rounds=2)
    assert [set(report.missing) for report in found.history.rounds] == [{BAD}, set()]
    assert (BAD, "train.update", 0) not in grid.log
    torch.testing.assert_close(
        found.params, averaged(some_data(), 2, lambda t: () if t else (BAD,)), rtol=1e-6, atol=1e-7
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ too few are left


def test_a_round_with_too_few_is_tried_again():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "train.update" and d.round == 1 and d.count == 2 else d.answer()
    found = run(grid, rounds=3, minimum=2, retries=1)  # in round 1 all are silent, once
    assert [report.missing for report in found.history.rounds] == [{}, {}, {}]
    assert sum(action == "train.update" and t == 1 for _, action, t in grid.log) == 8
    sent = [report.bytes_sent for report in found.history.rounds]
    assert sent[1] == 2 * sent[0]  # both tries count
    torch.testing.assert_close(found.params, averaged(some_data(), 3), rtol=1e-6, atol=1e-7)


def test_below_the_minimum_the_run_stops_with_its_checkpoint_and_can_go_on(tmp_path):
    data, grid = some_data(), federation(some_data(), softmax)
    silent = {"client-1", "client-2", "client-3"}
    grid.fault = lambda d: None if d.client in silent and d.action == "train.update" and d.round == 2 else d.answer()
    with pytest.raises(TooFewClients, match=r"1 of 4 clients did their part, and 2 are needed: .* tried 2 times") as stopped:
        run(grid, rounds=4, minimum=2, retries=1, folder=tmp_path)
    assert "did not answer within 30 s" in str(stopped.value)
    place = RunFolder(tmp_path)
    saved = read_checkpoint(place.checkpoint)
    assert saved.runs[0].state.round == 2
    assert not place.finished
    torch.testing.assert_close(saved.runs[0].state.params, averaged(data, 2), rtol=1e-6, atol=1e-7)
    grid.fault = lambda d: d.answer()
    found = run(grid, rounds=4, minimum=2, folder=tmp_path)
    torch.testing.assert_close(found.params, averaged(data, 4), rtol=1e-6, atol=1e-7)
    assert place.finished


def test_under_central_privacy_a_round_that_is_tried_again_keeps_its_cohort_and_its_quantile():
    """To draw another cohort because clients failed would let failures decide who takes part."""
    risk = eq.risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(bound=2.0, bins=2))
    privacy = eq.privacy.GaussianMechanism(clip=0.5, noise_multiplier=0.5)
    private = eq.Algorithm(risk=risk, sampler=eq.sampling.Uniform(), privacy=privacy)
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "train.update" and d.count == 1 else d.answer()
    found = run(grid, private, rounds=1, minimum=2, retries=3)
    asked = [client for client, action, _ in grid.log if action == "train.losses"]
    assert len(asked) == 2 * len(set(asked))  # the same clients, twice
    assert found.privacy.releases == 2  # one histogram, one sum


def test_with_the_minimum_the_round_goes_on():
    grid = federation(some_data(), softmax)
    silent = {"client-1", "client-2"}
    grid.fault = lambda d: None if d.client in silent and d.action == "train.update" and d.round == 0 else d.answer()
    found = run(grid, rounds=1, minimum=2)
    assert set(found.history.rounds[0].missing) == silent
    torch.testing.assert_close(found.params, averaged(some_data(), 1, lambda t: silent), rtol=1e-6, atol=1e-7)


def test_no_update_at_all_is_too_few_whatever_the_minimum():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "train.update" else d.answer()
    with pytest.raises(TooFewClients):
        run(grid, rounds=1)


def test_another_try_draws_another_cohort():
    data = some_data()
    grid = federation(data, softmax)
    found = []
    first = eq.train(softmax(), data, rounds=1, clients_per_round=2, seed=3, engine="loop")
    assert first.history.rounds[0].trained == 2
    cohort = set()

    def fault(delivery):
        if delivery.action == "train.update":
            cohort.add(delivery.client)
            return None if delivery.count == 1 and len(cohort) <= 2 else delivery.answer()
        return delivery.answer()

    grid.fault = fault
    app = server_app(
        eq.Algorithm(), model=softmax, rounds=1, clients_per_round=2, clients=4, seed=3, retries=6,
        on_result=found.append,
    )  # fmt: skip
    run_app(app, grid)
    assert len(cohort) > 2
    assert len(found) == 1


# --------------------------------------------------------------------------------------------------------------- coming back


def test_a_node_that_is_started_again_takes_part_again():
    data, grid = some_data(), federation(some_data(), softmax)

    def fault(delivery):
        if delivery.round == 1 and delivery.client == "client-0" and delivery.action == "train.update":
            grid.restart(BAD)  # under another id; the request to its old self is lost
        return None if delivery.node == old and delivery.round == 1 else delivery.answer()

    old = next(node for node, name in grid.names.items() if name == BAD)
    grid.fault = fault
    found = run(grid, rounds=4)
    assert [set(report.missing) for report in found.history.rounds] == [set(), {BAD}, set(), set()]
    torch.testing.assert_close(found.params, averaged(data, 4, lambda t: (BAD,) if t == 1 else ()), rtol=1e-6, atol=1e-7)


def test_a_silent_client_is_asked_again_when_all_are_evaluated():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "evaluate.scores" and d.client == BAD and d.count == 1 else d.answer()
    found = run(grid, rounds=1, retries=1)
    assert set(found.clients.client) == {f"client-{k}" for k in range(4)}


def test_a_solver_that_needs_everybody_waits_for_everybody():
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "train.losses" and d.client == BAD and d.count == 1 else d.answer()
    algorithm = eq.Algorithm(solver=eq.solvers.AdaptiveProx())
    with pytest.raises(TooFewClients, match="the solver needs an answer of client-2"):
        run(grid, algorithm, rounds=1)
    grid = federation(some_data(), softmax)
    grid.fault = lambda d: None if d.action == "train.losses" and d.client == BAD and d.count == 1 else d.answer()
    assert run(grid, algorithm, rounds=1, retries=1).history.rounds[0].missing == {}
    grid = federation(some_data(), softmax)  # FedDane's mean gradient is asked for as an update, before the others
    grid.fault = lambda d: None if d.action == "train.update" and d.client == BAD and d.count == 1 else d.answer()
    with pytest.raises(TooFewClients, match="the solver needs an answer of client-2"):
        run(grid, eq.Algorithm(solver=eq.solvers.FedDane()), rounds=1)


def test_an_introduction_that_makes_no_sense_is_no_client():
    grid = federation(some_data(), softmax)

    def odd(delivery):
        answer = delivery.answer()
        if delivery.client != BAD or delivery.action != "query.hello":
            return answer
        text = answer.content["call"]["values"].replace('"train":12', f'"train":{2**60}')
        return altered(answer, lambda content: content["call"].update({"values": text}))

    grid.fault = odd
    with pytest.raises(TooFewClients, match=r"3 nodes came.* says of its examples"):
        run(grid)


# ------------------------------------------------------------------------------------------------------- what nodes claim


def introduce_as(**claims):
    """A change of a node's introduction."""

    def change(content):
        values = json.loads(content["call"]["values"])
        content["call"]["values"] = json.dumps(values | claims)

    return change


CLAIMS = {
    "a name that is no text": {"client": "\ud800"},
    "a name that cannot be printed": {"client": "a\x00b"},
    "a shift that no float holds": {"shift": 10**400},
    "examples that no memory holds": {"splits": {"train": 2**39}},
    "so many examples that the others count for nothing": {"splits": {"train": 10**7}},
    "a class for each number": {"classes": 2**30},
    "a shape of strange things": {"x": {"shape": [[]], "dtype": "float32"}},
    "splits by the dozen": {"splits": {f"split {k}": 1 for k in range(1000)}},
}


@pytest.mark.parametrize("name", CLAIMS)
def test_one_introduction_crashes_no_run(name):
    """The node is named with the reason, and the others train without it."""
    grid = federation(some_data(), softmax)
    wrong = lambda d: d.client == BAD and d.action == "query.hello"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), introduce_as(**CLAIMS[name])) if wrong(d) else d.answer()
    with pytest.raises(TooFewClients, match="3 nodes came within"):
        run(grid, patience=1.0)
    found = []
    app = server_app(eq.Algorithm(), model=softmax, rounds=1, clients_per_round=3, on_result=found.append, timeout=30.0)
    run_app(app, grid)
    assert found[0].history.rounds[0].trained == 3


def test_names_with_digits_that_are_no_numbers_are_sorted():
    """ "²" is a digit to Unicode and no number to Python."""
    grid = federation(some_data(), softmax)
    wrong = lambda d: d.client == BAD and d.action == "query.hello"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), introduce_as(client="client-²")) if wrong(d) else d.answer()
    assert run(grid, rounds=1).history.rounds[0].trained == 4


def test_a_late_introduction_crashes_no_run():
    """A node that connects while a run goes on, with a name that is no text."""
    grid = federation(some_data(), softmax)

    def restarted(delivery):
        if delivery.action == "query.hello" and delivery.count == 1 and delivery.node > 103:
            return altered(delivery.answer(), introduce_as(client="\ud800"))
        if delivery.client == BAD and delivery.action == "train.update" and delivery.round == 0:
            grid.restart(BAD)
            return None
        if delivery.client == "client-0" and delivery.action == "train.update":
            grid.clock.wait_until(grid.clock.now + 20.0)  # rounds take their time
        return delivery.answer()

    grid.fault = restarted
    assert set(run(grid, rounds=3, minimum=3).history.rounds[1].missing) == {BAD}


def test_a_huge_but_finite_update_is_left_out():
    """A million times random numbers: the round goes on without, and its report names the client."""
    data, grid = some_data(), federation(some_data(), softmax)
    huge = (1e6 * torch.randn(15, generator=torch.Generator().manual_seed(0))).numpy().tobytes()
    wrong = lambda d: d.client == BAD and d.action == "train.update" and d.round == 1  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), swap_update(data=huge)) if wrong(d) else d.answer()
    found = run(grid, rounds=3)
    assert [set(report.missing) for report in found.history.rounds] == [set(), {BAD}, set()]
    assert "times as long as the median" in found.history.rounds[1].missing[BAD]
    torch.testing.assert_close(
        found.params, averaged(data, 3, lambda t: (BAD,) if t == 1 else ()), rtol=1e-6, atol=1e-7
    )  # fmt: skip


def test_under_central_privacy_no_update_is_judged_by_the_others():
    """Who is left out because of other clients' updates would move the sum by more than the clip bound."""
    grid = federation(some_data(), softmax)
    huge = (1e6 * torch.randn(15, generator=torch.Generator().manual_seed(0))).numpy().tobytes()
    wrong = lambda d: d.client == BAD and d.action == "train.update"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), swap_update(data=huge)) if wrong(d) else d.answer()
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.1, noise_multiplier=0.0)
    found = run(grid, eq.Algorithm(privacy=privacy, sampler=eq.sampling.Uniform()), rounds=1)
    assert not found.history.rounds[0].missing
    assert 0.02 < float(found.params.norm()) <= 0.1 + 1e-6  # clipped with the others


def test_parts_of_a_reply_are_waited_for_no_longer_than_the_reply(monkeypatch):
    """A node that ends while it sends its answer is a silent one: the others' answers are still read in time."""
    asked, original = [], messenger.pull_replies

    def watched(grid, message_ids, seconds):
        asked.append(seconds)
        return original(grid, message_ids, seconds)

    monkeypatch.setattr(messenger, "pull_replies", watched)
    run(federation(some_data(), softmax), timeout=30.0, rounds=1)
    assert len(asked) > 2
    assert all(0 <= seconds <= 0.9 * 30.0 for seconds in asked)
