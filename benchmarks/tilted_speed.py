"""Tilted estimators against scikit-learn's own on 100,000 × 100, to the same tolerance; contenders take turns in one run.

    python benchmarks/tilted_speed.py [--rows 100000] [--features 100] [--passes 5] [--threads 1]

The thesis states that its solvers take 2 to 3 times the time of plain ones (Li 2023, section 7.1.3); the goal here is 3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from threadpoolctl import threadpool_limits

from equipoise.tilted import TiltedLinearRegression, TiltedLogisticRegression

TOLERANCE = 1e-4  # LogisticRegression's default: the largest slope of the mean loss
ALPHA = 1e-4


def data(rows: int, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gaussian features, correlated; a target with noise of standard deviation 1; classes with 5 % wrong labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)) + 0.5 * rng.normal(size=(rows, 1))
    truth = rng.normal(size=features) / features**0.5
    score = x @ truth
    y = score + rng.normal(size=rows)
    labels = (score + 0.3 * rng.logistic(size=rows) > 0).astype(int)
    wrong = rng.random(rows) < 0.05
    return x, y, np.where(wrong, 1 - labels, labels)


def contenders(rows: int) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Name → (maker, whether it regresses)."""
    found: dict[str, tuple[Callable[[], Any], bool]] = {
        "LinearRegression": (LinearRegression, True),
        "LogisticRegression": (lambda: LogisticRegression(C=1 / (ALPHA * rows), tol=TOLERANCE, max_iter=1000), False),
    }
    for tilt in (0.0, -2.0, -0.5, 0.1, 1.0):
        found[f"TiltedLinearRegression {tilt:+g}"] = (lambda t=tilt: TiltedLinearRegression(t, tol=TOLERANCE), True)
    for tilt in (0.0, -2.0, 1.0, 10.0):
        make = lambda t=tilt: TiltedLogisticRegression(t, alpha=ALPHA, tol=TOLERANCE)  # noqa: E731
        found[f"TiltedLogisticRegression {tilt:+g}"] = (make, False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y, labels = data(options.rows, options.features)
    makers = contenders(options.rows)
    times: dict[str, list[float]] = {name: [] for name in makers}
    iterations: dict[str, int] = {}
    last: dict[str, Any] = {}
    with threadpool_limits(options.threads):
        for _ in range(options.passes):
            for name, (make, regresses) in makers.items():
                model = make()
                begin = time.perf_counter()
                model.fit(x, y if regresses else labels)
                times[name].append(time.perf_counter() - begin)
                iterations[name] = int(np.max(getattr(model, "n_iter_", 1)))
                last[name] = model
    print(
        f"{options.rows} × {options.features}, tolerance {TOLERANCE:g}, median of {options.passes}, "
        f"{options.threads} thread(s), scikit-learn {sklearn.__version__}, torch {torch.__version__}"
    )
    print("| model and tilt | seconds | × scikit-learn | iterations |\n|---|---|---|---|")
    for name, (_, regresses) in makers.items():
        original = statistics.median(times["LinearRegression" if regresses else "LogisticRegression"])
        took = statistics.median(times[name])
        print(f"| {name} | {took:.3f} | {took / original:.2f} | {iterations[name]} |")
    for name in ("LogisticRegression", "TiltedLogisticRegression +0"):
        losses = -last[name].predict_log_proba(x)[np.arange(len(labels)), labels]
        value = losses.mean() + ALPHA / 2 * np.square(last[name].coef_).sum()
        print(f"Penalised mean loss of {name}: {value:.10f}")
    for name in ("LinearRegression", "TiltedLinearRegression +0"):
        print(f"Mean squared error of {name}: {np.square(last[name].predict(x) - y).mean():.10f}")


if __name__ == "__main__":
    main()
