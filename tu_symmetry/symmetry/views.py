"""Moving tensors: how labels and scales follow when a tensor is viewed, cut, joined or reduced.

Every function takes the :class:`~.algebra.Value` before an operator and returns the value after it. The ledger is there
for new units, and for what an operator demands (nothing that remains of a sum may depend on the summed axis).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from tu_symmetry.symmetry.algebra import (
    Array,
    Label,
    Term,
    Value,
    along,
    determines,
    kinds,
    moving,
    pinned_value,
    segments,
    tighten,
    varies,
)
from tu_symmetry.symmetry.ledger import Ledger, Mark

T = TypeVar("T")
SELECTED = "selected by its position"


def of_positions(shape: Sequence[int], numbered: Callable[[int], Array], fill: float | None = None) -> Value:
    """A tensor of which each axis has the label that ``numbered`` makes for its length."""
    shape = tuple(shape)
    labels = tuple((along(numbered(n), k, len(shape)),) if n > 1 else () for k, n in enumerate(shape))
    return Value(shape, labels, ("",) * len(shape), fill=fill)


def uniform(shape: Sequence[int], fill: float | None = None) -> Value:
    """A tensor whose entries are all alike: every position has the same code, so any order is as good."""
    return of_positions(shape, lambda n: np.full(n, -1, dtype=np.int64), fill)


def noise(ledger: Ledger, shape: Sequence[int]) -> Value:
    """Random numbers with independent entries: units of their own on each axis, as a parameter has them."""
    return of_positions(shape, ledger.fresh_units)


def arranged(value: Value, axes: Sequence[int], move: Callable[[Array], Array]) -> Value:
    """A tensor whose axes are some of the old ones, with labels and scales that are moved as it is."""
    return Value(
        tuple(value.shape[k] for k in axes),
        tuple(tuple(move(c) for c in value.labels[k]) for k in axes),
        tuple(value.reasons[k] for k in axes),
        tuple((c, move(v)) for c, v in value.scale),
    )


def pin_axis(ledger: Ledger, value: Value, axis: int, reason: str) -> Value:
    """Forbid any symmetry on one axis; returns the value with that axis pinned."""
    for component in value.labels[axis]:
        if not ledger.place_in_blocks(component, axis, value.labels):
            ledger.pin_label((component,), reason, axis)
    return replace(value.with_axis(axis, label=(), reason=value.reasons[axis] or reason), parameter=None)


def mix(ledger: Ledger, value: Value, axes: int | Iterable[int], reason: str) -> Value:
    """The value before an operator that mixes fixed positions along some axes: nothing may move along them."""
    for axis in [axes] if isinstance(axes, int) else axes:
        value = ledger.alike_along(unnest(ledger, pin_axis(ledger, value, axis, reason), axis), axis)
    return value


def unnest(ledger: Ledger, value: Value, *axes: int) -> Value:
    """Make all labels of the other axes independent of these."""
    for axis in axes:
        for k in range(value.ndim):
            if k in axes:
                continue
            label = value.labels[k]
            for component in label:
                ledger.regret(component, axis, value.labels[axis])
            shared: Label = ()
            if len(label) == 1 and label[0].shape[axis] > 1 and value.labels[axis]:
                first = label[0].take([0], axis)
                common = ledger.fresh_units(first.size).reshape(first.shape)
                shared = ledger.share(label, (common,), k, value.labels)
            value = value.with_axis(k, label=shared or tuple(independent(ledger, c, axis) for c in label))
    return value


def independent(ledger: Ledger, component: Array, axis: int) -> Array:
    """The first position along an axis of a component, for all of them: units at the others are tied to it.

    Units that meet fixed positions are pinned: ``[[u0, u1], [u2, -1]]`` is ``[u0, u1]`` with u0 ~ u2 and u1 pinned.
    """
    if component.shape[axis] == 1:
        return component
    first = component.take([0], axis)
    x, y = np.broadcast_arrays(component, first)
    ledger.tie(x, np.where(x == y, -1, y))
    clash = ((x >= 0) != (y >= 0)) | ((x < 0) & (y < 0) & (x != y))
    if not clash.any():
        return first
    ledger.pin_label((x[clash], y[clash]), "differs along an axis that is summed over")
    lines = np.moveaxis(component, axis, -1).reshape(-1, component.shape[axis])
    unit = np.take_along_axis(lines, (lines >= 0).argmax(axis=1)[:, None], 1)[:, 0]
    merged = np.where((lines < 0).all(axis=1), kinds(lines), unit)
    return np.expand_dims(merged.reshape([n for k, n in enumerate(component.shape) if k != axis]), axis)


def drop(ledger: Ledger, value: Value, axes: int | Iterable[int], *, keep: bool = False) -> Value:
    """The value after a reduction over some axes: nothing that remains may depend on them."""
    for axis in [axes] if isinstance(axes, int) else sorted(axes, reverse=True):
        value = ledger.alike_along(unnest(ledger, value, axis), axis)
        if keep:
            value = replace(value.with_axis(axis, size=1, label=()), parameter=None)
        else:
            value = arranged(value, [k for k in range(value.ndim) if k != axis], partial(np.squeeze, axis=axis))
    return value


def channel(ledger: Ledger, value: Value, axis: int) -> Value:
    """One axis alone, as a tensor that has no other; its label and scale are made independent of the others."""
    others = [k for k in range(value.ndim) if k != axis]
    for other in others:
        value = value.with_axis(axis, label=tuple(independent(ledger, c, other) for c in value.labels[axis]))
    return arranged(ledger.alike_along(value, *others), [axis], lambda a: a.reshape(-1))


def single(ledger: Ledger, value: Value) -> Array:
    """The log-scale of a tensor as one variable array (a new variable where it is a sum)."""
    if not value.scale:
        return np.zeros((1,) * value.ndim, dtype=np.int64)
    if len(value.scale) == 1 and value.scale[0][0] == 1.0:
        return value.scale[0][1]
    variable = ledger.fresh_variables(np.broadcast_shapes(*(v.shape for _, v in value.scale)))
    ledger.equate(((1.0, variable),), value.scale)
    return variable


def permute(value: Value, order: Sequence[int]) -> Value:
    """Reorder the axes."""
    return arranged(value, order, lambda a: a.transpose(order))


def swap(value: Value, first: int, second: int) -> Value:
    """Exchange two axes."""
    order = list(range(value.ndim))
    order[first], order[second] = order[second], order[first]
    return permute(value, order)


def take(ledger: Ledger, value: Value, axis: int, positions: Array | int) -> Value:
    """Select positions along an axis (an int drops the axis). A unit that is selected alone is told apart by it."""
    index = np.asarray([positions] if isinstance(positions, int) else positions, dtype=np.int64)
    if len(index) == 1 and value.shape[axis] > 1:
        for component in value.labels[axis]:
            if component.shape[axis] > 1 and (component >= 0).any():
                for k, other in enumerate(value.labels):
                    ledger.regret(component, k, other if k != axis else ())
                alone = component.take(index, axis)
                ledger.marks.append(Mark(alone, np.zeros((), np.int64), SELECTED))
    gone = isinstance(positions, int)

    def pick(array: Array) -> Array:
        array = array.take(index, axis) if array.shape[axis] > 1 else array
        return array.squeeze(axis) if gone else array

    found = arranged(value, [k for k in range(value.ndim) if not (gone and k == axis)], pick)
    found = found if gone else found.with_axis(axis, size=len(index), label=() if len(index) == 1 else None)
    return replace(found, fill=value.fill)


def split(ledger: Ledger, value: Value, axis: int, sizes: Sequence[int] = ()) -> list[Value]:
    """Cut a value into pieces along an axis; into halves where no sizes are given."""
    sizes = sizes or [value.shape[axis] // 2] * 2
    starts = np.cumsum([0, *sizes])
    return [take(ledger, value, axis, np.arange(a, a + n)) for a, n in zip(starts, sizes, strict=False)]


def at_first(ledger: Ledger, value: Value, *axes: int) -> Value:
    """The value at the first position of some axes, which are dropped."""
    for axis in sorted(axes, reverse=True):
        value = take(ledger, value, axis, 0)
    return value


def reorder(ledger: Ledger, value: Value, axis: int, positions: Array) -> Value:
    """Take all positions along an axis in another order."""
    arrays = [*(c for label in value.labels for c in label), *(v for _, v in value.scale)]
    return take(ledger, value, axis, positions) if any(a.shape[axis] > 1 for a in arrays) else value


def expand(ledger: Ledger, value: Value, shape: Sequence[int]) -> Value:
    """Broadcast to a shape: the copies along a new axis are new units, in each block to their left units of its own."""
    value = pad_left(value, len(shape))
    labels = list(value.labels)
    for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
        if old == 1 and new > 1:
            outer = [k for k in range(axis) if labels[k] and varies(tighten(labels[k][0])) == (k,)]
            frame = tuple(shape[k] if k in outer or k == axis else 1 for k in range(len(shape)))
            labels[axis] = (ledger.fresh_units(math.prod(frame)).reshape(frame),)
    expanded = Value(tuple(shape), tuple(labels), value.reasons, value.scale)
    ledger.observe(expanded)
    return expanded


def copies(ledger: Ledger, value: Value, axis: int, count: int, *, inner: bool) -> Value:
    """Each position along an axis several times: one copy after the other, or (``inner``) beside each other."""
    lead, rest = value.shape[: axis + inner], value.shape[axis + inner :]
    wide = expand(ledger, reshape(ledger, value, (*lead, 1, *rest)), (*lead, count, *rest))
    return reshape(ledger, wide, value.with_axis(axis, size=count * value.shape[axis]).shape)


def laid(value: Value, places: Sequence[int], ndim: int) -> Value:
    """A tensor with more axes, of size one: the axes of the value stand at these places."""
    order = sorted(range(value.ndim), key=places.__getitem__)
    gaps = tuple(k for k in range(ndim) if k not in places)
    moved = permute(value, order)

    def filled(items: Sequence[T], item: T) -> tuple[T, ...]:
        rest = iter(items)
        return tuple(item if k in gaps else next(rest) for k in range(ndim))

    def widened(arrays: Iterable[Array]) -> Label:
        return tuple(np.expand_dims(array, gaps) for array in arrays)

    labels = filled([widened(label) for label in moved.labels], ())
    scale = tuple((c, np.expand_dims(v, gaps)) for c, v in moved.scale)
    return Value(filled(moved.shape, 1), labels, filled(moved.reasons, ""), scale)


def pad_left(value: Value, ndim: int) -> Value:
    """Add axes of size one in front, as broadcasting does."""
    return laid(value, range(ndim - value.ndim, ndim), ndim) if ndim > value.ndim else value


def together(ledger: Ledger, aligned: Sequence[Value], order: Sequence[int]) -> Value:
    """Unify the labels of tensors that broadcast against each other, axis by axis in some order; without a scale."""
    shape = np.broadcast_shapes(*(v.shape for v in aligned))
    labels: list[Label] = [()] * len(shape)
    reasons = [""] * len(shape)
    for axis in order:
        met = [v for v in aligned if v.shape[axis] != 1]
        for value in met[:1]:
            labels[axis], reasons[axis] = value.labels[axis], value.reasons[axis]
        for value in met[1:]:
            label = ledger.unify(labels[axis], value.labels[axis], reasons[axis], value.reasons[axis], axis, labels)
            labels[axis], reasons[axis] = label, reasons[axis] or value.reasons[axis]
    return Value(shape, tuple(labels), tuple(reasons))


def concatenate(ledger: Ledger, values: Sequence[Value], axis: int, *, nested: bool = False) -> Value:
    """Lay values one after the other; the units of other axes must agree, or (``nested``) may be others in each."""
    lead = next((v for v in values if v.fill is None), values[0])
    values = [v if v is lead or v.fill is None else _filled(ledger, v, lead, axis) for v in values]
    labels, reasons, shape = list(values[0].labels), list(values[0].reasons), list(values[0].shape)
    for k in range(len(shape)):
        if k == axis or shape[k] == 1:
            continue
        own = [v.labels[k] for v in values]
        spread = any(c.shape[axis] > 1 for label in own for c in label)
        if (nested or spread) and own[0] and len({len(label) for label in own}) == 1:
            sized = [in_full(v, k, axis) for v in values]
            labels[k] = tuple(tighten(_join([p[r] for p in sized], axis)) for r in range(len(own[0])))
            continue
        if spread:
            values = [unnest(ledger, v, axis) for v in values]
            labels[k] = values[0].labels[k]
        for value in values[1:]:
            labels[k] = ledger.unify(labels[k], value.labels[k], reasons[k], value.reasons[k], k)
    parts = [in_full(v, axis) for v in values]
    labels[axis] = ()
    if any(moving(p) for p in parts):
        arity = max(len(p) for p in parts)
        filled = [(*p, *(np.full_like(p[0], -1) for _ in range(arity - len(p)))) for p in parts]
        keys = [("fill", v.fill) if v.fill is not None else ("value", id(v)) for v in values]
        origins = [keys.index(key) for key in keys]  # the same for a value that comes twice, and for equal constants
        labels[axis] = tuple(_join([p[r] for p in filled], axis, origins) for r in range(arity))
    scale: tuple[Term, ...] = ()
    if any(v.scale for v in values):
        singles = [single(ledger, v) for v in values]
        laid = [
            np.broadcast_to(s, tuple(v.shape[k] if k == axis else s.shape[k] for k in range(s.ndim)))
            for s, v in zip(singles, values, strict=True)
        ]
        scale = ((1.0, tighten(_join(laid, axis))),)
    shape[axis] = sum(v.shape[axis] for v in values)
    reasons[axis] = next((v.reasons[axis] for v in values if v.reasons[axis]), "")
    return Value(tuple(shape), tuple(labels), tuple(reasons), scale)


def _filled(ledger: Ledger, value: Value, beside: Value, axis: int) -> Value:
    """A tensor of one number, with the labels and the scale that it may have beside another one along an axis."""
    lengthwise = [any(c.shape[axis] > 1 for c in label) for label in beside.labels]
    labels = tuple(
        own if k == axis else tuple(own[0] for _ in label) if lengthwise[k] else label
        for k, (own, label) in enumerate(zip(value.labels, beside.labels, strict=True))
    )
    edge = tuple((c, v.take([0], axis)) for c, v in beside.scale)
    return replace(value, labels=labels, scale=edge if value.fill is not None and ledger.keeps(value.fill) else ())


def in_full(value: Value, axis: int, along_too: int | None = None) -> Label:
    """The components of an axis in their full length; along a second axis as well, if one is given."""
    if value.labels[axis]:
        return tuple(
            np.broadcast_to(c, tuple(value.shape[k] if k in (axis, along_too) else n for k, n in enumerate(c.shape)))
            for c in value.labels[axis]
        )
    return (along(-1 - np.arange(value.shape[axis], dtype=np.int64), axis, value.ndim),)


def diagonal(ledger: Ledger, value: Value, first: int, second: int) -> Value:
    """The entries at ``(i, i)`` of two axes of one size, as a last axis that is indexed by the units of both."""
    size = value.shape[first]

    def along_diagonal(array: Array) -> Array:
        shape = [size if k in (first, second) else n for k, n in enumerate(array.shape)]
        return tighten(np.diagonal(np.broadcast_to(array, shape), 0, first, second))

    rest = [k for k in range(value.ndim) if k not in (first, second)]
    found = arranged(value, rest, along_diagonal)
    label: Label = ()
    if size > 1:
        one, two = (
            tuple(along_diagonal(independent(ledger, c, other)) for c in value.labels[axis])
            for axis, other in ((first, second), (second, first))
        )
        label = ledger.unify(one, two, value.reasons[first], value.reasons[second], len(rest), [*found.labels, ()])
    reason = value.reasons[first] or value.reasons[second]
    return Value((*found.shape, size), (*found.labels, label), (*found.reasons, reason), found.scale)


def reshape(ledger: Ledger, value: Value, shape: Sequence[int]) -> Value:
    """Merge and split axes. A unit axis that is split becomes blocks (new units) with units nested in them.

    ``[n, 3, 4]``, channels by pixels, flattened has two components on its axis of 12, of channels and of pixels. In a
    view of ``[n, 12]`` as ``[n, 3, 4]`` the one component goes to the last axis; that before gets a unit for each row.
    """
    shape = tuple(shape)
    if shape == value.shape:
        return value
    if 0 in shape:
        ledger.pin(value, "an empty tensor is viewed")
        return pinned_value(shape, "empty tensor")
    matched = segments(value.shape, shape)
    changed = any(not (len(o) == len(n) == 1) for o, n in matched)

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
        if any(moving(value.labels[k]) for k in olds):
            pool = [move(c) for k in olds if value.shape[k] > 1 for c in in_full(value, k)]
            _distribute(ledger, pool, [k for k in news if shape[k] > 1], labels)
    reshaped = Value(shape, tuple(labels), tuple(reasons), tuple((c, move(v)) for c, v in value.scale))
    ledger.observe(reshaped)
    return reshaped


def _distribute(ledger: Ledger, pool: list[Array], axes: list[int], labels: list[Label]) -> None:
    """Assign the components of a reshaped segment to its new axes (those of size one left out)."""
    assigned: dict[int, list[Array]] = {axis: [] for axis in axes}
    for component in pool:
        spread = [axis for axis in axes if component.shape[axis] > 1]
        if len(spread) == 1:
            assigned[spread[0]].append(component)
        elif spread and not (component >= 0).any():
            for axis in spread:  # positions with the same content are alike
                rows = np.moveaxis(component, axis, 0).reshape(component.shape[axis], -1)
                assigned[axis].append(along(kinds(-rows), axis, component.ndim))
        elif spread:
            *outer, inner = ledger.nested_order(spread)
            assigned[inner].append(component)
            for position, axis in enumerate(outer):
                blocks = _blocks(ledger, component, sorted(outer[: position + 1]))
                _nest(ledger, component, blocks)
                ledger.choices.append((ledger.step, blocks))
                assigned[axis].append(blocks)
    for axis, components in assigned.items():
        label = _simplify(ledger, components)
        if len(label) == 2 and (label[0] >= 0).all() and not (label[1] >= 0).any() and determines(*label):
            ledger.marks.append(Mark(*label, "a position of its own"))  # each unit is met at one fixed position only
            label = label[:1]
        labels[axis] = label


def _simplify(ledger: Ledger, components: list[Array]) -> Label:
    """Merge fixed components into one, and drop units that another component determines."""
    fixed = [c for c in components if not (c >= 0).any()]
    free = [c for c in components if (c >= 0).any()]
    if not free:
        return ()
    kept: list[Array] = []
    for k, component in enumerate(free):
        determining = next((o for o in (*kept, *free[k + 1 :]) if determines(o, component)), None)
        if determining is None:
            kept.append(component)
        else:
            _nest(ledger, determining, component)
    if len(fixed) > 1:
        wide = np.broadcast_arrays(*fixed)
        fixed = [kinds(-np.stack([a.reshape(-1) for a in wide], axis=1)).reshape(wide[0].shape)]
    return (*kept, *fixed)


def _nest(ledger: Ledger, units: Array, blocks: Array) -> None:
    if units is not blocks:
        x, y = (z.reshape(-1) for z in np.broadcast_arrays(units, blocks))
        both = (x >= 0) & (y >= 0)
        if both.any() and (y[both] != y[both][0]).any():
            ledger.nestings.append((x[both], y[both]))


def _blocks(ledger: Ledger, component: Array, outer: list[int]) -> Array:
    """One new unit for each block of units: blocks with the same content get the same unit."""
    inner = [k for k in range(component.ndim) if k not in outer]
    rows = component.transpose(*outer, *inner).reshape(math.prod(component.shape[k] for k in outer), -1)
    numbers: dict[bytes, int] = {}
    order = [numbers.setdefault(row.tobytes(), len(numbers)) for row in rows]
    units = ledger.fresh_units(len(numbers))[order]
    return units.reshape([component.shape[k] if k in outer else 1 for k in range(component.ndim)])


def _join(arrays: Sequence[Array], axis: int, origins: Sequence[int] | None = None) -> Array:
    """Concatenate arrays that broadcast along the other axes; fixed positions of other ``origins`` get other codes."""
    other = np.broadcast_shapes(*(tuple(1 if k == axis else n for k, n in enumerate(a.shape)) for a in arrays))
    full = [np.broadcast_to(a, tuple(a.shape[k] if k == axis else n for k, n in enumerate(other))) for a in arrays]
    joined = np.concatenate(full, axis)
    fixed = joined < 0
    if origins is not None and fixed.any() and len(arrays) > 1:
        origin = np.concatenate([np.full(a.shape, o) for a, o in zip(full, origins, strict=True)], axis)
        joined[fixed] = kinds(np.stack([origin[fixed], -joined[fixed]], axis=1))
    return joined
