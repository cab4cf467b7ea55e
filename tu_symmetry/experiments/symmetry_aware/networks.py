"""The network of the small recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class SmallLeNet(nn.Module):
    """Two strided convolutions and two linear layers with ReLU, dropout before each layer that reads a hidden one.

    A LeNet without pooling: 1,738 parameters with the default widths. Dropout drops whole channels, so that networks
    with and without it have the same weights, and the same symmetries.

    Args:
        num_classes: number of outputs.
        channels: of the two convolutions.
        hidden: units of the first linear layer.
        dropout: probability of dropping a channel or unit; 0 for none.
        in_channels: of the images.
        side: height and width of the images.
    """

    def __init__(
        self,
        num_classes: int = 10,
        channels: Sequence[int] = (4, 8),
        hidden: int = 16,
        dropout: float = 0.0,
        in_channels: int = 1,
        side: int = 28,
    ) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(in_channels, first, 5, stride=3)
        self.drop1 = nn.Dropout2d(dropout)
        self.conv2 = nn.Conv2d(first, second, 3, stride=2)
        self.drop2 = nn.Dropout2d(dropout)
        left = math.floor((math.floor((side - 5) / 3) + 1 - 3) / 2) + 1
        self.hidden = nn.Linear(second * left**2, hidden)
        self.drop3 = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, side, side]``."""
        x = self.drop1(self.conv1(x).relu())
        x = self.drop2(self.conv2(x).relu())
        return self.output(self.drop3(self.hidden(x.flatten(1)).relu()))
