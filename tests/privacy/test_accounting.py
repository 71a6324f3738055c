import logging
import math
from statistics import NormalDist

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.privacy.accounting import Accountant, Spent, epsilon_of, gaussian_epsilon, noise_for
from equipoise.privacy.ledger import compose
from equipoise.privacy.releases import (
    CohortEvent,
    FixedSampling,
    NoSampling,
    PoissonSampling,
    Release,
    fold,
    remaining,
    sampling_of,
    split,
)

PHI = NormalDist().cdf


def event(*multipliers, sampling):
    return CohortEvent(tuple(Release(f"release {i}", z) for i, z in enumerate(multipliers)), sampling)


def poisson(*multipliers, rate=0.04):
    return event(*multipliers, sampling=PoissonSampling(rate))


def root(rising, low=0.0, high=100.0):
    """Where a function that falls in ε crosses 0, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) > 0 else (low, middle)
    return (low + high) / 2


# --------------------------------------------------------------------------------------------------------- one event per cohort


@pytest.mark.parametrize(("method", "joint"), [("rdp", 16.6), ("pld", 14.6)])
def test_two_releases_of_one_cohort_are_one_event(method, joint):
    assert epsilon_of([(poisson(1.0, 1.0), 1000)], 4e-4, method=method) == pytest.approx(joint, abs=0.05)


def test_as_two_sampled_events_they_would_be_understated():
    assert epsilon_of([(poisson(1.0), 2000)], 4e-4, method="rdp") == pytest.approx(11.3, abs=0.05)


def test_folding_is_what_dp_accounting_makes_of_a_composition_inside_the_sampling():
    inside = dp.ComposedDpEvent([dp.GaussianDpEvent(1.3), dp.GaussianDpEvent(2.1), dp.GaussianDpEvent(4.0)])
    by_hand = dp.rdp.RdpAccountant().compose(dp.PoissonSampledDpEvent(0.1, inside), 70)
    assert epsilon_of([(poisson(1.3, 2.1, 4.0, rate=0.1), 70)], 1e-5, method="rdp") == pytest.approx(by_hand.get_epsilon(1e-5))


# ---------------------------------------------------------------------------------------------- as dp-accounting, built by hand


@pytest.mark.parametrize(("method", "accountant"), [("rdp", dp.rdp.RdpAccountant), ("pld", dp.pld.PLDAccountant)])
def test_different_events_add_up_as_dp_accounting_says(method, accountant):
    by_hand = accountant()
    by_hand.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(4.0)), 30)
    by_hand.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(5.0)), 20)
    by_hand.compose(dp.GaussianDpEvent(6.0), 5)
    events = [(poisson(4.0, rate=0.1), 30), (poisson(5.0, rate=0.2), 20), (event(6.0, sampling=NoSampling()), 5)]
    assert epsilon_of(events, 1e-5, method=method) == pytest.approx(by_hand.get_epsilon(1e-5), rel=1e-6)


def test_fixed_cohorts_are_accounted_by_rdp_under_replacement():
    by_hand = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    by_hand.compose(dp.SampledWithoutReplacementDpEvent(500, 20, dp.GaussianDpEvent(1.5)), 40)
    fixed = event(1.5, sampling=FixedSampling(20, 500))
    assert epsilon_of([(fixed, 40)], 1e-5) == pytest.approx(by_hand.get_epsilon(1e-5))
    assert "replace one client, RDP" in str(Accountant(fixed, 1e-5).spent(40))
    with pytest.raises(IncompatibleParts, match="fixed size"):
        epsilon_of([fixed], 1e-5, method="pld")
    with pytest.raises(IncompatibleParts, match="do not add"):
        epsilon_of([fixed, poisson(1.0)], 1e-5)


def test_equal_events_are_counted():
    again = [poisson(5.0, rate=0.3)] * 7 + [(poisson(5.0, rate=0.3), 3)]
    assert epsilon_of(again, 1e-4) == epsilon_of([(poisson(5.0, rate=0.3), 10)], 1e-4)


# --------------------------------------------------------------------------------------------------------- against closed forms


@pytest.mark.parametrize(("z", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (1.0, 0.1), (4.0, 1e-6), (30.0, 1e-3)])
def test_one_gaussian_has_its_analytic_epsilon(z, delta):
    def excess(eps):
        return PHI(1 / (2 * z) - eps * z) - math.exp(eps) * PHI(-1 / (2 * z) - eps * z) - delta

    exact = root(excess)
    everyone = event(z, sampling=NoSampling())
    assert epsilon_of([everyone], delta) == pytest.approx(exact, rel=1e-5, abs=1e-6)
    assert epsilon_of([everyone], delta, method="rdp") >= exact - 1e-9
    # T rounds of z are one round of z/√T, and a rate of 1 is no sampling
    assert epsilon_of([(poisson(z * 3, rate=1.0), 9)], delta) == pytest.approx(exact, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("z", "q", "delta"), [(1.0, 0.3, 1e-3), (1.4, 0.04, 1e-4), (2.0, 0.9, 1e-5), (0.8, 0.001, 1e-6)])
def test_one_sampled_round_has_the_epsilon_of_its_two_densities(z, q, delta):
    def mixture(x):  # distribution function of the world with the client
        return (1 - q) * PHI(x / z) + q * PHI((x - 1) / z)

    def removed(eps):
        t = z * z * math.log((math.exp(eps) - 1 + q) / q) + 0.5  # where the likelihood ratio is e^ε
        return (1 - mixture(t)) - math.exp(eps) * (1 - PHI(t / z)) - delta

    def added(eps):
        if math.exp(-eps) <= 1 - q:  # the ratio never gets so small
            return -delta
        t = z * z * math.log((math.exp(-eps) - 1 + q) / q) + 0.5
        return PHI(t / z) - math.exp(eps) * mixture(t) - delta

    exact = max(root(removed, high=30.0), root(added, high=30.0))
    assert epsilon_of([poisson(z, rate=q)], delta) == pytest.approx(exact, rel=1e-3, abs=1e-4)
    assert epsilon_of([poisson(z, rate=q)], delta) >= exact - 1e-7


def test_many_small_losses_are_not_blurred_by_the_grid():
    # With much noise and many rounds the sampled Gaussian tends to one with multiplier z/(q √T) (Bu et al. 2020).
    limit = gaussian_epsilon(20.0 / (0.001 * 100), 1e-6)
    ours = epsilon_of([(poisson(20.0, rate=0.001), 10_000)], 1e-6)
    by_habit = dp.pld.PLDAccountant().compose(dp.PoissonSampledDpEvent(0.001, dp.GaussianDpEvent(20.0)), 10_000)
    assert ours == pytest.approx(limit, rel=5e-3)
    assert by_habit.get_epsilon(1e-6) > 1.25 * ours


def test_no_noise_and_endless_noise():
    assert epsilon_of([poisson(0.0)], 1e-5) == math.inf
    assert epsilon_of([poisson(1.0, 0.0)], 1e-5, method="rdp") == math.inf
    assert epsilon_of([(poisson(math.inf), 1000)], 1e-5) == 0
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([(poisson(0.5), 0)], 1e-5) == 0
    assert epsilon_of([poisson(1.0, math.inf)], 1e-5) == epsilon_of([poisson(1.0)], 1e-5)
    assert Accountant(poisson(0.0), 1e-5).rounds_within(100) == 0
    assert Accountant(poisson(math.inf), 1e-5).rounds_within(0.1, at_most=77) == 77


def test_extreme_noise_is_answered_and_bounded_in_memory():
    assert epsilon_of([(poisson(0.02), 1000)], 4e-4) > 1e4
    assert epsilon_of([(poisson(1e4), 1000)], 4e-4) == 0
    tiny = epsilon_of([(poisson(1.0), 10)], 1e-20)  # beyond what PLD resolves: RDP is chosen
    assert tiny == epsilon_of([(poisson(1.0), 10)], 1e-20, method="rdp") < math.inf


def test_orders_that_do_not_converge_are_left_out_silently(caplog):
    epsilon_of([(poisson(0.68123), 10)], 1e-4, method="rdp")
    assert caplog.text == ""
    logging.getLogger("absl").warning("something else")
    assert "something else" in caplog.text


# --------------------------------------------------------------------------------------------------------- splitting a budget

positive = st.floats(0.01, 100)


@given(z=positive, ratio=positive)
def test_split_folds_back_and_keeps_the_ratio_of_the_costs(z, ratio):
    quantile, update = split(z, ratio)
    assert fold(quantile, update) == pytest.approx(z)
    assert quantile**-2 == pytest.approx(ratio * update**-2)
    assert remaining(z, quantile) == pytest.approx(update)


def test_fold_by_hand():
    assert fold(1.0, 1.0) == pytest.approx(1 / math.sqrt(2))
    assert fold(3.0, 4.0) == pytest.approx(12 / 5)
    assert fold(2.0, math.inf) == 2.0
    assert fold() == math.inf
    assert fold(0.0, 5.0) == 0.0


def test_what_is_left_needs_something_left():
    assert remaining(2.4, 3.0) == pytest.approx(4.0)
    with pytest.raises(InvalidParameter, match="must exceed 1"):
        remaining(1.0, 0.9)


def test_discrete_noise_is_recorded_as_the_gaussian_of_equal_zcdp():
    # zCDP is RDP of every order: without sampling the stand-in, of multiplier 1/ε for ½ε²-zCDP, is exact there
    by_hand = dp.rdp.RdpAccountant().compose(dp.ZCDpEvent(0.25**2 / 2), 6)
    recorded = CohortEvent((Release("quantile", 1 / 0.25),), NoSampling())
    assert epsilon_of([(recorded, 6)], 1e-5, method="rdp") == pytest.approx(by_hand.get_epsilon(1e-5))


# ------------------------------------------------------------------------------------------------------------------ calibration

DESCRIBED = [
    (5.0, 4e-4, {"rounds": 1000, "sampling_rate": 0.04}),
    (5.0, 4e-4, {"rounds": 1000, "sampling_rate": 0.04, "method": "rdp"}),
    (0.1, 1e-6, {"rounds": 10_000, "sampling_rate": 0.001}),
    (3.0, 1e-6, {"rounds": 20, "sampling_rate": 0.5}),
    (3.0, 1e-5, {"rounds": 100, "cohort": 50, "population": 1000}),
    (1.0, 1e-5, {"rounds": 1}),
    (0.5, 1e-5, {"rounds": 12, "method": "rdp"}),
]


@pytest.mark.parametrize(("epsilon", "delta", "run"), DESCRIBED)
def test_calibration_is_the_inverse_of_accounting_on_the_safe_side(epsilon, delta, run):
    multiplier = noise_for(epsilon, delta, **run)
    sizes = {key: run.get(key) for key in ("sampling_rate", "cohort", "population")}
    described = [(event(multiplier, sampling=sampling_of(**sizes)), run["rounds"])]
    assert 0.999 * epsilon <= epsilon_of(described, delta, method=run.get("method")) <= epsilon


@settings(max_examples=4, deadline=None)
@given(
    epsilon=st.floats(0.2, 30), rate=st.floats(0.005, 0.5), rounds=st.integers(1, 3000), tolerance=st.sampled_from([1e-2, 1e-4])
)
def test_calibration_inverts_rdp_anywhere(epsilon, rate, rounds, tolerance):
    multiplier = noise_for(epsilon, 1e-5, rounds=rounds, sampling_rate=rate, method="rdp", tolerance=tolerance)
    spent = epsilon_of([(poisson(multiplier, rate=rate), rounds)], 1e-5, method="rdp")
    assert spent <= epsilon
    if spent < (1 - tolerance) * epsilon:  # only where RDP's ε jumps: a hair less noise costs more
        less = epsilon_of([(poisson(multiplier * (1 - 1e-6), rate=rate), rounds)], 1e-5, method="rdp")
        assert less > epsilon


def test_one_gaussian_release_is_calibrated_as_its_formula_says():
    assert noise_for(1.0, 1e-5, rounds=1, tolerance=1e-6) == pytest.approx(dp.get_sigma_gaussian(1.0, 1e-5), rel=1e-5)


def test_calibrations_that_nothing_meets():
    with pytest.raises(
        InvalidParameter, match="with this one no noise is needed for any epsilon"
    ):  # δ exceeds the chance of ever taking part
        noise_for(1.0, 1e-2, rounds=5, sampling_rate=0.001)
    with pytest.raises(InvalidParameter, match="Fewer rounds"):
        noise_for(1e-8, 1e-9, rounds=10**9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, r"delta must lie in \(0, 1\)"),
        ({"delta": 1.0}, "delta"),
        ({"epsilon": 0.0}, "epsilon must be a positive"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"rounds": 2.5}, "rounds"),
        ({"sampling_rate": 0.0}, r"sampling_rate must lie in \(0, 1\]"),
        ({"sampling_rate": 1.1}, "sampling_rate"),
        ({"sampling_rate": None, "cohort": 11, "population": 10}, "cohort must be a whole number between 1 and 10"),
        ({"cohort": 5, "population": 10}, "not a mixture"),
        ({"sampling_rate": None, "cohort": 5}, "not a mixture"),
        ({"method": "moments"}, "method must be 'pld' or 'rdp'"),
        ({"tolerance": 0.0}, "tolerance"),
    ],
)
def test_wrong_questions_are_refused(change, message):
    question = {"epsilon": 1.0, "delta": 1e-5, "rounds": 10, "sampling_rate": 0.1} | change
    with pytest.raises((InvalidParameter, IncompatibleParts), match=message):
        noise_for(**question)


@pytest.mark.parametrize(
    ("plain", "events"),
    [
        ((1.1, 0.04, 50), (poisson(1.1), 50)),
        ((2.0, None, 3), (event(2.0, sampling=NoSampling()), 3)),
        ((1.1, (5, 100), 50), (event(1.1, sampling=FixedSampling(5, 100)), 50)),
        (((5.0, 2.0), 0.04, 50), (poisson(5.0, 2.0), 50)),
        ([[5, 2], 0.04, 50], (poisson(5.0, 2.0), 50)),
        ((1, 1, 1), event(1.0, sampling=NoSampling())),
    ],
)
def test_rounds_in_plain_numbers_are_events(plain, events):
    assert epsilon_of([plain], 1e-4) == epsilon_of([events], 1e-4) > 0
    several = [plain, plain]
    assert epsilon_of(several, 1e-4) == epsilon_of([events, events], 1e-4) > epsilon_of([plain], 1e-4)
    assert epsilon_of([plain, events], 1e-4) == epsilon_of(several, 1e-4)


@pytest.mark.parametrize("sizes", [{"sampling_rate": 0.05}, {"cohort": 5, "population": 100}, {}])
def test_plain_numbers_are_the_inverse_of_the_noise_for_a_budget(sizes):
    z = noise_for(2.0, 1e-4, rounds=30, **sizes)
    drawn = sizes.get("sampling_rate", tuple(sizes.values()) or None)
    assert 0.99 * 2.0 <= epsilon_of([(z, drawn, 30)], 1e-4) <= 2.0


@pytest.mark.parametrize(
    "bad",
    [
        [1.1, 0.04, 50],  # no list of rounds
        [(1.1, 0.04)],
        [(1.1, 50, 0.04, 1)],
        [(poisson(1.0), 0.04, 50)],
        [("1.1", 0.04, 50)],
        [(-1.0, 0.04, 50)],
        [(1.1, 1.5, 50)],
        [(1.1, (5,), 50)],
        [(1.1, (5, 100, 7), 50)],
        [(1.1, (100, 5), 50)],
        [(1.1, 0.04, 2.5)],
        [(1.1, 0.04, -1)],
        [None],
    ],
)
def test_wrong_plain_numbers_are_refused(bad):
    with pytest.raises(InvalidParameter):
        epsilon_of(bad, 1e-4)


def test_wrong_events_are_refused():
    for bad in (-1.0, math.nan, "1"):
        with pytest.raises(InvalidParameter, match="noise multiplier of 'update'"):
            Release("update", bad)
    with pytest.raises(InvalidParameter, match="rounds"):
        epsilon_of([(poisson(1.0), -1)], 1e-5)
    with pytest.raises(InvalidParameter, match="pattern"):
        Accountant([], 1e-5)


# ------------------------------------------------------------------------------------------------------------ over the rounds


def test_by_rdp_every_round_is_exact_and_cheap():
    accountant = Accountant(poisson(1.2), 1e-4, method="rdp")
    for rounds in (1, 2, 17, 300):
        assert accountant.epsilon_after(rounds) == epsilon_of([(poisson(1.2), rounds)], 1e-4, method="rdp")
    curve = [accountant.epsilon_after(rounds) for rounds in range(1001)]
    assert curve[0] == 0
    assert curve == sorted(curve)


def test_by_pld_every_round_has_a_close_upper_bound_and_the_last_is_exact():
    accountant = Accountant(poisson(2.5, rate=0.05), 1e-4, horizon=130)
    curve = [accountant.epsilon_after(rounds) for rounds in range(131)]
    assert curve == sorted(curve)
    assert curve[130] == epsilon_of([(poisson(2.5, rate=0.05), 130)], 1e-4) == accountant.exact_after(130)
    for rounds in (1, 20, 21, 64, 99, 129):
        exact = epsilon_of([(poisson(2.5, rate=0.05), rounds)], 1e-4)
        assert exact <= curve[rounds] <= 1.06 * exact
    assert accountant.epsilon_after(131) >= curve[130]


@pytest.mark.parametrize("method", ["rdp", "pld"])
def test_the_rounds_within_a_budget_are_those_of_a_scan(method):
    accountant = Accountant(poisson(8.0, rate=0.2), 1e-4, method=method)
    scan = [accountant.exact_after(rounds) for rounds in range(41)]
    for budget in (scan[1], (scan[7] + scan[8]) / 2, scan[23], scan[39] * 1.0001):
        expected = sum(spent <= budget for spent in scan[1:])
        assert accountant.rounds_within(budget) == expected
    assert accountant.rounds_within(scan[30], at_most=12) == 12
    assert accountant.rounds_within(scan[1] * 0.99) == 0


def test_a_calibrated_run_may_do_all_its_rounds_and_no_more_than_a_few_others():
    multiplier = noise_for(0.5, 1e-4, rounds=200, sampling_rate=0.05)
    accountant = Accountant(poisson(multiplier, rate=0.05), 1e-4, horizon=200)
    assert accountant.rounds_within(0.5) == 200
    assert 200 <= accountant.rounds_within(0.5, at_most=10_000) <= 201


def test_a_pattern_of_rounds_is_gone_through_again_and_again():
    both, update = poisson(4.0, 3.0, rate=0.1), poisson(3.0, rate=0.1)
    accountant = Accountant([both, update, update], 1e-4)
    assert accountant.exact_after(8) == epsilon_of([(both, 3), (update, 5)], 1e-4)
    assert accountant.spent(8).epsilon_server == pytest.approx(gaussian_epsilon(fold(*[4.0] * 3, *[3.0] * 8), 1e-4))


def test_who_knows_the_cohorts_sees_plain_gaussians():
    accountant = Accountant(poisson(1.0, 1.0), 4e-4, method="rdp")
    assert accountant.spent(50).epsilon_server == pytest.approx(gaussian_epsilon(1 / math.sqrt(100), 4e-4))
    assert accountant.spent(0).epsilon_server == 0
    assert accountant.spent(1).epsilon_server > accountant.exact_after(1)


@pytest.mark.parametrize("z", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("everyone", [NoSampling(), PoissonSampling(1.0)])
@pytest.mark.parametrize("turned", [False, True])
def test_rounds_of_everyone_beside_fixed_cohorts_cost_what_a_replacement_costs(z, everyone, turned):
    """A replacement moves the sum of everyone by 2C, of which a multiplier of C is one half; so no total is below a part."""
    pair = [event(z, sampling=everyone), event(2.0, sampling=FixedSampling(5, 20))]
    pair = pair[::-1] if turned else pair
    accountant = Accountant(pair, 1e-3)
    total = compose([[(each, 1)] for each in pair], 1e-3)
    assert epsilon_of([(each, 1) for each in pair], 1e-3) == accountant.exact_after(2) == total.epsilon
    assert total.epsilon <= gaussian_epsilon(fold(z / 2, 2.0), 1e-3) * (1 + 1e-9)  # that of fixed ones without amplification
    assert total.epsilon >= max(gaussian_epsilon(z / 2, 1e-3), epsilon_of([(pair[not turned], 1)], 1e-3))
    assert accountant.spent(2).adjacency == total.adjacency == "replace one client"
    assert accountant.spent(2).epsilon_server == pytest.approx(gaussian_epsilon(fold(z / 2, 2.0), 1e-3), rel=1e-9)


def test_every_total_names_its_adjacency_and_bounds_its_parts():
    rate, fixed, every = poisson(3.0, rate=0.3), event(2.0, sampling=FixedSampling(5, 20)), event(3.0, sampling=NoSampling())
    alone, group = epsilon_of([(rate, 4)], 1e-3), 2  # one removed and one added
    total = compose([[(rate, 4)], [(fixed, 2)], [(every, 1)]], 1e-3)
    assert total.epsilon == pytest.approx(group * alone + epsilon_of([(fixed, 2), (every, 1)], 1e-3))
    assert total.delta == pytest.approx(1e-3 + 1e-3 * (1 + math.exp(alone)))
    assert total.adjacency == "replace one client"
    assert compose([[(rate, 4)], [(every, 1)]], 1e-3) == (
        epsilon_of([(rate, 4), (every, 1)], 1e-3),
        1e-3,
        "zero out one client",
    )
    assert all(each.adjacency in str(each) for each in (total, compose([[(rate, 4)]], 1e-3)))


def test_what_was_spent_in_words():
    spent = Spent(4.98, 4e-4, "add or remove one client", "pld", 61.2, 1000, 52)
    assert str(spent) == (
        "ε = 4.98 at δ = 0.0004 (add or remove one client, PLD accounting, 1000 rounds); ε = 61.2 for one who "
        "knows who took part in which rounds (no client in more than 52 of them). Runs made to choose settings are not counted."
    )
    found = Accountant(poisson(3.0, rate=0.1), 1e-4).spent(3, unit="example")
    assert (found.adjacency, found.method, found.rounds, found.participations) == ("add or remove one example", "pld", 3, 3)
    assert found.epsilon == epsilon_of([(poisson(3.0, rate=0.1), 3)], 1e-4)
