"""The superquantile against a linear program, its variational form, convex solvers and numbers by hand."""

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import linprog, minimize_scalar

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.privacy import Exact, SecureSums
from equipoise.risk import Mean, Mixture, Superquantile
from equipoise.risk.superquantile import (
    exact_weights,
    huber_smoothed,
    kl_smoothed,
    tail_holding,
    tail_quantile,
    threshold_weights,
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def weighted_losses(draw, largest=12):
    """Losses with ties (few distinct levels) and unequal base weights."""
    count = draw(st.integers(1, largest))
    losses = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.25]), min_size=count, max_size=count))
    raw = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    alpha = tensor(raw)
    return tensor(losses), alpha / alpha.sum()


tails = st.one_of(st.sampled_from([1.0, 0.5, 0.1, 1 / 3, 0.3, 0.05]), st.floats(0.01, 1.0))


@given(weighted_losses(), tails)
def test_exact_weights_solve_the_linear_program(case, tail):
    losses, alpha = case
    weights = exact_weights(losses, alpha, tail)
    program = linprog(
        -losses.numpy(), A_eq=np.ones((1, len(losses))), b_eq=[1.0], bounds=[(0, a / tail) for a in alpha.tolist()]
    )
    assert program.success
    assert float(weights @ losses) == pytest.approx(-program.fun, abs=1e-9)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((weights <= alpha / tail + 1e-12).all())


@given(weighted_losses(), tails)
def test_value_is_the_minimum_over_eta_and_the_quantile_attains_it(case, tail):
    losses, alpha = case
    value = float(exact_weights(losses, alpha, tail) @ losses)

    def objective(eta):
        return eta + float((alpha * (losses - eta).clamp(min=0)).sum()) / tail

    # The objective is convex and piecewise linear with kinks at the losses, so its minimum is at one of them.
    assert value == pytest.approx(min(objective(eta) for eta in losses.tolist()), abs=1e-9)
    assert objective(float(tail_quantile(losses, alpha, tail))) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 50, 100, 1000])
@pytest.mark.parametrize("tail", [1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.29, 0.1, 0.07, 0.01])
def test_quantile_index_is_not_shifted_by_float_error(count, tail):
    from fractions import Fraction

    whole = math.floor(Fraction(str(tail)) * count)  # θn in exact arithmetic
    expected = max(1, count - whole)
    losses = torch.arange(1, count + 1, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        alpha = torch.full((count,), 1 / count, dtype=dtype)
        assert int(tail_quantile(losses, alpha, tail)) == expected


def test_by_hand():
    losses, alpha = tensor([1.0, 4.0, 2.0, 3.0]), tensor([0.25] * 4)
    # θ = 0.6: caps of 5/12; 4 and 3 are filled (10/12), and 2 gets the remaining 2/12.
    weights = exact_weights(losses, alpha, 0.6)
    assert weights.tolist() == pytest.approx([0, 5 / 12, 2 / 12, 5 / 12])
    assert float(weights @ losses) == pytest.approx(39 / 12)
    # The threshold rule keeps every client at or above the quantile 2.
    assert threshold_weights(losses, alpha, 0.6).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


def test_threshold_keeps_one_client_more_than_exact_when_the_tail_is_whole():
    # The papers say that the two rules agree here; they do not (θn = 2, yet three clients are ≥ the quantile).
    losses, alpha = tensor([1.0, 2.0, 3.0, 4.0]), tensor([0.25] * 4)
    assert int((exact_weights(losses, alpha, 0.5) > 0).sum()) == 2
    assert int((threshold_weights(losses, alpha, 0.5) > 0).sum()) == 3


@given(weighted_losses())
def test_limits_are_mean_and_maximum(case):
    losses, alpha = case
    assert float(Superquantile(1.0)(losses, alpha).value) == pytest.approx(float(alpha @ losses), abs=1e-9)
    assert float(Superquantile(1e-6)(losses, alpha).value) == pytest.approx(float(losses.max()), abs=1e-9)


@given(weighted_losses(), tails, tails)
def test_grows_as_the_tail_shrinks(case, a, b):
    losses, alpha = case
    small, large = sorted((a, b))
    assert float(Superquantile(small)(losses, alpha).value) >= float(Superquantile(large)(losses, alpha).value) - 1e-9


@given(weighted_losses(), tails, st.sampled_from([0.01, 0.3, 1.0, 20.0]))
def test_kl_smoothing_against_bisection(case, tail, nu):
    losses, alpha = case
    value, weights = kl_smoothed(losses, alpha, tail, nu)
    low, high = float(losses.min()) - 60 * nu - 60, float(losses.max()) + nu  # the mass falls in c; plain bisection
    cap = 1 / tail
    for _ in range(200):
        c = (low + high) / 2
        total = sum(
            a * min(cap, math.exp(min(700, (f - c) / nu))) for a, f in zip(alpha.tolist(), losses.tolist(), strict=True)
        )
        low, high = (c, high) if total > 1 else (low, c)
    expected = [a * min(cap, math.exp(min(700, (f - c) / nu))) for a, f in zip(alpha.tolist(), losses.tolist(), strict=True)]
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)
    entropy = sum(w * math.log(w / a) for w, a in zip(weights.tolist(), alpha.tolist(), strict=True) if w > 0)
    assert float(value) == pytest.approx(float(weights @ losses) - nu * entropy, abs=1e-9)


