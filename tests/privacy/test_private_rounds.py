"""Differential privacy inside federated rounds: the law, noise, clipping, what is spent, and an audit of the real thing."""

import json
import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

import equipoise as eq
from equipoise import risk, sampling
from equipoise.aggregators import NormClip, WeightedMean
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, ObserverFailed
from equipoise.experiment import folder
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.privacy import AdaptiveClip, DifferentialPrivacy, GaussianMechanism, PrivateQuantile, epsilon_of
from equipoise.privacy import private_quantile as quantile
from equipoise.privacy.accounting import gaussian_epsilon
from equipoise.privacy.audit import audit, one_by_one
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.releases import CohortEvent, FixedSampling, NoSampling, PoissonSampling, Release
from equipoise.runs.checkpoint import CheckpointError, Checkpoints
from equipoise.solvers import SGD
from equipoise.types import Cohort, Observer, RunSize, ServerState
from made_clients import make_clients
from rounds import draw_cohort, round_of, start_run, weighed

SIZES = [3, 4, 5, 7, 10, 11, 20, 25, 6, 8, 9, 12]  # 12 clients
WORK = SGD(lr=0.3, batch_size=4)
IDLE = SGD(epochs=0)  # clients send zeros: what moves the model is noise
FREE = {"delta": 1e-3, "noise_multiplier": 0.0, "epsilon": None}


def small_data():
    return FederatedData(make_clients(SIZES), test=make_clients([5, 6], seed=1, prefix="unseen"), name="small")


def softmax(features=4):
    """A model whose clients do not all begin with the same loss."""
    model = eq.models.Softmax(features, 3)
    drawn = torch.randn(3 * features, generator=torch.Generator().manual_seed(5)).reshape(3, features)
    with torch.no_grad():
        model.weight.copy_(drawn / math.sqrt(features))
    return model


def points(values, features=1):
    """One client per row: a single example at that point, for models.MeanEstimator."""
    rows = torch.as_tensor(values, dtype=torch.float32).reshape(len(values), features)
    return FederatedData(eq.ClientSet.pack([(f"client-{i}", x.reshape(1, -1), x.reshape(1, -1)) for i, x in enumerate(rows)]))


def started(algorithm, data=None, *, model=None, clients_per_round=6, rounds=4, seed=0, engine="loop"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)  # of more bins than clients
        return start_run(
            model or softmax(), data or small_data(), algorithm, rounds=rounds, seed=seed, engine=engine,
            clients_per_round=clients_per_round,
        )  # fmt: skip


