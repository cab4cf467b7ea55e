"""Rules for normalizations: what they undo, and what they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, along, pinned_value
from tu_symmetry.symmetry.operators.pointwise import gained, join_labels, mean_square, times
from tu_symmetry.symmetry.rules import RULES, Call, register_rule


def _absorb(call: Call, value: Value, eps: float | None) -> Value:
    """After a normalization the scale of its input is gone, with an epsilon up to that; its sign is not."""
    if call.ledger.signs:
        return replace(value, parameter=None)
    if eps is None or eps > 0:
        call.ledger.approximate(value)
    return replace(value, scale=(), parameter=None)


def _affine(call: Call, value: Value, axes: Sequence[int]) -> Value:
    ledger = call.ledger
    for name in ("weight", "bias"):
        operand: Value | None = call.get(name)
        if operand is None:
            continue
        sizes = dict(zip(axes, operand.shape, strict=True))
        laid = views.reshape(ledger, operand, [sizes.get(k, 1) for k in range(value.ndim)])
        labels = list(value.labels)
        for axis in axes:
            reasons = value.reasons[axis], laid.reasons[axis]
            labels[axis] = ledger.unify(labels[axis], laid.labels[axis], *reasons, axis, labels)
        value = replace(value, labels=tuple(labels))
        if name == "weight":
            value = replace(value, scale=(*value.scale, *laid.scale))
            if ledger.signs and value.scale:
                value = replace(value, scale=((1.0, views.single(ledger, value)),))
        else:
            ledger.equate(laid.scale, value.scale)
    return value


@register_rule(
    "batch_norm instance_norm _native_batch_norm_legit native_batch_norm cudnn_batch_norm "
    "_native_batch_norm_legit_no_training",
    traits=("distinct",),
    signs="follow",
)
def _batch_norm(call: Call) -> list[Value]:
    value: Value = call["input"]
    ledger = call.ledger
    mean = call.get("running_mean")
    if "instance" in call.name:  # a mean over all positions of an image
        value = views.unnest(ledger, value, *range(2, value.ndim))
    label = views.channel(ledger, replace(value, scale=()), 1).labels[0]
    value = ledger.alike_along(value, *(axis for axis in range(value.ndim) if axis != 1))
    flat = tuple((c, v.reshape(-1) if v.size > 1 else np.repeat(v.reshape(-1), value.shape[1])) for c, v in value.scale)
    for statistic, power in ((mean, 1.0), (call.get("running_var"), 2.0)):
        if statistic is not None:
            label = ledger.unify(label, statistic.labels[0], value.reasons[1], "")
            if ledger.fresh(statistic) or power == 1.0 or ledger.signs:
                ledger.rescale(statistic, times(flat, power))
    if mean is not None:
        value = value.with_axis(1, label=tuple(along(c, 1, value.ndim) for c in label))
    return [_affine(call, _absorb(call, value, call.get("eps")), [1])] * len(call.outputs)


def _turned(call: Call) -> list[Value]:
    """Orthogonal matrices keep the mean square; those that leave the vector of ones where it is keep the mean too."""
    value: Value = call["input"]
    ledger, axis = call.ledger, value.ndim - 1
    value = mean_square(call, value, [axis] if len(call["normalized_shape"]) == 1 else [])
    if "layer" in call.name:
        ledger.meet(value)
    if isinstance(weight := call.get("weight"), Value):
        value = gained(call, value, weight)
    if isinstance(bias := call.get("bias"), Value):
        added = RULES["aten.add"](replace(call, operator="aten.add", arguments={"self": value, "other": bias}))
        return [added] * len(call.outputs)  # type: ignore[list-item]
    return [value] * len(call.outputs)


@register_rule(
    "layer_norm",
    "rms_norm",
    "native_layer_norm",
    "_fused_rms_norm",
    traits=("distinct",),
    signs="follow",
    linear=_turned,
)
def _layer_norm(call: Call) -> list[Value]:
    """Each entry depends on all along the normalized axes, so that no other axis may be nested in them."""
    value: Value = call["input"]
    axes = list(range(value.ndim - len(call["normalized_shape"]), value.ndim))
    if not (call.ledger.signs and "rms" in call.name):  # a mean of squares sees no sign
        value = call.ledger.alike_along(value, *axes)
    inner = _absorb(call, value, call.get("eps"))
    return [_affine(call, views.unnest(call.ledger, inner, *axes), axes)] * len(call.outputs)


@register_rule("group_norm", "native_group_norm", traits=("distinct",), signs="follow")
def _group_norm(call: Call) -> list[Value]:
    value: Value = call["input"]
    ledger = call.ledger
    groups = int(call.get("num_groups", call.get("group", 1)))
    n, channels, *space = value.shape
    value = ledger.alike_along(views.unnest(ledger, value, *range(1, value.ndim)), *range(2, value.ndim))
    blocks = views.reshape(ledger, value, (n, groups, channels // groups, *space))
    ledger.observe(blocks)
    ledger.alike_along(blocks, 2)
    if call.used - {0}:
        ledger.pin(value, "statistics of groups are read")
    result = _affine(call, _absorb(call, value, call.get("eps")), [1])
    return [result, *(pinned_value(shape, "statistics of groups") for shape in call.outputs[1:])]


@register_rule("_weight_norm", "_weight_norm_interface", signs="follow")
def _weight_norm(call: Call) -> list[Value]:
    value, gain = call["v"], call["g"]
    axis = int(call.get("dim", 0))
    if call.ledger.signs:
        (value, gain), joined = join_labels(call.ledger, [value, gain], value.shape)
        return [replace(joined, scale=(*value.scale, *gain.scale))] * len(call.outputs)
    if axis == -1:  # one norm for all entries, whose one factor is left
        value = call.ledger.alike_along(value, *range(value.ndim))
    for term in value.scale[axis == -1 :]:
        if term[1].shape[axis] == 1:  # a factor on all of v is what its own axis offers already
            call.ledger.pin_scale((term,))
    (_, gain), joined = join_labels(call.ledger, [value, gain], value.shape)
    return [replace(joined, scale=gain.scale)] * len(call.outputs)


@register_rule("cosine_similarity", signs="follow")
def _cosine(call: Call) -> Value:
    """Symmetric in the axis that is summed over; the scales of both sides are not seen."""
    ledger, sides = call.ledger, [call["x1"], call["x2"]]
    aligned, result = join_labels(ledger, sides, np.broadcast_shapes(*(v.shape for v in sides)))
    axis = call.axis(of=result, default=1)
    if ledger.signs:
        ledger.equate(*(value.scale for value in aligned))
        return views.drop(ledger, result, axis)
    for value in aligned:
        _absorb(call, ledger.alike_along(value, axis), call.get("eps", 1e-8))
    return views.drop(ledger, result, axis)
