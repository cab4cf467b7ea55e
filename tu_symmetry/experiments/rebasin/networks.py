"""Networks of any width: convolutional ones with batch normalization, and transformers for images and for text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


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


class _Attention(nn.Module):
    """A pre-norm transformer block: self-attention, then a perceptron, each on a branch of the stream."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module], *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (self.q(y), self.k(y), self.v(y)))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Vision transformer of Dosovitskiy et al. 2021, with the mean of all tokens in place of a class token.

    Args:
        size: pixels of a side.
        patch: pixels of a side of each token.
        width: of the residual stream; the perceptrons have twice as many units.
        norm: ``layer`` or ``rms``; what the norms of the stream are.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        size: int = 32,
        patch: int = 4,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        norm: Literal["layer", "rms"] = "layer",
    ) -> None:
        super().__init__()
        kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm]
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.positions = nn.Embedding((size // patch) ** 2, width)
        self.blocks = nn.Sequential(*(_Attention(width, heads, kind) for _ in range(layers)))
        self.norm, self.head = kind(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits of a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class GPT(nn.Module):
    """Decoder of Radford et al. 2019 with RMSNorm: the next of ``num_classes`` tokens at each of ``context`` places.

    Args:
        width: of the residual stream; the perceptrons have twice as many units.
    """

    def __init__(
        self, num_classes: int = 96, context: int = 64, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_classes, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Attention(width, heads, nn.RMSNorm, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes, context]`` of token numbers ``[batch, context]``."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight))).transpose(1, 2)
