"""Models of the kinds of `zoo.py` that are not in it, and that nothing was tuned for; `models.py --others` measures them.

Each name ends with its kind in brackets, which says what ratio is wanted on two cores of a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from more_models import MORE
from torch import Tensor, nn
from torch.nn import functional
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


class EinsumAttention(nn.Module):
    """Attention by einsum, one layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Parameter(torch.randn(3, 4, 64, 16) / 8), nn.Parameter(torch.randn(4, 16, 64) / 8)
        self.mlp, self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.long())
        for _ in range(3):
            q, k, v = torch.einsum("btd,zhde->zbhte", self.norm(x), self.qkv)
            weights = torch.einsum("bhte,bhse->bhts", q, k).div(4).softmax(-1)
            x = x + torch.einsum("bhts,bhse,hed->btd", weights, v, self.out)
            x = x + self.mlp(self.norm(x))
        return self.head(x.mean(1))


class Mobile(nn.Module):
    """Inverted residual blocks with BatchNorm and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
        self.blocks = nn.ModuleList(self._block(i, o, s) for i, o, s in ((16, 24, 2), (24, 24, 1), (24, 40, 2)))
        self.head = nn.Linear(40, 10)

    @staticmethod
    def _block(into: int, out: int, stride: int) -> nn.Module:
        wide = 4 * into
        return nn.Sequential(
            nn.Conv2d(into, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            after = block(x)
            x = x + after if after.shape == x.shape else after
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class ResidualConv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 24, 7, padding=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.LeakyReLU(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.amax(-1))


class Interactions(nn.Module):
    """Tables of embeddings in a ModuleDict, pairwise products of them, and a tower: the shape of a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({str(i): nn.Embedding(50 + 10 * i, 8) for i in range(6)})
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 21, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        below = self.bottom(dense)
        codes = torch.stack([below, *(table(sparse[:, i].long()) for i, table in enumerate(self.tables.values()))], 1)
        products = codes @ codes.transpose(1, 2)
        rows, columns = torch.tril_indices(7, 7, -1)
        return self.top(torch.cat([below, products[:, rows, columns]], 1))


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


def clicks(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
    x = {"sparse": torch.randint(0, 50, (n, 6), generator=g), "dense": torch.randn(n, 13, generator=g)}
    return x, torch.randint(0, 2, (n,), generator=g)


OTHERS: dict[str, Entry] = {
    "LayerNorm MLP [1.8]": Entry(NormedMLP, pixels(256, classes=20), 16, on_cpu=12),
    "BatchNorm MLP [1.8]": Entry(batch_norm_mlp, pixels(400, classes=10), 20, on_cpu=10),
    "own function MLP [1.8]": Entry(OwnFunction, pixels(300, classes=30), 10, on_cpu=10, examples=60),
    "LSTM, both ways [1.6]": Entry(BidirectionalLSTM, tokens(20, 100), 10, on_cpu=6, examples=60),
    "GRU cell, tied [1.6]": Entry(CellByCell, tokens(24, 80), 10, on_cpu=6, examples=60),
    "masked encoder [1.3]": Entry(MaskedEncoder, tokens(24, 90), 10, on_cpu=8, examples=60),
    "einsum attention [1.3]": Entry(EinsumAttention, tokens(32, 64), 8, on_cpu=6, examples=48),
    "mobile [1.0]": Entry(Mobile, pixels(3, 32, 32, classes=10), 16, on_cpu=4, examples=64),
    "small ConvNet [1.0]": Entry(SmallConvNet, pixels(1, 28, 28, classes=10), 20, on_cpu=6),
    "residual 1-D CNN [1.0]": Entry(ResidualConv1d, pixels(3, 100, classes=5), 16, on_cpu=8),
    "interactions [1.3]": Entry(Interactions, clicks, 20, on_cpu=16),
    **MORE,
}
