"""Aggregators as stages of a round: a linear one folds updates as they come, a robust one sees them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.aggregators.robust import RobustAggregator
from equipoise.core import rng
from equipoise.core.abilities import is_of_user, named_part, nested_aggregators
from equipoise.core.numbers import has_weight
from equipoise.solvers.batches import normalisers_of
from equipoise.types import Aggregator, LocalWork
from equipoise.types.round_contracts import Fold, Kept, Map, Stage, View


@dataclass(frozen=True, eq=False)
class Linear(Stage):
    """Totals over chunks of a cohort add up: clients' updates are folded by the aggregator as they come."""

    aggregator: Aggregator
    pure: bool  # whether the sum is a weighted one

    def fold(self, view: View) -> Fold:
        """The aggregator's sum."""
        return Fold(self.aggregator)


@dataclass(frozen=True, eq=False)
class Robust(Stage):
    """An aggregator that sees every update. Updates that cannot be used are rows of NaN, which it leaves out.

    One of the user's own gets the other rows alone, with weights that sum to 1.
    """

    aggregator: Aggregator
    needs_keys: bool

    name: ClassVar[str] = "aggregator"
    place: ClassVar[str] = "combine"

    def fold(self, view: View) -> Fold:
        """Rows."""
        return Fold(None)

    def total(self, view: View) -> Kept | None:
        """What the aggregator makes of the rows."""
        if view.answer is None:
            return None
        workers, keys = view.workers, None
        if self.needs_keys:
            names = view.run.data.train.keys[workers.clients].cpu()
            keys = rng.client_keys(rng.stream_key(workers.seed, "aggregation", workers.round), names)
        losses = workers.columns.get("losses")
        return Kept(*total_of_rows(self.aggregator, view.answer, workers.shares, view.before(self), losses=losses, keys=keys))


def total_of_rows(
    aggregator: Aggregator, work: LocalWork, weights: Tensor, state: Any, *, losses: Tensor | None, keys: Tensor | None
) -> tuple[Tensor, Any]:
    """The total (D,) that an aggregator makes of updates (K, D), and its next state."""
    updates, arrived = work.update, torch.from_numpy(work.arrived)
    if leaves_out(aggregator):
        if not bool(arrived.all()):
            updates = torch.where(arrived.to(updates.device).unsqueeze(1), updates, float("nan"))
    elif not bool((counts := arrived & has_weight(weights)).all()):
        weights, updates = weights[counts] / weights[counts].sum(), updates[counts.to(updates.device)]
        losses, keys = (None if each is None else each[counts.to(each.device)] for each in (losses, keys))
    streams = {} if keys is None else {"keys": keys}
    own = next((part for part in nested_aggregators(aggregator) if is_of_user(part)), aggregator)
    with named_part("aggregator", own):
        return aggregator(updates, weights, losses=losses, state=state, **streams)


def leaves_out(aggregator: Aggregator) -> bool:
    """Whether an aggregator itself leaves out rows of NaN and without a weight: the library's, and extensions of theirs."""
    return isinstance(aggregator, RobustAggregator) or not is_of_user(aggregator)


@dataclass(frozen=True, eq=False)
class Normalised(Stage):
    """FedNova: each update is multiplied by ā/a_k, a_k the length of its local steps."""

    steps: float | None  # a public number in the place of ā
    streams: bool  # whether the sum may be one of updates as they are, under scaled weights

    def fold(self, view: View) -> Fold | None:
        """The fold with one more map."""
        if not len(view.workers) or view.fold is None:
            return None
        run, weights = view.run, view.workers.shares.double()
        lengths = normalisers_of(view.workers, view.rule, run.data.train, run.task.smallest_batch)
        mean = float(weights @ lengths / weights.sum()) if self.steps is None else self.steps
        return view.fold.plus(Map("normalise", "scale", {"by": mean / lengths, "streams": self.streams}))
