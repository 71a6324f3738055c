"""Aggregators of the user's own that cannot learn: the check refuses them, and so does train before it starts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseNotice, InvalidParameter


def mean(updates, weights):
    return weights.to(updates.dtype) @ updates


@dataclass(frozen=True)
class Wrong:
    """The weighted mean with one mistake, from the round `since` on; the state counts rounds."""

    mistake: str
    since: int = 1
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        number, total = (state or 0) + 1, mean(updates, weights)
        if number < self.since:
            return total, number
        if self.mistake == "sign":
            return -total, number
        if self.mistake == "zeros":
            return torch.zeros_like(total), number
        return len(updates) * total, number  # K


@dataclass(frozen=True)
class FirstAsState:
    """Momentum of the first client's update, whoever that is."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = mean(updates, weights)
        return total if state is None else total + 0.5 * state, updates[0].clone()


@dataclass(frozen=True)
class LastUpdates:
    """The last updates as a state, used whatever their order is: right, though the state itself has an order."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = mean(updates, weights)
        return total if state is None else 0.5 * (total + state.mean(0)), updates.clone()


@dataclass(frozen=True)
class SignVote:
    """One step of ±1 per coordinate: not along the updates, but on their side."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return mean(updates.sign(), weights).sign(), state


@dataclass(frozen=True)
class PlainMedian:
    """The median of clients, which makes nothing of weights."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates.quantile(0.5, dim=0), state


@pytest.mark.parametrize(
    ("part", "law"),
    [
        (Wrong("sign"), "goes along them"),
        (Wrong("zeros"), "goes along them"),
        (Wrong("sign", since=2), "goes along them"),
        (Wrong("sign", since=3), "goes along them"),
        (Wrong("K", since=2), "however many clients send them"),
        (FirstAsState(), "does not matter for the totals of later rounds"),
    ],
    ids=str,
)
def test_an_aggregator_that_cannot_learn_is_refused_by_check_and_by_train(part, law, ragged):
    with pytest.raises(eq.testing.LawBroken, match=law):
        eq.testing.check_aggregator(part)
    with pytest.raises(InvalidParameter, match=law) as caught:
        train(ragged, part)
    assert caught.value.code == "EQ121"


@pytest.mark.parametrize("part", [LastUpdates(), SignVote(), PlainMedian()], ids=str)
def test_good_aggregators_pass(part, ragged):
    eq.testing.check_aggregator(part)
    train(ragged, part)


def test_weights_that_are_ignored_are_told_where_a_risk_sets_them(ragged):
    with pytest.warns(EquipoiseNotice, match=r"PlainMedian\(\) ignores the weights of clients.*Tilted.*weight 0"):
        train(ragged, PlainMedian(), risk=eq.risk.Tilted(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquipoiseNotice)
        train(ragged, PlainMedian())  # FedAvg's weights
        train(ragged, SignVote(), risk=eq.risk.Superquantile(0.5))


def train(ragged, part, **parts):
    algorithm = eq.Algorithm(aggregator=part, **parts)
    return eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=1, clients_per_round=4, engine="loop", progress=False)


@dataclass(frozen=True)
class Spread:
    """The mean over one plus the standard deviation between clients, which is NaN for one client."""

    unbiased: bool = True
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return mean(updates, weights) / (1 + updates.std(0, unbiased=self.unbiased)), state


@dataclass(frozen=True)
class NoNumberLater:
    """The mean, and NaN from the fifth round on."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        number = (state or 0) + 1
        return mean(updates, weights) * (float("nan") if number >= 5 else 1.0), number