def trained(algorithm, data=None, *, model=None, clients_per_round=6, rounds=4, seed=0, engine="loop", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        return eq.train(
            model or softmax(), data or small_data(), algorithm, rounds=rounds, seed=seed, engine=engine,
            clients_per_round=clients_per_round, progress=False, **options,
        )  # fmt: skip


def one_round(setting, cohort=None, state=None, index=0):
    """One round of a run; returns how the model moved, the state after it and the report."""
    state = replace(state or setting.begin(), round=index)
    cohort = draw_cohort(setting, index) if cohort is None else cohort
    after, report = round_of(setting, state, cohort)
    return after.params - state.params, after, report


def cohort_of(clients, round_index=0):
    clients = torch.as_tensor(clients, dtype=torch.int64)
    even = torch.full((len(clients),), 1 / max(1, len(clients)), dtype=torch.float64)
    return Cohort(round_index, 0, clients, even, even)


# ------------------------------------------------------------------------------------------------------------------- the law


def bin_edge_quantile(losses, tail, bound, bins):
    """By sorting: the lowest of the edges with a count below nearest to (1 − θ)K."""
    values = sorted(min(max(float(x), 0.0), bound) for x in losses)
    edges = [bound * j / bins for j in range(bins + 1)]
    counts = [sum(v < edge for v in values) for edge in edges[:-1]] + [len(values)]
    aim = (1 - tail) * len(values)
    return min(edges, key=lambda edge: (round(abs(counts[edges.index(edge)] - aim), 9), edge))


def weigh_mean(losses, expected):
    return torch.ones(len(losses), dtype=torch.float64), expected


def weigh_tail(losses, expected):
    edge = bin_edge_quantile(losses, 0.4, 2.0, 16)
    return (losses.double().clamp(0, 2.0) >= edge).double(), 0.4 * expected


def weigh_tilted(losses, expected):
    weights = torch.exp(2.0 * (losses.double().clamp(0, 2.0) - 2.0))
    return weights, max(float(weights.sum()), 1.0)


def weigh_q(losses, expected):
    weights = (losses.double() / 2.0).clamp(1e-10, 1.0).pow(1.5)
    return weights, max(float(weights.sum()), 1.0)


LAW = {
    "mean": (risk.Mean(), weigh_mean),
    "superquantile": (risk.Superquantile(0.4, quantile=PrivateQuantile(2.0, 16)), weigh_tail),
    "tilted": (risk.Tilted(2.0), weigh_tilted),
    "q-fair": (risk.QFair(1.5), weigh_q),
}


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("sampler", [None, sampling.Uniform(), sampling.Full()], ids=["poisson", "uniform", "full"])
@pytest.mark.parametrize("case", LAW)
def test_no_noise_and_no_clipping_is_the_plain_run_bit_for_bit(case, sampler, engine):
    measure, weigh = LAW[case]
    private = GaussianMechanism(math.inf, 0.0, loss_bound=2.0, noise_seed=0)  # cohorts of the run's seed
    algorithm = eq.Algorithm(measure, WORK, server=eq.server_opt.Momentum(lr=0.5), sampler=sampler, privacy=private)
    size = 3 if sampler is None else 6  # few enough for cohorts of none
    result = trained(algorithm, engine=engine, clients_per_round=size, rounds=5)
    setting = started(algorithm, engine=engine, clients_per_round=size, rounds=5)
    params, memory = setting.first_params, algorithm.server.begin(setting.first_params)
    for index in range(5):
        cohort, total = draw_cohort(setting, index), torch.zeros_like(params)
        if len(cohort):
            weights, denominator = weigh(setting.engine.losses(params, cohort), setting.clients_per_round)
            kept = weights > 0
            if bool(kept.any()):
                work = setting.engine.summed_update(
                    params, cohort.take(kept), WORK, weights[kept] / denominator, WeightedMean()
                )
                total = work.update
        params, memory = algorithm.server.step(params, total, memory)
    assert not torch.equal(params, setting.first_params)
    assert torch.equal(result.params, params)
    assert result.epsilon.epsilon == math.inf


def test_a_cohort_of_nobody_was_among_them():
    private = GaussianMechanism(math.inf, 0.0, noise_seed=0)
    setting = started(eq.Algorithm(privacy=private), clients_per_round=1, rounds=5)
    assert 0 in [len(draw_cohort(setting, index)) for index in range(5)]


# ------------------------------------------------------------------------------------------------------------------- the noise


def noise_of(algorithm, *, clients_per_round=20, clients=50, rounds=8, features=300):
    """(rounds, D): what idle clients' rounds add to the model; and the run."""
    data = FederatedData(make_clients([1] * clients, features=features))
    setting = started(
        algorithm, data, model=softmax(features), clients_per_round=clients_per_round, rounds=rounds,
        engine="simulator",
    )  # fmt: skip
    return torch.stack([one_round(setting, index=i)[0] for i in range(rounds)]).double(), setting.protection.noise


TAIL = risk.Superquantile(0.25, quantile=PrivateQuantile(2.0, 16))
SPREAD = {  # noise on the model for z = 1.5, C = 0.7, m = 20 of 50, by hand
    "poisson": (None, risk.Mean(), 1.5 * 0.7 / 20),
    "uniform": (sampling.Uniform(), risk.Mean(), 1.5 * 2 * 0.7 / 20),
    "full": (sampling.Full(), risk.Mean(), 1.5 * 0.7 / 50),
    "tail": (None, TAIL, 1.5 * math.sqrt(1.25) * 0.7 / (0.25 * 20)),
    "uniform tail": (sampling.Uniform(), TAIL, 1.5 * math.sqrt(1.25) * 2 * 0.7 / (0.25 * 20)),
}


@pytest.mark.parametrize("case", SPREAD)
def test_the_noise_has_the_stated_standard_deviation(case):
    sampler, measure, expected = SPREAD[case]
    algorithm = eq.Algorithm(measure, IDLE, sampler=sampler, privacy=GaussianMechanism(0.7, 1.5))
    noise, _ = noise_of(algorithm)
    count = noise.numel()  # 8 · 903
    assert float(noise.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * count))
    assert abs(float(noise.mean())) < 4 * expected / math.sqrt(count)
    assert kstest(noise.flatten().numpy() / expected, "norm").pvalue > 1e-4
    between = torch.corrcoef(noise) - torch.eye(len(noise))
    assert float(between.abs().max()) < 5 / math.sqrt(noise.shape[1])  # fresh in every round


@pytest.mark.parametrize("measure", [risk.Tilted(1.0), risk.QFair(1.0)])
def test_the_noise_of_weighted_sums_is_over_the_noisy_sum_of_weights(measure):
    algorithm = eq.Algorithm(measure, IDLE, privacy=GaussianMechanism(0.7, 1.5, loss_bound=3.0))
    data = FederatedData(make_clients([1] * 50, features=300))
    setting = started(algorithm, data, model=softmax(300), clients_per_round=20, rounds=8, engine="simulator")
    run, state = setting.protection, setting.begin()
    assert run.noise.calibration.first == pytest.approx(1.5 * math.sqrt(1.25 / 0.25))
    seen = []
    for index in range(8):
        cohort = draw_cohort(setting, index)
        losses = setting.engine.losses(state.params, cohort)
        found = weighed(run, cohort, losses)
        seen.append((found.over - float(found.each.sum())) / run.noise.calibration.first)
        noise = one_round(setting, index=index)[0].double()
        expected = 1.5 * math.sqrt(1.25) * 0.7 / found.over
        assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(noise)))
    free = [s for s in seen if s > -2.5]  # a sum below 1 counts as 1
    assert len(set(free)) == len(free)  # fresh in every round


def test_a_replaced_client_moves_a_sum_of_weights_by_one():
    # Weights lie in [0, 1], so that replacing a client moves their sum no further than adding it: no factor 2.
    algorithm = eq.Algorithm(
        risk.Tilted(1.0), IDLE, sampler=sampling.Uniform(), privacy=GaussianMechanism(1.0, 0.3, loss_bound=3.0)
    )
    run = started(algorithm).protection
    losses = torch.full((6,), 3.0)
    sums = np.array([weighed(run, cohort_of(range(6), i), losses).over for i in range(2000)])
    first = 0.3 * math.sqrt(1.25 / 0.25)
    assert run.noise.calibration.first == pytest.approx(first)
    assert sums.mean() == pytest.approx(6.0, abs=5 * first / math.sqrt(2000))
    assert sums.std() == pytest.approx(first, rel=5 / math.sqrt(4000))


