"""The tilted loss: exact weights, finite differences, second derivatives, limits, and trees of any depth."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.risk.hierarchical import hierarchical
from equipoise.risk.superquantile import exact_weights, huber_smoothed
from equipoise.risk.tilted import tilted
from equipoise.tilted import TiltedLoss, superquantile_loss, tilted_loss, tilted_weights
from equipoise.tilted.hierarchy import hierarchy
from equipoise.tilted.losses import tracked


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


rows = st.lists(
    st.tuples(st.floats(-3, 8), st.integers(0, 5), st.sampled_from("xyz"), st.integers(0, 2)), min_size=1, max_size=12
).filter(lambda rows: any(row[1] for row in rows))
usual = st.floats(-20, 20).map(lambda t: t if abs(t) > 1e-100 else 0.0)  # below, t times a loss has no digits left
tilts = st.one_of(usual, st.sampled_from([0.0, 1e-12, -1e-12, 200.0, -200.0]))


def parts(case):
    losses, weights, names, codes = zip(*case, strict=True)
    return tensor(losses), tensor([float(w) for w in weights]), list(names), list(codes)


@given(rows, tilts)
def test_weights_are_those_of_the_thesis(case, tilt):
    losses, *_ = parts(case)
    risk = tilted_loss(losses, tilt)
    torch.testing.assert_close(
        tilted_weights(losses, tilt), torch.exp(tilt * (losses - risk)) / len(losses), rtol=1e-11, atol=1e-300
    )


@given(rows, tilts)
def test_without_groups_it_is_the_risk(case, tilt):
    losses, weights, *_ = parts(case)
    value, expected = tilted(losses, weights, tilt)
    torch.testing.assert_close(tilted_loss(losses, tilt, sample_weight=weights), value, rtol=1e-12, atol=1e-12)
    found = tilted_weights(losses, tilt, sample_weight=weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-300)


@given(rows, tilts, tilts)
def test_groups_against_the_loop_over_groups(case, tilt, inner):
    losses, weights, names, _ = parts(case)
    value, expected = hierarchical(losses, weights, names, tilt, inner)
    found = tilted_loss(losses, tilt, names, inner_tilt=inner, sample_weight=weights)
    torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-11)
    found = tilted_weights(losses, tilt, names, inner_tilt=inner, sample_weight=weights)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-12)


@given(rows, st.floats(-5, 5).filter(lambda t: abs(t) > 0.01), st.floats(-5, 5).filter(lambda t: abs(t) > 0.01))
def test_group_weights_are_7_85(case, t, tau):
    losses, _, names, _ = parts(case)
    codes = np.unique(names, return_inverse=True)[1]
    sizes = np.bincount(codes)
    f = losses.numpy() - float(losses.max())  # only differences matter; as printed the formula would overflow
    means = np.bincount(codes, np.exp(tau * f)) / sizes
    expected = means[codes] ** (t / tau - 1) / (sizes * means ** (t / tau)).sum() * np.exp(tau * f)
    np.testing.assert_allclose(tilted_weights(losses, t, names, inner_tilt=tau).numpy(), expected, rtol=1e-9, atol=1e-14)


@given(rows, tilts, tilts)
def test_equal_tilts_need_no_groups(case, tilt, other):
    losses, weights, names, codes = parts(case)
    plain = tilted_loss(losses, tilt, sample_weight=weights)
    for groups in (names, [names, codes], [codes, names, names]):
        found = tilted_loss(losses, tilt, groups, inner_tilt=tilt, sample_weight=weights)
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    # Repeating a level changes nothing: each group then has one group inside.
    once = tilted_loss(losses, tilt, names, inner_tilt=other, sample_weight=weights)
    twice = tilted_loss(losses, tilt, [names, names], inner_tilt=(3.0, other), sample_weight=weights)
    torch.testing.assert_close(once, twice, rtol=1e-10, atol=1e-10)


def test_three_levels_by_hand():
    # (7.238)–(7.240): annotators above classes above examples.
    losses, annotator, label = tensor([0.1, 0.9, 0.4, 2.0, 0.3, 1.1]), list("aaabbb"), [0, 0, 1, 1, 1, 0]
    m, t, tau = -2.0, 5.0, 0.5

    def level(values, sizes, tilt):
        return math.log(sum(n * math.exp(tilt * v) for v, n in zip(values, sizes, strict=True)) / sum(sizes)) / tilt

    a = level([level([0.1, 0.9], [1, 1], tau), 0.4], [2, 1], t)
    b = level([level([2.0, 0.3], [1, 1], tau), 1.1], [2, 1], t)
    expected = level([a, b], [3, 3], m)
    for groups in ([annotator, label], np.array([annotator, label]).T, (torch.tensor([0, 0, 0, 7, 7, 7]), torch.tensor(label))):
        found = tilted_loss(losses, m, groups, inner_tilt=(t, tau))
        assert float(found) == pytest.approx(expected, rel=1e-12)
    assert hierarchy([annotator, label], 6).counts == (4, 2)


@pytest.mark.parametrize("tilt", [-200.0, -2.0, -1e-9, 0.0, 1e-9, 1.0, 30.0])
@pytest.mark.parametrize("inner", [None, -2.0, 0.0, 4.0])
def test_derivatives_by_finite_differences(tilt, inner):
    losses = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_(True)
    weights = tensor([1.0, 2.0, 0.0, 1.0, 3.0, 1.0, 1.0])
    groups = None if inner is None else [0, 0, 1, 1, 2, 2, 2]

    def function(values):
        scaled = 0.05 * values if abs(tilt) > 100 else values  # finite steps must stay small beside 1/t
        return tilted_loss(scaled, tilt, groups, inner_tilt=inner or 0.0, sample_weight=weights)

    assert torch.autograd.gradcheck(function, (losses,))
    assert torch.autograd.gradgradcheck(function, (losses,), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tilt", [200.0, -200.0, 1e-300, 0.0])
@pytest.mark.parametrize("inner", [200.0, -200.0, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e30])
def test_nothing_overflows(dtype, tilt, inner, scale):
    values = (scale * tensor([0.0, 1.0, -1.0, 0.5, 1.0], dtype)).requires_grad_(True)
    for groups in (None, [0, 0, 1, 1, 2]):
        loss = tilted_loss(values, tilt, groups, inner_tilt=inner if groups else ())
        assert loss.dtype == dtype
        assert torch.isfinite(loss)
        (slope,) = torch.autograd.grad(loss, values, create_graph=True)
        assert float(slope.detach().sum()) == pytest.approx(1.0, abs=1e-5)
        (second,) = torch.autograd.grad(slope @ values.detach(), values, retain_graph=True, allow_unused=True)
        assert second is None or bool(torch.isfinite(second).all())


@given(rows)
def test_continuous_at_zero(case):
    losses, weights, names, _ = parts(case)
    for groups in (None, names):
        mean = tilted_loss(losses, 0.0, groups, sample_weight=weights)
        for tilt in (1e-6, -1e-6, 1e-9, -1e-9, 1e-15, -1e-15):
            near = tilted_loss(losses, tilt, groups, inner_tilt=tilt if groups else (), sample_weight=weights)
            assert abs(float(near - mean)) <= 40 * abs(tilt) + 1e-13  # |R_t − R_0| ≤ |t| Var/2, and rounding


def test_limits_are_largest_and_smallest():
    losses = tensor([0.0, 2.0, 5.0])
    assert float(tilted_loss(losses, 1e5)) == pytest.approx(5.0, abs=1e-4)
    assert float(tilted_loss(losses, -1e5)) == pytest.approx(0.0, abs=1e-4)


def test_a_heavy_member_without_mass_does_not_hide_the_rest():
    losses = tensor([1e8, 0.0, 1.0, 5.0]).requires_grad_(True)
    loss = tilted_loss(losses, 3.0, [0, 0, 1, 2], inner_tilt=3.0, sample_weight=tensor([0.0, 1.0, 1.0, 0.0]))
    assert float(loss.detach()) == pytest.approx(math.log((1 + math.exp(3)) / 2) / 3)
    assert torch.autograd.grad(loss, losses)[0].tolist()[::3] == [0.0, 0.0]


def test_inside_functional_transforms():
    def value(theta, x):
        return tilted_loss((x - theta).square(), -2.0)

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = tensor(0.3)
    together = torch.func.vmap(torch.func.grad(value), (None, 0))(theta, x)
    alone = torch.stack([torch.func.grad(value)(theta, row) for row in x])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("tail", [1.0, 0.5, 0.1])
def test_superquantile_of_examples_and_of_groups(tail):
    losses = tensor([0.3, 4.0, 2.0, 2.5, 0.0]).requires_grad_(True)
    alpha = torch.full((5,), 0.2, dtype=torch.float64)
    value = superquantile_loss(losses, tail)
    weights = exact_weights(losses.detach(), alpha, tail)
    torch.testing.assert_close(torch.autograd.grad(value, losses)[0], weights)
    assert float(value.detach()) == pytest.approx(float(weights @ losses.detach()))
    smooth = superquantile_loss(losses, tail, nu=0.2)
    expected, slopes = huber_smoothed(losses.detach(), alpha, tail, 0.2)
    torch.testing.assert_close(smooth.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(smooth, losses)[0], slopes)
    grouped = superquantile_loss(losses, tail, ["a", "b", "b", "a", "c"])
    means = torch.stack([losses[[0, 3]].mean(), losses[[1, 2]].mean(), losses[4]])
    torch.testing.assert_close(grouped, superquantile_loss(means, tail, sample_weight=tensor([2.0, 2.0, 1.0])))


def test_the_tracked_normaliser():
    # Algorithm 14, lines 6 to 8, by hand for two batches.
    t, rho = -1.5, 0.25
    criterion = TiltedLoss(t, tracked=True, rho=rho)
    first, second = tensor([0.2, 1.0]), tensor([3.0, 0.1])
    criterion(first)
    start = tilted_loss(first, t)
    torch.testing.assert_close(criterion.estimate, start)
    values = second.clone().requires_grad_(True)
    criterion(values).backward()
    estimate = math.log((1 - rho) * math.exp(t * float(start)) + rho * math.exp(t * float(tilted_loss(second, t)))) / t
    assert float(criterion.estimate) == pytest.approx(estimate)
    torch.testing.assert_close(values.grad, torch.exp(t * (second - estimate)) / 2)
    assert float(tracked(tensor(1.0), tensor(3.0), 0.0, 0.25)) == pytest.approx(1.5)
    assert float(TiltedLoss(2.0)(first)) == float(tilted_loss(first, 2.0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tilted_loss(torch.ones(2, 2), 1.0), "losses must be a vector(.|\n)*reduction"),
        (lambda: tilted_loss(torch.ones(0), 1.0), "losses must be a vector"),
        (lambda: tilted_loss(torch.ones(2, dtype=torch.int64), 1.0), "losses must be a vector"),
        (lambda: tilted_loss([1.0], 1.0), "losses must be a vector"),
        (lambda: tilted_loss(torch.ones(2), float("nan")), "^tilt must be a finite number"),
        (lambda: tilted_loss(torch.ones(2), 1.0, [0, 1], inner_tilt="a"), "inner_tilt must"),
        (
            lambda: tilted_loss(torch.ones(2), 1.0, [0, 1], inner_tilt=(1.0, 2.0)),
            "inner_tilt must hold one tilt for each of the 1",
        ),
        (lambda: tilted_loss(torch.ones(2), 1.0, [0, 1, 1]), "groups must have one label for each of the 2"),
        (lambda: tilted_loss(torch.ones(2), 1.0, 3), "groups must be labels"),
        (lambda: tilted_loss(torch.ones(2), 1.0, [0.0, float("nan")]), "groups must have a label for every"),
        (lambda: tilted_loss(torch.ones(2), 1.0, ["a", None]), "groups must have a label for every"),
        (lambda: tilted_loss(torch.ones(2), 1.0, torch.tensor([0.0, float("inf")])), "groups must have a label"),
        (lambda: tilted_loss(torch.ones(2), 1.0, np.zeros((2, 2, 2))), "groups must be a vector of labels"),
        (lambda: tilted_loss(torch.ones(2), 1.0, sample_weight=torch.tensor([-1.0, 2.0])), "sample_weight must be 2 numbers"),
        (lambda: superquantile_loss(torch.ones(2), 0.0), "tail must lie in"),
        (lambda: superquantile_loss(torch.ones(2), 0.5, nu=0.0), "nu must be a positive"),
        (lambda: TiltedLoss(float("inf")), "tilt must be"),
        (lambda: TiltedLoss(1.0, rho=0.0), "rho must lie in"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(InvalidParameter, match=words):
        make()


def test_tracking_and_groups_do_not_mix():
    with pytest.raises(IncompatibleParts, match="one normaliser"):
        TiltedLoss(1.0, tracked=True)(torch.ones(2), [0, 1])


def test_an_infinite_loss_fades_under_a_negative_tilt():
    losses = tensor([0.5, math.inf, 1.0]).requires_grad_(True)
    for groups in (None, [0, 1, 1]):
        loss = tilted_loss(losses, -2.0, groups, inner_tilt=-2.0 if groups else ())
        assert torch.isfinite(loss)
        assert float(torch.autograd.grad(loss, losses)[0][1]) == 0.0


def test_thousands_of_groups_at_once():
    losses = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(20_000) % 5_000
    expected = tilted_loss(torch.stack([tilted_loss(losses[groups == g], -1.0) for g in range(3)]), 2.0)
    few = groups < 3
    torch.testing.assert_close(tilted_loss(losses[few], 2.0, groups[few], inner_tilt=-1.0), expected)
    assert float(tilted_weights(losses, 2.0, groups, inner_tilt=-1.0).sum()) == pytest.approx(1.0)
