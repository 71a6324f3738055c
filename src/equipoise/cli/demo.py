"""The demo: FedAvg and Δ-FL on clients that differ in their labels, judged on clients that took no part in training.

The data are those of the label-shift experiment of Pillutla et al. 2023 (App. D): 2500 training clients, 500 test clients that
hold almost a single class each; a linear model with intercept, learning rate 0.1, 100 clients a round. It is no reproduction:
local work is one epoch in batches of 10, and there are fewer rounds, so that it ends within a minute. That setting was chosen
on validation clients of other seeds.
"""

from __future__ import annotations

import csv
import io
import shlex
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import equipoise as eq
from equipoise.cli.listing import spread_text
from equipoise.compare import Comparison
from equipoise.core.files import write_atomically
from equipoise.core.screen import Screen
from equipoise.engines.simulator.workers import one_thread
from equipoise.observers import Run
from equipoise.report.notices import said
from equipoise.report.over_seeds import FIGURES
from equipoise.report.paired import bold_notices, figures_by_seed, separated_methods
from equipoise.types import Observer, RoundReport

ROUNDS = 100
CLIENTS_PER_ROUND = 100
TAILS = (1.0, 0.8, 0.5, 0.3, 0.1)  # of the family behind the knob


def demo_methods() -> dict[str, eq.Algorithm]:
    """The methods of the demo: FedAvg, and Δ-FL on the worse 80 % and on the worse half of each cohort."""
    solver = eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1)
    tails = {f"Δ-FL {tail}": eq.Algorithm(risk=eq.risk.Superquantile(tail=tail), solver=solver) for tail in (0.8, 0.5)}
    return {"FedAvg": eq.Algorithm(solver=solver), **tails}


def run_demo(
    out: Path, *, seeds: int = 5, rounds: int | None = None, console: Screen | None = None, **data_options: Any
) -> Comparison:
    """Train the methods, print their errors as a table and in words, and write report.html, histogram.png and table.csv.

    Then train a family over several tails into the folder `family`, and say how to turn its knob.

    `data_options` go to `eq.data.label_shift`, e.g. fewer clients.
    """
    console = console or Screen()
    rounds = ROUNDS if rounds is None else rounds
    write_atomically(out / "table.csv", b"")  # an unwritable folder fails now, not after a minute of work
    # One data set per seed, made once for all methods.
    data = lru_cache(maxsize=1)(lambda seed: eq.data.label_shift(seed=seed, **data_options))
    first = data(0)
    methods = demo_methods()
    about = (
        f"{len(first.train)} clients train a linear model together, {CLIENTS_PER_ROUND} per round for {rounds} rounds. "
        f"Clients hold different mixes of {first.classes} classes. The model then meets clients it has never seen."
    )
    console.print(Text(about))
    with one_thread(), ProgressOverRuns(console, total=len(methods) * seeds * rounds, seeds=seeds) as bar:
        comparison = eq.compare(
            methods, lambda seed: eq.models.Softmax(data(seed).features, data(seed).classes), data, rounds=rounds, seeds=seeds,
            clients_per_round=min(CLIENTS_PER_ROUND, len(first.train)), observers=[bar], progress=False,
        )  # fmt: skip
    console.print(result_table(comparison))
    console.print(Text(in_words(comparison) + "\n"))
    console.say(*write_files(comparison, out))
    clients = min(CLIENTS_PER_ROUND, len(first.train))
    with one_thread():
        family = eq.train_family(
            eq.models.Softmax(first.features, first.classes), first, demo_methods()["FedAvg"], tails=TAILS, rounds=rounds,
            clients_per_round=clients, progress=False,
        )  # fmt: skip
    console.say(
        family.publish(out / "family"), "", f"Turn the knob between average and tail in a browser: {serve_command(out)}"
    )
    return comparison


def serve_command(out: Path) -> str:
    """The command that shows the demo's family, as it can be typed here."""
    called = Path(sys.argv[0])
    here = called.name == "equipoise" and shutil.which("equipoise") != str(called.resolve()) and called.exists()
    return f"{shlex.quote(sys.argv[0]) if here else 'equipoise'} serve {shlex.quote(str(out))} --open"