def test_noise_is_a_function_of_seed_purpose_and_round():
    algorithm = eq.Algorithm(privacy=DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise_seed=3))
    run, other = started(algorithm).protection.noise, started(algorithm, seed=1).protection.noise
    streams = [run.gaussian("update", 0, 400), run.gaussian("update", 1, 400), run.gaussian("count", 0, 400),
               run.gaussian("weights", 0, 400), other.gaussian("update", 0, 400)]  # fmt: skip
    assert torch.equal(streams[0], run.gaussian("update", 0, 400))
    assert float((torch.corrcoef(torch.stack(streams)) - torch.eye(5)).abs().max()) < 5 / math.sqrt(400)


@pytest.mark.parametrize("measure", [TAIL, risk.Tilted(1.0)])
@pytest.mark.parametrize("options", [{"clip_rule": AdaptiveClip()}, {"noise": "distributed"}])
def test_no_noise_is_used_twice(measure, options, monkeypatch):
    used = []
    real = NoisePlan.source

    def drawn(self, purpose, round_index):
        used.append((purpose, round_index))
        return real(self, purpose, round_index)

    monkeypatch.setattr(NoisePlan, "source", drawn)
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, loss_bound=2.0, method="rdp", **options)
    trained(eq.Algorithm(measure, WORK, privacy=private), rounds=3)
    assert len(used) == len(set(used)) >= 3 * (3 if "noise" in options or measure is not TAIL else 2)
    assert {index for _, index in used} == {0, 1, 2}


def test_noise_of_the_operating_system_is_standard_normal_and_never_the_same():
    run = started(eq.Algorithm(privacy=DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0))).protection.noise
    run.secret = None
    drawn = run.gaussian("update", 0, 20_000)
    assert not torch.equal(drawn, run.gaussian("update", 0, 20_000))
    assert kstest(drawn.numpy(), "norm").statistic < 0.02  # exceeded once in 10^6 times


@pytest.mark.parametrize("measure", [risk.Mean(), TAIL, risk.Tilted(1.0)])
@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_an_empty_cohort_releases_noise_still(measure, noise):
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise=noise, loss_bound=2.0)
    algorithm = eq.Algorithm(measure, WORK, privacy=private)
    setting = started(algorithm)
    moved, state, report = one_round(setting, cohort_of([]))
    assert float(moved.norm()) > 0
    assert (report.cohort, report.trained) == (0, 0)
    assert report.epsilon == setting.protection.epsilon_after(1) > 0
    assert (state.privacy.rounds, state.privacy.exposure) == (1, 1.0)


@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_few_clients_and_none_are_no_trouble(noise):
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise=noise, method="rdp", noise_seed=0)
    result = trained(eq.Algorithm(TAIL, WORK, privacy=private), clients_per_round=1, rounds=8)
    assert bool(torch.isfinite(result.params).all())
    assert 0 in [report.cohort for report in result.history.rounds]


# ------------------------------------------------------------------------------------------------------------------ clipping


@dataclass(frozen=True)
class Sends:
    """Every malicious client sends the same number in every coordinate."""

    value: float
    share: float = 1 / 12
    seed: int = 3

    def corrupt(self, sent):
        return torch.full_like(sent.updates, self.value)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("noise", ["central", "distributed"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1e30, 1e5, 1e-3, 1e-45, 0.0])
def test_no_client_moves_the_sum_further_than_the_clip_bound(value, noise, engine):
    private = DifferentialPrivacy(**FREE, clip=0.5, noise=noise)
    algorithm = eq.Algorithm(solver=WORK, privacy=private)
    data = eq.attacks.apply(small_data(), Sends(value))
    setting = started(algorithm, data, engine=engine)
    (bad,) = [data.train.ids.index(name) for name in data.malicious]
    others = [k for k in range(12) if k != bad]
    together, _, report = one_round(setting, cohort_of(range(12)))
    alone, _, _ = one_round(setting, cohort_of(others))
    assert bool(torch.isfinite(together).all())
    assert report.rejected == ()  # nobody is named
    grid = setting.protection.noise.grid.step * 12 * math.sqrt(len(together)) if noise == "distributed" else 0.0
    moved = float((together - alone).norm()) * 6
    assert moved <= 0.5 * (1 + 1e-5) + grid
    expected = 0.5 if 1e3 < abs(value) <= 1e9 else 0.0 if not abs(value) <= 1e9 else min(0.5, abs(value) * math.sqrt(15))
    assert moved == pytest.approx(expected, abs=1e-5 + grid)  # absurd ones are left out, others are cut to the bound


@settings(max_examples=15)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=9, max_size=9), st.floats(0.01, 100))
def test_clipped_updates_are_summed_and_divided_by_what_was_expected(values, clip):
    data = points(values)
    algorithm = eq.Algorithm(
        solver=SGD(lr=0.5, batch_size=None), privacy=GaussianMechanism(clip, 0.0), sampler=sampling.Uniform()
    )
    setting = started(algorithm, data, model=eq.models.MeanEstimator(1), clients_per_round=4, rounds=1)
    moved, _, _ = one_round(setting)
    cohort = draw_cohort(setting, 0).clients.tolist()
    exact = [float(data.train.x[k, 0]) for k in cohort]  # a step of ½ on (x − w)² goes to x
    assert float(moved) == pytest.approx(sum(max(-clip, min(clip, x)) for x in exact) / 4, rel=1e-5, abs=1e-6 * clip)


