"""The packed client set: what it refuses, and that slices, scales and copies are what they say."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import ClientSet
from equipoise.errors import InvalidData, InvalidParameter


def make(**changes):
    parts = {
        "x": torch.arange(12.0).reshape(6, 2),
        "y": torch.tensor([0, 1, 0, 1, 1, 0]),
        "offsets": torch.tensor([0, 1, 4, 6]),
        "ids": ("a", "b", "c"),
    }
    return ClientSet(**{**parts, **changes})


def test_clients_are_slices_of_one_tensor():
    clients = make()
    assert len(clients) == 3
    assert clients.sizes.tolist() == [1, 3, 2]
    assert clients.rows(1) == slice(1, 4)
    x, y = clients.client("b")
    assert torch.equal(x, clients.x[1:4])
    assert y.tolist() == [1, 0, 1]
    assert torch.equal(clients.client(at=2)[0], clients.x[4:])


def test_pack_inverts_client():
    clients = make()
    again = ClientSet.pack((name, *clients.client(name)) for name in clients.ids)
    assert torch.equal(again.x, clients.x)
    assert torch.equal(again.y, clients.y)
    assert torch.equal(again.offsets, clients.offsets)
    assert again.ids == clients.ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offsets": torch.tensor([0, 1, 1, 6])}, ["no example", "b"]),
        ({"offsets": torch.tensor([0, 4, 1, 6])}, ["no example", "b"]),
        ({"offsets": torch.tensor([0, 1, 4, 5])}, ["0 to 6"]),
        ({"offsets": torch.tensor([1, 2, 4, 6])}, ["0 to 6"]),
        ({"offsets": torch.tensor([0, 6])}, ["4 offsets", "got 2"]),
        ({"ids": ("a", "b", "a")}, ["must differ", "a"]),
        ({"y": torch.zeros(5)}, ["6 rows", "5"]),
        ({"ids": (), "offsets": torch.tensor([6])}, ["no client"]),
    ],
)
def test_refuses_what_is_not_a_packing(changes, words):
    with pytest.raises(InvalidData) as caught:
        make(**changes, source="somewhere.npz")
    for word in ["somewhere.npz", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "y"])
def test_a_number_that_is_not_finite_names_client_and_row(bad, where):
    values = torch.zeros(6, 2) if where == "x" else torch.zeros(6)
    values[3] = bad
    with pytest.raises(InvalidData, match=rf"client 'b', row 2 \(row 3 of {where}\)"):
        make(**{where: values})


def test_nan_beyond_the_first_chunk_is_found():
    x = torch.zeros(70_000)
    x[69_999] = float("nan")
    with pytest.raises(InvalidData, match="client 'second', row 4999"):
        ClientSet(x, torch.zeros(70_000), torch.tensor([0, 65_000, 70_000]), ("first", "second"))


def test_pack_refuses_uneven_and_empty():
    with pytest.raises(InvalidData, match="'b' has 2 inputs but 1 targets"):
        ClientSet.pack([("a", torch.zeros(1), torch.zeros(1)), ("b", torch.zeros(2), torch.zeros(1))])
    with pytest.raises(InvalidData, match="no client"):
        ClientSet.pack([])


def test_bytes_are_scaled_when_gathered():
    clients = make(x=torch.tensor([0, 51, 102, 153, 204, 255], dtype=torch.uint8), scale=-1 / 255, shift=1.0)
    assert clients.x.dtype == torch.uint8
    seen = clients.inputs(slice(0, 6))
    assert seen.dtype == torch.float32
    assert torch.allclose(seen, torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]), atol=1e-6)
    assert clients.inputs(slice(0, 6), torch.float64).dtype == torch.float64
    assert clients.x[1] == 51  # scaling works on a copy


def test_integers_without_scale_are_tokens():
    clients = make(x=torch.arange(6, dtype=torch.uint8), y=torch.arange(6, dtype=torch.uint8))
    assert clients.inputs(slice(2, 4)).tolist() == [2, 3]
    assert clients.inputs(slice(2, 4)).dtype == torch.int64
    assert clients.targets(slice(2, 4)).dtype == torch.int64


def test_take_keeps_order_scale_and_data():
    clients = make(scale=2.0, shift=1.0)
    some = clients.take([2, 0])
    assert some.ids == ("c", "a")
    assert some.offsets.tolist() == [0, 2, 3]
    assert torch.equal(some.client("c")[0], clients.client("c")[0])
    assert torch.equal(some.client("a")[0], clients.client("a")[0])
    assert (some.scale, some.shift) == (2.0, 1.0)
    assert torch.equal(some.keys, clients.keys[[2, 0]])
    with pytest.raises(InvalidParameter):
        clients.take([])


def test_to_another_device_and_back():
    clients = make()
    assert clients.to(torch.device("cpu")) is clients
    moved = clients.to(torch.device("meta"))
    assert moved.x.device.type == moved.offsets.device.type == "meta"
    assert moved.ids == clients.ids
    assert len(moved) == 3


def test_positions_of_ids():
    clients = ClientSet.pack([(name, torch.zeros(1, 2), torch.zeros(1)) for name in ("c", "a", "b")])
    assert clients.positions_of(["b", "c", "d"]).tolist() == [2, 0, -1]
