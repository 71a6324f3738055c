"""The driver's memory where the clients are in a store: a run over Ray on millions of clients.

    python benchmarks/cluster_memory.py [--clients 2000000] [--per-round 10000] [--rounds 5] [--folder DIR]

Writes a store of small clients in a process of its own, unless the folder holds one, then trains on it by two workers of Ray.
Says the peak of the driver's own memory (RssAnon + RssShmem, every 20 ms), and how long rounds take.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise as eq
from equipoise.engines import Ray
from equipoise.engines.cluster.ray_extra import connect

FEATURES, EXAMPLES, CLASSES = 8, 4, 3


def made(count: int) -> Iterator[tuple[str, Any, Any]]:
    """Clients with a few random examples each."""
    for first in range(0, count, 10_000):
        gen = np.random.default_rng(first)
        x = gen.random((10_000, EXAMPLES, FEATURES), dtype=np.float32)
        y = gen.integers(0, CLASSES, (10_000, EXAMPLES))
        for place in range(min(10_000, count - first)):
            yield f"phone-{first + place}", x[place], y[place]


def own_memory() -> float:
    """Megabytes of this process that are no mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


class Peak:
    """The peak of this process's own memory while it is watched."""

    def __init__(self) -> None:
        self.megabytes, self.ended = own_memory(), threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.ended.wait(0.02):
            self.megabytes = max(self.megabytes, own_memory())


class Times(eq.observers.Observer):
    def __init__(self) -> None:
        self.at = [time.perf_counter()]

    def on_round(self, report: Any) -> None:
        self.at.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2_000_000)
    parser.add_argument("--per-round", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help="only write the store")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.gettempdir()) / f"equipoise-{given.clients}-clients"
    if given.write:
        eq.data.write_store(made(given.clients), folder, name="phones")
        return
    if not (folder / "manifest.json").exists():
        command = [sys.executable, __file__, "--write", "--clients", str(given.clients), "--folder", str(folder)]
        subprocess.run(command, check=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    connect("local", num_cpus=2, object_store_memory=200 * 2**20)
    before, peak, times = own_memory(), Peak(), Times()
    data = eq.data.open_store(folder)
    risk = eq.risk.Superquantile(0.5)
    eq.train(
        eq.models.Softmax(FEATURES, CLASSES), data, eq.Algorithm(risk=risk), rounds=given.rounds, observers=[times],
        clients_per_round=given.per_round, evaluate_clients=1000, engine=Ray(workers=2), progress=False,
    )  # fmt: skip
    peak.ended.set()
    rounds = [1e3 * (after - start) for start, after in zip(times.at[1:], times.at[2:], strict=False)]
    print(
        f"{sum(map(len, data.splits.values())):,} clients, {given.per_round:,} a round: "
        f"driver's own memory {before:.0f} MB after imports, "
        f"peak {peak.megabytes:.0f} MB; rounds after the first {', '.join(f'{each:.0f}' for each in rounds)} ms", flush=True
    )  # fmt: skip


if __name__ == "__main__":
    main()