class Watched:
    """Personal work that remembers what clients sent."""

    def __init__(self, personal):
        self.personal = personal

    def updates(self, *arguments):
        self.sent = self.personal.updates(*arguments)
        return self.sent

    def __getattr__(self, name):
        return getattr(self.personal, name)


@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_what_personal_methods_send_is_clipped_too(noise):
    private = DifferentialPrivacy(**FREE, clip=0.02, noise=noise)
    algorithm = eq.Algorithm(solver=WORK, personal=eq.personal.Mapper(), privacy=private)
    setting = started(algorithm, rounds=1)
    state, cohort, watched = setting.begin(), draw_cohort(setting, 0), Watched(setting.personal)
    after, _ = round_of(replace(setting, personal=watched), state, cohort)
    sent = watched.sent.updates
    assert float(sent.norm(dim=1).min()) > 0.02
    assert not torch.allclose(sent, setting.engine.updates(state.params, cohort, WORK).update)
    by_hand = (sent / sent.norm(dim=1, keepdim=True)).sum(0) * 0.02 / 6
    grid = setting.protection.noise.grid.step * len(cohort) / 6 if noise == "distributed" else 0.0
    assert torch.allclose(after.params - state.params, by_hand, rtol=1e-4, atol=1e-7 + grid)


class Told:
    """An engine whose clients report other losses than they have."""

    def __init__(self, engine, losses):
        self.engine, self.told = engine, losses

    def losses(self, params, cohort, solver=None):
        return torch.tensor([self.told.get(k, 1.0) for k in cohort.clients.tolist()], dtype=torch.float64)

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize("measure", [TAIL, risk.Tilted(1.0), risk.Tilted(-1.0), risk.QFair(2.0)])
@pytest.mark.parametrize("lie", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_no_number_counts_as_the_bound_and_stops_nothing(measure, lie):
    # To stop, or to name the client, would be a release about it that no noise covers.
    algorithm = eq.Algorithm(measure, WORK, privacy=GaussianMechanism(0.5, 0.0, loss_bound=2.0))
    setting = started(algorithm)
    results = []
    for told in (lie, 2.0):
        lying = replace(setting, engine=Told(setting.engine, {3: told}))
        results.append(one_round(lying, cohort_of(range(6)))[0])
    assert torch.equal(*results)
    assert bool((results[0] != 0).any())


def test_everybody_diverged_is_a_round_of_noise():
    algorithm = eq.Algorithm(TAIL, WORK, privacy=GaussianMechanism(0.5, 1.0))
    data = eq.attacks.apply(small_data(), Sends(math.nan, share=1.0))
    setting = started(algorithm, data)
    lying = replace(setting, engine=Told(setting.engine, dict.fromkeys(range(12), math.nan)))
    moved, _, report = one_round(lying, cohort_of(range(6)))
    nobody, _, _ = one_round(setting, cohort_of([]))
    assert torch.equal(moved, nobody)
    assert report.rejected == ()


# ---------------------------------------------------------------------------------------------------------- a clip that adapts


@pytest.mark.parametrize("measure", [risk.Mean(), risk.Tilted(0.01)])
@pytest.mark.parametrize(("aim", "norm"), [(0.5, 5.0), (0.75, 7.0)])
def test_the_clip_follows_the_quantile_of_the_norms(measure, aim, norm):
    # Norms 1, …, 9 (a step of ½ lr goes half-way to x = 2, …, 18), and a server that hardly moves. Of nine clients a share of
    # aim is within the bound from the ⌈9 · aim⌉-th norm on: there the bound goes to and fro. Weights do not matter for it.
    rule = AdaptiveClip(quantile=aim, rate=1.0)
    private = GaussianMechanism(0.1, 0.0, clip_rule=rule, loss_bound=1e3)
    algorithm = eq.Algorithm(
        measure, SGD(lr=0.25, batch_size=None), sampler=sampling.Full(), server=eq.server_opt.SGD(lr=1e-9), privacy=private
    )
    setting = started(algorithm, points(range(2, 20, 2)), model=eq.models.MeanEstimator(1), rounds=60)
    state, bounds = setting.begin(), []
    for index in range(60):
        _, state, _ = one_round(setting, state=state, index=index)
        bounds.append(state.privacy.clip)
    assert bounds[0] == pytest.approx(0.1 * math.exp(aim))  # nobody is within 0.1
    assert all(abs(math.log(bound / norm)) < 0.1 for bound in bounds[40:])
    assert min(bounds[40:]) < max(bounds[40:])


def test_the_count_is_noisy_by_half_a_client():
    rule = AdaptiveClip(quantile=0.5, rate=1.0, ratio=0.25)
    algorithm = eq.Algorithm(solver=IDLE, privacy=GaussianMechanism(1.0, 0.2, clip_rule=rule), sampler=sampling.Uniform())
    setting = started(algorithm, rounds=300)
    run = setting.protection.noise
    count = 0.2 * math.sqrt(1.25 / 0.25)
    assert run.calibration.count == pytest.approx(count)
    found = []
    for index in range(300):  # idle clients are all within the bound: C e^{−(1 + noise − ½)}
        after = one_round(setting, index=index)[1]
        found.append(-math.log(after.privacy.clip) - 0.5)
    spread = count / 6  # replacing a client moves the centred count by 1, over 6 clients
    assert np.mean(found) == pytest.approx(0.0, abs=5 * spread / math.sqrt(300))
    assert np.std(found) == pytest.approx(spread, rel=5 / math.sqrt(600))


# ------------------------------------------------------------------------------------------------------- noise from the clients


@pytest.mark.parametrize("measure", [risk.Mean(), TAIL, risk.Tilted(1.0)])
@pytest.mark.parametrize("sampler", [None, sampling.Uniform(), sampling.Full()])
def test_distributed_sums_are_central_ones_up_to_rounding(measure, sampler):
    moved = {}
    for noise in ("central", "distributed"):
        private = DifferentialPrivacy(**FREE, clip=0.5, noise=noise, loss_bound=2.0, step=2.0**-15, noise_seed=0)
        algorithm = eq.Algorithm(measure, WORK, sampler=sampler, privacy=private)
        setting = started(algorithm, rounds=1)
        moved[noise], _, report = one_round(setting)
    assert report.trained > 0
    least = 1.0 if isinstance(measure, risk.Tilted) else 0.25 * 6  # of the denominators
    bound = 2.0**-15 * report.trained / least  # each client is off by less than a step
    assert float((moved["central"] - moved["distributed"]).abs().max()) < bound
    assert float(moved["central"].norm()) > 10 * bound


@pytest.mark.parametrize("sampler", [None, sampling.Uniform()])
def test_distributed_noise_is_what_was_accounted_for(sampler):
    private = DifferentialPrivacy(None, 1e-3, 0.7, noise_multiplier=1.5, noise="distributed")
    noise, run = noise_of(eq.Algorithm(solver=IDLE, sampler=sampler, privacy=private), rounds=4)
    change, over = (1, 2) if sampler is None else (2, 1)  # shares made for half of a random cohort are twice the variance
    grid = run.grid
    assert (run.shares, run.fewest) == (20, 10 if sampler is None else 20)
    assert grid.norm_bound * grid.step == pytest.approx(0.7, rel=0.02)  # what rounding adds
    expected = 1.5 * change * grid.norm_bound * grid.step * math.sqrt(over) / 20
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * noise.numel()))
    assert kstest(noise.flatten().numpy() / expected, "norm").pvalue > 1e-4
    steps = noise * 20 / grid.step
    assert torch.allclose(steps, steps.round(), atol=1e-2)  # on the grid


