"""Updates that cannot be used are left out, client by client, counted and named; the others share their weight."""

import math
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import equipoise as eq
from equipoise import aggregators as agg
from equipoise.core.task import Task
from equipoise.core.update_checks import ABSURD, longest_square, usable
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import Diverged, EquipoiseNotice
from equipoise.runs.checkpoint import Checkpoints
from equipoise.solvers import SGD
from equipoise.types import ServerState
from made_clients import make_clients
from rounds import run_round

SIZES = [3, 4, 5, 7, 10, 11, 20, 25, 6]
WORK = SGD(lr=0.2, batch_size=4)


@dataclass(frozen=True)
class Faulty:
    """Malicious clients send what `kind` says."""

    kind: str = "nan"
    share: float = 0.3
    seed: int = 2

    def corrupt(self, sent):
        updates = sent.updates.clone()
        if self.kind == "nan":
            updates[:, 3] = math.nan
        elif self.kind == "inf":
            updates[:, 0] = -math.inf
        elif self.kind == "1e30":
            updates[:, 1] = 1e30
        elif self.kind == "longer":
            return torch.cat([updates, updates[:, :1]], 1)
        elif self.kind == "shorter":
            return updates[:, 1:]
        elif self.kind == "flat":
            return updates.flatten()[:1]
        elif self.kind == "nothing":
            return None
        elif self.kind == "some":  # by their key, so that one by one and together are the same
            updates[sent.keys % 2 == 0] = math.nan
        return updates


KINDS = ["nan", "inf", "1e30", "longer", "shorter", "flat", "nothing"]


def data_of(attack=None, dtype=torch.float64):
    clean = FederatedData(make_clients(SIZES, dtype=dtype), classes=3)
    return clean if attack is None else eq.attacks.apply(clean, attack)


def start(task):
    """A point at which no two clients have the same loss."""
    return 0.1 * torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def one_round(data, algorithm, choice=None, clients=None):
    """The state and the report of one round of the given clients (None: of all), from one point."""
    task = Task.of(eq.models.Softmax(4, 3).to(data.train.x.dtype))
    engine = (choice or Simulator()).start(task, data)
    params = start(task).to(data.train.x.dtype)
    cohort = eq.sampling.Full()(0, algorithm.base_weights(data.train), clients_per_round=1, seed=0)
    if clients is not None:
        cohort = cohort.take(clients)
        cohort = replace(cohort, weights=cohort.weights / cohort.weights.sum())
    return run_round(ServerState(0, params, server=algorithm.server.begin(params)), algorithm, engine, cohort, data.train)


def honest_rows(data):
    return torch.tensor([i not in data.malicious for i in data.train.ids])


AGGREGATORS = [
    agg.WeightedMean(),
    agg.NormClip(0.1),
    agg.NormClip(),
    agg.Median(),
    agg.TrimmedMean(0.2),
    agg.GeometricMedian(),
    agg.Krum(3),
    agg.MultiKrum(3),
    agg.KNorm(3),
    agg.KLoss(3),
    agg.FedMGDA(0.1),
]


