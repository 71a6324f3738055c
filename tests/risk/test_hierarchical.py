"""Tilts on two levels: by hand, the one-level tilts it contains, and numbers that would overflow."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from equipoise.errors import InvalidParameter
from equipoise.risk import HierarchicalTilt, Tilted


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


cases = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 9), st.sampled_from("xyz")), min_size=1, max_size=10).map(
    lambda rows: (
        tensor([r[0] for r in rows]),
        tensor([r[1] for r in rows]) / sum(r[1] for r in rows),
        {f"c{i}": r[2] for i, r in enumerate(rows)},
    )
)
tilts = st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1e-9, -1e-9, 200.0, -200.0]))


@given(cases, tilts)
def test_equal_tilts_are_the_tilted_risk(case, tilt):
    losses, alpha, groups = case
    found = HierarchicalTilt(groups, tilt=tilt, inner_tilt=tilt)(losses, alpha, clients=tuple(groups))
    plain = Tilted(tilt)(losses, alpha)
    torch.testing.assert_close(found.value, plain.value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.weights, plain.weights, rtol=1e-8, atol=1e-12)


@given(cases, tilts)
def test_one_group_is_the_inner_tilt_and_single_clients_are_the_outer(case, tilt):
    losses, alpha, groups = case
    ids = tuple(groups)
    together = HierarchicalTilt(lambda client: "all", tilt=3.0, inner_tilt=tilt)(losses, alpha, clients=ids)
    torch.testing.assert_close(together.weights, Tilted(tilt)(losses, alpha).weights, rtol=1e-9, atol=1e-12)
    apart = HierarchicalTilt(str, tilt=tilt, inner_tilt=3.0)(losses, alpha, clients=ids)
    torch.testing.assert_close(apart.weights, Tilted(tilt)(losses, alpha).weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(dtype):
    # Groups a = {0, 2 log 2} and b = {log 5}, α = ¼, ¼, ½, so α_a = α_b = ½; τ = 0, t = 1.
    # R_a = log 2, R_b = log 5: value log((2 + 5)/2), groups weigh 2/7 and 5/7, and a's clients share theirs equally.
    losses, alpha = tensor([0.0, 2 * math.log(2), math.log(5)], dtype), tensor([0.25, 0.25, 0.5], dtype)
    groups = {"p": "a", "q": "a", "r": "b"}
    result = HierarchicalTilt(groups)(losses, alpha, clients=("p", "q", "r"))
    assert result.weights.dtype == dtype
    assert float(result.value) == pytest.approx(math.log(3.5))
    assert result.weights.tolist() == pytest.approx([1 / 7, 1 / 7, 5 / 7])
    # τ = ½: e^{R_a/2} = (1 + 2)/2, so e^{R_a} = 9/4; inside a the weights are 1/3 and 2/3, between groups 9/29 and 20/29.
    result = HierarchicalTilt(groups, 1.0, 0.5)(losses, alpha, clients=("p", "q", "r"))
    assert float(result.value) == pytest.approx(math.log((9 / 4 + 5) / 2))
    assert result.weights.tolist() == pytest.approx([3 / 29, 6 / 29, 20 / 29])


def test_the_weights_of_the_thesis():
    # (7.85) as printed, with equal base weights.
    losses, names, t, tau = [0.3, 1.0, 2.0, 0.7, 0.1], "aabbb", 1.5, -0.5
    groups = {f"c{i}": name for i, name in enumerate(names)}
    inside = {g: [math.exp(tau * f) for f, name in zip(losses, names, strict=True) if name == g] for g in "ab"}
    means = {g: sum(e) / len(e) for g, e in inside.items()}
    bottom = sum(len(inside[g]) * means[g] ** (t / tau) for g in "ab")
    expected = [means[g] ** (t / tau - 1) / bottom * math.exp(tau * f) for f, g in zip(losses, names, strict=True)]
    found = HierarchicalTilt(groups, tilt=t, inner_tilt=tau)(tensor(losses), tensor([0.2] * 5), clients=tuple(groups))
    assert found.weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("tilt", [200.0, -200.0, 1.0, 0.0])
@pytest.mark.parametrize("inner", [200.0, -200.0, 1e-9, 0.0])
@pytest.mark.parametrize("losses", [[0.0] * 4, [1e4, 0.0, 1.0, 1e4], [1e300, 1.0, 0.0, 2.0], [1e300] * 4])
def test_nothing_overflows(tilt, inner, losses):
    risk = HierarchicalTilt({"a": "x", "b": "x", "c": "y", "d": "y"}, tilt, inner)
    result = risk(tensor(losses), tensor([0.25] * 4), clients=tuple("abcd"))
    assert torch.isfinite(result.value)
    assert bool((result.weights >= 0).all())
    assert float(result.weights.sum()) == pytest.approx(1.0)


def test_one_client_and_a_group_without_weight():
    risk = HierarchicalTilt({"a": "x", "b": "y"}, 2.0, -2.0)
    only = risk(tensor([3.0]), tensor([1.0]), clients=("a",))
    assert (float(only.value), only.weights.tolist()) == (pytest.approx(3.0), [1.0])
    assert risk(tensor([3.0, 9.0]), tensor([1.0, 0.0]), clients=("a", "b")).weights.tolist() == [1.0, 0.0]


def test_the_mapping_is_copied():
    groups = {"a": "x"}
    risk = HierarchicalTilt(groups)
    groups.clear()
    assert risk.group_of("a") == "x"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HierarchicalTilt({}), "groups must name a group for every client"),
        (lambda: HierarchicalTilt({"a": 1}), r"groups\['a'\] must be a text"),
        (lambda: HierarchicalTilt({1: "x"}), r"groups\[1\] must be a text"),
        (lambda: HierarchicalTilt(["x"]), "groups must be a mapping or a function"),
        (lambda: HierarchicalTilt(str, tilt=float("nan")), "^tilt must be a finite number"),
        (lambda: HierarchicalTilt(str, inner_tilt="a"), "inner_tilt must be a finite number"),
        (lambda: HierarchicalTilt({"a": "x"}).group_of("b"), "must name a group for client 'b'(.|\n)*E.g. groups="),
        (lambda: HierarchicalTilt({"a": "x"}.get).group_of("b"), r"groups\('b'\) must be the name of a group"),
        (lambda: HierarchicalTilt(str)(tensor([1.0]), tensor([1.0])), "clients must be given"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(InvalidParameter, match=words):
        make()
