"""A federated data set: what it reads from its splits, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from equipoise.data import ClientSet, FederatedData
from equipoise.errors import InvalidData


def make(**changes):
    parts = {"x": torch.arange(12.0).reshape(6, 2), "y": torch.tensor([0, 1, 0, 1, 1, 0])}
    return ClientSet(**parts | changes, offsets=torch.tensor([0, 1, 4, 6]), ids=("a", "b", "c"))


def test_classes_are_read_and_checked():
    data = FederatedData(make(), test=make(y=torch.tensor([0, 1, 2, 3, 4, 5])))
    assert data.classes == 6
    assert data.features == 2
    assert set(data.splits) == {"train", "test"}
    assert "train: 3 clients / 6 examples" in repr(data)
    with pytest.raises(InvalidData, match="found 0 … 1"):
        FederatedData(make(), classes=1)
    with pytest.raises(InvalidData, match="found -1"):
        FederatedData(make(y=torch.tensor([0, 1, -1, 0, 0, 0])))
    with pytest.raises(InvalidData, match="test have shape"):
        FederatedData(make(), test=make(x=torch.zeros(6, 3)))
    assert FederatedData(make(y=torch.zeros(6))).classes == 0  # regression
