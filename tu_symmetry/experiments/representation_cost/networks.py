"""The network of the recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two convolutions and two linear layers with ReLU, a stride and a max-pooling, without normalization.

    Args:
        in_features: number of pixels of a square image with one channel.
        num_classes: number of outputs.
        channels: the channels of the two convolutions.
        hidden: units of the first linear layer.
    """

    def __init__(self, in_features: int, num_classes: int, channels: Sequence[int] = (8, 16), hidden: int = 32) -> None:
        super().__init__()
        first, second = channels
        side = math.isqrt(in_features) // 4
        self.conv1 = nn.Conv2d(1, first, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.hidden = nn.Linear(second * side**2, hidden)
        self.output = nn.Linear(hidden, num_classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, 1, side, side]``."""
        x = self.conv1(x).relu()
        x = self.pool(self.conv2(x).relu())
        return self.output(self.hidden(x.flatten(1)).relu())
