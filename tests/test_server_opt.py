"""Two steps of each server optimiser, by hand."""

import math

import pytest
import torch

from equipoise.errors import InvalidParameter
from equipoise.server_opt import SGD, Adagrad, Adam, Momentum, Yogi


def two_steps(server, first=1.0, second=-2.0):
    params = torch.zeros(1, dtype=torch.float64)
    state = server.begin(params)
    for total in (first, second):
        params, state = server.step(params, torch.tensor([total], dtype=torch.float64), state)
    return float(params)


def test_sgd():
    assert two_steps(SGD(lr=0.5)) == pytest.approx(-0.5)


def test_momentum():
    assert two_steps(Momentum(lr=1.0, momentum=0.9)) == pytest.approx(1.0 + (0.9 - 2.0))


def test_adam():
    # m: 0.1, then 0.09 − 0.2 = −0.11; v: 0.99e-6 + 0.01, then 0.99 v + 0.04.
    v1 = 0.99 * 1e-6 + 0.01
    v2 = 0.99 * v1 + 0.04
    expected = 0.01 * (0.1 / (math.sqrt(v1) + 1e-3) - 0.11 / (math.sqrt(v2) + 1e-3))
    assert two_steps(Adam(lr=0.01)) == pytest.approx(expected)


def test_yogi():
    # v grows by 1 % of Δ² while Δ² is above it.
    v1 = 1e-6 + 0.01
    v2 = v1 + 0.04
    expected = 0.01 * (0.1 / (math.sqrt(v1) + 1e-3) - 0.11 / (math.sqrt(v2) + 1e-3))
    assert two_steps(Yogi(lr=0.01)) == pytest.approx(expected)


def test_yogi_forgets_slowly():
    server = Yogi()
    params = torch.zeros(1, dtype=torch.float64)
    _, (_, v) = server.step(
        params, torch.tensor([0.1], dtype=torch.float64), (params, torch.tensor([1.0], dtype=torch.float64))
    )
    assert float(v) == pytest.approx(1.0 - 0.01 * 0.01)


def test_adagrad():
    v1, v2 = 1e-6 + 1.0, 1e-6 + 5.0
    expected = 0.01 * (1 / (math.sqrt(v1) + 1e-3) - 2 / (math.sqrt(v2) + 1e-3))
    assert two_steps(Adagrad(lr=0.01)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(lr=0.0), "lr must be a positive number"),
        (lambda: SGD(lr=float("inf")), "lr must be a positive number"),
        (lambda: Momentum(momentum=1.0), r"momentum must lie in \[0, 1\)"),
        (lambda: Adam(beta1=-0.1), "beta1"),
        (lambda: Adam(beta2=1.0), "beta2"),
        (lambda: Yogi(beta2=2.0), "beta2"),
        (lambda: Adagrad(epsilon=0.0), "epsilon"),
    ],
)
def test_bad_parameters_are_named(make, words):
    with pytest.raises(InvalidParameter, match=words):
        make()
