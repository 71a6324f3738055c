"""Models, losses and errors that no catalogue has: a user's own code, named "gate:…" in the TOML files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class TwoInputs(nn.Module):
    """Inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.left(left) + self.right(right)))
        return out


class Pair(TwoInputs):
    """Inputs as a tuple, and outputs as one."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        hidden = torch.relu(self.left(left) + self.right(right))
        return self.head(hidden), hidden.square().mean(-1)


class LowRank(nn.Module):
    """A frozen layer with a trained difference of rank 2 (LoRA), and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.zeros(2, 6)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.base(x) + x @ self.lora_A.T @ self.lora_B.T))
        return out


class TorchLSTM(nn.Module):
    """A torch LSTM or GRU over tokens."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(12, 5), kind(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.embedding(tokens))[0][:, -1])
        return out


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def _conv_norm() -> nn.Module:
    return _layers(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 8 * 8, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "network": lambda: _layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
    "double network": lambda: _layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(),
    "double softmax": lambda: _layers(nn.Linear(6, 4)).double(),
    "batch norm": lambda: _layers(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    "conv norm": _conv_norm,
    "group norm": lambda: _layers(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4)),
    "dropout": lambda: _layers(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)),
    "tied": Tied,
    "two inputs": TwoInputs,
    "pair": Pair,
    "low rank": LowRank,
    "torch lstm": lambda: TorchLSTM(nn.LSTM),
    "torch gru": lambda: TorchLSTM(nn.GRU),
    "wide": lambda: _layers(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 4)),
}


def model(name: str, seed: int = 5) -> nn.Module:
    """A model of one's own, with parameters drawn from a seed in a way that depends on no tree."""
    made, gen = MODELS[name](), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=gen, dtype=torch.float64))
    return made


def _first(outputs: Any) -> Tensor:
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


def smoothed(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels, and a term for a second output."""
    loss = functional.cross_entropy(_first(outputs), targets, reduction="none", label_smoothing=0.1)
    return loss + 0.1 * outputs[1] if isinstance(outputs, tuple) else loss


def brier(outputs: Any, targets: Tensor) -> Tensor:
    """The squared distance of probabilities to the truth."""
    chances = _first(outputs).softmax(-1)
    return (chances - functional.one_hot(targets, chances.shape[-1])).square().sum(-1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss of numbers."""
    return functional.huber_loss(outputs.squeeze(-1), targets, reduction="none")


def accuracy(outputs: Any, targets: Tensor) -> float:
    """A metric of one client."""
    return float((_first(outputs).argmax(-1) == targets).double().mean())


FUNCTIONS: dict[str, Callable[..., Any]] = {"smoothed": smoothed, "brier": brier, "huber": huber, "accuracy": accuracy}
