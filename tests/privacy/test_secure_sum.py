"""Sums modulo M against Python's integers, and stochastic rounding."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import InvalidParameter
from equipoise.privacy.random_source import Seeded
from equipoise.privacy.secure_sum import (
    SimulatedSecureSum,
    centred,
    norm_is_within,
    quantise,
    required_modulus,
    residues,
    rounded_norm_bound,
)

moduli = st.one_of(st.integers(2, 50), st.integers(1, 62).map(lambda bits: 1 << bits), st.integers(2, 1 << 62))
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-100, 100))
tables = st.integers(1, 4).flatmap(lambda d: st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=1, max_size=20))


def representative(value, modulus):
    """The number in [−M/2, M/2) with the same residue, searched for by the definition."""
    value %= modulus
    return value - modulus if 2 * value >= modulus else value


@given(tables, moduli)
@settings(max_examples=200)
def test_the_sum_is_the_centred_residue(rows, modulus):
    secure, right = SimulatedSecureSum(modulus), [representative(sum(column), modulus) for column in zip(*rows, strict=True)]
    assert secure.sum(torch.tensor(rows)).tolist() == right
    one_by_one = torch.zeros(len(right), dtype=torch.int64)
    for row in rows:
        one_by_one = secure.add(one_by_one, torch.tensor(row))
    assert one_by_one.tolist() == right


def test_wraps_around_as_the_real_one_does():
    rows = torch.tensor([[3, -3, 4], [1, -2, 4]])
    assert SimulatedSecureSum(16).sum(rows).tolist() == [4, -5, -8]
    assert SimulatedSecureSum(8).sum(rows).tolist() == [-4, 3, 0]
    assert SimulatedSecureSum(9).sum(rows).tolist() == [4, 4, -1]


def test_many_rows_at_the_largest_modulus():
    rows = torch.full((1001, 2), 2**62 - 1)
    rows[:, 1] = -(2**63)
    expected = [representative(1001 * (2**62 - 1), 2**62), representative(-1001 * 2**63, 2**62)]
    assert SimulatedSecureSum(2**62).sum(rows).tolist() == expected
    odd = 2**62 - 57  # no power of two: running over int64 would not be forgiven
    assert SimulatedSecureSum(odd).sum(rows[:, :1]).tolist() == [representative(1001 * (2**62 - 1), odd)]
    assert SimulatedSecureSum(odd).sum(torch.full((1001, 1), -1)).tolist() == [-1001]


def test_nobody_adds_up_to_zeros():
    assert SimulatedSecureSum(10).sum(torch.zeros(0, 3, dtype=torch.int64)).tolist() == [0, 0, 0]


class MaskedSum:
    """A protocol in small: clients mask their residues with numbers shared in pairs, the server adds what it receives."""

    def __init__(self, modulus):
        self.modulus = modulus

    def sum(self, contributions):
        generator = torch.Generator().manual_seed(0)
        count, width = contributions.shape
        messages = residues(contributions, self.modulus)
        for first in range(count):
            for second in range(first):
                mask = torch.randint(self.modulus, (width,), generator=generator)
                messages[first] += mask
                messages[second] -= mask
        return centred(residues(messages, self.modulus).sum(0) % self.modulus, self.modulus)


@given(st.integers(2, 1000), st.integers(1, 6))
@settings(max_examples=30)
def test_a_masking_protocol_fits_the_interface(modulus, count):
    rows = torch.randint(-5000, 5000, (count, 7), generator=torch.Generator().manual_seed(modulus))
    assert torch.equal(MaskedSum(modulus).sum(rows), SimulatedSecureSum(modulus).sum(rows))


@pytest.mark.parametrize("modulus", [1, 0, -4, 2**62 + 1, 8.0, True, None])
def test_refuses_what_is_no_modulus(modulus):
    with pytest.raises(InvalidParameter, match="modulus"):
        SimulatedSecureSum(modulus)


@pytest.mark.parametrize("rows", [torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)])
def test_refuses_what_is_not_rows_of_int64(rows):
    with pytest.raises(InvalidParameter, match="contributions"):
        SimulatedSecureSum(8).sum(rows)


# ------------------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_goes_up_or_down_and_keeps_the_mean(dtype):
    row = torch.tensor([0.0, 0.3, -0.3, 1.0, -2.75, 1e-3, -1e-3, 123.4567, 0.5], dtype=dtype)
    step, count = 0.25, 20_000
    scaled = row.double() / step
    rounded = quantise(row.expand(count, -1), step=step, source=Seeded(0, "rounding"))
    assert rounded.dtype == torch.int64
    assert bool(((rounded == scaled.floor()) | (rounded == scaled.ceil())).all())
    fraction = scaled - scaled.floor()
    error = (rounded.double().mean(0) - scaled).abs()
    assert bool((error <= 4.5 * (fraction * (1 - fraction) / count).sqrt()).all())
    # Coordinates are rounded apart from each other, and so are clients.
    above = rounded[:, [1, 2, 4, 7]].double()
    correlation = torch.corrcoef(torch.cat([above, above.roll(1, 0)], 1)[:, [i for i in range(8) if i not in (2, 6)]].t())
    assert float((correlation - torch.eye(6)).abs().max()) < 5 / math.sqrt(count)


def test_numbers_on_the_grid_stay():
    whole = torch.randint(-1000, 1000, (5, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantise(whole.double() / 8, step=0.125, source=Seeded(0, "grid")), whole)


def test_rounding_is_a_pure_function_of_its_source():
    values = torch.rand(3, 10, generator=torch.Generator().manual_seed(1))
    first, again, other = (quantise(values, step=1e-3, source=Seeded(0, "x", r)) for r in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, 8.0])
def test_values_out_of_range_are_refused_with_the_fix(bad):
    values = torch.zeros(2, 3, dtype=torch.float64)
    values[1, 2] = bad
    with pytest.raises(InvalidParameter, match="Clip the update first"):
        quantise(values, step=1.0, source=Seeded(0, "x"), modulus=16)
    values[1, 2] = -6.5  # 7 is the largest that 16 can tell from others
    assert int(quantise(values, step=1.0, source=Seeded(0, "x"), modulus=16)[1, 2]) in (-6, -7)


@pytest.mark.parametrize("step", [0, -1.0, math.nan, None])
def test_refuses_what_is_no_step(step):
    with pytest.raises(InvalidParameter, match="step"):
        quantise(torch.zeros(1, 1), step=step, source=Seeded(0, "x"))


def test_refuses_whole_numbers_and_single_rows():
    for values in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(InvalidParameter, match="values"):
            quantise(values, step=1.0, source=Seeded(0, "x"))


# ----------------------------------------------------------------------------------------------------------------------- norms


def test_norm_bounds_by_hand():
    assert rounded_norm_bound(2.0, 0.5, 9) == 7.0  # 4 + 3
    usual = math.sqrt(100**2 + 10_000 / 4 + math.sqrt(2 * math.log(1e6)) * (100 + 50))
    assert rounded_norm_bound(1.0, 0.01, 10_000, failure=1e-6) == pytest.approx(usual)
    assert rounded_norm_bound(1.0, 10.0, 1, failure=1e-300) == rounded_norm_bound(1.0, 10.0, 1) == 1.1  # never above the worst


@given(st.integers(1, 30), st.floats(0.05, 5), st.integers(0, 10**6))
@settings(max_examples=50)
def test_no_rounding_exceeds_the_worst_case(dimension, step, seed):
    row = torch.randn(1, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    row = row / row.norm()
    away = torch.where(row > 0, (row / step).ceil(), (row / step).floor())  # the worst rounding of all
    assert float(away.norm()) <= rounded_norm_bound(1.0, step, dimension) * (1 + 1e-12)


def test_the_usual_bound_fails_as_rarely_as_it_says():
    # A vector whose coordinates are all half a step off varies most.
    dimension, count = 400, 3000
    row = torch.full((dimension,), 0.5)
    clip = float(row.norm())
    rounded = quantise(row.expand(count, -1), step=1.0, source=Seeded(0, "norm"))
    for failure in (0.3, 0.05, 1e-3):
        bound = rounded_norm_bound(clip, 1.0, dimension, failure=failure)
        share = float((rounded.double().norm(dim=1) > bound).double().mean())
        assert share <= failure + 4 * math.sqrt(failure / count)


def test_rows_are_rounded_again_until_the_bound_holds():
    row = torch.full((100, 100), 0.5)
    free = quantise(row, step=1.0, source=Seeded(0, "again")).double().norm(dim=1)
    assert int((free > 7.0).sum()) > 20  # about half: the median is √50 = 7.07
    held = quantise(row, step=1.0, source=Seeded(0, "again"), norm_bound=7.0)
    assert float(held.double().norm(dim=1).max()) <= 7.0
    with pytest.raises(InvalidParameter, match="Clip rows"):
        quantise(row + 1, step=1.0, source=Seeded(0, "again"), norm_bound=5.0)


def test_the_norm_is_compared_in_whole_numbers():
    assert norm_is_within(torch.tensor([3, 4]), 5.0)
    assert not norm_is_within(torch.tensor([3, 4]), 4.999999)
    large = torch.tensor([2**50, 2**50])  # squares leave int64
    assert norm_is_within(large, 2**50.51)
    assert not norm_is_within(large, 2**50.49)


# --------------------------------------------------------------------------------------------------------------------- modulus


def test_modulus_by_hand():
    # 2 + 2 · 10 · ⌈1/0.3⌉ = 82: seven bits; the noise of 10 clients, σ = 5, in 100 coordinates adds 2√(500 log(2e11)) = 228.
    assert required_modulus(1.0, 0.3, 10) == 128
    assert required_modulus(1.0, 0.3, 10, sigma=5.0, dimension=100, failure=1e-9) == 512
    assert required_modulus(1.0, 1.0, 31) == 64  # 2 + 62, exactly
    assert required_modulus(1.0, 1.0, 32) == 128
    with pytest.raises(InvalidParameter, match="step"):
        required_modulus(1.0, 1e-18, 100)
    with pytest.raises(InvalidParameter, match="contributors"):
        required_modulus(1.0, 0.1, 0)


@given(st.integers(1, 60), st.floats(0.001, 3.0))
@settings(max_examples=50)
def test_clients_who_all_agree_fit_and_smaller_moduli_do_not_hold_them(count, step):
    modulus = required_modulus(1.0, step, count)
    values = torch.tensor([[1.0], [-1.0]]).repeat_interleave(count, 0).double()
    for rows in values.split(count):
        whole = quantise(rows, step=step, source=Seeded(0, "fit"), modulus=modulus)
        assert SimulatedSecureSum(modulus).sum(whole).tolist() == whole.sum(0).tolist()
    quarter = modulus // 4
    largest = torch.full((count, 1), math.ceil(1 / step))
    if quarter >= 2:
        assert SimulatedSecureSum(quarter).sum(largest).tolist() != largest.sum(0).tolist()
