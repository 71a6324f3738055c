"""A risk of the user's own under differential privacy and secure sums: its client-side form, and the laws of that form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import softplus

import equipoise as eq
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.privacy.private_sums import client_weights

PRIVATE = eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=1e-3, clip=1.0, loss_bound=3.0)
SECURE = eq.privacy.SecureAggregation(loss_bound=3.0)


@dataclass(frozen=True)
class Softplus:
    level: float

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        z = losses - self.level
        return eq.risk.RiskValue((base_weights * softplus(z)).sum(), base_weights * torch.sigmoid(z), state)


@dataclass(frozen=True)
class PrivateSoftplus(Softplus):
    factor: float = 1.0
    client_form = "loss"

    def client_weight(self, loss, base_weight, public):
        largest = torch.sigmoid(torch.tensor(public - self.level, dtype=torch.float64))
        return self.factor * base_weight * torch.sigmoid(loss.double().clamp(0, public) - self.level) / largest


class Relative(PrivateSoftplus):
    """A weight relative to the largest one of the cohort, which no client knows."""

    def client_weight(self, loss, base_weight, public):
        found = super().client_weight(loss, base_weight, public)
        return found / (found / base_weight).max()


class Uniform(PrivateSoftplus):
    """A client-side form of another risk."""

    def client_weight(self, loss, base_weight, public):
        return base_weight


def train(risk, privacy):
    data = eq.data.label_shift(train_clients=30, test_clients=4, seed=0)
    model, algorithm = eq.models.Softmax(data.features, data.classes), eq.Algorithm(risk=risk, privacy=privacy)
    return eq.train(model, data, algorithm, rounds=2, clients_per_round=10, progress=False)


@pytest.mark.parametrize("privacy", [PRIVATE, SECURE], ids=["DP", "secure"])
def test_the_refusal_says_that_the_client_side_form_is_missing(privacy):
    with pytest.raises(IncompatibleParts) as caught:
        eq.Algorithm(risk=Softplus(0.7), privacy=privacy)
    assert caught.value.rule == "own-risk-without-a-form"


@pytest.mark.parametrize("privacy", [PRIVATE, SECURE], ids=["DP", "secure"])
def test_a_risk_with_a_client_side_form_trains(privacy):
    eq.testing.check_risk(PrivateSoftplus(0.7))
    assert torch.isfinite(train(PrivateSoftplus(0.7), privacy).params).all()


def test_secure_sums_with_a_client_side_form_give_the_plain_run():
    # Weights within the bound are in proportion to the risk's, so the sums are those of the plain run, up to rounding.
    private, plain = (
        train(PrivateSoftplus(0.7), part).params for part in (eq.privacy.SecureAggregation(loss_bound=100.0), None)
    )
    torch.testing.assert_close(private, plain, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, train(eq.risk.Mean(), None).params, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("risk", "law"),
    [
        (PrivateSoftplus(0.7, factor=2.0), "between 0 and the base weight"),
        (Relative(0.7), "does not depend on other clients"),
        (Uniform(0.7), "in proportion to the weights of the risk"),
    ],
    ids=["too large", "relative", "another risk"],
)
def test_a_wrong_client_side_form_is_refused_by_check_and_by_train(risk, law):
    with pytest.raises(eq.testing.LawBroken, match=law):
        eq.testing.check_risk(risk)
    with pytest.raises(InvalidParameter, match=law):
        train(risk, PRIVATE)


def test_weights_that_a_sum_gets_are_within_the_limits_that_its_noise_is_made_for():
    class Loose:
        @staticmethod
        def client_weight(loss, base_weight, public):
            return torch.tensor([-1.0, 7.0, float("nan"), 0.25])[loss.long()]

    found = client_weights(Loose(), torch.arange(4.0), torch.ones(4), 3.0)
    assert found.tolist() == [0.0, 1.0, 0.0, 0.25]
