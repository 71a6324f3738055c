"""Which clients of a split a run evaluates: all of them, or a random sample that is the same for every method and seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import IncompatibleParts, is_integer, require
from equipoise.types import EngineTraits


def evaluation_sample(data: FederatedData, count: int | None) -> dict[str, Tensor] | None:
    """By split, the positions of `count` clients in rising order, for splits with more clients; None if there is no such split.

    Those clients are drawn whose keys, under the name of the data, are the smallest. The draw depends on neither the run nor
    the order of clients, a client in two splits is drawn in both or in neither where they hold the same clients, and a smaller
    sample is a part of a larger one.
    """
    good = count is None or (is_integer(count) and count >= 1)
    require(good, "evaluate_clients", "must be at least 1 client, or None for all clients", count)
    if count is None:
        return None
    large = {split: clients for split, clients in data.splits.items() if len(clients) > count}
    return {split: _smallest_keys(clients, int(count), data.name) for split, clients in large.items()} or None


def _smallest_keys(clients: ClientSet, count: int, name: str) -> Tensor:
    keys = rng.client_keys(rng.stream_key(0, f"evaluated clients of {name}"), clients.host_keys).numpy()
    return torch.from_numpy(np.sort(np.argpartition(keys, count)[:count]))


def refuse_sample(sample: Mapping[str, Tensor] | None, traits: EngineTraits, count: int | None) -> None:
    """Refuse a sample of the clients of a network."""
    if sample is not None and traits.network is not None:
        raise IncompatibleParts(
            f"evaluate_clients={count} draws a sample of clients, but over a network every node that answers is evaluated.",
            "Leave evaluate_clients out.",
        )


def sample_sizes(data: FederatedData, sample: Mapping[str, Tensor] | None) -> dict[str, tuple[int, int]] | None:
    """By split, how many clients are evaluated and how many there are; None if all of them are evaluated."""
    if sample is None:
        return None
    return {split: (len(sample.get(split, clients)), len(clients)) for split, clients in data.splits.items()}
