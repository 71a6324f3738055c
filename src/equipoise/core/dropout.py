"""Dropout from counter-based random numbers: masks that are a pure function of a key, a call and places in a tensor.

An element's bits are a hash of the key (seed, round, client and local step), the number of the dropout call inside the forward
pass, and the element's index in every dimension. So a mask is the same for one client alone and for many in one batch, on every
device, and whatever padding follows an element in any dimension.

A hash gives 64 bits, 16 for each of four neighbours in the last dimension. The share that is kept is therefore a multiple of
2⁻¹⁶, and what is kept is divided by just that share, so that expectations are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from equipoise.core.rng import mix_, name_key, signed

STREAM = "masks drawn by counters, 16 bits each"  # what a checkpoint says of a model with dropout; to be changed with it
_LANES, _LEVELS = 4, 1 << 16
_SELU = 1.7580993408473766  # what alpha dropout sets a value to, negated: Klambauer et al. 2017


def factor(dimension: int) -> int:
    """The odd number that an index in a dimension is multiplied by; dimensions are counted from the last."""
    return signed(name_key(f"dimension {dimension}") | 1)


def _indices(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Σ index · factor over the dimensions, (*shape,) int64, modulo 2⁶⁴."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for place, size in enumerate(reversed(shape)):
        steps = torch.arange(size, device=device).mul_(factor(place))
        total = total + steps.view(-1, *(1,) * place)
    return total.view(shape)


_known_indices = lru_cache(maxsize=64)(_indices)


def kept(key: Tensor, call: int, shape: Sequence[int], level: int) -> Tensor:
    """Which elements of a tensor are kept, (*shape,) bool, each with probability level / 2¹⁶, 0 < level < 2¹⁶.

    `key` is one int64 number, or a tensor of them (k,): then there is a mask for each, (k, *shape).
    """
    shape = tuple(shape) or (1,)
    if key.device.type == "cuda" and key.dim() == 1 and (kernels := _kernels()) is not None and len(shape) <= 4:
        factors = [factor(place) for place in range(4)]
        masks: Tensor = kernels.draw_masks(key, signed(name_key(f"call {call}")), shape, factors, level - _LEVELS // 2)
        return masks
    words = (*shape[:-1], -(-shape[-1] // _LANES))
    # A tensor that is made while a CUDA graph is captured has no values yet: none is kept there.
    indices = (_known_indices if key.device.type == "cpu" else _indices)(words, key.device)
    bits = mix_((key + signed(name_key(f"call {call}"))).view(*key.shape, *(1,) * len(words)) + indices)
    return bits.view(torch.int16)[..., : shape[-1]] < level - _LEVELS // 2


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """The simulator's Triton kernel for masks; None where it cannot be used."""
    try:
        return import_module("equipoise.engines.simulator.cuda.kernels.dropout_masks")
    except Exception:  # Triton is absent, or another version than the kernel is written for
        return None


class _KeptByClient(torch.autograd.Function):
    """`kept` under `torch.func.vmap`, which cannot batch a view of another type in every version of torch."""

    @staticmethod
    def forward(key: Tensor, call: int, shape: Sequence[int], level: int) -> Tensor:
        return kept(key, call, shape, level)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Tensor, call: int, shape: Sequence[int], level: int) -> tuple[Tensor, int]:
        return kept(key.movedim(in_dims[0], 0), call, shape, level), 0


def dropout(
    x: Tensor, p: float, key: Tensor, call: int, *, features: bool = False, alpha: bool = False, batched: bool = False
) -> Tensor:
    """Dropout of a share p of the elements of x; with `features` of whole channels x[n, c], with `alpha` by alpha dropout.

    `batched` says that `torch.func.vmap` is at work.
    """
    level = round((1 - p) * _LEVELS)
    if x.numel() == 0 or level == _LEVELS:
        return x
    if level == 0:
        return x * torch.zeros_like(x)
    share = level / _LEVELS
    shape = x.shape[:2] if features else x.shape
    mask: Tensor = (_KeptByClient.apply if batched else kept)(key, call, tuple(shape), level)
    noise = mask.to(x.dtype).view((*shape, *(1,) * (x.dim() - len(shape))))
    if not alpha:
        return x * noise.mul_(1 / share)
    scale = ((_SELU**2 * (1 - share) + 1) * share) ** -0.5
    shift = (noise - 1).mul_(_SELU * scale).add_(_SELU * scale * (1 - share))
    return x * noise.mul_(scale) + shift
