"""What every run's server does: it steps, averages iterates and running statistics, and reports what it saw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, named_part, nested_aggregators
from equipoise.core.numbers import numbers
from equipoise.errors import Diverged, shown
from equipoise.round_report import TAIL, worst_mean
from equipoise.types import Cohort
from equipoise.types.round_contracts import Fold, Kept, Stage, View


class Finite(Stage):
    """In a run whose server sees single clients: what is not finite ends it or is left out, and clients are named."""

    pure = True
    place: ClassVar[str] = "decode"

    def cohort(self, view: View) -> None:
        """Losses are finite, or the run has diverged."""
        if view.losses is not None:
            self._stop_unless_finite(view, view.losses, view.cohort, "loss")

    def total(self, view: View) -> Tensor | None:
        """A sum without what could not be used: its weight goes to the others."""
        work = view.answer
        if work is None:
            return None
        arrived = work.arrived
        if arrived.all():
            return None
        if not arrived.any():
            self._stop_unless_finite(view, work.sq_norms, view.workers, "update")
        if view.fold.by is None:
            return None
        return view.total * (1.0 / float(view.workers.shares[torch.from_numpy(arrived)].sum()))

    def tell(self, view: View) -> Mapping[str, Any]:
        """Who took part, and the clients whose update was left out."""
        ids = view.run.data.train.ids
        told = {"clients": view.run.data.train.ids_at(view.cohort.clients)}
        if view.answer is None or view.answer.arrived.all():
            return told
        return {
            **told,
            "rejected": tuple(ids[i] for i in view.workers.clients[torch.from_numpy(~view.answer.arrived)].tolist()),
        }

    @staticmethod
    def _stop_unless_finite(view: View, values: Tensor, cohort: Cohort, what: str) -> None:
        if not math.isfinite(numbers(values).sum()) and (bad := ~torch.isfinite(values)).any():
            ids = view.run.data.train.ids
            raise Diverged(cohort.round, (ids[i] for i in cohort.clients[bad].tolist()), what)


@dataclass(frozen=True, eq=False)
class ServerStep(Stage):
    """The server optimiser. A model that is not finite ends the run."""

    server: Any
    aggregator: Any
    rate: float | None  # γ, if the step is w + γ · total

    name: ClassVar[str] = "server"

    @property
    def pure(self) -> bool:
        """Whether the step is one that engines may take."""
        return self.rate is not None

    def fold(self, view: View) -> Fold | None:
        """The fold with the step that follows."""
        return None if view.fold is None or self.rate is None else replace(view.fold, step=self.rate)

    def params(self, view: View) -> Kept | None:
        """The next parameters."""
        if view.answer is not None and view.answer.params is not None:  # the engine has taken the step, and looks at it
            return Kept(view.answer.params, None)
        if view.total is None:
            return None
        with named_part("server optimiser", self.server):
            params, state = self.server.step(view.state.params, view.total.to(view.state.params), view.before(self))
        # A sum over all of them is finite if each is; the other way round is checked where it is not.
        if not math.isfinite(float(params.sum())) and not bool(torch.isfinite(params).all()):
            raise self._named(Diverged(view.state.round, (), "model after the server's step"), view)
        return Kept(params, state)

    def _named(self, failure: Diverged, view: View) -> Diverged:
        """The error, naming an aggregator of the user's own that made finite updates infinite."""
        own = next((part for part in nested_aggregators(self.aggregator) if is_of_user(part)), None)
        count = 0 if view.answer is None else int(view.answer.arrived.sum())
        if count == 0 or own is None or bool(torch.isfinite(view.total).all()):
            return failure
        updates = "one finite update" if count == 1 else f"{count} finite updates"
        named = Diverged(failure.round, (), f"total that {shown(own)} makes of {updates}")
        named.because("The clients' work is not the cause. Try the aggregator with equipoise.testing.check_aggregator.")
        return named


@dataclass(frozen=True, eq=False)
class Buffers(Stage):
    """Running statistics (BatchNorm): the mean of clients' moments; what clients keep for themselves stays."""

    layout: Any
    withheld: Tensor  # (C,) bool

    name: ClassVar[str] = "carried"

    def keep(self, view: View) -> Kept | None:
        """The server's values after the round."""
        before = view.state.carried
        if view.answer is None or view.answer.carried is None:
            return None
        after = self.layout.from_moments(view.answer.carried).to(before)
        return Kept(None, torch.where(self.withheld.to(before.device), before, after))


@dataclass(frozen=True, eq=False)
class Averaged(Stage):
    """The iterate that the run reports."""

    averaged: Any
    pure: bool

    name: ClassVar[str] = "averaging"

    def keep(self, view: View) -> Kept:
        """The averages after the round."""
        after = replace(view.state, params=view.params, carried=view.after.get("carried", view.state.carried))
        return Kept(None, self.averaged.update(after))


class Seen(Stage):
    """What a round reports of losses: of the cohort at the start if somebody wanted them, else of those at work."""

    pure = True

    def tell(self, view: View) -> Mapping[str, Any]:
        """The mean loss, and that of the worst tail."""
        at_start, work = view.losses is not None, view.answer
        pair = (view.losses, view.cohort.weights) if at_start else (None, None)
        if not at_start and work is not None and work.told:
            pair = (work.losses, view.workers.shares)
        losses, share = (np.zeros(0) if each is None else numbers(each) for each in pair)
        if not math.isfinite(losses.sum()):  # a client without a step saw no loss; that of one left out may be infinite
            known = np.isfinite(losses)
            losses, share = losses[known], share[known]
        if not share.any():
            losses, share = losses[:0], share[:0]
        share = share / share.sum()
        mean, tail = (float(share @ losses), worst_mean(losses, share, TAIL)) if len(losses) else (math.nan, math.nan)
        return {"loss": mean, "tail_loss": tail, "loss_from": "start" if at_start else "work", "risk": None}
