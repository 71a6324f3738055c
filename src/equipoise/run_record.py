"""The record of a run: all that a report needs of a finished run, without its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from equipoise.algorithm import Algorithm
from equipoise.client_table import ClientTable, weights_in_means
from equipoise.core.error_names import error_words
from equipoise.core.words import counted
from equipoise.errors import IncompatibleParts, InvalidParameter, require_integer
from equipoise.metrics import summarise
from equipoise.observers import History
from equipoise.report import export_figures, write_report
from equipoise.report.formats import SPLITS, Judged
from equipoise.report.notices import about_runs
from equipoise.run_summary import RunSummary
from equipoise.subgroups import Subgroup, subgroup_lines

if TYPE_CHECKING:
    from equipoise.experiment.recorded import RecordedAlgorithm
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.observer_table import PrivacyTable


@dataclass(frozen=True)
class NoTraining:
    """Stands for the algorithm of a model that was evaluated and not trained."""

    sampler: None = None
    personal: None = None
    privacy: None = None

    def __repr__(self) -> str:
        return "evaluated as it is, without training"


@dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """A finished run without its model: all that a report needs."""

    name: str  # what reports call the run
    algorithm: Algorithm | RecordedAlgorithm | NoTraining  # what was minimised, and how
    seed: int  # of cohorts and batches; under differential privacy of batches
    clients: ClientTable  # one row per client and split
    history: History  # figures of every round and evaluation
    seconds: float  # that the run took
    data: str  # the name of the data
    rounds: int  # that were run
    clients_per_round: int  # that were drawn for each round
    error_is_loss: bool = False  # whether the task has no error besides its loss
    epsilon: Spent | None = None  # the privacy spent, under differential privacy
    privacy: PrivacyTable | None = None  # ε by observer; None for runs of version 0.1
    sampled: dict[str, tuple[int, int]] | None = None  # clients evaluated and clients there are, by split; None: all of them
    error_name: str = ""  # what the error measures, e.g. "squared error"; empty if it is not known
    target: str = ""  # the column that is predicted, if the data are a table
    inputs: tuple[str, ...] = ()  # the columns that it is predicted from, if the data are a table
    data_version: str = ""  # tells data of one name apart: equal for runs on the same data
    at_least: int = 0  # clients with fewer examples are left out, see `judged_by`
    left_out: Mapping[str, int] = field(default_factory=dict)  # how many of them there are, by split
    left_out_error: Mapping[str, float] = field(default_factory=dict)  # and the mean error that they see, by split

    def __repr__(self) -> str:
        about = f"{self.name!r}, seed {self.seed}, {counted(self.rounds, 'round')} on {self.data!r}"
        return f"{type(self).__name__}({about})\n{self.summary()}"

    @property
    def measured(self) -> str:
        """Which error it is, and of which column, e.g. "squared error of price"; "error" or "loss" if that is not known."""
        named = error_words(self.error_name, self.target)
        if self.error_is_loss:
            return f"loss ({named})" if named else "loss"
        return named or "error"

    @property
    def protects_clients(self) -> bool:
        """Whether the run protects single clients, by secure sums or differential privacy: pages and cards name none then."""
        return self.algorithm.privacy is not None or self.epsilon is not None

    @property
    def cohorts(self) -> list[tuple[str, ...]]:
        """The ids of the clients that were drawn in each round, in order; secret where single clients are protected."""
        if self.protects_clients:
            why = "Who took part is secret: the run protects single clients, by secure sums or differential privacy."
            raise IncompatibleParts(why, "How many took part in each round is in history.rounds.")
        return [report.clients or () for report in self.history.rounds]

    @property
    def knows_unseen(self) -> bool:
        """Whether it is known which clients the model was trained on: not of a model that was only evaluated."""
        return not isinstance(self.algorithm, NoTraining)

    @property
    def judged_on(self) -> str:
        """The split that summaries are about: test clients if there are any, else validation, else training clients."""
        return next(s for s in ("test", "validation", "train") if s in self.clients.split)

    def summary(self, split: str | None = None, *, at_least: int = 0) -> RunSummary:
        """Mean, 90th percentile, worst 10 % and standard deviation over the clients of a split; without one, of `judged_on`.

        `at_least=30` leaves out clients with fewer examples in this split; the text says how many.
        """
        if at_least != 0:
            return self.judged_by(split, at_least).summary()
        split = split or self.judged_on
        judged = self.judged_by(split)
        rows = judged.clients.where(split)
        benign = rows.benign
        figures, sample = rows.summaries()[split], self.sample_of(split)
        answered, weights = benign.trivial_error, weights_in_means(benign, split)
        trivial = None if answered is None else summarise(answered, benign.size, weights)
        return RunSummary(
            self.name, split, Judged.of([judged]), figures["error"], figures["loss"], figures.get("shared_error"),
            len(rows) - len(benign), sample, {} if sample is None else rows.intervals(split),
            {name: figures[name] for name in rows.metrics}, tuple(rows.personal_metrics), self.error_name, self.target,
            trivial, rows.trivial_answer, tuple(subgroup_lines({self.name: [judged]})), rows.not_evaluated.get(split, {}),
            self.protects_clients, "" if self.privacy is None else self.privacy.noise,
            tuple(about_runs({self.name: [judged]}, named=True)),  # for whoever has the run, not for a page
        )  # fmt: skip

    def judged_by(self, split: str | None = None, at_least: int = 0) -> Self:
        """The record whose summaries are about `split`: it has no rows of splits that would be judged instead.

        `at_least` leaves out the test and validation clients with fewer examples, and training clients if they are judged.
        """
        if at_least != 0:
            return self.judged_by(split)._without_small_clients(at_least)
        if split is None or split == self.judged_on:
            return self
        self.clients.where(split)  # refuses a split that is not there
        order = ("train", "validation", "test")
        kept = order[: order.index(split) + 1]
        rows = torch.tensor([i for i, each in enumerate(self.clients.split) if each in kept])
        return replace(self, clients=self.clients.take(rows))

    def _without_small_clients(self, at_least: int) -> Self:
        """The record without test and validation clients of fewer than `at_least` examples, and how many of them there were.

        Training clients stay unless the run is judged on them. Rows that are means over clients have no sizes to go by.
        """
        require_integer("at_least", at_least, 0)
        if at_least <= self.at_least:
            return self
        table, judged = self.clients, self.judged_on
        rows = table.where(judged)
        if rows.clients_in_mean is not None:
            raise InvalidParameter("at_least", "must be 0 for runs of which means alone are known", at_least, "Leave it out.")
        if not bool((rows.benign.size >= at_least).any()):
            most, kind = int(rows.size.max()), SPLITS.get(judged, judged)
            rule = f"must leave a client, and no {kind} client has more than {most} examples"
            raise InvalidParameter("at_least", rule, at_least, "Lower it.")
        left_out, left_out_error = {}, {}
        for split in {*table.split} - ({"train"} if judged != "train" else set()):
            benign = table.where(split).benign
            errors = benign.served_error[benign.size < at_least].double()
            before = self.left_out.get(split, 0)
            left_out[split] = before + len(errors)
            if left_out[split]:
                total = float(errors.sum()) + (before * self.left_out_error[split] if before else 0.0)
                left_out_error[split] = total / left_out[split]
        spared = torch.tensor([split == "train" and judged != "train" for split in table.split])
        rest = table.take(((table.size >= at_least) | spared).nonzero().flatten())
        return replace(self, clients=rest, at_least=at_least, left_out=left_out, left_out_error=left_out_error)

    def subgroups(self, attribute: str, split: str | None = None) -> list[Subgroup]:
        """Mean, 90th percentile and gap of the clients of each value of an attribute, with 95 % intervals, worst first."""
        return self.clients.subgroups(attribute, split or self.judged_on)

    def sample_of(self, split: str) -> tuple[int, int] | None:
        """How many clients of a split were evaluated and how many there are; None if all of them were evaluated."""
        evaluated, every = (self.sampled or {}).get(split, (0, 0))
        return (evaluated, every) if evaluated < every else None

    def report(self, path: str | Path, *, title: str | None = None, at_least: int = 0) -> Path:
        """Write one HTML page that opens offline, under a `title`; `at_least` is that of `summary`."""
        return write_report([self.judged_by(at_least=at_least)], path, title=title)

    def figures(self, folder: str | Path, format: str | Iterable[str] = "pdf", *, at_least: int = 0) -> list[Path]:
        """Write each figure of the report as a file for a paper ("pdf", "svg" or "png", or several); returns their paths.

        `at_least` is that of `summary`.
        """
        return export_figures([self.judged_by(at_least=at_least)], folder, format)
