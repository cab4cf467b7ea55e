"""The patches that a convolution sees, and their second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_PANEL = 256  # columns of a Gram matrix that are multiplied at once
_CHANNELS = 32  # from which on products of shifts take less time than those of patches


def patches_of(inputs: Tensor, conv: nn.Module) -> Tensor:
    """Patches that a convolution sees, ``[batch, groups, positions, features]``; any number of spatial axes."""
    assert isinstance(conv, CONVOLUTIONS)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padding = conv._reversed_padding_repeated_twice
    x = F.pad(inputs, padding, mode=mode) if any(padding) else inputs
    spatial = len(conv.kernel_size)
    for axis, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    x = x.unflatten(1, (conv.groups, -1))
    places = [3 + i for i in range(spatial)]
    kernels = [3 + spatial + i for i in range(spatial)]
    return x.permute(0, 1, *places, 2, *kernels).flatten(2 + spatial).flatten(2, 1 + spatial)


def _margins(conv: nn.Module) -> list[tuple[int, int]]:
    """Padding before and after, for every spatial axis."""
    assert isinstance(conv, CONVOLUTIONS)
    flat = conv._reversed_padding_repeated_twice
    return [(flat[2 * i], flat[2 * i + 1]) for i in reversed(range(len(conv.kernel_size)))]


# a shift from the first tap of a pair to the second, the first taps, and the range of input entries that they meet
_Run = tuple[int, tuple[int, ...], int, int]


@cache
def _runs(size: int, positions: int, kernel: int, dilation: int, low: int) -> list[_Run]:
    """Runs along one axis; at position ``p`` tap ``t`` meets entry ``p + dilation * t - low``."""
    found = []
    for shift in range(1 - kernel, kernel):
        pairs = []
        for tap in range(max(0, -shift), min(kernel, kernel - shift)):
            start, lag = dilation * tap - low, dilation * shift
            first, last = max(0, -lag, start), min(size, size - lag, start + positions)
            if first < last:
                pairs.append((tap, first, last))
        for start, stop in pairwise(sorted({end for _, *ends in pairs for end in ends})):
            taps = tuple(tap for tap, first, last in pairs if first <= start and stop <= last)
            if taps:
                found.append((shift, taps, start, stop - start))
    return found


class ShiftedGrams:
    """``sum a a^T`` over the patches of a convolution with stride 1, from products of its input with shifts of itself.

    Taps ``t`` and ``t'`` have the sum of ``x[u] x[u + d]^T`` over the entries ``u`` that the first one meets, ``d``
    being the shift between them. Every axis is cut into runs at which the same pairs of taps meet, so that each product
    is made once: less than 13 of channels for each position of a 3 x 3 kernel, where the patches' take 81.
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.conv, self.channels = conv, conv.in_channels // conv.groups
        self._sums: dict[tuple[tuple[int, tuple[int, ...]], ...], Tensor] = {}
        self._zero = torch.zeros((), device="cpu")

    @staticmethod
    def serves(conv: nn.Module | None) -> bool:
        """Whether a convolution is of that kind, and wide enough for products of shifts to take less time."""
        return (
            isinstance(conv, CONVOLUTIONS)
            and max(conv.stride) == 1 < max(conv.kernel_size)
            and conv.padding_mode == "zeros"
            and conv.in_channels // conv.groups >= _CHANNELS
        )

    def add(self, inputs: Tensor) -> None:
        """Count in the patches of a batch ``[batch, channels, *spatial]``."""
        conv, batch, spatial = self.conv, len(inputs), inputs.ndim - 2
        x = inputs.unflatten(1, (conv.groups, self.channels)).movedim(2, -1).contiguous()
        self._zero, places = x.new_zeros(()), [2 + i for i in range(spatial)]
        x = x.permute(1, *places, 0, 2 + spatial).contiguous().flatten(-3, -2)  # the batch within the last axis
        for box in self._boxes(inputs.shape[2:]):
            left = right = x
            for axis, ((shift, _, start, length), d) in enumerate(zip(box, conv.dilation, strict=True), start=1):
                each = batch if axis == spatial else 1
                left = left.narrow(axis, start * each, length * each)
                right = right.narrow(axis, (start + d * shift) * each, length * each)
            key = tuple((shift, taps) for shift, taps, _, _ in box)
            if key not in self._sums:
                self._sums[key] = x.new_zeros(conv.groups, self.channels, self.channels)
            for total, *pair in zip(self._sums[key], left, right, strict=True):
                one, other = (own.reshape(-1, *own.shape[-2:]) for own in pair)
                total.addbmm_(one.mT, other)

    def _boxes(self, spatial: Sequence[int]) -> Iterator[tuple[_Run, ...]]:
        """Products of the axes' runs, of one of both orders of the taps."""
        conv, axes = self.conv, []
        for size, (low, high), kernel, d in zip(spatial, _margins(conv), conv.kernel_size, conv.dilation, strict=True):
            axes.append(_runs(size, size + low + high - d * (kernel - 1), kernel, d, low))
        return (box for box in product(*axes) if tuple(shift for shift, *_ in box) >= (0,) * len(box))

    def total(self) -> Tensor:
        """The sum ``[groups, features, features]``."""
        kernel, every = self.conv.kernel_size, slice(None)
        found = self._zero.new_zeros(self.conv.groups, *kernel, self.channels, *kernel, self.channels)
        for key, entry in self._sums.items():
            shift = [step for step, _ in key]
            for taps in product(*(own for _, own in key)):
                others = tuple(tap + step for tap, step in zip(taps, shift, strict=True))
                pair: tuple[slice | int, ...] = (every, *taps, every, *others, every)
                found[pair] += entry
                if any(shift):
                    pair = (every, *others, every, *taps, every)
                    found[pair] += entry.mT
        number = math.prod(kernel)
        found = found.view(-1, number, self.channels, number, self.channels)
        return found.permute(0, 2, 1, 4, 3).reshape(-1, number * self.channels, number * self.channels)


def gram(rows: Tensor) -> Tensor:
    """``rows^T rows`` of ``[..., number, size]``, by panels of columns: one half of it is the other's transpose."""
    size = rows.shape[-1]
    if size < 2 * _PANEL:
        return rows.mT @ rows
    found = rows.new_empty(*rows.shape[:-2], size, size)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = rows[..., start:stop].mT @ rows[..., start:]
        found[..., start:stop, start:] = panel
        found[..., stop:, start:stop] = panel[..., stop - start :].mT
    return found
