"""Rules for look-ups: gather, indexing, embeddings, one-hot vectors.

An index names positions. If it is known by value and names each position at most once, the units that it picks are
picked. If its entries are positions of units (``Value.points``, what ``argmax`` and ``topk`` return), looking up the
same units with them gives the same entries however the units are ordered: the two axes are tied, and nothing is pinned.
Any other index may pick any position, so that the axis that is looked up cannot move.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Term, Value, along, pinned_value
from tu_symmetry.symmetry.operators.rearranging import pin_tensor
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


def meet(call: Call, value: Value, axis: int, index: Value, reason: str) -> Value:
    """The value before an operator that finds positions along an axis by an index: tied to what the index names.

    What remains does not depend on the axis; only its label tells whether it may still move.
    """
    points = index.points
    if points and points[0].size == value.shape[axis] and value.labels[axis]:
        laid = tuple(along(c, axis, value.ndim) for c in points)
        label = call.ledger.unify(value.labels[axis], laid, value.reasons[axis], reason)
        value = replace(value.with_axis(axis, label=label), parameter=None)
        return call.ledger.alike_along(views.unnest(call.ledger, value, axis), axis)
    call.ledger.pin_label(points, reason)
    return views.mix(call.ledger, value, axis, reason)


def picked(constant: object, size: int) -> np.ndarray | None:
    """The positions that a constant index names, if there is one axis of them and each is named at most once."""
    if not isinstance(constant, torch.Tensor) or constant.ndim != 1 or constant.is_floating_point():
        return None
    if constant.dtype == torch.bool:
        return np.flatnonzero(constant.cpu().numpy())
    positions = constant.cpu().numpy().astype(np.int64)
    positions = np.where(positions < 0, positions + size, positions)
    return positions if len(np.unique(positions)) == len(positions) else None


def look_up(call: Call, value: Value, axis: int, index: Value, reason: str) -> Value:
    """Replace an axis by the axes of an index."""
    value = meet(call, value, axis, index, reason)
    row = views.drop(call.ledger, value, axis)
    width = index.ndim
    frame = (*row.shape[:axis], *[1] * width, *row.shape[axis:])
    shape = (*row.shape[:axis], *index.shape, *row.shape[axis:])
    laid = views.reshape(call.ledger, row, frame)
    labels, reasons = list(laid.labels), list(laid.reasons)
    spread = (1,) * axis, (1,) * (row.ndim - axis)
    for k in range(width):
        labels[axis + k] = tuple(c.reshape(spread[0] + c.shape + spread[1]) for c in index.labels[k])
        reasons[axis + k] = index.reasons[k] or "indexed"
    return Value(shape, tuple(labels), tuple(reasons), laid.scale)


@register_rule("embedding", positions="read", traits=("picks",))
def _embedding(call: Call) -> Value:
    positions = picked(call.constants.get("indices"), call["weight"].shape[0])
    if positions is not None:
        return views.take(call.ledger, call["weight"], 0, positions)
    return look_up(call, call["weight"], 0, call["indices"], "rows are looked up")


@register_rule("index_select", positions="read", traits=("picks",))
def _index_select(call: Call) -> Value:
    value, index, axis = call["self"], call["index"], call.axis()
    positions = picked(call.constants.get("index"), value.shape[axis])
    if positions is not None:
        return views.take(call.ledger, value, axis, positions)
    if not index.ndim:
        index = replace(index, shape=(1,), labels=((),), reasons=("indexed",))
    return look_up(call, value, axis, index, "indexed")


@register_rule("index", "_unsafe_index", positions="read", traits=("picks",))
def _index(call: Call) -> Value:
    value: Value = call["self"]
    indices = list(call["indices"])
    kinds = call.dtypes.get("indices", [None] * len(indices))
    used = [k for k, i in enumerate(indices) if i is not None]
    if len(used) == 1:
        (axis,) = used
        positions = picked(call.constants["indices"][axis], value.shape[axis])
        if positions is not None:
            return views.take(call.ledger, value, axis, positions)
        if kinds[axis] != torch.bool:
            return look_up(call, value, axis, indices[axis], "indexed")
    if any(kinds[k] == torch.bool for k in used):
        return _masked(call, value, indices, used)
    for k in used:
        pin_tensor(call, indices[k], "an index")
        value = views.mix(call.ledger, value, k, "indexed")
    width = max(indices[k].ndim for k in used)
    contiguous = used == list(range(used[0], used[-1] + 1))
    at = used[0] if contiguous else 0
    kept = [k for k in range(value.ndim) if k not in used]
    # bring the kept axes into a frame without the indexed ones, then insert the index's own (pinned) axes
    source = views.permute(value, [*kept, *used])
    for _ in used:
        source = views.drop(call.ledger, source, source.ndim - 1)
    return _inserted(call, source, at, width)


def _masked(call: Call, value: Value, indices: list[Value | None], used: list[int]) -> Value:
    """Where a mask is true: its axes become one, of a length that only values tell."""
    if len(used) > 1:
        return unknown(call)
    (axis,) = used
    mask = indices[axis]
    assert mask is not None
    pin_tensor(call, mask, "a mask")
    for _ in range(mask.ndim):
        value = views.drop(call.ledger, views.mix(call.ledger, value, axis, "chosen by a mask"), axis)
    return _inserted(call, value, axis, 1)


def _inserted(call: Call, source: Value, at: int, width: int) -> Value:
    frame = (*source.shape[:at], *[1] * width, *source.shape[at:])
    result = views.reshape(call.ledger, source, frame)
    reasons = (*result.reasons[:at], *("indexed",) * width, *result.reasons[at + width :])
    return replace(result, shape=call.shape, reasons=reasons, parameter=None)


def joined(call: Call, values: list[Value], axis: int, label: Label, reason: str) -> Value:
    """Labels of tensors that agree on all axes but one, which is given."""
    first, *rest = values
    labels, reasons = list(first.labels), list(first.reasons)
    for k in range(first.ndim):
        for value in rest:
            if k != axis and value.shape[k] > 1:
                if first.shape[k] == 1:
                    labels[k], reasons[k] = value.labels[k], value.reasons[k]
                else:
                    labels[k] = call.ledger.unify(labels[k], value.labels[k], reasons[k], value.reasons[k])
                    reasons[k] = reasons[k] or value.reasons[k]
    labels[axis], reasons[axis] = label, reason
    return Value(call.shape, tuple(labels), tuple(reasons))


@register_rule("gather", "take_along_dim", positions="read", traits=("picks",))
def _gather(call: Call) -> Value:
    value, index = call["self"], call.get("index", call.get("indices"))
    dim = call.arguments.get("dim")
    if dim is None or not value.ndim:
        return unknown(call)
    axis = dim % value.ndim
    value = meet(call, value, axis, index, "gathered")
    for k in range(value.ndim):
        if k != axis and 1 < index.shape[k] < value.shape[k]:
            value = views.take(call.ledger, value, k, np.arange(index.shape[k]))
        elif k != axis and call.operator == "aten.gather" and index.shape[k] < value.shape[k]:
            value = views.take(call.ledger, value, k, np.arange(1))
    scale = value.scale
    row = views.drop(call.ledger, replace(value, labels=value.labels), axis, keep=True)
    found = joined(call, [row, index], axis, index.labels[axis], index.reasons[axis])
    return replace(found, scale=scale)


@register_rule("one_hot", positions="read")
def _one_hot(call: Call) -> Value:
    """A last axis that the entries name."""
    index: Value = call["self"]
    laid = views.reshape(call.ledger, replace(index, points=()), (*index.shape, 1))
    label: Label = ()
    if index.points and index.points[0].size == call.shape[-1]:
        label = tuple(along(c, laid.ndim - 1, laid.ndim) for c in index.points)
    else:
        call.ledger.pin_label(index.points, "one-hot vectors of another length")
    return replace(laid, shape=call.shape, labels=(*laid.labels[:-1], label), reasons=(*laid.reasons[:-1], "one-hot"))


@register_rule("bincount", positions="read")
def _bincount(call: Call) -> Value:
    index, weights = call["self"], call.get("weights")
    ledger = call.ledger
    label: Label = ()
    if index.points and index.points[0].size == call.shape[0]:
        label = index.points
    else:
        ledger.pin_label(index.points, "counted by position")
    scale: tuple[Term, ...] = ()
    if weights is not None:
        ledger.unify(index.labels[0], weights.labels[0], index.reasons[0], weights.reasons[0])
        scale = ledger.alike_along(weights, 0).scale
    return replace(pinned_value(call.shape, "counted by position"), labels=(label,), scale=scale)
