"""A run that diverges or stands still on inputs of a bad scale is told so, with the column and the cure."""

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import Diverged, EquipoiseNotice
from equipoise.runs.input_scales import far_inputs
from made_clients import make_clients


def scaled_data(*factors, shift=0.0):
    clients = make_clients([12, 15, 20, 9])
    x = clients.x * torch.tensor(factors) + shift
    return FederatedData(ClientSet(x, clients.y, clients.offsets, clients.ids))


def regression(x):
    y = x[:, :1].sum(1) / x[:, 0].abs().max()
    return FederatedData(ClientSet(x, y, torch.tensor([0, 20, 40]), ("a", "b")))


def test_the_column_is_named_that_is_farthest_from_one():
    assert far_inputs(scaled_data(1.0, 1.0, 3.0, 0.5)) is None
    text = far_inputs(scaled_data(1.0, 300.0, 5000.0, 1.0))
    assert text.startswith("Column 2 of x (and 1 more) has a mean of")
    assert "scale=1/255" in text
    assert far_inputs(scaled_data(1.0, 1.0, 1.0, 1e-5)).startswith("Column 3 of x has")
    assert far_inputs(scaled_data(1.0, 1.0, 0.0, 1.0)) is None  # a constant column does no harm


def test_leaves_images_and_tokens():
    gen = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 1, 4, 4), generator=gen).to(torch.uint8)
    y, offsets, ids = torch.randint(0, 3, (20,), generator=gen), torch.tensor([0, 9, 20]), ("a", "b")
    assert far_inputs(FederatedData(ClientSet(pixels, y, offsets, ids, scale=1 / 255))) is None
    assert far_inputs(FederatedData(ClientSet(pixels, y, offsets, ids))) is None  # tokens
    assert far_inputs(FederatedData(ClientSet(pixels, y, offsets, ids, scale=1.0))).startswith("The input x has")
    both = {"image": pixels.float(), "age": torch.rand(20, 2, generator=gen)}
    assert far_inputs(FederatedData(ClientSet(both, y, offsets, ids))).startswith("The input x['image'] has")


def test_a_run_that_diverges_names_the_column_instead_of_the_learning_rate():
    data, model = scaled_data(1.0, 1.0, 1e5, 1.0), nn.Linear(4, 3)
    with pytest.warns(EquipoiseNotice, match="diverged. Column 2 of x has") as told:
        eq.train(model, data, rounds=6, clients_per_round=2)
    assert "Lower the learning rate" not in str(told[0].message)
    far = regression(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e4, 1, 1, 1]))

    def squared(outputs, targets):
        return (outputs.squeeze(-1) - targets).square()

    with pytest.raises(Diverged, match="Column 0 of x has") as failed:
        eq.train(nn.Linear(4, 1), far, rounds=40, clients_per_round=2, loss=squared)
    assert "Lower the learning rate" not in str(failed.value)


def test_other_runs_are_told_what_they_were_told_before():
    data = scaled_data(1.0, 1.0, 1.0, 1.0)
    wild = eq.Algorithm(solver=eq.solvers.SGD(lr=1e5, batch_size=2))
    with pytest.warns(EquipoiseNotice, match="Lower the learning rate"):
        eq.train(nn.Linear(4, 3), data, wild, rounds=3, clients_per_round=2)


def test_a_run_that_stands_still_is_told_so():
    data, slow = scaled_data(1e-5, 1e-5, 1e-5, 1e-5), eq.Algorithm(solver=eq.solvers.SGD(lr=1e-6, batch_size=2))
    frame = {"client": np.repeat(["a", "b"], 30), "x": np.arange(60.0), "y": np.tile([0, 1], 30)}
    with pytest.warns(EquipoiseNotice, match="stood still. Column"):
        eq.train(eq.models.Softmax(4, 3), data, slow, rounds=10, clients_per_round=4)
    table = eq.data.from_frame(frame, client="client", target="y", test=0.0, seed=0)
    assert far_inputs(table) is None  # a schema standardises


def test_rows_of_many_million_examples_are_found():
    count = 2**24 + 4  # float32 rounds the last row, 2²⁴ + 3, up to one that is not there
    x = torch.zeros(count, 1, dtype=torch.uint8)
    clients = eq.ClientSet(x, torch.zeros(count, dtype=torch.uint8), torch.tensor([0, count]), ("a",), scale=1.0)
    assert far_inputs(eq.FederatedData(clients, classes=2)) is None


def absolute_cube(outputs, targets):
    return (outputs - targets).abs() ** 3


def test_a_regression_that_diverges_by_its_own_loss_is_told_of_the_unit_of_its_target():
    row = np.arange(80)
    frame = {"shop": row % 4, "a": np.sin(row), "b": np.cos(3 * row), "price": 5000 + 900 * np.sin(row) + row / 7}
    data = eq.data.from_frame(frame, client="shop", target="price", split_by="examples")
    words = (
        r"The loss sees the target 'price' in its own unit, with a mean of .* and a standard deviation of 6\d\d: divide "
        r"outputs and targets by data.schema.target.deviation \(6\d\d\) in the loss, or lower the learning rate\."
    )
    options = {"rounds": 20, "clients_per_round": 4, "progress": False, "loss": absolute_cube}
    with pytest.raises(Diverged, match=words):
        eq.train(eq.models.Tabular(data.schema, hidden=()), data, **options)
    arrays = FederatedData(ClientSet(torch.randn(40, 4), 1000 + torch.randn(40), torch.tensor([0, 20, 40]), ("a", "b")))
    with pytest.raises(Diverged, match=r"the target in its own unit.* by the standard deviation of the training targets"):
        eq.train(eq.models.LinearRegression(4), arrays, **options | {"clients_per_round": 2})


def test_a_target_of_size_1_and_classes_are_not_blamed():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    wild = eq.Algorithm(solver=eq.solvers.SGD(lr=1e6, batch_size=2))
    with pytest.raises(Diverged, match="Lower the learning rate") as failed:
        eq.train(eq.models.LinearRegression(4), regression(x), wild, rounds=40, clients_per_round=2, loss=absolute_cube)
    assert "unit" not in str(failed.value)
