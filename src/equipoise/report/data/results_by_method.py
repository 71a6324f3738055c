"""Results made ready to be shown: grouped by method, with the numbers that sentences, table and figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise import metrics
from equipoise.errors import InvalidParameter, require
from equipoise.report.data.over_seeds import Spread, figures_of, malicious_clients
from equipoise.report.text.sentences import JudgedClients, Row, ValueFormat, alone, compared

if TYPE_CHECKING:
    from equipoise.result import ClientTable, RunRecord

Numbers = NDArray[np.float64]
GRID = np.arange(0.5, 100.25, 0.5)  # the percents at which percentile curves are drawn; 50 and 90 are among them


@dataclass(frozen=True, eq=False)
class MethodResults:
    """The runs of one method, one per seed, and the clients they are judged on.

    `rows` are the benign clients, with the loss and error of the model that each is served: all that figures and tables show
    unless they say otherwise. `everyone` has malicious clients, too, and the shared model's errors beside the own models'.
    """

    name: str
    runs: tuple[RunRecord, ...]
    rows: tuple[ClientTable, ...]  # of the judged split, one table per run
    everyone: tuple[ClientTable, ...]
    figures: Row
    weighted: bool

    @property
    def has_own(self) -> bool:
        """Whether these clients are served models of their own."""
        return "shared_mean" in self.figures

    @property
    def partly_own(self) -> bool:
        """Whether some of these clients have a model of their own, and others none."""
        found = [rows.benign.personal_error for rows in self.everyone] if self.has_own else []
        return any(own is not None and bool(own.isnan().any()) for own in found)

    @property
    def shared_median(self) -> float | None:
        """The median of the error at the shared model, where clients have their own."""
        if not self.has_own:
            return None
        tables = [rows.benign for rows in self.everyone]
        return Spread.of(metrics.percentile(t.error, 50, t.size.double() if self.weighted else None) for t in tables).mean

    def pooled(self, column: str) -> Numbers:
        """A column over all seeds' clients; non-finite errors' clients are left out of every column."""
        values: Numbers = torch.cat([getattr(rows, column).double() for rows in self.rows]).numpy()
        return values[self.finite]

    @property
    def finite(self) -> NDArray[np.bool_]:
        finite: NDArray[np.bool_] = torch.isfinite(torch.cat([rows.error.double() for rows in self.rows])).numpy()
        return finite

    @property
    def weights(self) -> Numbers:
        """The weight of each pooled client: every seed counts the same; the sum is 1 (0 if nothing is finite)."""
        each = [rows.size.double() if self.weighted else torch.ones(len(rows), dtype=torch.float64) for rows in self.rows]
        values: Numbers = torch.cat([w / w.sum() for w in each]).numpy()[self.finite]
        return values / values.sum() if len(values) else values

    def percentile(self, percent: float) -> Spread:
        """A percentile of the error over clients, over seeds."""
        return Spread.of(
            metrics.percentile(rows.error, percent, rows.size.double() if self.weighted else None) for rows in self.rows
        )

    def percentile_curves(self) -> Numbers:
        """(seeds, len(GRID)): the percentiles of each seed; at 90 their mean is the table's."""
        curves = []
        for rows in self.rows:
            order = torch.argsort(rows.error)
            weights = rows.size.double()[order] if self.weighted else torch.ones(len(rows), dtype=torch.float64)
            mass = (weights.cumsum(0) / weights.sum()).numpy()
            # The slack is for masses such as 0.9 computed as 0.8999…; metrics.percentile allows the same.
            position = np.searchsorted(mass, GRID / 100 - 1e-12).clip(max=len(rows) - 1)
            curves.append(rows.error.double().numpy()[order.numpy()][position])
        return np.stack(curves)

    def mean_and_tail(self) -> tuple[Numbers, Numbers]:
        """(seeds,) each: the mean and the 90th percentile of every seed, the numbers behind the table's."""
        errors = [run.summary().error for run in self.runs]
        return np.array([e.mean for e in errors]), np.array([e.percentiles[90] for e in errors])

    def over_rounds(self, field: str) -> Numbers:
        """(seeds, rounds): a number of every round's report, for the rounds that all seeds have."""
        rounds = min(len(run.history.rounds) for run in self.runs)
        values = [[_number(getattr(report, field, None)) for report in run.history.rounds[:rounds]] for run in self.runs]
        return np.array(values, dtype=np.float64).reshape(len(self.runs), rounds)

    def evaluations(self, key: str, *, known: bool = False) -> tuple[Numbers, Numbers]:
        """The rounds after which all seeds were evaluated, and (seeds, those) a number of the judged split: error, error_90.

        With `known`, only evaluations that have that number at all.
        """
        seeds = [
            {point.round: _number(found.get(key)) for point in run.history.points
             if (found := point.splits.get(run.judged_on)) is not None and (key in found or not known)}
            for run in self.runs
        ]  # fmt: skip
        rounds = sorted(set.intersection(*(set(points) for points in seeds)))
        values = np.array([[points[r] for r in rounds] for points in seeds], dtype=np.float64)
        return np.array(rounds, dtype=np.float64), values.reshape(len(self.runs), len(rounds))

    def worst(self, count: int = 10) -> list[int]:
        """Positions, in the first seed's rows, of the clients with the largest error (then loss), worst first."""

        def order(values: torch.Tensor) -> list[float]:
            return torch.nan_to_num(values.double(), nan=math.inf, posinf=math.inf).tolist()

        error, loss = order(self.rows[0].error), order(self.rows[0].loss)
        return sorted(range(len(error)), key=lambda k: (error[k], loss[k]), reverse=True)[:count]

    def errors_by_client(self, seed: int) -> dict[tuple[str, int], float] | None:
        """The error by id and size of the client, under one seed; None if there is no such run."""
        for run, rows in zip(self.runs, self.rows, strict=True):
            if run.seed == seed:
                return dict(zip(zip(rows.client, rows.size.tolist(), strict=True), rows.error.tolist(), strict=True))
        return None


