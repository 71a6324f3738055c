"""The result of a run: the model, a table with one row per client, and the history."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import engine_traits
from equipoise.core.error_names import error_definition, error_words
from equipoise.core.files import DurableFile, move, write_atomically
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter, NotWritten
from equipoise.metrics import Interval, Summary, mean_interval, percentile_interval, summarise, summarise_metric
from equipoise.observers import History
from equipoise.report import write_report
from equipoise.subgroups import NO_VALUE, Subgroup, subgroups_of
from equipoise.types import Engine, PersonalWork, ServerState

if TYPE_CHECKING:
    from equipoise.core.signature import Signature
    from equipoise.core.task import Task
    from equipoise.data.schema import Schema
    from equipoise.experiment.recorded import RecordedAlgorithm
    from equipoise.privacy.accounting import Spent
    from equipoise.privacy.observer_table import PrivacyTable
    from equipoise.risk.groups import Groups
    from equipoise.runs.setup import Setting

COLUMNS = ("client", "split", "seen", "size", "loss", "error")
# Columns of runs under attack, of runs with personal models, and of runs whose trivial answer is known.
OPTIONAL = ("malicious", "personal_loss", "personal_error", "trivial_error")
METRICS = "equipoise.metrics"  # the key of what a Parquet file says about its metrics
PERSONAL = "personal_"  # before the name of a metric: of clients' own models
NOT_EVALUATED = "not evaluated"  # stands for a client in the row of a split that nobody could be asked about
MEAN_OF = "mean of {} clients"  # stands for a client in the row of a split of which secure sums tell the mean alone


@dataclass(frozen=True, eq=False)
class ClientTable:
    """One row per client and split: id, split, whether it is a training client, examples, mean loss, mean error.

    Loss and error are those of the shared model. Where clients have models of their own, `personal_loss` and `personal_error`
    are theirs (NaN for clients without one), and `served_loss` and `served_error` those of the model that a client is served.
    `metrics` are further columns by name, NaN for a client without a value; `personal_metrics` are those of own models.
    Under attack `malicious` says who is; summaries are over benign clients. `trivial_error` is the error of giving every
    example the same answer, `trivial_answer`: the class that is most frequent in training, or the mean of the training
    targets. Iterating gives dictionaries, so `pandas.DataFrame(table)` works. Source: ours.

    >>> table = ClientTable(
    ...     ("anna", "ben"), ("test", "test"), torch.tensor([True, False]), torch.tensor([30, 12]),
    ...     loss=torch.tensor([0.2, 0.9]), error=torch.tensor([0.1, 0.5]),
    ... )
    >>> table.worst(1)[0]["client"], table["size"].tolist(), len(table.where("test"))
    ('ben', [30, 12], 2)
    >>> round(table.summaries()["test"]["error"].mean, 6)
    0.3
    """

    client: tuple[str, ...]  # R ids
    split: tuple[str, ...]  # R times "train", "validation" or "test"
    seen: Tensor  # (R,) bool: whether the client took part in training
    size: Tensor  # (R,) int64: its examples in this split
    loss: Tensor  # (R,) float64: mean loss of the shared model over its examples
    error: Tensor  # (R,) float64: mean error of the shared model
    malicious: Tensor | None = None  # (R,) bool; None without an attack
    personal_loss: Tensor | None = None  # (R,) float64: of clients' own models, NaN for clients without one
    personal_error: Tensor | None = None  # (R,) float64: of clients' own models, NaN for clients without one
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # (R,) float64 each, by name
    personal_metrics: Mapping[str, Tensor] = field(default_factory=dict)  # (R,) float64 each, of clients' own models
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)  # of each metric
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the clients, R values each
    miss: float | None = None  # ζ of conformal sets, whose coverage and size are metrics
    trivial_error: Tensor | None = None  # (R,) float64: of one answer for all examples
    trivial_answer: str = ""  # "most frequent class" or "mean of the targets"

    @classmethod
    def evaluate(
        cls,
        engine: Engine,
        params: Tensor,
        data: FederatedData,
        sample: Mapping[str, Tensor] | None = None,
        metrics: ClientMetrics | None = None,
    ) -> ClientTable:
        """Every client of every split at `params`; of the splits in `sample`, those at the given positions only."""
        scores, measured = {}, []
        measure = engine_traits(engine).measure if metrics else None
        for split, clients in data.splits.items():
            which = None if sample is None else sample.get(split)
            if which is None:
                scores[split] = (clients, *engine.evaluate(params, clients))
            else:
                scores[split] = (clients.select(which), *engine.evaluate(params, clients, which))
            if measure is not None:
                measured.append(measure(params, clients, metrics, which))
        table = cls.of(data, scores)
        return table if metrics is None or not measured else table.with_metrics(metrics, torch.cat(measured, 1))

    def with_metrics(self, metrics: ClientMetrics, values: Tensor) -> ClientTable:
        """The table with further columns: the value of each metric for each row, (M, R)."""
        named = dict(zip(metrics.functions, values, strict=True))
        return replace(self, metrics=named, higher_is_better=metrics.higher_is_better)

    @classmethod
    def of(cls, data: FederatedData, scores: Mapping[str, tuple[ClientSet, Tensor, Tensor]]) -> ClientTable:
        """Clients of `data`, by split, with the mean losses and mean errors of each."""
        ids, splits = zip(*((i, split) for split, (clients, _, _) in scores.items() for i in clients.ids), strict=True)
        trained = {split: split == "train" or data.train.find(clients) >= 0 for split, (clients, _, _) in scores.items()}
        seen = torch.cat([torch.as_tensor(trained[split]).expand(len(clients)) for split, (clients, _, _) in scores.items()])
        malicious = torch.tensor([i in data.malicious for i in ids]) if data.attack is not None else None
        numbers = ((clients.sizes.cpu(), loss, error) for clients, loss, error in scores.values())
        size, loss, error = map(torch.cat, zip(*numbers, strict=True))
        attributes = {name: tuple(given.get(i, NO_VALUE) for i in ids) for name, given in data.attributes.items()}
        return cls(ids, splits, seen, size, loss, error, malicious, attributes=attributes)

    def unseen(self) -> ClientTable:
        """The table of clients that took no part in training."""
        return replace(self, seen=torch.zeros_like(self.seen))

    def with_personal(self, scores: Mapping[str, tuple[Tensor, ...]]) -> ClientTable:
        """The table with loss, error and metrics of clients' own models, given by split, in the order of its rows."""
        loss, error, *more = (torch.cat(each) for each in zip(*(scores[s] for s in dict.fromkeys(self.split)), strict=True))
        named = dict(zip(self.metrics, more, strict=True))
        return replace(self, personal_loss=loss, personal_error=error, personal_metrics=named)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of this table."""
        named = (*self.metrics, *(f"{PERSONAL}{name}" for name in self.personal_metrics))
        return COLUMNS + tuple(name for name in OPTIONAL if getattr(self, name) is not None) + named + tuple(self.attributes)

    @property
    def has_own(self) -> bool:
        """Whether some of these clients have a model of their own."""
        return self.personal_error is not None and not bool(self.personal_error.isnan().all())

    @property
    def served_loss(self) -> Tensor:
        """The loss of each client with the model that it is served: its own if it has one, else the shared one."""
        own = self.personal_loss
        return self.loss if own is None else torch.where(own.isnan(), self.loss, own)

    @property
    def served_error(self) -> Tensor:
        """The error of each client with the model that it is served: its own if it has one, else the shared one."""
        own = self.personal_error
        return self.error if own is None else torch.where(own.isnan(), self.error, own)

    @property
    def served_metrics(self) -> dict[str, Tensor]:
        """The metrics of each client with the model that it is served: its own if it has one, else the shared one."""
        if self.personal_error is None:
            return dict(self.metrics)
        own, without = self.personal_metrics, self.personal_error.isnan()
        return {name: torch.where(without, shared, own.get(name, shared)) for name, shared in self.metrics.items()}

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, column: str) -> Tensor | tuple[str, ...]:
        """A column by name."""
        if column not in self.columns:
            raise InvalidParameter("column", f"must be one of {', '.join(self.columns)}", column)
        if column in self.attributes:
            return self.attributes[column]
        if column in self.metrics:
            return self.metrics[column]
        if column.removeprefix(PERSONAL) in self.personal_metrics and column not in OPTIONAL:
            return self.personal_metrics[column.removeprefix(PERSONAL)]
        values: Tensor | tuple[str, ...] = getattr(self, column)
        return values

    def __iter__(self) -> Iterator[dict[str, object]]:
        columns = {name: self[name] for name in self.columns}
        plain = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in columns.items()}
        for i in range(len(self)):
            yield {name: values[i] for name, values in plain.items()}

    def __repr__(self) -> str:
        wide = {name: max(12, len(name)) for name in self.columns}
        lines = ["  ".join(f"{name:>{width}}" for name, width in wide.items())]
        lines += [
            "  ".join(f"{v:>{wide[name]}.4f}" if isinstance(v, float) else f"{v!s:>{wide[name]}}" for name, v in row.items())
            for row in itertools.islice(self, 5)
        ]
        if len(self) > 5:
            lines.append(f"… {len(self)} rows")
        return "\n".join(lines)

    def where(self, split: str) -> ClientTable:
        """The rows of one split."""
        rows = [i for i, s in enumerate(self.split) if s == split]
        if not rows:
            raise InvalidParameter("split", f"must be one of {', '.join(sorted(set(self.split)))}", split)
        return self.take(torch.tensor(rows))

    @property
    def clients_in_mean(self) -> int | None:
        """Of how many clients the one row of a split is the mean, under secure sums; None if rows are clients."""
        if len(self.client) != 1:
            return None
        if self.client[0] == NOT_EVALUATED:
            return 0
        count = next((word for word in self.client[0].split() if word.isdecimal()), "")
        return int(count) if self.client[0] == MEAN_OF.format(count) else None

    def take(self, rows: Tensor) -> ClientTable:
        """The rows at some positions."""
        client, split = (tuple(values[i] for i in rows.tolist()) for values in (self.client, self.split))
        plain = {name: values[rows] for name in COLUMNS + OPTIONAL if isinstance(values := getattr(self, name), Tensor)}
        metrics, own = ({name: v[rows] for name, v in each.items()} for each in (self.metrics, self.personal_metrics))
        attributes = {name: tuple(values[i] for i in rows.tolist()) for name, values in self.attributes.items()}
        return ClientTable(
            client, split, **plain, metrics=metrics, personal_metrics=own, higher_is_better=self.higher_is_better,
            attributes=attributes, miss=self.miss, trivial_answer=self.trivial_answer,
        )  # fmt: skip

    def subgroups(self, attribute: str, split: str) -> list[Subgroup]:
        """Mean, 90th percentile and gap of the clients of each value of an attribute, with 95 % intervals."""
        return subgroups_of(self, attribute, split)

    @property
    def benign(self) -> ClientTable:
        """The rows of clients that are not malicious; all of them where nobody is (or everybody)."""
        if self.malicious is None or bool(self.malicious.all()) or not bool(self.malicious.any()):
            return self
        return self.take((~self.malicious).nonzero().flatten())

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Per split, the summary of losses, errors and metrics: weighted by examples on training clients, unweighted elsewhere.

        They are of the model that each client is served, over benign clients; "shared_loss" and "shared_error" are there for
        the shared model where clients have their own.
        """
        result = {}
        for split in dict.fromkeys(self.split):
            rows = self.where(split).benign
            columns = rows._judged_columns().items()
            weights = rows._weights(split)
            result[split] = {name: summarise(values, rows.size, weights) for name, values in columns}
            for name, values in rows.served_metrics.items():
                higher = self.higher_is_better[name]
                result[split][name] = summarise_metric(values, rows.size, weights, higher_is_better=higher)
        return result

    def intervals(self, split: str) -> dict[str, dict[str, Interval]]:
        """For each column of `summaries`, 95 % intervals of "mean" and "percentile_90" over all clients of a split.

        They are for a table of a random sample of its clients.
        """
        rows = self.where(split).benign
        weights = rows._weights(split)
        return {
            name: {"mean": mean_interval(values, weights), "percentile_90": percentile_interval(values, 90, weights)}
            for name, values in rows._judged_columns().items()
        }

    def _judged_columns(self) -> dict[str, Tensor]:
        columns = {"loss": self.served_loss, "error": self.served_error}
        return columns | ({"shared_loss": self.loss, "shared_error": self.error} if self.has_own else {})

    def _weights(self, split: str) -> Tensor | None:
        return self.size.double() if split == "train" else None

    def worst(self, count: int = 10) -> list[dict[str, object]]:
        """The rows of benign clients with the largest error (then loss) of the model that they are served, worst first.

        A client with few examples (`size`) may be here by chance alone.
        """
        rows = self.benign
        pairs = zip(rows.served_error.tolist(), rows.served_loss.tolist(), strict=True)
        order = sorted(range(len(rows)), key=list(pairs).__getitem__, reverse=True)[:count]
        return list(rows.take(torch.tensor(order, dtype=torch.int64)))

    def to_parquet(self, path: str | Path, **constants: str | int) -> Path:
        """Write the rows as Parquet, with further columns of one value each; the file is whole or absent."""
        import pyarrow
        import pyarrow.parquet

        values = {name: self[name] for name in self.columns}
        columns: dict[str, object] = {n: v.numpy() if isinstance(v, Tensor) else list(v) for n, v in values.items()}
        columns |= {name: [value] * len(self) for name, value in constants.items()}
        buffer, table = io.BytesIO(), pyarrow.table(columns)
        if self.metrics or self.attributes or self.trivial_answer:
            about = {
                "higher_is_better": dict(self.higher_is_better), "attributes": list(self.attributes), "miss": self.miss,
                "trivial_answer": self.trivial_answer,
            }  # fmt: skip
            table = table.replace_schema_metadata({METRICS: json.dumps(about)})
        pyarrow.parquet.write_table(table, buffer)
        return write_atomically(Path(path), buffer.getvalue())

    @classmethod
    def from_parquet(cls, path: str | Path | io.BytesIO) -> ClientTable:
        """The rows of a Parquet file that `to_parquet` wrote, or of its content."""
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(path)
        stored, about = set(schema.names), json.loads((schema.metadata or {}).get(METRICS.encode(), b"{}"))
        higher: dict[str, bool] = about.get("higher_is_better", {})
        own = [f"{PERSONAL}{name}" for name in higher if f"{PERSONAL}{name}" in stored]
        names = [name for name in COLUMNS + OPTIONAL if name in COLUMNS or name in stored]
        named: list[str] = about.get("attributes", [])
        table = pyarrow.parquet.read_table(path, columns=[*names, *higher, *own, *named]).to_pydict()
        kinds = {"seen": torch.bool, "malicious": torch.bool, "size": torch.int64}
        tensors = {
            name: torch.tensor(table[name], dtype=kinds.get(name, torch.float64)) for name in (*names[2:], *higher, *own)
        }
        metrics = {name: tensors.pop(name) for name in higher}
        personal = {name.removeprefix(PERSONAL): tensors.pop(name) for name in own}
        client, split = tuple(table["client"]), tuple(table["split"])
        attributes = {name: tuple(table[name]) for name in named}
        return cls(
            client, split, **tensors, metrics=metrics, personal_metrics=personal, higher_is_better=higher,
            attributes=attributes, miss=about.get("miss"), trivial_answer=about.get("trivial_answer", ""),
        )  # fmt: skip

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV; the file is whole or absent."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self)
        return write_atomically(Path(path), text.getvalue().encode())


