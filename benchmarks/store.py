"""What a store on disk costs: writing, opening, the first round, rounds beside rounds from memory, and memory.

    python benchmarks/store.py [--clients 2000000] [--examples 50] [--features 16] [--per-round 1000] [--rounds 500]
                               [--evaluate 10000] [--device cpu] [--folder benchmark.store] [--keep] [--json FILE]

Clients have `examples` examples of `features` float32 numbers and a class each: with the default 2,000,000 × 50 × 64 bytes,
6.4 GB of inputs. Softmax with `per-round` clients per round. The median round is compared with that of cohorts of equal size
from a set in memory, which holds as many of the same clients as `--memory-clients` says; the two take turns.
"Cold" is the round after the kernel was asked to drop the store's pages (posix_fadvise DONTNEED). RssAnon + RssShmem is summed
over this process and its children, and sampled every 20 ms; VmRSS counts the page cache, too.

With `--device cuda`, rounds of a ConvNet on images from the store: with the examples of a cohort at a time on the device, which
is what a store larger than its memory gets, by turns with all of them there.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import equipoise as eq

CLASSES = 10
GOALS = {"convnet_ratio": 1.3, "open_s": 1.0, "first_round_s": 3.0, "peak_gb": 1.5, "ratio": 1.5, "write_mb_s": 150.0}


def clients(count: int, examples: int, features: int) -> Iterator[tuple[str, Any, Any]]:
    """Made clients, cut from blocks of random numbers that are drawn once and shifted by the client's number."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((997 + examples, features), dtype=np.float32)
    labels = rng.integers(0, CLASSES, 997 + examples)
    for k in range(count):
        first = k * 31 % 997
        yield f"phone-{k:08d}", pool[first : first + examples], labels[first : first + examples]


def processes() -> list[int]:
    """This process and all below it."""
    found, waiting = [], [os.getpid()]
    while waiting:
        found.append(process := waiting.pop())
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                waiting += map(int, children.read_text().split())
    return found


def memory() -> dict[str, float]:
    """Bytes of memory over all processes, by kind."""
    total = dict.fromkeys(("RssAnon", "RssShmem", "VmRSS"), 0.0)
    for process in processes():
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += 1024 * int(rest.split()[0])
    return total


class PeakMemory:
    """The largest RssAnon + RssShmem and VmRSS while it is open."""

    def __enter__(self) -> PeakMemory:
        self.own = self.all = 0.0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.02):
            now = memory()
            self.own, self.all = max(self.own, now["RssAnon"] + now["RssShmem"]), max(self.all, now["VmRSS"])

    def __exit__(self, *failure: object) -> None:
        self.done.set()
        self.thread.join()


class RoundTimes:
    """An observer that keeps when each round ended."""

    def __init__(self, pause: Any = None) -> None:
        self.ends: list[float] = []
        self.pause = pause

    def on_round(self, *_: object) -> None:
        """Keep the time."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """The time of each round but the first."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def train(data: Any, arguments: argparse.Namespace, rounds: int, evaluate: int | None) -> tuple[RoundTimes, float, float]:
    """Train and give the times of rounds, when it began and how long it took; `evaluate` clients, if `train` can."""
    times, options = RoundTimes(), {}
    if "evaluate_clients" in inspect.signature(eq.train).parameters:
        options["evaluate_clients"] = evaluate
    model = eq.models.Softmax(arguments.features, CLASSES)
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.01, batch_size=10))
    engine = eq.engines.Simulator(device=arguments.device) if arguments.device != "cpu" else "simulator"
    began = time.perf_counter()
    eq.train(
        model, data, algorithm, rounds=rounds, clients_per_round=arguments.per_round, seed=0, observers=[times], progress=False,
        engine=engine, **options,
    )  # fmt: skip
    return times, began, time.perf_counter() - began


def images(count: int, examples: int) -> Iterator[tuple[str, Any, Any]]:
    """Made clients with images of 28 × 28 bytes."""
    rng = np.random.default_rng(0)
    pool, labels = rng.integers(0, 256, (997 + examples, 28, 28), dtype=np.uint8), rng.integers(0, 62, 997 + examples)
    for k in range(count):
        first = k * 31 % 997
        yield f"phone-{k:08d}", pool[first : first + examples], labels[first : first + examples]


