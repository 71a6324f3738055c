"""Methods beside each other: the same data, cohorts and batches for each, over several seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.errors import require
from equipoise.result import Result
from equipoise.train import DataOrMaker, ModelOrMaker, train


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: its mean and standard deviation (n − 1; 0 for one seed)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = list(values)
        mean = math.fsum(numbers) / len(numbers)
        squares = math.fsum((v - mean) ** 2 for v in numbers)
        return cls(mean, math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else 0.0)


FIGURES = {
    "mean": "mean",
    "percentile_90": "90th percentile",
    "worst_10": "worst 10 %",
    "standard_deviation": "standard deviation",
}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results by method, one per seed. `summary()` prints the table, `report(path)` writes the page."""

    results: dict[str, list[Result]]

    def table(self) -> dict[str, dict[str, Spread]]:
        """Per method the figures of the test error, in fractions, over seeds, with trained clients per round and seconds."""
        rows = {}
        for method, runs in self.results.items():
            errors = [run.summary().error for run in runs]
            trained = [sum(r.trained for r in run.history.rounds) / max(1, len(run.history.rounds)) for run in runs]
            rows[method] = {
                "mean": Spread.of(e.mean for e in errors),
                "percentile_90": Spread.of(e.percentiles[90] for e in errors),
                "worst_10": Spread.of(e.worst_10 for e in errors),
                "standard_deviation": Spread.of(e.standard_deviation for e in errors),
                "trained": Spread.of(trained),
                "seconds": Spread.of(run.seconds for run in runs),
            }
        return rows

    @property
    def all_results(self) -> list[Result]:
        return [run for runs in self.results.values() for run in runs]

    def summary(self) -> str:
        """The table as text: error over clients, mean ± standard deviation over seeds."""
        first = self.all_results[0]
        who = first.summary()
        seeds = len(next(iter(self.results.values())))
        width = max(len("method"), *(len(m) for m in self.results))
        lines = [
            f"Error over {who.error.clients} {'unseen ' if who.unseen else ''}{who.split} clients, "
            f"{seeds} seed{'s' if seeds > 1 else ''}",
            f"{'method':<{width}}  " + "  ".join(f"{title:>18}" for title in FIGURES.values()) + f"  {'trained/round':>13}",
        ]
        for method, row in self.table().items():
            cells = [f"{row[key].mean:.4f} ± {row[key].deviation:.4f}" for key in FIGURES]
            lines.append(f"{method:<{width}}  " + "  ".join(f"{c:>18}" for c in cells) + f"  {row['trained'].mean:>13.1f}")
        return "\n".join(lines)

    def report(self, path: str | Path) -> Path:
        """Write one HTML page that opens offline."""
        from equipoise.report import write_report

        return write_report(self.all_results, path)


def compare(
    methods: Mapping[str, Algorithm],
    model: ModelOrMaker,
    data: DataOrMaker,
    *,
    rounds: int,
    clients_per_round: int,
    seeds: int | Iterable[int] = 1,
    **options: Any,
) -> Comparison:
    """Train every method with every seed; `seeds=5` means 0 … 4. Further options are those of `train`."""
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    require(len(chosen) > 0, "seeds", "must name at least one seed", seeds)
    require(len(methods) > 0, "methods", "must hold at least one algorithm", dict(methods))
    results: dict[str, list[Result]] = {name: [] for name in methods}
    for seed in chosen:
        seeded = data if isinstance(data, FederatedData) else data(seed)  # once for all methods
        for name, algorithm in methods.items():
            run = train(
                model, seeded, algorithm, rounds=rounds, clients_per_round=clients_per_round, seed=seed, name=name, **options
            )
            results[name].append(run)
    return Comparison(results)
