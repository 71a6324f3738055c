"""Attacks that see every honest update: answers by hand, the same on every engine, and what robust aggregators make of them."""

import math
import warnings
from statistics import NormalDist

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

import equipoise as eq
from equipoise import attacks
from equipoise.attacks import Sent
from equipoise.attacks.colluding import alie_factor, longest_step
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidParameter
from equipoise.runs.attack_notices import tell_of_attack
from equipoise.testing import check_attack
from made_clients import make_clients
from test_drift import ENGINES, FULL, parabolas, train

COLLUDING = [
    attacks.ALIE(share=0.4, seed=1, factor=1.5),
    attacks.IPM(share=0.4, seed=1),
    attacks.Mimic(share=0.4, seed=1),
    attacks.Mimic(share=0.4, seed=1, hold=True),
    attacks.MinMax(share=0.4, seed=1),
    attacks.MinMax(share=0.4, seed=1, direction="mean"),
    attacks.MinMax(share=0.4, seed=1, direction="sign"),
]
ALL = [*COLLUDING, attacks.SignFlip(share=0.4, seed=1), attacks.LabelFlip(share=0.4, seed=1)]


def sent(honest, attackers=1):
    honest = torch.tensor(honest, dtype=torch.float64)
    own = torch.ones(attackers, honest.shape[1], dtype=torch.float64)
    return Sent(own, torch.arange(attackers), len(honest) + attackers, honest)


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_the_law_of_attacks(attack):
    check_attack(attack)


def test_alie_by_hand():
    # K = 25, f = 5: q = 12 + 1 − 5 = 8, Φ⁻¹(12/20) = 0.2533. K = 10, f = 1: q = 5, Φ⁻¹(4/9) < 0: no attack.
    assert alie_factor(25, 5) == pytest.approx(0.2533, abs=1e-4)
    assert NormalDist().inv_cdf(4 / 9) == pytest.approx(-0.14, abs=1e-3)  # before the floor: μ + 0.14 s
    assert alie_factor(10, 1) == 0.0
    # Factor 0 is the honest mean 2 from each attacker.
    assert float(attacks.ALIE().corrupt(sent([[float(k)] for k in (1, 1, 1, 2, 2, 2, 3, 3, 3)]))) == pytest.approx(2.0)
    # Honest 1, 2, 3: μ = 2, s = 1 (with n − 1): 2 − 1.5.
    assert float(attacks.ALIE(factor=1.5).corrupt(sent([[1.0], [2.0], [3.0]]))) == pytest.approx(0.5)


def test_alie_has_no_factor_in_a_round_of_attackers_alone():
    # K = f = 3: no honest client, and 3//2 + 1 − 3 = −1 supporters are needed. There is no deviation to hide in: 0.
    assert [alie_factor(k, k) for k in range(1, 6)] == [0.0] * 5


@ENGINES
def test_a_run_in_which_everyone_is_an_attacker_of_alie(engine):
    # Everyone is at 0 with a minimum at 1 and sends ½ after one step of rate ½. Nobody is honest, so that attackers send the
    # mean of their own updates, ½; in the next round half of the way that is left: ¾.
    data = attacks.apply(parabolas([1.0] * 4), attacks.ALIE(share=1.0))
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.5, batch_size=None, steps=1), weights="uniform")
    assert float(train(data, algorithm, 2, engine, clients_per_round=4).params) == pytest.approx(0.75)


@pytest.mark.parametrize(("epsilon", "turned"), [(1.9, False), (2.1, True)])
def test_ipm_turns_the_mean_round_where_the_theory_says(epsilon, turned):
    # Two honest clients at 1, one attacker at −ε: the mean (2 − ε)/3 is negative iff ε > (K − f)/f = 2.
    given = sent([[1.0], [1.0]])
    mean = float((given.honest.sum() + attacks.IPM(epsilon=epsilon).corrupt(given).sum()) / 3)
    assert (mean < 0) == turned


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 9.0), min_size=1, max_size=8), st.integers(1, 5), st.floats(0.0, 12.0))
def test_ipm_turns_the_mean_if_and_only_if_epsilon_exceeds_the_honest_over_the_malicious(values, attackers, epsilon):
    # With equal weights the mean of K is ((K − f) μ − f ε μ)/K: negative, for μ > 0, if and only if ε > (K − f)/f.
    assume(abs(epsilon - len(values) / attackers) > 1e-6)
    given = sent([[v] for v in values], attackers)
    total = given.honest.sum() + attacks.IPM(epsilon=epsilon).corrupt(given).sum()
    assert (float(total) < 0) == (epsilon > len(values) / attackers)


updates_of_some = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.floats(-5.0, 5.0), min_size=width, max_size=width), min_size=2, max_size=7)
)


