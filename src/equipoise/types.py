"""The values that pass between the parts, and the contracts of the parts: what each must offer, and what it may offer.

What a part must offer is a protocol. What it may offer is a frozen description (`RiskTraits`, `SolverTraits`, …): each field is
an attribute of that name on the part, and the field's default holds for a part without it. `equipoise.core.abilities` reads the
descriptions, once, at set-up; nothing else asks a part what it is. A field marked `OWN` is a claim of a class about its own
methods: it does not hold for subclasses, which may override them.

Shapes: K clients in a cohort, D parameters, n clients in all. The law of each contract is checked by `equipoise.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.core.carried import join_model

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.client_metrics import ClientMetrics
    from equipoise.client_table import ClientTable
    from equipoise.data.clients import ClientSet
    from equipoise.data.federated_data import FederatedData
    from equipoise.personal.context import PersonalContext
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.ledger import Ledger
    from equipoise.privacy.observer_table import PrivacyTable
    from equipoise.privacy.private_quantile import PrivateQuantile
    from equipoise.privacy.release_book import ReleaseBook
    from equipoise.privacy.secure_histogram import SecureHistogram
    from equipoise.round import Plan

OWN: Mapping[str, bool] = {"own": True}  # metadata of a field that subclasses do not inherit

# ------------------------------------------------------------------------------------------------ values that parts exchange


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round: positions in the training set, base weights that sum to 1, inclusion probabilities."""

    round: int
    seed: int
    clients: Tensor  # (K,) int64, positions in data.train
    weights: Tensor  # (K,) float64, sums to 1 over the cohort as it was drawn
    inclusion: Tensor  # (K,) float64, the probability with which each client enters a cohort
    effort: Tensor | None = None  # (K,) int64, epochs (or steps) that each client gets done; None: all of the solver's
    rows: Tensor | None = None  # (K, width), what each client has kept for its solver since its last round
    rate_of: int | None = None  # the round whose learning rate holds; None: this one's
    prox: Tensor | None = None  # (K,), the strength with which each client is pulled to the round's model; None: by the solver

    def __len__(self) -> int:
        return self.clients.shape[0]

    @property
    def rate_round(self) -> int:
        """The round whose learning rate the clients work with."""
        return self.round if self.rate_of is None else self.rate_of

    def after_training(self) -> Cohort:
        """The cohort for work after the last round: at the learning rate of that round, since this one never takes place."""
        return replace(self, rate_of=max(self.round - 1, 0))

    def take(self, keep: Tensor) -> Cohort:
        """The sub-cohort at a boolean mask or positions; base weights are kept as they are."""
        effort, rows, prox = (None if each is None else each[keep] for each in (self.effort, self.rows, self.prox))
        chosen = self.clients[keep], self.weights[keep], self.inclusion[keep]
        return Cohort(self.round, self.seed, *chosen, effort, rows, self.rate_of, prox)


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
    carried: Tensor | None = None  # as carried values are averaged: (K, C), NaN where none count; or (C,), their mean
    rows: Tensor | None = None  # (K, width), what each client keeps for its solver until its next round; it is not sent
    carried_mass: float = 0.0  # the sum of the weights that a mean of carried values (C,) is over

    @cached_property
    def arrived(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which updates can be used, (K,): those that cannot have an infinite norm."""
        finite: np.ndarray[Any, np.dtype[np.bool_]] = np.isfinite(self.sq_norms.cpu().numpy())
        return finite


@dataclass(frozen=True, eq=False)
class Job:
    """The local work of one model: its parameters, who trains it, and their weights in the sum."""

    params: Tensor  # (D,), followed by the carried values (C,) of a model that has any
    cohort: Cohort
    weights: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that a round hands to the next: parameters (D,), carried values (C,) if the model has any, states of the parts."""

    round: int
    params: Tensor
    risk: Any = None
    aggregator: Any = None
    server: Any = None
    solver: Any = None
    averaging: Any = None
    personal: Any = None
    privacy: Any = None
    carried: Tensor | None = None
    kept: Any = None  # (n,) where the rows are that clients keep for the solver
    flights: Any = None  # the jobs of clients that are still at work, where these come and go

    @property
    def model(self) -> Tensor:
        """The shared model as engines take it: parameters, followed by carried values."""
        return join_model(self.params, self.carried)


@dataclass(frozen=True, eq=False)
class Pull:
    """Adds strength · (v − anchor) to the gradients of personal models v: a pull of each towards its anchor."""

    anchor: Tensor  # (D,) for all, or (K, D)
    strength: Tensor  # (K,) one number per client, or (K, D) one per parameter


@dataclass(frozen=True)
class RoundReport:
    """What one round did. `round` counts from 0, as in Python; logs, messages and reports in words count from 1.

    `loss` and `tail_loss` (its worst 10 %) are over the whole cohort at the start of the round if the risk asked for losses
    (`loss_from="start"`), else over the clients at work as they worked (`"work"`), which costs nothing.
    """

    round: int  # from 0
    loss: float  # mean over the clients
    tail_loss: float  # mean of the worst 10 % of them
    loss_from: Literal["start", "work"]  # when losses were taken
    risk: float | None  # the objective, where it is known
    cohort: int  # clients that were drawn
    trained: int  # clients that did local work
    seconds: float  # that the round took
    dropped: int = 0  # clients with a weight whose work did not arrive
    rejected: tuple[str, ...] = ()  # the clients whose update was not finite or absurdly large, and was left out
    epsilon: float | None = None  # what was spent up to the end of this round, under differential privacy
    missing: dict[str, str] = field(default_factory=dict)  # over a network: clients left out because of a fault, and which
    bytes_sent: int = 0  # over a network: by the server, to all clients
    bytes_received: int = 0  # over a network: by the server, from all clients
    bytes_by_client: dict[str, tuple[int, int]] = field(default_factory=dict)  # sent to and received from each
    run: str = ""  # the run's name
    failed_tries: tuple[str, ...] = ()  # over a network: why the round was tried again, each time
    clock: float | None = None  # simulated time at the end, where clients come and go (FedBuff)
    arrivals: tuple[tuple[str, float, int], ...] = ()  # there: who came back, how long its work took, and its staleness

    def __post_init__(self) -> None:
        if type(self.rejected) is not tuple or self.bytes_by_client or self.arrivals:  # lists where they were read from a file
            object.__setattr__(self, "arrivals", tuple((c, float(took), int(age)) for c, took, age in self.arrivals))
            object.__setattr__(self, "rejected", tuple(self.rejected))
            object.__setattr__(self, "failed_tries", tuple(self.failed_tries))
            object.__setattr__(self, "bytes_by_client", {c: tuple(pair) for c, pair in self.bytes_by_client.items()})


# ------------------------------------------------------------------------------------------------------------------------ risk


class ClientRisk(Protocol):
    """Law: weights are the (sub)gradient of the value; permutation-equivariant; finite for any finite losses."""

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The risk of losses (K,) under base weights (K,), of clients with these ids, given the state of the round before."""


@dataclass(frozen=True, eq=False)
class RiskTraits:
    """What a risk may offer."""

    needs_losses: bool = True  # whether the weights depend on the losses
    needs_ids: bool = field(default=True, metadata=OWN)  # whether it asks who the clients are
    keeps_base_weights: bool = field(default=False, metadata=OWN)  # the weights are the base weights, the state never changes
    full_participation: bool = False  # whether every client must take part in every round
    averaged: bool = False  # whether a run should report the mean of its iterates
    pure: bool = field(default=False, metadata=OWN)  # calls may come early or twice: nothing is noted outside the state
    unbounded: bool = field(default=False, metadata=OWN)  # a client that lies about its loss may get nearly all of the weight
    keeps_everyone: bool = field(default=False, metadata=OWN)  # all weights are positive, whatever the losses are
    # (*, losses, base_weights, weight_sum, sq_norms, lr): scales the server's step
    server_step: Callable[..., float] | None = None
    # (loss, base_weight, public): what a client finds alone
    client_weight: Callable[[Tensor, Tensor, Any], Tensor] | None = None
    # what weights need under secure sums: nothing, a quantile, a loss bound, or sums of losses over public groups
    client_form: Literal["base", "filter", "loss", "groups"] | None = None
    tracked: bool = False  # whether the server follows the risk's value from the losses
    tail: float = 1.0  # the share of clients that a filter keeps
    filters: bool = False  # whether clients are kept whole or not at all
    eta_every: int = 1  # rounds in which a filter uses one quantile
    quantile: QuantileSource | None = None
    groups: Mapping[str, str] | Callable[[str], str] | None = None  # the group of each client
    group_of: Callable[[str], str] | None = None
    step: float | None = None  # of a mixture over clients
    terms: Sequence[tuple[float, ClientRisk]] = ()  # of a sum of risks


class QuantileSource(Protocol):
    """Where Δ-FL takes the cohort's quantile from. Law: a finite number, between the smallest and the largest loss up to the
    source's own tolerance.
    """

    @property
    def reads_losses(self) -> bool:
        """Whether the server sees each loss; if not, clients filter themselves by the quantile that is released."""

    def __call__(self, losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
        """The weighted (1 − tail)-quantile, or what is released in its place: ()."""


@dataclass(frozen=True, eq=False)
class QuantileTraits:
    """What a source of quantiles may offer."""

    reads_losses: bool = True
    exact: bool = field(default=False, metadata=OWN)  # the quantile is read off the losses
    calibrated: Callable[..., PrivateQuantile] | None = None  # its noise is set by a privacy budget
    iterations: int | None = None  # of secure sums that find the quantile
    histogram: SecureHistogram | None = None  # counts of losses in bins, by secure sums
    tolerance: float = 0.0


# --------------------------------------------------------------------------------------------------------------------- solvers


class LocalSolver(Protocol):
    """A description of local work. Law: zero steps give a zero update.

    What a step cannot know from one parameter alone is done by the engine: it clips the gradient of a client over all
    parameters (`SolverTraits.clip_norm`), and passes each parameter's own rate to `step`.

    A solver that only has `prepare` (see SolverTraits) makes a round's solver when the round begins.
    """

    @property
    def batch_size(self) -> int | None:
        """Examples of a batch; None for all examples of the client."""

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """How many steps a client with `size` examples takes; `effort` is what it gets done of the epochs (or steps)."""

    def learning_rate(self, round_index: int) -> float:
        """The rate of a round."""

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Zeroed memory (e.g. momentum), each tensor shaped like `weights`."""

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """One step, in place, element by element: `weights` may be one client's (D,) or many clients' (K, …).

        Only `weights` and `memory` are written to; `gradient` may share memory with another parameter's. A `numbered` solver
        (SolverTraits) gets one more keyword, `number`: the number of the step, from 1 on, as a number or as one number per
        client in a float64 tensor that broadcasts to `weights`.
        """


class Schedule(Protocol):
    """A factor of the learning rate for each round, or for each local step. Law: positive and finite at 0, 1, …"""

    def __call__(self, index: int) -> float:
        """The factor in round `index`, or at local step `index`; both count from 0."""


class SgdRule(NamedTuple):
    """w ← w − γ (∇F(w) + λw + μ(w − w^t)), or with momentum v ← βv + g and w ← w − γv: what fast paths write out again."""

    momentum: float  # β
    weight_decay: float  # λ
    prox: float  # μ

    @property
    def is_plain(self) -> bool:
        """Whether a step is w ← w − γ∇F(w) and nothing else."""
        return not (self.momentum or self.weight_decay or self.prox)


@dataclass(frozen=True, eq=False)
class SolverTraits:
    """What a solver may offer."""

    prepare: Callable[[Any, Any], tuple[LocalSolver, Any]] | None = None  # (context, state): a round's solver, the next state
    public_only: bool = False  # whether what it prepares a round by is public
    efforts: Callable[[Cohort, Tensor], Tensor | None] | None = None  # (cohort, keys): how much each client gets done, (K,)
    straggler_share: float = 1.0  # 0: all clients get everything done, and `efforts` need not be asked
    sgd: SgdRule | None = field(default=None, metadata=OWN)  # if `step` is the step of SGD
    local_steps_each: Callable[..., Any] | None = field(default=None, metadata=OWN)  # `local_steps` of many clients, as arrays
    prox: float = 0.0  # μ of a proximal term
    with_prox: Callable[[float], LocalSolver] | None = None  # the solver with another μ
    with_epochs: Callable[[int], LocalSolver] | None = None  # the solver with another number of passes over the data
    for_own_model: Callable[[], LocalSolver] | None = None  # the solver for a client's own model
    numbered: bool = False  # whether `step` is told the `number` of the step: since the client's memory began, from 1 on
    clip_norm: float | None = None  # the engine scales the gradient of a client's loss down to this L2 norm, at every step
    step_factor: Callable[[int], float] | None = None  # the factor of the rate at local step 0, 1, … of a round
    rates: Mapping[str, float] | None = None  # the factor of the rate of parameters, by patterns of their names
    keeps: Callable[[int], int] | None = None  # (D): how many numbers a client keeps between rounds; None: nothing
    # (steps (K,), rate): the sum of these steps under a gradient of 1, in units of the rate, (K,) float64
    normalisers: Callable[[Tensor, float], Tensor] | None = None
    repeats: int = 1  # for how many steps in a row a batch is used
    # whether `step` is told its number, depends on it only by its remainder modulo `repeats`, and never asks a device
    by_turns: bool = field(default=False, metadata=OWN)
    adjusted_sgd: SgdRule | None = None  # if `step` is the step of SGD by a gradient that the engine has shifted or scaled
    split: float | None = None  # the share of a client's examples that all steps but the last see
    adapts: bool = False  # whether risks see the loss after the steps before the last
    adaptation: LocalSolver | None = None  # by which a client adapts the trained model to itself before it uses it
    finish: Callable[..., None] | None = None  # taken instead of the last `step`
    steps: int | None = None  # the number of steps, whatever the number of a client's examples; None: by epochs
    # (state, alpha (K,), change (K, width)): the next state, when a round's clients have changed their rows so
    after_rows: Callable[[Any, Tensor, Tensor], Any] | None = None
    # (state, total (D,), share, scale): the next state by the total alone; its clients have Σ α_k = share, and scale is the
    # rate times the length of their steps
    after_total: Callable[[Any, Tensor, float, float], Any] | None = None
    server_total: Callable[[Any, Tensor], Tensor] | None = (
        None  # (next state, total): what the server steps by instead (FedDyn)
    )
    plain_mean: bool = False  # the total is the plain mean over the cohort, whatever the base weights are
    own_prox: Callable[[Tensor, int], Tensor] | None = None  # (alpha (K,), n): `Cohort.prox` of clients, (K,)
    shift: Tensor | None = None  # c (D,): the engine adds c − row_k to every gradient of client k (SCAFFOLD)
    # (rows (K, D), updates (K, D), steps (K,), rate, prox (K,)): the rows of clients with a `shift` after their steps
    next_rows: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor] | None = None
    with_sent_clip: Callable[[float], LocalSolver] | None = None  # the solver for clients whose updates are clipped when sent
    shared_gradient: Tensor | None = None  # g (D,): the engine adds g − ∇F_k(w^t) to every gradient of client k (FedDane)
    preconditioner: Tensor | None = None  # A (D,): the engine divides every gradient by it
    solver: LocalSolver | None = None  # the solver that this one wraps