@dataclass(frozen=True, eq=False)
class Study:
    """One or more methods with the scale their errors are written in."""

    methods: tuple[MethodResults, ...]
    crowd: JudgedClients
    scale: ValueFormat

    @classmethod
    def of(cls, results: Sequence[RunRecord]) -> Study:
        results = list(results)
        require(len(results) > 0, "results", "must hold at least one result", results)
        by_name: dict[str, list[RunRecord]] = {}
        for result in results:
            by_name.setdefault(result.name, []).append(result)
        for name, runs in by_name.items():
            _refuse_strangers(name, runs)
        for what, words in (("data", "data set"), ("error_is_loss", "kind of error")):
            found = sorted({str(getattr(result, what)) for result in results})
            if len(found) > 1:
                raise InvalidParameter("results", f"must be of one {words} to be compared", found, "Report them one by one.")
        split = results[0].judged_on
        if any(result.judged_on != split for result in results):
            found = sorted({result.judged_on for result in results})
            raise InvalidParameter("results", "must be judged on the same split", found, "Report them one by one.")
        table = {name: figures_of(runs) for name, runs in by_name.items()}
        weighted = split == "train"
        methods = []
        for name, runs in by_name.items():
            everyone = tuple(run.clients.where(split) for run in runs)
            served = tuple(_served(rows.benign) for rows in everyone)
            methods.append(MethodResults(name, tuple(runs), served, everyone, table[name], weighted))
        tables = [rows for method in methods for rows in method.rows]
        counts = [len(rows) for rows in tables]
        unseen = not any(bool(rows.seen.any()) for rows in tables)
        benign = sum(counts) < sum(len(rows) for method in methods for rows in method.everyone)
        crowd = JudgedClients((min(counts), max(counts)), split, unseen, weighted, benign)
        return cls(tuple(methods), crowd, _scale(results, methods))

    @property
    def own(self) -> tuple[MethodResults, ...]:
        """The methods under which clients are served models of their own."""
        return tuple(method for method in self.methods if method.has_own)

    @property
    def runs(self) -> list[RunRecord]:
        return [run for method in self.methods for run in method.runs]

    @property
    def attacked(self) -> bool:
        """Whether any client of any run is malicious."""
        return any(malicious_clients(run) for run in self.runs)

    @property
    def table(self) -> dict[str, Row]:
        return {method.name: method.figures for method in self.methods}

    @property
    def seeds(self) -> int:
        """The most seeds that any method has."""
        return max(len(method.runs) for method in self.methods)

    def headline(self) -> str:
        """The sentence at the top."""
        first = self.methods[0]
        if len(self.methods) == 1:
            half = first.percentile(50).mean
            return alone(first.figures, half, self.crowd, self.scale, len(first.runs), first.shared_median)
        return compared(self.table, self.crowd, self.scale, _wins(first, self.best))

    @property
    def best(self) -> MethodResults:
        """Of the methods after the first that with the lowest 90th percentile, of which the headline speaks."""
        others = self.methods[1:] or self.methods
        return min(others, key=lambda m: (math.isnan(v := m.figures["percentile_90"].mean), v))

    @property
    def evaluated(self) -> bool:
        """Whether evaluations make a curve: every method has some, and one has more than that at the end."""
        counts = [len(method.evaluations("error")[0]) for method in self.methods]
        return min(counts) > 0 and max(counts) > 1

    @property
    def unit(self) -> str:
        """What stands after the name of an axis."""
        return " (%)" if self.scale.percent else ""

    def shown(self, values: Numbers) -> Numbers:
        """Errors in the unit that is shown."""
        return 100 * values if self.scale.percent else values

    def left_out(self) -> int:
        """How many clients, over all runs, have an error that is not finite."""
        return sum(int((~method.finite).sum()) for method in self.methods)

    def spans_decades(self) -> bool:
        """Whether a few clients' losses are so large that only a logarithmic axis shows the others."""
        values = np.concatenate([method.pooled("error") for method in self.methods])
        if self.scale.percent or len(values) < 2 or values.min() <= 0:
            return False
        return bool(values.max() > 20 * np.quantile(values, 0.9) or values.max() > 1000 * values.min())


