"""A workload of `benchmarks/workloads.py` on the data and from the initial parameters that all systems share."""

from __future__ import annotations

import torch
from problem import CLASSES, PROBLEMS, SCALE, Problem
from torch import nn
from torch_model import set_parameters, tensors
from workloads import WORKLOADS, Workload

import equipoise as eq


class SharedWorkload(Workload):
    def data(self) -> eq.FederatedData:
        x, y = tensors(problem_of(self))
        offsets = torch.arange(0, self.clients * self.examples + 1, self.examples)
        ids = tuple(f"client-{i}" for i in range(self.clients))
        return eq.FederatedData(eq.ClientSet(x.flatten(0, 1), y.flatten(), offsets, ids, scale=SCALE), classes=CLASSES)


def problem_of(workload: Workload) -> Problem:
    """The problem with the sizes of a workload; refused where the two no longer say the same."""
    sizes = (workload.clients, workload.clients_per_round, workload.examples, workload.batch_size)
    for problem in PROBLEMS.values():
        if sizes == (problem.clients, problem.clients_per_round, problem.examples, problem.batch_size):
            return problem
    raise ValueError(f"benchmarks/workloads.py and benchmarks/peers/problem.py differ: no problem has the sizes {sizes}")


def shared(name: str) -> tuple[SharedWorkload, nn.Module]:
    """The workload, and the one module that its rounds will train."""
    ours = WORKLOADS[name]
    model = ours.model()
    set_parameters(model, PROBLEMS[name])
    return SharedWorkload(**(vars(ours) | {"model": lambda: model})), model