@pytest.mark.filterwarnings("ignore:std")
def test_an_aggregator_whose_total_of_one_client_is_not_finite_is_refused(ragged):
    law = "the total of one finite update is finite"
    with pytest.raises(eq.testing.LawBroken, match=law):
        eq.testing.check_aggregator(Spread())
    eq.testing.check_aggregator(Spread(unbiased=False))

    def train(part, clients):
        algorithm, model = eq.Algorithm(aggregator=part), eq.models.Softmax(4, 3)
        eq.train(model, ragged, algorithm, rounds=6, clients_per_round=clients, engine="loop", progress=False)

    with pytest.raises(InvalidParameter, match=law):
        train(Spread(), 1)
    train(Spread(), 3)
    train(Spread(unbiased=False), 1)
    with pytest.raises(eq.errors.Diverged, match=r"Round 5: the total that NoNumberLater\(\) makes of 3 finite updates is not"):
        train(NoNumberLater(), 3)
    with pytest.raises(eq.errors.Diverged, match=r"the total that NoNumberLater\(\) makes of 3 finite updates is not"):
        train(eq.aggregators.FedNova(NoNumberLater()), 3)
    buffered = eq.Algorithm(aggregator=NoNumberLater(), sampler=eq.sampling.FedBuff(buffer=3))
    with pytest.raises(eq.errors.Diverged, match=r"Round 5: the total that NoNumberLater\(\) makes of 3 finite updates is not"):
        eq.train(eq.models.Softmax(4, 3), ragged, buffered, rounds=6, clients_per_round=4, progress=False)


@dataclass(frozen=True)
class Midrange:
    """The middle of each coordinate, which knows nothing of NaN; it keeps the weights and losses that it was given."""

    needs_losses: bool = False
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        assert updates.isfinite().all()
        assert len(updates) == len(weights)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        assert losses is None or len(losses) == len(updates)
        return (updates.min(0).values + updates.max(0).values) / 2, (state or 0) + len(updates)


@dataclass(frozen=True)
class CarefulMidrange(Midrange):
    """The same, written for rows of NaN."""

    def __call__(self, updates, weights, *, losses=None, state=None):
        good = updates.isfinite().all(1)
        return super().__call__(updates[good], weights[good] / weights[good].sum(), losses=None, state=state)


@dataclass(frozen=True)
class NaNClient:
    """Malicious clients whose updates are NaN."""

    share: float = 0.3
    seed: int = 0

    def corrupt(self, sent):
        return sent.updates * float("nan")


@pytest.mark.filterwarnings("ignore:.*were left out")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("around", [lambda part: part, eq.aggregators.FedNova], ids=["alone", "FedNova"])
def test_updates_that_are_not_finite_are_left_out_before_an_aggregator_of_ones_own(ragged, engine, around):
    model = eq.models.Softmax(4, 3)
    options = {"rounds": 3, "clients_per_round": 6, "engine": engine, "progress": False}
    attacked = eq.attacks.apply(ragged, NaNClient())
    results = []
    for part in (Midrange(), Midrange(needs_losses=True), CarefulMidrange()):
        results.append(eq.train(model, attacked, eq.Algorithm(aggregator=around(part)), **options))
        assert any(report.rejected for report in results[-1].history.rounds)
    assert torch.equal(results[0].params, results[1].params)
    assert torch.equal(results[0].params, results[2].params)
    everyone = eq.attacks.apply(ragged, NaNClient(share=1.0))
    with pytest.raises(eq.errors.Diverged, match=r"Round 1: the update of client .* is not finite"):
        eq.train(model, everyone, eq.Algorithm(aggregator=around(Midrange())), **options)


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_updates_that_are_not_finite_are_left_out_where_clients_come_and_go(ragged):
    attacked = eq.attacks.apply(ragged, NaNClient(share=0.5))
    algorithm = eq.Algorithm(aggregator=Midrange(), sampler=eq.sampling.FedBuff(buffer=4))
    result = eq.train(eq.models.Softmax(4, 3), attacked, algorithm, rounds=6, clients_per_round=6, progress=False)
    assert any(report.rejected for report in result.history.rounds)


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_a_total_that_is_not_finite_names_the_aggregator_also_where_some_updates_were_left_out(ragged):
    attacked, algorithm = eq.attacks.apply(ragged, NaNClient()), eq.Algorithm(aggregator=NoNumberLater())
    with pytest.raises(eq.errors.Diverged, match=r"Round 5: the total that NoNumberLater\(\) makes of [2-5] finite updates"):
        eq.train(eq.models.Softmax(4, 3), attacked, algorithm, rounds=6, clients_per_round=6, progress=False)
