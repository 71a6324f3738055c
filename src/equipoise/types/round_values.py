"""The values that pass between the parts of a round: the cohort, its risk, its work, the server's state and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from equipoise.core.carried import join_model


@dataclass(frozen=True, eq=False)
class Cohort:
    """Some clients of one round: positions in the training set, base weights, and columns that travel with them by name.

    Engines know the columns `effort` (epochs or steps that each client gets done), `rows` (what each has kept for its solver),
    `prox` (the strength of its pull to the round's model) and `shares` (π_k, its weight in the aggregate, for attacks).
    """

    round: int  # counted from 0
    seed: int  # of the run
    clients: Tensor  # (K,) int64, positions in data.train
    weights: Tensor  # (K,) float64, sums to 1 over the cohort as it was drawn
    inclusion: Tensor | None  # (K,) float64, the probability with which each client enters a cohort; None: not known
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (K, …) each
    rate_of: int | None = None  # the round whose learning rate holds; None: this one's

    def __len__(self) -> int:
        return self.clients.shape[0]

    @property
    def effort(self) -> Any:
        """How much each client gets done, (K,) int64; None: all of the solver's."""
        return self.columns.get("effort")

    @property
    def rows(self) -> Tensor | None:
        """What each client has kept for its solver since its last round, (K, width)."""
        return self.columns.get("rows")

    @property
    def prox(self) -> Tensor | None:
        """The strength with which each client is pulled to the round's model, (K,); None: by the solver."""
        return self.columns.get("prox")

    @property
    def shares(self) -> Any:
        """The clients' weights in the aggregate, (K,); None: nobody asks, or not known."""
        return self.columns.get("shares")

    @property
    def rate_round(self) -> int:
        """The round whose learning rate the clients work with."""
        return self.round if self.rate_of is None else self.rate_of

    def after_training(self) -> Cohort:
        """The cohort for work after the last round: at the learning rate of that round, since this one never takes place."""
        return replace(self, rate_of=max(self.round - 1, 0))

    def having(self, **columns: Tensor | None) -> Cohort:
        """The cohort with these columns; None takes one away."""
        both = {**self.columns, **columns}
        return replace(self, columns={name: column for name, column in both.items() if column is not None})

    def take(self, keep: Tensor | slice) -> Cohort:
        """The sub-cohort at a boolean mask, positions or a slice; base weights are kept as they are."""
        columns = {
            name: column[keep if isinstance(keep, slice) else keep.to(column.device)] for name, column in self.columns.items()
        }
        inclusion = None if self.inclusion is None else self.inclusion[keep]
        return Cohort(self.round, self.seed, self.clients[keep], self.weights[keep], inclusion, columns, self.rate_of)


@dataclass(frozen=True, eq=False)
class RiskValue:
    """A risk of the cohort's losses: its value, its gradient in the losses (the weights), and the next state."""

    value: Tensor  # ()
    weights: Tensor  # (K,)
    state: Any = None  # what the risk keeps for the next round


@dataclass(frozen=True, eq=False)
class LocalWork:
    """What a cohort sends back."""

    update: Tensor  # (K, D) one by one, or (D,) already summed under weights
    sq_norms: Tensor  # (K,) squared L2 norms of the clients' updates
    losses: Tensor  # (K,) mean loss over the batches of the local work, seen for free
    carried: Tensor | None = None  # as carried values are averaged: (K, C), NaN where none count; or (C,), their mean
    rows: Tensor | None = None  # (K, width), what each client keeps for its solver until its next round; it is not sent
    carried_mass: float = 0.0  # the sum of the weights that a mean of carried values (C,) is over
    mass: float | None = None  # what the weights of the clients in a secure sum add up to; None: by who has arrived
    told: bool = True  # whether the server sees single clients' norms and losses
    params: Tensor | None = None  # (D,) the next parameters, where the engine has taken the server's step

    @cached_property
    def arrived(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which updates can be used, (K,): those that cannot have an infinite norm."""
        finite: np.ndarray[Any, np.dtype[np.bool_]] = np.isfinite(self.sq_norms.cpu().numpy())
        return finite


class SentUpdates(NamedTuple):
    """What clients send that is not the solver's work for the shared model."""

    updates: Tensor  # (K, D)
    carried: Tensor | None = None  # as `LocalWork.carried`, (K, C); None: all of it stays with the clients


@dataclass(frozen=True, eq=False)
class Job:
    """The local work of one model: its parameters, who trains it, and their weights in the sum."""

    params: Tensor  # (D,), followed by the carried values (C,) of a model that has any
    cohort: Cohort  # who trains it
    weights: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that a round hands to the next: parameters (D,), carried values (C,) if the model has any, states of the parts."""

    round: int  # how many rounds are done
    params: Tensor  # (D,) of the shared model
    risk: Any = None  # the state of the risk; None: it has none
    aggregator: Any = None  # the state of the aggregator; None: it has none
    server: Any = None  # the state of the server optimiser; None: it has none
    solver: Any = None  # the state of the solver; None: it has none
    averaging: Any = None  # the state of the averaging; None: it has none
    personal: Any = None  # the state of the personalisation; None: it has none
    privacy: Any = None  # the state of the protection; None: it has none
    carried: Tensor | None = None  # (C,) values that training changes besides parameters; None: the model has none
    kept: Any = None  # (n,) where the rows are that clients keep for the solver
    flights: Any = None  # the jobs of clients that are still at work, where these come and go

    def having(self, changed: Mapping[str, Any]) -> ServerState:
        """The state with these fields."""
        return replace(self, **changed) if changed else self

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
    skipped: str = ""  # over a network: why the round was skipped, and left the model as it was
    tail_share: float | None = None  # of the cohort's clients, those in the tail, where bins of losses find it (as they say)
    stood_out: tuple[tuple[str, str, float, float], ...] = ()  # over a network, unless protected: `standing_out.extremes`
    clients: tuple[str, ...] | None = None  # the ids of those that were drawn; None: secret, since clients are protected

    def __post_init__(self) -> None:
        if type(self.rejected) is not tuple or self.bytes_by_client or self.arrivals:  # lists where they were read from a file
            object.__setattr__(self, "arrivals", tuple((c, float(took), int(age)) for c, took, age in self.arrivals))
            object.__setattr__(self, "stood_out", tuple(tuple(each) for each in self.stood_out))
            object.__setattr__(self, "rejected", tuple(self.rejected))
            object.__setattr__(self, "clients", None if self.clients is None else tuple(self.clients))
            object.__setattr__(self, "failed_tries", tuple(self.failed_tries))
            object.__setattr__(self, "bytes_by_client", {c: tuple(pair) for c, pair in self.bytes_by_client.items()})
