"""Networks of published experiments that are no models of this library, with the sizes that their code has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def convolved(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What a convolution without padding makes of images (B, C, H, W); on a GPU by a product with all windows.

    Batched over clients a convolution is one with groups, which libraries run slowly; a batched product is fast. On a CPU it is
    the convolution that is fast.
    """
    return _by_windows(layer, x) if x.is_cuda else layer(x)


def _by_windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution as a product of its weights (O, C·k·k) with the windows of all images, (C·k·k, B·H′·W′)."""
    high, wide = (int(size) for size in layer.kernel_size)
    windows = x.unfold(2, high, 1).unfold(3, wide, 1)  # (B, C, H′, W′, k, k)
    batch, _, down, across = windows.shape[:4]
    columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(-1, batch * down * across)
    product = layer.weight.flatten(1) @ columns
    if layer.bias is not None:
        product = product + layer.bias.unsqueeze(1)
    return product.view(-1, batch, down, across).transpose(0, 1)


class BucketingNet(nn.Module):
    """The network of the bucketing paper's repository: conv3×3-32, conv3×3-64, pooling, FC 9216→128→10, dropout ¼ and ½.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365), its published code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden = nn.Linear(9216, 128)
        self.readout = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 10) of images (B, 28, 28)."""
        images = convolved(self.conv2, convolved(self.conv1, x.unsqueeze(1)).relu()).relu()  # (B, 64, 24, 24)
        pooled = self.dropout1(functional.max_pool2d(images, 2))
        logits: Tensor = self.readout(self.dropout2(self.hidden(torch.flatten(pooled, 1)).relu()))
        return logits
