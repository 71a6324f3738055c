"""A multilayer perceptron: fully connected layers with ReLU, in a body and a head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from equipoise.core.rng import torch_generator
from equipoise.errors import require
from equipoise.models.layers import checked_seed, positive, refuse_integers, seeded


class MLP(nn.Module):
    """Fully connected layers with ReLU over flattened inputs: logits (B, classes), trained by cross-entropy.

    The hidden layers of widths `hidden` are `body`, the last layer is `head`: `personal.Split(kept="head")` keeps it. Initial
    parameters depend on `seed` alone, by torch's default laws.

    Source: the textbook network.
    """

    def __init__(self, features: int, classes: int, *, hidden: Sequence[int] = (64,), seed: int = 0) -> None:
        super().__init__()
        require(isinstance(hidden, Sequence), "hidden", "must be the widths of the hidden layers, such as (64,)", hidden)
        generator = torch_generator(checked_seed(seed), "MLP parameters")
        self.features, self.classes = positive("features", features), positive("classes", classes)
        widths = [self.features, *(positive("hidden", width) for width in hidden)]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [seeded(nn.Linear(inputs, outputs, device="meta"), generator), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = seeded(nn.Linear(widths[-1], self.classes, device="meta"), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes) of inputs (B, …)."""
        refuse_integers(x, "Give raw pixels a scale, such as scale=1/255.")
        flat = x.flatten(1)
        right = flat.shape[1] == self.features
        require(right, "x", f"must have {self.features} numbers per example", tuple(x.shape))
        logits: Tensor = self.head(self.body(flat))
        return logits
