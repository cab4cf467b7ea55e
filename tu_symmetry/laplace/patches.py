"""The patches that a convolution sees, and their second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Shift = tuple[int, ...]
Taps = tuple[slice, ...]


def _padded(inputs: Tensor, conv: nn.Module) -> Tensor:
    assert isinstance(conv, CONVOLUTIONS)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padding = conv._reversed_padding_repeated_twice
    return F.pad(inputs, padding, mode=mode) if any(padding) else inputs


def positions_of(inputs: Tensor, conv: nn.Module) -> int:
    """Number of positions of each sample at which a convolution looks."""
    assert isinstance(conv, CONVOLUTIONS)
    sizes = zip(inputs.shape[2:], _margins(conv), conv.kernel_size, conv.stride, conv.dilation, strict=True)
    return math.prod((n + sum(pad) - d * (k - 1) - 1) // step + 1 for n, pad, k, step, d in sizes)


def patches_of(inputs: Tensor, conv: nn.Module) -> Tensor:
    """Patches that a convolution sees, ``[batch, groups, positions, features]``; any number of spatial axes."""
    assert isinstance(conv, CONVOLUTIONS)
    x = _padded(inputs, conv)
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


class ShiftedGrams:
    """``sum a a^T`` over the patches of a convolution with stride 1, from products of its input with shifts of itself.

    Over all positions at which a patch meets the input, zeros outside, the entry of two taps depends on their shift
    alone: for kernels of 3 x 3 these are 13 products of channels instead of 81. The positions beyond the
    convolution's own are then taken away; at each of them a patch meets the input with a few of its taps only.
    """

    def __init__(self, conv: nn.Module) -> None:
        assert isinstance(conv, CONVOLUTIONS)
        self.conv: nn.Conv1d | nn.Conv2d | nn.Conv3d = conv
        self.channels = conv.in_channels // conv.groups
        self._products: dict[Shift, Tensor] = {}
        self._beyond: dict[tuple[tuple[int, int], ...], Tensor] = {}
        positive = product(*(range(1 - k, k) for k in conv.kernel_size))
        self._shifts = [shift for shift in positive if shift >= (0,) * len(shift)]

    def is_cheaper(self, inputs: Tensor) -> bool:
        """Whether this takes fewer multiplications than products of the patches themselves."""
        conv = self.conv
        if any(step != 1 for step in conv.stride):
            return False
        x = inputs if conv.padding_mode == "zeros" else _padded(inputs, conv)
        gaps = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        whole = len(self._shifts) * math.prod(n + gap for n, gap in zip(x.shape[2:], gaps, strict=True))
        beyond = 0
        for axis, _, taps in self._outside(x):
            places = [n + gap if a > axis else n for a, (n, gap) in enumerate(zip(x.shape[2:], gaps, strict=True))]
            rows = math.prod(n for a, n in enumerate(places) if a != axis)
            beyond += rows * math.prod(t.stop - t.start for t in taps) ** 2
        return whole + beyond < math.prod(conv.kernel_size) ** 2 * positions_of(inputs, conv)

    def add(self, inputs: Tensor) -> None:
        """Count in the patches of a batch ``[batch, channels, *spatial]``."""
        conv = self.conv
        x = inputs if conv.padding_mode == "zeros" else _padded(inputs, conv)
        gaps = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        spaced = F.pad(x, [n for gap in reversed(gaps) for n in (0, gap)])
        strides = [math.prod(spaced.shape[i + 1 :]) for i in range(2, spaced.ndim)]
        flat = spaced.transpose(0, 1).reshape(conv.groups, self.channels, -1)
        for shift in self._shifts:
            lag = sum(n * d * stride for n, d, stride in zip(shift, conv.dilation, strides, strict=True))
            found = flat[..., : flat.shape[-1] - lag] @ flat[..., lag:].mT
            self._products[shift] = self._products[shift].add_(found) if shift in self._products else found
        for axis, place, taps in self._outside(x):
            rows = self._patches(x, axis, place, taps)
            key, found = tuple((t.start, t.stop) for t in taps), rows @ rows.mT
            self._beyond[key] = self._beyond[key].add_(found) if key in self._beyond else found

    def _outside(self, x: Tensor) -> Iterator[tuple[int, int, Taps]]:
        """Positions beyond the convolution's own: axis, place along it, and the taps that meet the input there.

        Along the axes before it they are the convolution's own, along those after it all.
        """
        conv = self.conv
        every = [slice(0, k) for k in conv.kernel_size]
        margins = _margins(conv) if conv.padding_mode == "zeros" else [(0, 0)] * len(every)
        for axis, ((low, high), k, d) in enumerate(zip(margins, conv.kernel_size, conv.dilation, strict=True)):
            size = x.shape[2 + axis]
            own = range(size + low + high - d * (k - 1))
            for place in range(low - d * (k - 1), low + size):
                met = [tap for tap in range(k) if 0 <= place + d * tap - low < size]
                if place not in own and met:
                    yield axis, place, (*every[:axis], slice(met[0], met[-1] + 1), *every[axis + 1 :])

    def _patches(self, x: Tensor, axis: int, place: int, taps: Taps) -> Tensor:
        """What the taps meet at the positions of :meth:`_outside`, ``[groups, features, batch * positions]``."""
        conv = self.conv
        margins = _margins(conv) if conv.padding_mode == "zeros" else [(0, 0)] * len(taps)
        first = place + conv.dilation[axis] * taps[axis].start - margins[axis][0]
        x = x.narrow(2 + axis, first, conv.dilation[axis] * (taps[axis].stop - taps[axis].start - 1) + 1)
        pads = []
        for a, (d, k) in enumerate(zip(conv.dilation, conv.kernel_size, strict=True)):
            pads.append((0, 0) if a == axis else margins[a] if a < axis else (d * (k - 1), d * (k - 1)))
        x = F.pad(x, [n for pad in reversed(pads) for n in pad])
        for a, (d, tap) in enumerate(zip(conv.dilation, taps, strict=True)):
            x = x.unfold(2 + a, d * (tap.stop - tap.start - 1) + 1, 1)[..., ::d]
        spatial = len(taps)
        x = x.unflatten(1, (conv.groups, -1))
        kernels, places = [3 + spatial + i for i in range(spatial)], [3 + i for i in range(spatial)]
        return x.permute(1, 2, *kernels, 0, *places).flatten(2 + spatial).flatten(1, 1 + spatial)

    def total(self) -> Tensor | None:
        """The sum ``[groups, features, features]``; None where nothing was added."""
        if not self._products:
            return None
        conv = self.conv
        some, kernel = next(iter(self._products.values())), conv.kernel_size
        every = slice(None)
        found = some.new_empty(conv.groups, self.channels, *kernel, self.channels, *kernel)
        for shift, entry in self._products.items():
            for taps in product(*(range(max(0, -n), min(k, k - n)) for n, k in zip(shift, kernel, strict=True))):
                other = tuple(tap + n for tap, n in zip(taps, shift, strict=True))
                pair: tuple[slice | int, ...] = (every, every, *taps, every, *other)
                found[pair] = entry
                pair = (every, every, *other, every, *taps)
                found[pair] = entry.mT
        for key, entry in self._beyond.items():
            own = tuple(slice(*ends) for ends in key)
            part = found[(every, every, *own, every, *own)]
            part -= entry.view(part.shape)
        features = self.channels * math.prod(kernel)
        return found.view(conv.groups, features, features)
