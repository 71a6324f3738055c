"""What five seeds in one batched run (`train_many`) cost, as a share of five runs one after another (`train`).

    python benchmarks/many.py [--device cpu|cuda] [--model softmax|network] [--seeds 5] [--rounds N] [--passes 7] [--threads N]
                              [--json FILE]

Softmax(60, 10), or a network with 32 hidden units, with 10 and 100 clients per round, batches of 10 and one local epoch, for
FedAvg and for Δ-FL with tail 0.5, which also needs the losses of every cohort. Clients have 100 examples each ("equal") or
log-normal numbers of them, of median 50 and σ = 1 ("ragged"). Whole runs are timed, with their set-up and their evaluation; the
two contenders take turns, and the median of the passes' ratios is shown with the smallest and the largest, beside the median
ratio of processor times, which other work on the machine disturbs less. Before that both run once and are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import equipoise as eq

GOAL = 0.5
SOLVER = eq.solvers.SGD(lr=0.01, batch_size=10)
ALGORITHMS = {
    "FedAvg": eq.Algorithm(solver=SOLVER),
    "Δ-FL": eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=SOLVER),
}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: eq.models.Softmax(60, 10),
    "network": lambda: nn.Sequential(nn.Linear(60, 32), nn.Tanh(), nn.Linear(32, 10)),
}


def gaussian_clients(name: str, sizes: Tensor) -> eq.FederatedData:
    """Clients with so many Gaussian examples each, and random classes: what is learned does not matter here."""
    gen = torch.Generator().manual_seed(0)
    count = int(sizes.sum())
    x, y = torch.randn(count, 60, generator=gen), torch.randint(0, 10, (count,), generator=gen)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = tuple(f"client-{k}" for k in range(len(sizes)))
    return eq.FederatedData(eq.ClientSet(x, y, offsets, ids), name=name, classes=10)


def both_kinds(clients: int = 200) -> list[eq.FederatedData]:
    log_normal = torch.empty(clients).log_normal_(math.log(50), 1.0, generator=torch.Generator().manual_seed(1))
    return [
        gaussian_clients("equal", torch.full((clients,), 100)),
        gaussian_clients("ragged", log_normal.long().clamp(min=1)),
    ]


def seconds_of(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor


def largest_difference(together: list[eq.Result], apart: list[eq.Result]) -> float:
    return max(float((a.params - b.params).abs().max()) for a, b in zip(together, apart, strict=True))


def measure(
    data: eq.FederatedData, algorithm: eq.Algorithm, clients_per_round: int, options: argparse.Namespace
) -> dict[str, float]:
    engine = eq.engines.Simulator(device=options.device)
    torch.manual_seed(0)
    model = MODELS[options.model]()
    common = {"rounds": options.rounds, "clients_per_round": clients_per_round, "engine": engine, "progress": False}

    def together() -> list[eq.Result]:
        return eq.train_many(model, data, algorithm, seeds=options.seeds, **common).results["run"]

    def apart() -> list[eq.Result]:
        return [eq.train(model, data, algorithm, seed=seed, **common) for seed in range(options.seeds)]

    difference = largest_difference(together(), apart())  # also the warm-up
    times = [(seconds_of(together, options.device), seconds_of(apart, options.device)) for _ in range(options.passes)]
    ratios = [mine[0] / theirs[0] for mine, theirs in times]
    per_round = 1000 / options.rounds
    return {
        "together_ms": statistics.median(mine[0] for mine, _ in times) * per_round,
        "apart_ms": statistics.median(theirs[0] for _, theirs in times) * per_round,
        "processor_ratio": statistics.median(mine[1] / theirs[1] for mine, theirs in times),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=sorted(MODELS), default="softmax")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="of each run (20 on a CPU, 100 on a GPU)")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    options.rounds = options.rounds or (20 if options.device == "cpu" else 100)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("error", eq.errors.EquipoiseNotice)  # a run that is not batched would be measured for nothing
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else f"CPU, {options.threads} threads"
    print(
        f"{where}, torch {torch.__version__}: {options.seeds} seeds, {options.rounds} rounds, median of {options.passes} passes"
    )
    print(
        "| clients | method | per round | together, ms | apart, ms | ratio (range) | by processor time | largest difference |"
    )
    print("|---|---|---|---|---|---|---|---|")
    figures = []
    for data in both_kinds():
        for method, algorithm in ALGORITHMS.items():
            for clients_per_round in (10, 100):
                row = measure(data, algorithm, clients_per_round, options)
                figures.append({"clients": data.name, "method": method, "clients_per_round": clients_per_round, **row})
                print(f"| {data.name} | {method} | {clients_per_round} | {row['together_ms']:.2f} | {row['apart_ms']:.2f} "
                      f"| {row['ratio']:.2f} ({row['lowest']:.2f}–{row['highest']:.2f}) | {row['processor_ratio']:.2f} "
                      f"| {row['difference']:.1e} |",
                      flush=True)  # fmt: skip
    small = [row for row in figures if row["clients_per_round"] == 10]
    missed = [f"{row['clients']} {row['method']}" for row in small if float(row["ratio"]) > GOAL]
    print(
        f"\nGoal with 10 clients per round, at most {GOAL} of the runs apart: "
        + (f"missed by {', '.join(missed)}" if missed else "met")
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"where": where, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
