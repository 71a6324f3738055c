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
