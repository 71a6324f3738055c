"""Results grouped by method, with the numbers that the headline, tables and figures of a report share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise import metrics
from equipoise.core.error_names import ABSOLUTE, SQUARED, ZERO_ONE, error_definition
from equipoise.errors import InvalidParameter, require
from equipoise.report.formats import Judged, ValueFormat, distinct_names
from equipoise.report.over_seeds import Spread, figures_of, in_percent, intervals_of, judged_summaries, malicious_clients
from equipoise.report.paired import LEAST_SEEDS, PairedDifference, figures_by_seed, judged_on_validation, paired

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

Numbers = NDArray[np.float64]
GRID = np.arange(0.5, 100.25, 0.5)  # the percents at which percentile curves are drawn; 50 and 90 are among them
UNNAMED = "run"  # what `train` calls a run that is given no name
FINEST = 1e-12  # the slack for masses such as 0.9 computed as 0.8999…; metrics.percentile allows the same


@dataclass(frozen=True, eq=False)
class MethodResults:
    """The runs of one method, one per seed, and the clients they are judged on.

    `rows` are the benign clients, with the loss and error of the model that each is served; figures and tables show these
    unless they say otherwise. `all_rows` have malicious clients, too, and the errors of shared and personal models.
    """

    name: str
    runs: tuple[RunRecord, ...]
    rows: tuple[ClientTable, ...]  # of the judged split, one table per run
    all_rows: tuple[ClientTable, ...]
    figures: Mapping[str, Spread]
    weighted: bool
    intervals: Mapping[str, metrics.Interval] = field(default_factory=dict)  # by figure, where a sample was evaluated
    shared_intervals: Mapping[str, metrics.Interval] = field(default_factory=dict)  # of the shared model, likewise

    @property
    def personalised(self) -> bool:
        """Whether clients of this method are served models of their own."""
        return "shared_mean" in self.figures

    @property
    def partly_personalised(self) -> bool:
        """Whether some clients of this method have a model of their own, and others none."""
        errors = [rows.benign.personal_error for rows in self.all_rows] if self.personalised else []
        return any(error is not None and bool(error.isnan().any()) for error in errors)

    def pooled(self, column: str) -> Numbers:
        """A column over the clients of all seeds, (P,), without clients whose error is not finite."""
        values: Numbers = torch.cat([getattr(rows, column).double() for rows in self.rows]).numpy()
        return values[self.finite]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which clients, over all seeds, have a finite error."""
        finite: NDArray[np.bool_] = torch.isfinite(torch.cat([rows.error.double() for rows in self.rows])).numpy()
        return finite

    @property
    def weights(self) -> Numbers:
        """The weight of each client of `pooled`, (P,): seeds count equally, and weights sum to 1 (0 if no error is finite)."""
        each = [rows.size.double() if self.weighted else torch.ones(len(rows), dtype=torch.float64) for rows in self.rows]
        values: Numbers = torch.cat([w / w.sum() for w in each]).numpy()[self.finite]
        return values / values.sum() if len(values) else values

    def median(self, *, shared: bool = False) -> float:
        """The median error over clients, averaged over seeds: of the models that they are served, or of the shared one."""
        tables = [rows.benign for rows in self.all_rows] if shared else self.rows
        weights = (rows.size.double() if self.weighted else None for rows in tables)
        return Spread.of(metrics.percentile(t.error, 50, w) for t, w in zip(tables, weights, strict=True)).mean

    def percentile_curves(self) -> Numbers:
        """The error at each percent of `GRID`, (seeds, len(GRID)); the mean at 90 is that of the table."""
        curves = []
        for rows in self.rows:
            order = torch.argsort(rows.error)
            weights = rows.size.double()[order] if self.weighted else torch.ones(len(rows), dtype=torch.float64)
            mass = (weights.cumsum(0) / weights.sum()).numpy()
            position = np.searchsorted(mass, GRID / 100 - FINEST).clip(max=len(rows) - 1)
            curves.append(rows.error.double().numpy()[order.numpy()][position])
        return np.stack(curves)

    def mean_and_tail(self) -> tuple[Numbers, Numbers]:
        """The mean and the 90th percentile of the error for every seed: (seeds,) and (seeds,)."""
        errors = [judged_summaries(run)["error"] for run in self.runs]
        return np.array([e.mean for e in errors]), np.array([e.percentiles[90] for e in errors])

    def over_rounds(self, field: str) -> Numbers:
        """A field of the round reports, (seeds, rounds), for the rounds that all seeds have; NaN where it is unknown."""
        rounds = min(len(run.history.rounds) for run in self.runs)
        values = [[_number(getattr(report, field)) for report in run.history.rounds[:rounds]] for run in self.runs]
        return np.array(values, dtype=np.float64).reshape(len(self.runs), rounds)

    def evaluations(self, key: str, *, known: bool = False) -> tuple[Numbers, Numbers]:
        """The rounds (E,) after which all seeds were evaluated, and a figure of the judged split then, (seeds, E).

        `key` names the figure, e.g. "error" or "error_90". With `known`, only evaluations that have the figure count.
        """
        seeds = [
            {point.round: _number(figures.get(key)) for point in run.history.points
             if (figures := point.splits.get(run.judged_on)) is not None and (key in figures or not known)}
            for run in self.runs
        ]  # fmt: skip
        rounds = sorted(set.intersection(*(set(points) for points in seeds)))
        values = np.array([[points[r] for r in rounds] for points in seeds], dtype=np.float64)
        return np.array(rounds, dtype=np.float64), values.reshape(len(self.runs), len(rounds))


