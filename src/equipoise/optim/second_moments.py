"""How second moments v (D,) follow gradients g (D,), and the preconditioner √v + ε they give: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from equipoise.errors import InvalidParameter, require_number, unknown_name

Rule = Callable[[Tensor, Tensor, float], Tensor]


def rmsprop(v: Tensor, g: Tensor, beta: float) -> Tensor:
    """RMSProp: v ← β v + (1 − β) g²."""
    return beta * v + (1 - beta) * g.square()


def adagrad(v: Tensor, g: Tensor, beta: float = 0.0) -> Tensor:
    """AdaGrad: v ← v + g²."""
    return v + g.square()


def yogi(v: Tensor, g: Tensor, beta: float) -> Tensor:
    """Yogi: v ← v + (1 − β) sign(g² − v) g².

    Source: Zaheer et al. 2018. The thesis (6.14) prints sign(g − v²), under which v would not follow g².
    """
    squared = g.square()
    return v + (1 - beta) * torch.sign(squared - v) * squared


def rule_named(name: str, allowed: Mapping[str, Rule]) -> Rule:
    """The rule that a name stands for; an unknown name is refused."""
    if name not in allowed:
        raise InvalidParameter("rule", f"must be one of {', '.join(allowed)}", name, unknown_name("rule", str(name), allowed))
    return allowed[name]


def preconditioner(v: Tensor, eps: float) -> Tensor:
    """√v + ε."""
    return v.sqrt() + eps


def check_adaptive(beta: float, eps: float) -> None:
    """Refuse β outside [0, 1) and ε that is not positive."""
    require_number("beta", beta, "[0, 1)")
    require_number("eps", eps, "(0, ∞)")