@dataclass(frozen=True, eq=False)
class RunSummary:
    """Figures of the error and the loss over the clients that a model is judged on. `str()` is a table.

    `summary.error.mean`, `summary.error.percentiles[90]` and `summary.error.worst_10` are single figures.
    """

    name: str  # of the run
    split: str  # "train", "validation" or "test"
    unseen: bool  # whether none of the clients took part in training
    error: Summary  # of the model that each client is served
    loss: Summary  # of the model that each client is served
    shared_error: Summary | None = None  # of the shared model, where clients are served their own
    malicious: int = 0  # the number of malicious clients, who are left out
    sampled: tuple[int, int] | None = None  # how many clients were evaluated, and how many there are; None: all of them
    intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)  # by column and figure, of a sample
    metrics: Mapping[str, Summary] = field(default_factory=dict)  # by name
    own_metrics: tuple[str, ...] = ()  # those of clients' own models
    error_name: str = ""  # what the error measures, e.g. "squared error"; empty if it is not known
    target: str = ""  # the column that is predicted, if the data are a table
    trivial_error: Summary | None = None  # of one answer for all examples, if it is known
    trivial_answer: str = ""  # what that answer is

    @property
    def who(self) -> str:
        """The clients in words."""
        kind = f"{'unseen ' if self.unseen else ''}{'benign ' if self.malicious else ''}{self.split}"
        if self.sampled is None:
            return f"{self.error.clients} {kind} clients"
        evaluated, every = self.sampled
        if self.error.clients == evaluated:
            return f"{evaluated:,} of {every:,} {kind} clients, drawn at random"
        return f"{self.error.clients:,} {kind} clients, among {evaluated:,} of {every:,} drawn at random"

    def _heading(self, metric: str) -> str:
        """The heading of a metric: whose model it is of, where clients are served their own."""
        return metric if self.shared_error is None else f"{'own' if metric in self.own_metrics else 'shared'} {metric}"

    def __str__(self) -> str:
        columns, keys = {"error": self.error, "loss": self.loss}, ("error", "loss", "shared_error")
        if self.shared_error is not None:
            columns = {"own error": self.error, "own loss": self.loss, "shared error": self.shared_error}
        trivial = {} if self.trivial_error is None else {"trivial error": self.trivial_error}
        figures = {**columns, **trivial, **{self._heading(name): summary for name, summary in self.metrics.items()}}

        def intervals(figure: str) -> list[tuple[str, ...]]:
            texts = [self.intervals[key][figure].text("{:.4f}".format) for key in keys[: len(columns)] if key in self.intervals]
            return [("  95 % interval", *texts, *("" for _ in (*trivial, *self.metrics)))] if texts else []

        rows: list[tuple[str | float, ...]] = [
            (f"{self.name}: {self.who}", *figures),
            ("mean", *(c.mean for c in figures.values())),
            *intervals("mean"),
            ("90th percentile", *(c.tail_90 for c in figures.values())),
            *intervals("percentile_90"),
            ("worst 10 %", *(c.worst_10 for c in figures.values())),
            ("standard deviation", *(c.standard_deviation for c in figures.values())),
        ]
        texts = [text for row in rows for text in row[1:] if isinstance(text, str)]
        width, wide = max(len(str(r[0])) for r in rows), max(8, *map(len, texts))
        lines = [
            f"{label:<{width}}  " + "  ".join(v.rjust(wide) if isinstance(v, str) else f"{v:{wide}.4f}" for v in values)
            for label, *values in rows
        ]
        measured = [f"error: {meant}." for meant in [self._measured] if meant]
        if trivial:
            measured.append(f"trivial error: the same answer for every example, the {self.trivial_answer} of training.")
        return "\n".join([*(line.rstrip() for line in lines), *measured, *metric_words(self.metrics)])

    @property
    def _measured(self) -> str:
        """Which error it is and what that measures; empty if it is not known."""
        named, meant = error_words(self.error_name, self.target), error_definition(self.error_name, self.target)
        return meant if meant.startswith(self.error_name) else f"{named}, {meant}"