def test_the_noise_does_not_tell_how_many_clients_came():
    # Without it the width of the noise, known precisely from many coordinates, would show who was added or removed.
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise="distributed")
    algorithm = eq.Algorithm(solver=IDLE, privacy=private)
    setting = started(algorithm)
    moved = [one_round(setting, cohort_of(range(k)))[0] for k in (0, 2, 6, 12)]
    assert all(torch.equal(moved[0], each) for each in moved)


def test_nor_does_the_noise_of_the_quantile(monkeypatch):
    seen = []
    monkeypatch.setattr(quantile, "quantile_of_sum", lambda total, *_, **__: seen.append(total) or torch.tensor(0.0))
    run = started(eq.Algorithm(TAIL, WORK, privacy=GaussianMechanism(1.0, 1.0))).protection
    assert run.noise.shares == 6
    scale = run.noise.quantile.scale
    for clients in (0, 2, 6, 12):
        seen.clear()
        losses = torch.full((clients,), 0.5)
        for index in range(80):
            weighed(run, cohort_of(range(clients), index), losses)
        held = quantile.client_contributions(losses, bound=2.0, bins=16, sigma=0.0, scale=scale, source=None).sum(0)
        spread = (torch.stack(seen) - held).double().square().mean()
        expected = math.sqrt(1.25 / 0.25) * scale * math.sqrt(4)  # z of the quantile, times c √(log2 16)
        assert float(spread.sqrt()) == pytest.approx(expected, rel=5 / math.sqrt(2 * 80 * 30))


def test_the_sum_of_weights_is_noised_by_the_clients_where_they_are_to_do_it():
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=0.5, noise="distributed", loss_bound=2.0)
    run = started(eq.Algorithm(risk.Tilted(1.0), IDLE, privacy=private), clients_per_round=8).protection
    losses = torch.linspace(1.0, 2.0, 12)
    exact = float(torch.exp(losses.double() - 2.0).sum())
    sums = np.array([weighed(run, cohort_of(range(12), i), losses).over for i in range(600)])
    spread = 0.5 * math.sqrt(1.25 / 0.25) * math.sqrt(8 / 4)  # eight shares, each made for four
    rounding = math.sqrt(12) / 2 / math.ceil(20 / run.noise.calibration.first)
    assert sums.mean() == pytest.approx(exact, abs=5 * spread / math.sqrt(600))
    assert spread * (1 - 5 / math.sqrt(1200)) < sums.std() < math.hypot(spread, rounding) * (1 + 5 / math.sqrt(1200))
    assert (run.noise.shares, run.noise.fewest) == (8, 4)


