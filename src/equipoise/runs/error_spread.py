"""How the errors of a client's examples are spread, where they are numbers: what the interval of its mean error needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.data.clients import ClientSet, FederatedData, rows_in_turn

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.core.task import Task

_AT_ONCE = 4096  # examples that are with the model together


def with_error_spread(
    table: ClientTable, task: Task, model: nn.Module, data: FederatedData, sample: Mapping[str, Tensor] | None,
    device: torch.device | str,
) -> ClientTable:  # fmt: skip
    """The table with the columns `error_deviation` and `error_skewness`; the table itself where they are not known.

    They are known for data in memory whose targets are numbers. `sample` holds the positions of the clients that are evaluated,
    by split; `model` is in evaluation mode and stays where it is. The examples are evaluated once more, on `device`.
    """
    for clients in data.splits.values():
        numbers = isinstance(clients.y, Tensor) and clients.y.is_floating_point()
        if clients.store is not None or clients.is_visited or not numbers:
            return table
    found = []
    try:
        used = model if torch.device(device).type == "cpu" else copy.deepcopy(model).to(device)
        for split, clients in data.splits.items():
            which = None if sample is None else sample.get(split)
            means = table.where(split).error
            found.append(_moments(task, used, clients if which is None else clients.select(which), means, device))
    except Exception:  # a user's model or error may want more than these calls give, and the run has ended well
        return table
    deviation, skewness = torch.cat(found, 1)
    return replace(table, error_deviation=deviation, error_skewness=skewness)


def _moments(task: Task, model: nn.Module, clients: ClientSet, means: Tensor, device: torch.device | str) -> Tensor:
    """Deviation and skewness of the errors of each client's examples (2, n), around its mean error (n,).

    The deviation divides by the number of examples less one; the skewness is the mean cube over the cubed deviation of all n.
    """
    sizes = clients.host_sizes
    owner, rows = torch.repeat_interleave(sizes), rows_in_turn(clients.starts.cpu(), sizes).to(clients.device)
    sums = torch.zeros(2, len(clients), dtype=torch.float64)  # of squares and cubes
    dtype = task.layout.dtype
    with torch.no_grad():
        for first in range(0, len(rows), _AT_ONCE):
            part, of = rows[first : first + _AT_ONCE], owner[first : first + _AT_ONCE]
            x = trees.map_tree(lambda leaf: leaf.to(device), clients.inputs(part, dtype))
            errors = task.error(trees.call(model, x), clients.targets(part, dtype).to(device)).double().cpu()
            far = errors.reshape(len(of)) - means[of]
            sums.index_add_(1, of, torch.stack([far**2, far**3]))
    squares, cubes = sums / sizes
    deviation = (squares * sizes / (sizes - 1).clamp(min=1)).sqrt()
    one = sizes < 2
    return torch.stack([deviation.masked_fill(one, torch.nan), (cubes / squares**1.5).masked_fill(one, torch.nan)])
