"""Whether inputs have scales that training cannot cope with: the first thing to look at when a run diverges or stands still."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.core.trees import named_leaves
from equipoise.data.clients import FederatedData
from equipoise.privacy.lookers import data_to_try
from equipoise.runs.setup import Setting

FAR = 10.0  # a mean or a deviation beyond this, or below its inverse squared, is far from 1
MOST_ROWS, MOST_NUMBERS = 2000, 4_000_000  # that are looked at
CURE = (
    "Scale the inputs: give raw integers such as pixels a scale (scale=1/255), and standardise columns by the mean and "
    "deviation of the training clients, as the Schema of data.from_frame does."
)


def cause_of_divergence(setting: Setting) -> str | None:
    """Which inputs, and which target, have scales that a run may have diverged by, with the cures; None if none has."""
    data = data_to_try(setting.data, setting.algorithm)
    return " ".join(filter(None, (far_inputs(data), unscaled_target(setting, data)))) or None


def unscaled_target(setting: Setting, data: FederatedData) -> str | None:
    """A sentence on the target of a regression whose size is far from 1, and the cures; None for others.

    `models.Tabular` scales the target by itself, unless it is given another loss.
    """
    if data.classes or data.train.is_visited or not (setting.task.loss_is_given or data.schema is None):
        return None
    rows = torch.linspace(0, data.train.examples - 1, min(MOST_ROWS, data.train.examples), dtype=torch.float64).long()
    targets = data.train.targets(rows.to(data.train.device), torch.float64)
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return None
    mean, deviation = float(targets.double().mean()), float(targets.double().std(correction=0))
    if max(abs(mean), deviation) <= FAR:
        return None
    name, by = "", "the standard deviation of the training targets"
    if data.schema is not None:
        name, by = f" {data.schema.target.name!r}", f"data.schema.target.deviation ({data.schema.target.deviation:.3g})"
    return (
        f"The loss sees the target{name} in its own unit, with a mean of {mean:.3g} and a standard deviation of "
        f"{deviation:.3g}: divide outputs and targets by {by} in the loss, or lower the learning rate."
    )


def far_inputs(data: FederatedData) -> str | None:
    """A sentence on the column or leaf of the inputs whose scale is farthest from 1, and the cure; None if none is far.

    Columns that never change, tokens, and inputs that a Dataset reads at every visit are not looked at.
    """
    clients = data.train
    if clients.is_visited:
        return None
    rows = max(1, min(MOST_ROWS, clients.examples, MOST_NUMBERS // max(1, clients.features)))
    chosen = torch.linspace(0, clients.examples - 1, rows, dtype=torch.float64).long().to(clients.device)
    found = [each for name, leaf in named_leaves("x", clients.inputs(chosen)).items() for each in _far(name, leaf, data)]
    if not found:
        return None
    _, where, mean, deviation = max(found, key=lambda each: each[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{where}{more} has a mean of {mean:.3g} and a standard deviation of {deviation:.3g}, far from 0 and 1. {CURE}"


def _far(name: str, leaf: Tensor, data: FederatedData) -> Iterator[tuple[float, str, float, float]]:
    """How far, in words where, the mean and the deviation, of each column of a table, or of a leaf as a whole, that is far."""
    if not leaf.is_floating_point():
        return
    columns = leaf.double().cpu() if leaf.dim() == 2 else leaf.double().cpu().reshape(-1, 1)
    known = data.schema.feature_names if data.schema is not None and leaf.dim() == 2 else ()
    means, deviations = columns.mean(0).tolist(), columns.std(0, correction=0).tolist()
    for number, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        size = max(abs(mean), deviation)
        if deviation == 0 or FAR**-2 <= size <= FAR:
            continue
        where = f"Column {number} of {name}" if leaf.dim() == 2 else f"The input {name}"
        where = f"The column {known[number]!r}" if len(known) == columns.shape[1] else where
        yield max(size, 1 / size), where, mean, deviation