@dataclass(frozen=True, eq=False)
class Study:
    """What a report shows: one or more methods, the clients they are judged on, and how errors are written."""

    methods: tuple[MethodResults, ...]
    judged: Judged
    scale: ValueFormat

    @classmethod
    def of(cls, results: Sequence[RunRecord]) -> Study:
        """Group results by name. Results that cannot be compared are refused."""
        results = list(results)
        require(len(results) > 0, "results", "must hold at least one result", results)
        by_name: dict[str, list[RunRecord]] = {}
        for result in results:
            by_name.setdefault(result.name, []).append(result)
        for name, runs in by_name.items():
            _refuse_mixed_runs(name, runs)
        _require_equal(results, "data", "must be of one data set to be compared", "Report them one by one.")
        _require_equal(results, "error_is_loss", "must be of one kind of error to be compared", "Report them one by one.")
        _require_equal(results, "judged_on", "must be judged on the same split", "Report them one by one.")
        split = results[0].judged_on
        methods = []
        if list(by_name) == [UNNAMED]:
            by_name = {"this model": by_name[UNNAMED]}
        for name, runs in by_name.items():
            all_rows = tuple(run.clients.where(split) for run in runs)
            served = tuple(_served(rows.benign) for rows in all_rows)
            intervals = intervals_of(runs), intervals_of(runs, "shared_error")
            methods.append(MethodResults(name, tuple(runs), served, all_rows, figures_of(runs), split == "train", *intervals))
        return cls(tuple(methods), Judged.of(results), _scale(results, methods))

    def with_short_names(self) -> Study:
        """The study with names of methods that fit a figure and differ there."""
        names = distinct_names([method.name for method in self.methods])
        return replace(self, methods=tuple(replace(m, name=name) for m, name in zip(self.methods, names, strict=True)))

    @property
    def personalised(self) -> tuple[MethodResults, ...]:
        """The methods under which clients are served models of their own."""
        return tuple(method for method in self.methods if method.personalised)

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, method by method."""
        return [run for method in self.methods for run in method.runs]

    @property
    def runs_by_method(self) -> dict[str, Sequence[RunRecord]]:
        """The runs by the name of the method."""
        return {method.name: method.runs for method in self.methods}

    @property
    def names_clients(self) -> bool:
        """Whether the page may name single clients: no run protects them."""
        return not any(run.protects_clients for run in self.runs)

    @property
    def attacked(self) -> bool:
        """Whether any client of any run is malicious."""
        return any(malicious_clients(run) for run in self.runs)

    @property
    def table(self) -> dict[str, Mapping[str, Spread]]:
        """The figures by the name of the method."""
        return {method.name: method.figures for method in self.methods}

    @property
    def seeds(self) -> int:
        """The largest number of seeds that any method has."""
        return max(len(method.runs) for method in self.methods)

    def paired_differences(self, figure: str) -> list[PairedDifference]:
        """One of `FIGURES` under each method minus that under the first one, in each seed that both have."""
        (_, before), *others = self.figures_by_seed[figure].items()
        return [paired(name, after, before) for name, after in others]

    @cached_property
    def figures_by_seed(self) -> dict[str, dict[str, dict[int, float]]]:
        """Each of `FIGURES` by method and seed."""
        return figures_by_seed(self.runs_by_method)

    @cached_property
    def validation(self) -> Study | None:
        """The same runs judged on validation data; None unless they are judged on test clients, and all have both."""
        found = None if self.judged.means or len(self.methods) < 2 else judged_on_validation(self.runs_by_method)
        return None if found is None else Study.of([run for runs in found.values() for run in runs])

    @property
    def chosen(self) -> MethodResults | None:
        """The method with the lowest 90th percentile on validation data; None without such data."""
        if self.validation is None:
            return None
        reached = [_or_inf(row["percentile_90"].mean) for row in self.validation.table.values()]
        return self.methods[reached.index(min(reached))]

    @property
    def best(self) -> MethodResults:
        """The method that the headline compares with the first: chosen on validation data if there are any.

        Without them, or if these choose the first, it has the lowest 90th percentile on the judged clients, clearly lower ones
        first: those with the verdict "lower", or of two seeds, lower in both.
        """
        first, *others = self.methods
        if (chosen := self.chosen) is not None and chosen is not first:
            return chosen
        found = zip(others, self.paired_differences("percentile_90"), strict=True)
        clear = [method for method, each in found if _clearly_lower(each)]
        return min(clear or others or [first], key=lambda method: _or_inf(method.figures["percentile_90"].mean))

    @property
    def data_name(self) -> str:
        """The name of the data, without the seeds of attacks."""
        return _without_seed(self.runs[0].data)

    @property
    def measured(self) -> str:
        """Which error it is, and of which column, e.g. "squared error of price"; the noun where runs do not say, or differ."""
        named = {run.measured for run in self.runs}
        return named.pop() if len(named) == 1 else self.scale.noun

    @property
    def noun(self) -> str:
        """The error in captions: "error" where it is the share of wrong examples, else what is measured."""
        return self.scale.noun if self.scale.percent else self.measured

    @property
    def never_negative(self) -> bool:
        """Whether the error cannot be negative: an error that is not below 0 anywhere; a loss of one's own can be."""
        errors = torch.cat([rows.error for method in self.methods for rows in method.rows])
        if self.scale.noun == "loss" and not all(run.error_name in (SQUARED, ABSOLUTE) for run in self.runs):
            return False
        return not bool((errors < 0).any())

    @property
    def definition(self) -> str:
        """What the error measures on the examples of a client."""
        if self.measured == self.scale.noun:
            wrong = error_definition(ZERO_ONE)
            return wrong if self.scale.percent else f"the {self.scale.noun} function's value, averaged over a client's examples"
        return error_definition(self.runs[0].error_name, self.runs[0].target)

    @property
    def with_trivial(self) -> MethodResults | None:
        """The first method whose runs know the trivial answer; None if no method does."""
        return next((method for method in self.methods if "trivial_mean" in method.figures), None)

    @property
    def evaluated(self) -> bool:
        """Whether evaluations make a curve: every method has some, and one has more than the one at the end."""
        counts = [len(method.evaluations("error")[0]) for method in self.methods]
        return min(counts) > 0 and max(counts) > 1

    @property
    def axis_name(self) -> str:
        """The error on an axis, with its unit, e.g. "error (%)" or "absolute error of rentals"."""
        return f"{self.noun}{self.unit}"

    @property
    def unit(self) -> str:
        """The unit of the error, after the name of an axis."""
        return " (%)" if self.scale.percent else ""

    def in_unit(self, values: Numbers) -> Numbers:
        """Errors in the unit that figures show: percent, or as they are."""
        return 100 * values if self.scale.percent else values

    def nonfinite_clients(self) -> int:
        """The number of clients, over all runs, whose error is not finite."""
        return sum(int((~method.finite).sum()) for method in self.methods)

    def spans_decades(self) -> bool:
        """Whether losses differ by so much that only a logarithmic axis shows all clients."""
        values = np.concatenate([method.pooled("error") for method in self.methods])
        if self.scale.percent or len(values) < 2 or values.min() <= 0:
            return False
        return bool(values.max() > 20 * np.quantile(values, 0.9) or values.max() > 1000 * values.min())


