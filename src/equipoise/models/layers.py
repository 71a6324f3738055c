"""What the models share: checks of sizes, and layers whose initial parameters come from a given generator."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from equipoise.errors import InvalidParameter, is_integer, require

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


def positive(parameter: str, value: int) -> int:
    """The value as an int; all but integers of at least 1 are refused."""
    require(is_integer(value) and value >= 1, parameter, "must be a whole number of at least 1", value)
    return int(value)


def checked_seed(seed: int) -> int:
    """The seed as an int; all but integers are refused."""
    require(is_integer(seed), "seed", "must be a whole number", seed)
    return int(seed)


def refuse_integers(x: Tensor, fix: str) -> None:
    """Refuse inputs that are not floating numbers."""
    if not x.is_floating_point():
        raise InvalidParameter("x", "must hold floating numbers", x.dtype, fix)


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """A tensor with entries drawn from U(−bound, bound), on the CPU, where the generator is."""
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def seeded(layer: Layer, generator: torch.Generator) -> Layer:
    """A layer that was made on the device "meta", moved to the CPU with initial parameters from `generator`.

    The law is torch's default, Kaiming-uniform with a = √5 (He et al. 2015): weights and biases are U(−1/√fan_in, 1/√fan_in).
    """
    layer = layer.to_empty(device="cpu")
    bound = layer.weight[0].numel() ** -0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return layer
