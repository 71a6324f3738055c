"""Which model serves a client best by its own few examples, and what these examples do not settle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import require
from equipoise.metrics import Interval, share_interval

__all__ = ["MemberVerdict", "Verdict", "judge", "share_interval", "student_interval"]

CONFIDENCE = 0.95
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class MemberVerdict:
    """One model on a client's examples: mean loss, its interval, how far it is behind the best, and how many it gets wrong."""

    mean: float
    interval: Interval
    behind: Interval | None  # of the loss beyond that of the best; None for the best itself
    wrong: int | None  # examples; None if errors are not 0 or 1
    share: Interval | None  # of wrong examples

    @property
    def worse(self) -> bool:
        """Whether the examples say that this model is worse than the best."""
        return self.behind is not None and self.behind.low > 0


@dataclass(frozen=True)
class Verdict:
    """All models on a client's examples. `best` has the lowest mean loss; `open` are those that may be as good or better."""

    best: int
    members: tuple[MemberVerdict, ...]
    examples: int

    @property
    def open(self) -> tuple[int, ...]:
        """The models that the examples do not tell from the best."""
        return tuple(m for m, member in enumerate(self.members) if m != self.best and not member.worse)


def judge(losses: Sequence[Numbers], errors: Sequence[Numbers]) -> Verdict:
    """The verdict from losses and errors per example, of each model on the same examples.

    Intervals of a mean are Student's, at 95 %. Differences from the best are of pairs, example by example, each at
    1 − 0.05 / (M − 1) for M models (Bonferroni): the model with the lowest expected loss is then among the best and the open
    ones in 95 of 100 samples, as far as means of the losses follow Student's law. Shares of wrong examples have the exact
    interval of Clopper and Pearson.

    >>> import numpy as np
    >>> judge([np.array([1.0, 1.2, 0.9, 1.1]), np.array([0.5, 0.6, 0.5, 0.4])], [np.ones(4), np.zeros(4)]).best
    1
    """
    require(len(losses) > 0 and len(losses[0]) > 0, "losses", "must be of at least one model and one example", len(losses))
    means = [float(each.mean()) for each in losses]
    best = means.index(min(means))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(losses) - 1)
    members = []
    for m, (loss, error) in enumerate(zip(losses, errors, strict=True)):
        wrong = int(error.sum()) if bool(np.isin(error, (0.0, 1.0)).all()) else None
        behind = None if m == best else student_interval(loss - losses[best], confidence)
        share = None if wrong is None else share_interval(wrong, len(error))
        members.append(MemberVerdict(means[m], student_interval(loss), behind, wrong, share))
    return Verdict(best, tuple(members), len(losses[0]))


def student_interval(values: Numbers, confidence: float = CONFIDENCE) -> Interval:
    """Student's interval of a mean; unbounded for a single value."""
    from scipy.special import stdtrit

    count = len(values)
    if count < 2:
        return Interval(-math.inf, math.inf)
    reach = float(stdtrit(count - 1, (1 + confidence) / 2)) * float(values.std(ddof=1)) / math.sqrt(count)
    mean = float(values.mean())
    return Interval(mean - reach, mean + reach)