def metric_words(metrics: Mapping[str, Summary]) -> list[str]:
    """Sentences under a table of figures: of which metrics more is better, and how many clients have no value."""
    higher = [name for name, summary in metrics.items() if summary.higher_is_better]
    lines = [f"More is better for {', '.join(higher)}: 90 % of the clients reach the 90th percentile."] if higher else []
    lines += [
        f"{summary.missing} of {summary.clients + summary.missing} clients have no {name} and are left out of its figures."
        for name, summary in metrics.items()
        if summary.missing
    ]
    return lines


@dataclass(frozen=True)
class NoTraining:
    """Stands for the algorithm of a model that was evaluated and not trained."""

    personal: None = None
    privacy: None = None

    def __repr__(self) -> str:
        return "evaluated as it is, without training"


@dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord:
    """A finished run without its model: all that a report needs."""

    name: str  # what reports call the run
    algorithm: Algorithm | RecordedAlgorithm | NoTraining  # what was minimised, and how
    seed: int  # of cohorts, batches and noise
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
    data_version: str = ""  # tells data of one name apart: equal for runs on the same data

    def __repr__(self) -> str:
        about = f"{self.name!r}, seed {self.seed}, {self.rounds} rounds on {self.data!r}"
        return f"{type(self).__name__}({about})\n{self.summary()}"

    @property
    def measured(self) -> str:
        """Which error it is, and of which column, e.g. "squared error of price"; "error" or "loss" if that is not known."""
        named = error_words(self.error_name, self.target)
        if self.error_is_loss:
            return f"loss ({named})" if named else "loss"
        return named or "error"

    @property
    def judged_on(self) -> str:
        """The split that summaries are about: test clients if there are any, else validation, else training clients."""
        return next(s for s in ("test", "validation", "train") if s in self.clients.split)

    def summary(self, split: str | None = None) -> RunSummary:
        """Mean, 90th percentile, worst 10 % and standard deviation over clients."""
        split = split or self.judged_on
        rows = self.clients.where(split)
        benign = rows.benign
        figures, sample = rows.summaries()[split], self.sample_of(split)
        return RunSummary(
            self.name, split, not bool(rows.seen.any()), figures["error"], figures["loss"], figures.get("shared_error"),
            len(rows) - len(benign), sample, {} if sample is None else rows.intervals(split),
            {name: figures[name] for name in rows.metrics}, tuple(rows.personal_metrics), self.error_name, self.target,
            None if benign.trivial_error is None else summarise(benign.trivial_error, benign.size, benign._weights(split)),
            rows.trivial_answer,
        )  # fmt: skip

    def judged_by(self, split: str | None) -> Self:
        """The record with `split` as the one that summaries are about: it has no rows of splits that would go before it."""
        if split is None or split == self.judged_on:
            return self
        self.clients.where(split)  # refuses a split that is not there
        order = ("train", "validation", "test")
        kept = order[: order.index(split) + 1]
        rows = torch.tensor([i for i, each in enumerate(self.clients.split) if each in kept])
        return replace(self, clients=self.clients.take(rows))

    def subgroups(self, attribute: str, split: str | None = None) -> list[Subgroup]:
        """Mean, 90th percentile and gap of the clients of each value of an attribute, with 95 % intervals, worst first."""
        return self.clients.subgroups(attribute, split or self.judged_on)

    def sample_of(self, split: str) -> tuple[int, int] | None:
        """How many clients of a split were evaluated and how many there are; None if all of them were evaluated."""
        evaluated, every = (self.sampled or {}).get(split, (0, 0))
        return (evaluated, every) if evaluated < every else None

    def report(self, path: str | Path) -> Path:
        """Write one HTML page that opens offline."""
        return write_report([self], path)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Result(RunRecord):
    """A finished run: the trained `model`, `clients` (one row each), `history`, `summary()` and `report(path)`.

    `train` gives it. Source: ours.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> result = eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=2, clients_per_round=3)
    >>> result.judged_on, len(result.clients), len(result.history.rounds), type(result.model).__name__
    ('test', 8, 2, 'Softmax')
    >>> 0 <= result.summary().error.percentiles[90] <= 1
    True
    """

    algorithm: Algorithm  # what was minimised, and how
    model: nn.Module  # the trained model, a copy of the one that was given
    params: Tensor  # (D,) its parameters as one vector
    carried: Tensor | None = None  # (C,) values that training changes besides parameters, e.g. running statistics
    personal: PersonalModels | None = None  # the clients' own models, if the algorithm gives them any
    schema: Schema | None = None  # how each column was encoded, if the data are a table
    signature: Signature | None = None  # what the model takes, where the data are on this machine
    task: Task | None = field(default=None, repr=False)  # loss and error per example

    def export(self, path: str | Path, *, groups: Groups | None = None) -> Path:
        """Write the model for other programs, by the suffix of `path`: .onnx, .pt2 (torch.export) or .safetensors.

        Beside it go <name>.card.md and <name>.card.json: what the model was trained on and how, how groups of clients fare
        with it, whom it leaves behind, and what privacy it has. `groups` names the group of each client, such as its region,
        and the card has a row for each. ONNX needs `equipoise[serve]`. A model that a format cannot hold is refused with the
        reason.
        """
        from equipoise.export.model_files import export_result

        return export_result(self, path, groups=groups)

    def with_conformal(self, data: FederatedData, *, miss: float = 0.1, per_client: bool = False) -> Result:
        """The result with conformal sets of the shared model: columns `coverage` and `set_size` of clients with test examples.

        `miss` ζ and `per_client` are those of `conformal_sets`. Tables and reports show the coverage of each client then.
        """
        from equipoise.conformal import conformal_columns, conformal_sets

        return replace(
            self, clients=conformal_columns(self.clients, conformal_sets(self.model, data, miss=miss, per_client=per_client))
        )

    def save(self, folder: str | Path) -> Path:
        """Write the folder of a run: config.toml, rounds.jsonl, clients.parquet, model.safetensors and report.html.

        With a table as data there is schema.json, too. Beside the model go model.json, its card and, with `equipoise[serve]`,
        model.onnx and score.onnx.

        `equipoise report` reads it like any other. The folder must be new or empty, and appears whole or not at all. Parts of
        your own are recorded by their class and repr; a folder that was saved is read, but not run again.
        """
        from equipoise.experiment.saved_run import save_result

        return save_result(self, folder)


