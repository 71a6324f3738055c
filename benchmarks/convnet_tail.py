"""The tail of the ConvNet's errors on EMNIST by three rules, from the stored errors of each test writer.

The figures are those of emnist-tail (`reproduce/scores.py`), of the stored runs of emnist-convnet:

    python benchmarks/convnet_tail.py
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from equipoise import metrics

STORED = Path(__file__).parent / "stored" / "gpu_tables.tar.gz"
RULES = ("percentile_90", "interpolated", "by_examples")
METHODS = {"FedAvg": "fedavg", "Δ-FL 0.5": "delta-fl-0.5"}
SEEDS = range(5)


def figures(run: dict[str, Any]) -> dict[str, float]:
    """Mean error, the 90th percentile by each rule, the spread over writers and the spread by chance alone, in %."""
    error = torch.tensor(run["test_errors"], dtype=torch.float64)
    size = torch.tensor(run["test_examples"], dtype=torch.float64)
    p = metrics.mean(error)
    found = {
        "mean": p,
        "percentile_90": metrics.percentile(error, 90),
        "interpolated": float(torch.quantile(error, 0.9)),
        "by_examples": metrics.percentile(error, 90, size),
        "spread": metrics.standard_deviation(error),
        "by_chance": float((p * (1 - p) / size).mean().sqrt()),
    }
    return {name: 100 * value for name, value in found.items()}


def stored_figures(path: Path = STORED) -> dict[str, list[dict[str, float]]]:
    """The figures of each method, seed by seed."""
    found = {}
    with tarfile.open(path) as archive:
        for name, file in METHODS.items():
            runs = [archive.extractfile(f"emnist-convnet-paper/runs/{file}-seed{seed}.json") for seed in SEEDS]
            found[name] = [figures(json.load(run)) for run in runs if run is not None]
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """One row per method, and their difference seed by seed; mean ± standard deviation over seeds."""
    columns = ("mean", *RULES, "spread", "by_chance")
    rows = {name: [[run[column] for run in runs] for column in columns] for name, runs in found.items()}
    plain, tail = rows.values()
    rows["− FedAvg"] = [[b - a for a, b in zip(*both, strict=True)] for both in zip(plain, tail, strict=True)]
    lines = ["| method | mean | 90th percentile | interpolated | by examples | spread | by chance |", "|" + "---|" * 7]
    for name, cells in rows.items():
        sign = "+" if name == "− FedAvg" else ""
        texts = [f"{mean(cell):{sign}.2f} ± {stdev(cell):.2f}".replace("-", "−") for cell in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(stored_figures()))
