"""The hand-written gradient of the ConvNet against autograd: one round of 10 clients × 100 examples, batch 16, alternately.

    python benchmarks/convnet_gradients.py [rounds]

The careful PyTorch loop runs with one and with two torch threads; the hand-written gradient with one and with two Python
threads of one torch thread each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from workloads import WORKLOADS, Workload, plain_round

from equipoise.core.task import Task
from equipoise.engines.simulator.cpu.convnet_gradients import convnet_gradients
from equipoise.engines.simulator.example_batches import ExampleBatch

FLOP_PER_EXAMPLE = 3 * 2 * (64 * 800 * 64 + 1024 * 62) + 2 * 2 * 576 * 25 * 32  # the first layer has no input gradient


def by_hand(workload: Workload, threads: int) -> Callable[[int], None]:
    """One round with `convnet_gradients`: each thread takes the local steps of its clients and adds up their updates."""
    clients, gen = workload.data().train, torch.Generator().manual_seed(0)
    tasks = [Task.of(workload.model()) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    model = tasks[0].layout.read(tasks[0].module)

    def updates(task: Task, chosen: list[int], orders: list[torch.Tensor]) -> torch.Tensor:
        start, weights = task.layout.unflatten(model.unsqueeze(0)), {}
        first = torch.tensor([clients.rows(c).start for c in chosen]).unsqueeze(1)
        for places in torch.stack(orders).split(workload.batch_size, 1):
            rows = first + places
            shares = torch.full(rows.shape, 1 / rows.shape[1])
            batch = ExampleBatch(clients.x[rows].float().div_(255), clients.y[rows], shares, False)
            held = weights or {name: value.expand(len(chosen), *value.shape[1:]) for name, value in start.items()}
            gradients, _ = convnet_gradients(task, held, batch)
            if not weights:
                weights = {name: torch.empty_like(gradients[name]).copy_(value) for name, value in start.items()}
            for name, gradient in gradients.items():
                weights[name].sub_(gradient, alpha=0.05)
        return task.layout.flatten({name: (value - start[name]).sum(0) for name, value in weights.items()})

    def one(index: int) -> None:
        chosen = torch.randperm(len(clients), generator=gen)[: workload.clients_per_round].tolist()
        orders = [torch.randperm(workload.examples, generator=gen) for _ in chosen]
        parts = [pool.submit(updates, task, chosen[i::threads], orders[i::threads]) for i, task in enumerate(tasks)]
        model.add_(sum(part.result() for part in parts), alpha=1 / len(chosen))

    return one


def main(rounds: int) -> None:
    workload = WORKLOADS["convnet"]
    contenders = {
        "careful loop, 1 torch thread": (1, plain_round(workload)),
        "careful loop, 2 torch threads": (2, plain_round(workload)),
        "by hand, 1 thread": (1, by_hand(workload, 1)),
        "by hand, 2 threads": (1, by_hand(workload, 2)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, (threads, one) in contenders.items():
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            one(index)
            times[name].append(time.perf_counter() - begin)
    gflop = FLOP_PER_EXAMPLE * workload.clients_per_round * workload.examples / 1e9
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    best = min(medians[name] for name in medians if name.startswith("careful"))
    for name, seconds in medians.items():
        print(f"{name:32s} {1e3 * seconds:7.1f} ms/round {gflop / seconds:6.1f} GFLOP/s {best / seconds:5.2f} × the best loop")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
