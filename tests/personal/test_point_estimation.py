"""Point estimation, where the best λ of Ditto is known (Li 2023, thesis, section 5.4.3, Theorems 10 to 13).

Client k has w_k = θ + ζ_k, ζ_k ~ N(0, τ²) (an adversary τ_a²), and n samples x = w_k + N(0, σ²); F_k(w) = ½(w − x̄_k)². Ditto's
solution is ŵ_k(λ) = (λ w* + x̄_k)/(1 + λ), w* the mean of all x̄ (5.72), and the test error of a client is (ŵ_k(λ) − w_k)².
"""

import math

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.personal import Ditto
from equipoise.solvers import SGD

CLIENTS, SAMPLES, SIGMA, TAU = 20, 5, 1.0, 0.5
SETTINGS = {
    "clean": (0, TAU),
    "some adversaries": (4, 3.0),
    "half adversaries": (10, 4.0),
    "mostly adversaries": (16, 1.5),
}
FACTORS = (0.0, 1 / 8, 1 / 4, 1 / 2, 1 / math.sqrt(2), 1.0, math.sqrt(2), 2.0, 4.0, 8.0, math.inf)
HERE = FACTORS.index(1.0)


def best_strength(adversaries, tau_adversary, clients=CLIENTS, samples=SAMPLES, sigma=SIGMA, tau=TAU):
    """λ* of METHODS: (σ²/n) K / (K τ² + (K_a/(K − 1))(τ_a² − τ²))."""
    spread = clients * tau**2 + adversaries / (clients - 1) * (tau_adversary**2 - tau**2)
    return sigma**2 / samples * clients / spread


def draws(adversaries, tau_adversary, count, seed, tau=TAU):
    """The true w (count, K) and the sample means x̄ (count, K) of many federations; the first clients are the adversaries."""
    rng = np.random.default_rng(seed)
    spread = np.where(np.arange(CLIENTS) < adversaries, tau_adversary, tau)
    truth = rng.normal(0, 10, (count, 1)) + spread * rng.normal(size=(count, CLIENTS))
    return truth, truth + SIGMA / math.sqrt(SAMPLES) * rng.normal(size=(count, CLIENTS))


def solution(means, strength):
    """ŵ(λ) of (5.72) for means (…, K); the share λ/(1 + λ) of the global model is 1 at infinity."""
    share = 1.0 if math.isinf(strength) else strength / (1 + strength)
    return share * means.mean(-1, keepdims=True) + (1 - share) * means


def errors(truth, means, strength, adversaries):
    """Test errors of the benign clients, (count, K − K_a)."""
    return ((solution(means, strength) - truth) ** 2)[:, adversaries:]


def standard_errors_above(values, others):
    """By how many standard errors the mean of paired `others` is above that of `values`."""
    difference = others - values
    return difference.mean() / (difference.std() / math.sqrt(len(difference)))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_known_strength_has_the_lowest_error_and_variance(name):
    adversaries, tau_adversary = SETTINGS[name]
    best = best_strength(adversaries, tau_adversary)
    truth, means = draws(adversaries, tau_adversary, 60_000, seed=1)
    found = [errors(truth, means, factor * best, adversaries) for factor in FACTORS]
    mean = [e.mean(1) for e in found]  # one number per federation
    across = [e.var(1) for e in found]  # over its benign clients
    for place in range(len(FACTORS)):
        if place != HERE:
            assert standard_errors_above(mean[HERE], mean[place]) > 4, FACTORS[place]
            assert standard_errors_above(across[HERE], across[place]) > 4, FACTORS[place]
    assert min(range(len(FACTORS)), key=lambda i: found[i][:, 0].var()) == HERE  # of one client over all draws
    # Lemma 19: the error at λ* is σ_w,a², its variance 2 σ_w,a⁴.
    noise = SIGMA**2 / SAMPLES
    others = CLIENTS * TAU**2 + noise + adversaries / (CLIENTS - 1) * (tau_adversary**2 - TAU**2)
    expected = 1 / (1 / noise + (CLIENTS - 1) / others)
    assert found[HERE].mean() == pytest.approx(expected, rel=0.01)
    assert found[HERE].var() == pytest.approx(2 * expected**2, rel=0.03)


