"""The contracts of personalisation: the method, and its work in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from equipoise.types.own_claims import OWN
from equipoise.types.round_values import Cohort, SentUpdates
from equipoise.types.solver_contracts import LocalSolver

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.core.task import Task
    from equipoise.personal.context import PersonalContext


class Personalisation(Protocol):
    """A model for every client besides the shared one. Law: the shared model is that of the same run without it, unless the
    method has `updates`.

    What a client keeps between rounds is one row of `width(D)` numbers, such as its model; 0 for methods that do all their
    work after training. `shared` is what all clients' work adds up to (a mean of their models, say), or None.
    """

    def width(self, dimension: int) -> int:
        """How many numbers a client keeps, for a model of `dimension` parameters."""

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """What every client keeps before its first round, (width,), and the shared state; `params` is w^0."""

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The rows (K, width) of a round's clients after their work, given w^t, and the next shared state."""

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) of some clients, given the shared model that they have now; may train (finetuning)."""


@dataclass(frozen=True, eq=False)
class PersonalTraits:
    """What a personalisation method may offer."""

    check: Callable[[Algorithm], None] | None = None  # refuses what does not go with the method
    updates: Callable[..., Tensor | None] | None = None  # (context, params, cohort, rows, solver): what clients send, (K, D)
    sends_carried: Callable[..., Tensor | None] | None = None  # of the same arguments: carried values beside `updates`, (K, C)
    losses: Callable[..., Tensor] | None = None  # (context, params, cohort, rows): what the risk sees instead of F_k(w), (K,)
    finetunes: bool = False  # whether all clients train once more after the rounds, also those that were never drawn
    serves_all: bool = False  # whether clients that were never drawn are served what `models` gives, and not the shared model
    keeps_layers: bool = False  # whether clients keep layers that stay as they began in the shared model
    # whether the server sees clients' models, or what they add up to; None: not said, which protection refuses in own classes
    sums_models: bool | None = None
    solver: LocalSolver | None = None  # of the personal work, if it is not the algorithm's
    further_epochs: tuple[int, ...] = ()  # numbers of passes that clients train for, beside the solver's own
    keeps_carried: bool = field(default=False, metadata=OWN)  # whether a client's model may have carried values of its own
    withholds_carried: Callable[[Task], Tensor] | None = field(default=None, metadata=OWN)  # those that clients keep, (C,) bool


class PersonalWork(Protocol):
    """Personalisation in one run: `personal.personal_run` on this machine, or with the models on the nodes of a network."""

    @property
    def keeps_rows(self) -> bool:
        """Whether clients keep anything between rounds."""

    def begin(self, params: Tensor, path: Path | None = None) -> Any:
        """The state before the first round at w^0; rows go to a new file at `path`, or a temporary one."""

    def resume(self, params: Tensor, state: Any, path: Path | None) -> None:
        """Go on from a state that a checkpoint holds; `params` is w^0."""

    def work(self, state: Any, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Any:
        """The state after a round's personal work of the whole cohort."""

    def commit(self, state: Any) -> Any:
        """Write the rows of a round that is finished: the state after it."""

    def losses(self, state: Any, params: Tensor, cohort: Cohort) -> Tensor | None:
        """The losses (K,) that the risk sees, if they are not those of the shared model."""

    def updates(self, state: Any, params: Tensor, cohort: Cohort, solver: LocalSolver) -> SentUpdates | None:
        """What clients send, if it is not the update of the solver's work."""

    def models(self, state: Any, params: Tensor, clients: Tensor, round_index: int) -> Tensor:
        """The models (K, D) of training clients at positions (K,), when the shared model is `params`."""

    def all_models(self, state: Any, params: Tensor, round_index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions (k,) and models (k, D) of all training clients, a few at a time."""

    def scores(
        self, state: Any, params: Tensor, round_index: int, sample: Mapping[str, Tensor] | None = None
    ) -> dict[str, tuple[Tensor, ...]]:
        """By split, mean loss, mean error and each metric of every client at its own model; NaN for clients without one.

        Of the splits in `sample`, those at the given positions only.
        """

    def flush(self) -> None:
        """Write the rows to disk, before a checkpoint is written."""

    def on_saved(self, state: Any) -> None:
        """A checkpoint with this state was written: rows that only older ones need may be written over."""
