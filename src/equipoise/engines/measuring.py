"""Metrics of clients at given models: outputs in batches over clients' borders, handed to the metrics client by client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics, rebuilt
from equipoise.core.trees import batch_shape, leaves, select
from equipoise.data.clients import ClientSet, rows_in_turn

Forward = Callable[[Tensor, Any], Any]  # of a model (D,) and inputs


def measure_clients(
    forward: Forward, params: Tensor, clients: ClientSet, metrics: ClientMetrics, which: Tensor, at_once: int
) -> Tensor:
    """Each metric of the clients at positions `which` (n,), (M, n), at one model (D,) or at a model of each one's own (n, D).

    A batch has at most `at_once` examples, of several clients where they share the model.
    """
    values = torch.full((len(metrics), len(which)), float("nan"), dtype=torch.float64)
    sizes, starts = clients.host_sizes[which], clients.starts.cpu()[which]
    for places in _groups(sizes, at_once if params.dim() == 1 else 1):
        under_way = [metrics.begin(clients.ids[int(which[place])]) for place in places]
        rows = rows_in_turn(starts[places], sizes[places]).to(clients.device)
        model = params if params.dim() == 1 else params[places[0]]
        ends = sizes[places].cumsum(0).tolist()
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            x, y = clients.inputs(part, model.dtype), clients.targets(part, model.dtype)
            outputs = forward(model, x)
            outputs = tuple(outputs) if isinstance(outputs, list) else outputs
            for client, begin, end in zip(under_way, [0, *ends], ends, strict=False):
                here = slice(max(begin - first, 0), max(min(end - first, len(part)), 0))
                if here.start < here.stop:
                    client.add(rows_of_outputs(outputs, here), select(y, here))
        for place, client in zip(places, under_way, strict=True):
            values[:, place] = torch.tensor(client.values(), dtype=torch.float64)
    return values


def _groups(sizes: Tensor, at_once: int) -> Iterator[list[int]]:
    """Places of clients in turn, in groups of at most `at_once` examples; a larger client is a group of its own."""
    group: list[int] = []
    count = 0
    for place, size in enumerate(sizes.tolist()):
        if group and count + size > at_once:
            yield group
            group, count = [], 0
        group.append(place)
        count += size
    if group:
        yield group


def rows_of_outputs(outputs: Any, rows: slice) -> Any:
    """Some examples' part of a model's outputs; what does not have one row per example stays as it is."""
    count = batch_shape(outputs) if isinstance(leaves(outputs)[0], Tensor) else None
    parts = [leaf[rows] if isinstance(leaf, Tensor) and leaf.shape[:1] == count else leaf for leaf in leaves(outputs)]
    return rebuilt(outputs, parts)
