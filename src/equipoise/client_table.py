"""The table of clients: one row per client and split, with its loss, error and metrics; its summaries and its files."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import engine_traits
from equipoise.core.files import write_atomically
from equipoise.core.plain_text import content_of, parse_json, typed
from equipoise.core.unpacking import plain_parquet, plain_values, refuse_bomb
from equipoise.core.words import joined, table_lines
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import FileGuard, InvalidData, InvalidParameter, require_integer
from equipoise.metrics import (
    Interval,
    Summary,
    counts_wrong,
    mean_interval,
    percentile_interval,
    share_interval,
    skewed_mean_interval,
    summarise,
    summarise_metric,
)
from equipoise.report.notices import notice, picked_notices
from equipoise.subgroups import NO_VALUE, Subgroup, subgroups_of
from equipoise.types import Engine

COLUMNS = ("client", "split", "seen", "size", "loss", "error")
# Columns of runs under attack, with personal models, with a known trivial answer, and of errors that are numbers.
OPTIONAL = ("malicious", "personal_loss", "personal_error", "trivial_error", "error_deviation", "error_skewness")
METRICS = "equipoise.metrics"  # the key of what a Parquet file says about its metrics
_ABOUT: dict[str, Any] = {"higher_is_better": {}, "attributes": [], "miss": None, "trivial_answer": "", "not_evaluated": {}}
_ABOUT_TYPES: dict[str, Any] = dict(
    zip(_ABOUT, (dict[str, bool], list[str], float | None, str, dict[str, dict[str, str]]), strict=True)
)
PERSONAL = "personal_"  # before the name of a metric: of clients' own models
NOT_EVALUATED = "not evaluated"  # stands for a client in the row of a split that nobody could be asked about
MEAN_OF = "mean of {} clients"  # stands for a client in the row of a split of which secure sums tell the mean alone


@dataclass(frozen=True, eq=False)
class ClientTable:
    """One row per client and split: id, split, whether it is a training client, examples, mean loss, mean error.

    Loss and error are those of the shared model. If clients have models of their own, `personal_loss` and `personal_error`
    are those of these models (NaN for clients without one). `served_loss` and `served_error` are those of the model that a
    client gets. `metrics` are further columns by name, NaN for a client without a value; `personal_metrics` are those of
    own models. Under attack `malicious` marks the attackers; summaries are over all other clients. `trivial_error` is the
    error of giving every example the same answer, `trivial_answer`: the class that is most frequent in training, or the
    mean of the training targets (their median under the absolute error). If the targets are numbers, `error_deviation` and
    `error_skewness` are the standard deviation and the skewness of the shared model's errors on a client's examples; NaN
    for a client with one example.
    Iterating gives dictionaries, so `pandas.DataFrame(table)` works. Source: ours.

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
    error_deviation: Tensor | None = None  # (R,) float64: of the errors of a client's examples, where they are numbers
    error_skewness: Tensor | None = None  # (R,) float64: of the errors of a client's examples, where they are numbers
    trivial_answer: str = ""  # "most frequent class", "mean of the targets" or "median of the targets"
    not_evaluated: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # split → client in no row or mean → why

    @classmethod
    def evaluate(
        cls,
        engine: Engine,
        params: Tensor,
        data: FederatedData,
        sample: Mapping[str, Tensor] | None = None,
        metrics: ClientMetrics | None = None,
    ) -> ClientTable:
        """The table of every client of every split with the model `params`.

        Of a split that `sample` names, only the clients at the given positions are evaluated.
        """
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
        """The table of clients of `data`: `scores` has, by split, the clients with their mean losses and their mean errors."""
        ids, splits = zip(*((i, split) for split, (clients, _, _) in scores.items() for i in clients.ids), strict=True)
        trained = {split: split == "train" or data.train.find(clients) >= 0 for split, (clients, _, _) in scores.items()}
        seen = torch.cat([torch.as_tensor(trained[split]).expand(len(clients)) for split, (clients, _, _) in scores.items()])
        malicious = torch.tensor([i in data.malicious for i in ids]) if data.attack is not None else None
        numbers = ((clients.sizes.cpu(), loss, error) for clients, loss, error in scores.values())
        size, loss, error = map(torch.cat, zip(*numbers, strict=True))
        attributes = {name: tuple(given.get(i, NO_VALUE) for i in ids) for name, given in data.attributes.items()}
        return cls(ids, splits, seen, size, loss, error, malicious, attributes=attributes)

    def unseen(self) -> ClientTable:
        """The table with every client marked as one that took no part in training."""
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
        return joined(lines)

    def where(self, split: str) -> ClientTable:
        """The rows of one split."""
        rows = [i for i, s in enumerate(self.split) if s == split]
        if not rows:
            raise InvalidParameter("split", f"must be one of {', '.join(sorted(set(self.split)))}", split)
        return self.take(torch.tensor(rows))

    @property
    def clients_in_mean(self) -> int | None:
        """How many clients the only row is the mean of, under secure sums; 0 if none answered, None if each row is a client."""
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
            attributes=attributes, miss=self.miss, trivial_answer=self.trivial_answer, not_evaluated=self.not_evaluated,
        )  # fmt: skip

    def subgroups(self, attribute: str, split: str) -> list[Subgroup]:
        """Mean, 90th percentile and gap of the clients of each value of an attribute, with 95 % intervals."""
        return subgroups_of(self, attribute, split)

    @property
    def benign(self) -> ClientTable:
        """The rows of clients that are not malicious; all rows if no client is malicious, or if all are."""
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
            weights = weights_in_means(rows, split)
            result[split] = {name: summarise(values, rows.size, weights) for name, values in columns}
            for name, values in rows.served_metrics.items():
                higher = self.higher_is_better[name]
                result[split][name] = summarise_metric(values, rows.size, weights, higher_is_better=higher)
        return result

    def intervals(self, split: str) -> dict[str, dict[str, Interval]]:
        """For each column of `summaries`, 95 % intervals of "mean" and "percentile_90" over all clients of a split.

        The table must hold a random sample of the clients of that split.
        """
        rows = self.where(split).benign
        weights = weights_in_means(rows, split)
        return {
            name: {"mean": mean_interval(values, weights), "percentile_90": percentile_interval(values, 90, weights)}
            for name, values in rows._judged_columns().items()
        }

    def _judged_columns(self) -> dict[str, Tensor]:
        columns = {"loss": self.served_loss, "error": self.served_error}
        return columns | ({"shared_loss": self.loss, "shared_error": self.error} if self.has_own else {})

    @property
    def number_intervals(self) -> tuple[Tensor, Tensor] | None:
        """Both ends (R,) of the 95 % interval of each client's mean error, by the spread of its examples' errors.

        None where that is not known: errors that are no numbers, own models of clients, federations, protected runs, stores. An
        end is NaN for a client with fewer than 20 examples. See `metrics.skewed_mean_interval`.
        """
        if self.error_deviation is None or self.error_skewness is None or self.has_own:
            return None
        low, high = skewed_mean_interval(self.error, self.error_deviation, self.error_skewness, self.size)
        return (low.clamp(min=0.0) if bool((self.error >= 0).all()) else low), high

    def worst(self, count: int = 10, *, at_least: int = 0) -> WorstClients:
        """The rows of benign clients with the largest error (then loss) of the model that they are served, worst first.

        A client with few examples (`size`) may be here by chance alone: `at_least=30` leaves out clients with fewer
        examples. `error_low` and `error_high` are the 95 % interval of a client's error. It covers the choice of the
        client's examples, taken as independent draws, and not the seed of training. If the error is a share of wrong
        examples, it is the interval of Clopper and Pearson. If the targets are numbers, it is Student's t interval with
        Hall's correction for skewness, and NaN for clients with fewer than 20 examples; clients with own models,
        federations, protected runs and data in stores have no interval of this second kind. Secure sums have none at all.

        If clients have models of their own, `error` of a row is that of the shared model, as in the table of clients;
        `served_error` is that of the model that the client is served, and its interval is `served_error_low` and
        `served_error_high`.

        No interval allows for the choice of the worst of many clients. `str()` of the list is a table, where the error of
        own models is called "own error". Below it stands whether all clients differ beyond chance, where each row is right or
        wrong and a shared model is judged on test or validation rows.
        """
        require_integer("at_least", at_least, 0)
        rows = self.benign
        judged = self.clients_in_mean is None and counts_wrong(rows.served_error, rows.size)
        rows = rows.take((rows.size >= at_least).nonzero().flatten())
        errors = rows.served_error.tolist()
        pairs = list(zip(errors, rows.served_loss.tolist(), strict=True))
        order = sorted(range(len(rows)), key=pairs.__getitem__, reverse=True)[:count]
        found = WorstClients(rows.take(torch.tensor(order, dtype=torch.int64)))
        found.at_least, found.among = at_least, rows
        ends = None if judged else rows.number_intervals
        found.by_spread = ends is not None
        found.has_own = self.has_own
        found.own_models = not judged and self.error_deviation is not None and rows.has_own
        found.served = name = "error" if rows.personal_error is None else "served_error"
        for k, row in zip(order, found, strict=True):
            row[name] = errors[k]
            if judged:
                size = int(rows.size[k])
                between = share_interval(round(errors[k] * size), size)
                row[f"{name}_low"], row[f"{name}_high"] = between.low, between.high
            elif ends is not None:
                row[f"{name}_low"], row[f"{name}_high"] = (float(end[k]) for end in ends)
        return found

    def to_parquet(self, path: str | Path, **constants: str | int) -> Path:
        """Write the rows as Parquet, with further columns of one value each; the file is whole or absent."""
        import pyarrow
        import pyarrow.parquet

        values = {name: self[name] for name in self.columns}
        columns: dict[str, object] = {n: v.numpy() if isinstance(v, Tensor) else list(v) for n, v in values.items()}
        columns |= {name: [value] * len(self) for name, value in constants.items()}
        buffer, table = io.BytesIO(), pyarrow.table(columns)
        if self.metrics or self.attributes or self.trivial_answer or self.not_evaluated:
            about = {
                "higher_is_better": dict(self.higher_is_better), "attributes": list(self.attributes), "miss": self.miss,
                "trivial_answer": self.trivial_answer, "not_evaluated": self.not_evaluated,
            }  # fmt: skip
            table = table.replace_schema_metadata({METRICS: json.dumps(about)})
        pyarrow.parquet.write_table(table, buffer)
        return write_atomically(Path(path), buffer.getvalue())

    @classmethod
    def from_parquet(cls, path: str | Path | io.BytesIO) -> ClientTable:
        """The rows of a Parquet file that `to_parquet` wrote, or of its content; anything else is refused."""
        named = "The table of clients" if isinstance(path, io.BytesIO) else path
        with FileGuard(named, InvalidData):
            return cls._read(path if isinstance(path, io.BytesIO) else io.BytesIO(content_of(Path(path))), named)

    @classmethod
    def _read(cls, content: io.BytesIO, path: object) -> ClientTable:
        size = content.getbuffer().nbytes
        with plain_parquet(content, path) as file:
            if not 0 <= file.metadata.num_rows <= size:  # each row has a client of its own
                raise ValueError(f"it has {size} bytes, but says that they are {file.metadata.num_rows} rows")
            schema = file.schema_arrow
            stored = set(schema.names)
            about = typed(_ABOUT | parse_json((schema.metadata or {}).get(METRICS.encode(), b"{}")), _ABOUT_TYPES)
            higher: dict[str, bool] = about["higher_is_better"]
            own = [f"{PERSONAL}{name}" for name in higher if f"{PERSONAL}{name}" in stored]
            names = [name for name in COLUMNS + OPTIONAL if name in COLUMNS or name in stored]
            named: list[str] = about["attributes"]
            columns = file.read(columns=[*names, *higher, *own, *named])
        table = {name: plain_values(columns[name]) for name in dict.fromkeys((*names, *higher, *own, *named))}
        texts = [text for name in ("client", "split", *named) for text in table[name]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a client, a split or an attribute is no text")
        refuse_bomb(path, sum(map(len, texts)), size)
        if strange := set(table["split"]) - {"train", "validation", "test"}:
            raise ValueError(f"it has the split {min(strange)!r}")
        kinds = {"seen": torch.bool, "malicious": torch.bool, "size": torch.int64}
        tensors = {
            name: torch.tensor(table[name], dtype=kinds.get(name, torch.float64)) for name in (*names[2:], *higher, *own)
        }
        if any(column.dim() != 1 for column in tensors.values()) or not bool((tensors["size"] >> 48 == 0).all()):
            raise ValueError("a column holds lists, or sizes that no client has")
        metrics = {name: tensors.pop(name) for name in higher}
        personal = {name.removeprefix(PERSONAL): tensors.pop(name) for name in own}
        client, split = tuple(table["client"]), tuple(table["split"])
        attributes = {name: tuple(table[name]) for name in named}
        return cls(
            client, split, **tensors, metrics=metrics, personal_metrics=personal, higher_is_better=higher,
            attributes=attributes, miss=about["miss"], trivial_answer=about["trivial_answer"],
            not_evaluated=about["not_evaluated"],
        )  # fmt: skip

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV; the file is whole or absent."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self)
        return write_atomically(Path(path), text.getvalue().encode())


class WorstClients(list[dict[str, object]]):
    """Rows of clients, worst first. `str()` is a table with the interval of each client's error, where it has one."""

    at_least = 0  # examples of every client
    among: ClientTable | None = None  # the rows that these are picked from
    by_spread = False  # whether intervals are by the spread of a client's errors, which are numbers
    served = "error"  # the field of the error that they are sorted by
    has_own = False  # whether clients have models of their own
    own_models = False  # whether there are no intervals because clients have models of their own

    def __str__(self) -> str:
        if not self:
            return f"No client has {self.at_least} examples or more."
        low, high, named = f"{self.served}_low", f"{self.served}_high", "own error" if self.has_own else "error"
        heads = ["client", "split", "size", named, *(["95 % interval"] if low in self[0] else [])]
        trivial = "trivial_error" in self[0]
        heads += ["trivial error"] * trivial
        lines = [heads]
        for row in self:
            cells = [str(row["client"]), str(row["split"]), str(row["size"]), f"{row[self.served]:z.3f}"]
            between = f"{row[low]:.3f} to {row[high]:.3f}" if low in row else ""
            cells += ["–" if "nan" in between else between] if between else []
            lines.append([*cells, *([f"{row['trivial_error']:z.3f}"] if trivial else [])])
        table = table_lines(lines)
        table.append("size: the client's examples in this split.")
        if self.has_own:
            table.append("own error: of the model that the client is served, its own if it has one.")
        if low in self[0]:
            how = "Student, corrected for skewness" if self.by_spread else "Clopper and Pearson"
            table.append(str(notice("interval-examples", how=how)))
        elif self.own_models:
            table.append(str(notice("no-interval")))
        if trivial and self.among is not None:
            table.append(str(notice("trivial-error", answer=self.among.trivial_answer)))
        if self.among is not None:
            table += map(str, picked_notices(len(self), self.among))
        return "\n".join(table)


def weights_in_means(table: ClientTable, split: str) -> Tensor | None:
    """The weight of each row (R,) in means over a split: its examples among training clients; None, all alike, elsewhere."""
    return table.size.double() if split == "train" else None
