"""Models that users bring, and the careful loop they would write: what `benchmarks/models.py` measures against.

Needs torch alone. `python zoo.py [cpu|cuda] [name …]` prints the careful loop's time per round. Data are random: what is in
them does not change the work. Every model takes the inputs that `data()` makes: a tensor, a tuple or a dict of tensors, one row
per example.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        middle = nn.Dropout(dropout) if dropout else nn.Identity()
        self.net = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), middle, nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 62))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LeNetDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.25),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 62))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def norm_of(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), norm_of(norm, out)
        self.c2, self.n2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm_of(norm, out)
        same = stride == 1 and into == out
        self.skip = nn.Identity() if same else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.n2(self.c2(F.relu(self.n1(self.c1(x))))) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, first: int, plan: tuple[tuple[int, int], ...], norm: str = "group", classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False)]
        into = first
        for out, stride in plan:
            layers.append(Block(into, out, stride, norm))
            into = out
        self.body, self.head = nn.Sequential(*layers), nn.Linear(into, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


EIGHT = ((16, 1), (32, 2), (64, 2))
EIGHTEEN = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


def frozen_backbone() -> nn.Module:
    """A BatchNorm backbone that is frozen and in eval mode, with a head to train."""
    model = ResNet(16, EIGHT, "batch")
    model.body.requires_grad_(False).eval()
    return model


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
        for into, out, stride in ((32, 64, 2), (64, 128, 2), (128, 128, 1)):
            layers += [nn.Conv2d(into, into, 3, stride, 1, groups=into, bias=False), nn.GroupNorm(8, into), nn.ReLU()]
            layers += [nn.Conv2d(into, out, 1, bias=False), nn.GroupNorm(8, out), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], layers: int, both: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.cells = kind(8, 64, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(128 if both else 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(x.long()))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(64, 64), nn.Parameter(0.02 * torch.randn(32, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x.long()) + self.places).mean(1))


class Conv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(6, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
        )
        self.head = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).squeeze(-1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def two(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(4, o), nn.ReLU(), nn.Conv2d(o, o, 3, 1, 1), nn.ReLU())

        self.down1, self.down2, self.bottom = two(1, 16), two(16, 32), two(32, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.join2, self.join1, self.head = two(64, 32), two(32, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.head(self.join1(torch.cat([self.up1(b), a], 1)))


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 6) for _ in range(8))
        self.net = nn.Sequential(nn.Linear(58, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        codes = [table(categories[:, i].long()) for i, table in enumerate(self.tables)]
        return self.net(torch.cat([*codes, numbers], 1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(32 + 5, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, image: Tensor, about: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(image), about], 1))


class LoRALinear(nn.Module):
    def __init__(self, into: int, out: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, into) / into**0.5), nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.qkv, self.out = LoRALinear(width, 3 * width), LoRALinear(width, width)
        self.up, self.down = (
            nn.Linear(width, 4 * width).requires_grad_(False),
            nn.Linear(4 * width, width).requires_grad_(False),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LoRADecoder(nn.Module):
    """A small causal language model over bytes whose adapters alone are trained."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width).requires_grad_(False)
        self.places = nn.Parameter(0.02 * torch.randn(64, width), requires_grad=False)
        self.layers = nn.Sequential(*(DecoderLayer(width, 4) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:  # (B, T) -> (B, V, T)
        return (self.layers(self.embedding(x.long()) + self.places) @ self.embedding.weight.T).transpose(1, 2)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number per example; −100 is ignored."""
    losses = F.cross_entropy(outputs, targets, reduction="none", ignore_index=-100)
    if losses.dim() == 1:
        return losses
    counted = (targets != -100).flatten(1)
    return losses.flatten(1).sum(1) / counted.sum(1)


Maker = Callable[[int, torch.Generator], tuple[Any, Tensor]]


def pixels(*shape: int, classes: int) -> Maker:
    return lambda n, g: (torch.rand(n, *shape, generator=g), torch.randint(0, classes, (n,), generator=g))


def tokens(length: int, words: int) -> Maker:
    return lambda n, g: (torch.randint(0, words, (n, length), generator=g), torch.randint(0, words, (n,), generator=g))


def masks(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
    y = torch.randint(0, 4, (n, 32, 32), generator=g)
    y[torch.rand(n, 32, 32, generator=g) < 0.125] = -100
    return torch.rand(n, 1, 32, 32, generator=g), y


def table(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
    x = {"categories": torch.randint(0, 20, (n, 8), generator=g), "numbers": torch.randn(n, 10, generator=g)}
    return x, torch.randint(0, 2, (n,), generator=g)


def pictures_and_facts(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
    return (torch.rand(n, 1, 28, 28, generator=g), torch.randn(n, 5, generator=g)), torch.randint(0, 10, (n,), generator=g)


def text(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
    ids = torch.randint(0, 256, (n, 65), generator=g)
    return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Entry:
    """A model, its data, and how much of it a round is."""

    model: Callable[[], nn.Module]
    data: Maker
    batch: int
    on_gpu: int = 100  # clients per round
    on_cpu: int = 10
    examples: int = 100  # per client


ZOO: dict[str, Entry] = {
    "MLP": Entry(MLP, pixels(784, classes=62), 10, on_cpu=20),
    "MLP, dropout": Entry(lambda: MLP(0.5), pixels(784, classes=62), 10, on_cpu=20),
    "LeNet, dropout": Entry(LeNetDropout, pixels(1, 28, 28, classes=62), 16, on_cpu=4),
    "ResNet-8, GroupNorm": Entry(lambda: ResNet(16, EIGHT), pixels(3, 32, 32, classes=10), 20, on_cpu=4),
    "ResNet-18, GroupNorm": Entry(
        lambda: ResNet(64, EIGHTEEN), pixels(3, 32, 32, classes=10), 20, on_gpu=20, on_cpu=2, examples=40
    ),
    "ResNet-18, BatchNorm": Entry(
        lambda: ResNet(64, EIGHTEEN, "batch"), pixels(3, 32, 32, classes=10), 20, on_gpu=20, on_cpu=2, examples=40
    ),
    "depthwise": Entry(Depthwise, pixels(3, 32, 32, classes=10), 20, on_cpu=4),
    "LSTM, 2 layers": Entry(lambda: Recurrent(nn.LSTM, 2, False), tokens(32, 64), 10),
    "GRU, both directions": Entry(lambda: Recurrent(nn.GRU, 1, True), tokens(32, 64), 10),
    "Transformer": Entry(Transformer, tokens(32, 64), 10),
    "Transformer, dropout": Entry(lambda: Transformer(0.1), tokens(32, 64), 10),
    "1-D CNN": Entry(Conv1d, pixels(6, 128, classes=6), 16),
    "U-Net, ignored pixels": Entry(UNet, masks, 8, on_gpu=40, on_cpu=4, examples=40),
    "tabular": Entry(Tabular, table, 16, on_cpu=20),
    "frozen backbone": Entry(frozen_backbone, pixels(3, 32, 32, classes=10), 20, on_cpu=4),
    "two inputs": Entry(TwoInputs, pictures_and_facts, 16),
    "LoRA decoder": Entry(LoRADecoder, text, 8, on_cpu=2, examples=40),
}


def rows_of(x: Any, rows: Tensor) -> Any:
    if isinstance(x, dict):
        return {name: value[rows] for name, value in x.items()}
    return tuple(value[rows] for value in x) if isinstance(x, tuple) else x[rows]


def called(model: nn.Module, x: Any) -> Tensor:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def moved(x: Any, device: str) -> Any:
    if isinstance(x, dict):
        return {name: value.to(device) for name, value in x.items()}
    return tuple(value.to(device) for value in x) if isinstance(x, tuple) else x.to(device)


def careful_round(entry: Entry, device: str, clients: int, lr: float = 0.05) -> Callable[[], None]:
    """What a careful person writes: one module, data on the device, no DataLoader, no .grad, updates in one call."""
    generator = torch.Generator().manual_seed(0)
    x, y = entry.data(clients * entry.examples, generator)
    x, y = moved(x, device), y.to(device)
    model = entry.model()
    frozen = [m for m in model.modules() if not m.training]
    model.to(device).train()
    for m in frozen:
        m.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        start = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in parameters]
        for k in range(clients):
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            order = torch.randperm(entry.examples, device=device) + k * entry.examples
            for rows in order.split(entry.batch):
                loss = loss_of(called(model, rows_of(x, rows)), y[rows]).mean()
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-lr)
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=1 / clients)
        with torch.no_grad():
            torch._foreach_copy_(parameters, total)

    return run


def milliseconds(run: Callable[[], None], device: str, rounds: int = 2) -> float:
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / rounds


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for name in sys.argv[2:] or ZOO:
        one = ZOO[name]
        count = min(one.on_gpu, 10) if where == "cuda" else one.on_cpu
        full = one.on_gpu if where == "cuda" else one.on_cpu
        size = sum(p.numel() for p in one.model().parameters() if p.requires_grad)
        taken = milliseconds(careful_round(one, where, count), where) * full / count
        print(f"{name:24s} {size:>9d} trained parameters, {full:3d} clients: {taken:9.1f} ms per round", flush=True)
