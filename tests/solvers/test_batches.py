"""What a client sees: every example once per epoch, and the batched cursor equal to the plain iterator."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from scipy import stats

from equipoise.core import rng
from equipoise.solvers.batches import TABLE, BatchCursor, client_batches, epoch_order, largest_table

KEY = rng.stream_key(0, "batches")


@given(size=st.integers(1, 40), batch=st.one_of(st.none(), st.integers(1, 50)), epochs=st.integers(1, 3))
def test_each_epoch_sees_every_example_once(size, batch, epochs):
    key = rng.client_keys(KEY, torch.tensor(5))
    per_epoch = 1 if batch is None else -(-size // batch)
    batches = list(client_batches(key, size, batch, epochs * per_epoch))
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        seen = torch.cat(batches[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen.tolist()) == list(range(size))
    if batch is not None:
        assert all(len(b) == batch for b in batches[: per_epoch - 1])


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch=st.one_of(st.none(), st.integers(1, 40)),
    steps=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    at_once=st.booleans(),
)
def test_the_cursor_gives_the_same_batches(sizes, batch, steps, at_once):
    steps = torch.tensor(steps[: len(sizes)])
    order = steps.argsort(descending=True, stable=True)
    steps, sizes = steps[order], torch.tensor(sizes)[order]
    keys = rng.client_keys(KEY, torch.arange(len(sizes)))
    plain = [list(client_batches(keys[k], int(sizes[k]), batch, int(steps[k]))) for k in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("equipoise.solvers.batches.TABLE", 2**22 if at_once else 0)
        cursor = BatchCursor(keys, sizes, batch, steps)
    assert cursor.at_once is at_once
    assert len(cursor.active) == int(steps.max())
    for step, active in enumerate(cursor.active):
        assert active == int((steps > step).sum())
        rows, shares = cursor.batch(step, torch.float64)
        torch.testing.assert_close(shares.sum(1), torch.ones(active, dtype=torch.float64))
        for k in range(active):
            expected = plain[k][step]
            assert rows[k][shares[k] > 0].tolist() == expected.tolist()
            assert int(rows[k].max()) < int(sizes[k])  # padding repeats the client's own examples


def test_orders_are_uniform():
    keys = rng.client_keys(KEY, torch.arange(6000))
    counts = torch.zeros(6)
    for key in keys:
        order = epoch_order(key, 0, 3).tolist()
        counts[[[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]].index(order)] += 1
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_epochs_and_clients_have_orders_of_their_own():
    a, b = rng.client_keys(KEY, torch.tensor([1, 2]))
    assert epoch_order(a, 0, 50).tolist() != epoch_order(a, 1, 50).tolist()
    assert epoch_order(a, 0, 50).tolist() != epoch_order(b, 0, 50).tolist()


@pytest.mark.parametrize(("memory", "most"), [(2**30, TABLE), (8 * 2**30, 2**24), (139 * 2**30, 2**27)])
def test_a_gpu_makes_larger_tables_at_once_as_its_memory_allows(memory, most, monkeypatch):
    """512 bytes of memory per number: 8 GiB / 512 = 2^24; the least is a CPU's, the most 2^27."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    assert largest_table(torch.device("cuda:0")) == most
    assert largest_table(torch.device("cpu")) == TABLE
