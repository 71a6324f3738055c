"""Models of the kinds of `benchmarks/zoo.py`, with layers and functions that are not in it, and that nothing was tuned for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from zoo import Entry, pixels, tokens


class NormedMLP(nn.Module):
    """LayerNorm and SiLU, in a ModuleList, with dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 320), nn.Linear(320, 128)])
        self.norms = nn.ModuleList([nn.LayerNorm(320), nn.LayerNorm(128)])
        self.head = nn.Linear(128, 20)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.dropout(functional.silu(norm(layer(x))), 0.2, self.training)
        return self.head(x)


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(400, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Tanh(),
        nn.Linear(64, 10),
    )  # fmt: skip


class BidirectionalLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.cells = nn.LSTM(16, 48, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(96, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(x.long()))[0].mean(1))


class CellByCell(nn.Module):
    """A GRU cell in a Python loop, and one matrix for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(80, 48), nn.GRUCell(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 48, dtype=self.embedding.weight.dtype)
        for step in self.embedding(x.long()).unbind(1):
            state = self.cell(step, state)
        return state @ self.embedding.weight.T


class MaskedEncoder(nn.Module):
    """An encoder with a key padding mask: token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(90, 48, padding_idx=0), nn.Parameter(0.02 * torch.randn(24, 48))
        layer = nn.TransformerEncoderLayer(48, 3, 128, dropout=0.1, activation="gelu", batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 90)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        padding = padding & (torch.arange(x.shape[1]) > 0)
        seen = self.layers(self.embedding(x.long()) + self.places, src_key_padding_mask=padding)
        return self.head(seen.masked_fill(padding.unsqueeze(-1), 0).sum(1) / (~padding).sum(1, keepdim=True))


class _Bent(torch.autograd.Function):
    """tanh forward, the derivative of a clipped line backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= 1)

    generate_vmap_rule = True


class OwnFunction(nn.Module):
    """A function with a backward pass of its own, an operation in place, and weights by weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(300, 150))
        self.second, self.head = nn.Linear(150, 150), nn.Linear(150, 30)

    def forward(self, x: Tensor) -> Tensor:
        hidden = _Bent.apply(self.first(x))
        hidden = hidden + self.second(hidden).mul_(0.5)
        return self.head(hidden)


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.ELU(), nn.AvgPool2d(2), nn.Conv2d(12, 24, 3), nn.InstanceNorm2d(24, affine=True),
            nn.ELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 36, 60), nn.ELU(), nn.Linear(60, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Experts(nn.Module):
    """The two best of six experts for each example, weighted by a gate; every expert is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(64, 6), nn.Linear(64, 12)
        self.inner, self.outer = nn.Parameter(torch.randn(6, 64, 96) / 8), nn.Parameter(torch.randn(6, 96, 64) / 10)

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).topk(2, -1)
        gates = torch.zeros(len(x), 6, dtype=x.dtype, device=x.device).scatter(1, which, best.softmax(-1))
        each = torch.einsum("ebh,ehd->ebd", functional.silu(torch.einsum("bd,edh->ebh", x, self.inner)), self.outer)
        return self.head(x + torch.einsum("be,ebd->bd", gates, each))


class Critic(nn.Module):
    """Spectral norm: every forward pass in training improves an estimate in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(100, 80))
        self.second, self.head = parametrizations.spectral_norm(nn.Linear(80, 80)), nn.Linear(80, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.leaky_relu(self.second(functional.leaky_relu(self.first(x), 0.2)), 0.2))


class _Sign(torch.autograd.Function):
    """The sign forward, the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Binarised(nn.Module):
    """Weights of one sign each, by an older kind of autograd function, which torch cannot batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(200, 120), nn.Linear(120, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight = _Sign.apply(self.first.weight) * self.first.weight.abs().mean()
        return self.second(functional.linear(x, weight, self.first.bias).tanh())


class Spectral(nn.Module):
    """A layer in Fourier space: complex numbers inside, from pairs of real parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.beside = nn.Conv1d(2, width, 1), nn.Conv1d(width, width, 1)
        self.factors, self.head = nn.Parameter(torch.randn(width, width, 10, 2) / width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        waves = torch.fft.rfft(x)[..., :10]
        mixed = torch.einsum("bim,iom->bom", waves, torch.view_as_complex(self.factors))
        x = functional.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.beside(x))
        return self.head(x.mean(-1))


OTHERS: dict[str, Entry] = {
    "LayerNorm MLP": Entry(NormedMLP, pixels(256, classes=20), 16),
    "BatchNorm MLP": Entry(batch_norm_mlp, pixels(400, classes=10), 20),
    "own function MLP": Entry(OwnFunction, pixels(300, classes=30), 10),
    "LSTM, both ways": Entry(BidirectionalLSTM, tokens(20, 100), 10),
    "GRU cell, tied": Entry(CellByCell, tokens(24, 80), 10),
    "masked encoder": Entry(MaskedEncoder, tokens(24, 90), 10),
    "small ConvNet": Entry(SmallConvNet, pixels(1, 28, 28, classes=10), 20),
    "experts": Entry(Experts, pixels(64, classes=12), 16),
    "spectral norm": Entry(Critic, pixels(100, classes=5), 16),
    "binarised": Entry(Binarised, pixels(200, classes=10), 10),
    "Fourier layer": Entry(Spectral, pixels(2, 64, classes=4), 16),
}
