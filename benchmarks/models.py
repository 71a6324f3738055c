"""How fast models are that nobody has tuned for: rounds of the simulator against the loop that a careful person writes.

    python benchmarks/models.py [--device cuda] [--models "MLP|LSTM, 2 layers"] [--seconds 20] [--precision tf32] [--agreement]

Models, sizes and the careful loop are those of benchmarks/zoo.py. Both sides take turns in one process, with the same
precision; on a CPU the careful loop has the number of threads (one, or all) with which it is faster. A round of the simulator
is one call of its engine: local work of all clients, and the weighted sum of their updates. The ratio is that of the medians,
careful over ours; its interval holds 95 % of the ratios of resampled turns. Memory is the highest of a GPU since the model was
made, and on a CPU the resident memory of this process and its workers. On a CPU that others use as well, the processor time of
a round, of all processes together, says more than the time that passed: it is printed beside it.

`--agreement` also does one round of a few clients by the loop engine, and on a CPU by each path of the simulator for any model:
in float64 on a CPU the updates must agree to 1e-9, in float32 to 1e-3, relative to the update (or to twice what a rounding
changes in the loop engine's own update, if that is more); with `--seconds 0` nothing else is done. `--others` takes the models
of benchmarks/other_models.py: of the same kinds, but not in the zoo. `--json FILE` adds a line for each model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from other_models import OTHERS
from torch import Tensor

import equipoise as eq
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.engine import SimulatorEngine

PATHS = ("recorded steps", "one by one", "batched autograd")
ROUNDING, MOVED = 6e-8, 6  # of float32, and starts that are moved by it
FEW = 3  # clients of a comparison with the loop engine
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


@dataclass(frozen=True)
class Agreement:
    """By how much updates of a round differ, of the update: the simulator's from the loop engine's, by type and path."""

    found: dict[str, dict[str, float]]  # type of numbers, path
    rounding: float  # the loop engine's own float32 from its float64
    kinks: float = 0.0  # the most that its float64 changes if the start does by a rounding of float32; 0: not tried

    def words(self) -> str:
        """The figures, and which of them are too much.

        Where rounding moves the loop engine itself by more than the limit (kinks of the model), float32 may differ as much as
        that: two roundings are no closer to each other than to the exact result.
        """
        text = f"  loop's float32 from float64 {self.rounding:.1e}"
        text += f", its float64 by a rounding of the start {self.kinks:.1e}" if self.kinks else ""
        for kind, each in self.found.items():
            limit = 1e-9 if kind == "float64" else max(1e-3, 2 * self.rounding, 2 * self.kinks)
            parts = [f"{path} {value:.1e}{'' if value <= limit else ' TOO MUCH'}" for path, value in each.items()]
            text += f"  {kind}: {', '.join(parts)}"
        return text


def update_of(
    entry: zoo.Entry, engine: Loop | Simulator, dtype: torch.dtype, path: str | None = None, moved: int | None = None
) -> tuple[Tensor, str]:
    """The updates of a few clients in a round, and the path that made them; from a start that is moved by a rounding."""
    clients = min(FEW, entry.on_cpu)
    torch.manual_seed(0)
    data = data_of(entry, clients, dtype)
    task = try_task(Task.of(entry.model().to(dtype), loss=zoo.loss_of), data)
    running, cohort = engine.start(task, data), cohort_of(clients, 0)
    if isinstance(running, SimulatorEngine) and path is not None:
        running.use(Choice(clients, 1, clients, path))
    solver = eq.solvers.SGD(lr=0.05, batch_size=entry.batch)
    start = task.read_model().to(running.device)
    if moved is not None:
        start *= 1 + ROUNDING * torch.randn(start.shape, generator=torch.Generator().manual_seed(moved), dtype=dtype)
    work = running.updates(start, cohort, solver)
    taken = " and ".join(running.paths_taken) if isinstance(running, SimulatorEngine) else "loop engine"
    return work.update.double().cpu(), taken


def agreement(entry: zoo.Entry, device: str, precision: str) -> Agreement:
    """A round by the simulator, on a CPU by each of its general paths, against the loop engine's.

    All work in one thread, as processes of the simulator do: torch sums up gradients of convolutions in another order for each
    number of threads. A GPU's float32 is compared with float64 on the CPU.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loops = {kind: update_of(entry, Loop(), kind)[0] for kind in (torch.float64, torch.float32)}
        exact, size = loops[torch.float64], loops[torch.float64].norm()
        found: dict[str, dict[str, float]] = {}
        for kind, loop in loops.items() if device == "cpu" else [(torch.float32, exact)]:
            for path in PATHS if device == "cpu" else [None]:
                update, taken = update_of(entry, Simulator(device=device, precision=precision), kind, path)
                found.setdefault(str(kind).removeprefix("torch."), {})[taken] = float((update - loop).norm() / size)
        rounding, kinks = float((loops[torch.float32] - exact).norm() / size), 0.0
        if max(found["float32"].values()) > max(1e-3, 2 * rounding):
            others = [update_of(entry, Loop(), torch.float64, moved=seed)[0] for seed in range(MOVED)]
            kinks = max(float((each - exact).norm() / size) for each in others)
        return Agreement(found, rounding, kinks)
    finally:
        torch.set_num_threads(threads)


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    entry, device = (OTHERS if options.others else zoo.ZOO)[name], options.device
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
    if options.agreement:
        result["agreement"] = asdict(agreement(entry, device, options.precision))
    return result


def line(result: dict[str, Any]) -> str:
    """A result in words."""
    text = f"{result['model']:<24} {result['path']:<20} {result['chunk'] or '-':>4} x {result['workers'] or '-':<2}"
    text += f" {result['ours_ms']:9.1f} ms  careful {result['careful_ms']:9.1f} ms ({result['threads']} thr.)"
    text += f"  ratio {result['ratio']:6.2f} [{result['low']:.2f}, {result['high']:.2f}]  {result['memory_mb']:7.0f} MB"
    if result["device"] == "cpu":
        text += "  processors {:.0f} / {:.0f} ms".format(*result["processor_ms"])
    return text + (Agreement(**result["agreement"]).words() if "agreement" in result else "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", help="names of the zoo, separated by |")
    parser.add_argument("--seconds", type=float, default=15.0, help="for the turns of one model")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--others", action="store_true", help="models of other_models.py in place of the zoo's")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
    for name in options.models.split("|") if options.models else OTHERS if options.others else zoo.ZOO:
        if options.agreement and not options.seconds:
            found = agreement((OTHERS if options.others else zoo.ZOO)[name], options.device, options.precision)
            print(f"{name:<24}{found.words()}", flush=True)
            continue
        result = measured(name, options)
        print(line(result), flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
