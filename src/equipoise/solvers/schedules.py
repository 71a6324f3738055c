"""Schedules: by which factor a learning rate is multiplied in each round, or at each local step.

A schedule is any frozen object that maps the number of a round (0, 1, …) to a positive factor; a solver's rate in round t is
lr · schedule(t). As `local_schedule` of a solver the same objects count the local steps of a client in a round instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from equipoise.errors import require, require_integer, require_number


def warm_up(index: int, warmup: int) -> float:
    """The factor of a linear warm-up: 1/(w + 1), 2/(w + 1), …, w/(w + 1), and 1 from index w on.

    >>> [warm_up(index, 3) for index in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (index + 1) / (warmup + 1))


@dataclass(frozen=True)
class Constant:
    """A constant rate in every round, after a linear warm-up over `warmup` rounds.

    Source: ours; warm-up as in Goyal et al. 2017.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        require_integer("warmup", self.warmup, 0)

    def __call__(self, index: int) -> float:
        """The factor in a round: 1 after the warm-up."""
        return warm_up(index, self.warmup)


@dataclass(frozen=True)
class Step:
    """The rate times `factor` after every `every` rounds: factor^⌊t/every⌋, with a linear warm-up over `warmup` rounds.

    Source: torch.optim.lr_scheduler.StepLR; Pillutla et al. 2023 halve the rate so.
    """

    every: int = 100
    factor: float = 0.5
    warmup: int = 0

    def __post_init__(self) -> None:
        require_integer("every", self.every, 1)
        require_number("factor", self.factor, "(0, 1]")
        require_integer("warmup", self.warmup, 0)

    def __call__(self, index: int) -> float:
        """The factor in a round; it counts from the first round on, also during the warm-up."""
        falling: float = self.factor ** (index // self.every)
        return falling * warm_up(index, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """The rate falls along half a cosine over `rounds` rounds, to the share `final` of it, after a warm-up over `warmup`.

    With s = (t − warmup)/(rounds − warmup) the factor is final + (1 − final)(1 + cos πs)/2. From the last round on it stays as
    it is there.

    Source: Loshchilov, Hutter 2017 (SGDR), without restarts.
    """

    rounds: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_span(self.rounds, self.warmup, self.final)

    def __call__(self, index: int) -> float:
        """The factor in a round."""
        if index < self.warmup:
            return warm_up(index, self.warmup)
        falling = math.cos(math.pi / 2 * share_done(index, self.rounds, self.warmup)) ** 2  # (1 + cos πs)/2, and never 0
        return self.final + (1 - self.final) * falling


@dataclass(frozen=True)
class LinearDecay:
    """The rate falls on a line over `rounds` rounds, to the share `final` of it, after a linear warm-up over `warmup` rounds.

    With s = (t − warmup)/(rounds − warmup) the factor is 1 − (1 − final) s. From the last round on it stays as it is there.

    Source: torch.optim.lr_scheduler.LinearLR.
    """

    rounds: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_span(self.rounds, self.warmup, self.final)

    def __call__(self, index: int) -> float:
        """The factor in a round."""
        if index < self.warmup:
            return warm_up(index, self.warmup)
        return 1 - (1 - self.final) * share_done(index, self.rounds, self.warmup)


def check_span(rounds: int, warmup: int, final: float) -> None:
    """Raise InvalidParameter unless the warm-up is shorter than all rounds, and the last rate a share of the first."""
    require_integer("rounds", rounds, 1)
    require_integer("warmup", warmup, 0)
    require(warmup < rounds, "warmup", f"must be shorter than the {rounds} rounds", warmup)
    require_number("final", final, "[0, 1]")


def share_done(index: int, rounds: int, warmup: int) -> float:
    """How far a round is from the end of the warm-up to the end of all rounds, below 1 also in rounds after the last."""
    return (min(index, rounds - 1) - warmup) / (rounds - warmup)