@given(weighted_losses(), st.sampled_from([0.1, 0.5, 2.0]))
def test_kl_smoothing_with_a_vanishing_tail_is_the_tilted_risk(case, nu):
    losses, alpha = case
    value, weights = kl_smoothed(losses, alpha, 1e-9, nu)
    assert float(value) == pytest.approx(nu * float(torch.logsumexp(alpha.log() + losses / nu, 0)), abs=1e-8)
    assert weights.tolist() == pytest.approx(torch.softmax(alpha.log() + losses / nu, 0).tolist(), abs=1e-8)


@given(weighted_losses(), tails, st.sampled_from([0.01, 0.3, 1.0, 20.0]))
def test_huber_smoothing_against_a_scalar_minimiser(case, tail, nu):
    losses, alpha = case
    value, weights = huber_smoothed(losses, alpha, tail, nu)

    def g(rho):
        return nu / 2 if rho <= 0 else (rho if rho >= nu else rho * rho / (2 * nu) + nu / 2)

    def objective(eta):
        return eta + sum(a * g(f - eta) for a, f in zip(alpha.tolist(), losses.tolist(), strict=True)) / tail

    bounds = (float(losses.min()) - nu - 1, float(losses.max()) + nu + 1)
    found = minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-10})
    assert float(value) <= found.fun + 1e-7
    assert float(value) == pytest.approx(found.fun, abs=1e-6)
    assert float(weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("smoothing", ["kl", "huber"])
@given(case=weighted_losses(), tail=tails)
def test_little_smoothing_is_close_to_none(smoothing, case, tail):
    losses, alpha = case
    smooth = Superquantile(tail, smoothing=smoothing, nu=1e-7)(losses, alpha)
    assert float(smooth.value) == pytest.approx(float(Superquantile(tail)(losses, alpha).value), abs=1e-5)


def test_mixture_is_the_same_combination_of_values_and_weights():
    losses, alpha = tensor([1.0, 2.0, 3.0, 6.0]), tensor([0.25] * 4)
    mixed = Mixture((0.3, Mean()), (0.7, Superquantile(tail=0.25)))(losses, alpha)
    assert float(mixed.value) == pytest.approx(0.3 * 3.0 + 0.7 * 6.0)
    assert mixed.weights.tolist() == pytest.approx([0.075, 0.075, 0.075, 0.775])
    assert Mixture((1.0, Mean())).needs_losses is False


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tail": 0.0}, "tail must lie in (0, 1], but is 0.0"),
        ({"tail": 1.5}, "tail must lie in (0, 1], but is 1.5"),
        ({"tail": 50}, 'a share of the training examples, or of the clients with weights="uniform": 0.5 is the worse half'),
        ({"tail": float("nan")}, "tail must lie in"),
        ({"tail": "half"}, "tail must lie in"),
        ({"rule": "soft"}, 'rule must be "exact"'),
        ({"smoothing": "kl"}, "nu must be a positive number"),
        ({"smoothing": "kl", "nu": -1.0}, "nu must be a positive number"),
        ({"smoothing": "gauss", "nu": 1.0}, "smoothing must be"),
        ({"nu": 1.0}, "nu is the strength of smoothing"),
    ],
)
def test_bad_parameters_are_named(wrong, words):
    with pytest.raises(InvalidParameter) as caught:
        Superquantile(**wrong)
    assert words in str(caught.value)


