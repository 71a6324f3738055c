"""Losses of a linear model as functions of its predictions, each with its slope; binary targets are 0 and 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

HINGE_WIDTH = 0.01  # over which the kink of the hinge is rounded off


@dataclass(frozen=True)
class Link:
    """A loss: `function(predictions, targets)` gives losses (N,) and slopes in the shape of the predictions.

    Slopes are differentiable by autograd, which second derivatives come from. `curvature` is the largest of these, which a
    penalty is weighed against; `quadratic` says that the loss scales like the square of predictions, so that their unit must
    not matter for a tolerance.
    """

    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    curvature: float = 1.0
    quadratic: bool = False

    def __call__(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each prediction, and its slope."""
        return self.function(predictions, targets)


def _squared(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(z − y)²."""
    residuals = predictions - targets
    return residuals.square(), 2 * residuals


def _logistic(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 + e^{−sz}) with s = ±1."""
    signs = 2 * targets - 1
    margins = signs * predictions
    return -logsigmoid(margins), -signs * torch.sigmoid(-margins)


def _multinomial(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy log Σ_k e^{z_k} − z_y, for predictions (N, K) and classes (N,)."""
    rows = torch.arange(len(targets))
    logs = torch.log_softmax(predictions, 1)
    true = torch.zeros_like(logs)
    true[rows, targets] = 1.0
    return -logs[rows, targets], logs.exp() - true


def _squared_hinge(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, 1 − sz)² with s = ±1."""
    signs = 2 * targets - 1
    short = (1 - signs * predictions).clamp(min=0.0)
    return short.square(), -2 * signs * short


def _hinge(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, 1 − sz) with s = ±1, its kink rounded off over `HINGE_WIDTH`, by which it is at most 0.005 too small."""
    signs = 2 * targets - 1
    short = (1 - signs * predictions).clamp(min=0.0)
    inside = short < HINGE_WIDTH
    losses = torch.where(inside, short.square() / (2 * HINGE_WIDTH), short - HINGE_WIDTH / 2)
    return losses, -signs * (short / HINGE_WIDTH).clamp(max=1.0)


squared = Link(_squared, curvature=2.0, quadratic=True)
logistic = Link(_logistic, curvature=0.25)
multinomial = Link(_multinomial, curvature=0.5)
squared_hinge = Link(_squared_hinge, curvature=2.0)
hinge = Link(_hinge)
