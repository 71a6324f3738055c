"""Losses and errors that are one number per example: those of classes, and the check of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from equipoise.core import trees
from equipoise.errors import InvalidParameter

PerExample = Callable[[Any, Any], Tensor]  # of trees of outputs and targets


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C, …) against classes (B, …): one number per example, (B,)."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the logits (B, C, …) is not the target class, else 0: (B,)."""
    wrong = (outputs.argmax(1) != targets).to(outputs.dtype)
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


@dataclass(frozen=True)
class MaskedCrossEntropy:
    """Cross-entropy of logits (B, C, …) against classes (B, …): the mean over the places of an example that are not ignored."""

    ignore_index: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example, (B,)."""
        losses = functional.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignore_index)
        return _mean_where(targets != self.ignore_index, losses)


@dataclass(frozen=True)
class MaskedMisclassified:
    """The share of an example's places, without the ignored ones, where the largest logit is not the target class."""

    ignore_index: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example, (B,)."""
        return _mean_where(targets != self.ignore_index, (outputs.argmax(1) != targets).to(outputs.dtype))


def _mean_where(known: Tensor, values: Tensor) -> Tensor:
    """The mean of each example's values (B, …) where they are known, (B,)."""
    if values.dim() == 1:
        return values
    shares = known.to(values.dtype).flatten(1)
    return (values.flatten(1) * shares).sum(1) / shares.sum(1).clamp(min=1)


def per_example(name: str, values: Tensor, x: Any) -> Tensor:
    """The values of a loss or error, which `name` says; refused unless they are one number per example of x."""
    batch = trees.batch_shape(x)
    if not isinstance(values, Tensor) or values.shape != batch:
        fix = 'With a torch loss use reduction="none", and average over all but the first dimension.'
        shape = tuple(values.shape) if isinstance(values, Tensor) else values
        raise InvalidParameter(name, f"must give one number per example, shape ({batch[0]},)", shape, fix)
    return values
