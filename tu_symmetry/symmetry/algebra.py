"""The axis algebra: which hidden units index the axes of a tensor, and which log-scales multiply its entries.

**Labels.** Every axis of every tensor carries a label for each position: a tuple of *components*, integer arrays that
broadcast against the tensor. An entry ``u >= 0`` is a hidden unit, an entry ``-1 - k`` is the fixed position ``k`` of
something that cannot move (a pixel, a gate, a slot). An axis without components is pinned. A component usually varies
along its own axis alone; where it varies along a second axis too, it is nested in that axis (the units of a head in
the heads, the inputs of a grouped convolution in the groups). Because labels are arrays, every operator that merely
moves data (views, slices, concatenations, shuffles) acts on them as it acts on the tensor, and no structure is lost.

**Scales.** A tensor also carries a sum of terms ``coefficient * variable``: the log of the factor by which a positive
rescaling of hidden units multiplies its entries. The variables are again arrays that broadcast against the tensor.

The :class:`Ledger` collects what operators demand: ties between units, pins, and linear constraints on scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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


class Ledger:
    """Everything that the operators of one network demand of its units and scales."""

    def __init__(self) -> None:
        self.units = 0
        self.variables = 1
        self.places = 1 << 32
        self.ties: list[tuple[Array, Array]] = []
        self.bindings: list[tuple[Array, Label]] = []
        self.pins: list[tuple[Array, str]] = []
        self.marks: list[tuple[Array, Array, str]] = []
        self.nestings: list[tuple[Array, Array]] = []  # units, and the block of each that their label no longer names
        self.seen: list[tuple[Label, int, tuple[Label, ...]]] = []
        self._seen_ids: set[tuple[int, ...]] = set()
        self.constraints: list[tuple[Term, ...]] = []
        self.inexact: list[Array] = []
        self.parameters: dict[str, Value] = {}
        self.used: set[str] = set()
        self.unknown: list[str] = []

    # -- creating -----------------------------------------------------------------------------------------------

    def fresh_units(self, count: int) -> Array:
        """New hidden units, numbered on."""
        first, self.units = self.units, self.units + count
        return np.arange(first, first + count, dtype=np.int64)

    def fresh_places(self, count: int) -> Array:
        """Codes of fixed positions that are unlike each other and all others."""
        first, self.places = self.places, self.places + count
        return code(np.arange(first, first + count, dtype=np.int64))

    def fresh_variables(self, shape: tuple[int, ...]) -> Array:
        """New scale variables in a given shape."""
        count = math.prod(shape)
        first, self.variables = self.variables, self.variables + count
        return np.arange(first, first + count, dtype=np.int64).reshape(shape)

    def parameter(self, name: str, shape: tuple[int, ...], *, scales: bool = True) -> Value:
        """A parameter or buffer: free units and, where it ``scales``, a free log-scale on each of its axes."""
        if name not in self.parameters:
            ndim = len(shape)
            labels = tuple((along(self.fresh_units(n), k, ndim),) if n > 1 else () for k, n in enumerate(shape))
            frames = [tuple(n if k == j else 1 for k in range(ndim)) for j, n in enumerate(shape)]
            scale = tuple((1.0, self.fresh_variables(f)) for f in frames if math.prod(f) > 1)
            scale = scale or ((1.0, self.fresh_variables((1,) * ndim)),)
            self.parameters[name] = Value(shape, labels, ("",) * ndim, scale if scales else (), name)
        return self.parameters[name]

    def relabel(self, value: Value, axis: int, label: Label, reason: str = "") -> Value:
        """Give a parameter's axis a label of the caller's; ties the old one to it if the parameter is in use."""
        name = value.parameter
        if name is None or name in self.used:
            self.unify(value.labels[axis], label, value.reasons[axis], reason)
            return value
        labels = (*value.labels[:axis], label, *value.labels[axis + 1 :])
        reasons = (*value.reasons[:axis], reason, *value.reasons[axis + 1 :])
        self.parameters[name] = value = replace(value, labels=labels, reasons=reasons)
        return value

    def rescale(self, value: Value, scale: tuple[Term, ...]) -> Value:
        """Set the log-scale of a parameter; equates the two if the parameter is in use."""
        name = value.parameter
        if name is None or name in self.used:
            self.equate(value.scale, scale)
            return value
        self.parameters[name] = value = replace(value, scale=scale)
        return value

    def uniform(self, shape: Sequence[int], fill: float | None = None) -> Value:
        """A tensor whose entries are all alike: every position has the same code, so any order is as good.

        ``fill`` is the number that they hold, where it is known.
        """
        shape = tuple(shape)
        labels = tuple(
            (along(np.full(n, -1, dtype=np.int64), k, len(shape)),) if n > 1 else () for k, n in enumerate(shape)
        )
        return Value(shape, labels, ("",) * len(shape), fill=fill)

    def noise(self, shape: Sequence[int]) -> Value:
        """Random numbers with independent entries: units of their own on each axis, as a parameter has them."""
        shape = tuple(shape)
        labels = tuple((along(self.fresh_units(n), k, len(shape)),) if n > 1 else () for k, n in enumerate(shape))
        return Value(shape, labels, ("",) * len(shape))

    # -- demands on units ---------------------------------------------------------------------------------------

    def observe(self, value: Value, *, nested: bool = True) -> None:
        """Record that this tensor exists: a symmetry has to map its labels onto themselves."""
        for axis, label in enumerate(value.labels):
            if not nested and any(n > 1 for c in label for k, n in enumerate(c.shape) if k != axis):
                continue
            key = (axis, *(id(c) for c in label))
            if label and key not in self._seen_ids:
                self._seen_ids.add(key)
                self.seen.append((label, axis, value.labels))

    def pin_label(self, label: Iterable[Array], reason: str, axis: int | None = None) -> None:
        """Fix the units of a label where they are.

        With ``axis`` given (the label's own axis), units that are nested in another axis are fixed within their block
        only: the block may still move whole.
        """
        for component in label:
            units = component[component >= 0]
            if not units.size:
                continue
            if axis is not None and any(n > 1 for k, n in enumerate(component.shape) if k != axis):
                positions = np.arange(component.shape[axis], dtype=np.int64)
                self.marks.append((component, along(positions, axis, component.ndim), reason))
            else:
                self.pins.append((units, reason))

    def pin_axis(self, value: Value, axis: int, reason: str) -> Value:
        """Forbid any symmetry on one axis; returns the value with that axis pinned."""
        self.pin_label(value.labels[axis], reason, axis)
        labels = (*value.labels[:axis], (), *value.labels[axis + 1 :])
        reasons = (*value.reasons[:axis], value.reasons[axis] or reason, *value.reasons[axis + 1 :])
        return replace(value, labels=labels, reasons=reasons, parameter=None)

    def pin(self, value: Value, reason: str) -> None:
        """Forbid any symmetry, of units and of scales, on a tensor (and on the units that its entries name)."""
        for label in (*value.labels, value.points):
            self.pin_label(label, reason)
        self.pin_scale(value.scale)

    def forget(self, value: Value, axis: int, reason: str) -> None:
        """Fix units that nothing else will read: those that have met no other units yet."""
        met = [u.reshape(-1) for tie in self.ties for u in tie] + [u.reshape(-1) for u, _ in self.bindings]
        for component in value.labels[axis]:
            units = component[component >= 0]
            if units.size and not (met and among(units, np.concatenate(met)).any()):
                self.pins.append((units, reason))

    def unify(
        self,
        a: Label,
        b: Label,
        reason_a: str = "",
        reason_b: str = "",
        axis: int | None = None,
        others: Sequence[Label] | None = None,
    ) -> Label:
        """Demand that two axes be indexed by the same units; returns the label to go on with.

        Args:
            a: one label.
            b: the other label, in the same frame.
            reason_a: why ``a`` is pinned, if it is.
            reason_b: the same for ``b``.
            axis: the axis of both labels in their frame, where it is known.
            others: labels of all axes of the frame, where they are known: units that are shared between blocks (by the
                heads of an attention, say) are then told apart by their blocks.
        """
        if a is b or (len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))):
            return a
        if not a or not b:
            self.pin_label(a or b, (reason_b if a else reason_a) or "meets a fixed axis", axis)
            return ()
        if axis is not None and others is not None and len(a) == len(b) == 1:
            shared = self._share(a, b, axis, others) or self._share(b, a, axis, others)
            if shared:
                return shared
        arrays = [np.asarray(z) for z in np.broadcast_arrays(*a, *b)]
        left, right = arrays[: len(a)], arrays[len(a) :]
        if len(a) == len(b) == 1:
            return self._unify_single(a, b, left[0], right[0], reason_a or reason_b)
        if len(a) == len(b):
            merged: list[Array] = []
            for x, y in zip(left, right, strict=True):
                both = (x >= 0) & (y >= 0)
                if both.any():
                    self.ties.append((x[both], y[both]))
                clash = (x >= 0) != (y >= 0)
                fixed = (x < 0) & (y < 0)
                if (x[fixed] != y[fixed]).any():
                    pairs = distinct_rows(np.stack([x[fixed], y[fixed]], axis=1))
                    if not len(pairs) == len(distinct(x[fixed])) == len(distinct(y[fixed])):  # no mere renaming
                        clash |= fixed & (x != y)
                if clash.any():
                    self.pin_label((z[clash] for z in arrays), "meets another position of a factored axis")
                merged.append(x if not (clash.any() or (x[fixed] != y[fixed]).any()) else tighten(merge_fixed(x, y)))
            if all(x is m for x, m in zip(left, merged, strict=True)):
                nested_a = sum(z.size for z in a)
                return a if nested_a <= sum(z.size for z in b) else b
            return tuple(merged)
        if len(a) == 1 or len(b) == 1:
            single, several = (left[0], right) if len(a) == 1 else (right[0], left)
            met = single < 0
            self.pin_label((z[met] for z in several), "meets a fixed position")
            free = ~met
            self.bindings.append((single[free], tuple(z[free] for z in several)))
            label = b if len(a) == 1 else a
            if not met.any() or (single[met] == single[met][0]).all():
                return label
            first = merge_fixed(several[0], np.where(met, single, np.where(several[0] < 0, several[0], -1)))
            return (tighten(np.where(met, first, several[0])), *label[1:])
        self.pin_label(a, "factored in two ways")
        self.pin_label(b, "factored in two ways")
        return ()

    def _unify_single(self, a: Label, b: Label, x: Array, y: Array, reason: str) -> Label:
        """Two labels of one component each, broadcast to ``x`` and ``y``: tie units, tell apart what meets constants.

        The result carries the units of both sides. A padded tensor that is added to another one, say::

            pad(h) = [-1, u0, u1, -1]    b(x) = [v0, v1, v2, v3]    ->    [v0, u0, u1, v3], where u0 ~ v1, u1 ~ v2

        Here ``v0`` and ``v3`` meet alike constants and stay alike; constants that differ would tell them apart.
        """
        moving_x, moving_y = x >= 0, y >= 0
        both = moving_x & moving_y
        if both.any():
            self.ties.append((x[both], y[both]))
        if both.all():
            return self._finer(a, b, x, y)
        merged = merge_fixed(x, y)
        tags = np.where(both, 1, np.where(moving_x, y, x))
        here = merged >= 0
        if here.any() and (tags[here] != tags[here][0]).any():
            rows = distinct_rows(np.stack([merged[here], tags[here]], axis=1))
            if len(rows) > len(distinct(merged[here])):  # a unit that meets several: one new unit for each of them
                _, inverse = np.unique(np.stack([merged[here], tags[here]], axis=1), axis=0, return_inverse=True)
                units = self.fresh_units(len(rows))[inverse.reshape(-1)]
                self.ties.append((units, merged[here]))
                merged = merged.copy()
                merged[here] = units
            self.marks.append((np.where(here, merged, -1), tags, reason or "meets a fixed position"))
        for label, whole in ((a, x), (b, y)):
            if np.array_equal(merged, whole):
                return label
        return (tighten(merged),)

    def _finer(self, a: Label, b: Label, x: Array, y: Array) -> Label:
        """Of two labels whose units were tied: the one that tells apart what the other does (or a new one)."""
        if a[0].size != b[0].size:
            return a if a[0].size < b[0].size else b
        count_a, count_b = len(distinct(a[0])), len(distinct(b[0]))
        if count_a == a[0].size:
            return a
        if count_b == b[0].size:
            return b
        rows, inverse = np.unique(np.stack([x.reshape(-1), y.reshape(-1)], axis=1), axis=0, return_inverse=True)
        if len(rows) in (count_a, count_b):
            return a if len(rows) == count_a else b
        units = self.fresh_units(len(rows))
        self.ties += [(units, rows[:, 0]), (units, rows[:, 1])]
        return (tighten(units[inverse.reshape(-1)].reshape(x.shape)),)

    def _share(self, own: Label, common: Label, axis: int, others: Sequence[Label]) -> Label:
        """Bind units of which each block has its own to pairs of a common unit and the block; () if that is not so."""
        outer = [k for k in varies(own[0]) if k != axis]
        if not outer or any(not others[k] for k in outer):
            return ()
        x, y, *blocks = np.broadcast_arrays(own[0], common[0], *(c for k in outer for c in others[k]))
        if (x < 0).any() or (y < 0).any() or len(distinct(y)) == len(distinct(x)):
            return ()
        parts = (y.reshape(-1), *(z.reshape(-1) for z in blocks))
        flat = x.reshape(-1)
        _, first = np.unique(flat, return_index=True)
        pairs = distinct_rows(np.stack(parts, axis=1))
        if len(pairs) != len(first) or len(distinct_rows(np.stack((flat, *parts), axis=1))) != len(first):
            return ()
        self.bindings.append((flat[first], tuple(z[first] for z in parts)))
        return common

    def mix(self, value: Value, axis: int, reason: str) -> Value:
        """The value before an operator that mixes fixed positions along an axis (a convolution's pixels)."""
        value = self.unnest(self.pin_axis(value, axis, reason), axis)
        return replace(value, scale=tuple((c, self._constant_along(v, axis)) for c, v in value.scale))

    def unnest(self, value: Value, axis: int) -> Value:
        """Make all labels of the other axes independent of ``axis``."""
        labels = tuple(
            label
            if k == axis
            else self._shared_along(value, k, axis) or tuple(self._independent(c, axis) for c in label)
            for k, label in enumerate(value.labels)
        )
        return replace(value, labels=labels)

    def _shared_along(self, value: Value, axis: int, outer: int) -> Label:
        """New common units for units that each block along ``outer`` has of its own; () where that is not so."""
        label = value.labels[axis]
        if len(label) != 1 or label[0].shape[outer] == 1 or not value.labels[outer]:
            return ()
        first = label[0].take([0], outer)
        return self._share(label, (self.fresh_units(first.size).reshape(first.shape),), axis, value.labels)

    def _independent(self, component: Array, axis: int) -> Array:
        if component.shape[axis] == 1:
            return component
        first = component.take([0], axis)
        x, y = np.broadcast_arrays(component, first)
        both = (x >= 0) & (y >= 0) & (x != y)
        if both.any():
            self.ties.append((x[both], y[both]))
        clash = ((x >= 0) != (y >= 0)) | ((x < 0) & (y < 0) & (x != y))
        if not clash.any():
            return first
        self.pin_label((x[clash], y[clash]), "differs along an axis that is summed over")
        # what was pinned, and what stands for several fixed positions, still tells the results apart
        lines = np.moveaxis(component, axis, -1).reshape(-1, component.shape[axis])
        _, kinds = np.unique(lines, axis=0, return_inverse=True)
        fixed = (lines < 0).all(axis=1)
        unit = np.take_along_axis(lines, (lines >= 0).argmax(axis=1)[:, None], 1)[:, 0]
        merged = np.where(fixed, code(kinds.reshape(-1).astype(np.int64)), unit)
        return np.expand_dims(merged.reshape([n for k, n in enumerate(component.shape) if k != axis]), axis)

    def drop(self, value: Value, axis: int, *, keep: bool = False) -> Value:
        """The value after a reduction over ``axis``: nothing that remains may depend on it."""
        value = self.unnest(value, axis)
        scale = tuple((c, self._constant_along(v, axis)) for c, v in value.scale)
        if keep:
            shape = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
            labels = (*value.labels[:axis], (), *value.labels[axis + 1 :])
            return replace(value, shape=shape, labels=labels, scale=scale, parameter=None)
        return Value(
            value.shape[:axis] + value.shape[axis + 1 :],
            tuple(tuple(c.squeeze(axis) for c in lab) for k, lab in enumerate(value.labels) if k != axis),
            value.reasons[:axis] + value.reasons[axis + 1 :],
            tuple((c, v.squeeze(axis)) for c, v in scale),
        )

    def channel(self, value: Value, axis: int) -> tuple[Label, tuple[Term, ...]]:
        """Label and scale of one axis alone, as one-dimensional arrays; both are made independent of the others."""
        label = value.labels[axis]
        scale = value.scale
        for other in range(value.ndim):
            if other != axis:
                label = tuple(self._independent(c, other) for c in label)
                scale = tuple((c, self._constant_along(v, other)) for c, v in scale)
        return tuple(c.reshape(-1) for c in label), tuple((c, v.reshape(-1)) for c, v in scale)

    # -- demands on scales --------------------------------------------------------------------------------------

    def _constant_along(self, variable: Array, axis: int) -> Array:
        if variable.shape[axis] == 1:
            return variable
        first = variable.take([0], axis)
        self.constraints.append(((1.0, variable), (-1.0, first)))
        return first

    def pin_scale(self, scale: tuple[Term, ...]) -> None:
        """Demand that a log-scale be zero."""
        if scale:
            self.constraints.append(scale)

    def equate(self, a: tuple[Term, ...], b: tuple[Term, ...]) -> None:
        """Demand that two log-scales (terms in the same frame) be equal."""
        if a is not b and (a or b):
            self.constraints.append((*a, *((-c, v) for c, v in b)))

    def merge(self, scale: tuple[Term, ...]) -> tuple[Term, ...]:
        """Replace sums of terms that vary along the same axes by one new variable each."""
        merged: list[Term] = []
        for shape in dict.fromkeys(v.shape for _, v in scale):
            terms = tuple(t for t in scale if t[1].shape == shape)
            if len(terms) > 1 and terms[0][1].ndim > 0:
                variable = self.fresh_variables(shape)
                self.equate(((1.0, variable),), terms)
                merged.append((1.0, variable))
            else:
                merged += terms
        return tuple(merged)

    def single(self, value: Value) -> Array:
        """The log-scale of a tensor as one variable array (a new variable where it is a sum)."""
        ones = np.zeros((1,) * value.ndim, dtype=np.int64)
        if not value.scale:
            return ones
        if len(value.scale) == 1 and value.scale[0][0] == 1.0:
            return value.scale[0][1]
        shape = np.broadcast_shapes(*(v.shape for _, v in value.scale))
        variable = self.fresh_variables(shape)
        self.equate(((1.0, variable),), value.scale)
        return variable

    # -- moving data --------------------------------------------------------------------------------------------

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Reorder the axes."""
        return Value(
            tuple(value.shape[k] for k in order),
            tuple(tuple(c.transpose(order) for c in value.labels[k]) for k in order),
            tuple(value.reasons[k] for k in order),
            tuple((c, v.transpose(order)) for c, v in value.scale),
        )

    def take(self, value: Value, axis: int, positions: Array | int) -> Value:
        """Select positions along an axis (an int drops the axis). A unit that is selected alone is told apart by it."""
        index = np.asarray([positions] if isinstance(positions, int) else positions, dtype=np.int64)
        if len(index) == 1 and value.shape[axis] > 1:
            for component in value.labels[axis]:
                if component.shape[axis] > 1 and (component >= 0).any():
                    self.marks.append((component.take(index, axis), np.zeros((), np.int64), "selected by its position"))

        def pick(array: Array) -> Array:
            array = array.take(index, axis) if array.shape[axis] > 1 else array
            return array.squeeze(axis) if isinstance(positions, int) else array

        gone = isinstance(positions, int)
        kept = [k for k in range(value.ndim) if not (gone and k == axis)]
        shape = tuple(len(index) if k == axis else value.shape[k] for k in kept)
        labels = [tuple(pick(c) for c in value.labels[k]) for k in kept]
        if not gone and len(index) == 1:
            labels[kept.index(axis)] = ()
        return Value(
            shape,
            tuple(labels),
            tuple(value.reasons[k] for k in kept),
            tuple((c, pick(v)) for c, v in value.scale),
            fill=value.fill,
        )

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast to a shape: the copies along a new axis are alike, so any order of them is as good."""
        value = self.pad_left(value, len(shape))
        labels = list(value.labels)
        for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
            if old == 1 and new > 1:
                outer = [k for k in range(axis) if labels[k] and varies(tighten(labels[k][0])) == (k,)]
                frame = tuple(shape[k] if k in outer or k == axis else 1 for k in range(len(shape)))
                labels[axis] = (self.fresh_units(math.prod(frame)).reshape(frame),)
        expanded = Value(tuple(shape), tuple(labels), value.reasons, value.scale)
        self.observe(expanded)
        return expanded

    def pad_left(self, value: Value, ndim: int) -> Value:
        """Add axes of size one in front, as broadcasting does."""
        extra = ndim - value.ndim
        if extra <= 0:
            return value
        ones = (1,) * extra
        return replace(
            value,
            shape=ones + value.shape,
            labels=((),) * extra + tuple(tuple(c.reshape(ones + c.shape) for c in lab) for lab in value.labels),
            reasons=("",) * extra + value.reasons,
            scale=tuple((c, v.reshape(ones + v.shape)) for c, v in value.scale),
        )

    def concatenate(self, values: Sequence[Value], axis: int, *, nested: bool = False) -> Value:
        """Lay values one after the other along an axis.

        The units of the other axes must agree, or, with ``nested``, may be different ones in each of the values.
        """
        first, *rest = values
        labels = list(first.labels)
        for k in range(first.ndim):
            if k == axis or first.shape[k] == 1:
                continue
            own = [v.labels[k] for v in values]
            spread = any(c.shape[axis] > 1 for label in own for c in label)
            if (nested or spread) and own[0] and len({len(label) for label in own}) == 1:
                sized = [self._materialize(v, k, axis) for v in values]
                labels[k] = tuple(tighten(_join([p[r] for p in sized], axis)) for r in range(len(own[0])))
                continue
            if spread:
                values = [self.unnest(v, axis) for v in values]
                first, *rest = values
                labels[k] = first.labels[k]
            for value in rest:
                labels[k] = self.unify(labels[k], value.labels[k], first.reasons[k], value.reasons[k])
        parts = [self._materialize(v, axis) for v in values]
        arity = max(len(p) for p in parts)
        joined: Label = ()
        if any((c >= 0).any() for p in parts for c in p):
            filled = [(*p, *(np.full_like(p[0], -1) for _ in range(arity - len(p)))) for p in parts]
            origin = self._origins(values)
            joined = tuple(
                _apart([p[r] for p in filled], origin, axis) if len(values) > 1 else filled[0][r] for r in range(arity)
            )
        scale: tuple[Term, ...] = ()
        if any(v.scale for v in values):
            singles = [self.single(v) for v in values]
            laid = [
                np.broadcast_to(s, tuple(v.shape[k] if k == axis else s.shape[k] for k in range(s.ndim)))
                for s, v in zip(singles, values, strict=True)
            ]
            scale = ((1.0, tighten(_join(laid, axis))),)
        labels[axis] = joined
        shape = list(first.shape)
        shape[axis] = sum(v.shape[axis] for v in values)
        reasons = list(first.reasons)
        reasons[axis] = reasons[axis] or next((v.reasons[axis] for v in values if v.reasons[axis]), "")
        return Value(tuple(shape), tuple(labels), tuple(reasons), scale)

    @staticmethod
    def _origins(values: Sequence[Value]) -> list[int]:
        """A number for each of the values: the same for one that comes twice, and for equal constants."""
        keys = [("fill", v.fill) if v.fill is not None else ("value", id(v)) for v in values]
        return [keys.index(key) for key in keys]

    def _materialize(self, value: Value, axis: int, along_too: int | None = None) -> Label:
        """The components of an axis in their full length; along a second axis as well, if one is given."""
        if value.labels[axis]:
            return tuple(
                np.broadcast_to(
                    c, tuple(value.shape[k] if k in (axis, along_too) else n for k, n in enumerate(c.shape))
                )
                for c in value.labels[axis]
            )
        return (along(code(np.arange(value.shape[axis], dtype=np.int64)), axis, value.ndim),)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Merge and split axes. A unit axis that is split becomes blocks (new units) with units nested in them."""
        shape = tuple(shape)
        if shape == value.shape:
            return value
        if 0 in shape or 0 in value.shape:
            return pinned_value(shape, "empty tensor")
        matched = segments(value.shape, shape)
        changed = [(o, n) for o, n in matched if not (len(o) == len(n) == 1)]

        def move(array: Array) -> Array:
            parts: list[int] = []
            full = list(array.shape)
            for olds, news in matched:
                if math.prod([array.shape[k] for k in olds]) == 1:
                    parts += [1] * len(news)
                else:
                    for k in olds:
                        full[k] = value.shape[k]
                    parts += [shape[k] for k in news]
            return tighten(np.broadcast_to(array, full).reshape(parts))

        labels: list[Label] = [()] * len(shape)
        reasons = [""] * len(shape)
        for olds, news in matched:
            if len(olds) == len(news) == 1:
                labels[news[0]] = tuple(move(c) if changed else c for c in value.labels[olds[0]])
                reasons[news[0]] = value.reasons[olds[0]]
                continue
            reason = next((value.reasons[k] for k in olds if value.reasons[k]), "")
            for k in news:
                reasons[k] = reason
            if not any((c >= 0).any() for k in olds for c in value.labels[k]):
                continue
            pool = [move(c) for k in olds if value.shape[k] > 1 for c in self._materialize(value, k)]
            self._distribute(pool, [k for k in news if shape[k] > 1], labels)
        reshaped = Value(shape, tuple(labels), tuple(reasons), tuple((c, move(v)) for c, v in value.scale))
        self.observe(reshaped)
        return reshaped

    def _distribute(self, pool: list[Array], axes: list[int], labels: list[Label]) -> None:
        """Assign the components of a reshaped segment to its new axes."""
        assigned: dict[int, list[Array]] = {axis: [] for axis in axes}
        for component in pool:
            spread = [axis for axis in axes if component.shape[axis] > 1]
            if not spread:
                continue
            if len(spread) == 1:
                assigned[spread[0]].append(component)
            elif not (component >= 0).any():
                for axis in spread:  # positions with the same content are alike
                    rows = np.moveaxis(component, axis, 0).reshape(component.shape[axis], -1)
                    _, kinds = np.unique(-rows, axis=0, return_inverse=True)
                    assigned[axis].append(along(code(kinds.reshape(-1).astype(np.int64)), axis, component.ndim))
            else:
                assigned[spread[-1]].append(component)
                for position, axis in enumerate(spread[:-1]):
                    blocks = self._blocks(component, spread[: position + 1])
                    self._nest(component, blocks)
                    assigned[axis].append(blocks)
        for axis, components in assigned.items():
            label = self._simplify(components)
            if len(label) == 2 and (label[0] >= 0).all() and not (label[1] >= 0).any() and _determines(*label):
                self.marks.append((*label, "a position of its own"))  # each unit is met at one fixed position only
                label = label[:1]
            labels[axis] = label

    def _simplify(self, components: list[Array]) -> Label:
        """Merge fixed components into one, and drop units that another component determines."""
        fixed = [c for c in components if not (c >= 0).any()]
        moving = [c for c in components if (c >= 0).any()]
        if not moving:
            return ()
        kept: list[Array] = []
        for k, component in enumerate(moving):
            determining = next((o for o in (*kept, *moving[k + 1 :]) if _determines(o, component)), None)
            if determining is None:
                kept.append(component)
            else:
                self._nest(determining, component)
        if len(fixed) > 1:
            stacked = np.stack([a.reshape(-1) for a in np.broadcast_arrays(*fixed)], axis=1)
            _, inverse = np.unique(-stacked, axis=0, return_inverse=True)
            fixed = [code(inverse.reshape(-1).astype(np.int64)).reshape(np.broadcast_shapes(*(f.shape for f in fixed)))]
        return (*kept, *fixed)

    def _nest(self, units: Array, blocks: Array) -> None:
        """Record the block of each unit, which is left out of a label because the unit tells it.

        Should ties make one class of units of several blocks, then the label was too short, and all of them are pinned.
        """
        if units is not blocks:
            x, y = (z.reshape(-1) for z in np.broadcast_arrays(units, blocks))
            both = (x >= 0) & (y >= 0)
            if both.any() and (y[both] != y[both][0]).any():
                self.nestings.append((x[both], y[both]))

    def _blocks(self, component: Array, outer: list[int]) -> Array:
        """One new unit for each block of units: blocks with the same content get the same unit."""
        inner = [k for k in range(component.ndim) if k not in outer]
        rows = component.transpose(*outer, *inner).reshape(math.prod(component.shape[k] for k in outer), -1)
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))  # number blocks in order of appearance
        units = self.fresh_units(len(first))[order[inverse.reshape(-1)]]
        return units.reshape([component.shape[k] if k in outer else 1 for k in range(component.ndim)])


def _join(arrays: Sequence[Array], axis: int) -> Array:
    """Concatenate arrays that broadcast along the other axes."""
    other = np.broadcast_shapes(*(tuple(1 if k == axis else n for k, n in enumerate(a.shape)) for a in arrays))
    full = [np.broadcast_to(a, tuple(a.shape[k] if k == axis else n for k, n in enumerate(other))) for a in arrays]
    return np.concatenate(full, axis)


def _apart(arrays: Sequence[Array], origins: Sequence[int], axis: int) -> Array:
    """Concatenate components; fixed positions of different origins get different codes.

    ``[x[:2], h, x[2:]]`` has the codes (-1, -2) in its first and in its last piece, which are no more alike than any
    other two inputs: ``[-1, -2 | u0, u1 | -1, -2]`` becomes ``[-1, -2 | u0, u1 | -3, -4]``.
    """
    joined = _join(arrays, axis)
    fixed = joined < 0
    if not fixed.any():
        return joined
    origin = _join(
        [
            np.full([n if k == axis else 1 for k, n in enumerate(a.shape)], o, dtype=np.int64)
            for a, o in zip(arrays, origins, strict=True)
        ],
        axis,
    )
    rows = np.stack([np.broadcast_to(origin, joined.shape)[fixed], -joined[fixed]], axis=1)
    _, kinds = np.unique(rows, axis=0, return_inverse=True)
    joined = joined.copy()
    joined[fixed] = code(kinds.reshape(-1).astype(np.int64))
    return joined


def _determines(a: Array, b: Array) -> bool:
    """Whether b is a function of a, entry by entry, on the units of both."""
    x, y = (z.reshape(-1) for z in np.broadcast_arrays(a, b))
    if (x < 0).any():
        return False
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    same = x[1:] == x[:-1]
    return bool((y[1:][same] == y[:-1][same]).all())
