"""Check the simulator on a CUDA device against the loop engine on the CPU, then time a round. Needs torch and numpy alone.

PYTHONPATH=src python benchmarks/check_gpu.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import equipoise as eq
from equipoise.task import Task
from equipoise.testing import check_engine


def agreement(device: str) -> None:
    solvers = [
        eq.solvers.SGD(),
        eq.solvers.SGD(batch_size=3, steps=7, momentum=0.9, weight_decay=0.01),
        eq.solvers.SGD(batch_size=None, epochs=2),
        eq.solvers.SGD(batch_size=3, epochs=4, prox=0.5, straggler_share=0.6),
        eq.solvers.MAML(),
        eq.solvers.FedDane(eq.solvers.SGD(prox=0.5)),
    ]
    for solver in solvers:
        for chunk in (None, 3):
            check_engine(eq.engines.Simulator(device=device, chunk_size=chunk), solver=solver, tolerance=1e-9)
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 28, 28), generator=gen, dtype=torch.uint8)
    y = torch.randint(0, 62, (60,), generator=gen)
    images = eq.FederatedData(eq.ClientSet(x, y, torch.tensor([0, 5, 17, 37, 60]), tuple("abcd"), scale=1 / 255), classes=62)
    tokens = torch.randint(0, 50, (60, 20), generator=gen)
    texts = eq.FederatedData(eq.ClientSet(tokens, y % 50, torch.tensor([0, 5, 17, 37, 60]), tuple("abcd")), classes=50)
    for model, data in (
        (eq.models.ConvNet(classes=62), images),
        (eq.models.CharGRU(vocabulary=50, hidden=16), texts),
        (eq.models.CharLSTM(vocabulary=50, hidden=16, layers=2), texts),
    ):
        check_engine(
            eq.engines.Simulator(device=device), task=Task.of(model.double()), data=data,
            solver=eq.solvers.SGD(lr=0.05, batch_size=8), tolerance=1e-8,
        )  # fmt: skip
        print(f"{type(model).__name__} on {device} agrees with the loop on the CPU")


def a_whole_run(device: str) -> None:
    data = eq.data.label_shift(train_clients=200, validation_clients=20, test_clients=50, seed=0)
    tail = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))
    runs = {
        where: eq.train(
            eq.models.Softmax(data.features, data.classes).double(), data, tail, rounds=20, clients_per_round=40, seed=0,
            engine=eq.engines.Simulator(device=where),
        )
        for where in ("cpu", device)
    }  # fmt: skip
    difference = float((runs["cpu"].params - runs[device].params.cpu()).abs().max())
    print(f"20 rounds of Δ-FL: largest difference between cpu and {device} {difference:.2e}")
    if difference > 1e-8:
        raise SystemExit("the device disagrees with the CPU")


def family_cost(device: str) -> None:
    """What a family of four tails costs, as a share of four separate runs, taken in turns."""
    from workloads import CONTENDERS, WORKLOADS

    for name in ("tails 10", "tails 100"):
        contenders = {c: CONTENDERS[c](WORKLOADS[name], device) for c in ("four runs", "family of four")}
        times: dict[str, list[float]] = {c: [] for c in contenders}
        for turn in range(7):
            for contender, one in contenders.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for index in range(5):
                    one(5 * turn + index)
                torch.cuda.synchronize()
                if turn > 1:
                    times[contender].append((time.perf_counter() - began) / 5 * 1000)
        separate, together = (statistics.median(times[c]) for c in contenders)
        print(
            f"{WORKLOADS[name].title}: four runs {separate:.1f} ms, family {together:.1f} ms, ratio {together / separate:.2f}"
        )


def speed(device: str) -> None:
    from workloads import WORKLOADS

    from equipoise.round import run_round
    from equipoise.types import ServerState

    for name in ("linear", "convnet"):
        workload = WORKLOADS[name]
        data, task = workload.data(), Task.of(workload.model())
        algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=workload.batch_size))
        engine, alpha = eq.engines.Simulator(device=device).start(task, data), algorithm.base_weights(data.train)
        state = ServerState(0, task.layout.read(task.module).to(device))
        for index in range(25):
            if index == 5:
                torch.cuda.synchronize()
                began = time.perf_counter()
            cohort = eq.sampling.Uniform()(index, alpha, clients_per_round=workload.clients_per_round, seed=0)
            state, _ = run_round(state, algorithm, engine, cohort, data.train)
        torch.cuda.synchronize()
        print(f"{workload.title}: {(time.perf_counter() - began) / 20 * 1000:.1f} ms/round, "
              f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB on the device")  # fmt: skip


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine")
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    agreement("cuda")
    a_whole_run("cuda")
    family_cost("cuda")
    speed("cuda")