def test_sums_wrap_around_modulo_an_absurd_modulus_only():
    private = DifferentialPrivacy(**FREE, clip=0.5, noise="distributed")
    algorithm = eq.Algorithm(solver=SGD(lr=0.5, batch_size=None), sampler=sampling.Full(), privacy=private)
    data = points([0.4] * 12)
    setting = started(algorithm, data, model=eq.models.MeanEstimator(1), rounds=1)
    run = setting.protection.noise
    honest, _, _ = one_round(setting)
    assert float(honest) == pytest.approx(0.4, abs=run.grid.step)
    assert run.grid.modulus > 2 * 12 * math.ceil(0.5 / run.grid.step)
    run.__dict__["grid"] = replace(run.grid, modulus=64)  # a client's 13 steps fit, twelve times 13 do not
    wrapped, _, _ = one_round(setting)
    turns = float(honest - wrapped) * 12 / (64 * run.grid.step)
    assert abs(turns) > 0.9
    assert turns == pytest.approx(round(turns), abs=1e-4)


# ------------------------------------------------------------------------------------------------------------- what is spent


def test_epsilon_of_every_round_is_that_of_the_hand_built_event():
    private = GaussianMechanism(1.0, 1.1, 1e-3, quantile_ratio=0.3)
    algorithm = eq.Algorithm(risk.Superquantile(0.5, quantile=PrivateQuantile(2.0, 8)), WORK, privacy=private)
    result = trained(algorithm, rounds=6)
    first, update = 1.1 * math.sqrt(1.3 / 0.3), 1.1 * math.sqrt(1.3)
    event = CohortEvent((Release("quantile", first), Release("update", update)), PoissonSampling(6 / 12))
    assert event.multiplier == pytest.approx(1.1)  # together they cost what was asked for …
    assert update**-2 * 0.3 == pytest.approx(first**-2)  # … and the quantile 0.3 times the update
    spent = [report.epsilon for report in result.history.rounds]
    exact = {t: epsilon_of([(event, t)], 1e-3) for t in (1, 3, 6)}
    assert spent == sorted(spent)
    assert all(true * (1 - 1e-9) <= spent[t - 1] <= true * 1.01 for t, true in exact.items())
    assert result.epsilon.epsilon == pytest.approx(exact[6], rel=1e-9)
    assert spent[-1] == result.epsilon.epsilon
    setting = started(algorithm, rounds=6)
    run = setting.protection.noise
    assert run.quantile.multiplier(run.fewest) >= first * (1 - 1e-12)
    assert result.epsilon.participations == 6  # planned: who came how often is secret
    assert result.epsilon.epsilon_server == pytest.approx(gaussian_epsilon(1.1 / math.sqrt(6), 1e-3))
    assert (result.epsilon.rounds, result.epsilon.delta, result.epsilon.nominal) == (6, 1e-3, False)
    assert result.epsilon.adjacency == "zero out one client"  # who could take part is public
    assert "not a bound" in str(result.epsilon)  # discrete noise, recorded as Gaussian


def test_cohorts_of_fixed_size_are_accounted_by_replacing_a_client():
    algorithm = eq.Algorithm(solver=IDLE, sampler=sampling.Uniform(), privacy=GaussianMechanism(1.0, 2.0, 1e-3))
    result = trained(algorithm, rounds=3)
    event = CohortEvent((Release("update", 2.0),), FixedSampling(6, 12))
    assert result.epsilon.epsilon == pytest.approx(epsilon_of([(event, 3)], 1e-3))
    assert (result.epsilon.adjacency, result.epsilon.method) == ("replace one client", "rdp")
    assert "not a bound" not in str(result.epsilon)


def test_the_count_of_an_adaptive_clip_is_paid_for():
    rule = AdaptiveClip(ratio=0.1)
    measure = risk.Superquantile(0.5, quantile=PrivateQuantile(2.0, 8))
    algorithm = eq.Algorithm(
        measure, WORK, sampler=sampling.Full(), privacy=GaussianMechanism(1.0, 0.9, 1e-3, 0.25, clip_rule=rule)
    )
    found = started(algorithm).protection.noise.calibration
    assert found.count**-2 == pytest.approx(0.1 * (found.first**-2 + found.update**-2))
    assert found.first**-2 == pytest.approx(0.25 * found.update**-2)
    assert found.count**-2 + found.first**-2 + found.update**-2 == pytest.approx(0.9**-2)
    assert trained(algorithm, rounds=4).epsilon.epsilon == pytest.approx(gaussian_epsilon(0.9 / 2, 1e-3))


def test_a_budget_is_kept_and_used():
    # Every client in every round: t rounds of multiplier z are one of z/√t, known exactly.
    private = DifferentialPrivacy(3.0, 1e-3, 1.0)
    result = trained(eq.Algorithm(solver=IDLE, sampler=sampling.Full(), privacy=private), rounds=9)
    z = started(
        eq.Algorithm(solver=IDLE, sampler=sampling.Full(), privacy=private), rounds=9
    ).protection.noise.calibration.whole
    assert result.epsilon.epsilon == pytest.approx(gaussian_epsilon(z / 3, 1e-3))
    assert 3.0 * (1 - 1e-3) <= result.epsilon.epsilon <= 3.0
    assert len(result.history.rounds) == 9


