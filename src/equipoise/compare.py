"""Methods beside each other: the same data, cohorts and batches for each, over several seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseError, require
from equipoise.metrics import Summary, mean
from equipoise.result import ClientTable, Result, RunRecord
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


SHARED = "  shared model"  # the row below a method whose clients are served their own models
Writer = Callable[[float], str]
FIGURES = {
    "mean": "mean",
    "percentile_90": "90th percentile",
    "worst_10": "worst 10 %",
    "standard_deviation": "standard deviation",
}


def figures_of(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    """The figures of one method over its seeds: of the error, in fractions, trained clients per round, and seconds.

    The error is that of the model each client is served, over benign clients. Where that is a model of the client's own,
    `shared_mean` and so on are the figures of the shared model; where malicious clients are left out, `malicious_mean` is
    their mean error.
    """
    summaries = [run.summary() for run in runs]
    trained = [sum(r.trained for r in run.history.rounds) / max(1, len(run.history.rounds)) for run in runs]
    row = _error_figures([summary.error for summary in summaries])
    row |= {"trained": Spread.of(trained), "seconds": Spread.of(run.seconds for run in runs)}
    shared = [summary.shared_error for summary in summaries if summary.shared_error is not None]
    if len(shared) == len(runs):
        row |= {f"shared_{key}": spread for key, spread in _error_figures(shared).items()}
    apart = [rows for run in runs if (rows := malicious_rows(run.clients.where(run.judged_on))) is not None]
    if len(apart) == len(runs):
        weighed = runs[0].judged_on == "train"
        row["malicious_mean"] = Spread.of(mean(rows.served_error, rows.size if weighed else None) for rows in apart)
    return row


def _error_figures(errors: Sequence[Summary]) -> dict[str, Spread]:
    """The figures of `FIGURES`, over seeds."""
    return {
        "mean": Spread.of(e.mean for e in errors),
        "percentile_90": Spread.of(e.percentiles[90] for e in errors),
        "worst_10": Spread.of(e.worst_10 for e in errors),
        "standard_deviation": Spread.of(e.standard_deviation for e in errors),
    }


def malicious_rows(rows: ClientTable) -> ClientTable | None:
    """The rows of malicious clients, which no figure of benign ones counts; None if there are none, or no others."""
    if rows.malicious is None or len(rows.benign) == len(rows):
        return None
    return rows.take(rows.malicious.nonzero().flatten())


def malicious_clients(run: RunRecord) -> tuple[str, ...]:
    """The ids of the malicious clients of a run, in order; none without an attack."""
    flags = run.clients.malicious
    if flags is None:
        return ()
    return tuple(dict.fromkeys(name for name, bad in zip(run.clients.client, flags.tolist(), strict=True) if bad))


def training_clients(run: RunRecord) -> int:
    """How many clients took part in training, as far as the table of clients knows."""
    return len({name for name, seen in zip(run.clients.client, run.clients.seen.tolist(), strict=True) if seen})


def count_words(numbers: Iterable[int]) -> str:
    """A number that may differ from run to run.

    >>> count_words([8, 8]), count_words([7, 1000, 8])
    ('8', '7 to 1,000')
    """
    found = sorted(numbers)
    return f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Names in a sentence; of many, the first ones.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a', 'a, b and c', 'a, b and 2 others')
    """
    if most is not None and len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most:,} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def without_own_models(runs: Sequence[RunRecord]) -> bool:
    """Whether an algorithm gives clients their own models, but those that a run is judged on have none."""
    personal = getattr(runs[0].algorithm, "personal", None) is not None
    return personal and not any(run.clients.where(run.judged_on).has_own for run in runs)


def attack_words(runs: Sequence[RunRecord]) -> str:
    """How many clients are malicious, without the end of the sentence; empty if nobody is."""
    bad = [len(malicious_clients(run)) for run in runs]
    if not any(bad):
        return ""
    total = count_words(training_clients(run) for run in runs)
    return f"{count_words(bad)} of {total} training clients {'are' if max(bad) > 1 else 'is'} malicious"


def remarks(methods: Mapping[str, Sequence[RunRecord]], table: Mapping[str, Mapping[str, Spread]], write: Writer) -> str:
    """One line on what a table of methods counts: whose models, which clients. Empty where there is nothing to say."""
    own = [name for name, row in table.items() if "shared_mean" in row]
    found = []
    if own:
        below = "the row below it is" if len(own) == 1 else "the rows below them are"
        found.append(f"Under {listed(own)}, clients are served their own models; {below} of the shared model.")
    if lacking := [name for name, runs in methods.items() if without_own_models(runs)]:
        found.append(f"Under {listed(lacking)}, these clients have no models of their own, and are served the shared one.")
    if attack := attack_words([run for runs in methods.values() for run in runs]):
        theirs = [f"{name} {write(row['malicious_mean'].mean)}" for name, row in table.items() if "malicious_mean" in row]
        left_out = f", and left out above; their mean: {', '.join(theirs)}" if theirs else ""
        found.append(f"{attack}{left_out}.")
    lost = {name: sum(len(r.rejected) for run in runs for r in run.history.rounds) for name, runs in methods.items()}
    if any(lost.values()):
        each = ", ".join(f"{name} {count:,}" for name, count in lost.items() if count)
        found.append(f"Updates left out because they were not finite or absurdly large: {each}.")
    return " ".join(found)


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
        who, table = first.summary(), self.table()
        seeds = len(next(iter(self.results.values())))
        width = max(len(SHARED) if any("shared_mean" in row for row in table.values()) else 0, *map(len, ("method", *table)))
        what = "Loss" if first.error_is_loss else "Error"
        kind = f"{'unseen ' if who.unseen else ''}{'benign ' if who.malicious else ''}{who.split}"
        lines = [
            f"{what} over {who.error.clients} {kind} clients, "
            + (f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "1 seed"),
            f"{'method':<{width}}" + "".join(f"{title:>15}" for title in ("mean", "90th pct.", "worst 10 %", "std. dev."))
            + f"{'trained':>9}",
        ]  # fmt: skip

        def cells(row: Mapping[str, Spread], prefix: str = "") -> str:
            spreads = [row[prefix + key] for key in FIGURES]
            shown = [f"{s.mean:.3f}" + (f" ± {s.deviation:.3f}" if seeds > 1 else "") for s in spreads]
            return "".join(f"{text:>15}" for text in shown)

        for method, row in table.items():
            lines.append(f"{method:<{width}}{cells(row)}{row['trained'].mean:>9.1f}")
            if "shared_mean" in row:
                lines.append(f"{SHARED:<{width}}{cells(row, 'shared_')}")
        if said := remarks(self.results, table, "{:.3f}".format):
            lines.append(said)
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
