"""Rules for what orders entries: their values as a set, and their positions, which are renamed when units move.

Positions carry the axis's label (``Value.points``) until a look-up undoes the renaming, or any other operator pins.
"""

from __future__ import annotations

from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Value, among, moving, nested_in, pinned_value, units_of
from tu_symmetry.symmetry.rules import Call, register_rule


def where(call: Call, value: Value, like: Value, axis: int, output: int = 1) -> Value:
    """The output with positions along ``axis`` of ``value``; its own axes are those of ``like``.

    Units are pinned where they differ from block to block (one list cannot name them) or where entries may be equal.
    """
    points: Label = ()
    label = value.labels[axis]
    if output in call.used and moving(label):
        units = units_of([label])
        if nested_in(label, axis) or not among(units, call.apart.get(id(value), units[:0])).all():
            reason = "positions are returned, and which unit comes first depends on the order of units"
            call.ledger.pin_label(label, reason)
        else:
            points = tuple(c.reshape(-1) for c in label)
    return replace(like, scale=(), parameter=None, points=points)


@register_rule("sort", "topk", "msort", "argsort")
def _sort(call: Call) -> list[Value]:
    """Positions along the axis are ranks now."""
    value: Value = call["self"]
    if not value.ndim:
        return [value] * len(call.outputs)
    axis = 0 if call.name == "msort" else call.axis(default=-1)
    ranked = views.drop(call.ledger, value, axis, keep=True).with_axis(axis, reason="positions are ranks")
    ranked = replace(ranked, shape=call.shape)
    if call.name == "argsort":
        return [where(call, value, ranked, axis, output=0)]
    return [ranked, where(call, value, ranked, axis)][: len(call.outputs)]


@register_rule("kthvalue", "mode")
def _kth(call: Call) -> list[Value]:
    value, axis = call["self"], call.axis(default=-1)
    found = views.drop(call.ledger, value, axis, keep=bool(call.get("keepdim", False)))
    return [found, where(call, value, found, axis)]


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


@register_rule("nonzero", "nonzero_numpy", "argwhere", "torchvision.nms")
def _nonzero(call: Call) -> list[Value]:
    """Positions along every axis (of boxes, whose sizes count), in order."""
    reason = "positions are returned in order"
    for value in call.tensors:
        call.ledger.pin(value if call.name == "torchvision.nms" else replace(value, scale=()), reason)
    return [pinned_value(shape, reason) for shape in call.outputs]