class ProgressOverRuns(Observer):
    """An observer that shows one progress bar over all methods and seeds."""

    def __init__(self, console: Screen, *, total: int, seeds: int) -> None:
        self._seeds = seeds
        self._bar = Progress(console=console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> ProgressOverRuns:
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def on_start(self, run: Run) -> None:
        """Show the seed and the name of the run that begins."""
        self._bar.update(self._task, description=f"seed {run.seed + 1} of {self._seeds}  {run.name:<8}")

    def on_round(self, report: RoundReport) -> None:
        """Move the bar by one round."""
        self._bar.advance(self._task)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def result_table(comparison: Comparison) -> Table:
    """A table of the figures of the test error, ± standard deviation over seeds, with what seeds separate in bold."""
    who = comparison.all_results[0].summary()
    seeds = len(next(iter(comparison.results.values())))
    over = f", ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed"
    table = Table(title=f"\nTest error in % over {who.error.clients} unseen clients{over}", title_justify="left")
    table.add_column("method", no_wrap=True)
    for title in FIGURES.values():
        table.add_column(title, justify="right")
    rows = comparison.table()
    values = figures_by_seed(comparison.results)
    bold = {key: separated_methods(values[key]) for key in FIGURES}
    table.caption, table.caption_justify = said(bold_notices(any(bold.values()), values["mean"])), "left"
    for method, row in rows.items():
        styles = {key: "bold green" if method in bold[key] else "" for key in FIGURES}
        table.add_row(method, *(Text(spread_text(row[key], seeds, 100, 1), style=styles[key]) for key in FIGURES))
    return table


def in_words(comparison: Comparison) -> str:
    """Sentences on who is left behind by FedAvg, and how Δ-FL changes that, with the measured figures."""
    rows = comparison.table()
    fedavg, tail = rows["FedAvg"], rows["Δ-FL 0.5"]
    before, after = fedavg["percentile_90"].mean, tail["percentile_90"].mean
    verb = "lowers" if after < before else "does not lower"
    ninetieth = {name: [run.summary().error.percentiles[90] for run in runs] for name, runs in comparison.results.items()}
    pairs = list(zip(ninetieth["FedAvg"], ninetieth["Δ-FL 0.5"], strict=True))
    wins = sum(ours < theirs for theirs, ours in pairs)
    cost = 100 * (tail["mean"].mean - fedavg["mean"].mean)
    return (
        f"With FedAvg the tenth of the unseen clients that fares worst sees an error of {_percent(fedavg['worst_10'].mean)}, "
        f"against {_percent(fedavg['mean'].mean)} on average. Each client here holds almost one class alone; left behind are "
        f"those with the classes that the model confuses most. Training on the worse half of each cohort (Δ-FL 0.5) {verb} "
        f"the 90th percentile: {_percent(before)} before, {_percent(after)} after, lower in {wins} of {len(pairs)} "
        f"seed{'s' if len(pairs) > 1 else ''}. The mean error changes by {cost:+.1f} points."
    )


def write_files(comparison: Comparison, out: Path) -> list[Path]:
    """Write report.html, histogram.png and table.csv, each whole or not at all; returns their paths."""
    from equipoise.report import histogram_picture, write_report

    report, picture, table = out / "report.html", out / "histogram.png", out / "table.csv"
    write_report(comparison.all_results, report)
    histogram_picture(comparison.all_results, picture)
    write_atomically(table, table_csv(comparison).encode())
    return [report, picture, table]


def table_csv(comparison: Comparison) -> str:
    """A row per method as CSV: mean and standard deviation of every figure over seeds, errors as fractions."""
    text = io.StringIO()
    writer = csv.writer(text)
    rows = comparison.table()
    keys = list(next(iter(rows.values())))
    writer.writerow(["method", *(column for key in keys for column in (key, f"{key}_over_seeds"))])
    for method, row in rows.items():
        writer.writerow([method, *(number for key in keys for number in (row[key].mean, row[key].deviation))])
    return text.getvalue()
