"""What a Ray cluster costs on this machine: rounds by two workers of Ray and by the simulator on the same cores, in turn.

    python benchmarks/cluster.py [--only linear|tail|convnet|exchange] [--turns 5]

Both engines have two cores. After a round that is not counted, blocks of rounds alternate; of each engine the median block
counts. Ray's start-up is stated apart. `exchange` is what Ray takes to send nothing, and a model of 195 kB, to two workers.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import numpy as np
import torch

import equipoise as eq
from equipoise.core.task import Task
from equipoise.engines import Ray, Simulator
from equipoise.round import Rounds
from equipoise.runs.setup import set_up


def clients(count: int, examples: int, shape: tuple[int, ...], classes: int) -> eq.FederatedData:
    gen = torch.Generator().manual_seed(0)
    parts = [
        (f"c{k}", torch.rand(examples, *shape, generator=gen), torch.randint(0, classes, (examples,), generator=gen))
        for k in range(count)
    ]
    return eq.FederatedData(eq.ClientSet.pack(parts), classes=classes, name="random")


def workload(name: str) -> tuple[object, eq.FederatedData, eq.Algorithm, int]:
    """Model, data, algorithm, and rounds of a block."""
    if name == "convnet":
        data = clients(100, 160, (1, 28, 28), 62)
        return eq.models.ConvNet(), data, eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=16)), 1
    risk = eq.risk.Superquantile(0.5) if name == "tail" else eq.risk.Mean()
    return eq.models.Softmax(784, 62), clients(100, 100, (784,), 62), eq.Algorithm(risk=risk), 20


class Runner:
    """A run whose rounds are made when they are asked for."""

    def __init__(self, name: str, engine: object) -> None:
        model, data, algorithm, self.block = workload(name)
        began = time.perf_counter()
        setting = set_up(
            model, data, algorithm, rounds=10**6, clients_per_round=100, seed=0, loss=None, error=None, engine=engine
        )
        self.rounds, self.state = Rounds([setting]), setting.begin()
        self.turn(1)
        self.start_up = time.perf_counter() - began

    def turn(self, count: int) -> float:
        """Seconds per round."""
        began = time.perf_counter()
        for _ in range(count):
            ((self.state, _),) = self.rounds([self.state])
        return (time.perf_counter() - began) / count


def compare(name: str, turns: int) -> None:
    here, there = Runner(name, Simulator(workers=2)), Runner(name, Ray(workers=2))
    times: dict[str, list[float]] = {"simulator": [], "Ray": []}
    for turn in range(turns):
        for label, runner in (("simulator", here), ("Ray", there))[:: 1 if turn % 2 else -1]:
            runner.turn(1)
            times[label].append(runner.turn(runner.block))
    local, remote = (statistics.median(times[label]) for label in ("simulator", "Ray"))
    said = f"{name}: simulator {1e3 * local:.1f} ms, Ray {1e3 * remote:.1f} ms: {1e3 * (remote - local):+.1f} ms, "
    print(f"{said}× {remote / local:.3f}; first round {here.start_up:.1f} s and {there.start_up:.1f} s", flush=True)


def exchange() -> None:
    """Milliseconds of an exchange with two workers, without work."""
    from equipoise.engines.cluster.packing import message

    data = clients(4, 2, (784,), 62)
    task = Task.of(eq.models.Softmax(784, 62)).fitted(data)
    engine = Ray(workers=2).start(task, data)
    for label, models in (("nothing", ()), ("a model of 195 kB", (task.read_model(),))):
        phase = engine._phase("explain", models, [])
        times = []
        for _ in range(200):
            began = time.perf_counter()
            refs = [worker.call(1).remote(1, 0, *message(phase)) for worker in engine.pool.workers[:2]]
            engine.pool.ray.get(refs)
            times.append(time.perf_counter() - began)
        print(f"exchange of {label}: {1e3 * float(np.median(times)):.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("linear", "tail", "convnet", "exchange"))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import ray

    began = time.perf_counter()
    ray.init(num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False)
    print(f"Ray's start-up: {time.perf_counter() - began:.1f} s", flush=True)
    for name in ("exchange", "linear", "tail", "convnet"):
        if given.only in (None, name):
            exchange() if name == "exchange" else compare(name, given.turns)


if __name__ == "__main__":
    main()
