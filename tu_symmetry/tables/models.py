"""The network that several recipes share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected ReLU network on flattened inputs, with hidden layers of the given widths."""

    def __init__(self, in_features: int, num_classes: int, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        widths = [in_features, *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, ...]``."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
