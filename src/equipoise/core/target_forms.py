"""Targets of a form that the default loss does not take: the refusal says how to write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from equipoise.core.per_example_losses import MaskedCrossEntropy, cross_entropy
from equipoise.errors import InvalidParameter

if TYPE_CHECKING:
    from equipoise.core.task import Task
    from equipoise.data.clients import FederatedData

NUMBERS_CURE = "to predict numbers pass a regression loss, e.g. loss=lambda outputs, y: (outputs.squeeze(-1) - y).square()"


def has_default_loss(task: Task) -> bool:
    """Whether the loss is the default cross-entropy of logits against classes."""
    return task.loss is cross_entropy or isinstance(task.loss, MaskedCrossEntropy)


def refuse_wrong_targets(task: Task, outputs: Any, y: Any) -> None:
    """Refuse targets y (B, …) that are no classes, where classes are wanted for outputs (B, C, …)."""
    default = has_default_loss(task)
    if not (default or isinstance(task.loss, nn.CrossEntropyLoss)) or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    if not isinstance(y, Tensor):
        return
    shape, classes, real = f"targets have shape {tuple(y.shape[1:])} per example", outputs.shape[1], y.is_floating_point()
    if y.shape == outputs.shape and classes > 1:
        if not real or task.error_is_open:
            soft = "for soft labels pass error=…, a function of (outputs, targets) that gives one number per example"
            _refuse(task, f"{shape}; for classes give integers: y.argmax(1); {soft}")
    elif not default or outputs.dim() > 2:
        return
    elif y.shape[1:] == (1,):
        classes_cure = f"y.squeeze(1){'.astype(int)' if real else ''}"
        _refuse(task, f"{shape}; for classes write {classes_cure}" + f"; {NUMBERS_CURE}" * real)
    elif real and y.dim() == 1:
        whole = bool((y == y.round()).all())
        cure = "for classes write y.astype(int); " if whole else ""
        _refuse(task, f"targets are numbers of type {str(y.dtype).removeprefix('torch.')}; {cure}{NUMBERS_CURE}")


def _refuse(task: Task, found: str) -> None:
    name = "the default cross-entropy" if has_default_loss(task) else type(task.loss).__name__
    raise InvalidParameter(
        "loss", "must fit the targets, and cross-entropy takes classes", name, f"{found[:1].upper()}{found[1:]}."
    )


def no_class_zero(data: FederatedData) -> str:
    """What to say of classes that do not begin at 0; empty if they do."""
    ranges = [labels for clients in data.splits.values() if (labels := clients.label_range(data.ignore_index)) is not None]
    counts_from_one = bool(ranges) and min(labels.lowest for labels in ranges) > 0
    return "No example has class 0: did you mean y − 1? " if counts_from_one else ""
