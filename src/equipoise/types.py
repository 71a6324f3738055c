"""The values that pass between the parts, and the contracts (protocols) the parts fulfil.

Shapes: K clients in a cohort, D parameters, n clients in all. The law of each contract is checked by `equipoise.testing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from equipoise.data.clients import ClientSet
    from equipoise.personal.context import PersonalContext


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round: positions in the training set, base weights that sum to 1, inclusion probabilities."""

    round: int
    seed: int
    clients: Tensor  # (K,) int64, positions in data.train
    weights: Tensor  # (K,) float64, sums to 1 over the cohort as it was drawn
    inclusion: Tensor  # (K,) float64, the probability with which each client enters a cohort
    effort: Tensor | None = None  # (K,) int64, epochs (or steps) that each client gets done; None: all of the solver's

    def __len__(self) -> int:
        return self.clients.shape[0]

    def take(self, keep: Tensor) -> Cohort:
        """The sub-cohort at a boolean mask or positions; base weights are kept as they are."""
        effort = self.effort[keep] if self.effort is not None else None
        return Cohort(self.round, self.seed, self.clients[keep], self.weights[keep], self.inclusion[keep], effort)


@dataclass(frozen=True, eq=False)
class RiskValue:
    """A risk of the cohort's losses: its value, its gradient in the losses (the weights), and the next state."""

    value: Tensor  # ()
    weights: Tensor  # (K,)
    state: Any = None


@dataclass(frozen=True, eq=False)
class LocalWork:
    """What a cohort sends back."""

    update: Tensor  # (K, D) one by one, or (D,) already summed under weights
    sq_norms: Tensor  # (K,) squared L2 norms of the clients' updates
    losses: Tensor  # (K,) mean loss over the batches of the local work, seen for free

    @cached_property
    def arrived(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which updates can be used, (K,): those that cannot have an infinite norm."""
        finite: np.ndarray[Any, np.dtype[np.bool_]] = np.isfinite(self.sq_norms.cpu().numpy())
        return finite


@dataclass(frozen=True, eq=False)
class Job:
    """The local work of one model: its parameters, who trains it, and their weights in the sum."""

    params: Tensor  # (D,)
    cohort: Cohort
    weights: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that a round hands to the next: parameters (D,) and the states of the parts."""

    round: int
    params: Tensor
    risk: Any = None
    aggregator: Any = None
    server: Any = None
    solver: Any = None
    averaging: Any = None
    personal: Any = None
    privacy: Any = None


@dataclass(frozen=True, eq=False)
class Pull:
    """Adds strength · (v − anchor) to the gradients of personal models v: a pull of each towards its anchor."""

    anchor: Tensor  # (D,) for all, or (K, D)
    strength: Tensor  # (K,) one number per client, or (K, D) one per parameter


@dataclass(frozen=True)
class RoundReport:
    """What one round did.

    `loss` and `tail_loss` (its worst 10 %) are over the whole cohort at the start of the round if the risk asked for losses
    (`loss_from="start"`), else over the clients at work as they worked (`"work"`), which costs nothing.
    """

    round: int
    loss: float
    tail_loss: float
    loss_from: Literal["start", "work"]
    risk: float | None
    cohort: int
    trained: int
    seconds: float
    dropped: int = 0  # clients with a weight whose work did not arrive
    rejected: tuple[str, ...] = ()  # the clients whose update was not finite or absurdly large, and was left out
    epsilon: float | None = None  # what was spent up to the end of this round, under differential privacy
    missing: dict[str, str] = field(default_factory=dict)  # over a network: clients left out because of a fault, and which
    bytes_sent: int = 0  # over a network: by the server, to all clients
    bytes_received: int = 0
    bytes_by_client: dict[str, tuple[int, int]] = field(default_factory=dict)  # sent to and received from each

    def __post_init__(self) -> None:
        if type(self.rejected) is not tuple or self.bytes_by_client:  # lists where they were read from a file
            object.__setattr__(self, "rejected", tuple(self.rejected))
            object.__setattr__(self, "bytes_by_client", {c: tuple(pair) for c, pair in self.bytes_by_client.items()})


class ClientRisk(Protocol):
    """Law: weights are the (sub)gradient of the value; permutation-equivariant; finite for any finite losses."""

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue: ...


class QuantileSource(Protocol):
    """Where Δ-FL takes the cohort's quantile from. Law: a finite number, between the smallest and the largest loss up to the
    source's own tolerance.
    """

    @property
    def reads_losses(self) -> bool:
        """Whether the server sees each loss; if not, clients filter themselves by the quantile that is released."""

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The weighted (1 − tail)-quantile, or what is released in its place: ()."""


class LocalSolver(Protocol):
    """A description of local work. Law: zero steps give a zero update.

    Besides these a solver may have `efforts(cohort, keys)`, how much each client gets done; `finish(…)`, taken instead of the
    last `step`; `split` and `adapts` (solvers.MAML); `shared_gradient`, a g (D,) such that the engine adds g − ∇F_k(w^t) to
    every gradient of client k (FedDane); `preconditioner`, an A (D,) by which the engine divides every gradient; `repeats`, for
    how many steps in a row a batch is used; or only `prepare(context, state)`, which gives a round's solver and the next state.
    """

    @property
    def batch_size(self) -> int | None: ...

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """How many steps a client with `size` examples takes; `effort` is what it gets done of the epochs (or steps)."""

    def learning_rate(self, round_index: int) -> float: ...

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Zeroed memory (e.g. momentum), each tensor shaped like `weights`."""

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """One step, in place, element by element: `weights` may be one client's (D,) or many clients' (K, …).

        Only `weights` and `memory` are written to; `gradient` may share memory with another parameter's.
        """


class Aggregator(Protocol):
    """Law: permutation-invariant; if linear, the total is the sum of the totals over chunks under the same weights.

    A linear aggregator is therefore applied chunk by chunk, or client by client; it has no state and gets no losses.
    """

    @property
    def linear(self) -> bool: ...

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]: ...


