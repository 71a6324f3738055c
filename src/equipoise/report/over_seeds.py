"""The figures of a method over its seeds, and the malicious clients that these leave out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from equipoise.core.abilities import read
from equipoise.core.error_names import ABSOLUTE, SQUARED
from equipoise.metrics import Interval, Summary, mean, summarise
from equipoise.types import PersonalTraits

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

MEAN, MEDIAN = "mean of the targets", "median of the targets"  # the trivial answer where a number is predicted
FIGURES = {
    "mean": "mean",
    "percentile_90": "90th percentile",
    "worst_10": "worst 10 %",
    "standard_deviation": "standard deviation",
}


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a figure over n seeds (divided by n − 1; 0 for one seed).

    >>> Spread.of([0.2, 0.4])
    Spread(mean=0.30000000000000004, deviation=0.14142135623730953)
    """

    mean: float  # over seeds
    deviation: float  # over seeds

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Mean and standard deviation of one value per seed."""
        numbers = list(values)
        mean = math.fsum(numbers) / len(numbers)
        squares = math.fsum((v - mean) ** 2 for v in numbers)
        return cls(mean, math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else 0.0)

    def reach(self, *, within_shares: bool) -> tuple[float, float]:
        """How far a bar of ± one deviation reaches below and above the mean; `within_shares` cuts it off at 0 and 1.

        >>> down, up = Spread(0.9, 0.2).reach(within_shares=True)
        >>> down, round(up, 6)
        (0.2, 0.1)
        """
        if not within_shares:
            return self.deviation, self.deviation
        return min(self.deviation, max(self.mean, 0.0)), min(self.deviation, max(1.0 - self.mean, 0.0))


def figures_of(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    """The figures of one method over its seeds: of the error, as a fraction, trained clients per round, and seconds.

    The error is that of the model each client is served, over benign clients. Where that is a model of the client's own,
    `shared_mean` and so on are the figures of the shared model; where malicious clients are left out, `malicious_mean` is
    their mean error. `trivial_mean` and so on are those of the trivial answer, where it is known.
    """
    summaries = [judged_summaries(run) for run in runs]
    trained = [sum(r.trained for r in run.history.rounds) / max(1, len(run.history.rounds)) for run in runs]
    row = _error_figures([summary["error"] for summary in summaries])
    row |= {"trained": Spread.of(trained), "seconds": Spread.of(run.seconds for run in runs)}
    shared = [summary["shared_error"] for summary in summaries if "shared_error" in summary]
    if len(shared) == len(runs):
        row |= {f"shared_{key}": spread for key, spread in _error_figures(shared).items()}
    if (malicious := malicious_error(runs)) is not None:
        row["malicious_mean"] = malicious
    trivial = [figures for run in runs if (figures := trivial_summary(run)) is not None]
    if len(trivial) == len(runs):
        row |= {f"trivial_{key}": spread for key, spread in _error_figures(trivial).items()}
    if any(run.clients.where(run.judged_on).clients_in_mean is not None for run in runs):  # the rest is not known
        row |= {key: Spread(math.nan, math.nan) for key in row if key.removeprefix("shared_") in FIGURES and "mean" not in key}
    return row


def data_differ(runs: Sequence[RunRecord]) -> bool:
    """Whether runs are on different data, by what names their data, or by the tables of clients of one method.

    Results of `train` do not name their data: then other clients, sizes or errors of the trivial answer tell.
    """
    if len({run.data_version for run in runs}) > 1:
        return True
    first: dict[str, RunRecord] = {}
    return any(_tables_differ(first.setdefault(run.name, run).clients, run.clients) for run in runs)


def _tables_differ(one: ClientTable, other: ClientTable) -> bool:
    """Whether two tables cannot be of the same data: one may lack clients of the other, not each of the other."""
    if one is other or any(t.where(split).clients_in_mean is not None for t in (one, other) for split in {*t.split}):
        return False
    if (one.client, one.split) != (other.client, other.split):
        places = [{key: row for row, key in enumerate(zip(t.client, t.split, strict=True))} for t in (one, other)]
        common = [key for key in places[0] if key in places[1]]
        if not (one.not_evaluated or other.not_evaluated) and len(common) < min(map(len, places)):
            return True
        one, other = (t.take(torch.tensor([rows[key] for key in common], dtype=torch.int64))
                      for t, rows in zip((one, other), places, strict=True))  # fmt: skip
    if not torch.equal(one.size, other.size):
        return True
    if one.trivial_error is None or other.trivial_error is None or one.trivial_answer != other.trivial_answer:
        return False
    return not torch.allclose(one.trivial_error, other.trivial_error, rtol=1e-4, equal_nan=True)


def seeds_split_again(runs: Sequence[RunRecord]) -> bool:
    """Whether the data differ from seed to seed: each seed splits them again, or draws its own."""
    return len({run.seed for run in runs}) > 1 and data_differ(runs)


def one_table(runs: Sequence[RunRecord]) -> bool:
    """Whether all seeds are of one table, as far as records show it: every client has as many rows under each of them."""

    def rows(run: RunRecord) -> dict[str, int]:
        count: dict[str, int] = {}
        for client, size in zip(run.clients.client, run.clients.size.tolist(), strict=True):
            count[client] = count.get(client, 0) + size
        return count

    return all(run.target for run in runs) and all(rows(run) == rows(runs[0]) for run in runs[1:])


def in_percent(runs: Sequence[RunRecord]) -> bool:
    """Whether errors are shares: none leaves [0, 1], none is the loss itself, and what is predicted is not a number."""
    errors = torch.cat([error.double() for run in runs for error in (run.clients.error, run.clients.personal_error)
                        if error is not None])  # fmt: skip
    finite = errors[errors.isfinite()]
    names = (SQUARED, ABSOLUTE)
    numeric = any(run.error_is_loss or run.error_name in names or run.clients.trivial_answer in (MEAN, MEDIAN) for run in runs)
    return not numeric and bool(((finite >= 0) & (finite <= 1)).all())


def trivial_summary(run: RunRecord) -> Summary | None:
    """The trivial answer over the clients that a run is judged on; None if it is not known."""
    rows = run.clients.where(run.judged_on).benign
    if rows.trivial_error is None:
        return None
    return summarise(rows.trivial_error, rows.size, rows.size.double() if run.judged_on == "train" else None)


def worse_than_trivial(runs: Sequence[RunRecord]) -> float | None:
    """How many clients fare worse with the model that they are served than with the trivial answer, averaged over seeds."""
    tables = [run.clients.where(run.judged_on).benign for run in runs]
    counts = [int((rows.served_error > rows.trivial_error).sum()) for rows in tables if rows.trivial_error is not None]
    return sum(counts) / len(counts) if counts and len(counts) == len(runs) else None


def trivial_name(runs: Sequence[RunRecord]) -> str:
    """What the trivial answer is, e.g. "most frequent class"; empty if it is not known."""
    return next((run.clients.trivial_answer for run in runs if run.clients.trivial_answer), "")


def judged_summaries(run: RunRecord) -> dict[str, Summary]:
    """The summary of errors, losses and metrics over the clients that a run is judged on."""
    return run.clients.where(run.judged_on).summaries()[run.judged_on]


@dataclass(frozen=True)
class MetricFigures:
    """A metric over the clients that one method is judged on: each of `FIGURES` over seeds, and clients without a value."""

    figures: dict[str, Spread]
    higher_is_better: bool
    missing: tuple[int, ...]  # of each seed


def metric_figures(runs: Sequence[RunRecord], name: str) -> MetricFigures | None:
    """The figures of a metric of one method over its seeds; None if some run does not have it."""
    if not all(name in run.clients.metrics for run in runs):
        return None
    found = [judged_summaries(run)[name] for run in runs]
    return MetricFigures(_error_figures(found), found[0].higher_is_better, tuple(each.missing for each in found))


def _error_figures(errors: Sequence[Summary]) -> dict[str, Spread]:
    """Each of `FIGURES` over seeds, from one summary of the errors, or of a metric, per seed."""
    return {
        "mean": Spread.of(e.mean for e in errors),
        "percentile_90": Spread.of(e.tail_90 for e in errors),
        "worst_10": Spread.of(e.worst_10 for e in errors),
        "standard_deviation": Spread.of(e.standard_deviation for e in errors),
    }


def intervals_of(runs: Sequence[RunRecord], column: str = "error") -> dict[str, Interval]:
    """By figure, the 95 % interval of one method over all clients, its ends averaged over seeds; empty without a sample.

    Seeds share the sample, so that its chance error does not average out.
    """
    splits = [run.judged_on if run.sample_of(run.judged_on) is not None else None for run in runs]
    each = [
        {} if split is None else run.clients.intervals(split).get(column, {}) for run, split in zip(runs, splits, strict=True)
    ]
    ends = {figure: [found[figure] for found in each] for figure in each[0] if all(figure in found for found in each)}
    return {
        figure: Interval(*(sum(getattr(i, end) for i in found) / len(found) for end in ("low", "high")))
        for figure, found in ends.items()
    }


def malicious_error(runs: Sequence[RunRecord]) -> Spread | None:
    """The mean error of malicious clients over seeds; None unless every run judges some beside benign ones."""
    found = []
    for run in runs:
        rows = run.clients.where(run.judged_on)
        if rows.malicious is None or len(rows.benign) == len(rows):
            return None
        bad = rows.take(rows.malicious.nonzero().flatten())
        found.append(mean(bad.served_error, bad.size if run.judged_on == "train" else None))
    return Spread.of(found)


def malicious_clients(run: RunRecord) -> tuple[str, ...]:
    """The ids of the malicious clients of a run, in order; none without an attack."""
    flags = run.clients.malicious
    if flags is None:
        return ()
    return tuple(dict.fromkeys(name for name, bad in zip(run.clients.client, flags.tolist(), strict=True) if bad))


def training_clients(run: RunRecord) -> int:
    """The number of training clients in the run's table of clients: of a sample, those that were evaluated."""
    return len({name for name, seen in zip(run.clients.client, run.clients.seen.tolist(), strict=True) if seen})


def without_own_models(runs: Sequence[RunRecord]) -> bool:
    """Whether the algorithm trains personal models, but none of the clients that the runs are judged on has one."""
    return runs[0].algorithm.personal is not None and not any(run.clients.where(run.judged_on).has_own for run in runs)


def has_untrained_layers(runs: Sequence[RunRecord]) -> bool:
    """Whether clients keep layers, which stay as they began in the shared model."""
    return read(PersonalTraits, runs[0].algorithm.personal).keeps_layers


def count_worse_own_models(table: ClientTable, split: str) -> tuple[int, int]:
    """How many benign clients of a split have an own model with a larger error than the shared one, and how many an own one."""
    rows = table.where(split).benign
    if rows.personal_error is None or rows.clients_in_mean is not None:
        return 0, 0
    return int((rows.personal_error > rows.error).sum()), int((~rows.personal_error.isnan()).sum())
