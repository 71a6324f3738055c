"""What a causal language model is trained and judged by: the loss of the next token, its error, and perplexity.

They take the outputs of a model as Hugging Face's transformers give them, an object with `logits` (B, T, V), or such a tensor,
and as targets the tokens themselves (B, T): place t predicts token t + 1. Tokens of −100, such as padding, are not predicted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.client_metrics import SummedMetric, exponential_of_mean, scores_of
from equipoise.errors import InvalidParameter

IGNORED = -100


def byte_tokens(text: str) -> Tensor:
    """The bytes of a text in UTF-8 as tokens from 0 to 255, (T,) int64.

    `text` is any string.

    >>> byte_tokens("Ay")
    tensor([ 65, 121])
    """
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def next_token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy of an example's tokens after its first, (B,); 0 for an example without any.

    For tokens y_1 … y_T it is −(1/(T − 1)) Σ_{t=2}^{T} log p(y_t | y_1 … y_{t−1}); tokens of −100 are left out of sum and
    count.

    >>> logits = torch.zeros(1, 3, 256)  # no byte is likelier than another
    >>> round(float(next_token_loss(logits, byte_tokens("abc")[None])), 4)  # log 256
    5.5452
    """
    losses, known = _token_losses(outputs, targets)
    return losses.sum(1) / known.sum(1).clamp(min=1).to(losses.dtype)


def next_token_error(outputs: Any, targets: Tensor) -> Tensor:
    """The share of an example's tokens after its first that are not the one with the largest score, (B,).

    >>> logits = torch.nn.functional.one_hot(byte_tokens("bbx"), 256).float()[None]  # says "b", "b" and "x"
    >>> next_token_error(logits, byte_tokens("abc")[None])  # "b" is right, "c" is not
    tensor([0.5000])
    """
    logits, wanted = _shifted(outputs, targets)
    known = wanted != IGNORED
    wrong = ((logits.argmax(-1) != wanted) & known).to(logits.dtype)
    return wrong.sum(1) / known.sum(1).clamp(min=1).to(logits.dtype)


def _token_losses(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each token after the first, 0 where it is ignored, and which are not: (B, T − 1) each."""
    logits, wanted = _shifted(outputs, targets)
    losses = functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none", ignore_index=IGNORED)
    return losses, wanted != IGNORED


def _shifted(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = scores_of(outputs)
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        rule = "must be for logits (B, T, V) and tokens (B, T), for the loss of the next token"
        fix = "For other shapes write a loss of your own."
        raise InvalidParameter("loss", rule, (tuple(logits.shape), tuple(targets.shape)), fix)
    return logits[:, :-1], targets[:, 1:]


def _totals(outputs: Any, targets: Tensor) -> Tensor:
    losses, known = _token_losses(outputs, targets)
    return torch.stack([losses.double().sum(), known.double().sum()])


perplexity = SummedMetric(_totals, exponential_of_mean, higher_is_better=False)
"""exp of the mean cross-entropy over all tokens of a client after the first of each example: each token counts the same."""
