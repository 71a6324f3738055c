"""Personal models made after training: each client goes on from the shared model on its own data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.errors import is_whole, require
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import check_solver, own_solver, refuse_unfit_solver
from equipoise.solvers.sgd import SGD
from equipoise.types import Cohort, LocalSolver

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm


def check_epochs(epochs: int) -> None:
    """Refuse a number of epochs that is none."""
    require(is_whole(epochs) and epochs >= 1, "epochs", "must be a whole number of at least 1", epochs)


def for_epochs(solver: LocalSolver, epochs: int) -> LocalSolver:
    """The solver with so many passes over a client's data."""
    return replace(solver, epochs=epochs, steps=None) if isinstance(solver, SGD) else solver


@dataclass(frozen=True)
class Finetuning:
    """After training each client takes `epochs` passes over its own data from the shared model; nothing is kept in rounds.

    `solver` says how (None: as the algorithm's).

    Source: Li 2023 (thesis), sections 5.3 and 5.7.1 (50 epochs); Pillutla et al. 2023, Table 4 (10 epochs).
    """

    epochs: int = 10
    solver: LocalSolver | None = None

    def __post_init__(self) -> None:
        check_epochs(self.epochs)
        check_solver(self.solver)

    def check(self, algorithm: Algorithm) -> None:
        refuse_unfit_solver(self, algorithm)

    def width(self, dimension: int) -> int:
        return 0

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        return params[:0], None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        return rows, shared

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        start = params.expand(len(cohort), -1).contiguous()
        work = for_epochs(own_solver(self.solver, solver), self.epochs)
        return context.engine.own_steps(start, context.own_stream(cohort), work)
