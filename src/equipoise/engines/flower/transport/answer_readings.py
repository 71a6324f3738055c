"""What the server makes of numbers that a node sends: what cannot be is refused, or named."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent

ROUNDING = 1e-6  # of a mean of zeros and ones


def wrong_scores(scores: Iterable[Tensor], *, shares: bool) -> str:
    """Why scores (2 + M,) of a client are none: loss and error must be finite, and `shares` of wrong examples in [0, 1]."""
    for loss, error, *_ in (each.tolist() for each in scores):
        if not (math.isfinite(loss) and math.isfinite(error)):
            return "sent a loss or an error that is not finite"
        if shares and not -ROUNDING <= error <= 1 + ROUNDING:
            return "sent a share of wrong examples that is not between 0 and 1"
    return ""


def read_any_loss(answer: MessageContent) -> float:
    """The loss of a client; infinite where it is not finite."""
    loss = float(answer.tensor("loss", torch.float64, (1,)))
    return loss if math.isfinite(loss) else math.inf


def asked_metrics(metrics: ClientMetrics | None) -> dict[str, list[str]]:
    """What a request says of the metrics that it asks for; nothing without any."""
    return {"metrics": list(metrics.functions)} if metrics is not None and len(metrics) else {}


def read_loss(answer: MessageContent) -> float:
    """The loss of a client; one that is not finite is refused."""
    loss = float(answer.tensor("loss", torch.float64, (1,)))
    if not math.isfinite(loss):
        raise BadMessage("has a loss that is not finite")
    return loss
