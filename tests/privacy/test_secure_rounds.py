"""Secure aggregation inside federated rounds: the plain round up to rounding, from sums alone."""

import math
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

import equipoise as eq
from equipoise import aggregators, risk, sampling
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, ObserverFailed
from equipoise.privacy import SecureAggregation, SecureSums, secure_aggregate
from equipoise.privacy.secure_sum import SimulatedSecureSum
from equipoise.runs.checkpoint import Checkpoints
from equipoise.solvers import SGD
from equipoise.types import Cohort, Observer
from made_clients import make_clients
from rounds import draw_cohort, round_of, start_run, weighed

SIZES = [3, 4, 5, 7, 10, 11, 20, 25, 6, 8, 9, 12]  # 12 clients
WORK = SGD(lr=0.3, batch_size=4)


def small_data():
    return FederatedData(make_clients(SIZES), test=make_clients([5, 6], seed=1, prefix="unseen"), name="small")


def softmax():
    """A model whose clients do not all begin with the same loss."""
    model = eq.models.Softmax(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(12, generator=torch.Generator().manual_seed(5)).reshape(3, 4))
    return model


def started(algorithm, data=None, *, clients_per_round=6, engine="loop", seed=0):
    return start_run(
        softmax(), data or small_data(), algorithm, rounds=4, clients_per_round=clients_per_round, seed=seed, engine=engine
    )


def moved(setting, cohort=None):
    """How the first round moves the model, and its report."""
    state = setting.begin()
    after, report = round_of(setting, state, draw_cohort(setting, 0) if cohort is None else cohort)
    return after.params - state.params, report


def cohort_of(data, clients):
    """A cohort with weights by examples."""
    clients = torch.as_tensor(clients, dtype=torch.int64)
    sizes = data.train.sizes[clients].double()
    return Cohort(0, 0, clients, sizes / sizes.sum(), torch.ones(len(clients), dtype=torch.float64))


def rounding_bound(plain, clients, step, least_mass):
    """How far (N + e)/(M + f) may be from N/M, when the e and f of each client are less than a step."""
    off = clients * step
    return off * (1 + float(plain.abs().max())) / (least_mass - off)


# ------------------------------------------------------------------------------------------------- the plain round, from sums

CASES = {
    "mean by examples": {},
    "mean, uniform": {"weights": "uniform"},
    "proportional": {"sampler": sampling.Proportional()},
    "clipped": {"aggregator": aggregators.NormClip(0.1)},
    "tail": {"risk": risk.Superquantile(0.4, quantile=SecureSums())},
    "tail, uniform": {"risk": risk.Superquantile(0.4, quantile=SecureSums()), "weights": "uniform"},
    "tilted": {"risk": risk.Tilted(1.5)},
    "tilted away": {"risk": risk.Tilted(-1.5)},
    "no tilt": {"risk": risk.Tilted(0.0)},
    "stragglers": {"solver": SGD(lr=0.3, batch_size=4, epochs=3, straggler_share=0.5)},
}


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("case", CASES)
def test_secure_rounds_are_plain_ones_up_to_rounding(case, engine):
    parts = {"solver": WORK} | CASES[case]
    plain, secure = eq.Algorithm(**parts), eq.Algorithm(**parts, privacy=SecureAggregation(step=2.0**-24, loss_bound=4.0))
    expected, report = moved(started(plain, engine=engine))
    found, secured = moved(started(secure, engine=engine))
    assert (secured.cohort, secured.trained) == (report.cohort, report.trained)
    assert secured.loss == pytest.approx(report.loss)
    assert report.loss_from == "work" or report.tail_loss < 4.0  # nobody is beyond the bound
    mass = 6 * math.exp(-4.0 * 1.5) if "tilted" in case else 0.1  # of the weights, at least
    assert float((found - expected).abs().max()) <= rounding_bound(expected, 6, 2.0**-24, mass) + 1e-6
    assert float(expected.abs().max()) > 0.01


def test_q_fair_weights_are_those_of_the_plain_risk():
    # q-FedAvg's server step needs the clients' norms and is left out: the round is that of the weights alone.
    secure = eq.Algorithm(risk.QFair(2.0), WORK, privacy=SecureAggregation(loss_bound=8.0))
    setting = started(secure)
    cohort, params = draw_cohort(setting, 0), setting.first_params
    weights = cohort.weights * setting.engine.losses(params, cohort).pow(2)
    work = setting.engine.summed_update(params, cohort, WORK, weights / weights.sum(), aggregators.WeightedMean())
    found, _ = moved(setting)
    assert float((found - work.update).abs().max()) <= rounding_bound(work.update, 6, 2.0**-24, 0.001)