@pytest.mark.parametrize("engine", [Loop(), Simulator(), Simulator(chunk_size=2)], ids=["loop", "simulator", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_without_the_faulty_by_hand(kind, engine):
    data = data_of(Faulty(kind))
    clean = data_of()
    task = Task.of(eq.models.Softmax(4, 3).double())
    params = start(task)
    cohort = eq.sampling.Full()(0, eq.Algorithm().base_weights(clean.train), clients_per_round=1, seed=0)
    updates = Loop().start(task, clean).updates(params, cohort, WORK).update
    weights = [size if name not in data.malicious else 0 for name, size in zip(clean.train.ids, SIZES, strict=True)]
    expected = params + sum(w * u for w, u in zip(weights, updates, strict=True)) / sum(weights)
    state, report = one_round(data, eq.Algorithm(solver=WORK), engine)
    torch.testing.assert_close(state.params, expected, rtol=1e-10, atol=1e-12)
    assert report.rejected == tuple(name for name in data.train.ids if name in data.malicious)
    assert len(report.rejected) == 3
    assert (report.cohort, report.trained) == (9, 9)
    assert math.isfinite(report.loss)


@pytest.mark.parametrize("kind", ["nan", "1e30", "shorter"])
@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: repr(a))
def test_every_aggregator_gives_what_the_others_would_alone(aggregator, kind):
    data = data_of(Faulty(kind))
    keep = honest_rows(data)
    # Attackers who gave themselves away are no longer expected among the rest.
    alone = replace(aggregator, malicious=aggregator.malicious - 3) if hasattr(aggregator, "malicious") else aggregator
    expected, _ = one_round(data_of(), eq.Algorithm(solver=WORK, aggregator=alone), clients=keep)
    for engine in (Loop(), Simulator(chunk_size=4)):
        state, report = one_round(data, eq.Algorithm(solver=WORK, aggregator=aggregator), engine)
        torch.testing.assert_close(state.params, expected.params, rtol=1e-6, atol=1e-9)
        assert set(report.rejected) == data.malicious


@settings(max_examples=25)
@given(share=st.floats(0.1, 0.9), seed=st.integers(0, 2**40), chunk=st.sampled_from([None, 1, 3]))
def test_each_client_is_judged_alone(share, seed, chunk):
    data = data_of(Faulty("some", share, seed))
    results = []
    for engine in (Loop(), Simulator(chunk_size=chunk)):
        try:
            state, report = one_round(data, eq.Algorithm(solver=WORK), engine)
            results.append((report.rejected, state.params))
        except Diverged as stopped:
            results.append((stopped.clients, torch.zeros(1)))
    assert results[0][0] == results[1][0]
    assert set(results[0][0]) <= data.malicious
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("risk", [eq.risk.QFair(1.0), eq.risk.QFair(5.0), eq.risk.Superquantile(0.8), eq.risk.Tilted(2.0)])
def test_risks_with_weights_and_steps_of_their_own(risk):
    # The weights of a tail are those of the whole cohort, and then scaled up over those who arrive; those of QFair and Tilted
    # are proportional to a number of each client, so that their round is that of the others alone.
    data = data_of(Faulty("nan"))
    clean, keep = data_of(), honest_rows(data)
    state, report = one_round(data, eq.Algorithm(solver=WORK, risk=risk), Simulator())
    if isinstance(risk, eq.risk.Superquantile):
        task = Task.of(eq.models.Softmax(4, 3).double())
        params = start(task)
        cohort = eq.sampling.Full()(0, eq.Algorithm().base_weights(clean.train), clients_per_round=1, seed=0)
        engine = Loop().start(task, clean)
        weights = risk(engine.losses(params, cohort), cohort.weights).weights * keep
        expected = params + (weights / weights.sum()) @ engine.updates(params, cohort, WORK).update
    else:
        expected = one_round(clean, eq.Algorithm(solver=WORK, risk=risk), Loop(), keep)[0].params
    torch.testing.assert_close(state.params, expected, rtol=1e-9, atol=1e-11)
    assert set(report.rejected) <= data.malicious
    assert report.rejected


def test_families_leave_out_the_same_clients():
    data = data_of(Faulty("1e30", share=0.2))
    options = {"rounds": 3, "clients_per_round": 9, "seed": 1}
    model, algorithm = eq.models.Softmax(4, 3).double(), eq.Algorithm(solver=WORK)
    tails = [1.0, 0.8, 0.5]
    with pytest.warns(EquipoiseNotice, match="were left out"):
        family = eq.train_family(model, data, algorithm, tails=tails, **options)
    counts = []
    for tail in tails:
        with pytest.warns(EquipoiseNotice, match="were left out"):
            alone = eq.train(model, data, replace(algorithm, risk=eq.risk.Superquantile(tail)), engine="loop", **options)
        torch.testing.assert_close(family.results[tail].params, alone.params, rtol=1e-9, atol=1e-11)
        named = [report.rejected for report in family.results[tail].history.rounds]
        assert named == [report.rejected for report in alone.history.rounds]
        counts.append(sum(map(len, named)))
    assert counts[0] == 2 * 3
    everyone = family.comparison().results["family"][0].history.rounds
    assert [set(r.rejected) for r in everyone] == [set(data.malicious)] * 3
    with pytest.warns(EquipoiseNotice, match="were left out"):
        median = eq.train_family(model, data, replace(algorithm, aggregator=agg.Median()), tails=[1.0, 0.8], **options)
    assert all(set(r.rejected) == data.malicious for r in median.results[1.0].history.rounds)


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: repr(a))
def test_a_round_without_any_usable_update_stops_with_names(aggregator):
    data = data_of(Faulty("nan", share=1.0))
    for engine in (Loop(), Simulator()):
        with pytest.raises(Diverged, match="the update of client client-0, client-1") as stopped:
            one_round(data, eq.Algorithm(solver=WORK, aggregator=aggregator), engine)
        assert stopped.value.clients == data.train.ids
    with pytest.raises(Diverged) as stopped:
        eq.train(eq.models.Softmax(4, 3).double(), data, eq.Algorithm(solver=WORK, aggregator=aggregator), rounds=2,
                 clients_per_round=9)  # fmt: skip
    assert stopped.value.history.rounds == []


