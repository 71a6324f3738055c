"""Shared by all tests: one torch thread per process, small federated data, and the folder of real data if there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from equipoise.data.clients import ClientSet, FederatedData

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("default")


def make_clients(sizes, *, features=4, classes=3, seed=0, prefix="client", dtype=torch.float32):
    """Ragged Gaussian clients whose class means differ, so that there is something to learn."""
    gen = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, features, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    triples = []
    for i, n in enumerate(sizes):
        y = torch.randint(0, classes, (n,), generator=gen)
        x = centers[y] + 0.5 * torch.randn(n, features, generator=gen, dtype=torch.float64)
        triples.append((f"{prefix}-{i}", x.to(dtype), y))
    return ClientSet.pack(triples)


@pytest.fixture
def ragged():
    """Eight ragged training clients and three unseen test clients."""
    return FederatedData(
        make_clients([1, 2, 3, 7, 10, 11, 20, 25]), test=make_clients([5, 9, 14], seed=1, prefix="unseen"), name="ragged"
    )


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("EQUIPOISE_DATA does not name a folder with the real data sets")
    return Path(folder)
