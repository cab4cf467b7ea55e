"""Convolutional networks with batch normalization for small images, of any width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout2d(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.bn1(self.conv1(x)).relu())
        return (self.bn2(self.conv2(hidden)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Residual network of He et al. 2016, section 4.2, with 1x1 convolutions as shortcuts where the shape changes.

    Args:
        width: channels of the first stage; each later one has twice as many and half the resolution.
        blocks: residual blocks in each stage; (1, 1, 1) is ResNet-8, (3, 3, 3) ResNet-20.
        stem_stride: the stride of the first convolution; 2 halves the resolution everywhere.
        dropout: probability of dropping a channel within blocks, and a feature before the last layer.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        width: int = 16,
        blocks: Sequence[int] = (1, 1, 1),
        stem_stride: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, stem_stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(_Block(channels, width * 2**stage, 2 if stage > 0 and block == 0 else 1, dropout))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*layers)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, height, width]``."""
        x = self.bn(self.conv(x)).relu()
        return self.head(self.drop(self.blocks(x).mean((2, 3))))


class VGG(nn.Module):
    """Plain network of Simonyan and Zisserman 2015 with batch normalization after each convolution.

    ``stages``: channels of the 3x3 convolutions between max-poolings; ``hidden``: widths of fully connected layers.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        stages: Sequence[Sequence[int]] = ((16,), (32, 32), (64, 64)),
        hidden: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in stages:
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        widths = [channels, *hidden]
        self.classifier = nn.Sequential(
            *(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())),
            nn.Linear(widths[-1], num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, height, width]``."""
        return self.classifier(self.features(x).mean((2, 3)))
