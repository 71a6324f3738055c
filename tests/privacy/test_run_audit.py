"""Audits of a run's own configuration: honest noise is not refuted, half of it is, and so is what else may go wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest

import equipoise as eq
from equipoise.privacy import canaries
from equipoise.privacy.audit import log_likelihood_ratio
from equipoise.privacy.claim_audit import audit_claim
from equipoise.privacy.privacy_profile import gaussian_profile, privacy_profile, unsampled_event
from equipoise.privacy.releases import CohortEvent, FixedSampling, PoissonSampling, Release
from equipoise.privacy.run_audit import audit_algorithm

P = eq.privacy
SMALL = {"clients": 64, "clients_per_round": 32, "rounds": 6}
LONGER = {**SMALL, "rounds": 12}
FEW = {"clients": 16, "clients_per_round": 16, "rounds": 4}


def noisy(multiplier=2.0, **options):
    return P.DifferentialPrivacy(None, 1e-2, 1.0, noise_multiplier=multiplier, **options)


def tail(**options):
    risk = eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=2))
    return eq.Algorithm(risk=risk, privacy=noisy(**options), sampler=eq.sampling.Full())


# ------------------------------------------------------------------------------------------------------ the test of a claim


def scores(z, rate, rounds, trials, seed=0):
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal((2, trials, rounds)) * z
    here = draw.random((trials, rounds)) < rate
    return tuple(log_likelihood_ratio(x, z, rate).sum(1) for x in (noise[0] + here, noise[1]))


@pytest.mark.parametrize(("z", "rate", "rounds"), [(1.0, 1.0, 1), (3.0, 1.0, 5), (1.0, 0.25, 5)])
def test_a_claim_is_refuted_by_less_noise_and_not_by_what_it_says(z, rate, rounds):
    events = [(CohortEvent((Release("update", z),), PoissonSampling(rate)), rounds)]
    honest = audit_claim(*scores(z, rate, rounds, 4000), events, delta=1e-3)
    assert not honest.refuted
    assert 0.4 * honest.claimed < honest.shown <= honest.claimed
    halved = audit_claim(*scores(z / 2, rate, rounds, 4000), events, delta=1e-3)
    assert halved.refuted
    assert halved.shown > halved.claimed


def test_a_claim_is_wrongly_refuted_as_rarely_as_is_said():
    events = [(unsampled_event(1.0), 1)]
    wrong = [audit_claim(*scores(1.0, 1.0, 1, 200, seed), events, delta=1e-3).refuted for seed in range(100)]
    assert sum(wrong) <= 12  # 5 of 100 are allowed, and more than 12 have a chance of 0.15 %


def test_profiles_agree_with_the_accountant():
    found = privacy_profile([(unsampled_event(1.0), 1)], np.array([4.3766]))
    assert found == pytest.approx(1e-5, rel=0.01)  # ε of the Gaussian mechanism at z = 1, δ = 1e-5
    assert gaussian_profile(float("inf"), np.array([0.0])) == 0
    for sampling in (PoissonSampling(0.25), FixedSampling(10, 40)):
        event = [(CohortEvent((Release("update", 2.0),), sampling), 5)]
        epsilon = eq.privacy.epsilon_of(event, 1e-3)
        assert float(privacy_profile(event, np.array([epsilon]))[0]) == pytest.approx(
            1e-3, rel=0.2
        )  # the grid of the losses is coarser here


# ---------------------------------------------------------------------------------------------------------------- whole runs


def test_central_noise_of_a_run():
    (public,) = audit_algorithm(eq.Algorithm(privacy=noisy(1.0)), **SMALL, trials=400)
    assert public.conclusive
    assert not public.refuted
    assert "not refuted" in str(public)
    assert public.control.shown > public.claimed > public.result.shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        (eq.sampling.Full(), FEW), (eq.sampling.Poisson(), LONGER), (eq.sampling.Uniform(), LONGER),
        (eq.sampling.Uniform(), {**LONGER, "clients_per_round": 60}), (eq.sampling.NodePoisson(), LONGER),
    ],
    ids=["everyone", "Poisson", "fixed, half of the clients", "fixed, nearly all clients", "coins of nodes"],
)  # fmt: skip
def test_each_observer_of_distributed_noise(sampler, size):
    """An audit that cannot fail is none: half of the noise shows more than is claimed, to each observer.

    The public's ε of fixed cohorts is the smaller of two bounds. Where that of sampling is the smaller one it is looser than
    any attack (docs/howto/privacy.md says so), and only the other observers are audited; where it is the unsampled one, all.
    """
    algorithm = replace(tail(multiplier=1.0, noise="distributed"), sampler=sampler)
    loose = sampler == eq.sampling.Uniform() and size["clients_per_round"] < 60
    observers = ["public", "node", "server", "quantile alone"][loose:]
    found = {a.observer: a for a in audit_algorithm(algorithm, **size, trials=400, only=observers)}
    assert list(found) == observers
    for audit in found.values():
        assert audit.conclusive, str(audit)
        assert not audit.refuted, str(audit)
        assert audit.control.refuted
        assert audit.control.shown >= audit.claimed


def test_trials_are_doubled_until_half_of_the_noise_is_found_out():
    """A tenth of what 400 trials show: 20 trials of each world do not tell half of the noise from all of it."""
    options = {**SMALL, "seed": 1}
    (weak,) = audit_algorithm(eq.Algorithm(privacy=noisy(1.0)), **options, trials=20)
    assert min(weak.result.trials) > 40
    assert weak.conclusive
    assert not weak.refuted


def test_updates_that_are_not_clipped_are_found_out(monkeypatch):
    monkeypatch.setattr(canaries, "LONG", 3.0)
    monkeypatch.setattr("equipoise.privacy.private_sums.NormClip", lambda bound: eq.aggregators.NormClip(3 * bound))
    (public,) = audit_algorithm(eq.Algorithm(privacy=noisy(1.0)), **SMALL, trials=300, control=False)
    assert public.refuted


def test_half_the_noise_of_the_histogram_alone_is_found_out(monkeypatch):
    original = eq.privacy.private_quantile.sample_discrete_gaussian
    quarter = lambda variance, *rest, **more: original(variance / 4, *rest, **more)  # noqa: E731
    monkeypatch.setattr(eq.privacy.private_quantile, "sample_discrete_gaussian", quarter)
    options = {"trials": 600, "control": False, "only": ["quantile alone"]}
    (found,) = audit_algorithm(tail(multiplier=0.6, noise="distributed"), **FEW, **options)
    assert found.refuted
    monkeypatch.undo()
    (found,) = audit_algorithm(tail(multiplier=0.6, noise="distributed"), **FEW, **options)
    assert not found.refuted


def test_the_command_audits_a_run(tmp_path):
    from typer.testing import CliRunner

    from equipoise.cli.privacy_commands import app

    data = eq.data.label_shift(train_clients=32, validation_clients=4, test_clients=4, seed=0)
    model, algorithm = eq.models.Softmax(data.features, data.classes), eq.Algorithm(privacy=noisy(1.0, method="rdp"))
    eq.train(model, data, algorithm, rounds=3, clients_per_round=16, progress=False).save(tmp_path / "run")
    call = ["audit", str(tmp_path / "run"), "--runs", "400", "--json"]
    honest = CliRunner().invoke(app, call)
    assert honest.exit_code == 0, honest.output
    assert json.loads(honest.stdout)["observer"] == "public"
    halved = CliRunner().invoke(app, [*call, "--noise-factor", "0.5"])
    assert halved.exit_code == 1
    much = eq.Algorithm(privacy=noisy(30.0, method="rdp"))  # one round with so much noise tells nothing
    eq.train(model, data, much, rounds=3, clients_per_round=16, progress=False).save(tmp_path / "much")
    weak = CliRunner().invoke(app, ["audit", str(tmp_path / "much"), "--runs", "20", "--rounds", "1"])
    assert weak.exit_code == 3
    assert "NOT found out" in weak.output
