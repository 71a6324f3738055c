"""Partitioners: every example once, no client empty, and each one's own law."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data import partition
from equipoise.data.partition import by_classes, by_id, dirichlet, iid, partitioner, power_law, to_clients
from equipoise.errors import InvalidData, InvalidParameter

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(torch.tensor)
anyone = st.sampled_from(
    [
        iid,
        power_law,
        partial(power_law, exponent=3.0),
        dirichlet,
        partial(dirichlet, concentration=1e-3),
        partial(dirichlet, concentration=100.0),
    ]
)


def all_rows(parts):
    return sorted(torch.cat(list(parts)).tolist())


@given(labels=labels_of, deal=anyone, seed=st.integers(0, 2**40), data=st.data())
@settings(deadline=None)
def test_every_example_once_and_no_client_empty(labels, deal, seed, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = deal(labels, clients, seed=seed)
    assert len(parts) == clients
    assert all_rows(parts) == list(range(len(labels)))
    assert all(len(rows) for rows in parts)
    assert all(rows.dtype == torch.int64 for rows in parts)


@given(labels=labels_of, seed=st.integers(0, 1000), exponent=st.sampled_from([0.0, 1.5]), data=st.data())
@settings(deadline=None)
def test_few_classes_per_client(labels, seed, exponent, data):
    total = len(labels.unique())
    k = data.draw(st.integers(1, total))
    least = -(-total // k)
    clients = data.draw(st.integers(least, max(least, len(labels))))
    parts = by_classes(labels, clients, classes_per_client=k, exponent=exponent, seed=seed)
    assert all_rows(parts) == list(range(len(labels)))
    assert all(1 <= len(labels[rows].unique()) <= k for rows in parts)


@given(labels=labels_of, deal=anyone, clients=st.integers(1, 300))
@settings(deadline=None)
def test_empty_clients_only_when_asked_for(labels, deal, clients):
    parts = deal(labels, clients, allow_empty=True)
    assert len(parts) == clients
    assert all_rows(parts) == list(range(len(labels)))
    if clients > len(labels):
        with pytest.raises(InvalidParameter, match="at most the number of examples"):
            deal(labels, clients)


@pytest.mark.parametrize("name", sorted(partition.PARTITIONERS))
def test_seed_decides(name):
    labels = torch.arange(500) % 10
    deal = partitioner(name)
    first, again, other = (deal(labels, 20, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(rows) for rows in iid(torch.zeros(103), 10)]
    assert sorted(set(sizes)) == [10, 11]


def test_power_law_sizes_follow_the_exponent():
    sizes = np.sort([len(r) for r in power_law(torch.zeros(100_000), 50, exponent=1.3, min_examples=5)])[::-1]
    expected = np.arange(1, 51) ** -1.3
    expected = 5 + (100_000 - 250) * expected / expected.sum()
    assert np.abs(sizes - expected).max() <= 1
    assert len({len(r) for r in power_law(torch.zeros(100), 10, exponent=0.0)}) == 1


def test_dirichlet_concentration_sets_how_many_labels_a_client_has():
    labels = torch.arange(20_000) % 10

    def purity(concentration):
        parts = dirichlet(labels, 50, concentration=concentration, seed=0)
        shares = [np.bincount(labels[r].numpy(), minlength=10) / len(r) for r in parts]
        return np.mean([share.max() for share in shares])

    assert purity(0.01) > 0.85
    assert 0.25 < purity(0.5) < 0.7
    assert purity(1000.0) < 0.15


def test_dirichlet_proportions_have_the_stated_variance():
    # The share of one class that one client gets is Beta(c, c(K − 1)): variance (K − 1) / (K² (Kc + 1)).
    clients, c = 4, 0.5
    labels = torch.zeros(2000, dtype=torch.int64)
    shares = [len(dirichlet(labels, clients, concentration=c, seed=s)[0]) / 2000 for s in range(1500)]
    variance = (clients - 1) / (clients**2 * (clients * c + 1))
    assert np.mean(shares) == pytest.approx(1 / clients, abs=4 * np.sqrt(variance / 1500))
    assert np.var(shares) == pytest.approx(variance, rel=0.15)


def test_min_examples_is_kept():
    labels = torch.arange(1000) % 10
    assert min(len(r) for r in dirichlet(labels, 50, concentration=0.01, min_examples=15)) >= 15
    with pytest.raises(InvalidParameter, match="min_examples"):
        dirichlet(labels, 50, min_examples=21)


def test_classes_are_shared_evenly():
    labels = torch.arange(60_000) % 10
    parts = by_classes(labels, 100, classes_per_client=5)
    assert {len(labels[r].unique()) for r in parts} == {5}
    assert max(len(r) for r in parts) - min(len(r) for r in parts) <= 5


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda y: iid(y, 0), "clients"),
        (lambda y: iid(y, 7), "clients"),
        (lambda y: iid(y[:0], 1), "labels"),
        (lambda y: dirichlet(y, 2, concentration=0.0), "concentration"),
        (lambda y: dirichlet(y, 2, concentration=float("nan")), "concentration"),
        (lambda y: power_law(y, 2, exponent=-1.0), "exponent"),
        (lambda y: by_classes(y, 2, classes_per_client=4), "classes_per_client"),
        (lambda y: by_classes(y, 2, classes_per_client=0), "classes_per_client"),
        (lambda y: by_classes(y, 2, classes_per_client=1), "ask for more of either"),
        (lambda y: partitioner("dirichlett"), "Did you mean 'dirichlet'"),
    ],
)
def test_errors_name_the_parameter(call, word):
    with pytest.raises(InvalidParameter, match=word):
        call(torch.tensor([0, 0, 1, 1, 2, 2]))


def test_natural_ids():
    parts, names = by_id(torch.tensor([7, 3, 7, 3, 3]))
    assert names == ("3", "7")
    assert [p.tolist() for p in parts] == [[1, 3, 4], [0, 2]]


def test_to_clients_packs_rows_in_order():
    x, y = torch.arange(10.0), torch.arange(10)
    clients = to_clients(x, y, [torch.tensor([5, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([9])], scale=2.0)
    assert clients.ids == ("client-0", "client-2")
    assert clients.y.tolist() == [5, 2, 9]
    assert clients.offsets.tolist() == [0, 2, 3]
    assert clients.client("client-2")[0].tolist() == [18.0]
    with pytest.raises(InvalidParameter, match="assignment"):
        to_clients(x, y, [torch.tensor([10])])
    with pytest.raises(InvalidParameter, match="ids"):
        to_clients(x, y, [torch.tensor([1])], ids=["a", "b"])
    with pytest.raises(InvalidData, match="no client an example"):
        to_clients(x, y, [torch.tensor([], dtype=torch.int64)])
