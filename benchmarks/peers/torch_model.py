"""The models of the workloads in plain PyTorch, for the peers that train torch modules."""

from __future__ import annotations

import torch
from problem import Problem
from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Conv 5 × 5 (1 → 32), pool, ReLU, conv 5 × 5 (32 → 64), pool, ReLU, linear 1024 → 62."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.readout = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5), nn.Linear(1024, 62)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU follows the pooling: the same function on a quarter of the numbers.
        hidden = functional.max_pool2d(self.first(x.view(-1, 1, 28, 28)), 2).relu()
        hidden = functional.max_pool2d(self.second(hidden), 2).relu()
        logits: Tensor = self.readout(hidden.flatten(1))
        return logits


def initial_model(problem: Problem) -> nn.Module:
    model: nn.Module = nn.Linear(784, 62) if len(problem.shapes) == 2 else ConvNet()
    set_parameters(model, problem)
    return model


def set_parameters(model: nn.Module, problem: Problem) -> None:
    """Puts the initial parameters of a problem into a module whose parameters have its shapes, in its order."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), problem.initial(), strict=True):
            assert parameter.shape == value.shape, (parameter.shape, value.shape)
            parameter.copy_(torch.from_numpy(value))


def tensors(problem: Problem) -> tuple[Tensor, Tensor]:
    """The data as tensors: pixels (clients, examples, 784) of uint8, classes (clients, examples)."""
    x, y = problem.data()
    return torch.from_numpy(x), torch.from_numpy(y)
