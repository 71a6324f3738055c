"""The convolutional network of the EMNIST experiments."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.rng import torch_generator
from equipoise.errors import InvalidParameter
from equipoise.models.layers import checked_seed, positive, refuse_integers, seeded

_SHAPES = ((28, 28), (1, 28, 28), (784,))


class ConvNet(nn.Module):
    """Two 5×5 convolutions (32 and 64 channels, no padding), each with ReLU and 2×2 max-pooling, then a linear layer `readout`.

    28 → 24 → 12 → 8 → 4 pixels a side, so that the linear layer is 64·4·4 = 1024 → classes; 115,646 parameters at 62 classes.
    With `hidden` a linear layer 1024 → hidden with ReLU comes before it; 582,026 parameters at 512 hidden units and 10 classes.
    It is the ConvNet of the superquantile papers on EMNIST (Laguel, Pillutla, Malick and Harchaoui, 2020; Pillutla et al.,
    2023). Inputs are grey images (B, 28, 28), (B, 1, 28, 28) or (B, 784); outputs the logits (B, classes); loss and error are
    cross-entropy and misclassification. Initial parameters follow torch's default law and depend on `seed` alone.

    Source: the ConvNet of Laguel et al. 2020 and Pillutla et al. 2023 on EMNIST; with 512 hidden units that of PFLlib (Zhang et
    al., `FedAvgCNN`).

    >>> import torch
    >>> model = ConvNet(seed=0)
    >>> sum(p.numel() for p in model.parameters())
    115646
    >>> model(torch.rand(5, 28, 28)).shape
    torch.Size([5, 62])
    """

    def __init__(self, *, classes: int = 62, hidden: int | None = None, seed: int = 0) -> None:
        super().__init__()
        generator = torch_generator(checked_seed(seed), "ConvNet parameters")
        self.conv1 = seeded(nn.Conv2d(1, 32, 5, device="meta"), generator)
        self.conv2 = seeded(nn.Conv2d(32, 64, 5, device="meta"), generator)
        self.hidden: nn.Linear | None = None
        if hidden is not None:
            self.hidden = seeded(nn.Linear(1024, positive("hidden", hidden), device="meta"), generator)
        width = 1024 if hidden is None else hidden
        self.readout = seeded(nn.Linear(width, positive("classes", classes), device="meta"), generator)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, classes) of images."""
        images = grey_images(x)  # (B, 1, 28, 28)
        # ReLU is monotone, so it may follow the pooling: the same function on a quarter of the numbers.
        first = functional.max_pool2d(self.conv1(images), 2).relu()  # (B, 32, 12, 12)
        second = functional.max_pool2d(self.conv2(first), 2).relu()  # (B, 64, 4, 4)
        features = second.flatten(1)
        logits: Tensor = self.readout(features if self.hidden is None else self.hidden(features).relu())
        return logits


def grey_images(x: Tensor) -> Tensor:
    """Images as (B, 1, 28, 28); other shapes and integers are refused."""
    if tuple(x.shape[1:]) not in _SHAPES:
        raise InvalidParameter(
            "x",
            "must hold grey images of 28 × 28 pixels, shape (B, 28, 28), (B, 1, 28, 28) or (B, 784)",
            tuple(x.shape),
            "Resize the images, or pass a torch.nn.Module made for their size.",
        )
    refuse_integers(x, "Convert it, e.g. x.float() / 255, or give the data a scale of 1 / 255.")
    return x.reshape(x.shape[0], 1, 28, 28)
