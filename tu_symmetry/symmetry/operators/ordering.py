"""Rules for what orders entries: their values as a set, and their positions, which are renamed when units move.

The largest entries along an axis, sorted, are a symmetric function of the units of that axis: they have ranks for
positions, and nothing is pinned. Where they stood is another matter. The integers that ``argmax`` returns are positions
of units; under a permutation of these the integers change. They carry the axis's label (``Value.points``) until they
are read: by an operator that looks up the same axis with them (see :mod:`~.indexing`), which undoes the change, or by
any other, which pins the units. Positions that nothing reads demand nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Value, among, pinned_value
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


def named(call: Call, value: Value, axis: int) -> Label:
    """The label of an axis for use in ``Value.points``; pinned where positions are no function of the units alone.

    Units that differ from block to block cannot be named by one list. Entries that may be equal (zeros behind a ReLU)
    leave it to their order which of them comes first.
    """
    label = value.labels[axis]
    if not any((c >= 0).any() for c in label):
        return ()
    nested = any(n > 1 for c in label for k, n in enumerate(c.shape) if k != axis)
    units = np.concatenate([c[c >= 0] for c in label])
    if nested or not among(units, call.apart.get(id(value), units[:0])).all():
        call.ledger.pin_label(label, "positions are returned, and which unit comes first depends on the order of units")
        return ()
    return tuple(c.reshape(-1) for c in label)


def where(call: Call, value: Value, like: Value, axis: int, output: int = 1) -> Value:
    """The output with positions along ``axis`` of ``value``; its own axes are those of ``like``."""
    points = named(call, value, axis) if output in call.used else ()
    return replace(like, scale=(), parameter=None, points=points)


def _ranked(call: Call, value: Value, axis: int) -> Value:
    """The entries in order: positions along the axis are ranks now."""
    ranked = views.drop(call.ledger, value, axis, keep=True).with_axis(axis, reason="positions are ranks")
    return replace(ranked, shape=call.shape)


@register_rule("sort", "topk", "msort")
def _sort(call: Call) -> list[Value]:
    value: Value = call["self"]
    if not value.ndim:
        return [value] * len(call.outputs)
    axis = 0 if call.operator == "aten.msort" else call.axis(default=-1)
    ranked = _ranked(call, value, axis)
    return [ranked, where(call, value, ranked, axis)][: len(call.outputs)]


@register_rule("argsort")
def _argsort(call: Call) -> Value:
    value: Value = call["self"]
    axis = call.axis(default=-1)
    return where(call, value, _ranked(call, value, axis), axis, output=0)


@register_rule("kthvalue", "mode")
def _kth(call: Call) -> list[Value]:
    value: Value = call["self"]
    axis = call.axis(default=-1)
    found = replace(views.drop(call.ledger, value, axis, keep=bool(call.get("keepdim", False))), parameter=None)
    return [found, where(call, value, found, axis)]


@register_rule("quantile", "nanquantile")
def _quantile(call: Call) -> Value:
    """Linear in sorted entries; several quantiles stand along a new first axis."""
    value, levels = call["self"], call["q"]
    if isinstance(levels, Value):
        call.ledger.pin(levels, "quantiles")
    dim = call.arguments.get("dim")
    keep = bool(call.get("keepdim", False))
    axes = range(value.ndim) if dim is None else [dim % value.ndim]
    value = views.drop(call.ledger, value, axes, keep=keep)
    extra = len(call.shape) - value.ndim
    laid = views.pad_left(value, len(call.shape))
    return replace(laid, shape=call.shape, reasons=("quantiles",) * extra + value.reasons, parameter=None)


@register_rule("argmax", "argmin")
def _argmax(call: Call) -> Value:
    value: Value = call["self"]
    dim = call.arguments.get("dim")
    if dim is None:  # a position in the flattened tensor
        call.ledger.pin(value, "a position is returned")
        return pinned_value(call.shape, "a position is returned")
    axis = dim % max(value.ndim, 1)
    found = views.drop(call.ledger, value, axis, keep=bool(call.get("keepdim", False)))
    return where(call, value, found, axis, output=0)


@register_rule("nonzero", "nonzero_numpy", "argwhere")
def _nonzero(call: Call) -> list[Value]:
    """Positions along every axis, in order."""
    value = replace(call["self"], scale=())
    call.ledger.pin(value, "positions are returned in order")
    return [pinned_value(shape, "positions are returned in order") for shape in call.outputs]


@register_rule("searchsorted")
def _search(call: Call) -> Value:
    """How many of a sorted list are smaller: entry by entry in what is searched for, of the list as a whole."""
    found, listed = call["self"], call["sorted_sequence"]
    for value in (found, listed):
        if isinstance(value, Value):
            call.ledger.pin_scale(value.scale)
    if isinstance(call.get("sorter"), Value):
        call.ledger.pin(call["sorter"], "an order")
    listed = views.mix(call.ledger, listed, listed.ndim - 1, "a sorted list")
    if not isinstance(found, Value):
        return pinned_value(call.shape, "a number is searched for")
    if listed.ndim > 1:
        for axis in range(listed.ndim - 1):
            reasons = listed.reasons[axis], found.reasons[axis]
            label = call.ledger.unify(listed.labels[axis], found.labels[axis], *reasons)
            found = found.with_axis(axis, label=label)
    return replace(found, scale=(), parameter=None)


@register_rule("isin")
def _isin(call: Call) -> Value:
    """Membership in a set, whatever its order."""
    elements, among = call.get("elements"), call.get("test_elements")
    for value in (elements, among):
        if isinstance(value, Value):
            call.ledger.pin_scale(value.scale)
    if isinstance(among, Value):
        views.drop(call.ledger, among, range(among.ndim))
    if not isinstance(elements, Value):
        return pinned_value(call.shape, "a number is searched for")
    return replace(elements, scale=(), parameter=None)


@register_rule("_unique2", "unique_dim", "unique_consecutive")
def _unique(call: Call) -> list[Value]:
    """The sorted set of all entries, and for each entry its rank in it."""
    value: Value = call["self"]
    if call.operator != "aten._unique2" or not call.get("sorted", True):
        return unknown(call)
    flat, reason = views.drop(call.ledger, value, range(value.ndim)), "entries as a set"
    terms = tuple((c, v.reshape((1,))) for c, v in flat.scale)
    listed = replace(pinned_value(call.outputs[0], reason), scale=terms)
    ranks = replace(value, scale=(), parameter=None)
    if ranks.shape != call.outputs[1]:
        ranks = pinned_value(call.outputs[1], reason)
    return [listed, ranks, pinned_value(call.outputs[2], reason)]
