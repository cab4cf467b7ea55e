"""The patches that a convolution sees, and their second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_PANEL = 256  # columns of a Gram matrix that are multiplied at once
_ROWS = 128  # of a product of two pieces of memory; fewer are brought together first
# costs in multiplications, see :meth:`ShiftedGrams.is_cheaper`
_NARROW, _COPY, _BEGIN, _CALL = 64, 100, 150_000, 400_000


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


@dataclass(frozen=True)
class _Run:
    """A run of positions along one axis of the input at which the same pairs of taps meet.

    Positions are numbered within their phase, their residue modulo the stride.

    Attributes:
        shift: from the first tap of a pair to the second.
        taps: the first taps.
        phase: the phase of the positions that the first taps meet.
        start: the first of these.
        length: how many they are.
        other: phase of what the second taps meet.
        other_start: the first of these.
    """

    shift: int
    taps: tuple[int, ...]
    phase: int
    start: int
    length: int
    other: int
    other_start: int


def _runs(size: int, positions: int, kernel: int, stride: int, dilation: int, low: int) -> Iterator[_Run]:
    """The runs of one axis of ``size`` entries, over which a convolution looks from so many positions.

    At its position ``p`` tap ``t`` meets entry ``stride * p + dilation * t - low``. With ``dilation * t - low`` written
    as ``stride * q + phase`` that is number ``p + q`` of its phase, so that a tap sees numbers ``q`` to
    ``q + positions`` of one phase, as far as there are any.
    """

    def number(phase: int) -> int:
        return -((phase - size) // stride)

    for shift in range(1 - kernel, kernel):
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for tap in range(max(0, -shift), min(kernel, kernel - shift)):
            q, phase = divmod(dilation * tap - low, stride)
            lag, other = divmod(phase + dilation * shift, stride)
            ends = max(0, -lag, q), min(number(phase), number(other) - lag, q + positions)
            if ends[0] < ends[1]:
                seen.setdefault(phase, []).append((tap, *ends))
        for phase, intervals in seen.items():
            lag, other = divmod(phase + dilation * shift, stride)
            for start, stop in pairwise(sorted({end for _, *ends in intervals for end in ends})):
                taps = tuple(tap for tap, first, last in intervals if first <= start and stop <= last)
                if taps:
                    yield _Run(shift, taps, phase, start, stop - start, other, start + lag)


class ShiftedGrams:
    """``sum a a^T`` over the patches of a convolution, from products of its input with shifts of itself.

    The entry of two taps ``t`` and ``t'`` is the sum of ``x[u] x[u + d]^T`` over the input's positions ``u`` that the
    first tap meets, where the shift ``d`` is that from ``t`` to ``t'``. Pairs of taps with equal shifts add up the same
    products, except at the borders; and exchanging the taps transposes the sum. Along one axis of five entries, with a
    kernel of 3, padding 1, and a dot for ``x[u] x[u + d]^T``::

        shift 0, taps 0 0:  u = 0 1 2 3 .        shift 1, taps 0 1:  u = 0 1 2 3
                 taps 1 1:  u = 0 1 2 3 4                 taps 1 2:  u = 0 1 2 3
                 taps 2 2:  u = . 1 2 3 4        shift 2, taps 0 2:  u = 0 1 2
                                runs: 0 | 1 2 3 | 4

    Every axis is cut into runs at which the same pairs meet, so that each product is made once: 12 here, in place of
    the 35 of all pairs of taps. Products of the axes' runs are boxes, and each is one product of matrices. A kernel of
    3 x 3 has 29 boxes, which together take less than 13 products of channels for each position, where the patches' own
    take 81. With a stride, taps of different residues meet different entries, and only pairs with equal residues can
    share: 34 products in place of 81 for 3 x 3 and a stride of 2.
    """

    def __init__(self, conv: nn.Module) -> None:
        assert isinstance(conv, CONVOLUTIONS)
        self.conv: nn.Conv1d | nn.Conv2d | nn.Conv3d = conv
        self.channels = conv.in_channels // conv.groups
        self._sums: dict[tuple[tuple[int, tuple[int, ...]], ...], Tensor] = {}
        self._zero: Tensor | None = None
        self._boxes: dict[tuple[int, ...], list[tuple[_Run, ...]]] = {}

    def _of(self, spatial: Sequence[int]) -> list[tuple[_Run, ...]]:
        """The boxes of an input of this size, of one of both orders of the taps."""
        conv, key = self.conv, tuple(spatial)
        if key not in self._boxes:
            margins, axes = _margins(conv) if conv.padding_mode == "zeros" else [(0, 0)] * len(key), []
            sizes = zip(key, margins, conv.kernel_size, conv.stride, conv.dilation, strict=True)
            for size, (low, high), k, s, d in sizes:
                axes.append(list(_runs(size, (size + low + high - d * (k - 1) - 1) // s + 1, k, s, d, low)))
            self._boxes[key] = [box for box in product(*axes) if tuple(run.shift for run in box) >= (0,) * len(box)]
        return self._boxes[key]

    def is_cheaper(self, inputs: Tensor) -> bool:
        """Whether this takes less time than products of the patches themselves.

        Both are counted in multiplications: a product of fewer than 64 columns takes as long as one of 64, to copy an
        entry as long as 100, to begin a product as long as 150,000 (4 microseconds), and to do so from Python, here or
        in :meth:`total`, as long as 400,000. The latter counts as if it came after eight batches.
        """
        conv = self.conv
        spatial = (inputs if conv.padding_mode == "zeros" else _padded(inputs[:1], conv)).shape[2:]
        features, samples = self.channels * math.prod(conv.kernel_size), len(inputs) * conv.groups
        own = samples * features * positions_of(inputs, conv) * (_COPY + max(features, _NARROW)) + _CALL
        least = 1  # runs: one for each shift and phase
        for k, step, d in zip(conv.kernel_size, conv.stride, conv.dilation, strict=True):
            least *= sum(min(step // math.gcd(step, d), k - abs(shift)) for shift in range(1 - k, k))
        if least // 2 * _CALL > own:
            return False  # as for large patches side by side, without a list of millions of boxes
        begun, entries = 0, math.prod(spatial) * _COPY
        for box in self._of(spatial):
            *lengths, last = (run.length for run in box)
            begun += _BEGIN * (math.prod(lengths) if last * len(inputs) >= _ROWS else 1)
            begun += _CALL + _CALL * math.prod(len(run.taps) for run in box) // 4
            entries += math.prod(lengths) * last * max(self.channels, _NARROW)
        return samples * self.channels * entries + begun < own

    def add(self, inputs: Tensor) -> None:
        """Count in the patches of a batch ``[batch, channels, *spatial]``."""
        conv = self.conv
        x = inputs if conv.padding_mode == "zeros" else _padded(inputs, conv)
        phases, batch = self._phases(x), len(x)
        self._zero = x.new_zeros(())
        for box in self._of(x.shape[2:]):
            left = phases[tuple(run.phase for run in box)]
            right = phases[tuple(run.other for run in box)]
            for axis, run in enumerate(box[:-1], start=1):
                left, right = left.narrow(axis, run.start, run.length), right.narrow(axis, run.other_start, run.length)
            left = left.narrow(-2, box[-1].start * batch, box[-1].length * batch)
            right = right.narrow(-2, box[-1].other_start * batch, box[-1].length * batch)
            key = tuple((run.shift, run.taps) for run in box)
            if key not in self._sums:
                self._sums[key] = x.new_zeros(conv.groups, self.channels, self.channels)
            _add_product(self._sums[key], left, right)

    def _phases(self, x: Tensor) -> Tensor:
        """The input's phases, ``[*phases, groups, *spatial, channels]``, the batch within the last spatial axis."""
        conv, spatial = self.conv, len(self.conv.kernel_size)
        missing = [-size % step for size, step in zip(x.shape[2:], conv.stride, strict=True)]
        if any(missing):
            x = F.pad(x, [n for gap in reversed(missing) for n in (0, gap)])
        split = [n for size, step in zip(x.shape[2:], conv.stride, strict=True) for n in (size // step, step)]
        x = x.reshape(len(x), conv.groups, self.channels, *split)
        phases, places = [4 + 2 * n for n in range(spatial)], [3 + 2 * n for n in range(spatial)]
        x = x.permute(0, 1, *phases, *places, 2).contiguous()  # channels together first: rows are faster to move
        phases, places = [2 + n for n in range(spatial)], [2 + spatial + n for n in range(spatial)]
        return x.permute(*phases, 1, *places, 0, 2 + 2 * spatial).contiguous().flatten(-3, -2)

    def total(self) -> Tensor | None:
        """The sum ``[groups, features, features]``; None where nothing was added."""
        if self._zero is None:
            return None
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


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``sum left^T right`` over rows and all axes between: ``[groups, ..., rows, channels]``, rows side by side."""
    if left.shape[-2] < _ROWS or total.device.type != "cpu":  # there a copy costs less than many small products
        left, right = left.flatten(1, -2), right.flatten(1, -2)
    if left.ndim > 4:
        for own, other in zip(left.unbind(1), right.unbind(1), strict=True):
            _add_product(total, own, other)
    elif left.ndim == 3:
        total.baddbmm_(left.mT, right)
    elif len(total) == 1:
        total[0].addbmm_(left[0].mT, right[0])
    else:
        for own, other in zip(left.unbind(1), right.unbind(1), strict=True):
            total.baddbmm_(own.mT, other)


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