def _clearly_lower(each: PairedDifference) -> bool:
    """Whether a difference is below 0 beyond chance; of two seeds, in both."""
    if each.seeds == LEAST_SEEDS - 1:
        return all(value < 0 for value in each.values)
    return each.verdict == "lower"


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _served(rows: ClientTable) -> ClientTable:
    """The table with `loss` and `error` replaced by those of the model that each client is served."""
    if rows.personal_error is None:
        return rows
    served = replace(rows, loss=rows.served_loss, error=rows.served_error, personal_loss=None, personal_error=None)
    return replace(served, error_deviation=None, error_skewness=None) if rows.has_own else served  # of the shared model


def _number(value: float | None) -> float:
    """The value, or NaN where a log has none: JSON cannot hold NaN."""
    return math.nan if value is None else float(value)


def _without_seed(text: str) -> str:
    """A name of data without the seed of an attack: each seed of a study draws its own malicious clients.

    >>> _without_seed("digits under ALIE(share=0.2, seed=1, factor=1.5)")
    'digits under ALIE(share=0.2, factor=1.5)'
    """
    return re.sub(r"(, )?\bseed=\d+", "", text)


def _require_equal(runs: Sequence[RunRecord], attribute: str, rule: str, fix: str, name: str | None = None) -> None:
    """Refuse runs (of one name) that differ in an attribute."""
    values = sorted({_without_seed(str(getattr(run, attribute))) for run in runs})
    if len(values) > 1:
        raise InvalidParameter("results", rule, values if name is None else (name, values), fix)


def _refuse_mixed_runs(name: str, runs: list[RunRecord]) -> None:
    """Refuse runs of one name that are not seeds of one method, because they would be pooled."""
    fix = "Give each its own name: train(..., name=…), or use equipoise.compare."
    if any(run.algorithm != runs[0].algorithm and repr(run.algorithm) != repr(runs[0].algorithm) for run in runs):
        raise InvalidParameter("results", "with the same name must have the same algorithm", name, fix)
    for attribute in ("data", "rounds", "clients_per_round"):
        _require_equal(runs, attribute, f"with the same name must have the same {attribute}", fix, name)
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InvalidParameter("results", "with the same name must have different seeds", (name, seeds), fix)


def _scale(results: list[RunRecord], methods: Sequence[MethodResults]) -> ValueFormat:
    """Percent where errors are shares, else plain numbers."""
    losses = all(result.error_is_loss for result in results)
    percent = in_percent(results)
    shown = [abs(m.figures[key].mean) for m in methods for key in ("percentile_90", "mean")]
    largest = max((v for v in shown if math.isfinite(v)), default=1.0)
    return ValueFormat.fitting(largest, percent=percent, noun="loss" if losses else "error")