class PersonalModels:
    """The models of the training clients, by id. Models that are made after training (finetuning) are made on each call."""

    def __init__(self, setting: Setting, run: PersonalWork, state: ServerState, model: Tensor) -> None:
        self._setting, self._run, self._state, self._model = setting, run, state, model

    @property
    def ids(self) -> Sequence[str]:
        """The ids of the training clients, in order."""
        return self._setting.data.train.ids

    def __len__(self) -> int:
        return len(self._setting.data.train)

    def __repr__(self) -> str:
        return f"PersonalModels({len(self)} clients)"

    def params(self, clients: Sequence[str]) -> Tensor:
        """The parameters of some clients' models, one row each: (k, D)."""
        return self._setting.task.split(self._models(clients))[0]

    def _models(self, clients: Sequence[str]) -> Tensor:
        """Models of some clients, one row each: parameters, and then carried values if the model has any, (k, D + C)."""
        rule = f"must be ids of the {len(self)} training clients"
        odd = [name for name in clients if not isinstance(name, str)]
        if odd or isinstance(clients, str) or len(clients) == 0:
            raise InvalidParameter("clients", rule, odd or clients)
        positions = self._setting.data.train.positions_of(clients)
        if unknown := [name for name, k in zip(clients, positions.tolist(), strict=True) if k < 0]:
            ids = self.ids
            known = f"{', '.join(ids[k] for k in range(min(5, len(ids))))}{', …' * (len(ids) > 5)}"
            fix = f"Known are {known}. A client that took no part in training is served the shared model: result.model."
            raise InvalidParameter("clients", rule, unknown, fix)
        return self._run.models(self._state.personal, self._model, positions, self._state.round)

    def model(self, client: str) -> nn.Module:
        """A copy of the user's model with the parameters of one client, and with its own statistics if it carries any."""
        return self._setting.model_at(self._models([client])[0])

    def to_npy(self, path: str | Path) -> Path:
        """Write all models as one NumPy array (n, D), a few at a time, in the order of `ids`; the file is whole or absent.

        Where models carry values beside their parameters (running statistics), these follow in each row: (n, D + C).
        """
        import numpy as np

        path, part = Path(path), Path(f"{path}.part")
        header = io.BytesIO()
        kind, shape = self._model.cpu().numpy().dtype, (len(self), len(self._model))
        described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        try:
            file = DurableFile(part)
            try:
                file.write(header.getvalue())
                for _, models in self._run.all_models(self._state.personal, self._model, self._state.round):
                    file.write(models.cpu().contiguous().numpy())  # in the order of clients
                file.sync()
            finally:
                file.close()
            move(part, path)
        except OSError as failure:
            raise NotWritten(f"{path} could not be written: {failure.strerror or failure}.") from failure
        return path
