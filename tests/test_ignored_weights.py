"""A risk of one's own beside an aggregator that takes one client's update as it is: `train` says if it has no effect."""

import pytest
import torch

import equipoise as eq
from equipoise.aggregators import Krum
from equipoise.risk import RiskValue
from equipoise.runs.ignored_weights import weighs_without_leaving_out

IDS = tuple(f"client-{i}" for i in range(12))


def above_one(losses, base_weights, *, clients=None, state=None):
    over = (losses - 1).clamp(min=0)
    return RiskValue(base_weights @ (losses + 4 * over.square()), base_weights * (1 + 8 * over), state)


def by_base_weights(losses, base_weights, *, clients=None, state=None):
    return RiskValue(base_weights @ losses, base_weights, state)


def only_above_one(losses, base_weights, *, clients=None, state=None):
    over = (losses - 1).clamp(min=0) + (0.01 if bool((losses <= 1).all()) else 0.0)  # a round needs some weight
    return RiskValue(base_weights @ over.square() / 2, base_weights * over, state)


def only_the_past(losses, base_weights, *, clients=None, state=None):
    """Leaves nobody out in the first round; later it leaves out clients whose loss was the smallest."""
    past = dict(state or {})
    factors = torch.tensor([past.get(each, 1.0) for each in clients], dtype=losses.dtype)
    past.update(zip(clients, (losses > losses.min()).double().tolist(), strict=True))
    return RiskValue(factors * base_weights @ losses, factors * base_weights, past)


def raises(losses, base_weights, *, clients=None, state=None):
    raise ValueError("not here")


@pytest.mark.parametrize(
    ("risk", "all_clients", "large"),
    [
        (above_one, True, True),
        (by_base_weights, False, False),  # it weighs as FedAvg does
        (only_above_one, False, True),  # k-loss takes a large loss, which keeps its weight
        (only_the_past, False, True),
        (raises, False, False),
    ],
)
def test_a_trial_finds_risks_that_leave_nobody_out(risk, all_clients, large):
    assert weighs_without_leaving_out(risk, IDS) == all_clients
    assert weighs_without_leaving_out(risk, IDS, large=True) == large


@pytest.mark.parametrize(
    ("risk", "aggregator", "told"),
    [
        (above_one, Krum(malicious=1), True),
        (above_one, eq.aggregators.KLoss(malicious=1), True),
        (only_above_one, eq.aggregators.KLoss(malicious=1), True),
        (only_above_one, Krum(malicious=1), False),
        (above_one, eq.aggregators.Median(), False),
        (by_base_weights, Krum(malicious=1), False),
        (eq.risk.Superquantile(tail=0.5), Krum(malicious=1), False),
    ],
    ids=lambda case: getattr(case, "__name__", str(case)),
)
def test_train_tells_of_a_risk_without_effect_beside_krum_and_k_loss(risk, aggregator, told, ragged, recwarn):
    algorithm = eq.Algorithm(risk=risk, aggregator=aggregator)
    eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=1, clients_per_round=8, engine="loop", progress=False)
    notices = [str(each.message) for each in recwarn if "takes one client's update as it is" in str(each.message)]
    assert len(notices) == told
    assert all("such a risk has no effect" in each for each in notices)
