"""The U-Net of the deep image prior, for 28 x 28 images and for the walnut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SLOPE = 0.2
_CLAMP = 15.0  # of the last convolution, before the sigmoid
_FEW, _MANY = 2, 4  # groups of channels: in the first and the up-blocks, and in the down-blocks


class UNet(nn.Module):
    """Convolutions on several scales, with thin skip connections; input and output are images of one channel.

    Leaky ReLUs follow all convolutions but the last. With two scales below, 32 channels and four skip channels it has
    76,608 weights and 297 biases. A skip connection of 0 channels is a channel of zeros, as in the authors' network.

    Args:
        channels: channel numbers of every scale.
        skip_channels: channel numbers of the skip connections, from the coarsest ``up`` to the finest.
        normalize: group normalization after every convolution, and of what an ``up`` gets: two groups in the first
            and in the ``up`` blocks, four in the ``down`` blocks, one of a skip connection and of a concatenation.
        sigmoid: images in (0, 1); else the last convolution's output.
        dropout: probability of dropping whole channels after each 3 x 3 convolution; active in training mode.
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 32, 32),
        skip_channels: Sequence[int] = (4, 4),
        normalize: bool = False,
        sigmoid: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(skip_channels) != len(channels) - 1:
            raise ValueError(f"{len(channels)} scales need {len(channels) - 1} skip connections, got {skip_channels}")
        self.sigmoid = sigmoid
        self.inc = nn.Sequential(*_convolution(1, channels[0], normalize, dropout, _FEW))
        self.down = nn.ModuleList(
            nn.Sequential(
                *_convolution(before, after, normalize, dropout, _MANY, stride=2),
                *_convolution(after, after, normalize, dropout, _MANY),
            )
            for before, after in pairwise(channels)
        )
        reversed_ = list(channels)[::-1]
        self.up = nn.ModuleList(
            _Up(before, after, skip, normalize, dropout)
            for before, after, skip in zip(reversed_, reversed_[1:], skip_channels, strict=False)
        )
        self.outc = nn.Conv2d(channels[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[batch, 1, height, width]`` to images of the same shape."""
        seen = [self.inc(x)]
        for down in self.down:
            seen.append(down(seen[-1]))
        h = seen.pop()
        for up in self.up:
            h = up(h, seen.pop())
        h = self.outc(h)
        return h.clamp(-_CLAMP, _CLAMP).sigmoid() if self.sigmoid else h


class _Up(nn.Module):
    """Upsampling, concatenation with the skip connection, two convolutions."""

    def __init__(self, before: int, after: int, skip: int, normalize: bool, dropout: float) -> None:
        super().__init__()
        self.used = skip > 0
        width = max(1, skip)
        self.skip = nn.Sequential(
            nn.Conv2d(after, width, 1), *([nn.GroupNorm(1, width)] if normalize else []), nn.LeakyReLU(_SLOPE)
        )
        self.conv = nn.Sequential(
            *([nn.GroupNorm(1, before + width)] if normalize else []),
            *_convolution(before + width, after, normalize, dropout, _FEW),
            *_convolution(after, after, normalize, dropout, _FEW),
        )

    def forward(self, x: Tensor, finer: Tensor) -> Tensor:
        size = (int(finer.shape[-2]), int(finer.shape[-1]))
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=True)
        skip = self.skip(finer) if self.used else torch.zeros_like(finer[:, :1])
        first = self.conv[0]
        if not isinstance(first, nn.Conv2d):
            return self.conv(torch.cat([x, skip], dim=1))
        # A sum of two convolutions: stacked networks are one grouped convolution, which is fast for multiples of 16
        # channels alone; 32 and 4 in place of 36 take half the time on a CPU.
        wide, thin = first.weight[:, : x.shape[1]], first.weight[:, x.shape[1] :]
        h = F.conv2d(x, wide, first.bias, padding=1) + F.conv2d(skip, thin, padding=1)
        return self.conv[1:](h)


def _convolution(
    before: int, after: int, normalize: bool, dropout: float, groups: int, stride: int = 1
) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(before, after, 3, stride=stride, padding=1)]
    if normalize:
        layers.append(nn.GroupNorm(groups, after))
    return [*layers, nn.LeakyReLU(_SLOPE), nn.Dropout2d(dropout)]  # also for 0, so that weights keep their names
