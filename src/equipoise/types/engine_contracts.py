"""The contracts of engines, which run clients, and of networks, where clients are on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from equipoise.types.personal_contracts import Personalisation, PersonalWork
from equipoise.types.privacy_contracts import Protection
from equipoise.types.round_values import Cohort, Job, LocalWork, Pull, RoundReport, ServerState
from equipoise.types.server_contracts import Aggregator
from equipoise.types.solver_contracts import LocalSolver, SolverMemory

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.client_metrics import ClientMetrics
    from equipoise.client_table import ClientTable
    from equipoise.data.clients import ClientSet, FederatedData
    from equipoise.personal.context import PersonalContext


class Engine(Protocol):
    """Runs clients. Law: agrees with the loop engine within float tolerance, whatever chunk size, workers or device.

    `params` and `models` are parameters (D,) and (K, D). Of a model with carried values (core.carried) they are followed by
    these: (D + C,) and (K, D + C). Updates are (D,) in any case; the carried values after local work are `LocalWork.carried`.
    """

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """Mean loss of each cohort client on its training data at `params`: (K,) float64.

        For a solver that adapts (`SolverTraits.adapts`) the loss after its inner steps, on the examples these did not see.
        """

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """`losses` of several models, (D,) each: (M, K). An engine may do better than one after another."""
        return torch.stack([self.losses(params, cohort) for params in models])

    def losses_each(self, jobs: Sequence[Job]) -> list[Tensor]:
        """`losses` of several models, each on a cohort of its own: (K,) each."""
        return [self.losses(job.params, job.cohort) for job in jobs]

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client; its `update` is (K, D)."""

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """Local work, streamed through a linear aggregator; its `update` is the sum of the chunks' totals, (D,)."""

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """`summed_update` of several models, one per job; the jobs' cohorts are of one round."""
        return [self.summed_update(job.params, job.cohort, solver, job.weights, aggregator) for job in jobs]

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Local work of each client on a model of its own: models (K, D) in, models (K, D) out. Nothing is attacked here."""

    def evaluate(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of `params` on every client of a set, or on those at positions `which` (n,), on the CPU.

        The answers are (n,) and (n,) float64. `which` is given where a run evaluates a sample of its clients.
        """

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and error of the clients at positions `which` (K,), each at its own model (K, D): (K,) and (K,)."""


@dataclass(frozen=True, eq=False)
class EngineTraits:
    """What an engine may offer."""

    device: torch.device | str = "cpu"  # where parameters and results are
    round_context: Callable[[], AbstractContextManager[None]] = nullcontext  # in which the engine wants each round to run
    look_ahead: LookAheadEngine | None = None  # if the next round can begin while one is under way
    expect: Callable[[Tensor], None] | None = None  # told positions of the next round's clients, to read their examples ahead
    network: Network | None = None  # if clients are on other machines
    stages: Sequence[Any] = ()  # of every round that it answers
    measured: MeasuredChoice | None = None  # if the engine measures what is fastest
    explain: Callable[..., str] | None = None  # how local work is done, and why
    # (params (D,) or own models (n, D), clients, metrics, positions (n,)): each metric of each client, (M, n)
    measure: Callable[..., Tensor] | None = None


class LookAheadEngine(Protocol):
    """Starts a round and goes on, so that the host prepares the next one while a device works."""

    def has_capacity(self) -> bool:
        """Whether memory allows another round beside those under way."""

    def begin_round(
        self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator, server_rate: float
    ) -> RoundUnderWay | None:
        """Start `summed_updates` and the server's steps w + rate · total; None if this work cannot be started so."""


class RoundUnderWay(Protocol):
    """Rounds of some jobs that a device works on."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The next parameters (D,) of each job, if every client update can be used."""

    def collected(self) -> list[LocalWork] | None:
        """Wait for the work of each job; None if some client update cannot be used, and the round must be run again."""


class MeasuredChoice(Protocol):
    """A choice that was made by measuring. It changes the last bits of a result, so a checkpoint keeps it."""

    def read(self) -> dict[str, Any]:
        """The choice as plain values."""

    def use(self, values: Mapping[str, Any]) -> None:
        """Go on with a choice that `read` gave."""


class Network(Protocol):
    """What changes where clients are on other machines."""

    @property
    def run(self) -> str:
        """The name of the run among the nodes, drawn at random."""

    def attempt(
        self, run: Callable[[Cohort], tuple[ServerState, RoundReport]], draw: Callable[[int], Cohort]
    ) -> tuple[ServerState, RoundReport]:
        """A round, run again while too few clients do their part; `draw(n)` is the cohort of attempt n."""

    def gone(self, cohort: Cohort) -> Tensor:
        """Which clients (K,) of a cohort have failed in this round."""

    def client_table(
        self, params: Tensor, data: FederatedData, round_index: int, metrics: ClientMetrics | None = None
    ) -> ClientTable:
        """Every client of every split that answers, at `params`, after `round_index` rounds; `metrics` if the run has some."""

    def personal_work(self, method: Personalisation, context: PersonalContext, solver: LocalSolver, seed: int) -> PersonalWork:
        """Personalisation whose models stay on the nodes."""

    def solver_rows(self) -> SolverMemory:
        """What clients keep for their solver between rounds, on their nodes."""

    def protect(self, protection: Protection, algorithm: Algorithm) -> Protection:
        """The protection of a run, with its sums over the network."""
