"""Client momentum over rounds (m ← 0.9 m + 0.1 g, sent at every step): by hand, beside robust rules, and resumed."""

from dataclasses import replace

import pytest
import torch

import equipoise as eq
from equipoise.aggregators import NNM, CentredClipping, TrimmedMean, WeightedMean
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidParameter
from equipoise.runs import setup
from equipoise.solvers import SGD
from made_clients import make_clients
from rounds import round_of
from test_drift import ENGINES, FULL, parabolas, train

MOMENTUM = SGD(lr=0.1, batch_size=None, steps=1, momentum=0.9, dampening=0.9, state="kept")


@ENGINES
def test_two_rounds_by_hand(engine):
    # F = ½(w − 10)², rate 0.1. Round 1: g = −10, m = −1, w = 0.1. Round 2: g = −9.9, m = −0.9 − 0.99 = −1.89, w = 0.289.
    algorithm = eq.Algorithm(solver=MOMENTUM, sampler=FULL)
    assert [float(train(parabolas([10.0]), algorithm, n, engine).params) for n in (1, 2)] == pytest.approx([0.1, 0.289])


def test_clients_that_sit_out_keep_their_momentum():
    # Two equal clients, one of them per round, in turn or not: a client that works twice in a row goes on with its own m.
    algorithm = eq.Algorithm(solver=MOMENTUM)
    setting = setup.set_up(
        eq.models.Softmax(4, 3).double(), FederatedData(make_clients([5, 5, 5], dtype=torch.float64), classes=3), algorithm,
        rounds=6, clients_per_round=1, seed=1, loss=None, error=None, engine="loop",
    )  # fmt: skip
    state = setting.begin()
    for _ in range(6):
        before = setting.kept.read(state.kept, torch.arange(3))
        cohort = setting.draw(state.round)
        state, _ = round_of(setting, state)
        after = setting.kept.read(state.kept, torch.arange(3))
        assert torch.equal((before != after).any(1).nonzero().flatten(), cohort.clients)


def test_dampening_is_a_smaller_rate_and_nothing_else():
    # m = (1 − d) v: with d = 0.9 a rate ten times as large makes the same steps.
    data = FederatedData(make_clients([5, 9, 12], dtype=torch.float64), classes=3)
    model, solvers = eq.models.Softmax(4, 3).double(), (replace(MOMENTUM, lr=1.0), replace(MOMENTUM, dampening=0.0))
    algorithms = [eq.Algorithm(solver=solver, sampler=FULL) for solver in solvers]
    runs = [eq.train(model, data, algorithm, rounds=4, progress=False).params for algorithm in algorithms]
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)


def test_the_length_of_dampened_steps():
    # (1 − d) times 1 + 1.9 + 2.71 = 5.61 with d = 0.9: 0.561.
    assert float(SGD(momentum=0.9, dampening=0.9).normalisers(torch.tensor([3]), 0.1)) == pytest.approx(0.561)


@pytest.mark.parametrize(
    "rule", [WeightedMean(), CentredClipping(1.0), NNM(TrimmedMean(0.2), 0.2)], ids=lambda r: type(r).__name__
)
def test_momentum_with_robust_rules_under_attack_in_both_engines_and_resumed(rule, tmp_path):
    clients = FederatedData(make_clients([6, 9, 12, 15, 20, 7], dtype=torch.float64), classes=3)
    data = eq.attacks.apply(clients, eq.attacks.ALIE(share=0.2, factor=1.5))
    algorithm = eq.Algorithm(solver=replace(MOMENTUM, batch_size=4), aggregator=rule, sampler=FULL)
    model = eq.models.Softmax(4, 3).double()
    one, other = (eq.train(model, data, algorithm, rounds=4, engine=e, progress=False).params for e in ("loop", "simulator"))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    eq.train(model, data, algorithm, rounds=2, checkpoint=tmp_path / "run.ckpt", progress=False)
    assert torch.equal(
        eq.train(model, data, algorithm, rounds=4, checkpoint=tmp_path / "run.ckpt", progress=False).params, other
    )


def test_dampening_needs_plain_momentum():
    for wrong in (
        {"dampening": 0.5},
        {"dampening": 0.5, "momentum": 0.9, "nesterov": True},
        {"dampening": 1.0, "momentum": 0.9},
    ):
        with pytest.raises(InvalidParameter, match="dampening"):
            SGD(**wrong)
