"""The axis algebra: which hidden units index the axes of a tensor, and which log-scales multiply its entries.

Operators that move data act on labels and scales, which are arrays, as they act on the tensor (:mod:`.views`); what
operators demand of units and scales is written down in the :class:`~.ledger.Ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Label = tuple[Array, ...]
Term = tuple[float, Array]

_MOST_CODES = 2**63  # numbers that int64 holds
ZERO = 0  # the scale variable that is always zero


@dataclass(frozen=True, eq=False)
class Proof:
    """Units at which entries differ, by the witness (a bit) that shows it, see :mod:`.distinct`."""

    units: Array
    witness: int


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of one tensor of the traced graph.

    A label is a tuple of components, integer arrays that broadcast against the tensor. An entry ``u >= 0`` is a hidden
    unit, an entry ``-1 - k`` the fixed position ``k`` of what cannot move (a pixel, a gate). A component that varies
    along another axis too is nested in it: ``a(x).view(n, 2, 3)`` of six units has ``[[[0 1 2], [3 4 5]]]`` on axis 2
    and two new units ``[[[6], [7]]]``, for the blocks, on axis 1.
    """

    shape: tuple[int, ...]
    labels: tuple[Label, ...]  # of each axis; () where it is pinned, or of size one
    reasons: tuple[str, ...]  # why each axis is pinned, empty where it is not
    scale: tuple[Term, ...] = ()  # coefficients times variables, arrays too: the log of the factor of each entry
    parameter: str | None = None  # name, if this is a parameter or buffer itself
    fill: float | None = None  # the number that every entry holds, if this is known to be such a constant
    points: Label = ()  # of the axis whose positions the entries are (`argmax`): renamed as its units move
    zero: bool = False  # throughout: any factor is one of it
    sole: bool = False  # a view of a parameter that nothing else reads
    statistic: bool = False  # a norm, a deviation and the like: it may be given an epsilon
    proofs: tuple[Proof, ...] = ()  # that entries are different numbers
    depends: int = 0  # the witnesses that the entries depend on, as bits
    linear_in: int = 0  # those in each of which they are linear
    nonzero: bool = False  # whether no vector along the last axis is zero throughout

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def with_axis(
        self, axis: int, *, size: int | None = None, label: Label | None = None, reason: str | None = None
    ) -> Value:
        """The value with another size, label or reason on one axis."""

        def put(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
            return items if item is None else (*items[:axis], item, *items[axis + 1 :])

        shape, labels, reasons = put(self.shape, size), put(self.labels, label), put(self.reasons, reason)
        return replace(self, shape=shape, labels=labels, reasons=reasons)


def leaves(held: Any) -> Iterator[Any]:
    """What lists and tuples hold, in order: a quick ``tree_leaves`` for those."""
    if isinstance(held, (list, tuple)):
        for item in held:
            yield from leaves(item)
    else:
        yield held


def kinds(rows: Array) -> Array:
    """Codes of fixed positions, one for each row; equal rows have the same."""
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    return -1 - inverse.reshape(-1).astype(np.int64)


def along(values: Array, axis: int, ndim: int) -> Array:
    """A one-dimensional array, laid along one axis of a tensor with ``ndim`` axes."""
    return values.reshape([len(values) if k == axis else 1 for k in range(ndim)])


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


def nested_in(label: Label, axis: int) -> set[int]:
    """The other axes that the label of an axis varies along."""
    return {k for component in label for k in varies(component)} - {axis}


def moving(label: Label) -> bool:
    """Whether a label has a hidden unit."""
    return any((component >= 0).any() for component in label)


def units_of(labels: Sequence[Label]) -> Array:
    """All hidden units of some labels, in ascending order."""
    held = [component[component >= 0] for label in labels for component in label]
    return distinct(np.concatenate(held)) if held else np.empty(0, dtype=np.int64)


def distinct(values: Array) -> Array:
    """The distinct values in ascending order; by sorting, which NumPy's hash tables do not come near here."""
    values = np.sort(values, axis=None)
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values


def distinct_rows(rows: Array) -> Array:
    """The distinct rows of integers, in lexicographic order; as numbers of their own where int64 holds these."""
    if len(rows):
        least = rows.min(axis=0)
        spans = [b - a + 1 for a, b in zip(least.tolist(), rows.max(axis=0).tolist(), strict=True)]
        if math.prod(spans) < _MOST_CODES:
            codes = distinct(np.ravel_multi_index(tuple((rows - least).T), spans))
            return np.stack(np.unravel_index(codes, spans), axis=1) + least
    rows = rows[np.lexsort(rows.T[::-1])]
    return rows[np.append(True, (rows[1:] != rows[:-1]).any(axis=1))] if len(rows) else rows


def among(array: Array, values: Array) -> NDArray[np.bool_]:
    """For each entry whether it is one of the values."""
    if not values.size:
        return np.zeros(array.shape, dtype=bool)
    known = np.sort(values, axis=None)
    return known[np.minimum(np.searchsorted(known, array), len(known) - 1)] == array


def determines(a: Array, b: Array) -> bool:
    """Whether an array of units tells what another one holds, wherever its units stand."""
    x, y = (z.reshape(-1) for z in np.broadcast_arrays(a, b))
    if (x < 0).any():
        return False
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    same = x[1:] == x[:-1]
    return bool((y[1:][same] == y[:-1][same]).all())


def merge_fixed(x: Array, y: Array) -> Array:
    """One component for two: ``[u0, u1, -1, -2]`` and ``[v0, -1, -1, -1]`` become ``[u0, u1, -1, -2]``."""
    both = (x < 0) & (y < 0)
    merged = np.where(x >= 0, x, y)
    if both.any():
        pairs = distinct_rows(np.stack([x[both], y[both]], axis=1))
        if len(pairs) == len(distinct(x[both])):  # the left side tells them all apart
            merged[both] = x[both]
        elif len(pairs) > len(distinct(y[both])):
            merged[both] = kinds(np.stack([-x[both], -y[both]], axis=1))
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
        left, right = old[i : i + 1] == (1,), new[j : j + 1] == (1,)
        if left or right:  # axes of size one are matched with each other where they meet
            found.append(((i,) if left else (), (j,) if right else ()))
            i, j = i + left, j + right
            continue
        first, second = i, j
        a, b = old[i], new[j]
        while a != b:
            if a < b:
                i += 1
                a *= old[i]
            else:
                j += 1
                b *= new[j]
        i, j = i + 1, j + 1
        found.append((tuple(range(first, i)), tuple(range(second, j))))
    return found
