"""Masks of dropout: a pure function of key, call and place, with the right statistics."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from equipoise.core import rng
from equipoise.core.dropout import dropout, kept

KEY = torch.tensor(123456789)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(shapes, st.lists(st.integers(0, 7), min_size=4, max_size=4), st.integers(0, 3))
def test_padding_behind_in_any_dimension_changes_nothing(shape, more, call):
    wider = [size + extra for size, extra in zip(shape, more, strict=False)]
    inside = tuple(slice(0, size) for size in shape)
    assert torch.equal(kept(KEY, call, wider, 20_000)[inside], kept(KEY, call, shape, 20_000))


@given(shapes)
def test_clients_in_a_batch_have_the_masks_they_have_alone(shape):
    keys = rng.step_keys(torch.arange(5), 3)
    together = vmap(lambda key: kept(key, 1, shape, 30_000))(keys)
    assert torch.equal(together, torch.stack([kept(key, 1, shape, 30_000) for key in keys]))


def test_the_masks_of_a_key_never_change():
    """Runs that are killed go on with the same masks, on whatever machine."""
    found = kept(torch.tensor(-5), 2, (3, 7), 32_768).int()
    assert found.tolist() == [[1, 0, 0, 0, 1, 0, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    dropped = dropout(torch.ones(400, 1000), p, KEY, 0) == 0
    deviation = (p * (1 - p) / dropped.numel()) ** 0.5
    assert float(dropped.double().mean()) == pytest.approx(p, abs=5 * deviation)
    for dim in (0, 1):  # every row and every column has its share
        shares = dropped.double().mean(dim)
        assert float((shares - p).abs().max()) < 5.5 * (p * (1 - p) / dropped.shape[dim]) ** 0.5


def test_neighbours_calls_steps_and_clients_are_independent():
    ones = torch.ones(256, 1024)

    def signs(key, call=0):
        return (dropout(ones, 0.5, key, call) > 0).double().mul_(2).sub_(1)

    first = signs(KEY)
    others = [first.roll(1, 0), *(first.roll(shift, 1) for shift in (1, 2, 3, 4, 8)), signs(KEY, 1), signs(KEY + 1)]
    others += [signs(rng.step_keys(torch.tensor([7]), step)[0]) for step in (0, 1, 2)]
    for other in others:
        assert abs(float((first * other).mean())) < 5 / first.numel() ** 0.5
    pairs = (first[:, :-1] * first[:, 1:]).mean(1)  # not within a row either
    assert float(pairs.abs().max()) < 5.5 / 1024**0.5


def test_expectations_are_kept():
    x = torch.linspace(1, 2, 200_000, dtype=torch.float64)
    assert float(dropout(x, 0.3, KEY, 0).mean()) == pytest.approx(1.5, rel=0.01)
    values = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = dropout(values, 0.3, KEY, 0, alpha=True)  # alpha dropout keeps mean 0 and variance 1
    assert float(after.mean()) == pytest.approx(0, abs=0.01)
    assert float(after.var()) == pytest.approx(1, abs=0.01)


def test_channels_are_dropped_whole():
    out = dropout(torch.ones(6, 50, 4, 5), 0.4, KEY, 0, features=True)
    per_channel = out.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0 < int((per_channel[..., 0] == 0).sum()) < 300


def test_ends_of_the_range():
    x = torch.randn(5, 3)
    assert dropout(x, 1e-9, KEY, 0) is x
    assert torch.equal(dropout(x, 1.0, KEY, 0), torch.zeros(5, 3))
    assert dropout(torch.empty(0, 3), 0.5, KEY, 0).shape == (0, 3)
    assert dropout(torch.ones(()), 0.5, KEY, 0).shape == ()


def test_step_keys_of_many_steps_are_those_of_each():
    keys = torch.tensor([3, -8, 2**62])
    table = rng.step_keys(keys, torch.arange(4).unsqueeze(1))
    assert torch.equal(table, torch.stack([rng.step_keys(keys, step) for step in range(4)]))
    assert len(table.unique()) == 12
    assert keys.tolist() == [3, -8, 2**62]
