"""The error of binary cross-entropy: the share of an example's places on the wrong side. Found by what a loss computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LOGITS = (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)
_PROBABILITIES = (functional.binary_cross_entropy, nn.BCELoss)


def wrong_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of an example's logits (B, …) whose sign is not that of its targets, 0 or 1: (B,).

    >>> wrong_sign(torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    tensor([0.5000, 0.0000])
    """
    return _share_wrong(outputs > 0, targets, outputs.dtype)


def wrong_half(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of an example's probabilities (B, …) on the other side of one half than its targets, 0 or 1: (B,)."""
    return _share_wrong(outputs > 0.5, targets, outputs.dtype)


def _share_wrong(positive: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    wrong = positive.reshape(targets.shape) != (targets > 0.5)
    return wrong.to(dtype).flatten(1).mean(1) if wrong.dim() > 1 else wrong.to(dtype)


def binary_error(loss: Any, outputs: Any, targets: Any) -> Any:
    """`wrong_sign` or `wrong_half` if `loss` is binary cross-entropy of logits or of probabilities; None for other losses.

    It is one of torch's functions or modules, or a function that gives their values: the mean over an example's places.
    """
    for error, kinds in ((wrong_sign, _LOGITS), (wrong_half, _PROBABILITIES)):
        plain = loss.func if isinstance(loss, partial) else loss
        if plain is kinds[0] or isinstance(plain, kinds[1]):
            return error
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.numel() != targets.numel():
        return None
    if bool(((targets != 0) & (targets != 1)).any()):
        return None
    for error, function, trial in (
        (wrong_sign, _LOGITS[0], torch.linspace(-2.0, 3.0, outputs.numel())),
        (wrong_half, _PROBABILITIES[0], torch.linspace(0.1, 0.95, outputs.numel())),
    ):
        if _gives(loss, function, trial.to(outputs).reshape(outputs.shape), targets):
            return error
    return None


def _gives(loss: Any, function: Any, outputs: Tensor, targets: Tensor) -> bool:
    """Whether a loss has the values of torch's function on some outputs."""
    try:
        found = loss(outputs, targets)
        each = function(outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction="none")
    except Exception:  # a user's loss may raise anything when it is given what it does not expect
        return False
    wanted = each.flatten(1).mean(1) if each.dim() > 1 else each
    return (
        isinstance(found, Tensor) and found.shape == wanted.shape and bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5))
    )