def _served(rows: ClientTable) -> ClientTable:
    """The clients with the loss and error of the model that each is served, in place of the shared one's."""
    if rows.personal_error is None:
        return rows
    return replace(rows, loss=rows.served_loss, error=rows.served_error, personal_loss=None, personal_error=None)


def _number(value: float | None) -> float:
    """A number that was read from a file may be missing there, JSON having no NaN."""
    return math.nan if value is None else float(value)


def _refuse_strangers(name: str, runs: list[RunRecord]) -> None:
    """Runs that share a name are pooled as seeds of one method, so they must be that."""
    fix = "Give each its own name: train(..., name=…), or use equipoise.compare."
    if any(run.algorithm != runs[0].algorithm and repr(run.algorithm) != repr(runs[0].algorithm) for run in runs):
        raise InvalidParameter("results", "with the same name must have the same algorithm", name, fix)
    for what in ("data", "rounds", "clients_per_round"):
        found = sorted({str(getattr(run, what)) for run in runs})
        if len(found) > 1:
            raise InvalidParameter("results", f"with the same name must have the same {what}", (name, found), fix)
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InvalidParameter("results", "with the same name must have different seeds", (name, seeds), fix)


def _scale(results: list[RunRecord], methods: Sequence[MethodResults]) -> ValueFormat:
    """Percentages, unless errors leave [0, 1] or are the losses themselves (a task that is not classification)."""
    tables = [result.clients for result in results]
    columns = [column for table in tables for column in (table.error, table.personal_error) if column is not None]
    error = torch.cat([column.double() for column in columns])
    same = all(result.error_is_loss for result in results)
    finite = error[torch.isfinite(error)]
    percent = not same and bool(((finite >= 0) & (finite <= 1)).all())
    shown = [abs(m.figures[key].mean) for m in methods for key in ("percentile_90", "mean")]
    largest = max((v for v in shown if math.isfinite(v)), default=1.0)
    return ValueFormat.fitting(largest, percent=percent, noun="loss" if same else "error")


def _wins(first: MethodResults, best: MethodResults) -> tuple[int, int]:
    """In how many of the seeds they share `best` has the lower 90th percentile, and how many they share."""

    def by_seed(method: MethodResults) -> dict[int, float]:
        return {run.seed: run.summary().error.percentiles[90] for run in method.runs}

    before, after = by_seed(first), by_seed(best)
    shared = before.keys() & after.keys()
    return sum(after[seed] < before[seed] for seed in shared), len(shared)