def test_a_run_stops_before_the_round_that_would_exceed_its_budget(tmp_path):
    z, budget = 4.0, 2.5
    allowed = max(t for t in range(1, 40) if gaussian_epsilon(z / math.sqrt(t), 1e-3) <= budget)
    assert 3 < allowed < 30
    private = DifferentialPrivacy(budget, 1e-3, 1.0, noise_multiplier=z)
    algorithm = eq.Algorithm(solver=IDLE, sampler=sampling.Full(), privacy=private)
    with pytest.warns(EquipoiseNotice, match=f"allows {allowed} of the 40 rounds"):
        result = eq.train(
            eq.models.Softmax(4, 3), small_data(), algorithm, rounds=40, evaluate_every=allowed, progress=False,
            checkpoint=tmp_path / "state",
        )  # fmt: skip
    assert result.rounds == len(result.history.rounds) == allowed
    assert len(result.history.points) == 1  # the end is evaluated once
    assert result.epsilon.epsilon <= budget < gaussian_epsilon(z / math.sqrt(allowed + 1), 1e-3)
    again = trained(algorithm, rounds=40, checkpoint=tmp_path / "state")  # the end was saved: nothing is released anew
    assert torch.equal(again.params, result.params)
    assert again.epsilon == result.epsilon


def test_no_rounds_cost_nothing():
    for private in (DifferentialPrivacy(1.0, 1e-3, 1.0), GaussianMechanism(1.0, 1.0)):
        result = trained(eq.Algorithm(TAIL, privacy=private), rounds=0)
        assert (result.epsilon.epsilon, result.epsilon.epsilon_server, result.epsilon.rounds) == (0.0, 0.0, 0)


def test_without_privacy_nothing_is_said():
    result = trained(eq.Algorithm(solver=IDLE), rounds=1)
    assert result.epsilon is None
    assert result.history.rounds[0].epsilon is None


TABLE = {
    "data": {"name": "label_shift", "train_clients": 12, "validation_clients": 2, "test_clients": 3, "examples": 20},
    "model": {"name": "softmax"},
    "algorithm": {
        "risk": {"name": "superquantile", "tail": 0.5, "quantile": {"name": "private", "bound": 3.0, "bins": 4}},
        "privacy": {
            "name": "differential_privacy", "epsilon": 9.0, "delta": 1e-3, "clip": 0.5, "noise_multiplier": 1.0,
            "clip_rule": {"name": "adaptive", "quantile": 0.6},
        },
        "sampler": {"name": "full"},
    },
    "train": {"rounds": 4, "clients_per_round": 12},
}  # fmt: skip


def test_a_run_folder_keeps_what_was_spent(tmp_path):
    place = folder.claim(tmp_path / "run")
    result = folder.run(build(RunConfig.of(TABLE)), place, progress=False, report=False)
    record = folder.read_record(place.path)
    assert record.epsilon == result.epsilon
    assert record.epsilon.epsilon == pytest.approx(gaussian_epsilon(1.0 / 2, 1e-3))
    assert [r.epsilon for r in record.history.rounds] == [r.epsilon for r in result.history.rounds]
    events = [json.loads(line) for line in place.rounds.read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["epsilon"] for event in rounds] == pytest.approx(
        [gaussian_epsilon(1.0 / math.sqrt(t), 1e-3) for t in range(1, 5)]
    )
    assert events[-1]["privacy"]["adjacency"] == "zero out one client"
    algorithm = RunConfig.read(place.config).algorithm()
    assert algorithm.weights == "uniform"
    assert algorithm.privacy.clip_rule == AdaptiveClip(quantile=0.6)


def test_a_run_folder_that_a_budget_ended_is_whole(tmp_path):
    table = json.loads(json.dumps(TABLE))
    table["algorithm"]["privacy"]["epsilon"] = 5.0
    place = folder.claim(tmp_path / "run")
    with pytest.warns(EquipoiseNotice, match="privacy budget"):
        result = folder.run(build(RunConfig.of(table)), place, progress=False, report=False)
    assert 0 < result.rounds < 4
    record = folder.read_record(place.path)
    assert record.rounds == result.rounds == len(record.history.rounds)
    assert record.epsilon == result.epsilon


# ------------------------------------------------------------------------------------------------------------------- going on


class Stop(Observer):
    def __init__(self, after):
        self.after = after

    def on_state(self, state):
        if state.round == self.after:
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": "distributed"},
        {"clip_rule": AdaptiveClip()},
    ],
    ids=["central", "distributed", "adaptive"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, options):
    private = DifferentialPrivacy(None, 1e-3, 0.5, noise_multiplier=0.8, method="rdp", noise_seed=0, **options)
    algorithm = eq.Algorithm(TAIL, WORK, server=eq.server_opt.Adam(lr=0.1), privacy=private)
    whole = trained(algorithm, rounds=6)
    path = tmp_path / "state"
    with pytest.raises(ObserverFailed):
        trained(algorithm, rounds=6, observers=[Stop(3)], checkpoint=Checkpoints(path, every=2))
    halves = trained(algorithm, rounds=6, checkpoint=Checkpoints(path, every=2))
    assert torch.equal(halves.params, whole.params)
    assert halves.epsilon == whole.epsilon
    assert [r.epsilon for r in halves.history.rounds] == [r.epsilon for r in whole.history.rounds]


