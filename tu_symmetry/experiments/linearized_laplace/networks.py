"""Small networks for images of digits, one for each column of Table 1 of arXiv 2206.08900.

Layers initialize themselves by ``reset_parameters``, so that many networks of one architecture can be trained at once.
The column ``ResNet`` is :class:`~tu_symmetry.experiments.rebasin.ResNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CNN(nn.Sequential):
    """Three convolutions with BatchNorm of ``width`` and twice as many channels, pooling to 2 x 2, a linear layer."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(
            nn.Conv2d(1, width, 5, 2, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip


class _PreActivation(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(self.bn1(x).relu())
        return self.conv2(self.bn2(hidden).relu()) + self.shortcut(x)


class _FirstOfBranch(nn.Conv2d):
    """Kaiming's normal weights, less by the square root of the number of branches."""

    def __init__(self, in_channels: int, channels: int, stride: int, blocks: int) -> None:
        self.blocks = blocks
        super().__init__(in_channels, channels, 3, stride, padding=1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        with torch.no_grad():
            self.weight.mul_(self.blocks**-0.5)


class _LastOfBranch(nn.Conv2d):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class _FixUp(nn.Module):
    """A residual block without normalization (arXiv 1901.09321): scalar biases, and a scale on the branch."""

    def __init__(self, in_channels: int, channels: int, stride: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = _FirstOfBranch(in_channels, channels, stride, blocks)
        self.conv2 = _LastOfBranch(channels, channels, 3, padding=1, bias=False)
        same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        self.biases = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.biases)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.biases.unbind()
        hidden = self.conv1(x + first)
        hidden = self.conv2((hidden + second).relu() + third)
        return (self.scale * hidden + fourth + self.shortcut(x + first)).relu()


class _Stages(nn.Module):
    """Stem, stages of residual blocks with doubling width and halving resolution, global average pooling, linear layer.

    ``width``: channels of the first stage; ``blocks``: residual blocks in each stage.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        blocks: Sequence[int],
        stride: int,
        block: Any,
        last: nn.Module,
        head: type[nn.Linear] = nn.Linear,
        in_channels: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                layers.append(block(channels, width * 2**stage, 2 if stage > 0 and number == 0 else 1))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*layers)
        self.last = last
        self.head = head(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


class PreActivationResNet(_Stages):
    """Residual network with normalization and ReLU before each convolution (arXiv 1603.05027)."""

    def __init__(
        self, num_classes: int = 10, width: int = 8, blocks: Sequence[int] = (1, 1), stem_stride: int = 2
    ) -> None:
        last = nn.Sequential(nn.BatchNorm2d(width * 2 ** (len(blocks) - 1)), nn.ReLU())
        super().__init__(num_classes, width, blocks, stem_stride, _PreActivation, last)


class FixUpResNet(_Stages):
    """Residual network without normalization, initialized by FixUp (arXiv 1901.09321)."""

    def __init__(
        self,
        num_classes: int = 10,
        width: int = 8,
        blocks: Sequence[int] = (1, 1),
        stem_stride: int = 2,
        in_channels: int = 1,
    ) -> None:
        def block(in_channels: int, channels: int, stride: int) -> nn.Module:
            return _FixUp(in_channels, channels, stride, sum(blocks))

        super().__init__(num_classes, width, blocks, stem_stride, block, nn.Identity(), _ZeroLinear, in_channels)


class _Layer(nn.Module):
    """Attention and a two-layer network, LayerNorm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)  # torch's own has no rule for vmap
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Transformer on patches, with LayerNorm before each part and mean pooling.

    ``patch``: height and width of a patch (7 makes 16 tokens of a 28 x 28 image); ``size``: of the images.
    """

    def __init__(
        self, num_classes: int = 10, width: int = 32, depth: int = 2, heads: int = 4, patch: int = 7, size: int = 28
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, patch)
        self.position = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions anew (layers draw their own)."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, 1, size, size]``."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.layers(tokens)).mean(1))


def matrices(model: nn.Module) -> list[str]:
    """Names of the parameters of linear layers and convolutions, without norm affine parameters, scalars, positions."""
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        for leaf, _ in module.named_parameters(recurse=False)
    ]
