"""Personal models made after training: each client goes on from the shared model on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import require_integer
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import TrainsOwnModels, own_solver
from equipoise.types import Cohort, LocalSolver


class FinetuningMethod(TrainsOwnModels):
    """What methods share that train after the rounds only: clients keep nothing, and go on from the shared model."""

    epochs: int  # passes over a client's data after the rounds

    def __post_init__(self) -> None:
        require_integer("epochs", self.epochs, 1)
        super().__post_init__()

    def width(self, dimension: int) -> int:
        """Clients keep nothing between rounds.

        `dimension` is D, the number of parameters.
        """
        return 0

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """An empty row, and no shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return params[:0], None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """Nothing is done in rounds: rows and shared state as they are.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return rows, shared

    @property
    def further_epochs(self) -> tuple[int, ...]:
        """The number of passes after training."""
        return (self.epochs,)

    def for_epochs(self, solver: LocalSolver) -> LocalSolver:
        """The method's solver, or the algorithm's, with `epochs` passes over a client's data; all but SGD as they are."""
        own = own_solver(self.solver, solver)
        with_epochs = solver_traits(own).with_epochs
        return own if with_epochs is None else with_epochs(self.epochs)


@dataclass(frozen=True)
class Adaptation(FinetuningMethod):
    """What a solver that adapts has every client do with the trained model before it is used: the solver's inner steps."""

    solver: LocalSolver
    epochs: int = 1

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) after the inner steps on each client's data, from the shared model.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        start = params.expand(len(cohort), -1).contiguous()
        return context.engine.own_steps(start, context.own_stream(cohort), self.solver)


@dataclass(frozen=True)
class Finetuning(FinetuningMethod):
    """After training each client takes `epochs` passes over its own data from the shared model; nothing is kept in rounds.

    `solver` says how (None: as the algorithm's).

    Source: Li 2023 (thesis), sections 5.3 and 5.7.1 (50 epochs); Pillutla et al. 2023, Table 4 (10 epochs).

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=Finetuning(epochs=1))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # w^1 = 1; then 1 − ¼ · 2(1 − 4)
    2.5
    """

    epochs: int = 10  # passes over a client's data after the rounds
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    keeps_carried: ClassVar[bool] = True  # a client's row holds its own carried values, behind its parameters

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) after `epochs` passes over each client's data, from the shared model.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        start = params.expand(len(cohort), -1).contiguous()
        return context.engine.own_steps(start, context.own_stream(cohort), self.for_epochs(solver))
