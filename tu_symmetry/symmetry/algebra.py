"""The axis algebra: which hidden units index the axes of a tensor, and which log-scales multiply its entries.

**Labels.** Every axis of every tensor carries a label for each position: a tuple of *components*, integer arrays that
broadcast against the tensor. An entry ``u >= 0`` is a hidden unit, an entry ``-1 - k`` is the fixed position ``k`` of
something that cannot move (a pixel, a gate, a slot). An axis without components is pinned. A component usually varies
along its own axis alone; where it varies along a second axis too, it is nested in that axis (the units of a head in
the heads, the inputs of a grouped convolution in the groups). Because labels are arrays, every operator that merely
moves data (views, slices, concatenations, shuffles) acts on them as it acts on the tensor, and no structure is lost.

**Scales.** A tensor also carries a sum of terms ``coefficient * variable``: the log of the factor by which a positive
rescaling of hidden units multiplies its entries. The variables are again arrays that broadcast against the tensor.

As an example, ``c(relu(a(x)).view(n, 2, 3))`` with rows ``u0 .. u5`` of ``a`` and columns ``w0 .. w2`` of ``c``:

====================  ===================================================================================
``a(x)``              ``[n, 6]``; axis 0 is pinned (a batch), axis 1 has the label ``[[0 1 2 3 4 5]]``
``view(n, 2, 3)``     axis 2 has the label ``[[[0 1 2], [3 4 5]]]``, nested in axis 1, and axis 1 two new
                      units ``u6, u7``, for the blocks ``u0 u1 u2`` and ``u3 u4 u5``
``c``                 reads both blocks with the same columns: ``u0`` is bound to the pair ``(w0, u6)``, ``u3``
                      to ``(w0, u7)`` and so on: rows of ``a`` move as pairs of a column and a block
====================  ===================================================================================

Values are moved by the functions of :mod:`.views`; what operators demand (ties between units, pins, linear constraints
on scales) is written down in the :class:`~.ledger.Ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Label = tuple[Array, ...]
Term = tuple[float, Array]

ZERO = 0  # the scale variable that is always zero


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of one tensor of the traced graph.

    Attributes:
        shape: the tensor's shape.
        labels: for each axis its components; ``()`` for an axis that is pinned or of size one.
        reasons: for each axis why it is pinned (empty where it is not).
        scale: terms of the log-scale; ``()`` for a tensor that does not scale.
        parameter: name, if this is a parameter or buffer itself.
        fill: the number that every entry holds, if this is known to be such a constant (padding, zeros).
        points: if the entries of an integer tensor are positions along an axis (what ``argmax`` returns), that axis's
            label, as one-dimensional components: under a permutation of these units the entries are renamed.
    """

    shape: tuple[int, ...]
    labels: tuple[Label, ...]
    reasons: tuple[str, ...]
    scale: tuple[Term, ...] = ()
    parameter: str | None = None
    fill: float | None = None
    points: Label = ()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def with_axis(
        self, axis: int, *, size: int | None = None, label: Label | None = None, reason: str | None = None
    ) -> Value:
        """The value with another size, label or reason on one axis."""

        def put(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
            return items if item is None else (*items[:axis], item, *items[axis + 1 :])

        return replace(
            self,
            shape=put(self.shape, size),
            labels=put(self.labels, label),
            reasons=put(self.reasons, reason),
        )


def code(positions: Array) -> Array:
    """Entries that stand for fixed positions."""
    return -1 - positions


def along(values: Array, axis: int, ndim: int) -> Array:
    """A one-dimensional array, laid along one axis of a tensor with ``ndim`` axes."""
    shape = [1] * ndim
    shape[axis] = len(values)
    return values.reshape(shape)


def tighten(array: Array) -> Array:
    """Drop (to size one) every axis along which the array does not vary."""
    for axis, size in enumerate(array.shape):
        if size > 1:
            first = array.take([0], axis)
            if (array == first).all():
                array = first
    return array


def varies(array: Array) -> tuple[int, ...]:
    """The axes along which a tightened array varies."""
    return tuple(axis for axis, size in enumerate(array.shape) if size > 1)


def distinct(values: Array) -> Array:
    """The distinct values in ascending order; by sorting, which NumPy's hash tables do not come near here."""
    values = np.sort(values, axis=None)
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values


def distinct_rows(rows: Array) -> Array:
    """The distinct rows of integers, in lexicographic order; by way of one number for each, where these fit."""
    if not len(rows):
        return rows
    low, high = rows.min(axis=0), rows.max(axis=0)
    spans = [int(b) - int(a) + 1 for a, b in zip(low, high, strict=True)]
    if math.prod(spans) >= 2**63:
        return np.unique(rows, axis=0)
    keys = np.zeros(len(rows), dtype=np.int64)
    for k, span in enumerate(spans):
        keys = keys * span + (rows[:, k] - low[k])
    keys = distinct(keys)
    columns: list[Array] = []
    for span in reversed(spans):
        columns.insert(0, keys % span)
        keys //= span
    return np.stack(columns, axis=1) + low


def among(array: Array, values: Array) -> NDArray[np.bool_]:
    """For each entry whether it is one of the values."""
    if not values.size:
        return np.zeros(array.shape, dtype=bool)
    known = np.sort(values, axis=None)
    return known[np.minimum(np.searchsorted(known, array), len(known) - 1)] == array


def merge_fixed(x: Array, y: Array) -> Array:
    """One component for two that meet: units first, and one code for each pair of fixed positions that meet.

    Both components can be told from the result, but for units that met units (these are tied) or fixed positions
    (these are pinned or told apart by a mark)::

        x = [u0, u1, -1, -1, -2]    y = [v0, -1, v2, -1, -1]    ->    [u0, u1, v2, -1, -2]
    """
    both = (x < 0) & (y < 0)
    merged = np.where(x >= 0, x, y)
    if both.any():
        pairs = distinct_rows(np.stack([x[both], y[both]], axis=1))
        if len(pairs) == len(distinct(x[both])):  # the left side tells them all apart
            merged[both] = x[both]
        elif len(pairs) > len(distinct(y[both])):
            _, kinds = np.unique(np.stack([-x[both], -y[both]], axis=1), axis=0, return_inverse=True)
            merged[both] = code(kinds.reshape(-1).astype(np.int64))
    return merged


def pinned_value(shape: Sequence[int], reason: str) -> Value:
    """A tensor on which nothing moves."""
    shape = tuple(shape)
    return Value(shape, ((),) * len(shape), (reason,) * len(shape))


def segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Match the axes of a reshape: the finest list of (old axes, new axes) with equal numbers of elements."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and old[i] == 1:
            if j < len(new) and new[j] == 1:
                found.append(((i,), (j,)))
                j += 1
            else:
                found.append(((i,), ()))
            i += 1
            continue
        if j < len(new) and new[j] == 1:
            found.append(((), (j,)))
            j += 1
            continue
        left, right = [i], [j]
        a, b = old[i], new[j]
        while a != b:
            if a < b:
                i += 1
                left.append(i)
                a *= old[i]
            else:
                j += 1
                right.append(j)
                b *= new[j]
        found.append((tuple(left), tuple(right)))
        i, j = i + 1, j + 1
    return found