@settings(max_examples=60, deadline=None)
@given(updates_of_some, st.sampled_from(["deviation", "mean", "sign"]))
def test_the_step_of_min_max_is_the_longest_that_stays_within_the_diameter(rows, direction):
    # The distance to the honest update that limits γ is convex in γ and Δ at the border, so that it exceeds Δ beyond.
    honest = torch.tensor(rows, dtype=torch.float64)
    diameter = float(torch.cdist(honest, honest).max())
    mean, spread = honest.mean(0), honest.std(0)
    along = {"deviation": -spread, "mean": -mean / mean.norm().clamp(min=1e-9), "sign": -mean.sign()}[direction]
    assume(diameter > 0.01 and float(along.norm()) > 0.01 and float(mean.norm()) > 1e-6)
    point = attacks.MinMax(direction=direction).corrupt(sent(rows))[0]
    step = float((point - mean) @ along / (along @ along))
    torch.testing.assert_close(point, mean + step * along, rtol=1e-9, atol=1e-9)  # on the ray
    assert step >= -1e-12
    assert float((point - honest).norm(dim=1).max()) <= diameter * (1 + 1e-9)
    beyond = mean + (step + 1e-3 * diameter / float(along.norm())) * along
    assert float((beyond - honest).norm(dim=1).max()) > diameter


def test_min_max_by_hand():
    # Honest −1, 0, 1: s = 1, diameter 2; the farthest point along −1 with ‖x − 1‖ ≤ 2 is −1.
    assert float(attacks.MinMax().corrupt(sent([[-1.0], [0.0], [1.0]]))) == pytest.approx(-1.0)


@pytest.mark.parametrize("direction", ["deviation", "mean", "sign"])
def test_min_max_goes_against_the_honest_mean(direction):
    # Honest 1, 2, 3: μ = 2, s = 1, diameter 2, and p is −1 for each of the directions. μ − γ is within 2 of 3 for γ ≤ 1: both
    # attackers send 1. Along +1 they would send 3.
    given = sent([[1.0], [2.0], [3.0]], attackers=2)
    assert attacks.MinMax(direction=direction).corrupt(given).flatten().tolist() == pytest.approx([1.0, 1.0])


def test_min_max_is_on_the_border_and_never_beyond():
    gen = torch.Generator().manual_seed(0)
    for k in range(50):
        honest = torch.randn(6, 4, generator=gen, dtype=torch.float64)
        along = torch.randn(4, generator=gen, dtype=torch.float64) * (0.01 if k % 2 else 1.0)
        step = longest_step(honest, honest.mean(0), along)
        assert step > 5 or k % 2 == 0  # where Blades stops
        point = honest.mean(0) + step * along
        reach, diameter = (point - honest).norm(dim=1).max(), torch.cdist(honest, honest).max()
        assert float(reach) == pytest.approx(float(diameter), rel=1e-9)


def test_mimic_keeps_to_one_client_whoever_else_is_in_the_round():
    """The target is the same in every round in which it is there, and does not depend on the order of clients."""
    attack, names = attacks.Mimic(hold=True, seed=3), torch.tensor([11, 22, 33, 44, 55])
    updates = torch.arange(10.0).view(5, 2)

    def target(chosen):
        sent = Sent(torch.zeros(2, 2), torch.arange(2), 2 + len(chosen), updates[chosen], names[chosen])
        copied = attack.corrupt(sent)
        assert torch.equal(copied[0], copied[1])
        return (updates == copied[0]).all(1).nonzero().item()

    held = target([0, 1, 2, 3, 4])
    others = [k for k in range(5) if k != held]
    assert target([4, 3, 2, 1, 0]) == held
    assert target([held, others[2]]) == held
    assert target(others) == target(others[::-1]) != held
    assert {attacks.Mimic(hold=True, seed=s) == attack for s in (3, 4)} == {True, False}


def test_mimic_copies_the_honest_update_that_stands_out():
    # The spread is along the first coordinate; 5 is farthest from the mean 6/4.
    given = sent([[0.0, 0.1], [0.5, -0.1], [0.5, 0.0], [5.0, 0.0]], attackers=2)
    assert attacks.Mimic().corrupt(given).tolist() == [[5.0, 0.0]] * 2
    same = sent([[2.0, 1.0]] * 3)
    assert attacks.Mimic().corrupt(same).tolist() == [[2.0, 1.0]]


def test_mimic_looks_for_the_spread_around_the_mean():
    # μ = (32/3, 1/30); around it the updates are (4/3, −1/30), (−2/3, 92/30) and (−2/3, −91/30). Their sums of squares are 2.67
    # and 18.6, and that of the products only −0.07: the spread is along the second coordinate, where (10, 3.1) is the farthest.
    # Around 0 the first coordinate is the main one, 144 + 100 + 100 against 18.6, and (12, 0) is the farthest.
    given = sent([[12.0, 0.0], [10.0, 3.1], [10.0, -3.0]], attackers=2)
    assert attacks.Mimic().corrupt(given).tolist() == [[10.0, 3.1]] * 2


def test_alone_among_themselves_attackers_do_not_fail():
    for attack in COLLUDING:
        for honest in (torch.empty(0, 3), torch.ones(1, 3)):
            found = attack.corrupt(Sent(torch.ones(2, 3), torch.arange(2), 2 + len(honest), honest))
            assert bool(torch.isfinite(found).all())


