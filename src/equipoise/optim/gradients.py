"""Per-example gradients, and sums of their clipped transforms, which are all that a private method may learn from examples.

An example i with gradient g_i adds clip(scale ⊙ g_i + shift, C) to a sum, where clip(v, C) = v · min(1, C / ‖v‖). Adding or
removing any example moves the sum by at most C: an example whose gradient is not finite adds nothing.

Gradients come from `torch.func` (`vmap` of `grad`), a bounded number of examples at a time. A linear model needs less: its
gradient is the outer product of the loss's slope and the input, so that norms and sums never build the (B, D) matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from equipoise.core.batch_trial import refuse_batch_normalisation
from equipoise.core.params import ParameterLayout
from equipoise.core.per_example_losses import PerExample, cross_entropy, per_example
from equipoise.core.task import Task
from equipoise.errors import IncompatibleParts, require
from equipoise.models.linear import LinearModel, hinge_loss, logistic_loss, squared_error

ELEMENTS = 2**25  # entries of the (B, D) matrix held at once: 128 MiB of float32


@dataclass(frozen=True, eq=False)
class Query:
    """The contribution of every example to a sum: scale ⊙ g + shift, clipped to the norm `clip` (infinity: not clipped)."""

    clip: float
    scale: Tensor | None = None  # (D,); None: ones
    shift: Tensor | None = None  # (D,); None: zeros


class Gradients(Protocol):
    """The gradients g_i of B examples, stored in any form."""

    def norms(self, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """‖scale ⊙ g_i + shift‖, (B,)."""

    def total(self, weights: Tensor) -> Tensor:
        """Σ weights_i g_i, (D,)."""

    def select(self, mask: Tensor) -> Gradients:
        """The gradients of the examples that a boolean mask (B,) selects."""


@dataclass(frozen=True, eq=False)
class RowGradients:
    """One row per example, (B, D)."""

    rows: Tensor

    def norms(self, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """‖scale ⊙ g_i + shift‖, (B,)."""
        rows = self.rows if scale is None else self.rows * scale
        norms: Tensor = torch.linalg.vector_norm(rows if shift is None else rows + shift, dim=1)
        return norms

    def total(self, weights: Tensor) -> Tensor:
        """Σ weights_i g_i, (D,)."""
        return weights @ self.rows

    def select(self, mask: Tensor) -> RowGradients:
        """The gradients of the examples that a boolean mask (B,) selects."""
        return RowGradients(self.rows[mask])


@dataclass(frozen=True, eq=False)
class OuterGradients:
    """Gradients g_i = (δ_i x_iᵀ, δ_i) of a linear model: slopes δ (B, C) of the loss in the outputs, and inputs x (B, F)."""

    inputs: Tensor
    slopes: Tensor
    bias: bool

    def norms(self, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """‖scale ⊙ g_i + shift‖, (B,)."""
        if shift is not None:  # the square of a sum would cancel in float32, and clipping must not rest on that
            return self._rows().norms(scale, shift)
        if scale is None:
            inputs: Tensor = torch.linalg.vector_norm(self.inputs, dim=1)
            slopes: Tensor = torch.linalg.vector_norm(self.slopes, dim=1)
            return slopes * (inputs.square() + 1).sqrt() if self.bias else slopes * inputs
        weights = scale[: self.slopes.shape[1] * self.inputs.shape[1]].view(self.slopes.shape[1], -1)  # (C, F)
        per_output = self.inputs.square() @ weights.square().t()  # (B, C)
        if self.bias:
            per_output = per_output + scale[weights.numel() :].square()
        norms: Tensor = torch.linalg.vector_norm(self.slopes * per_output.sqrt(), dim=1)
        return norms

    def total(self, weights: Tensor) -> Tensor:
        """Σ weights_i g_i, (D,)."""
        weighted = weights.unsqueeze(1) * self.slopes
        matrix = (weighted.t() @ self.inputs).flatten()
        return torch.cat([matrix, weighted.sum(0)]) if self.bias else matrix

    def select(self, mask: Tensor) -> OuterGradients:
        """The gradients of the examples that a boolean mask (B,) selects."""
        return OuterGradients(self.inputs[mask], self.slopes[mask], self.bias)

    def _rows(self) -> RowGradients:
        matrix = (self.slopes.unsqueeze(2) * self.inputs.unsqueeze(1)).flatten(1)
        return RowGradients(torch.cat([matrix, self.slopes], 1) if self.bias else matrix)


def clipped_sum(gradients: Gradients, query: Query) -> Tensor:
    """Σ_i clip(scale ⊙ g_i + shift, C), (D,); with a finite C, examples whose gradient is not finite add nothing."""
    norms = gradients.norms(query.scale, query.shift)
    if math.isinf(query.clip):
        weights = torch.ones_like(norms)
    else:
        good = torch.isfinite(norms)
        if not bool(good.all()):
            gradients, norms = gradients.select(good), norms[good]
        weights = (query.clip / norms).clamp(max=1.0)  # a norm of 0 gives 1
    total = gradients.total(weights)
    total = total if query.scale is None else total * query.scale
    return total if query.shift is None else total + weights.sum() * query.shift


# ------------------------------------------------------------------------------------------------------- differentiation

_HARM = "mix the examples of a batch, so that there is no gradient of one example to clip, and would be released without noise"
_OWN_LOSSES: tuple[PerExample, ...] = (cross_entropy, logistic_loss, hinge_loss, squared_error)


class ExampleGradients:
    """The gradients of a model's loss at parameters (D,), example by example. The model is used, not copied."""

    def __init__(self, model: nn.Module, loss: PerExample | None = None, *, elements: int = ELEMENTS) -> None:
        require(isinstance(model, nn.Module), "model", "must be a torch.nn.Module", type(model).__name__)
        require(loss is None or callable(loss), "loss", "must be a function of (outputs, targets)", loss)
        refuse_batch_normalisation(model, _HARM)
        self._model, self._task, self._elements = model, Task.around(model, loss), elements
        self.layout = self._task.layout
        exact = self.layout.dtype in (torch.float32, torch.float64)  # a norm in half precision would not bound anything
        require(exact, "model", "must have parameters in float32 or float64", str(self.layout.dtype), "Use model.float().")
        self._linear = _is_linear(model, self.layout) and any(self._task.loss is own for own in _OWN_LOSSES)

    def clipped_sums(self, params: Tensor, x: Tensor, y: Tensor, queries: Sequence[Query]) -> list[Tensor]:
        """The clipped sum of every query over the examples, each (D,); zeros over no examples."""
        totals = [torch.zeros_like(params) for _ in queries]
        for gradients in self.chunks(params, x, y):
            for total, query in zip(totals, queries, strict=True):
                total += clipped_sum(gradients, query)
        return totals

    def chunks(self, params: Tensor, x: Tensor, y: Tensor) -> Iterator[Gradients]:
        """The gradients of the examples, in chunks of at most `elements` numbers."""
        if len(x) == 0:
            return
        if self._linear:
            yield self._outer(params, x, y)
            return
        size = max(1, self._elements // self.layout.dimension)
        for start in range(0, len(x), size):
            yield RowGradients(self.rows(params, x[start : start + size], y[start : start + size]))

    def rows(self, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """One gradient per example by `vmap(grad(…))`: (B, D)."""

        def loss(flat: Tensor, one_x: Tensor, one_y: Tensor) -> Tensor:
            return self._task.losses(flat, one_x.unsqueeze(0), one_y.unsqueeze(0))[0]

        try:
            gradients: Tensor = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(params, x, y)
        except RuntimeError as failure:
            if "vmap" not in str(failure):
                raise
            raise IncompatibleParts(
                f"{type(self._model).__name__} cannot be differentiated one example at a time by torch.func.vmap: {failure}",
                "Write its forward pass without branches on values, .item() and buffers that change.",
            ) from failure
        return gradients

    def mean(self, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of the mean loss, (D,): for public examples, which need no clipping."""
        if self._linear:
            weights = torch.full((len(x),), 1 / len(x), dtype=params.dtype, device=params.device)
            return self._outer(params, x, y).total(weights)
        gradient: Tensor = grad(lambda flat: self._task.losses(flat, x, y).mean())(params)
        return gradient

    def _outer(self, params: Tensor, x: Tensor, y: Tensor) -> OuterGradients:
        with torch.no_grad():
            outputs = self._task.outputs(params, x)
        outputs.requires_grad_()
        with torch.enable_grad():
            losses = per_example("loss", self._task.loss(outputs, y), x)
            (slopes,) = torch.autograd.grad(losses.sum(), outputs)
        return OuterGradients(x.flatten(1), slopes.view(len(x), -1), len(self.layout.names) == 2)


def _is_linear(model: nn.Module, layout: ParameterLayout) -> bool:
    """Whether outputs are weights times inputs plus a bias, with all parameters trained and without hooks."""
    plain = type(model) is nn.Linear or (isinstance(model, LinearModel) and type(model).forward is LinearModel.forward)
    names = ("weight", "bias") if getattr(model, "bias", None) is not None else ("weight",)
    return plain and layout.names == names and not model._forward_hooks and not model._forward_pre_hooks


def check_examples(x: Tensor, y: Tensor, name: str = "y") -> None:
    """Refuse inputs and targets with different numbers of rows."""
    for what, value in (("x", x), (name, y)):
        require(isinstance(value, Tensor) and value.dim() > 0, what, "must be a tensor with one row per example", value)
    require(len(x) == len(y), name, f"must have one row per example, {len(x)}", len(y))