def test_the_best_strength_falls_with_more_samples_less_related_clients_and_stronger_attacks():
    clean = best_strength(0, TAU)
    assert clean == pytest.approx(SIGMA**2 / (SAMPLES * TAU**2))
    assert best_strength(0, TAU, samples=10) == pytest.approx(clean / 2)
    assert best_strength(0, TAU, tau=2 * TAU) == pytest.approx(clean / 4)
    assert best_strength(10, 4.0) < best_strength(4, 4.0) < best_strength(4, 2.0) < clean
    # The strength of a clean federation is no longer the best one under attack.
    truth, means = draws(10, 4.0, 20_000, seed=2)
    at_best, at_clean = (errors(truth, means, s, 10).mean(1) for s in (best_strength(10, 4.0), clean))
    assert standard_errors_above(at_best, at_clean) > 4


def test_related_clients_do_better_together_and_others_alone():
    # Figure 5.2: with small τ the global model beats local ones, with large τ the other way round; Ditto beats both.
    for tau, together in ((0.1, True), (2.0, False)):
        truth, means = draws(0, tau, 20_000, seed=3, tau=tau)
        local, ditto, shared = (errors(truth, means, s, 0).mean(1) for s in (0.0, best_strength(0, tau, tau=tau), math.inf))
        assert bool(shared.mean() < local.mean()) is together
        assert standard_errors_above(ditto, local) > 4
        assert standard_errors_above(ditto, shared) > 4


# ------------------------------------------------------------ the library arrives at the closed form


def half_square(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1)


def federation(adversaries, tau_adversary, seed, clients=8):
    gen = torch.Generator().manual_seed(seed)
    spread = torch.tensor([tau_adversary] * adversaries + [TAU] * (clients - adversaries)).double()
    truth = 3.0 + spread * torch.randn(clients, generator=gen, dtype=torch.float64)
    x = truth.view(-1, 1, 1) + SIGMA * torch.randn(clients, SAMPLES, 1, generator=gen, dtype=torch.float64)
    return FederatedData(ClientSet.pack((f"c{k}", x[k], x[k]) for k in range(clients))), x.mean((1, 2)).numpy()


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("adversaries", [0, 3])
def test_training_converges_to_the_closed_form(adversaries, engine):
    data, means = federation(adversaries, 3.0, seed=4)
    for strength in (0.0, 0.2, best_strength(adversaries, 3.0, clients=8), 1.5):
        algorithm = eq.Algorithm(
            solver=SGD(lr=0.4, batch_size=None, steps=2),
            personal=Ditto(strength),
            sampler=eq.sampling.Full(),
            weights="uniform",
        )
        model = eq.models.MeanEstimator(1).double()
        run = eq.train(model, data, algorithm, rounds=40, loss=half_square, engine=engine)
        own = run.personal.params(run.personal.ids)[:, 0].numpy()
        np.testing.assert_allclose(run.params.numpy(), means.mean(), atol=1e-9)
        np.testing.assert_allclose(own, solution(means, strength), atol=1e-9)


def test_the_limits_are_the_local_and_the_global_model():
    data, means = federation(2, 3.0, seed=5)
    model = eq.models.MeanEstimator(1).double()

    def own(strength, lr):
        algorithm = eq.Algorithm(
            solver=SGD(lr=0.4, batch_size=None), personal=Ditto(strength, solver=SGD(lr=lr, batch_size=None, steps=5)),
            sampler=eq.sampling.Full(), weights="uniform",
        )  # fmt: skip
        run = eq.train(model, data, algorithm, rounds=60, loss=half_square)
        return run.personal.params(run.personal.ids)[:, 0].numpy()

    np.testing.assert_allclose(own(1e-7, 0.5), means, atol=1e-6)
    np.testing.assert_allclose(own(1e7, 1e-7), means.mean(), atol=1e-6)
