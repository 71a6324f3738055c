"""The summary of a run: figures of error, loss and metrics over clients, and the table that they are printed as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from equipoise.core.error_names import ABSOLUTE, SHARES, SQUARED, ZERO_ONE, error_definition, error_words
from equipoise.core.words import cells, joined, padded
from equipoise.metrics import Interval, Summary
from equipoise.report.formats import Judged, ValueFormat, listed
from equipoise.report.notices import Notice, metric_notices, notice, trivial_notices
from equipoise.report.over_seeds import MEDIAN, Spread

_ANSWERS = {ZERO_ONE: "most frequent class", ABSOLUTE: MEDIAN, SQUARED: "mean of the targets"}  # by error


@dataclass(frozen=True, eq=False)
class RunSummary:
    """Figures of the error and the loss over the clients that a model is judged on. `str()` is a table.

    `summary.error.mean`, `summary.error.percentiles[90]` and `summary.error.worst_10` are single figures.
    """

    name: str  # of the run
    split: str  # "train", "validation" or "test"
    judged: Judged  # the clients
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
    subgroups: tuple[str, ...] = ()  # lines about the clients of each value of an attribute, if clients have attributes
    not_evaluated: Mapping[str, str] = field(default_factory=dict)  # clients that the figures leave out, and why
    private: bool = False  # whether the run protects single clients
    noise: str = ""  # on a private model that is mostly noise; empty if it is not
    notices: tuple[Notice, ...] = ()  # what a reader of the figures must know
    apart: Mapping[str, tuple[int, int]] | None = None  # of `evaluate`: clients and examples of the other splits, by name

    @property
    def who(self) -> str:
        """The clients in words."""
        return str(self.judged)

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
        width, wide = max(cells(str(r[0])) for r in rows), max(8, *map(cells, texts))
        lines = [
            f"{padded(str(label), width)}  "
            + "  ".join(v.rjust(wide) if isinstance(v, str) else f"{v:z{wide}.4f}" for v in values)
            for label, *values in rows
        ]
        measured = [f"error: {meant}." for meant in [self._measured] if meant]
        lines += [*measured, self.noise, *map(str, self._notices()), *self.subgroups]
        return joined(line.rstrip() for line in lines if line)

    def _notices(self) -> Iterator[Notice]:
        """What is said below the figures."""
        if self.trivial_error is not None:
            yield notice("trivial-error", answer=self.trivial_answer)
            pairs = {"": self.error, "trivial_": self.trivial_error}
            row = {f"{kind}{key}": Spread(value, 0.0) for kind, each in pairs.items()
                   for key, value in (("mean", each.mean), ("percentile_90", each.tail_90))}  # fmt: skip
            scale = ValueFormat(percent=False, decimals=4)
            yield from trivial_notices({self.name: row}, self.trivial_answer, self.error_name, scale)
        elif self.private:
            yield notice("trivial-unknown", answer=_ANSWERS.get(self.error_name, "same answer for every example"))
        if self.apart:
            each = [f"{split} (clients: {clients}, examples: {examples})" for split, (clients, examples) in self.apart.items()]
            yield notice("other-splits", each=listed(each))
        yield from self.notices
        higher = [name for name, summary in self.metrics.items() if summary.higher_is_better]
        yield from metric_notices({name: summary.missing for name, summary in self.metrics.items()}, higher)

    def splitlines(self) -> list[str]:
        """The lines of the table, as of the text that `compare(…).summary()` gives."""
        return str(self).splitlines()

    @property
    def _measured(self) -> str:
        """Which error it is and what that measures; empty if it is not known."""
        named, meant = error_words(self.error_name, self.target), error_definition(self.error_name, self.target)
        unit = ", from 0 to 1" if self.error_name in SHARES else ""
        return meant if meant.startswith(self.error_name) else f"{named}, {meant}{unit}"
