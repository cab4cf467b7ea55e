"""Rules for look-ups: gather, indexing, embeddings, one-hot vectors.

An index that is known by value picks units; one of positions of units (``Value.points``) ties; any other pins the axis.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Value, along
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


def meet(ledger: Ledger, value: Value, axis: int, index: Value, reason: str) -> Value:
    """The value before a look-up along an axis, which is tied to what the index names; nothing else depends on it."""
    points = index.points
    if points and points[0].size == value.shape[axis] and value.labels[axis]:
        laid = tuple(along(c, axis, value.ndim) for c in points)
        label = ledger.unify(value.labels[axis], laid, value.reasons[axis], reason)
        value = replace(value.with_axis(axis, label=label), parameter=None)
        return ledger.alike_along(views.unnest(ledger, value, axis), axis)
    ledger.pin_label(points, reason)
    return views.mix(ledger, value, axis, reason)


def picked(constant: object, size: int) -> np.ndarray | None:
    """The positions that a constant index names, if there is one axis of them and each is named at most once."""
    if not isinstance(constant, torch.Tensor) or constant.ndim != 1 or constant.is_floating_point():
        return None
    if constant.dtype == torch.bool:
        return np.flatnonzero(constant.cpu().numpy())
    positions = constant.cpu().numpy().astype(np.int64)
    positions = np.where(positions < 0, positions + size, positions)
    return positions if len(np.unique(positions)) == len(positions) else None


@register_rule("embedding", positions="read", traits=("picks",))
def _embedding(call: Call) -> Value:
    return _look_up(call, call["weight"], 0, call["indices"], call.constants.get("indices"), "rows are looked up")


@register_rule("index_select", positions="read", traits=("picks",))
def _index_select(call: Call) -> Value:
    return _look_up(call, call["self"], call.axis(), call["index"], call.constants.get("index"), "indexed")


def _look_up(call: Call, value: Value, axis: int, index: Value, constant: object, reason: str) -> Value:
    positions = picked(constant, value.shape[axis])
    if positions is not None:
        return views.take(call.ledger, value, axis, positions)
    row = views.drop(call.ledger, meet(call.ledger, value, axis, index, reason), axis)
    laid = _inserted(call, row, axis, index.ndim)
    before, after = (1,) * axis, (1,) * (row.ndim - axis)
    for k, label in enumerate(index.labels):
        own = tuple(c.reshape(before + c.shape + after) for c in label)
        laid = laid.with_axis(axis + k, label=own, reason=index.reasons[k] or "indexed")
    return laid


@register_rule("index", "_unsafe_index", positions="read", traits=("picks",))
def _index(call: Call) -> Value:
    value: Value = call["self"]
    indices = list(call["indices"])
    masks = [kind == torch.bool for kind in call.dtypes.get("indices", [None] * len(indices))]
    used = [k for k, i in enumerate(indices) if i is not None]
    axis = used[0]
    if len(used) == 1:
        constant = call.constants["indices"][axis]
        if not masks[axis] or picked(constant, value.shape[axis]) is not None:
            return _look_up(call, value, axis, indices[axis], constant, "indexed")
    if any(masks[k] for k in used) and len(used) > 1:
        return unknown(call)
    width = max(1 if masks[k] else indices[k].ndim for k in used)
    contiguous = used == list(range(axis, used[-1] + 1))
    for k in used:
        call.ledger.pin(indices[k], "an index")
    if masks[axis]:  # it covers as many axes as it has
        used = list(range(axis, axis + indices[axis].ndim))
    value = views.mix(call.ledger, value, used, "indexed")
    kept = [k for k in range(value.ndim) if k not in used]
    source = views.permute(value, [*kept, *used])
    for _ in used:
        source = views.drop(call.ledger, source, source.ndim - 1)
    return _inserted(call, source, axis if contiguous else 0, width)


def _inserted(call: Call, source: Value, at: int, width: int) -> Value:
    frame = (*source.shape[:at], *[1] * width, *source.shape[at:])
    result = views.reshape(call.ledger, source, frame)
    reasons = (*result.reasons[:at], *("indexed",) * width, *result.reasons[at + width :])
    return replace(result, shape=call.shape, reasons=reasons, parameter=None)


def joined(call: Call, values: list[Value], axis: int, label: Label, reason: str) -> Value:
    """Labels of tensors that agree on all axes but one, which is given."""
    found = views.together(call.ledger, values, [k for k in range(values[0].ndim) if k != axis])
    return replace(found, shape=call.shape).with_axis(axis, label=label, reason=reason)


@register_rule("gather", "take_along_dim", positions="read", traits=("picks",))
def _gather(call: Call) -> Value:
    value, index = call["self"], call.get("index", call.get("indices"))
    if call.get("dim") is None:
        return unknown(call)
    axis = call.axis()
    if call.name == "gather" and any(index.shape[k] < n for k, n in enumerate(value.shape) if k != axis):  # a part
        return unknown(call)
    value = meet(call.ledger, value, axis, index, "gathered")
    row = views.drop(call.ledger, value, axis, keep=True)
    return replace(joined(call, [row, index], axis, index.labels[axis], index.reasons[axis]), scale=value.scale)


@register_rule("one_hot", positions="read")
def _one_hot(call: Call) -> Value:
    index: Value = call["self"]
    laid = views.reshape(call.ledger, replace(index, points=()), (*index.shape, 1))
    points = index.points
    if points and points[0].size != call.shape[-1]:
        call.ledger.pin_label(points, "one-hot vectors of another length")
        points = ()
    label = tuple(along(c, laid.ndim - 1, laid.ndim) for c in points)
    return replace(laid, shape=call.shape, labels=(*laid.labels[:-1], label), reasons=(*laid.reasons[:-1], "one-hot"))