def test_a_run_says_who_was_left_out_and_how_often(tmp_path):
    data, file = data_of(Faulty("nan")), tmp_path / "run.safetensors"
    options = {"clients_per_round": 9, "checkpoint": file}
    with pytest.warns(EquipoiseNotice, match=r"6 updates of 3 clients were not finite or absurdly large, and were left out"):
        eq.train(eq.models.Softmax(4, 3).double(), data, rounds=2, **options)
    with pytest.warns(EquipoiseNotice, match="9 updates of 3 clients"):  # what a resumed run remembers counts as well
        run = eq.train(eq.models.Softmax(4, 3).double(), data, rounds=3, **options)
    assert [set(r.rejected) for r in run.history.rounds] == [set(data.malicious)] * 3
    assert all(isinstance(r.rejected, tuple) for r in run.history.rounds)


def test_an_honest_client_whose_work_diverges_is_left_out():
    clients = make_clients(SIZES, dtype=torch.float32)
    clients.x[clients.rows(4)] = 1e25  # finite, but its loss is not
    data = FederatedData(clients, classes=3)
    for engine in (Loop(), Simulator(), Simulator(chunk_size=3)):
        state, report = one_round(data, eq.Algorithm(solver=SGD(lr=0.1, batch_size=None)), engine)
        assert report.rejected == ("client-4",)
        assert bool(torch.isfinite(state.params).all())
        others = torch.tensor([i != 4 for i in range(9)])
        expected, _ = one_round(data_of(dtype=torch.float32), eq.Algorithm(solver=SGD(lr=0.1, batch_size=None)), engine, others)
        torch.testing.assert_close(state.params, expected.params)


def test_what_is_too_long_depends_on_the_model():
    losses = torch.zeros(4, dtype=torch.float64)
    squares = torch.tensor([0.0, (0.99 * ABSURD) ** 2, (1.01 * ABSURD) ** 2, math.nan], dtype=torch.float64)
    assert usable(squares, losses, longest_square(torch.zeros(3))).tolist() == [True, True, False, False]
    assert usable(squares, losses, longest_square(torch.tensor([3.0, 4.0]))).tolist() == [True, True, True, False]
    # A client without a step saw no loss and moved nothing; a step at an infinite loss is none.
    seen = torch.tensor([math.nan, math.inf, math.nan, 0.0], dtype=torch.float64)
    assert usable(squares, seen, longest_square(torch.zeros(3))).tolist() == [True, False, False, False]


def test_stragglers_without_a_step_are_not_left_out():
    algorithm = eq.Algorithm(solver=SGD(lr=0.1, epochs=0))
    for engine in (Loop(), Simulator()):
        assert one_round(data_of(), algorithm, engine)[1].rejected == ()


class Sending:
    """A personalisation whose clients send an update of their own making, with what they keep in it."""

    def width(self, dimension):
        return dimension

    def begin(self, context, params):
        return torch.zeros_like(params), None

    def work(self, context, params, cohort, rows, solver, shared):
        return rows + 1, shared

    def models(self, context, params, cohort, rows, solver, shared):
        return params + rows

    def updates(self, context, params, cohort, rows, solver):
        return torch.ones(len(cohort), len(params), dtype=params.dtype) * (1 + rows)


def test_updates_of_a_personalisation_are_attacked_and_rejected_like_others(tmp_path):
    data = data_of(Faulty("nan"))
    algorithm = eq.Algorithm(personal=Sending(), sampler=eq.sampling.Full())
    with pytest.warns(EquipoiseNotice, match="3 updates of 3 clients"):
        run = eq.train(eq.models.Softmax(4, 3).double(), data, algorithm, rounds=1)
    torch.testing.assert_close(run.params, torch.full_like(run.params, 2.0))
    assert set(run.history.rounds[0].rejected) == data.malicious
    replaced = eq.attacks.apply(data_of(), eq.attacks.ModelReplacement(share=0.3, seed=2, update="negated"))
    run = eq.train(eq.models.Softmax(4, 3).double(), replaced, replace(algorithm, weights="uniform"), rounds=1)
    torch.testing.assert_close(run.params, torch.full_like(run.params, 2 * (6 - 3 * 9) / 9))
    # They send what they keep after their work, whether or not it was just saved: 2 + 3 + 4.
    for every in (1, 2, 100):
        saving = Checkpoints(tmp_path / f"{every}.safetensors", every=every)
        run = eq.train(eq.models.Softmax(4, 3).double(), data_of(), algorithm, rounds=3, checkpoint=saving)
        torch.testing.assert_close(run.params, torch.full_like(run.params, 9.0))
