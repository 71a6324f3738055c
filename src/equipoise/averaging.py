"""Which point a run reports and serves: its last iterate, or a mean of its iterates. Training itself is not changed.

The states are a mean, kept in float64, and how many iterates it holds. A mean moves by avg ← avg + c (w − avg), where c is
the share of the newest iterate: the weights themselves, which may grow without bound, are never formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.errors import require_number

State = tuple[Tensor, int]


def newest_share(rate: float, count: int) -> float:
    """The share of the newest of `count` iterates when each weighs 1/(1 − rate) times the one before.

    c = `rate` / (1 − (1 − `rate`)^`count`), with the limit 1/`count` at rate 0.

    Source: the weights of Pillutla et al. 2023, Theorem 5, with `rate` = γλτ/2.

    >>> newest_share(0.5, 1), newest_share(0.5, 2), newest_share(0.0, 4)
    (1.0, 0.6666666666666666, 0.25)
    """
    return 1 / count if rate == 0 else rate / -math.expm1(count * math.log1p(-rate))


def _begin(params: Tensor, count: int) -> State:
    return params.to(torch.float64, copy=True), count


def _move_average(state: State, params: Tensor, rate: float) -> State:
    mean, count = state[0], state[1] + 1
    return torch.lerp(mean, params.to(mean.dtype), newest_share(rate, count)), count


@dataclass(frozen=True)
class Last:
    """The last iterate w^T.

    Source: McMahan et al. 2017, and nearly all federated learning since.

    >>> Last().iterate(torch.tensor([3.0]), None)
    tensor([3.])
    """

    pure: ClassVar[bool] = True

    def begin(self, params: Tensor) -> None:
        """There is no state before the first round, at `params` (D,)."""

    def update(self, params: Tensor, state: None) -> None:
        """There is no state after a round that ends at `params` (D,); `state` is None."""

    def iterate(self, params: Tensor, state: None) -> Tensor:
        """The parameters `params` (D,) themselves; `state` is None."""
        return params


@dataclass(frozen=True)
class Uniform:
    """The mean of the iterates w^1, …, w^T; w^0 is reported only if there was no round.

    Source: agnostic federated learning (Mohri, Sivek, Suresh 2019), which reports it.

    >>> averaging, iterates = Uniform(), [torch.tensor([w]) for w in (9.0, 1.0, 3.0)]
    >>> state = averaging.begin(iterates[0])
    >>> for iterate in iterates[1:]:
    ...     state = averaging.update(iterate, state)
    >>> averaging.iterate(iterates[-1], state)  # (1 + 3)/2
    tensor([2.])
    """

    pure: ClassVar[bool] = True

    def begin(self, params: Tensor) -> State:
        """The mean of no iterates, before the first round, at `params` (D,)."""
        return _begin(params, 0)

    def update(self, params: Tensor, state: State) -> State:
        """The mean in `state` with one more iterate, `params` (D,)."""
        return _move_average(state, params, 0.0)

    def iterate(self, params: Tensor, state: State) -> Tensor:
        """The mean in `state`, (D,), in the type of `params` (D,)."""
        return state[0].to(params.dtype)


@dataclass(frozen=True)
class Geometric:
    """Σ β_j w^j over w^0, …, w^T with β_j ∝ (1 − rate)^{−(1+j)}: later iterates weigh more, and early ones fade.

    The theorem behind it has rate = γλτ/2 with learning rate γ, weight decay λ and τ local steps. `rate` in [0, 1); 0 is the
    plain mean, w^0 included.

    Source: Pillutla et al. 2023, Theorem 5.

    >>> averaging = Geometric(rate=0.5)  # each iterate weighs twice as much as the one before
    >>> state = averaging.update(torch.tensor([3.0]), averaging.begin(torch.tensor([0.0])))
    >>> averaging.iterate(torch.tensor([3.0]), state)  # 1/3 · 0 + 2/3 · 3
    tensor([2.])
    """

    rate: float  # in [0, 1): how fast early iterates fade; 0 is the plain mean

    pure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fix = "Half of learning rate × weight decay × local steps is the choice of the theory."
        require_number("rate", self.rate, "[0, 1)", fix)

    def begin(self, params: Tensor) -> State:
        """The mean of w^0 alone, which is `params` (D,)."""
        return _begin(params, 1)

    def update(self, params: Tensor, state: State) -> State:
        """The mean in `state` with one more iterate, `params` (D,)."""
        return _move_average(state, params, self.rate)

    def iterate(self, params: Tensor, state: State) -> Tensor:
        """The mean in `state`, (D,), in the type of `params` (D,)."""
        return state[0].to(params.dtype)