def test_losses_above_the_bound_count_as_the_bound():
    setting = started(eq.Algorithm(risk.Tilted(3.0), WORK, privacy=SecureAggregation(loss_bound=0.01)))
    cohort = draw_cohort(setting, 0)
    losses = setting.engine.losses(setting.first_params, cohort)
    assert float(losses.min()) > 0.01
    weights = weighed(setting.protection, cohort, losses).each
    assert torch.allclose(weights, cohort.weights * 6)  # all alike: the mean by examples


@pytest.mark.parametrize("step", [2.0**-24, 2.0**-12, 2.0**-4])
def test_rounding_is_right_in_the_mean_and_within_a_step(step):
    plain = eq.Algorithm(solver=WORK, weights="uniform")
    expected, _ = moved(started(plain))
    secure = replace(plain, privacy=SecureAggregation(step=step))
    setting = started(secure)
    found = []
    for seed in range(60):
        sums = tuple(replace(each, seed=seed) for each in setting.protection.sums)
        found.append(moved(replace(setting, protection=replace(setting.protection, sums=sums)))[0])
    off = torch.stack(found) - expected
    assert float(off.abs().max()) <= step * (1 + 1e-4) + 1e-6  # six clients, over six
    assert float(off.mean(0).abs().max()) <= 5 * step / 2 / math.sqrt(6 * 60) + 1e-6
    assert step < 2.0**-20 or float(off.abs().max()) > 0


def test_several_rounds_stay_near_the_plain_run_and_repeat():
    parts = {"risk": risk.Superquantile(0.5, quantile=SecureSums(), eta_every=2), "solver": WORK}
    plain, secure = eq.Algorithm(**parts), eq.Algorithm(**parts, privacy=SecureAggregation())
    results = [
        eq.train(softmax(), small_data(), each, rounds=6, clients_per_round=6, progress=False, engine="loop")
        for each in (plain, secure, secure)
    ]
    assert torch.allclose(results[0].params, results[1].params, atol=1e-4)
    assert torch.equal(results[1].params, results[2].params)
    assert results[1].epsilon is None
    assert all(report.epsilon is None for report in results[1].history.rounds)


# ------------------------------------------------------------------------------------------------------ what the server learns


def test_only_the_sum_decides(monkeypatch):
    # Whatever is added to one client's row and taken off another's, as masks are, changes nothing.
    rows = []

    @dataclass(frozen=True)
    class Masked(SimulatedSecureSum):
        def sum(self, contributions):
            rows.append(contributions.shape)
            masks = torch.randint(-(2**40), 2**40, contributions.shape, generator=torch.Generator().manual_seed(1))
            return super().sum(contributions + masks - masks.roll(1, 0))

    algorithm = eq.Algorithm(solver=WORK, privacy=SecureAggregation())
    expected, _ = moved(started(algorithm))
    monkeypatch.setattr(secure_aggregate, "SimulatedSecureSum", Masked)
    found, _ = moved(started(algorithm))
    assert torch.equal(found, expected)
    assert rows == [(6, 15 + 1)]  # weight · update, and weight


def test_a_modulus_too_small_for_an_update_leaves_it_out_and_never_wraps():
    # Room for 6 clients of ±682 steps each: no update of this size fits, and everybody sends zeros.
    algorithm = eq.Algorithm(solver=WORK, weights="uniform", privacy=SecureAggregation(step=2.0**-24, modulus=8192))
    found, report = moved(started(algorithm))
    assert bool((found == 0).all())
    assert report.rejected == ()
    roomy = eq.Algorithm(solver=WORK, weights="uniform", privacy=SecureAggregation(step=2.0**-8, modulus=8192))  # ±2.66
    plain = eq.Algorithm(solver=WORK, weights="uniform")
    expected, _ = moved(started(plain))
    found, _ = moved(started(roomy))
    assert float((found - expected).abs().max()) <= 2.0**-8 * (1 + 1e-4)


@dataclass(frozen=True)
class Sends:
    """Malicious clients send the same number in every coordinate."""

    value: float
    share: float = 0.2
    seed: int = 3

    def corrupt(self, sent):
        return torch.full_like(sent.updates, self.value)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("modulus", [2**48, 2**62])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e8])
