"""How fast a round is: loop, simulator and a plain hand-written PyTorch loop, run alternately, with peak memory.

    python benchmarks/speed.py [--passes 5] [--seconds 1.0]

Every contender lives in a process of its own and waits; the parent lets one at a time run a few rounds, in turn, so that
whatever else the machine does hits all of them alike. Ratios matter; absolute figures are those of this machine. The plain
loop is measured with one thread and with all cores, and ratios are against the faster of the two.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path


def serve(pipe: Connection, workload: str, contender: str, threads: int) -> None:
    """A contender's process: runs `count` rounds when told to, answers the seconds and its peak memory."""
    import torch

    torch.set_num_threads(threads)
    from workloads import CONTENDERS, WORKLOADS

    one = CONTENDERS[contender](WORKLOADS[workload])
    index = 0
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        began = time.perf_counter()
        for _ in range(count):
            one(index)
            index += 1
        pipe.send((time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


@dataclass
class Contender:
    name: str
    threads: int
    process: mp.process.BaseProcess
    pipe: Connection
    count: int = 1

    def run(self) -> tuple[float, float]:
        self.pipe.send(self.count)
        seconds, memory = self.pipe.recv()
        return seconds / self.count, memory


def start(workload: str, name: str, threads: int) -> Contender:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, workload, name, threads), daemon=True)
    process.start()
    ours.recv()
    return Contender(name, threads, process, ours)


def measure(workload: str, entries: list[tuple[str, int]], passes: int, seconds: float) -> list[dict[str, object]]:
    contenders = [start(workload, name, threads) for name, threads in entries]
    for contender in contenders:
        contender.run()  # warm-up
        contender.count = max(1, round(seconds / contender.run()[0]))
    times: list[list[float]] = [[] for _ in contenders]
    memory = [0.0] * len(contenders)
    for _ in range(passes):
        for i, contender in enumerate(contenders):
            per_round, memory[i] = contender.run()
            times[i].append(per_round)
    for contender in contenders:
        contender.pipe.send(None)
        contender.process.join()
    return [
        {"workload": workload, "contender": c.name, "threads": c.threads, "rounds_per_second": 1 / statistics.median(t),
         "slowest": 1 / max(t), "fastest": 1 / min(t), "peak_mb": m}
        for c, t, m in zip(contenders, times, memory, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each contender runs in each pass")
    parser.add_argument("--out", type=Path, default=Path("bench/speed.json"))
    options = parser.parse_args()

    from workloads import WORKLOADS

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    entries = [("plain PyTorch loop", 1), ("plain PyTorch loop", cores), ("equipoise loop", 1), ("equipoise simulator", cores)]
    rows = []
    for name in ("linear", "convnet"):
        part = measure(name, list(dict.fromkeys(entries)), options.passes, options.seconds)
        best = max(float(r["rounds_per_second"]) for r in part if r["contender"] == "plain PyTorch loop")
        print(f"\n{WORKLOADS[name].title}\n{'':<22}{'threads':>8}{'rounds/s':>10}{'(range)':>16}{'× plain':>9}{'peak MB':>9}")
        for r in part:
            r["times_plain"] = float(r["rounds_per_second"]) / best
            spread = f"({r['slowest']:.1f}–{r['fastest']:.1f})"
            print(f"{r['contender']:<22}{r['threads']:>8}{r['rounds_per_second']:>10.2f}{spread:>16}{r['times_plain']:>9.2f}"
                  f"{r['peak_mb']:>9.0f}")  # fmt: skip
        rows += part
    (large,) = measure("many clients", [("equipoise simulator", cores)], 2, options.seconds)
    print(
        f"\n{WORKLOADS['many clients'].title}: {large['rounds_per_second']:.2f} rounds/s, peak memory {large['peak_mb']:.0f} MB"
    )
    rows.append(large)
    for name in ("tails 10", "tails 100"):
        part = measure(name, [("four runs", cores), ("family of four", cores)], options.passes, options.seconds)
        separate, together = (float(r["rounds_per_second"]) for r in part)
        print(f"\n{WORKLOADS[name].title}: a family costs {separate / together:.2f} of four runs "
              f"({together:.2f} against {separate:.2f} rounds/s)")  # fmt: skip
        rows += part
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.processor() or platform.machine(), "cores": cores, "python": platform.python_version()}
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print(f"\nWritten to {options.out}")


if __name__ == "__main__":
    main()
