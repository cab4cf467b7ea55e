"""Rules for writes at positions: scatter, index_add, index_put and their kin.

The axis that is written to is found as in look-ups (see :mod:`~.indexing`); sums, means, maxima and minima over what
arrives at a position do not depend on the order of arrival. So that message passing on graphs leaves the features'
units free.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Array, Label, Term, Value, along, pinned_value
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.operators.indexing import joined, meet, picked
from tu_symmetry.symmetry.operators.pointwise import join_labels
from tu_symmetry.symmetry.operators.rearranging import pin_tensor
from tu_symmetry.symmetry.rules import Call, register_rule, unknown

SYMMETRIC = ("sum", "mean", "amax", "amin", "add")


def _combined(call: Call, value: Value, arriving: Value | float, terms: tuple[Term, ...], *, linear: bool) -> tuple:
    """The log-scale of what was written to, ``terms`` being that of what arrives: alike, but for zeros."""
    ledger = call.ledger
    if not linear:
        ledger.pin_scale(value.scale)
        ledger.pin_scale(terms)
        return ()
    if not isinstance(arriving, Value):
        if arriving == 0:
            return value.scale
        ledger.pin_scale(value.scale)
        return ()
    if id(arriving) in call.zeros:
        return value.scale
    if id(call["self"]) in call.zeros:
        return terms
    ledger.equate(value.scale, terms)
    return value.scale


@register_rule("scatter", "scatter_add", "scatter_reduce", positions="read")
def _scatter(call: Call) -> Value:
    value, index = call["self"], call["index"]
    given: Any = call.arguments.get("src", call.arguments.get("value"))
    if not value.ndim:
        return unknown(call)
    ledger, axis = call.ledger, call.axis()
    reduce = "add" if call.operator == "aten.scatter_add" else call.get("reduce", "")
    source = given if isinstance(given, Value) else None
    target = meet(call, value, axis, index, "written to by position")
    label, reason = target.labels[axis], target.reasons[axis]
    parts = [views.drop(ledger, target, axis, keep=True)]
    for part in (index, source):
        if part is None:
            continue
        part = replace(part, points=())
        for k in range(value.ndim):
            if part.shape[k] > index.shape[k]:
                part = views.take(ledger, part, k, np.arange(index.shape[k]))
        parts.append(part)
    if source is not None and reduce in SYMMETRIC:
        ledger.unify(parts[1].labels[axis], parts[2].labels[axis], parts[1].reasons[axis], parts[2].reasons[axis])
    elif (
        source is not None and not reduce and index.shape[axis] > 1
    ):  # if two are written to one position, the last remains
        parts[1:] = [views.mix(ledger, p, axis, "written in order") for p in parts[1:]]
    parts[1:] = [views.drop(ledger, p, axis, keep=True) for p in parts[1:]]
    for k in range(value.ndim):
        if k != axis and index.shape[k] < value.shape[k]:  # the rest stays as it was
            parts = [views.mix(ledger, p, k, "written to in part") if p.shape[k] > 1 else p for p in parts]
            shorter = (views.pin_axis(ledger, p, k, "written to in part") for p in parts)
            parts = [p.with_axis(k, size=value.shape[k]) for p in shorter]
    found = joined(call, parts, axis, label, reason)
    terms = parts[2].scale if source is not None else ()
    linear = not reduce or reduce in SYMMETRIC
    written = source if source is not None else float(given)
    held = replace(call["self"], scale=parts[0].scale)
    return replace(found, scale=_combined(call, held, written, terms, linear=linear))


@register_rule("index_add", "index_reduce", "index_copy", "index_fill", positions="read")
def _index_write(call: Call) -> Value:
    value, index = call["self"], call["index"]
    if not value.ndim or index.ndim > 1:
        return unknown(call)
    ledger, axis = call.ledger, call.axis()
    name = call.name
    given: Any = call.arguments.get("source", call.arguments.get("value"))
    sums = name in ("index_add", "index_reduce")
    linear = name != "index_reduce" or call.get("reduce") in SYMMETRIC
    positions = picked(call.constants.get("index"), value.shape[axis])
    if isinstance(given, Value) and not given.ndim:
        ledger.pin(given, "fills positions")
        given = math.nan
    if positions is not None and not sums:
        return overwritten(call.ledger, value, axis, positions, given)
    if not isinstance(given, Value):
        target = meet(call, value, axis, index, "written to by position")
        ledger.pin(replace(index, points=()), "an index")
        scale = _combined(call, target, given, (), linear=True)
        return replace(target, scale=scale, parameter=None)
    target = meet(call, value, axis, index, "written to by position")
    if index.ndim and sums:
        entries: Label = tuple(along(c.reshape(-1), axis, value.ndim) for c in index.labels[0])
        ledger.unify(given.labels[axis], entries, given.reasons[axis], index.reasons[0], axis)
    elif index.ndim:
        given = views.mix(ledger, given, axis, "written in order")
    written = given if id(call["source"]) not in call.zeros else 0.0
    return _arrived(call, target, given, axis, written, linear=linear)


def overwritten(ledger: Ledger, value: Value, axis: int, positions: Array, given: Value | float) -> Value:
    """The value with other content at known positions along an axis; the rest keeps its units.

    The result's label along the axis, for ``h[:, 1:3] = x``, where p and q are places that nothing else shares::

        [u0, u1, u2, u3]    ->    [u0, p, q, u3]
    """
    size = value.shape[axis]
    kept = np.setdiff1d(np.arange(size), positions)
    gone = views.take(ledger, value, axis, positions)
    ledger.forget(gone, axis, "overwritten")
    places: Label = (along(ledger.fresh_places(len(positions)), axis, value.ndim),)
    if not isinstance(given, Value):
        given = replace(gone, scale=gone.scale if given == 0 else ())
    elif any((c >= 0).any() for c in given.labels[axis]):  # units that arrive
        places = given.labels[axis]
    given = replace(given.with_axis(axis, label=places), parameter=None)
    if not len(kept):
        return given
    rest = views.take(ledger, value, axis, kept)
    whole = views.concatenate(ledger, [replace(rest, parameter=None), given], axis)
    order = np.empty(size, dtype=np.int64)
    order[np.concatenate([kept, positions])] = np.arange(size)
    return views.take(ledger, whole, axis, order)


@register_rule("index_put", "_unsafe_index_put", positions="read")
def _index_put(call: Call) -> Value:
    value, values = call["self"], call["values"]
    ledger = call.ledger
    indices = list(call["indices"])
    used = [k for k, i in enumerate(indices) if i is not None]
    accumulate = bool(call.get("accumulate", False))
    if len(used) == 1 and not accumulate and math.prod(values.shape) == 1 and _is_mask(call, used[0]):
        return _filled(call, value, values, indices[used[0]], used[0])
    if len(used) != 1 or indices[used[0]].ndim != 1:
        return _put_at_points(call, value, values, indices, used)
    (axis,) = used
    index = indices[axis]
    source = views.pad_left(values, value.ndim)
    positions = picked(call.constants["indices"][axis], value.shape[axis])
    count = len(positions) if positions is not None else index.shape[0]
    source = views.expand(ledger, source, value.with_axis(axis, size=count).shape)
    if id(values) in call.zeros:
        source = replace(source, scale=tuple((c, v.take([0], axis)) for c, v in value.scale))
    if positions is not None and not accumulate:
        return overwritten(call.ledger, value, axis, positions, source)
    target = meet(call, value, axis, index, "written to by position")
    if accumulate:
        entries: Label = tuple(along(c.reshape(-1), axis, value.ndim) for c in index.labels[0])
        ledger.unify(source.labels[axis], entries, source.reasons[axis], index.reasons[0], axis)
    else:
        ledger.pin(replace(index, points=()), "an index")
        source = views.mix(ledger, source, axis, "written in order")
    return _arrived(call, target, source, axis, values if id(values) not in call.zeros else 0.0, linear=True)


def _arrived(call: Call, target: Value, source: Value, axis: int, written: Value | float, *, linear: bool) -> Value:
    """What was written to at positions of an axis, each of which may have received any of what was written."""
    parts = [views.drop(call.ledger, v, axis, keep=True) for v in (target, source)]
    found = joined(call, parts, axis, target.labels[axis], target.reasons[axis])
    held = replace(call["self"], scale=parts[0].scale)
    return replace(found, scale=_combined(call, held, written, parts[1].scale, linear=linear))


def _is_mask(call: Call, k: int) -> bool:
    """Whether an index says of each entry whether it is meant, and not (a constant) which units are."""
    kinds = call.dtypes.get("indices")
    return kinds is not None and kinds[k] in (torch.bool, torch.uint8) and call.constants["indices"][k] is None


def _filled(call: Call, value: Value, filling: Value, mask: Value, first: int) -> Value:
    """One number wherever a mask is true, ``where(mask, filling, value)``: ``h[h > 1] = 1.0`` as torch 2.11 traces it.

    The mask covers the axes of the value from ``first`` on, ``h[:, mask] = 1.0`` of a ``h`` of four axes as many as the
    mask has: it is stretched over those that follow. Units of the mask are the value's own.
    """
    after = value.ndim - first - mask.ndim
    stretched = views.reshape(call.ledger, mask, [*mask.shape, *(1 for _ in range(after))]) if after else mask
    single = replace(views.reshape(call.ledger, filling, []), parameter=None) if filling.ndim else filling
    (_, value, single), result = join_labels(call, [stretched, value, single], call.shape)
    if id(filling) not in call.zeros:
        call.ledger.equate(value.scale, single.scale)
    return replace(result, scale=value.scale)


def _put_at_points(call: Call, value: Value, values: Value, indices: list[Value | None], used: list[int]) -> Value:
    """Writes at points of several axes (or where a mask is true): these axes are pinned, the others stay as they are.

    ``z[i, :, j] = h`` of a ``z`` with the axes (rows, units, columns) and a list of points ``(i, j)``: what is written
    has the axes (points, units), those of the points first, since the indices are not side by side. Its units are tied
    to those of ``z``, whatever the points are.
    """
    ledger, kinds = call.ledger, call.dtypes.get("indices", [None] * len(indices))
    covered: list[int] = []  # axes of the value that are indexed: a mask covers as many as it has
    axis = before = 0
    for k, index in enumerate(indices):
        width = 1 if index is None or kinds[k] not in (torch.bool, torch.uint8) else index.ndim
        if index is not None:
            pin_tensor(call, index, "an index")
            covered += range(axis, axis + width)
        elif not covered:
            before += 1
        axis += width
    points = max(1 if kinds[k] in (torch.bool, torch.uint8) else indices[k].ndim for k in used)  # type: ignore[union-attr]
    kept = [k for k in range(value.ndim) if k not in covered]
    at = before if used == list(range(used[0], used[-1] + 1)) else 0
    arriving = views.pad_left(replace(values, parameter=None), len(kept) + points)
    for _ in range(points):
        arriving = views.drop(ledger, views.mix(ledger, arriving, at, "written by an index"), at)
    sizes = iter(arriving.shape)
    arriving = views.reshape(ledger, arriving, [1 if k in covered else next(sizes) for k in range(value.ndim)])
    target = replace(value, parameter=None)
    for k in covered:
        target = views.mix(ledger, target, k, "written to by an index")
    labels, reasons = list(target.labels), list(target.reasons)
    for k in kept:
        if arriving.shape[k] > 1:
            labels[k] = ledger.unify(labels[k], arriving.labels[k], reasons[k], arriving.reasons[k], k)
            reasons[k] = reasons[k] or arriving.reasons[k]
    scale = _combined(call, target, values, arriving.scale, linear=True)
    return replace(target, labels=tuple(labels), reasons=tuple(reasons), scale=scale)


@register_rule("block_diag")
def _block_diag(call: Call) -> Value:
    """Matrices along a diagonal: rows and columns one after the other, zeros (of any scale) elsewhere."""
    ledger = call.ledger
    blocks = [views.pad_left(v, 2) for v in call.tensors]
    rows, columns = ([views.in_full(v, axis) for v in blocks] for axis in (0, 1))
    simple = all(
        len(r) == 1 and r[0].shape[1] == 1 and len(c) == 1 and c[0].shape[0] == 1
        for r, c in zip(rows, columns, strict=True)
    )
    if not simple:
        return unknown(call)
    joint = (
        (np.concatenate([r[0] for r in rows], axis=0),),
        (np.concatenate([c[0] for c in columns], axis=1),),
    )
    labels: tuple[Label, ...] = tuple(label if (label[0] >= 0).any() else () for label in joint)
    scale: tuple[Term, ...] = ()
    if any(v.scale for v in blocks):
        own = [
            [tuple(t for t in v.scale if t[1].shape[1 - axis] == 1 and (t[1].shape[axis] > 1)) for v in blocks]
            for axis in (0, 1)
        ]
        plain = all(len(parts) <= 1 and all(c == 1.0 for c, _ in parts) for side in own for parts in side) and all(
            len(own[0][k]) + len(own[1][k]) == len(v.scale) for k, v in enumerate(blocks)
        )
        if plain:
            for axis in (0, 1):
                arrays = [
                    parts[0][1] if parts else np.zeros([v.shape[j] if j == axis else 1 for j in (0, 1)], dtype=np.int64)
                    for v, parts in zip(blocks, own[axis], strict=True)
                ]
                scale += ((1.0, np.concatenate(arrays, axis=axis)),)
        else:
            for value in blocks:
                ledger.pin_scale(value.scale)
    reasons = tuple(next((v.reasons[axis] for v in blocks if v.reasons[axis]), "") for axis in (0, 1))
    return Value(call.shape, labels, reasons, scale)


@register_rule("max_unpool2d", "max_unpool3d")
def _unpool(call: Call) -> Value:
    """Each channel at positions of its own in the image."""
    value, index = call["self"], call["indices"]
    space = 2 if call.operator.endswith("2d") else 3
    parts = []
    for part in (value, index):
        for axis in range(value.ndim - space, value.ndim):
            part = views.mix(call.ledger, part, axis, "spatial position")
        parts.append(replace(part, parameter=None))
    found = joined(call, parts, value.ndim - 1, (), "spatial position")
    return replace(found, shape=call.shape, scale=parts[0].scale)


@register_rule("diag_embed", "diag")
def _diagonal(call: Call) -> Value:
    """A vector along a diagonal: rows and columns are indexed by its units; or the diagonal of a matrix."""
    value: Value = call["self"]
    if call.operator == "aten.diag" and value.ndim == 2:
        return views.diagonal(call.ledger, value, 0, 1, int(call.get("diagonal", 0)))
    if call.get("offset", call.get("diagonal", 0)) != 0:
        return unknown(call)
    if len(call.shape) != value.ndim + 1 or call.get("dim1", -2) != -2 or call.get("dim2", -1) != -1:
        return unknown(call)
    last = value.ndim - 1
    rows = views.reshape(call.ledger, value, (*value.shape, 1))
    columns = views.reshape(call.ledger, value, (*value.shape[:-1], 1, value.shape[-1]))
    labels = (*rows.labels[:-1], columns.labels[-1])
    if not labels[last]:
        return replace(pinned_value(call.shape, value.reasons[last]), labels=labels, scale=rows.scale)
    return Value(call.shape, labels, (*rows.reasons[:-1], rows.reasons[last]), rows.scale)
