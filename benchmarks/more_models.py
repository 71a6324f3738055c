"""Further models of the kinds of `zoo.py`, written after the simulator's paths were: part of `other_models.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from zoo import Entry, pixels, tokens


class ConvNeXt(nn.Module):
    """Depthwise 7 × 7 convolutions, LayerNorm over channels that come last, and a trained scale of each branch."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.scales, self.head = nn.Parameter(0.1 * torch.ones(2, width)), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        parts = zip(self.depthwise, self.norms, self.up, self.down, self.scales, strict=True)
        for depthwise, norm, up, down, scale in parts:
            inner = norm(depthwise(x).permute(0, 2, 3, 1))
            x = x + (scale * down(functional.gelu(up(inner)))).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class VisionTransformer(nn.Module):
    """Patches, a class token, and attention by nn.MultiheadAttention."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            seen = self.norms[2 * i](x)
            x = x + attention(seen, seen, seen, need_weights=False)[0]
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x[:, 0])


class MaskedLSTM(nn.Module):
    """An LSTM in both directions whose outputs at padding (token 0) count nothing; the first token always counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 12, padding_idx=0)
        self.cells, self.head = nn.LSTM(12, 32, batch_first=True, bidirectional=True), nn.Linear(64, 60)

    def forward(self, x: Tensor) -> Tensor:
        inside = (x != 0) | (torch.arange(x.shape[1], device=x.device) == 0)
        outputs = self.cells(self.embedding(x.long()))[0]
        return self.head(outputs.masked_fill(~inside.unsqueeze(-1), -1e4).amax(1))


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


class WaveNet(nn.Module):
    """Causal convolutions with growing dilation, gates, and a sum of skips."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.dilations = nn.Conv1d(4, width, 1), (1, 2, 4, 8)
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations)
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in self.dilations)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for dilation, gated, mixed in zip(self.dilations, self.gated, self.mixed, strict=True):
            both = gated(functional.pad(x, (dilation, 0)))
            value, gate = both.chunk(2, 1)
            change, skip = mixed(value.tanh() * gate.sigmoid()).chunk(2, 1)
            x, skips = x + change, [*skips, skip]
        return self.head(torch.stack(skips).sum(0)).mean(-1)


class SqueezeExcite(nn.Module):
    """Depthwise convolutions with BatchNorm, and channels weighted by what the whole picture shows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(width, width, 5, 1, 2, groups=width, bias=False), nn.BatchNorm2d(width))
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 8, 1), nn.ReLU(), nn.Conv2d(8, width, 1), nn.Hardsigmoid()
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        inner = self.depthwise(x)
        return self.head((x + inner * self.squeeze(inner)).mean((2, 3)))


class Critic(nn.Module):
    """Spectral norm: every forward pass in training improves an estimate in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(100, 80))
        self.second, self.head = parametrizations.spectral_norm(nn.Linear(80, 80)), nn.Linear(80, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.leaky_relu(self.second(functional.leaky_relu(self.first(x), 0.2)), 0.2))


class TiedDecoder(nn.Module):
    """A causal language model with one matrix for both ends and rotated places: an output for each token."""

    def __init__(self, width: int = 48, words: int = 50, length: int = 24) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(6) / 6))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cosines - b * self.sines, a * self.sines + b * self.cosines], -1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.embedding(x.long())
        b, t, d = state.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.norm(state)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        state = state + self.out(seen.transpose(1, 2).reshape(b, t, d))
        inner = self.norm(state)
        state = state + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return (state @ self.embedding.weight.T).transpose(1, 2)


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


class Mixer(nn.Module):
    """An MLP over places and one over channels by turns, with dropout of whole branches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.norms = nn.Conv2d(1, width, 7, 7), nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.places = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def words(length: int, count: int) -> Any:
    """Sequences of words whose targets are the next word."""

    def made(n: int, g: torch.Generator) -> tuple[Any, Tensor]:
        ids = torch.randint(0, count, (n, length + 1), generator=g)
        return ids[:, :-1], ids[:, 1:]

    return made


MORE: dict[str, Entry] = {
    "ConvNeXt [1.0]": Entry(ConvNeXt, pixels(3, 32, 32, classes=10), 16, on_cpu=6, examples=64),
    "vision transformer [1.3]": Entry(VisionTransformer, pixels(3, 32, 32, classes=10), 16, on_cpu=6, examples=64),
    "masked LSTM [1.6]": Entry(MaskedLSTM, tokens(24, 60), 10, on_cpu=6, examples=60),
    "experts [1.3]": Entry(Experts, pixels(64, classes=12), 16, on_cpu=12, examples=64),
    "WaveNet [1.0]": Entry(WaveNet, pixels(4, 96, classes=8), 16, on_cpu=6, examples=64),
    "squeeze and excite [1.0]": Entry(SqueezeExcite, pixels(3, 32, 32, classes=10), 16, on_cpu=6, examples=64),
    "spectral norm [1.3]": Entry(Critic, pixels(100, classes=5), 16, on_cpu=12, examples=64),
    "tied decoder [1.3]": Entry(TiedDecoder, words(24, 50), 8, on_cpu=6, examples=48),
    "binarised [1.8]": Entry(Binarised, pixels(200, classes=10), 10, on_cpu=12, examples=60),
    "Fourier layer [1.3]": Entry(Spectral, pixels(2, 64, classes=4), 16, on_cpu=8, examples=64),
    "mixer [1.3]": Entry(Mixer, pixels(1, 28, 28, classes=10), 16, on_cpu=8, examples=64),
}