def test_a_client_whose_update_cannot_be_used_adds_nothing_and_is_not_named(value, modulus, engine):
    data = eq.attacks.apply(small_data(), Sends(value))
    bad = [data.train.ids.index(name) for name in data.malicious]
    assert len(bad) == 2
    algorithm = eq.Algorithm(solver=WORK, privacy=SecureAggregation(modulus=modulus))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, report = moved(started(algorithm, data, engine=engine), cohort_of(data, range(12)))
    assert report.rejected == ()
    plain = eq.Algorithm(solver=WORK)
    others = [k for k in range(12) if k not in bad]
    expected, _ = moved(started(plain, data, engine=engine), cohort_of(data, others))  # their weight goes, too
    if value == 1e8 and modulus == 2**62:
        return  # fits, and does what a mean does: nobody looks at single updates
    assert torch.allclose(found, expected, atol=1e-6)


def test_nothing_that_can_be_used_is_no_step():
    data = eq.attacks.apply(small_data(), Sends(math.nan, share=1.0))
    algorithm = eq.Algorithm(solver=WORK, privacy=SecureAggregation())
    found, report = moved(started(algorithm, data))
    assert bool((found == 0).all())
    assert report.rejected == ()


class Told:
    """An engine whose clients report other losses than they have."""

    def __init__(self, engine, losses):
        self.engine, self.told = engine, losses

    def losses(self, params, cohort, solver=None):
        seen = self.engine.losses(params, cohort, solver)
        return torch.tensor([self.told.get(k, float(x)) for k, x in zip(cohort.clients.tolist(), seen, strict=True)]).double()

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measure", [risk.Superquantile(0.4, quantile=SecureSums()), risk.Tilted(1.0), risk.QFair(1.0)])
def test_a_client_whose_loss_is_no_number_takes_no_part_and_stops_nothing(measure, lie):
    algorithm = eq.Algorithm(measure, WORK, privacy=SecureAggregation(loss_bound=8.0))
    setting = started(algorithm)
    lying = replace(setting, engine=Told(setting.engine, {4: lie}))
    found, report = moved(lying, cohort_of(setting.data, range(8)))
    expected, without = moved(setting, cohort_of(setting.data, [0, 1, 2, 3, 5, 6, 7]))
    assert torch.allclose(found, expected, atol=1e-5)
    assert report.trained == without.trained
    everyone = replace(setting, engine=Told(setting.engine, dict.fromkeys(range(12), lie)))
    assert bool((moved(everyone)[0] == 0).all())


class Watched:
    """Personal work that remembers what clients sent."""

    def __init__(self, personal):
        self.personal = personal

    def updates(self, *arguments):
        self.sent = self.personal.updates(*arguments)
        return self.sent

    def __getattr__(self, name):
        return getattr(self.personal, name)


@pytest.mark.parametrize("broken", [False, True])
def test_what_personal_methods_send_is_what_is_summed(broken):
    data = eq.attacks.apply(small_data(), Sends(math.nan)) if broken else small_data()
    algorithm = eq.Algorithm(solver=WORK, personal=eq.personal.Mapper(), privacy=SecureAggregation())
    setting = started(algorithm, data)
    watched, cohort = Watched(setting.personal), cohort_of(data, range(12))
    found, _ = moved(replace(setting, personal=watched), cohort)
    good = torch.isfinite(watched.sent.updates).all(1)
    assert int(good.sum()) == (10 if broken else 12)
    weights = cohort.weights[good] / cohort.weights[good].sum()
    assert torch.allclose(found, weights.float() @ watched.sent.updates[good], atol=1e-6)


def test_poisson_cohorts_of_nobody_do_nothing():
    algorithm = eq.Algorithm(solver=WORK, sampler=sampling.Poisson(), privacy=SecureAggregation())
    setting = started(algorithm)
    with pytest.warns(EquipoiseNotice, match="a sum over 0 of at least 2 clients"):
        found, report = moved(setting, cohort_of(setting.data, []))
    assert bool((found == 0).all())
    assert report.cohort == 0


class Stop(Observer):
    def on_state(self, state):
        if state.round == 3:
            raise RuntimeError("killed")


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    algorithm = eq.Algorithm(solver=WORK, privacy=SecureAggregation(step=2.0**-10))

    def run(**options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            return eq.train(
                softmax(), small_data(), algorithm, rounds=5, clients_per_round=6, progress=False, engine="loop", **options
            )

    whole = run()
    with pytest.raises(ObserverFailed):
        run(observers=[Stop()], checkpoint=Checkpoints(tmp_path / "state", every=2))
    assert torch.equal(run(checkpoint=tmp_path / "state").params, whole.params)
