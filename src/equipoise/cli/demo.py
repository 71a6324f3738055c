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
from functools import lru_cache
from pathlib import Path
from typing import Any

import equipoise as eq
from equipoise.compare import Comparison
from equipoise.core.files import write_atomically
from equipoise.core.screen import say
from equipoise.engines.simulator.workers import one_thread
from equipoise.report import histogram_picture, write_report

ROUNDS = 100
CLIENTS_PER_ROUND = 100
TAILS = (1.0, 0.8, 0.5, 0.3, 0.1)  # of the family behind the knob


def demo_methods() -> dict[str, eq.Algorithm]:
    """The methods of the demo: FedAvg, and Δ-FL on the worse 80 % and on the worse half of each cohort."""
    solver = eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1)
    tails = {f"Δ-FL {tail}": eq.Algorithm(risk=eq.risk.Superquantile(tail=tail), solver=solver) for tail in (0.8, 0.5)}
    return {"FedAvg": eq.Algorithm(solver=solver), **tails}


def run_demo(out: Path, *, seeds: int = 5, rounds: int | None = None, **data_options: Any) -> Comparison:
    """Train the methods, print their errors, and write report.html, histogram.png and table.csv.

    Then train a family over several tails into the folder `family`, and say how to turn its knob.
    `data_options` go to `eq.data.label_shift`, e.g. fewer clients.
    """
    write_atomically(out / "table.csv", b"")  # an unwritable folder fails now, not after a minute of work
    # One data set per seed, made once for all methods.
    data = lru_cache(maxsize=1)(lambda seed: eq.data.label_shift(seed=seed, **data_options))
    first, methods = data(0), demo_methods()
    rounds = ROUNDS if rounds is None else rounds
    options: dict[str, Any] = {"rounds": rounds, "clients_per_round": min(CLIENTS_PER_ROUND, len(first.train))}
    say(f"A linear model of {first.classes} classes. Clients: {len(first.train)}, rounds: {rounds}, seeds: {seeds}.")
    with one_thread():
        comparison = eq.compare(
            methods, lambda seed: eq.models.Softmax(data(seed).features, data(seed).classes), data, seeds=seeds, **options
        )
        say("", *comparison.summary().split("\n"), "")
        write_report(comparison.all_results, out / "report.html")
        histogram_picture(comparison.all_results, out / "histogram.png")
        write_atomically(out / "table.csv", table_csv(comparison).encode())
        say(*(out / name for name in ("report.html", "histogram.png", "table.csv")))
        model = eq.models.Softmax(first.features, first.classes)
        family = eq.train_family(model, first, methods["FedAvg"], tails=TAILS, progress=False, **options)
    place = family.publish(out / "family")
    say(place, "", f"Turn the knob between average and tail in a browser: equipoise serve {shlex.quote(str(out))} --open")
    return comparison


def table_csv(comparison: Comparison) -> str:
    """A row per method as CSV: mean and standard deviation of every figure over seeds, errors as fractions."""
    text, rows = io.StringIO(), comparison.table()
    keys = list(next(iter(rows.values())))
    writer = csv.writer(text)
    writer.writerow(["method", *(column for key in keys for column in (key, f"{key}_over_seeds"))])
    for method, row in rows.items():
        writer.writerow([method, *(number for key in keys for number in (row[key].mean, row[key].deviation))])
    return text.getvalue()
