"""Seconds and memory of every aggregator on updates of 100 clients with 115,646 parameters (the ConvNet of the Δ-FL papers).

    python benchmarks/aggregators.py [--clients 100] [--parameters 115646] [--threads 2] [--repeats 7] [--json FILE]

The goal is 0.3 s for medians, trimmed means and Krum's distances on two threads, and no temporary of clients² × parameters.
Each rule is timed with equal weights and with weights that differ; the fastest of the repeats is shown, beside the processor
time of that repeat: on a machine with other work the wall time is longer than it need be.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import Tensor

from equipoise import aggregators as agg
from equipoise.types import Aggregator

GOAL = 0.3  # seconds
JUDGED = ("median", "trimmed mean", "Krum", "multi-Krum")


def rules(clients: int) -> dict[str, Aggregator]:
    malicious = min(20, (clients - 3) // 2)
    return {
        "weighted mean": agg.WeightedMean(),
        "median": agg.Median(),
        "trimmed mean": agg.TrimmedMean(0.2),
        "geometric median": agg.GeometricMedian(),
        "Krum": agg.Krum(malicious),
        "multi-Krum": agg.MultiKrum(malicious),
        "clipping": agg.NormClip(),
        "k-norm": agg.KNorm(malicious),
        "k-loss": agg.KLoss(malicious),
        "FedMGDA+": agg.FedMGDA(0.1),
    }


def updates_of(clients: int, parameters: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Updates around a common direction, a fifth of them far off; weights; losses."""
    gen = torch.Generator().manual_seed(0)
    updates = torch.randn(clients, parameters, generator=gen) + torch.randn(parameters, generator=gen)
    updates[: clients // 5] *= 10
    different = torch.rand(clients, generator=gen, dtype=torch.float64) + 0.1
    weights = {"equal": torch.full((clients,), 1 / clients, dtype=torch.float64), "different": different / different.sum()}
    return updates, weights, torch.rand(clients, generator=gen, dtype=torch.float64)


def timed(rule: Aggregator, updates: Tensor, weights: Tensor, losses: Tensor, repeats: int) -> tuple[float, float]:
    """Wall and processor seconds of the fastest call."""
    best = (float("inf"), 0.0)
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        rule(updates, weights, losses=losses)
        best = min(best, (time.perf_counter() - wall, time.process_time() - processor))
    return best


def peak_megabytes(rule: Aggregator, updates: Tensor, weights: Tensor, losses: Tensor) -> float:
    """What torch allocates at most beyond the updates, by its profiler: live bytes after each allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        rule(updates, weights, losses=losses)
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=115_646)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    updates, weightings, losses = updates_of(options.clients, options.parameters)
    size, cube = updates.nbytes / 2**20, updates.nbytes * options.clients / 2**20
    print(f"{options.clients} × {options.parameters} float32 ({size:.0f} MB), {options.threads} threads.")
    print("| rule | weights | seconds | processor s | peak MB beyond the updates |\n|---|---|---|---|---|")
    figures, slow, large = [], [], []
    for name, rule in rules(options.clients).items():
        for kind, weights in weightings.items():
            rule(updates, weights, losses=losses)  # imports and first calls
            wall, processor = timed(rule, updates, weights, losses, options.repeats)
            peak = peak_megabytes(rule, updates, weights, losses)
            print(f"| {name} | {kind} | {wall:.3f} | {processor:.3f} | {peak:.0f} |")
            figures.append({"rule": name, "weights": kind, "seconds": wall, "processor": processor, "peak_mb": peak})
            slow += [f"{name}, {kind} weights ({wall:.2f} s)"] if name in JUDGED and wall > GOAL else []
            large += [f"{name} ({peak:.0f} MB)"] if peak > cube / 4 else []
    print(f"\nGoal of {GOAL} s: " + ("met by all." if not slow else f"missed by {'; '.join(slow)}."))
    print(f"Temporaries near clients² × parameters ({cube:.0f} MB): " + ("none." if not large else "; ".join(large) + "."))
    print(f"Most memory of the whole process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB.")
    if options.json is not None:
        options.json.write_text(json.dumps({"threads": options.threads, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