def on_gpu(arguments: argparse.Namespace) -> dict[str, float]:
    """Rounds of models from a store whose examples are on the device a cohort at a time, over rounds with all of them there."""
    if not (arguments.folder / "manifest.json").exists():
        eq.data.write_store(images(arguments.clients, arguments.examples), arguments.folder, name="photos", scale=1 / 255)
    data, figures = eq.data.open_store(arguments.folder, test=0.1, seed=0), {}
    models = {"convnet": eq.models.ConvNet, "softmax": lambda: eq.models.Softmax(784, 62)}
    for name, model in models.items():
        algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.01, batch_size=10))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        ratios: list[float] = []
        models_of: dict[bool, list[Any]] = {True: [], False: []}
        for turn in range(arguments.turns):
            medians = {}
            for resident in (True, False) if turn % 2 else (False, True):
                times = RoundTimes()
                engine = eq.engines.Simulator(device=arguments.device, resident=resident)
                result = eq.train(
                    model(), data, algorithm, rounds=arguments.turn_rounds, clients_per_round=arguments.per_round, seed=0,
                    observers=[times], progress=False, engine=engine, evaluate_clients=100,
                )  # fmt: skip
                models_of[resident].append(result.params)
                seconds[resident] += times.seconds[5:]
                medians[resident] = statistics.median(times.seconds[5:])
            ratios.append(medians[False] / medians[True])
        first, *others = models_of[True]
        streamed = max(float((each - first).norm() / first.norm()) for each in models_of[False])
        again = max(float((each - first).norm() / first.norm()) for each in others)
        assert streamed <= 2 * again + 1e-6, f"the two end with different models: by {streamed}, the same again by {again}"
        figures |= {
            f"{name}_difference": streamed,
            f"{name}_difference_again": again,
            f"{name}_resident_round_ms": 1e3 * statistics.median(seconds[True]),
            f"{name}_streamed_round_ms": 1e3 * statistics.median(seconds[False]),
            f"{name}_ratio": statistics.median(ratios),
        }
    return figures


def drop_pages(folder: Path) -> None:
    """Ask the kernel to forget the pages of all files."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure, print and perhaps write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("clients", 2_000_000), ("examples", 50), ("features", 16), ("per-round", 1000), ("rounds", 500), ("evaluate", 10_000),
        ("memory-clients", 100_000), ("turns", 5), ("turn-rounds", 40),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("benchmark.store"))
    parser.add_argument("--keep", action="store_true", help="leave the store, and use it if it is there")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if arguments.device != "cpu":
        finish(arguments, on_gpu(arguments))
        return

    if not (arguments.folder / "manifest.json").exists():
        began = time.perf_counter()
        eq.data.write_store(clients(arguments.clients, arguments.examples, arguments.features), arguments.folder, name="phones")
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in arguments.folder.rglob("*") if file.is_file())
        figures |= {"written_gb": size / 1e9, "write_s": seconds, "write_mb_s": size / 1e6 / seconds}

    began = time.perf_counter()
    data = eq.data.open_store(arguments.folder, test=0.1, seed=0)
    figures["open_s"] = time.perf_counter() - began

    some = min(arguments.memory_clients, len(data.train))
    resident = eq.data.FederatedData(data.train.take(range(some)), None, None, "memory", CLASSES)
    small = eq.data.FederatedData(resident.train.take(range(arguments.per_round)), None, None, "calibration", CLASSES)
    train(small, arguments, 2, 10)  # calibration and compiled code, which later runs find
    with PeakMemory() as before:
        time.sleep(0.1)
    with PeakMemory() as peak:
        times, began, seconds = train(data, arguments, arguments.rounds, arguments.evaluate)
    figures |= {
        "first_round_s": times.ends[0] - began,
        "train_s": seconds,
        "evaluation_s": began + seconds - times.ends[-1],
        "median_round_ms": 1e3 * statistics.median(times.seconds),
        "peak_gb": peak.own / 1e9,
        "peak_beyond_memory_set_gb": (peak.own - before.own) / 1e9,
        "vmrss_gb": peak.all / 1e9,
    }

    ratios, rounds = [], {"store": [], "memory": []}
    for turn in range(arguments.turns):
        medians = {}
        for name, each in (("store", data), ("memory", resident))[:: 1 if turn % 2 else -1]:
            found, *_ = train(each, arguments, arguments.turn_rounds, arguments.per_round)
            rounds[name] += found.seconds
            medians[name] = statistics.median(found.seconds)
        ratios.append(medians["store"] / medians["memory"])
    figures |= {f"median_{name}_round_ms": 1e3 * statistics.median(each) for name, each in rounds.items()}
    figures["ratio"] = statistics.median(ratios)

    del data, each, found  # pages that are mapped would stay
    gc.collect()
    drop_pages(arguments.folder)
    data = eq.data.open_store(arguments.folder, test=0.1, seed=0)
    cold, *_ = train(data, arguments, 12, arguments.per_round)
    figures["median_cold_round_ms"] = 1e3 * statistics.median(cold.seconds)
    finish(arguments, figures)


def finish(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """Print the figures, perhaps write them, and take the store away."""
    for name, value in figures.items():
        goal = f"   (goal: {'≥' if name == 'write_mb_s' else '<'} {GOALS[name]:g})" if name in GOALS else ""
        print(f"{name:28} {value:12.4g}{goal}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if not arguments.keep:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
