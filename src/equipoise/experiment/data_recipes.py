"""Data for configurations that combine several steps: reading a file and splitting it."""

from __future__ import annotations

import os

from equipoise.data import FederatedData
from equipoise.data import npz as read_npz
from equipoise.data.clients import How, split


def npz(
    path: str | os.PathLike[str],
    *,
    x: str = "x",
    y: str = "y",
    client: str = "client",
    scale: float | None = None,
    shift: float = 0.0,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Your own data: an .npz file with inputs, targets and a client id per example, split by client or inside clients.

    `x`, `y` and `client` name the arrays. With `scale` a model sees x · scale + shift (bytes such as pixels need it). No pickle
    is read.

    Source: your own file.
    """
    clients = read_npz(path, x=x, y=y, client=client, scale=scale, shift=shift)
    name = os.path.splitext(os.path.basename(os.fspath(path)))[0]
    return split(clients, split_by, validation=validation, test=test, seed=seed, name=name)