def test_bad_combinations_are_refused():
    with pytest.raises(IncompatibleParts, match="threshold"):
        Superquantile(rule="threshold", smoothing="kl", nu=0.1)
    with pytest.raises(InvalidParameter, match="positive coefficient"):
        Mixture((-1.0, Mean()))
    with pytest.raises(InvalidParameter, match="pair"):
        Mixture(Mean())
    with pytest.raises(InvalidParameter, match="at least one"):
        Mixture()

    class Scaling:
        def __call__(self, losses, base_weights, *, clients=None, state=None): ...
        def server_step(self, **kwargs): ...

    with pytest.raises(IncompatibleParts, match="server's step"):
        Mixture((1.0, Scaling()))


def test_edges_that_once_failed():
    losses, alpha = tensor([1.0, 2.0, 3.9]), tensor([1 / 3] * 3)
    assert float(Superquantile(0.5, smoothing="kl", nu=1e16)(losses, alpha).value) == pytest.approx(2.3)  # ν → ∞ is the mean
    for tail in (1e-9, 1e-12):
        assert torch.isfinite(huber_smoothed(losses, alpha, tail, 0.1)[1]).all()
    assert exact_weights(tensor([1.0, 2.0, 3.0]), tensor([0.0, 0.5, 0.5]), 1.0).tolist() == pytest.approx([0, 0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_quantile_of_many_clients(dtype):
    count = 100_000
    losses = torch.arange(1, count + 1, dtype=torch.float64)
    alpha = torch.full((count,), 1 / count, dtype=dtype)
    for tail in (0.5, 0.1, 0.3):
        assert int(tail_quantile(losses, alpha, tail)) == round(count * (1 - tail))
    huber_smoothed(losses, alpha, 0.1, 3.0)  # memory grows with K, not with K²


# ------------------------------------------------------------------------- other quantiles, older quantiles, enough clients


@dataclass(frozen=True)
class Fixed:
    """A source that releases the same number whatever the losses are."""

    eta: float
    reads_losses = False

    def __call__(self, losses, base_weights, tail):
        return torch.tensor(self.eta, dtype=torch.float64)


def test_the_rule_that_none_means():
    assert not Superquantile(0.5).filters
    assert not Superquantile(0.5, quantile=Exact(), at_least=3).filters
    assert Superquantile(0.5, quantile=SecureSums()).filters
    assert Superquantile(0.5, eta_every=2).filters
    assert Superquantile(0.5, rule="threshold").filters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=weighted_losses(), tail=st.sampled_from([0.9, 0.52, 0.3, 0.11]))
@settings(max_examples=30)
def test_sums_keep_the_clients_that_sorting_keeps(dtype, case, tail):
    losses, alpha = case[0].to(dtype), case[1].to(dtype)
    quantile = tail_quantile(losses, alpha, tail)
    above, at_least = float(alpha[losses > quantile].sum()), float(alpha[losses >= quantile].sum())
    if not above + 0.02 < tail < at_least - 0.02:  # unique, by a margin that MM needs to settle within its iterations
        return
    result = Superquantile(tail, quantile=SecureSums(iterations=1000))(losses, alpha)
    torch.testing.assert_close(result.weights, threshold_weights(losses, alpha, tail))
    assert result.weights.dtype == result.value.dtype == dtype


def test_a_rough_source_may_leave_nobody():
    result = Superquantile(0.5, quantile=Fixed(9.0))(tensor([1.0, 2.0]), tensor([0.5, 0.5]))
    assert result.weights.tolist() == [0.0, 0.0]
    assert float(result.value) == 9.0  # what was released: the server saw nothing else
    # Under eta_every the next round asks again.
    again = Superquantile(0.5, quantile=Fixed(9.0), eta_every=5)
    state = again(tensor([1.0, 2.0]), tensor([0.5, 0.5])).state
    assert again(tensor([9.5, 2.0]), tensor([0.5, 0.5]), state=state).weights.tolist() == [1.0, 0.0]


def test_an_older_quantile_filters_in_between():
    risk, alpha, state = Superquantile(0.5, eta_every=2), tensor([0.25] * 4), None
    rounds = [
        ([1.0, 2.0, 3.0, 4.0], [0, 1 / 3, 1 / 3, 1 / 3], 2.0),  # a new quantile, 2: threshold keeps three
        ([0.0, 1.0, 2.0, 3.0], [0, 0, 1 / 2, 1 / 2], 2.0),  # the old one keeps two
        ([0.0, 1.0, 2.0, 3.0], [0, 1 / 3, 1 / 3, 1 / 3], 1.0),  # two rounds old: a new one, 1
        ([0.0, 0.1, 0.2, 0.3], [0, 1 / 3, 1 / 3, 1 / 3], 0.1),  # nobody reaches 1: a new one at once, 0.1 …
        ([0.0, 0.0, 0.1, 0.3], [0, 0, 1 / 2, 1 / 2], 0.1),  # … whose first round that was
        ([0.0, 0.0, 0.1, 0.3], [1 / 4] * 4, 0.0),
    ]
    for losses, weights, eta in rounds:
        result = risk(tensor(losses), alpha, state=state)
        state = result.state
        assert result.weights.tolist() == pytest.approx(weights)
        assert float(result.value) == pytest.approx(sum(w * f for w, f in zip(weights, losses, strict=True)))
        assert float(state.eta) == pytest.approx(eta)


def test_an_older_quantile_works_for_another_cohort():
    risk = Superquantile(0.5, eta_every=10)
    state = risk(tensor([1.0, 2.0, 3.0, 4.0]), tensor([0.25] * 4)).state
    assert risk(tensor([5.0, 1.0]), tensor([0.5, 0.5]), state=state).weights.tolist() == [1.0, 0.0]


def test_enough_clients_by_hand():
    losses, alpha = tensor([1.0, 4.0, 2.0, 3.0]), tensor([0.25] * 4)
    assert exact_weights(losses, alpha, 0.1).tolist() == pytest.approx([0, 1, 0, 0])
    # The two largest losses have a mass of ½, so the tail is ½ instead of 0.1.
    assert tail_holding(losses, alpha, 0.1, 2) == 0.5
    assert Superquantile(0.1, at_least=2)(losses, alpha).weights.tolist() == pytest.approx([0, 0.5, 0, 0.5])
    assert tail_holding(losses, alpha, 0.6, 2) == 0.6  # enough already
    assert tail_holding(losses, alpha, 0.1, 4) == tail_holding(losses, alpha, 0.1, 9) == 1.0
    # Of three equal losses two are needed: 2 · the mean of 0.1, 0.2 and 0.6; each of the three has a weight then.
    tied, unequal = tensor([4.0, 4.0, 1.0, 4.0]), tensor([0.1, 0.2, 0.1, 0.6])
    assert tail_holding(tied, unequal, 0.05, 2) == pytest.approx(0.6)
    assert Superquantile(0.05, at_least=2)(tied, unequal).weights.tolist() == pytest.approx([1 / 9, 2 / 9, 0, 6 / 9])


KINDS = ({}, {"rule": "threshold"}, {"eta_every": 3}, {"smoothing": "kl", "nu": 0.01}, {"smoothing": "huber", "nu": 0.01})


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=weighted_losses(), tail=st.sampled_from([0.01, 0.3, 1.0]), at_least=st.integers(1, 14))
def test_enough_clients_have_a_weight(kind, dtype, case, tail, at_least):
    losses, alpha = case[0].to(dtype), case[1].to(dtype)
    risk = Superquantile(tail, at_least=at_least, **kind)
    result = risk(losses, alpha)
    assert int((result.weights > 0).sum()) >= min(at_least, len(losses))
    later = risk(losses.flip(0) / 2, alpha, state=result.state)  # an older quantile is not let below the number either
    assert int((later.weights > 0).sum()) >= min(at_least, len(losses))


