"""Models as modules that exporters take: inputs in order, by name, and for scores the targets after them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.signature import Signature
from equipoise.core.task import Task


class CalledByPosition(nn.Module):
    """A model that takes its inputs one after the other, whether it takes a tensor, a tuple or a dict of them."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model, self.signature = model, signature

    def forward(self, *inputs: Tensor) -> Any:
        """The outputs of the model."""
        names = [spec.name for spec in self.signature.inputs]
        return trees.call(self.model, self.signature.tree(dict(zip(names, inputs, strict=True))))


class ScoredByPosition(nn.Module):
    """Loss and error per example, (B,) and (B,), of inputs and then targets, one after the other."""

    def __init__(self, task: Task, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        # A model's own loss may read its parameters, so the task goes around this very model.
        self.scorer = task.with_module(copy.deepcopy(model)).scorer
        self.signature = signature

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """The losses and the errors."""
        count = len(self.signature.inputs)
        x = self.signature.tree(dict(zip((spec.name for spec in self.signature.inputs), tensors[:count], strict=True)))
        y = tensors[count:]
        losses, errors = self.scorer(x, y[0] if len(y) == 1 else tuple(y), True)
        return losses, errors
