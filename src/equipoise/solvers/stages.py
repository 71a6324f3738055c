"""What solvers add to a round: a prepared rule, clients that get less done, rows that they keep, a common correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import isgenerator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import EquipoiseError, IncompatibleParts
from equipoise.solvers.batches import normalisers_of, steps_of
from equipoise.solvers.prepared import RoundContext
from equipoise.types import Cohort
from equipoise.types.round_contracts import Kept, Stage, View


@dataclass(frozen=True, eq=False)
class PreparedRule(Stage):
    """A solver that makes the rule of each round by what it asks."""

    traits: Any  # the solver's `SolverTraits`
    always: bool  # also of a round that has drawn nobody
    hidden: bool  # whether clients are protected: then nobody may be asked, and nobody is named

    name: ClassVar[str] = "solver"

    def rule(self, view: View) -> Any:
        """The rule of this round."""
        if not len(view.cohort) and not self.always:
            return None
        draw = partial(view.run.draw.further, view.cohort.round)
        cohort = view.cohort.take(torch.zeros(0, dtype=torch.int64)) if self.hidden else view.cohort
        context = RoundContext(view.state.model, cohort, view.run.alpha, draw, view.run.task.layout)
        made = self.traits.prepare(context, view.state.solver)
        if self.hidden and isgenerator(made):
            reason = "A solver with public_only = True asks clients before a round, which its protection does not cover."
            raise IncompatibleParts(reason, "Prepare the round by what was released, or leave out the protection.")
        solver, state = (yield from made) if isgenerator(made) else made
        return Kept(solver, state)


class Stragglers(Stage):
    """Clients get less done than the solver asks for; those that get nothing done are left out."""

    pure = True

    def cohort(self, view: View) -> Cohort:
        """The cohort with what each client gets done."""
        efforts: Any = solver_traits(view.rule).efforts
        return view.cohort.having(effort=efforts(view.cohort, view.run.data.train.keys[view.cohort.clients].cpu()))

    def workers(self, view: View) -> Cohort | None:
        """Those that get something done."""
        effort = view.workers.effort
        if effort is None or bool((effort > 0).all()):
            return None
        return view.workers.take(torch.from_numpy(np.flatnonzero(effort.numpy() > 0)))

    def tell(self, view: View) -> Mapping[str, Any]:
        """How many clients with a weight are left out."""
        if view.cohort.effort is None:
            return {}
        return {"dropped": int(((view.weights.each.cpu() > 0) & (view.cohort.effort == 0)).sum())}


@dataclass(frozen=True, eq=False)
class CountedSteps(Stage):
    """Clients without a local step take no part; with a plain mean all others count alike."""

    plain_mean: bool

    def workers(self, view: View) -> Cohort:
        """Those that take a step."""
        taken = steps_of(view.workers, view.rule, view.run.data.train, view.run.task.smallest_batch)
        workers = view.workers if (taken > 0).all() else view.workers.take(torch.from_numpy(np.flatnonzero(taken > 0)))
        return workers.having(shares=torch.ones_like(workers.shares)) if self.plain_mean else workers


@dataclass(frozen=True, eq=False)
class KeptRows(Stage):
    """What clients keep for their solver between rounds, one row each (SCAFFOLD's c_k, momentum, Adam's moments)."""

    store: Any
    own_prox: Any = None  # (alpha (K,), n): the strength of each client's pull

    name: ClassVar[str] = "kept"

    def workers(self, view: View) -> Cohort:
        """The clients with their rows."""
        workers, alpha = view.workers, view.run.alpha
        prox = None if self.own_prox is None else self.own_prox(alpha[workers.clients], len(alpha))
        return workers.having(rows=self.store.given(view.state.kept, workers.clients), prox=prox)

    def keep(self, view: View) -> Kept | None:
        """The rows after the round. That of a client whose update could not be used stays as it was."""
        if view.answer is None:
            return None
        return Kept(None, self.store.after(view.state.kept, view.workers, view.answer))

    def commit(self, state: Any) -> Tensor:
        """Write the rows."""
        rows: Tensor = self.store.write(state)
        return rows


@dataclass(frozen=True, eq=False)
class Correction(Stage):
    """A correction that all clients share (SCAFFOLD's c, FedDyn's h), moved by what the round gave."""

    traits: Any  # the solver's `SolverTraits`
    store: Any
    by_rows: bool  # whether the server sees every update, and takes their weighted mean
    hidden: bool  # whether single clients are protected
    private: bool  # whether it is secret how many came

    name: ClassVar[str] = "solver"
    place: ClassVar[str] = "rescale"

    def total(self, view: View) -> Kept | None:
        """What the server steps by, and the next correction."""
        if view.total is None or (view.answer is None and not self.private):
            return None
        state = view.after["solver"]
        moved = self._moved(view, state)
        server_total = self.traits.server_total
        return Kept(None if server_total is None else server_total(moved, view.total), moved)

    def _moved(self, view: View, state: Any) -> Any:
        work, after_rows = view.answer, self.traits.after_rows
        if after_rows is not None and self.by_rows and work is not None and work.rows is not None:
            here = torch.from_numpy(np.flatnonzero(work.arrived))
            who = view.workers.clients[here]
            return after_rows(state, view.run.alpha[who], self.store.change(view.state.kept, who, work.rows[here]))
        scale = float("nan")
        if after_rows is not None:
            scale = view.rule.learning_rate(view.cohort.rate_round) * self._mean_length(view)
        return self.traits.after_total(state, view.total, self._counted_share(view), scale)

    def _counted_share(self, view: View) -> float:
        """Σ α_k over the clients in the total; m/n for a plain mean, and the expected m/n under noise."""
        alpha, workers, work = view.run.alpha, view.workers.clients, view.answer
        if self.private:
            return float(view.weights.over) / len(alpha)
        each = torch.full_like(alpha, 1 / len(alpha)) if self.traits.plain_mean else alpha
        if work.mass is not None:
            return float(each[workers].sum()) * work.mass / float(view.workers.shares.sum())
        return float(each[workers[torch.from_numpy(work.arrived)]].sum() if work.told else each[workers].sum())

    def _mean_length(self, view: View) -> float:
        """The length of the clients' steps: public where all take the same number, else their mean."""
        traits, workers = solver_traits(view.rule), view.workers
        if traits.steps is not None and traits.normalisers is not None and workers.effort is None:
            lr = view.rule.learning_rate(view.cohort.rate_round)
            return float(traits.normalisers(torch.tensor([traits.steps]), lr)[0])
        if self.hidden:
            raise EquipoiseError(f"{view.run.algorithm.solver!r} must count its work in steps where clients are protected.")
        lengths = normalisers_of(workers, view.rule, view.run.data.train, view.run.task.smallest_batch)
        weights = workers.shares.double()
        return float(weights @ lengths / weights.sum())
