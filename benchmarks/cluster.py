"""What a Ray cluster costs on this machine: rounds by two workers of Ray and by the simulator on the same cores, in turn.

    python benchmarks/cluster.py [--only exchange|linear|tail|convnet|study …] [--turns 5]

Both engines have two cores. After a round that is not counted, blocks of rounds alternate; of each engine the median block
counts. Ray's start-up is stated apart. `exchange` is what Ray takes to send nothing, and a model of 195 kB, to two workers and
back, without work. `study` makes 12 short runs, two at a time, by processes and as tasks of Ray.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch

import equipoise as eq
from equipoise.core.screen import Screen
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.engines import Ray, Simulator
from equipoise.engines.cluster import ray_engine
from equipoise.engines.cluster.cost_measurement import measure_exchange
from equipoise.engines.cluster.ray_extra import connect
from equipoise.experiment.scheduler import run_all
from equipoise.experiment.study import prepare, read_study
from equipoise.rounds.drivers import InTurn
from equipoise.runs.setup import set_up

PARTS = ("exchange", "linear", "tail", "convnet", "study")


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
        self.rounds, self.state = InTurn([setting]), setting.begin()
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
    """Milliseconds of an exchange with workers, without work; the figures that the formula of docs/scale.md takes."""
    data = clients(4, 2, (784,), 62)
    task = try_task(Task.of(eq.models.Softmax(784, 62)), data)
    engine = Ray(workers=2).start(task, data)
    costs = measure_exchange(engine)
    said = f"latency {1e3 * costs.latency:.2f} ms, a call {1e3 * costs.call:.2f} ms, a megabyte {1e9 * costs.byte:.2f} ms"
    print(f"exchange: {said}; with two workers {1e3 * (costs.latency + 2 * costs.call):.2f} ms", flush=True)


STUDY = """
[study]
seeds = 4
[methods.FedAvg]
[methods.tail]
risk = {name = "superquantile", tail = 0.5}
[methods.q-fair]
risk = {name = "qfair", q = 1.0}
[data]
name = "label_shift"
train_clients = 100
[model]
name = "softmax"
[train]
rounds = 300
clients_per_round = 50
"""


def study() -> None:
    """Seconds of 12 short runs, two at a time: by processes, and as tasks of Ray."""
    ray_engine._pools.clear()  # their workers have the CPUs
    times = {}
    for label, address in (("processes", None), ("Ray", "auto")):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "study.toml").write_text(STUDY)
            runs = read_study(Path(place) / "study.toml", out=Path(place) / "runs")
            prepare(runs)
            began = time.perf_counter()
            jobs = run_all(runs, workers=2, console=Screen(quiet=True), ray=address)
            times[label] = time.perf_counter() - began
            assert [job.status for job in jobs] == ["done"] * 12, [job.message for job in jobs]
    print(f"study of 12 runs: processes {times['processes']:.1f} s, Ray {times['Ray']:.1f} s: "
          f"× {times['Ray'] / times['processes']:.3f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    connect("local", num_cpus=2, object_store_memory=200 * 2**20)
    print(f"Ray's start-up: {time.perf_counter() - began:.1f} s", flush=True)
    time.sleep(10)  # its own processes go on starting for a while
    for name in given.only:
        {"exchange": exchange, "study": study}.get(name, lambda name=name: compare(name, given.turns))()


if __name__ == "__main__":
    main()
