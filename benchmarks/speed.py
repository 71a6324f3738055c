"""How fast a round is, on a CPU or a GPU: one table, how cost grows, and what a plain PyTorch loop needs for the same work.

    python benchmarks/speed.py [--device cpu|cuda] [--quick]

Rounds are those of `train`. Times are medians over as many rounds as fill the seconds that each row gets, after two that do not
count. What is compared with a plain loop takes turns with it. Absolute figures are those of this machine and this hour; ratios
carry further.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from workloads import (
    MODELS,
    SIZES,
    WORKLOADS,
    EquipoiseRounds,
    Round,
    Workload,
    grid_workload,
    plain_round,
    scaling_workload,
)  # fmt: skip

import equipoise as eq

Row = dict[str, Any]


def seconds_of(run: Round, device: str) -> float:
    """How long one round takes."""
    began = time.perf_counter()
    run(0)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def with_threads(count: int, workload: Workload) -> Round:
    """The plain loop with so many threads of torch."""
    run = plain_round(workload)

    def threaded(index: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        run(index)
        torch.set_num_threads(before)

    return threaded


def measured(contenders: dict[str, Callable[[], Round]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of rounds of each contender, by turns."""
    runs = {name: make() for name, make in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(2):
            seconds_of(run, options.device)
    end = time.monotonic() + options.seconds * len(runs)
    while not times[next(iter(times))] or time.monotonic() < end:
        for name, run in runs.items():
            times[name].append(seconds_of(run, options.device))
    for run in runs.values():
        getattr(run, "close", lambda: None)()
    runs.clear()
    gc.collect()  # before the next engine forks its workers
    return times


def shown(workload: Workload, name: str, seconds: list[float], plain: float | None = None) -> Row:
    """A row of the table, printed."""
    each = statistics.median(seconds)
    row: Row = {
        "workload": workload.title, "sizes": workload.sizes, "clients_per_round": workload.clients_per_round, "who": name,
        "rounds": len(seconds), "ms_per_round": 1e3 * each, "fastest": 1e3 * min(seconds), "slowest": 1e3 * max(seconds),
    }  # fmt: skip
    row |= {"times_plain": plain / each} if plain else {}
    ratio = f"{row['times_plain']:8.2f}" if plain else ""
    title = workload.title.split(",")[0][:18]
    spread = f"({row['fastest']:.3f} … {row['slowest']:.3f})"
    who = f"{title:18} {workload.sizes:11} {workload.clients_per_round:6} {name:24} {len(seconds):6}"
    print(f"{who} {1e3 * each:10.3f} {spread} {workload.clients_per_round / each:10,.0f} {ratio}", flush=True)
    return row


def table(options: argparse.Namespace) -> list[Row]:
    """Every model at three numbers of clients per round, with equal and log-normal sizes, and on a GPU at each precision."""
    on_gpu, rows = options.device != "cpu", []
    counts, population = ((2, 10), 20) if options.quick else ((10, 100, 1000), 2000)
    for model in MODELS:
        for sizes in SIZES:
            for precision in ("float32", "tf32", "bf16") if on_gpu and sizes == "equal" else ("float32",):
                for count in counts:
                    workload = grid_workload(model, count, sizes, clients=population, on_gpu=on_gpu)
                    given = {"device": options.device} | ({"precision": precision} if on_gpu else {})
                    name = f"simulator {precision if on_gpu else ''}".strip()
                    times = measured({name: lambda w=workload, g=given: EquipoiseRounds(w, **g)}, options)
                    rows.append(shown(workload, name, times[name]))
    return rows


def against_plain(options: argparse.Namespace) -> list[Row]:
    """The simulator beside a plain loop of PyTorch, on a CPU with one thread and with all."""
    rows = []
    for workload in WORKLOADS.values():
        if options.quick:
            workload = replace(workload, clients=20, clients_per_round=5)
        contenders: dict[str, Callable[[], Round]] = {"simulator": lambda w=workload: EquipoiseRounds(w, device=options.device)}
        if options.device == "cpu":
            for count in sorted({1, torch.get_num_threads()}):
                contenders[f"plain loop, {count} threads"] = lambda w=workload, c=count: with_threads(c, w)
        else:
            contenders["plain loop"] = lambda w=workload: plain_round(w, options.device)
        times = measured(contenders, options)
        plain = min(statistics.median(seconds) for name, seconds in times.items() if "plain" in name)
        rows += [shown(workload, name, seconds, plain) for name, seconds in times.items()]
    return rows


def growth(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    """Slopes of log time over log size on the linear workload: by clients (from the table), examples and parameters."""
    linear = [
        r for r in rows if r["workload"] == "linear" and r["sizes"] == "equal" and r["who"].split()[-1] not in ("tf32", "bf16")
    ]
    found = {"clients per round": [(r["clients_per_round"], r["ms_per_round"]) for r in linear]}
    few = {"clients_per_round": 5, "clients": 10} if options.quick else {}
    for what, sizes in (("examples", (25, 100, 400)), ("features", (98, 392, 1568))):
        found[what] = []
        for size in sizes:
            workload = scaling_workload(**{what: size}, **few)
            times = measured({"simulator": lambda w=workload: EquipoiseRounds(w, device=options.device)}, options)
            found[what].append((size, 1e3 * statistics.median(times["simulator"])))
    print("\nHow time per round grows, linear workload (time ~ size^slope):")
    for what, points in found.items():
        (small, first), (large, last) = points[0], points[-1]
        line = "   ".join(f"{size}: {ms:.3f} ms" for size, ms in points)
        print(f"{what:18} {line}   slope {math.log(last / first) / math.log(large / small):.2f}", flush=True)
    return found


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small version that only shows that everything runs")
    parser.add_argument("--seconds", type=float, default=None, help="for each row (4 on a CPU, 1 on a GPU)")
    parser.add_argument("--out", type=Path, default=Path("bench/speed.json"))
    options = parser.parse_args()
    options.seconds = options.seconds or (0.05 if options.quick else 4.0 if options.device == "cpu" else 1.0)
    return options


def main() -> None:
    options = asked()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine")
    warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else platform.processor() or platform.machine()
    machine = f"{where}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    print(
        f"{machine}\nworkload, sizes, clients, who, rounds timed, ms per round (range), updates per second, × plain", flush=True
    )
    rows = table(options)
    result = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "rows": rows, "against_plain": against_plain(options)}
    result["growth"] = growth(rows, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1))
    print(f"\nWritten to {options.out}")


if __name__ == "__main__":
    main()