def test_a_flipped_sign_by_hand():
    # An attacker sends the negative of its own update, whatever the others send; −μ of the honest 5 would be IPM(1).
    given = Sent(torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.arange(2), 3, torch.tensor([[5.0, 5.0]]))
    assert attacks.SignFlip().corrupt(given).tolist() == [[-1.0, 2.0], [-0.5, 0.0]]


@ENGINES
def test_a_round_with_a_flipped_sign_by_hand(engine):
    # F_k = ½(w − x_k)², x = (1, 3), one step of rate ½ from w = 0: updates ½ and 1½. The attacker's is negated: (½ − 1½)/2 or
    # (1½ − ½)/2.
    data = attacks.apply(parabolas([1.0, 3.0]), attacks.SignFlip(share=0.5))
    solver = eq.solvers.SGD(lr=0.5, batch_size=None, steps=1)
    algorithm = eq.Algorithm(solver=solver, sampler=FULL, weights="uniform")
    (bad,) = data.malicious
    assert float(train(data, algorithm, 1, engine).params) == pytest.approx({"c0": 0.5, "c1": -0.5}[bad])


def test_labels_flipped_twice_are_the_labels():
    data = FederatedData(make_clients([4, 5, 6]), test=make_clients([3]), classes=3, name="three")
    flip = attacks.LabelFlip(share=1.0)
    once = flip.poison(data.train, data.train.ids, 3)
    assert torch.equal(once.y, 2 - data.train.y)
    assert torch.equal(flip.poison(once, data.train.ids, 3).y, data.train.y)


WHOLE_RUNS = [
    attacks.ALIE(share=0.3, factor=1.5),
    attacks.IPM(share=0.3, epsilon=3.0),
    attacks.Mimic(share=0.3),
    attacks.Mimic(share=0.3, hold=True),
    attacks.MinMax(share=0.3),
    attacks.SignFlip(share=0.3),
    attacks.LabelFlip(share=0.3),
    attacks.Backdoor(share=0.3, target=1),
    attacks.Backdoor(share=0.3, target=1, boost=None),
]


@pytest.mark.parametrize("attack", WHOLE_RUNS, ids=repr)
@pytest.mark.parametrize("aggregator", [eq.aggregators.WeightedMean(), eq.aggregators.Median()], ids=repr)
def test_runs_under_attack_agree_on_both_engines(attack, aggregator):
    data = attacks.apply(eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=4), attack)
    model = eq.models.Softmax(data.features, data.classes)
    algorithm = eq.Algorithm(aggregator=aggregator, solver=eq.solvers.SGD(lr=0.05))
    runs = [
        eq.train(model, data, algorithm, rounds=4, clients_per_round=12, engine=engine, progress=False)
        for engine in ("loop", "simulator", eq.engines.Simulator(chunk_size=3))
    ]
    clean = eq.train(model, eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=4), algorithm, rounds=4,
                     clients_per_round=12, engine="loop", progress=False)  # fmt: skip
    first, *others = ([*run.model.parameters()] for run in runs)
    for other in others:
        for left, right in zip(first, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(first, clean.model.parameters(), strict=True))


def test_several_runs_under_an_omniscient_attack_are_those_of_one():
    data = attacks.apply(eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=4), attacks.IPM(share=0.3))
    model = eq.models.Softmax(data.features, data.classes)
    given = {"rounds": 3, "clients_per_round": 8, "progress": False}
    many = eq.train_many(model, data, {"a": eq.Algorithm()}, seeds=2, **given)
    alone = eq.train(model, data, seed=1, **given)
    for left, right in zip(many.results["a"][1].model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_wrong_parameters_are_refused():
    for make in (
        lambda: attacks.ALIE(factor=-1.0),
        lambda: attacks.IPM(epsilon=math.nan),
        lambda: attacks.MinMax(direction="up"),
        lambda: attacks.Mimic(share=2.0),
        lambda: attacks.SignFlip(seed=-1),
    ):
        with pytest.raises(InvalidParameter):
            make()


@pytest.mark.filterwarnings("default:ALIE's factor z is")
@pytest.mark.parametrize(
    ("clients", "attack", "told"),
    [
        (30, attacks.ALIE(share=0.2), "is 0.21 for about 6 attackers among the 30 clients of a round: they send nearly"),
        (20, attacks.ALIE(share=0.05), "is 0 for about 1 attacker among the 20 clients of a round: they send the mean"),
        (25, attacks.ALIE(share=0.2), ""),  # z = 0.253, as in papers
        (20, attacks.ALIE(share=0.2, factor=0.1), ""),
        (20, attacks.IPM(share=0.2), ""),
    ],
)
def test_a_pull_of_nearly_0_is_told(clients, attack, told):
    data = attacks.apply(parabolas([1.0] * clients), attack)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_attack(data, clients)
    assert [told in str(each.message) for each in caught] == ([True] if told else [])
