"""Preconditioners known before training, which AdaDPS divides gradients by: how common each token is in public texts.

Sources: Li 2023 (thesis), 6.2 (option 2) and 6.4.1.2. Its experiments counted tokens of the private training set; here the
counts x (N, F) must be those of public examples (`set_aside`), or ε says nothing about the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.errors import require, require_number


def token_frequency(x: Tensor, *, floor: float = 1e-3) -> Tensor:
    """A_j = max(f_j / max f, floor), (F,), with f_j the mean count of token j: rare tokens take larger steps.

    The floor bounds how much larger (1 / floor), and serves tokens that the public examples do not hold.

    `x` (N, F) are the counts of F tokens in N public examples, and `floor` is in (0, 1].

    Source: Li 2023 (thesis), 6.2 (option 2) and 6.4.1.2.

    >>> token_frequency(torch.tensor([[4.0, 1.0, 0.0], [4.0, 3.0, 0.0]]), floor=0.1)
    tensor([1.0000, 0.5000, 0.1000])
    """
    counts = _checked(x, floor)
    mean = counts.mean(0)
    return (mean / mean.max()).clamp(min=floor).to(torch.get_default_dtype())


def inverse_tfidf(x: Tensor, *, floor: float = 1e-3) -> Tensor:
    """A_j = 1 / max(s_j / max s, floor), (F,): *inverse* to the tokens' TF-IDF, so that those that matter take larger steps.

    s_j = mean over examples of (share of token j in the example) · log(N / number of examples with j). The thesis says
    "proportional" in 6.2 and "inversely proportional" in 6.4.1.2 and Table 6.4; the second is meant.

    `x` (N, F) are the counts of F tokens in N public examples, and `floor` is in (0, 1].

    Source: Li 2023 (thesis), 6.2 (option 2), 6.4.1.2 and Table 6.4.

    >>> inverse_tfidf(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), floor=0.1)  # the first token is in every example: log 1 = 0
    tensor([10.,  1.])
    """
    counts = _checked(x, floor)
    share = counts / counts.sum(1, keepdim=True).clamp(min=1e-12)
    holding = (counts > 0).sum(0)
    score = share.mean(0) * torch.log(len(counts) / holding.clamp(min=1))
    require(bool(score.max() > 0), "x", "must hold a token that some examples have and others do not", "no such token")
    return (1 / (score / score.max()).clamp(min=floor)).to(torch.get_default_dtype())


def _checked(x: Tensor, floor: float) -> Tensor:
    require_number("floor", floor, "(0, 1]")
    require(x.dim() == 2 and len(x) > 0, "x", "must hold token counts of shape (examples, tokens)", tuple(x.shape))
    counts = x.double()
    good = bool(torch.isfinite(counts).all()) and bool((counts >= 0).all()) and bool((counts > 0).any())
    require(good, "x", "must hold finite counts ≥ 0, not all zero", "others")
    return counts