def test_a_run_does_not_go_on_with_other_noise(tmp_path):
    path, full = tmp_path / "state", sampling.Full()
    first = eq.Algorithm(solver=IDLE, sampler=full, privacy=DifferentialPrivacy(3.0, 1e-3, 1.0))
    trained(first, rounds=2, checkpoint=path)
    with pytest.raises(CheckpointError, match="differs in privacy: "):  # the noise was set for two rounds
        trained(first, rounds=3, checkpoint=path)
    fixed = eq.Algorithm(solver=IDLE, sampler=full, privacy=GaussianMechanism(1.0, 1.0))
    trained(fixed, rounds=2, checkpoint=tmp_path / "fixed")
    with pytest.raises(CheckpointError, match="differs in privacy: "):  # what was promised for two rounds
        trained(fixed, rounds=3, checkpoint=tmp_path / "fixed")
    other = eq.Algorithm(solver=IDLE, sampler=full, privacy=DifferentialPrivacy(4.0, 1e-3, 1.0))
    with pytest.raises(CheckpointError, match="checkpoint of another run"):
        trained(other, rounds=2, checkpoint=path)


def test_personal_models_go_with_private_rounds():
    private = DifferentialPrivacy(None, 1e-3, 0.5, noise_multiplier=0.8, method="rdp", noise_seed=0)
    data = small_data()
    alone = trained(eq.Algorithm(solver=WORK, privacy=private), data)
    beside = trained(eq.Algorithm(solver=WORK, privacy=private, personal=eq.personal.Ditto()), data)
    assert torch.equal(alone.params, beside.params)  # the shared model neither sees nor pays for them
    assert beside.epsilon == alone.epsilon
    assert beside.personal is not None


# -------------------------------------------------------------------------------------------------------------------- an audit


def scores_of(algorithm, true_multiplier, *, clients=2):
    """Scores of one real round with and without a canary, a client far away from all others, along its direction."""
    data = points([[0.0, 0.0]] * (clients - 1) + [[100.0, 0.0]], 2)
    setting = started(algorithm, data, model=eq.models.MeanEstimator(2), clients_per_round=clients, rounds=1)
    state = setting.begin()

    def released(present, seed):
        private = replace(algorithm.privacy, noise_multiplier=true_multiplier)
        run = replace(setting, protection=private.protect(algorithm, RunSize(clients, clients, 1, 2, 0)))
        run.noise.inject(seed)
        chosen = cohort_of(range(clients if present else clients - 1))
        after, _ = round_of(run, state, chosen)
        return float(after.params[0] - state.params[0])

    return one_by_one(released)


AUDITED = {
    "central": DifferentialPrivacy(None, 1e-2, 1.0, noise_multiplier=1.0),
    "distributed": DifferentialPrivacy(None, 1e-2, 1.0, noise_multiplier=1.0, noise="distributed"),
}


@pytest.mark.parametrize("case", AUDITED)
def test_an_audit_of_the_real_round_is_passed_and_finds_half_the_noise(case):
    private = AUDITED[case]
    algorithm = eq.Algorithm(solver=SGD(lr=0.5, batch_size=None), sampler=sampling.Full(), privacy=private)
    claimed = gaussian_epsilon(1.0, 1e-2)
    honest = audit(scores_of(algorithm, 1.0), delta=1e-2, runs=400, assume="gaussian")
    assert not honest.exceeds(claimed)
    assert honest.lower_bound > 0.3 * claimed
    halved = audit(scores_of(algorithm, 0.5), delta=1e-2, runs=200, assume="gaussian")
    assert halved.exceeds(claimed)


def test_an_audit_of_a_private_tail_round_is_passed():
    # The canary is in the quantile's histogram and in the sum: both releases together are what is claimed.
    measure = risk.Superquantile(1.0, quantile=PrivateQuantile(4.0, 2))
    private = DifferentialPrivacy(None, 1e-2, 1.0, noise_multiplier=1.0, quantile_ratio=1.0)
    algorithm = eq.Algorithm(measure, SGD(lr=0.5, batch_size=None), sampler=sampling.Full(), privacy=private)
    found = audit(scores_of(algorithm, 1.0), delta=1e-2, runs=300, assume="gaussian")
    assert not found.exceeds(gaussian_epsilon(1.0, 1e-2))
    assert found.lower_bound > 0.2
    setting = started(algorithm, clients_per_round=12)
    event = CohortEvent(setting.protection.noise.accountant.pattern[0].releases, NoSampling())
    assert event.multiplier == pytest.approx(1.0)


def test_clipping_left_out_is_found():
    # The same scores as of a round that forgets to clip: the canary then stands out by a hundred times the noise.
    unclipped = NormClip(1e9)
    updates, weights = torch.tensor([[0.0, 0.0], [100.0, 0.0]]), torch.full((2,), 1 / 5, dtype=torch.float64)
    far = float(unclipped(updates, weights)[0][0])
    near = float(NormClip(1.0)(updates, weights)[0][0])
    assert (far, near) == (pytest.approx(20.0), pytest.approx(0.2))
    scores = lambda present, runs, seed: np.random.default_rng(seed).normal(far if present else 0.0, 0.2, runs)  # noqa: E731
    assert audit(scores, delta=1e-2, runs=500, assume="gaussian").exceeds(gaussian_epsilon(1.0, 1e-2))


def test_a_state_survives_without_the_private_part():
    # Plain rounds carry no private state, private ones a clip bound and how many rounds there were.
    setting = started(eq.Algorithm(privacy=GaussianMechanism(0.5, 1.0)))
    state = setting.begin()
    assert (state.privacy.clip, state.privacy.rounds) == (0.5, 0)
    assert ServerState(0, torch.zeros(2)).privacy is None
