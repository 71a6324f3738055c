"""Personal models made after training: each client goes on from the shared model on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import is_integer, require
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import check_own_solver, own_solver, refuse_unfit_solver
from equipoise.types import Cohort, LocalSolver

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm


def check_epochs(epochs: int) -> None:
    """Raise InvalidParameter unless `epochs` is an integer ≥ 1."""
    require(is_integer(epochs) and epochs >= 1, "epochs", "must be a whole number of at least 1", epochs)


def for_epochs(solver: LocalSolver, epochs: int) -> LocalSolver:
    """The solver with `epochs` passes over a client's data; other solvers than SGD as they are."""
    with_epochs = solver_traits(solver).with_epochs
    return solver if with_epochs is None else with_epochs(epochs)


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
        check_own_solver(self.solver)

    def check(self, algorithm: Algorithm) -> None:
        """Refuse a solver that makes no personal model."""
        refuse_unfit_solver(self, algorithm)

    def width(self, dimension: int) -> int:
        """Clients keep nothing between rounds."""
        return 0

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """An empty row, and no shared state."""
        return params[:0], None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """Nothing is done in rounds: rows and shared state as they are."""
        return rows, shared

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) after `epochs` passes over each client's data, from the shared model."""
        start = params.expand(len(cohort), -1).contiguous()
        work = for_epochs(own_solver(self.solver, solver), self.epochs)
        return context.engine.own_steps(start, context.own_stream(cohort), work)