# ----------------------------------------------------------------------------------------------- aggregators and the server


class Aggregator(Protocol):
    """Law: permutation-invariant; if linear, the total is the sum of the totals over chunks under the same weights.

    A linear aggregator is therefore applied chunk by chunk, or client by client; it has no state and gets no losses.
    """

    @property
    def linear(self) -> bool:
        """Whether totals over chunks of a cohort add up to the total over the cohort."""

    def __call__(
        self, updates: Tensor, weights: Tensor, *, losses: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """The total (D,) of updates (K, D) under weights (K,) that sum to 1, and the next state."""


@dataclass(frozen=True, eq=False)
class AggregatorTraits:
    """What an aggregator may offer."""

    linear: bool = False
    needs_losses: bool = False
    needs_keys: bool = False  # whether it is called with keys=(K,), a random stream of each client in this round
    weighted_sum: bool = field(default=False, metadata=OWN)  # the total is Σ weights · updates and nothing else
    clips_to: float | None = field(default=None, metadata=OWN)  # the same of updates clipped to this norm
    picks_one: bool = field(default=False, metadata=OWN)  # the total is one client's update, whatever the positive weights are
    picks_large_loss: bool = field(default=False, metadata=OWN)  # … and that of a client with one of the largest losses
    normalises: Aggregator | None = None  # gets updates that the round has divided by the length of their steps (FedNova)
    around: Aggregator | None = None  # linear, applied to updates minus the last total, which is public and then added again
    steps: float | None = None  # a public number in the place of the cohort's mean length of steps
    keeps_total: bool = False  # whether its state is the total of the round before (centred clipping)


class ServerOptimizer(Protocol):
    """Turns the aggregated update into the next parameters. Law: a zero update from a fresh state changes nothing."""

    def begin(self, params: Tensor) -> Any:
        """The state before the first round, at w^0."""

    def step(self, params: Tensor, total: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The next parameters (D,) and the next state."""


@dataclass(frozen=True, eq=False)
class ServerTraits:
    """What a server optimiser may offer."""

    linear_rate: float | None = field(default=None, metadata=OWN)  # γ, if the step is w + γ · total


class Averaging(Protocol):
    """Which point a run reports and serves, given its iterates w^0, w^1, …; training itself is not changed."""

    def begin(self, params: Tensor) -> Any:
        """The state before the first round, at w^0."""

    def update(self, params: Tensor, state: Any) -> Any:
        """The state after a round that ended at `params`."""

    def iterate(self, params: Tensor, state: Any) -> Tensor:
        """The point to report after that round."""


class Sampler(Protocol):
    """Law: positions are distinct and in range, weights positive and summing to 1; a pure function of (seed, round)."""

    def __call__(self, round_index: int, alpha: Tensor, *, clients_per_round: int, seed: int) -> Cohort:
        """The cohort of a round, of clients with base weights `alpha` (n,)."""


@dataclass(frozen=True, eq=False)
class SamplerTraits:
    """What a sampler, or an averaging rule, may offer."""

    everyone: bool = False  # whether all clients take part in every round
    independent: bool = False  # whether each client takes part by a coin of its own (Poisson)
    by_nodes: bool = False  # whether that coin is the node's secret, and all nodes answer alike (NodePoisson)
    by_weight: bool = False  # whether clients are drawn by their base weights
    accounted: bool = field(default=False, metadata=OWN)  # whether the privacy accountant knows these cohorts
    share: float = 1.0  # of clients_per_round that is drawn
    separation: int | None = field(default=None, metadata=OWN)  # rounds of a client are at least so far apart; None: any
    pure: bool = field(default=False, metadata=OWN)  # calls may come early or twice
    buffered: Any = None  # the rule by which clients come and go on a simulated clock (FedBuff), where there are no cohorts


# ------------------------------------------------------------------------------------------------------------- personalisation


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
    losses: Callable[..., Tensor] | None = None  # (context, params, cohort, rows): what the risk sees instead of F_k(w), (K,)
    finetunes: bool = False  # whether all clients train once more after the rounds, also those that were never drawn
    serves_all: bool = False  # whether clients that were never drawn are served what `models` gives, and not the shared model
    keeps_layers: bool = False  # whether clients keep layers that stay as they began in the shared model
    sums_models: bool = False  # whether the server sees clients' models, or what they add up to
    solver: LocalSolver | None = None  # of the personal work, if it is not the algorithm's
    keeps_carried: bool = field(default=False, metadata=OWN)  # whether a client's model may have carried values of its own


class SolverMemory(Protocol):
    """What clients keep for their solver between rounds: `runs.solver_rows` on this machine, or on the nodes of a network.

    The state that a round hands to the next are the `places` (n,), which say where each client's row is.
    """

    def begin(self, path: Path | None = None) -> Tensor:
        """The places before the first round; rows on this machine go to a new file at `path`, or a temporary one."""

    def resume(self, places: Tensor, path: Path | None) -> None:
        """Go on from a checkpoint that holds these places."""

    def given(self, places: Tensor, clients: Tensor) -> Tensor:
        """What the engine is told of the rows of clients at positions (K,): `Cohort.rows`."""

    def change(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """By what the rows of clients at positions (K,) have changed, (K, width), given the `rows` of their work."""

    def write(self, places: Tensor, workers: Cohort, work: LocalWork | None) -> Tensor:
        """The places after a round's work."""

    def flush(self) -> None:
        """Bring the rows to disk, before a checkpoint is written."""

    def on_saved(self, places: Tensor) -> None:
        """A checkpoint with these places was written."""


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

    def losses(self, state: Any, params: Tensor, cohort: Cohort) -> Tensor | None:
        """The losses (K,) that the risk sees, if the method has it see others than the shared model's."""

    def updates(self, state: Any, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Tensor | None:
        """What clients send (K, D), if the method has them send anything but the update of the solver's work."""

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


# -------------------------------------------------------------------------------------------------------------------- privacy


@dataclass(frozen=True)
class RunSize:
    """What the amount of noise of a run depends on."""

    clients: int
    clients_per_round: int
    rounds: int
    dimension: int  # of the model
    seed: int
    ids: Sequence[str] = field(default=(), repr=False, compare=False)  # of the training clients


class Privacy(Protocol):
    """A description of protection: differential privacy or secure aggregation (equipoise.privacy)."""

    def check(self, algorithm: Algorithm) -> None:
        """Refuse an algorithm that the protection does not go with."""

    def protect(self, algorithm: Algorithm, size: RunSize) -> Protection:
        """The protection of one run."""


@dataclass(frozen=True, eq=False)
class PrivacyTraits:
    """What a description of protection may offer."""

    protect: Callable[[Algorithm, RunSize], Protection] | None = None
    clip: float | None = None  # the bound on updates; None without differential privacy
    noise: Literal["central", "distributed"] = "central"
    only_sums: bool = False  # whether the server sees secure sums alone
    fewest: int | None = None  # clients whose sum is unmasked; None: as the rule of noise says, or nothing is masked
    source: Literal["seeded", "system"] = "system"  # of the noise
    correlated: bool = False  # whether the noise is correlated over rounds
    loss_bound: float | None = None  # public: larger losses count as this one in the weights that clients find alone

    @property
    def sums_alone(self) -> bool:
        """Whether clients are asked for secure sums, and for nothing of one client."""
        return self.only_sums or self.noise == "distributed"


@dataclass(frozen=True, eq=False)
class Combined:
    """The local work of a round, aggregated: the total (D,), and the next states of the aggregator and the protection."""

    total: Tensor
    work: LocalWork | None  # None where the server does not see it
    aggregator: Any = None
    privacy: Any = None
    carried: Tensor | None = None  # (C,) the mean of clients' carried values, as they are averaged; None: they stay
    mass: float | None = None  # what the plan's weights of the clients in a secure sum add up to; None: by who has arrived
    lost: bool = False  # whether the round's sum was lost, so that the total stands for nobody's work


class Protection(Protocol):
    """How a run finds weights and sums: in the open (`round.Unprotected`), by secure sums, or with noise.

    Law: infinite clip and zero noise equal the plain run with the same weights and denominator, bit for bit (central noise).
    """

    @property
    def in_the_open(self) -> bool:
        """Whether the server sees single clients, and so may name them in errors and reports."""

    @property
    def without_clients(self) -> bool:
        """Whether a round without any client still releases something (noise)."""

    @property
    def rounds_allowed(self) -> int:
        """How many rounds the run may have: all, or as many as a privacy budget allows."""

    def begin(self) -> Any:
        """The state before the first round."""

    def weigh(self, cohort: Cohort, losses: Tensor | None, state: Any) -> tuple[RiskValue, float | None]:
        """The cohort's risk, and the number that weights are divided by (None: their sum). `state` is the risk's."""

    def combine(self, state: ServerState, engine: Engine, solver: LocalSolver, plan: Plan, sent: Tensor | None) -> Combined:
        """The local work of a round and its total. `sent` (K, D) are updates that clients made without the solver."""

    def epsilon_after(self, rounds: int) -> float | None:
        """ε for whoever receives the models of the first `rounds` rounds; None without differential privacy."""

    def spent(self, state: Any, rounds: int) -> Spent | None:
        """What the run has spent of its privacy budget; None without differential privacy."""

    def describe(self) -> str | None:
        """The noise of the run as text, for its checkpoints: a run goes on with the noise that it began with."""

    def privacy(self, state: Any) -> PrivacyTable:
        """ε of the run by observer: the public, a node, the server."""

    @property
    def book(self) -> ReleaseBook | None:
        """What the run writes into the release ledger; None for a run in the open."""

    def open_ledger(self, ledger: Ledger, *, data: str, run: str, once: bool) -> None:
        """Write all releases of the run into a ledger; with `once` none of them may be begun twice."""

    def resume(self, state: Any, rounds: int) -> None:
        """Resume from a checkpoint that was written after `rounds` rounds."""

    def begin_evaluation(self, round_index: int) -> None:
        """Clients are about to be evaluated exactly, after `round_index` rounds."""


class ClipRule(Protocol):
    """How a clip bound moves over the rounds, by a private count. Law: bounds stay positive."""

    @property
    def ratio(self) -> float:
        """What the count costs, relative to all other releases of a round."""

    def next_bound(self, bound: float, share: float) -> float:
        """The bound after a round in which a noisy `share` of the updates were within `bound`."""


# -------------------------------------------------------------------------------------------------------------------- attacks


class Attack(Protocol):
    """What malicious clients do. Law: the same clients and the same noise on every engine.

    `share` of the training clients (to the nearest) are malicious, drawn by `seed`.
    """

    @property
    def share(self) -> float:
        """The share of malicious clients."""

    @property
    def seed(self) -> int:
        """What decides which clients are malicious, and the noise of their attack."""


@dataclass(frozen=True, eq=False)
class AttackTraits:
    """What an attack may offer: it poisons training data, or what clients send, or both."""

    share: float | None = None
    seed: int | None = None
    poison: Callable[..., Any] | None = None
    corrupt: Callable[..., Any] | None = None
    # (clients, train, classes): marked examples on which a backdoor is judged, and the positions of their clients
    probe: Callable[..., Any] | None = None
    omniscient: bool = False  # whether `corrupt` sees the honest updates of the whole cohort


# -------------------------------------------------------------------------------------------------------------------- engines


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

        The answers are (n,) and (n,) float64. `which` is given where a run evaluates a sample of its clients; an engine that
        does not take it works in all other runs.
        """

    def evaluate_own(self, models: Tensor, clients: ClientSet, which: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and error of the clients at positions `which` (K,), each at its own model (K, D): (K,) and (K,)."""


@dataclass(frozen=True, eq=False)
class EngineTraits:
    """What an engine may offer."""

    device: torch.device | str = "cpu"
    round_context: Callable[[], AbstractContextManager[None]] = nullcontext  # in which the engine wants each round to run
    look_ahead: LookAheadEngine | None = None  # if the next round can begin while one is under way
    expect: Callable[[Tensor], None] | None = None  # told positions of the next round's clients, to read their examples ahead
    network: Network | None = None  # if clients are on other machines
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


@dataclass(frozen=True, eq=False)
class MetricTraits:
    """What a metric of one client, a function of (outputs, targets), may offer."""

    higher_is_better: bool = True
    totals: Callable[[Any, Any], Tensor] | None = None  # sums (k,) over some examples
    finish: Callable[[Tensor], Any] | None = None  # the value, of the sums over all examples


# ------------------------------------------------------------------------------------------------------------------ observers


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
