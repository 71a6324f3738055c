"""The trivial answer: the error of each client if every example got one and the same answer, chosen on training examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.binary_error import wrong_half, wrong_sign
from equipoise.core.error_names import ABSOLUTE
from equipoise.core.per_example_losses import misclassified
from equipoise.data.clients import ClientSet, FederatedData, rows_in_turn
from equipoise.report.over_seeds import MEAN, MEDIAN

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.core.task import Task

CLASS = "most frequent class"


@dataclass(frozen=True, eq=False)
class TrivialAnswer:
    """One answer for all examples: the class that is most frequent in training, or a number that depends on the error.

    For the absolute error this is the median of the training targets, for all others their mean.
    """

    name: str  # CLASS, MEAN or MEDIAN
    errors: Tensor  # (R,) float64: the error of each client that is evaluated, split by split


def with_trivial_answer(
    table: ClientTable, task: Task, model: nn.Module, data: FederatedData, sample: Mapping[str, Tensor] | None = None
) -> ClientTable:
    """The table with the column `trivial_error`; the table itself where the trivial answer is not known."""
    found = trivial_answer(task, model, data, sample)
    return table if found is None else replace(table, trivial_error=found.errors, trivial_answer=found.name)


def trivial_answer(
    task: Task, model: nn.Module, data: FederatedData, sample: Mapping[str, Tensor] | None = None
) -> TrivialAnswer | None:
    """The trivial answer and its error for every evaluated client; None where it is not known at little cost.

    It is known for data in memory with one target per example: a class, or a number that the model predicts by one output.
    `sample` holds the positions of the clients that are evaluated, by split; `model` is in evaluation mode. The answer is
    chosen on training examples alone.
    """
    sets = data.splits
    if any(clients.store is not None or not isinstance(clients.y, Tensor) or clients.y.dim() != 1 for clients in sets.values()):
        return None
    dtype = task.layout.dtype
    targets = _targets(data.train, dtype)
    if task.error is misclassified and not targets.is_floating_point() and int(targets.min()) >= 0:
        name, answer = CLASS, float(targets.bincount().argmax())
    elif task.error in (wrong_sign, wrong_half):
        name, answer = CLASS, float((targets > 0.5).double().mean() > 0.5)
    elif targets.is_floating_point() and task.error_name == ABSOLUTE:
        name, answer = MEDIAN, _median(targets.double())
    elif targets.is_floating_point():
        name, answer = MEAN, float(targets.double().mean())
    else:
        return None
    each = []
    for split, every in sets.items():
        which = None if sample is None else sample.get(split)
        clients = every if which is None else every.select(which)
        known, sizes = _targets(clients, dtype), clients.host_sizes
        wrong = (known != answer).double() if name == CLASS else _errors_of_number(task, model, data.train, answer, known)
        if wrong is None:
            return None
        owner = torch.repeat_interleave(sizes)
        each.append(torch.zeros(len(clients), dtype=torch.float64).index_add_(0, owner, wrong) / sizes)
    return TrivialAnswer(name, torch.cat(each))


def _targets(clients: ClientSet, dtype: torch.dtype) -> Tensor:
    """The targets of all clients, one client after the other, on the CPU."""
    in_turn = clients.in_turn
    rows = slice(0, clients.examples) if in_turn else rows_in_turn(clients.starts.cpu(), clients.host_sizes)
    found: Tensor = clients.targets(rows, dtype).cpu()
    return found


def _median(values: Tensor) -> float:
    """The median of numbers (B,): of an even count the middle between the two in the middle."""
    ordered = values.sort().values
    return float((ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)


def _errors_of_number(task: Task, model: nn.Module, clients: ClientSet, answer: float, targets: Tensor) -> Tensor | None:
    """The error of each example (B,) if the model's only output were `answer`; None if it has several, or the error refuses."""
    try:
        with torch.no_grad():
            shown = trees.call(model, trees.map_tree(Tensor.cpu, clients.inputs(slice(0, 1), task.layout.dtype)))
            if not isinstance(shown, Tensor) or shown.numel() != 1:
                return None
            outputs = torch.full((len(targets), *shown.shape[1:]), answer, dtype=shown.dtype)
            wrong = task.error(outputs, targets).double()
    except Exception:  # a user's model or error may want more than these outputs
        return None
    return wrong if wrong.shape == targets.shape else None