class ServerOptimizer(Protocol):
    """Turns the aggregated update into the next parameters. Law: a zero update from a fresh state changes nothing."""

    def begin(self, params: Tensor) -> Any: ...

    def step(self, params: Tensor, total: Tensor, state: Any) -> tuple[Tensor, Any]: ...


class Averaging(Protocol):
    """Which point a run reports and serves, given its iterates w^0, w^1, …; training itself is not changed."""

    def begin(self, params: Tensor) -> Any:
        """The state before the first round, at w^0."""

    def update(self, params: Tensor, state: Any) -> Any:
        """The state after a round that ended at `params`."""

    def iterate(self, params: Tensor, state: Any) -> Tensor:
        """The point to report after that round."""


class Personalisation(Protocol):
    """A model for every client besides the shared one. Law: the shared model is that of the same run without it, unless the
    method has `updates`.

    What a client keeps between rounds is one row of `width(D)` numbers, such as its model; 0 for methods that do all their
    work after training. `shared` is what all clients' work adds up to (a mean of their models, say), or None. Two things are
    optional: `check(algorithm)`, which refuses what does not go with the method, and `updates(context, params, cohort, rows,
    solver)`, for a method whose clients send other updates (K, D) than the solver's, after their personal work of the round.
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


class Privacy(Protocol):
    """A description of protection: differential privacy or secure aggregation (equipoise.privacy)."""

    def check(self, algorithm: Any) -> None:
        """Refuse an algorithm that the protection does not go with."""


class ClipRule(Protocol):
    """How a clip bound moves over the rounds, by a private count. Law: bounds stay positive."""

    @property
    def ratio(self) -> float:
        """What the count costs, relative to all other releases of a round."""

    def next_bound(self, bound: float, share: float) -> float:
        """The bound after a round in which a noisy `share` of the updates were within `bound`."""


class Attack(Protocol):
    """What malicious clients do. Law: the same clients and the same noise on every engine.

    `share` of the training clients (to the nearest) are malicious, drawn by `seed`. An attack may poison their training data
    (`poison`), or what they send (`corrupt`), or both; what it does not do it need not have.
    """

    @property
    def share(self) -> float: ...

    @property
    def seed(self) -> int: ...


class Sampler(Protocol):
    """Law: positions are distinct and in range, weights positive and summing to 1; a pure function of (seed, round)."""

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort: ...


class Engine(Protocol):
    """Runs clients. Law: agrees with the loop engine within float tolerance, whatever chunk size, workers or device.

    An engine whose clients are elsewhere may also have `attempt(run, draw)`, which runs a round, perhaps several times;
    `gone(cohort)`, which of its clients (K,) have failed in this round; `client_table(params, data)`, an evaluation of all
    clients that can be reached; `personal_run(…)`, a PersonalRun whose rows are elsewhere; and `protected(protection,
    algorithm)`, the same protection by sums of real clients (engines.flower). An engine may have `in_round()`, a context in
    which it wants each round to run; `losses_each(jobs)`, the losses of several cohorts in one call; and `begins_early`, with
    `has_room()` and `begin_round(…)`, if it can start the next round while one is under way (ahead.py).
    """

    def losses(self, params: Tensor, cohort: Cohort, solver: LocalSolver | None = None) -> Tensor:
        """Mean loss of each cohort client on its training data at `params`: (K,) float64.

        For a solver that adapts (`solver.adapts`) the loss after its inner steps, on the examples these did not see.
        """

    def updates(self, params: Tensor, cohort: Cohort, solver: LocalSolver) -> LocalWork:
        """Local work of each client; its `update` is (K, D)."""

    def summed_update(
        self, params: Tensor, cohort: Cohort, solver: LocalSolver, weights: Tensor, aggregator: Aggregator
    ) -> LocalWork:
        """The same work, streamed through a linear aggregator; its `update` is the sum of the chunks' totals, (D,)."""

    def losses_of(self, models: Sequence[Tensor], cohort: Cohort) -> Tensor:
        """`losses` of several models, (D,) each, at once: (M, K)."""

    def summed_updates(self, jobs: Sequence[Job], solver: LocalSolver, aggregator: Aggregator) -> list[LocalWork]:
        """`summed_update` of several models at once, one per job; the jobs' cohorts are of one round."""

    def own_steps(self, models: Tensor, cohort: Cohort, solver: LocalSolver, pull: Pull | None = None) -> Tensor:
        """Local work of each client on a model of its own: models (K, D) in, models (K, D) out. Nothing is attacked here."""

    def evaluate(self, params: Tensor, clients: ClientSet) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of `params` on every client of a set: (n,) and (n,) float64."""

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the clients at the positions `which` (K,) of a set, each at its own model (K, D): (K,) and (K,)."""


class Observer:
    """Watches a run and never changes it; raising stops the run with the observer's name. Fill in what you need."""

    def on_start(self, run: Any) -> None:
        """The run begins."""

    def on_round(self, report: RoundReport) -> None:
        """A round has ended."""

    def on_state(self, state: ServerState) -> None:
        """The state between two rounds: before the first, and after each."""

    def on_evaluating(self, round_index: int) -> None:
        """The final evaluation of all clients begins; it may take a while."""

    def on_evaluation(self, evaluation: Any) -> None:
        """All clients were evaluated."""

    def on_end(self) -> None:
        """The run has ended, well or not: close what was opened."""
