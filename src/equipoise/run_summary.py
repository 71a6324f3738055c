"""The summary of a run: figures of error, loss and metrics over clients, and the table that they are printed as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from equipoise.core.error_names import ABSOLUTE, SHARES, SQUARED, ZERO_ONE, error_definition, error_words
from equipoise.core.words import cells, counted, joined, padded
from equipoise.metrics import Interval, Summary
from equipoise.report.data.over_seeds import MEDIAN, Spread, trivial_doubt
from equipoise.report.text.phrases import BACKDOOR, UNATTACKED, count_words, plural
from equipoise.report.text.sentences import ValueFormat, trivial_sentence

NO_TRIVIAL = (
    "trivial error: not shown, because the trivial answer is chosen by training examples, which a private run does not "
    "look at. Compare the model with the "
    "{answer} on data of your own before use{how}."
)
EVALUATE = ": eq.evaluate(result.model, data), with the loss and the error that train was given, shows both"

_ANSWERS = {ZERO_ONE: "most frequent class", ABSOLUTE: MEDIAN, SQUARED: "mean of the targets"}  # by error
_ANY_ANSWER = "same answer for every example, such as the most frequent class or the mean of the targets,"


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
    subgroups: tuple[str, ...] = ()  # lines about the clients of each value of an attribute, if clients have attributes
    at_least: int = 0  # clients with fewer examples are left out
    small_clients: str = ""  # a sentence on clients with few examples; empty if there are none
    not_evaluated: Mapping[str, str] = field(default_factory=dict)  # clients that the figures leave out, and why
    absent: str = ""  # sentences on them; empty if there are none
    attack: str = ""  # a sentence on how many training clients are malicious; empty if none is
    few_clients: str = ""  # a sentence if the 90th percentile is the worst of fewer than ten clients; else empty
    private: bool = False  # whether the run protects single clients
    noise: str = ""  # sentences on a private model that is mostly noise; empty if it is not
    own_worse: str = ""  # a sentence on clients whose own model is worse than the shared one; empty if there are none
    apart: Mapping[str, tuple[int, int]] | None = None  # of `evaluate`: clients and examples of the other splits, by name

    @property
    def who(self) -> str:
        """The clients in words."""
        return who_words([self])

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
        if trivial:
            of = "training" if self.apart is None else "the split train of these data"
            measured.append(f"trivial error: the same answer for every example, the {self.trivial_answer} of {of}.")
            measured += filter(None, [trivial_doubt(self.trivial_answer, self.error_name), self._no_better_than_trivial])
        elif self.private:
            known = _ANSWERS.get(self.error_name)
            measured.append(NO_TRIVIAL.format(answer=known or _ANY_ANSWER, how=EVALUATE if known else ""))
        said = (self._apart_words, self.noise, self.own_worse, self.attack, self.absent, self.small_clients, self.few_clients)
        few = [text for text in said if text]
        return joined([*(line.rstrip() for line in lines), *measured, *few, *metric_words(self.metrics), *self.subgroups])

    def splitlines(self) -> list[str]:
        """The lines of the table, as of the text that `compare(…).summary()` gives."""
        return str(self).splitlines()

    @property
    def _no_better_than_trivial(self) -> str:
        """That the model is no better than the trivial answer, at the mean or the 90th percentile; empty if it is better."""
        if self.trivial_error is None:
            return ""
        figures = {"percentile_90": self.error.tail_90, "trivial_percentile_90": self.trivial_error.tail_90}
        figures |= {"mean": self.error.mean, "trivial_mean": self.trivial_error.mean}
        row = {key: Spread(value, 0.0) for key, value in figures.items()}
        return trivial_sentence(row, ValueFormat(percent=False, decimals=4), self.trivial_answer)

    @property
    def _apart_words(self) -> str:
        """Which splits of the data that `evaluate` got are in no figure, and how the clients of "train" count; or empty."""
        if self.apart is None:
            return ""
        weighted = "Clients count by their examples. " if self.split == "train" and self.error.clients > 1 else ""
        others = [
            f"{split} ({counted(clients, 'client')}, {counted(examples, 'example')}; see summary({split!r}))"
            for split, (clients, examples) in self.apart.items()
        ]
        if not others:
            return weighted.strip()
        return f"{weighted}Not in these figures: {', '.join(others)}. Data that are made with test=0 are judged as a whole."

    @property
    def _measured(self) -> str:
        """Which error it is and what that measures; empty if it is not known."""
        named, meant = error_words(self.error_name, self.target), error_definition(self.error_name, self.target)
        unit = ", from 0 to 1" if self.error_name in SHARES else ""
        return meant if meant.startswith(self.error_name) else f"{named}, {meant}{unit}"


def who_words(summaries: Sequence[RunSummary]) -> str:
    """The clients that runs are judged on, in words: if their number differs from run to run, the lowest and the highest."""
    first, malicious = summaries[0], any(each.malicious for each in summaries)
    clients = count_words(each.error.clients for each in summaries)
    most = max(each.error.clients for each in summaries)
    split = "" if first.apart == {} and first.split == "train" else first.split  # of all data that `evaluate` got
    kind = f"{'unseen ' if all(each.unseen for each in summaries) else ''}{'benign ' if malicious else ''}{split}".strip()
    large = f" with {first.at_least} examples or more" if first.at_least else ""
    if first.sampled is None:
        who = f"{kind} {plural('client', most)}".strip()
        return f"{clients} {who}{large}"
    evaluated, every = (count_words(each) for each in zip(*(s.sampled for s in summaries if s.sampled), strict=True))
    if clients == evaluated:
        return f"{evaluated} of {every} {f'{kind} clients'.strip()}, drawn at random"
    return f"{clients} {f'{kind} clients'.strip()}{large}, among {evaluated} of {every} drawn at random"


def missing_words(count: int, metric: str) -> str:
    """The end of a sentence on clients without a value of a metric.

    >>> missing_words(1, "auc"), missing_words(2, "auc")
    ('has no auc and is left out of its figures.', 'have no auc and are left out of its figures.')
    """
    verbs = ("has", "is") if count == 1 else ("have", "are")
    return f"{verbs[0]} no {metric} and {verbs[1]} left out of its figures."


def metric_words(metrics: Mapping[str, Summary]) -> list[str]:
    """Sentences under a table of figures: of which metrics more is better, and how many clients have no value."""
    higher = [name for name, summary in metrics.items() if summary.higher_is_better]
    lines = []
    if higher:
        lines = [
            f"More is better for {', '.join(higher)}: 90 % of the clients reach the 90th percentile. Where less is better, "
            "write metrics.Metric(function, higher_is_better=False)."
        ]
    lines += [
        f"{summary.missing} of {summary.clients + summary.missing} clients {missing_words(summary.missing, name)}"
        for name, summary in metrics.items()
        if summary.missing
    ]
    lines += [f"{BACKDOOR}: {UNATTACKED}"] * (BACKDOOR in metrics)
    return lines