@pytest.mark.parametrize("count", [3, 10, 30, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_whole_tail_gives_no_client_a_weight_of_rounding_error(count, dtype):
    losses = torch.arange(count, dtype=dtype)
    alpha = torch.full((count,), 1 / count, dtype=dtype)
    for whole in range(1, count + 1):
        assert int((exact_weights(losses, alpha, whole / count) > 0).sum()) == whole
        assert int((Superquantile(1e-6, at_least=whole)(losses, alpha).weights > 0).sum()) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nor_do_unequal_sizes(dtype):
    gen = torch.Generator().manual_seed(0)
    for count in range(3, 40):
        sizes = torch.randint(1, 6, (count,), generator=gen)
        for whole in range(1, count + 1):
            tail = int(sizes[:whole].sum()) / int(sizes.sum())
            weights = exact_weights(-torch.arange(count).to(dtype), sizes.to(dtype) / sizes.sum(), tail)
            assert int((weights > 0).sum()) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_find_their_weights_alone(dtype):
    risk = Superquantile(0.5, quantile=SecureSums())
    losses, alpha = tensor([0.3, 0.1, 0.7, 0.2, 0.9]).to(dtype), tensor([0.2] * 5).to(dtype)
    result = risk(losses, alpha)
    alone = torch.stack([risk.client_weight(f, a, result.state.eta) for f, a in zip(losses, alpha, strict=True)])
    torch.testing.assert_close(alone / alone.sum(), result.weights)
    assert risk.client_weight(losses, alpha, 0.5).tolist() == pytest.approx([0, 0, 0.2, 0, 0.2])
    assert torch.equal(Mean().client_weight(losses, alpha), alpha)
    for other in (Superquantile(0.5), Superquantile(0.5, smoothing="kl", nu=0.1)):
        with pytest.raises(IncompatibleParts, match="no client can find its own"):
            other.client_weight(losses, alpha, 0.5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rule": "exact", "quantile": SecureSums()}, r'rule="exact" sets weights by all losses(.|\n)*SecureSums'),
        ({"rule": "exact", "eta_every": 2}, r'rule="exact" sets weights(.|\n)*eta_every=2'),
        ({"smoothing": "kl", "nu": 0.1, "quantile": SecureSums()}, 'smoothing="kl" sets weights'),
        ({"smoothing": "huber", "nu": 0.1, "eta_every": 5}, 'smoothing="huber" sets weights'),
        ({"at_least": 2, "quantile": SecureSums()}, "at_least=2 counts the largest losses"),
    ],
)
def test_what_needs_the_losses_is_refused_without_them(wrong, words):
    with pytest.raises(IncompatibleParts, match=words):
        Superquantile(0.5, **wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"eta_every": 0}, "eta_every must be a whole number"),
        ({"eta_every": 1.5}, "eta_every must be a whole number"),
        ({"at_least": 0}, "at_least must be a whole number"),
        ({"at_least": True}, "at_least must be a whole number"),
        ({"quantile": "exact"}, "quantile must be a source"),
        ({"quantile": SecureSums}, "quantile must be a source"),
    ],
)
def test_bad_values_of_the_new_parameters_are_named(wrong, words):
    with pytest.raises(InvalidParameter, match=words):
        Superquantile(0.5, **wrong)


