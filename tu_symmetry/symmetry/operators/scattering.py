"""Rules for writes at positions: scatter, index_add, index_put and their kin.

The axis is found as in look-ups (:mod:`~.indexing`); sums and extrema over what arrives do not depend on its order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Array, Label, Term, Value, along, moving, units_of
from tu_symmetry.symmetry.ledger import Ledger, Mark
from tu_symmetry.symmetry.operators.indexing import joined, meet, picked
from tu_symmetry.symmetry.operators.pointwise import join_labels
from tu_symmetry.symmetry.rules import Call, register_rule, unknown

SYMMETRIC = ("sum", "mean", "amax", "amin", "add")
MASKS = (torch.bool, torch.uint8)


def _combined(call: Call, value: Value, arriving: Value | float, terms: tuple[Term, ...], *, linear: bool) -> tuple:
    """The log-scale of what was written to, ``terms`` being that of what arrives: alike, but for zeros."""
    ledger = call.ledger
    if linear and (arriving.zero if isinstance(arriving, Value) else arriving == 0):
        return value.scale
    if linear and isinstance(arriving, Value):
        if call["self"].zero:
            return terms
        ledger.equate(value.scale, terms)
        return value.scale
    ledger.pin_scale(value.scale)
    ledger.pin_scale(terms)
    return ()


@register_rule("scatter", "scatter_add", signs="follow", positions="read")
@register_rule(
    "scatter_reduce", signs=lambda call: "follow" if call["reduce"] in ("sum", "mean") else "pin", positions="read"
)
def _scatter(call: Call) -> Value:
    value, index = call["self"], call["index"]
    given: Any = call.arguments.get("src", call.arguments.get("value"))
    ledger, axis = call.ledger, call.axis()
    whole = isinstance(given, Value) and given.shape != index.shape
    if whole or any(index.shape[k] < n for k, n in enumerate(value.shape) if k != axis):  # a part is written
        return unknown(call)
    reduce = "add" if call.name == "scatter_add" else call.get("reduce", "")
    target = meet(call.ledger, value, axis, index, "written to by position")
    label, reason = target.labels[axis], target.reasons[axis]
    arriving = [replace(part, points=()) for part in (index, given) if isinstance(part, Value)]
    if len(arriving) == 2 and reduce in SYMMETRIC:
        a, b = arriving
        ledger.unify(a.labels[axis], b.labels[axis], a.reasons[axis], b.reasons[axis])
    elif len(arriving) == 2 and not reduce and index.shape[axis] > 1:  # of two at one position, the last remains
        arriving = [views.mix(ledger, p, axis, "written in order") for p in arriving]
    parts = [views.drop(ledger, part, axis, keep=True) for part in (target, *arriving)]
    written = given if isinstance(given, Value) else float(given)
    terms = parts[2].scale if len(parts) > 2 else ()
    scale = _combined(call, parts[0], written, terms, linear=not reduce or reduce in SYMMETRIC)
    return replace(joined(call, parts, axis, label, reason), scale=scale)


@register_rule("index_add", positions="read", signs="follow")
def _index_add(call: Call) -> Value:
    axis, given = call.axis(), call["source"]
    target = meet(call.ledger, call["self"], axis, call["index"], "written to by position")
    return _arrived(call, target, given, axis, given, sums=True)


def overwritten(ledger: Ledger, value: Value, axis: int, positions: Array, given: Value) -> Value:
    """The value with other content at known positions: ``[u0, u1, u2]`` -> ``[u0, p, u2]`` with a new place p.

    Where zeros are written, units remain, told apart from the others: they may move among themselves.
    """
    size = value.shape[axis]
    kept = np.setdiff1d(np.arange(size), positions)
    label = value.labels[axis]
    if given.zero and len(label) == 1 and len(units_of([label])) == label[0].size:
        zeros = np.isin(np.arange(size), positions).astype(np.int64)
        ledger.marks.append(Mark(label[0], along(zeros, axis, value.ndim), "overwritten with zeros"))
        return Value(value.shape, value.labels, value.reasons, value.scale)
    gone = views.take(ledger, value, axis, positions)
    ledger.forget(gone, axis, "overwritten")
    places: Label = (along(ledger.fresh_places(len(positions)), axis, value.ndim),)
    if moving(given.labels[axis]):  # units that arrive
        places = given.labels[axis]
    given = replace(given.with_axis(axis, label=places), parameter=None)
    if not len(kept):
        return given
    rest = views.take(ledger, value, axis, kept)
    whole = views.concatenate(ledger, [replace(rest, parameter=None), given], axis)
    order = np.empty(size, dtype=np.int64)
    order[np.concatenate([kept, positions])] = np.arange(size)
    return views.take(ledger, whole, axis, order)


@register_rule("index_put", "_unsafe_index_put", positions="read", signs="follow")
def _index_put(call: Call) -> Value:
    value, values, ledger = call["self"], call["values"], call.ledger
    indices = list(call["indices"])
    constants, kinds = call.constants["indices"], call.dtypes.get("indices", [None] * len(indices))
    used = [k for k, i in enumerate(indices) if i is not None]
    accumulate = bool(call.get("accumulate", False))
    axis = used[0]
    single = len(used) == 1
    if single and not accumulate and math.prod(values.shape) == 1 and kinds[axis] in MASKS and constants[axis] is None:
        return _filled(call, value, values, indices[axis], axis)
    if not single or indices[axis].ndim != 1:
        return unknown(call)
    index = indices[axis]
    positions = picked(constants[axis], value.shape[axis])
    count = len(positions) if positions is not None else index.shape[0]
    source = views.expand(ledger, views.pad_left(values, value.ndim), value.with_axis(axis, size=count).shape)
    if values.zero:
        source = replace(source, scale=tuple((c, v.take([0], axis)) for c, v in value.scale))
    numbers = call.constants["values"]
    inverse = numbers is not None and numbers.ndim == 1 and numbers.tolist() == list(range(value.shape[0]))
    if inverse and value.ndim == 1 and moving(index.labels[0]) and value.fill is None:  # of an order of rows
        return Value(value.shape, ((),), ("",), points=index.labels[0])
    if positions is not None and not accumulate:
        return overwritten(ledger, value, axis, positions, source)
    target = meet(call.ledger, value, axis, index, "written to by position")
    if not accumulate:
        ledger.pin(replace(index, points=()), "an index")
    return _arrived(call, target, source, axis, values, sums=accumulate)


def _arrived(call: Call, target: Value, source: Value, axis: int, written: Value, *, sums: bool) -> Value:
    """What was written to at positions of an axis, each of which may have received any of what was written."""
    ledger = call.ledger
    index = call["index"] if "index" in call.arguments else call["indices"][axis]
    if index.ndim and sums:
        entries: Label = tuple(along(c.reshape(-1), axis, target.ndim) for c in index.labels[0])
        ledger.unify(source.labels[axis], entries, source.reasons[axis], index.reasons[0], axis)
    elif index.ndim:
        source = views.mix(ledger, source, axis, "written in order")
    parts = [views.drop(ledger, v, axis, keep=True) for v in (target, source)]
    found = joined(call, parts, axis, target.labels[axis], target.reasons[axis])
    return replace(found, scale=_combined(call, parts[0], written, parts[1].scale, linear=True))


def _filled(call: Call, value: Value, filling: Value, mask: Value, first: int) -> Value:
    """One number wherever a mask is true: ``h[h > 1] = 1.0`` as torch 2.11 traces it."""
    stretched = views.reshape(call.ledger, mask, (*mask.shape, *[1] * (value.ndim - first - mask.ndim)))
    single = replace(views.reshape(call.ledger, filling, ()), parameter=None)
    (_, value, single), result = join_labels(call.ledger, [stretched, value, single], call.shape)
    if not filling.zero:
        call.ledger.equate(value.scale, single.scale)
    return replace(result, scale=value.scale)


@register_rule("max_unpool2d", "max_unpool3d", signs="follow")
def _unpool(call: Call) -> Value:
    ndim, space = call["self"].ndim, 2 if call.name.endswith("2d") else 3
    parts = [
        views.mix(call.ledger, call[n], range(ndim - space, ndim), "spatial position") for n in ("self", "indices")
    ]
    return replace(joined(call, parts, ndim - 1, (), "spatial position"), scale=parts[0].scale)
