"""How fast models are that nobody has tuned for: rounds of the simulator against the loop that a careful person writes.

    python benchmarks/models.py [--device cuda] [--models "MLP|LSTM, 2 layers"] [--seconds 20] [--precision tf32]

Models, sizes and the careful loop are those of benchmarks/zoo.py. Both sides take turns in one process, with the same
precision; on a CPU the careful loop has the number of threads (one, or all) with which it is faster. A round of the simulator
is one call of its engine: local work of all clients, and the weighted sum of their updates. The ratio is that of the medians,
careful over ours; its interval holds 95 % of the ratios of resampled turns. Memory is the highest of a GPU since the model was
made, and on a CPU the resident memory of this process and its workers. On a CPU that others use as well, the processor time of
a round, of all processes together, says more than the time that passed: it is printed beside it.
`--json FILE` adds a line for each model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Simulator

RESAMPLES = 2000


def data_of(entry: zoo.Entry, clients: int, dtype: torch.dtype = torch.float32) -> FederatedData:
    """Clients with as many examples as the zoo says."""
    generator = torch.Generator().manual_seed(0)
    triples = []
    for number in range(clients):
        x, y = entry.data(entry.examples, generator)
        triples.append((str(number), _floats(x, dtype), y))
    return FederatedData(ClientSet.pack(triples))


def _floats(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {name: _floats(value, dtype) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_floats(value, dtype) for value in x)
    return x.to(dtype) if x.is_floating_point() else x


def cohort_of(count: int, round_index: int) -> eq.types.Cohort:
    """All clients, with equal weights."""
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return eq.sampling.Full()(round_index, weights, clients_per_round=count, seed=0)


class OurRounds:
    """Rounds of the simulator."""

    def __init__(self, entry: zoo.Entry, device: str, clients: int, precision: str, lr: float = 0.05) -> None:
        self.data, torch_state = data_of(entry, clients), torch.random.get_rng_state()
        torch.manual_seed(0)
        self.task = try_task(Task.of(entry.model(), loss=zoo.loss_of), self.data)
        torch.random.set_rng_state(torch_state)
        self.engine = Simulator(device=device, precision=precision).start(self.task, self.data)
        self.params = self.task.read_model().to(self.engine.device)
        self.solver = eq.solvers.SGD(lr=lr, batch_size=entry.batch)
        self.round, self.clients = 0, clients

    def __call__(self) -> None:
        """One round."""
        cohort, mean = cohort_of(self.clients, self.round), eq.aggregators.WeightedMean()
        with self.engine.round_context():
            work = self.engine.summed_update(self.params, cohort, self.solver, cohort.weights, mean)
        self.params[: len(work.update)] += work.update
        self.round += 1


def seconds(run: Callable[[], None], device: str) -> float:
    """How long a round takes."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def processor_seconds() -> float:
    """Processor time of this process and its children."""
    ticks, total = os.sysconf("SC_CLK_TCK"), 0.0
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for process in (str(os.getpid()), *(children.read_text().split() if children.exists() else [])):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def with_threads(count: int, run: Callable[[], None]) -> Callable[[], None]:
    """The same, with so many threads of torch."""

    def threaded() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            run()
        finally:
            torch.set_num_threads(before)

    return threaded


def careful_rounds(entry: zoo.Entry, device: str, clients: int) -> tuple[Callable[[], None], int]:
    """The careful loop at its better number of threads, and that number."""
    run = zoo.careful_round(entry, device, clients)
    if device == "cuda":
        run()
        return run, 1
    best = {}
    for count in sorted({1, torch.get_num_threads()}):
        threaded = with_threads(count, run)
        threaded()
        best[count] = min(seconds(threaded, device) for _ in range(2))
    count = min(best, key=lambda each: best[each])
    return with_threads(count, run), count


def alternated(
    ours: Callable[[], None], careful: Callable[[], None], device: str, budget: float
) -> tuple[list[float], list[float], float, float]:
    """Seconds of rounds of both, by turns, at least four each, and the mean processor time of a round of each."""
    times: tuple[list[float], list[float]] = ([], [])
    used = [0.0, 0.0]
    began = time.perf_counter()
    while len(times[0]) < 4 or (time.perf_counter() - began < budget and len(times[0]) < 200):
        for place in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            time.sleep(0.01)
            before = processor_seconds()
            times[place].append(seconds((ours, careful)[place], device))
            used[place] += processor_seconds() - before
    return *times, used[0] / len(times[0]), used[1] / len(times[1])


def interval(ours: list[float], careful: list[float]) -> tuple[float, float, float]:
    """The ratio of medians and an interval of 95 %."""
    pairs, generator = np.array([careful, ours]), np.random.default_rng(0)
    drawn = generator.integers(0, len(ours), (RESAMPLES, len(ours)))
    medians = np.median(pairs[:, drawn], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return statistics.median(careful) / statistics.median(ours), float(low), float(high)


def resident_bytes() -> int:
    """Resident memory of this process and its children."""
    total, children = 0, Path(f"/proc/self/task/{os.getpid()}/children")
    for process in (str(os.getpid()), *(children.read_text().split() if children.exists() else [])):
        status = Path(f"/proc/{process}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    entry, device = zoo.ZOO[name], options.device
    clients = entry.on_gpu if device == "cuda" else entry.on_cpu
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ours = OurRounds(entry, device, clients, options.precision)
    set_up = time.perf_counter()
    for _ in range(2):
        ours()
    set_up = time.perf_counter() - set_up
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else resident_bytes()
    careful, threads = careful_rounds(entry, device, clients)
    *times, our_processors, careful_processors = alternated(ours, careful, device, options.seconds)
    ratio, low, high = interval(*times)
    choice = ours.engine.choice
    result = {
        "model": name, "device": device, "precision": options.precision, "clients": clients,
        "path": " and ".join(ours.engine.paths_taken) or "loop engine", "chunk": choice.chunk_size, "workers": choice.workers,
        "ours_ms": 1e3 * statistics.median(times[0]), "careful_ms": 1e3 * statistics.median(times[1]), "threads": threads,
        "ratio": ratio, "low": low, "high": high, "memory_mb": memory / 1e6, "first_two_rounds_s": set_up,
        "processor_ms": [1e3 * our_processors, 1e3 * careful_processors],
    }  # fmt: skip
    ours.engine.workers.stop()
    return result


def line(result: dict[str, Any]) -> str:
    """A result in words."""
    text = f"{result['model']:<24} {result['path']:<20} {result['chunk'] or '-':>4} x {result['workers'] or '-':<2}"
    text += f" {result['ours_ms']:9.1f} ms  careful {result['careful_ms']:9.1f} ms ({result['threads']} thr.)"
    text += f"  ratio {result['ratio']:6.2f} [{result['low']:.2f}, {result['high']:.2f}]  {result['memory_mb']:7.0f} MB"
    if result["device"] == "cpu":
        text += "  processors {:.0f} / {:.0f} ms".format(*result["processor_ms"])
    return text


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", help="names of the zoo, separated by |")
    parser.add_argument("--seconds", type=float, default=15.0, help="for the turns of one model")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
    for name in options.models.split("|") if options.models else zoo.ZOO:
        result = measured(name, options)
        print(line(result), flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