@pytest.mark.parametrize("risk", [Superquantile(0.5, quantile=SecureSums()), Superquantile(0.5, at_least=2)], ids=repr)
@pytest.mark.parametrize("losses", [[3.0], [0.0, 0.0, 0.0], [1e300, 1e300], [1e300, 0.0], [0.0, 1e-300]])
def test_one_client_zero_and_huge_losses(risk, losses):
    result = risk(tensor(losses), torch.full((len(losses),), 1 / len(losses), dtype=torch.float64))
    assert torch.isfinite(result.value)
    assert float(result.weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["exact", "threshold"])
@pytest.mark.parametrize("tail", [0.1, 0.5, 0.8])
def test_losses_that_differ_by_rounding_are_equal(rule, tail):
    # A model of zeros has the loss log 3 everywhere, but a mean of log 3's depends on its length in the last digits.
    alpha = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    rounded = torch.tensor([math.log(3) * (1 + s * 2e-16) for s in (-2, 1, 0, 2)], dtype=torch.float64)
    assert len(set(rounded.tolist())) > 1
    torch.testing.assert_close(Superquantile(tail, rule=rule)(rounded, alpha).weights, alpha)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 5.0), st.booleans()), min_size=2, max_size=9),
    st.floats(0.05, 1.0),
    st.sampled_from(["exact", "threshold"]),
)
def test_clients_with_base_mass_b_get_at_most_b_over_the_tail(clients, tail, rule):
    # Weights are at most α_k/θ, whatever losses some clients report: so attackers of base mass b hold at most b/θ of π.
    masses, reported, liars = (list(each) for each in zip(*clients, strict=True))
    alpha, lying = tensor(masses) / sum(masses), torch.tensor(liars)
    losses = torch.where(lying, 1e6, tensor(reported))
    weights = Superquantile(tail, rule=rule)(losses, alpha).weights
    share = weights / weights.sum()
    assert float(share[lying].sum()) <= min(1.0, float(alpha[lying].sum()) / tail) + 1e-9
