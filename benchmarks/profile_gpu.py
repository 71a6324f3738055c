"""What a round on a GPU is made of: kernels by their time, and the host's part. Needs torch and numpy alone.

PYTHONPATH=src python benchmarks/profile_gpu.py [linear|ConvNet|…] [clients per round] [precision]
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from workloads import EquipoiseRounds, grid_workload

ROUNDS = 20


def milliseconds(work: Callable[[int], object], rounds: int = 5 * ROUNDS) -> float:
    """The median time of one call, with what it has started on the device."""
    times = []
    for index in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(index)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def kernels(work: Callable[[int], object]) -> None:
    """Device time per call by kernel."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for index in range(ROUNDS):
            work(index)
        torch.cuda.synchronize()
    on_device = [e for e in seen.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    total = sum(e.self_device_time_total for e in on_device) / ROUNDS
    print(f"kernels and copies: {total / 1e3:.3f} ms per call, {sum(e.count for e in on_device) / ROUNDS:.0f} of them")
    for event in sorted(on_device, key=lambda e: -e.self_device_time_total)[:24]:
        each = event.self_device_time_total / ROUNDS
        print(f"  {each:8.1f} µs  {event.count / ROUNDS:6.1f} ×  {event.key[:110]}")


def host(work: Callable[[int], object]) -> None:
    """Functions of the host by their time."""
    watch = cProfile.Profile()
    watch.enable()
    for index in range(5 * ROUNDS):
        work(index)
    watch.disable()
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(22)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    print("\n".join(line[:130] for line in lines[4:]))


def main(model: str = "linear", clients: str = "100", precision: str = "float32") -> None:
    rounds = EquipoiseRounds(grid_workload(model, int(clients), "equal", on_gpu=True), device="cuda", precision=precision)
    cohorts = [rounds.cohort(i) for i in range(5 * ROUNDS)]
    for index in range(5):
        rounds(index)
    print(f"\n## {model}, {clients} clients, {precision}, {torch.cuda.get_device_name()}")
    print(
        f"engine call {milliseconds(lambda i: rounds.local_work(cohorts[i])):.3f} ms, whole round {milliseconds(rounds):.3f} ms"
    )
    kernels(lambda i: rounds.local_work(cohorts[i]))
    host(rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])
