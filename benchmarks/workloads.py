"""The workloads of the speed benchmark, and the contenders that run them. Each contender is a function that runs one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.family import family_round
from equipoise.round import run_round
from equipoise.task import Task
from equipoise.types import ServerState

Round = Callable[[int], None]


@dataclass(frozen=True)
class Workload:
    title: str
    clients: int
    clients_per_round: int
    examples: int
    batch_size: int
    model: Callable[[], nn.Module]

    def data(self) -> eq.FederatedData:
        """Random uint8 images of 784 pixels with 62 classes; what is in them does not change the work."""
        gen = torch.Generator().manual_seed(0)
        rows = self.clients * self.examples
        x = torch.randint(0, 256, (rows, 784), generator=gen, dtype=torch.uint8)
        y = torch.randint(0, 62, (rows,), generator=gen)
        ids = tuple(f"client-{i}" for i in range(self.clients))
        return eq.FederatedData(eq.ClientSet(x, y, torch.arange(0, rows + 1, self.examples), ids, scale=1 / 255), classes=62)


WORKLOADS = {
    "linear": Workload("linear 784→62, 100 clients per round × 100 examples, batch 10", 1000, 100, 100, 10,
                       lambda: eq.models.Softmax(784, 62)),
    "convnet": Workload("ConvNet, 10 clients per round × 100 examples, batch 16", 200, 10, 100, 16,
                        lambda: eq.models.ConvNet(classes=62)),
    "many clients": Workload("linear 784→62, 10,000 clients × 100 examples held in memory, 100 per round", 10_000, 100, 100, 10,
                             lambda: eq.models.Softmax(784, 62)),
    "tails 10": Workload("linear 784→62, four tails, 10 clients per round × 100 examples, batch 10", 200, 10, 100, 10,
                         lambda: eq.models.Softmax(784, 62)),
    "tails 100": Workload("linear 784→62, four tails, 100 clients per round × 100 examples, batch 10", 1000, 100, 100, 10,
                          lambda: eq.models.Softmax(784, 62)),
}  # fmt: skip
TAILS = (1.0, 0.8, 0.5, 0.1)


def equipoise_round(workload: Workload, engine: str) -> Round:
    """One round of Equipoise with an engine, as `train` runs it."""
    data, algorithm = workload.data(), eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=workload.batch_size))
    task = Task.of(workload.model())
    choice = {"loop": eq.engines.Loop(), "simulator": eq.engines.Simulator()}[engine]
    running, alpha, sampler = choice.start(task, data), algorithm.base_weights(data.train), eq.sampling.Uniform()
    state = ServerState(0, task.layout.read(task.module))

    def one(index: int) -> None:
        nonlocal state
        cohort = sampler(index, alpha, clients_per_round=workload.clients_per_round, seed=0)
        state, _ = run_round(state, algorithm, running, cohort, data.train)

    return one


def tails_round(workload: Workload, together: bool, device: str | None = None) -> Round:
    """One round of Δ-FL with each of four tails: as a family in one batch, or as four runs of their own."""
    data, solver = workload.data(), eq.solvers.SGD(lr=0.05, batch_size=workload.batch_size)
    algorithms = [eq.Algorithm(risk=eq.risk.Superquantile(tail), solver=solver) for tail in TAILS]
    task = Task.of(workload.model())
    running, alpha, sampler = (
        eq.engines.Simulator(device=device).start(task, data),
        algorithms[0].base_weights(data.train),
        eq.sampling.Uniform(),
    )
    start = 0.01 * torch.randn(task.layout.dimension, generator=torch.Generator().manual_seed(0)).to(device or "cpu")
    states = [ServerState(0, start) for _ in TAILS]

    def one(index: int) -> None:
        nonlocal states
        cohort = sampler(index, alpha, clients_per_round=workload.clients_per_round, seed=0)
        if together:
            states, _ = family_round(states, algorithms, running, cohort, data.train)
        else:
            pairs = zip(states, algorithms, strict=True)
            states = [run_round(state, algorithm, running, cohort, data.train)[0] for state, algorithm in pairs]

    return one


def plain_round(workload: Workload) -> Round:
    """What a careful person writes by hand in PyTorch: no DataLoader, one module, one optimiser step per batch, no copies."""
    clients, model = workload.data().train, workload.model()
    parameters = list(model.parameters())
    gen = torch.Generator().manual_seed(0)

    def one(index: int) -> None:
        chosen = torch.randperm(len(clients), generator=gen)[: workload.clients_per_round].tolist()
        start = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in start]
        for client in chosen:
            with torch.no_grad():
                for p, s in zip(parameters, start, strict=True):
                    p.copy_(s)
            rows = clients.rows(client)
            x, y = clients.x[rows].float().div_(255), clients.y[rows]
            for batch in torch.randperm(len(x), generator=gen).split(workload.batch_size):
                loss = functional.cross_entropy(model(x[batch]), y[batch])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        p.sub_(g, alpha=0.05)
            with torch.no_grad():
                for t, p, s in zip(total, parameters, start, strict=True):
                    t.add_(p - s, alpha=1 / len(chosen))
        with torch.no_grad():
            for p, s, t in zip(parameters, start, total, strict=True):
                p.copy_(s + t)

    return one


CONTENDERS: dict[str, Callable[..., Round]] = {
    "plain PyTorch loop": plain_round,
    "equipoise loop": lambda workload: equipoise_round(workload, "loop"),
    "equipoise simulator": lambda workload: equipoise_round(workload, "simulator"),
    "four runs": lambda workload, device=None: tails_round(workload, together=False, device=device),
    "family of four": lambda workload, device=None: tails_round(workload, together=True, device=device),
}
