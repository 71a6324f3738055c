"""What exporters share: models as modules with inputs in order, the check of an exported model, and its error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.signature import Signature, TensorSpec
from equipoise.core.task import Task
from equipoise.errors import EquipoiseError

TOLERANCE = 1e-4  # of outputs on random inputs, beside the trained model


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


class NotExported(EquipoiseError, ValueError):
    """A model that a format cannot hold; the message names the model, the format and the reason."""

    def __init__(self, kind: str, module: nn.Module, reason: str) -> None:
        self.kind, self.reason = kind, reason
        name = type(module.model).__name__ if isinstance(module, CalledByPosition) else "The loss or error of the model"
        super().__init__(
            f"{name} cannot be written as {kind}: {reason}. Use model.safetensors, which holds the parameters of any model, "
            "or change its forward pass: no branches or sizes that depend on values, no code outside torch."
        )


def first_reason(failure: BaseException) -> str:
    """The first line of what caused an error; exporters wrap it in advice about themselves."""
    cause = failure
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return (lines[0] if lines else type(cause).__name__).rstrip(".")[:300]


def random_inputs(specs: Sequence[TensorSpec], rows: int, seed: int) -> list[Tensor]:
    """Random inputs of these types and shapes: normal numbers, integers 0 and 1 (a token of any vocabulary), masks of ones."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for spec in specs:
        like = spec.example(rows)
        if like.is_floating_point():
            made.append(torch.randn(like.shape, generator=generator, dtype=like.dtype))
        else:
            made.append(
                torch.ones_like(like) if like.dtype == torch.bool else torch.randint(0, 2, like.shape, generator=generator)
            )
    return made


def refuse_other_outputs(kind: str, module: nn.Module, specs: Sequence[TensorSpec], run: Callable[..., Any]) -> None:
    """Refuse an exported model whose outputs on random inputs, in batches of several sizes, are not those of the module."""
    for rows in (1, 3):
        inputs = random_inputs(specs, rows, seed=rows)
        with torch.no_grad():
            wanted, got = (trees.leaves(each(*(one.clone() for one in inputs))) for each in (module, run))
        for mine, theirs in zip(wanted, got, strict=True):
            other = theirs.to(mine.dtype)
            if mine.shape != other.shape or not torch.allclose(mine, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                raise NotExported(kind, module, f"the exported model differs in its outputs for {rows} random examples")
