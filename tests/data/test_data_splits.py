"""Splits: disjoint, complete, and the same whatever the order of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.rng import generator
from equipoise.data import ClientSet, split_clients, split_examples
from equipoise.data.clients import split, splits
from equipoise.errors import InvalidParameter


def numbered(sizes):
    """Clients whose rows are all different numbers, so that rows can be followed."""
    total = sum(sizes)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    return ClientSet(torch.arange(float(total)), torch.zeros(total), offsets, tuple(f"c{k}" for k in range(len(sizes))))


sizes_of = st.lists(st.integers(1, 30), min_size=4, max_size=25)


@given(sizes=sizes_of, seed=st.integers(0, 1000), test=st.sampled_from([0.1, 0.3, 0.5]), validation=st.sampled_from([0.0, 0.2]))
@settings(deadline=None)
def test_split_clients_is_a_partition_of_the_clients(sizes, seed, test, validation):
    clients = numbered(sizes)
    data = split_clients(clients, test=test, validation=validation, seed=seed)
    ids = [i for part in data.splits.values() for i in part.ids]
    assert sorted(ids) == sorted(clients.ids)
    assert ("validation" in data.splits) == (validation > 0)
    for part in data.splits.values():
        for name in part.ids:
            assert torch.equal(part.client(name)[0], clients.client(name)[0])


@given(sizes=sizes_of, seed=st.integers(0, 1000), test=st.sampled_from([0.1, 0.5]), validation=st.sampled_from([0.0, 0.4]))
@settings(deadline=None)
def test_split_examples_is_a_partition_of_each_client(sizes, seed, test, validation):
    clients = numbered([*sizes, 20])  # one large enough to spare examples
    data = split_examples(clients, test=test, validation=validation, seed=seed)
    assert data.train.ids == clients.ids
    for name in clients.ids:
        parts = [part.client(name)[0] for part in data.splits.values() if name in part.ids]
        assert torch.equal(torch.cat(parts).sort().values, clients.client(name)[0])
    for part, fraction in (("test", test), ("validation", validation)):
        if part in data.splits:
            for name in data.splits[part].ids:
                size = len(clients.client(name)[0])
                assert abs(len(data.splits[part].client(name)[0]) - fraction * size) <= 1.0


@pytest.mark.parametrize("how", [split_clients, split_examples])
def test_order_of_clients_does_not_matter(how):
    clients = numbered([7, 12, 3, 9, 30, 5, 18])
    turned = clients.take([6, 2, 0, 5, 1, 4, 3])
    one, other = how(clients, test=0.3, seed=5), how(turned, test=0.3, seed=5)
    for name, part in one.splits.items():
        assert set(part.ids) == set(other.splits[name].ids)
        for client in part.ids:
            assert torch.equal(part.client(client)[0], other.splits[name].client(client)[0])


@pytest.mark.parametrize("how", [split_clients, split_examples])
def test_seed_decides(how):
    clients = numbered([20] * 20)
    first, again, other = (how(clients, test=0.5, seed=s).test for s in (0, 0, 1))
    assert first.ids == again.ids
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


def test_odd_halves_give_test_the_larger_part():
    # Sent140 in the Δ-FL papers: 877 clients, 438 train and 439 test.
    data = split_clients(numbered([1] * 877), test=0.5)
    assert (len(data.train), len(data.test)) == (438, 439)


def test_small_clients_keep_their_training_example():
    data = split_examples(numbered([1, 2, 3, 40]), test=0.5, validation=0.4)
    assert data.train.ids == ("c0", "c1", "c2", "c3")
    assert data.test.ids == ("c1", "c2", "c3")
    assert data.validation.ids == ("c3",)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda c: split_clients(c, test=1.0), "test"),
        (lambda c: split_clients(c, test=-0.1), "test"),
        (lambda c: split_clients(c, test=0.5, validation=0.5), "validation \\+ test"),
        (lambda c: split_clients(c.take([0]), test=0.5), "clients"),
        (lambda c: split_clients(c, test=0.1, validation=0.1), "clients"),
        (lambda c: split_examples(c, test=0.1), "no client with an example to spare"),
        (lambda c: split(c, "client"), "split"),
    ],
)
def test_errors(call, word):
    with pytest.raises(InvalidParameter, match=word):
        call(numbered([2, 2]))


def test_equal_draws_are_ordered_by_id(monkeypatch):
    clients = numbered([1] * 9).take([8, 3, 1, 0, 2, 7, 5, 4, 6])
    monkeypatch.setattr(splits, "first_uniforms", lambda seed, purpose, keys: np.array([0.5, 0.1] + [0.3] * 7))
    data = split_clients(clients, test=0.4, validation=0.2)  # 4 and 2 of 9: c3, then those at 0.3 by id, then c8
    assert set(data.test.ids) == {"c3", "c0", "c1", "c2"}
    assert set(data.validation.ids) == {"c4", "c5"}


def test_the_draws_of_old_choose_the_clients():
    clients = numbered([1] * 50)
    drawn = {i: generator(3, "split clients", client=i).random() for i in clients.ids}
    data = split_clients(clients, test=0.3, validation=0.1, seed=3)
    assert sorted(data.test.ids, key=drawn.get) == sorted(clients.ids, key=drawn.get)[:15]
    assert sorted(data.validation.ids, key=drawn.get) == sorted(clients.ids, key=drawn.get)[15:20]


def test_selected_clients_are_those_that_are_taken():
    clients = numbered([3, 1, 4, 1, 5])
    taken, selected = (clients.take([4, 0, 2]), clients.select([4, 0, 2]))
    assert selected.x is clients.x
    assert selected.ids == taken.ids
    assert torch.equal(selected.offsets, taken.offsets)
    assert torch.equal(selected.host_keys, taken.host_keys)
    for name in taken.ids:
        assert torch.equal(selected.client(name)[0], taken.client(name)[0])
    assert torch.equal(selected.take([1]).x, taken.take([1]).x)
    assert (taken.find(clients) >= 0).tolist() == [True, False, True, False, True]
