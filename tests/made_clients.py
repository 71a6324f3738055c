"""Clients made for tests."""

import torch

from equipoise.data.clients import ClientSet


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
