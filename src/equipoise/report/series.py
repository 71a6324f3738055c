"""The numbers that figures draw, as pure functions of a study; the page and the exported files both use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from equipoise.report.by_client import changes, client_errors
from equipoise.report.study import GRID, MethodResults, Numbers, Study

MOST_POINTS = 1000  # of a scatter, per method; more would only be a large file and a blot
MOST_ROUNDS = 400  # of a curve


@dataclass(frozen=True, eq=False)
class Line:
    """A curve at points x (P,): the mean over seeds, the lowest and the highest seed, (P,) each."""

    x: Numbers
    middle: Numbers
    low: Numbers
    high: Numbers
    seeds: int

    def __len__(self) -> int:
        return len(self.x)

    def in_unit(self, study: Study) -> Line:
        """A line of errors in the unit that figures show."""
        return Line(self.x, study.in_unit(self.middle), study.in_unit(self.low), study.in_unit(self.high), self.seeds)

    @classmethod
    def of(cls, x: Numbers, curves: Numbers) -> Line:
        """The line of curves (seeds, len(x)) at the points where at least one seed is finite."""
        curves = np.where(np.isfinite(curves), curves, np.nan)
        known = ~np.isnan(curves).all(axis=0)
        x, some = np.asarray(x, dtype=np.float64)[known], curves[:, known]
        if not len(x):
            return cls(x, x, x, x, len(curves))
        return cls(x, np.nanmean(some, axis=0), np.nanmin(some, axis=0), np.nanmax(some, axis=0), len(curves))


@dataclass(frozen=True, eq=False)
class Histogram:
    """The edges of B bins, and for each method the share of its clients in each bin."""

    edges: Numbers  # (B + 1,)
    shares: tuple[Numbers, ...]  # (B,) each, with sum 1 (0 if nothing is finite)
    logarithmic: bool


def histogram(study: Study) -> Histogram:
    """The histogram of the errors of all methods, over the same bins."""
    pooled = [method.pooled("error") for method in study.methods]
    values = np.concatenate(pooled)
    logarithmic = study.spans_decades()
    edges = bins(values if len(values) else np.r_[0, 1.0], percent=study.scale.percent, logarithmic=logarithmic)
    pairs = zip(pooled, study.methods, strict=True)
    return Histogram(edges, tuple(np.histogram(v, edges, weights=m.weights)[0] for v, m in pairs), logarithmic)


def bins(values: Numbers, *, percent: bool, logarithmic: bool) -> Numbers:
    """Edges (B + 1,) of about 33 bins at most, at round numbers; a value at an edge belongs to the bin above it."""
    low, high = float(values.min()), float(values.max())
    if logarithmic:
        return np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), 31)
    if low >= 0 and low < high / 2:
        low = 0.0
    span = high - low or (0.1 if percent else abs(high) or 1.0)
    step = _round_step(span / 33)
    first = math.floor(low / step + 1e-6)
    last = max(first + 1, math.ceil(high / step - 1e-6))
    if last - first < 5:  # all values alike: leave room around the bar
        first, last = (max(0, first - 5) if low >= 0 else first - 5), last + 5
    edges: Numbers = np.arange(first, last + 1, dtype=np.float64) * step
    edges[:-1] -= 1e-6 * step
    edges[-1] += 1e-6 * step
    return edges


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `least`."""
    power = float(10.0 ** math.floor(math.log10(least)))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= least * (1 - 1e-9))


def percentiles(method: MethodResults) -> Line:
    """The error at each percent of `GRID` where every seed is finite; the mean at 90 is that of the table."""
    curves = method.percentile_curves()
    known = np.isfinite(curves).all(axis=0)
    return Line.of(GRID[known], curves[:, known])


@dataclass(frozen=True, eq=False)
class SizeGroups:
    """Groups of clients of similar size: mean size and error, smallest and largest size, number of clients; (G,) each."""

    size: Numbers
    error: Numbers
    least: Numbers
    most: Numbers
    count: Numbers


def by_size(method: MethodResults, most: int = 8) -> SizeGroups:
    """At most `most` groups with about equally many clients, over all seeds; clients of equal size are in one group."""
    size, error = method.pooled("size"), method.pooled("error")
    if len(size) == 0:
        return SizeGroups(size, error, size, size, size)
    cuts = np.unique(np.quantile(size, np.linspace(0, 1, most + 1)[1:-1]))
    group = np.searchsorted(cuts, size)
    members = [(size[group == g], error[group == g]) for g in np.unique(group)]
    rows = [(s.mean(), e.mean(), s.min(), s.max(), len(s)) for s, e in members]
    return SizeGroups(*np.array(rows, dtype=np.float64).T)


