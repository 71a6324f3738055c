"""Early stopping: a run ends when a figure of its evaluations has not improved for some time, and reports its best iterate."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from equipoise.errors import IncompatibleParts, InvalidParameter, require, require_integer, require_number, unknown_name

if TYPE_CHECKING:  # a configuration has such a rule, and reading one need not wait for torch
    from equipoise.algorithm import Algorithm
    from equipoise.client_metrics import ClientMetrics
    from equipoise.client_table import ClientTable
    from equipoise.data.clients import FederatedData
    from equipoise.metrics import Summary
    from equipoise.types import PersonalWork, ServerState

SPLITS = ("train", "validation", "test")
MEANS = ("loss", "error")  # figures that secure sums give, too


@dataclass(frozen=True)
class EarlyStopping:
    """End a run when `figure` has not improved for `patience` evaluations in a row, and report the best iterate.

    `figure` is `split.name`, e.g. "validation.error_90": of the clients of that split the mean of the error, the loss or a
    metric ("error", "loss", "f1"), the value that 90 % of them reach ("error_90"), or the mean of the worst tenth
    ("error_worst_10"). Less is better for errors and losses; metrics say which way they go. An evaluation improves on the best
    one if it is better by more than `min_change`. Evaluations come every `evaluate_every` rounds, or else after every round.

    Result, client table and summary are then of the best iterate, and `history.stopped` says when and why. A run that reaches
    its last round first ends as if there were no stopping.

    In a federation a client may miss an evaluation. An evaluation over other clients than the best one is ignored. After
    `patience` of them in a row, the search for the best iterate starts again with these clients.

    The figures of the validation clients decide which model is released, and no noise protects these clients. Differential
    privacy therefore refuses early stopping unless `public` declares that they are public.

    Source: Prechelt 1998, "Early stopping, but when?", with a fixed patience.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=3, test_clients=3, examples=20)
    >>> stop = eq.EarlyStopping(patience=1)
    >>> result = eq.train(eq.models.Softmax(20, 10), data, rounds=4, clients_per_round=3, evaluate_every=1, stop=stop)
    >>> result.rounds <= 4
    True
    """

    figure: str = "validation.error_90"
    patience: int = 5
    min_change: float = 0.0
    public: bool = False

    def __post_init__(self) -> None:
        fix = 'E.g. EarlyStopping("validation.error_90", patience=5).'
        good = isinstance(self.figure, str) and self.split in SPLITS and bool(self.name)
        require(good, "figure", "must be a split and a figure, as in validation.error_90", self.figure, fix)
        require_integer("patience", self.patience, 1, fix="It counts evaluations.")
        require_number("min_change", self.min_change, "[0, ∞)")
        require(isinstance(self.public, bool), "public", "must be True or False", self.public)

    @property
    def split(self) -> str:
        """The split whose clients are looked at."""
        return self.figure.partition(".")[0]

    @property
    def name(self) -> str:
        """The name of the figure of these clients."""
        return self.figure.partition(".")[2]

    def refuse_unknown(self, splits: Iterable[str], metrics: Iterable[str], personal: bool = False) -> None:
        """Refuse a split that the data do not have, and a figure that no evaluation gives; the error lists those that exist."""
        splits = list(splits)
        if self.split not in splits:
            rule = f"must be of a split that the data have ({', '.join(splits)})"
            fix = "Split clients by data.split_clients, or examples inside clients by data.split_examples."
            raise InvalidParameter("figure", rule, self.figure, fix)
        columns = ("loss", "error", *metrics, *(("shared_loss", "shared_error") if personal else ()))
        known = [name for column in columns for name in (column, f"{column}_90", f"{column}_worst_10")]
        if self.name not in known:
            rule = f"must be a figure of the {self.split} clients"
            raise InvalidParameter("figure", rule, self.figure, unknown_name("figure", self.name, known))

    def value(self, clients: ClientTable) -> tuple[float, bool]:
        """The figure in a table of clients, and whether more of it is better."""
        summaries = clients.summaries()[self.split]
        for ending in ("_90", "_worst_10", ""):
            if self.name.endswith(ending) and (summary := summaries.get(self.name.removesuffix(ending))) is not None:
                return _figure(summary, ending), summary.higher_is_better
        return math.nan, False  # own models that nobody has yet

    def seen(self, state: StopState, clients: ClientTable, iterate: ServerState) -> StopState:
        """The state after an evaluation of `clients` at an iterate. A value that is no number is no improvement."""
        value, higher = self.value(clients)
        of = name_evaluated(clients, self.split)
        others = state.best is not None and of != state.clients != ""
        if others and math.isfinite(value) and state.passed_over + 1 < self.patience:
            return replace(state, passed_over=state.passed_over + 1)
        gain = value - state.value if higher else state.value - value
        if math.isfinite(value) and (state.best is None or others or gain > self.min_change):
            return StopState(value, _to_keep(iterate), 0, clients=of)
        waited = state.waited + 1
        return replace(state, waited=waited, passed_over=0, over=state.best is not None and waited >= self.patience)


def name_evaluated(table: ClientTable, split: str) -> str:
    """A hash that tells the clients that figures of a split are over: equal for evaluations of the same clients."""
    told = json.dumps([sorted(table.where(split).client), sorted(table.not_evaluated.get(split, ()))])
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


def refuse_stop(
    stop: EarlyStopping,
    data: FederatedData,
    metrics: ClientMetrics,
    algorithm: Algorithm,
    personal: PersonalWork | None,
    *,
    network: bool,
) -> None:
    """Refuse a stopping rule that does not go with the run."""
    from equipoise.privacy.lookers import refuse_looking, trains

    given = isinstance(stop, EarlyStopping)
    require(given, "stop", "must be an equipoise.EarlyStopping", stop, 'E.g. EarlyStopping("validation.error_90", patience=5).')
    keeps_rows = personal is not None and personal.keeps_rows
    stop.refuse_unknown(data.splits, metrics.functions, keeps_rows)
    if keeps_rows:
        raise IncompatibleParts(
            "EarlyStopping reports the best iterate, but clients' own models are kept as they are after the last round.",
            "Leave stop out, or personalise after training: personal.Finetuning().",
        )
    if (network or stop.split == "train") and algorithm.traits.privacy.sums_alone and stop.name not in MEANS:
        raise IncompatibleParts(
            f"EarlyStopping needs {stop.figure}, but under secure sums the server sees the mean over clients alone.",
            f'Use "{stop.split}.error" or "{stop.split}.loss".',
        )
    if trains(data, stop.split):
        refuse_looking("early stopping", algorithm)
    if algorithm.private and not stop.public:
        raise IncompatibleParts(
            f"EarlyStopping chooses what is released by {stop.figure}, which no noise hides: ε would not cover these clients.",
            "Declare that they are public by EarlyStopping(…, public=True), or leave stop out.",
        )


def _figure(summary: Summary, ending: str) -> float:
    return {"": summary.mean, "_90": summary.tail_90, "_worst_10": summary.worst_10}[ending]


def _to_keep(iterate: ServerState) -> ServerState:
    """What a report of this iterate needs later: the parameters, and which point of the iterates is reported."""
    return replace(iterate, risk=None, aggregator=None, server=None, solver=None, personal=None, privacy=None, kept=None)


@dataclass(frozen=True, eq=False)
class StopState:
    """The best evaluation so far, the iterate it was of, and how many evaluations have been no better since."""

    value: float = math.nan
    best: ServerState | None = None
    waited: int = 0
    over: bool = False  # whether the run ends here
    clients: str = ""  # a hash of the clients that the best evaluation is of; empty in checkpoints of earlier versions
    passed_over: int = 0  # evaluations in a row that were of other clients


@dataclass(frozen=True)
class Stopped:
    """When and why a run was stopped, and which round is reported."""

    figure: str  # e.g. "validation.error_90"
    value: float  # of the iterate that is reported
    reported: int  # rounds of that iterate
    rounds: int  # rounds that were run
    evaluations: int  # in a row without improvement

    def __str__(self) -> str:
        times = f"{self.evaluations} evaluation{'s' if self.evaluations > 1 else ''}"
        return (
            f"Stopped after {self.rounds} rounds: {self.figure} had not improved for {times}. The model after "
            f"{self.reported} rounds is reported, at {self.value:.4g}."
        )
