"""Methods beside each other: the same data, cohorts and batches for each, over several seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseError, require
from equipoise.result import Result, RunRecord
from equipoise.train import DataOrMaker, ModelOrMaker, made, train


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


def figures_of(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    """The figures of one method over its seeds: of the error, in fractions, trained clients per round, and seconds."""
    errors = [run.summary().error for run in runs]
    trained = [sum(r.trained for r in run.history.rounds) / max(1, len(run.history.rounds)) for run in runs]
    return {
        "mean": Spread.of(e.mean for e in errors),
        "percentile_90": Spread.of(e.percentiles[90] for e in errors),
        "worst_10": Spread.of(e.worst_10 for e in errors),
        "standard_deviation": Spread.of(e.standard_deviation for e in errors),
        "trained": Spread.of(trained),
        "seconds": Spread.of(run.seconds for run in runs),
    }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results by method, one per seed. `summary()` prints the table, `report(path)` writes the page."""

    results: dict[str, list[Result]]

    def table(self) -> dict[str, dict[str, Spread]]:
        """Per method the figures of the test error, in fractions, over seeds, with trained clients per round and seconds."""
        return {method: figures_of(runs) for method, runs in self.results.items()}

    @property
    def all_results(self) -> list[Result]:
        return [run for runs in self.results.values() for run in runs]

    def summary(self) -> str:
        """The table as text: error over clients, mean ± standard deviation over seeds."""
        first = self.all_results[0]
        who = first.summary()
        seeds = len(next(iter(self.results.values())))
        width = max(len("method"), *(len(m) for m in self.results))
        what = "Loss" if first.error_is_loss else "Error"
        lines = [
            f"{what} over {who.error.clients} {'unseen ' if who.unseen else ''}{who.split} clients, "
            + (f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "1 seed"),
            f"{'method':<{width}}" + "".join(f"{title:>15}" for title in ("mean", "90th pct.", "worst 10 %", "std. dev."))
            + f"{'trained':>9}",
        ]  # fmt: skip
        for method, row in self.table().items():
            shown = [f"{row[k].mean:.3f}" + (f" ± {row[k].deviation:.3f}" if seeds > 1 else "") for k in FIGURES]
            cells = "".join(f"{text:>15}" for text in shown)
            lines.append(f"{method:<{width}}{cells}{row['trained'].mean:>9.1f}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Comparison({len(self.results)} methods)\n{self.summary()}"

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
    clients_per_round: int | None = None,
    seeds: int | Iterable[int] = 1,
    **options: Any,
) -> Comparison:
    """Train every method with every seed; `seeds=5` means 0 … 4. Further options are those of `train`. Source: ours.

    If a run fails, the error's `finished` holds the runs that ended before it.
    """
    chosen = [int(seed) for seed in (seeds if isinstance(seeds, Iterable) else range(int(seeds)))]
    require(len(chosen) > 0 and len(set(chosen)) == len(chosen), "seeds", "must be one or more different seeds", seeds)
    good = isinstance(methods, Mapping) and len(methods) > 0
    require(good, "methods", "must map names to algorithms", type(methods).__name__, 'E.g. {"FedAvg": Algorithm()}.')
    require("seed" not in options, "seed", "is called seeds here", options.get("seed"), "Write seeds=[…] or seeds=5.")
    results: dict[str, list[Result]] = {name: [] for name in methods}
    for seed in chosen:
        # Once per seed, so that all methods start from the same model on the same data.
        start, seeded = made(model, seed, nn.Module, "model"), made(data, seed, FederatedData, "data")
        for name, algorithm in methods.items():
            try:
                run = train(
                    start,
                    seeded,
                    algorithm,
                    rounds=rounds,
                    clients_per_round=clients_per_round,
                    seed=seed,
                    name=name,
                    **options,
                )
            except EquipoiseError as failure:
                failure.add_note(f"This was method {name!r} with seed {seed}.")
                failure.finished = Comparison({method: runs for method, runs in results.items() if runs})
                raise
            results[name].append(run)
    return Comparison(results)