def size_range(study: Study) -> tuple[float, float] | None:
    """The smallest and the largest number of examples of a client; None if all have equally many."""
    every = np.concatenate([method.pooled("size") for method in study.methods])
    return (float(every.min()), float(every.max())) if len(every) and every.min() < every.max() else None


def sampled_clients(method: MethodResults) -> list[int]:
    """Positions of clients of the first seed with a finite error: all, or every n-th, so that `MOST_POINTS` suffice."""
    finite = np.flatnonzero(np.isfinite(method.rows[0].error.double().numpy()))
    return [int(k) for k in finite[:: -(-len(finite) // MOST_POINTS) or 1]]


@dataclass(frozen=True, eq=False)
class ErrorPairs:
    """Errors of clients under the shared model and under their own; clients with equal errors share a pair."""

    shared: Numbers  # (P,)
    own: Numbers  # (P,)
    clients: tuple[tuple[str, ...], ...]  # the ids of each pair's clients


def error_pairs(method: MethodResults, *, malicious: bool = False) -> ErrorPairs:
    """The pairs of the benign (or malicious) clients of the first seed that have their own model and two finite errors."""
    rows = method.all_rows[0]
    if rows.personal_error is None:
        return ErrorPairs(np.zeros(0), np.zeros(0), ())
    shared, own = rows.error.double().numpy(), rows.personal_error.double().numpy()
    is_malicious = np.zeros(len(rows), dtype=bool) if rows.malicious is None else rows.malicious.numpy()
    some = np.flatnonzero(np.isfinite(shared) & np.isfinite(own) & (is_malicious == malicious))
    together: dict[tuple[float, float], list[str]] = {}
    for k in some[:: -(-len(some) // MOST_POINTS) or 1]:
        together.setdefault((float(shared[k]), float(own[k])), []).append(rows.client[k])
    points = np.array(list(together), dtype=np.float64).reshape(-1, 2)
    return ErrorPairs(points[:, 0], points[:, 1], tuple(map(tuple, together.values())))


def all_error_pairs(study: Study) -> list[tuple[int, bool, ErrorPairs]]:
    """The pairs of each method whose clients have own models, with its number, and whether they are of malicious clients."""
    numbered = [(index, method) for index, method in enumerate(study.methods) if method.personalised]
    every = [(index, bad, error_pairs(method, malicious=bad)) for index, method in numbered for bad in (False, True)]
    return [(index, malicious, pairs) for index, malicious, pairs in every if len(pairs.own)]


def needs_log_axes(study: Study, values: Numbers) -> bool:
    """Whether losses differ by so much that only logarithmic axes show all of them."""
    return not study.scale.percent and len(values) > 0 and bool(values.min() > 0 and values.max() > 100 * values.min())


def better_with_own(method: MethodResults) -> tuple[int, int, int]:
    """The numbers of benign clients of the first seed that fare better, equally and worse with their own model.

    An error that is not finite is worse than any other.
    """
    rows = method.all_rows[0].benign
    if rows.personal_error is None:
        return 0, 0, 0
    has = ~rows.personal_error.isnan().numpy()
    shared, own = (np.nan_to_num(v.double().numpy()[has], nan=np.inf) for v in (rows.error, rows.served_error))
    return int((own < shared).sum()), int((own == shared).sum()), int((own > shared).sum())


@dataclass(frozen=True, eq=False)
class ChangeCurve:
    """The change of P clients from the first method to another, the largest gain first, over the share of all clients."""

    method: int  # its position in the study
    share: Numbers  # (P,) percent of the clients up to the middle of this one
    change: Numbers  # (P,) mean over seeds; below 0 a client gains
    clients: tuple[str, ...]


def sorted_changes(study: Study) -> tuple[ChangeCurve, ...]:
    """A curve per method that can be compared with the first; all clients, or `MOST_POINTS` of them evenly spaced."""
    if len(study.methods) < 2:
        return ()
    found = client_errors(study)
    made = []
    for each in changes(found):
        finite = np.flatnonzero(np.isfinite(each.change))
        order = finite[np.argsort(each.change[finite], kind="stable")]
        if len(order):
            shown = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_POINTS)).astype(int))
            names = tuple(found.keys[k][-1] for k in order[shown])
            made.append(ChangeCurve(each.method, 100 * (shown + 0.5) / len(order), each.change[order[shown]], names))
    return tuple(made)


@dataclass(frozen=True, eq=False)
class Panel:
    """Curves of one figure over rounds, one per method; a curve without points if nothing is known."""

    title: str
    lines: tuple[Line, ...]
    of_error: bool  # whether the figure is an error, in its unit; else it is a loss

    @property
    def logarithmic(self) -> bool:
        """Whether the values need a logarithmic axis."""
        known = np.concatenate([line.middle for line in self.lines])
        return len(known) > 0 and bool(known.min() > 0 and known.max() > 30 * known.min())


def curves(study: Study) -> tuple[Panel, ...]:
    """Mean and tail over rounds: of the error at evaluations if there are several, else of the rounds' training losses.

    Empty if nothing was recorded.
    """
    if study.evaluated:
        titles = {"error": f"mean {study.scale.noun}"} | ({} if study.judged.means else {"error_90": "90th percentile"})
        return tuple(
            Panel(title, tuple(Line.of(*method.evaluations(key)) for method in study.methods), of_error=True)
            for key, title in titles.items()
        )
    titles = {"loss": "mean of the round's clients", "tail_loss": "worst 10 % of the round's clients"}
    panels = tuple(
        Panel(title, tuple(over_rounds(method, field) for method in study.methods), of_error=False)
        for field, title in titles.items()
    )
    return panels if any(len(line) for line in panels[0].lines) else ()


def over_rounds(method: MethodResults, field: str, *, smoothed: bool = True) -> Line:
    """A field of the round reports as a curve of at most `MOST_ROUNDS` points; `smoothed` by a moving average."""
    values = method.over_rounds(field)
    if values.shape[1] == 0:
        return Line.of(np.zeros(0), values)
    window = smoothing_window(values.shape[1]) if smoothed else 1
    line = Line.of(np.arange(1, values.shape[1] + 1), smooth(values, window))
    thinned = np.unique(np.linspace(0, max(0, len(line) - 1), min(len(line), MOST_ROUNDS)).astype(int))
    return Line(line.x[thinned], line.middle[thinned], line.low[thinned], line.high[thinned], line.seeds)


def trains_all_alike(study: Study) -> bool:
    """Whether all methods train all clients that they draw, and as many in every round: a curve of that would say nothing."""
    fields = (method.over_rounds(field) for method in study.methods for field in ("trained", "cohort"))
    return len({float(value) for values in fields for value in np.unique(values[~np.isnan(values)])}) == 1


def line_widths(lines: Sequence[Line], thin: float, most: float) -> list[float]:
    """The width of each curve. Of curves that coincide, earlier ones are wider, so that all can be seen."""
    later = [sum(np.array_equal(line.middle, other.middle) for other in lines[k + 1 :]) for k, line in enumerate(lines)]
    return [thin + count * min(0.7 * thin, (most - thin) / max(1, *later)) for count in later]


def smoothing_window(rounds: int) -> int:
    """The number of rounds that a point of a curve averages: odd, about a fortieth of all rounds, 1 below 80 rounds."""
    return 2 * (rounds // 80) + 1


def smooth(curves: Numbers, window: int) -> Numbers:
    """The moving average of each row over the finite values within ± window/2; NaN where there is none."""
    finite = np.isfinite(curves)
    kernel = np.ones(window)
    clean = np.where(finite, curves, 0.0)
    sums = np.stack([np.convolve(row, kernel, mode="full") for row in clean])
    counts = np.stack([np.convolve(row.astype(np.float64), kernel, mode="full") for row in finite])
    begin = window // 2
    sums, counts = (values[:, begin : begin + curves.shape[1]] for values in (sums, counts))
    means: Numbers = np.divide(sums, counts, out=np.full_like(clean, np.nan), where=counts > 0.5)
    return means


class Participation(NamedTuple):
    """Clients of one run that came back at least once, where clients come and go (FedBuff)."""

    clients: tuple[str, ...]
    took: tuple[float, ...]  # simulated time of a job
    jobs: tuple[int, ...]  # how often it came back
    staleness: tuple[float, ...]  # of its updates, on average


def participation(method: MethodResults) -> Participation:
    """Who came back how often in the first seed; empty where clients work in rounds."""
    seen: dict[str, list[tuple[float, int]]] = {}
    for report in method.runs[0].history.rounds:
        for client, took, age in report.arrivals:
            seen.setdefault(client, []).append((took, age))
    rows = [(client, jobs[-1][0], len(jobs), sum(age for _, age in jobs) / len(jobs)) for client, jobs in seen.items()]
    return Participation(*zip(*rows, strict=True)) if rows else Participation((), (), (), ())
