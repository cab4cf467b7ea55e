"""Rules for normalizations: what they undo, and what they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, along, pinned_value
from tu_symmetry.symmetry.operators.pointwise import join_labels, times
from tu_symmetry.symmetry.rules import Call, register_rule


def _absorb(call: Call, value: Value, eps: float | None) -> Value:
    """After a normalization the scale of its input is gone; with an epsilon, up to that."""
    if eps is None or eps > 0:
        call.ledger.inexact += [v for _, v in value.scale]
    return replace(value, scale=(), parameter=None)


def _affine(call: Call, value: Value, weight: Value | None, bias: Value | None, axes: Sequence[int]) -> Value:
    """Multiply by a weight and add a bias that lie along the given axes."""
    for operand, multiply in ((weight, True), (bias, False)):
        if operand is None:
            continue
        frame = [1] * value.ndim
        for axis, n in zip(axes, operand.shape, strict=True):
            frame[axis] = n
        laid = views.reshape(call.ledger, operand, frame)
        labels = list(value.labels)
        for axis in axes:
            labels[axis] = call.ledger.unify(
                labels[axis], laid.labels[axis], value.reasons[axis], laid.reasons[axis], axis, labels
            )
        if multiply:
            value = replace(value, labels=tuple(labels), scale=(*value.scale, *laid.scale))
        else:
            call.ledger.equate(laid.scale, value.scale)
            value = replace(value, labels=tuple(labels))
            if weight is None:
                call.ledger.pin_scale(laid.scale)
    return value


@register_rule(
    "batch_norm instance_norm _native_batch_norm_legit native_batch_norm cudnn_batch_norm "
    "_native_batch_norm_legit_no_training",
    traits=("distinct",),
)
def _batch_norm(call: Call) -> Value | list[Value]:
    value: Value = call["input"]
    ledger = call.ledger
    mean, variance = call.get("running_mean"), call.get("running_var")
    if "instance" in call.operator:  # a mean over all positions of an image
        value = views.unnest(ledger, value, *range(2, value.ndim))
    label, _ = views.channel(ledger, replace(value, scale=()), 1)
    value = ledger.alike_along(value, *(axis for axis in range(value.ndim) if axis != 1))
    flat = tuple((c, v.reshape(-1) if v.size > 1 else np.repeat(v.reshape(-1), value.shape[1])) for c, v in value.scale)
    for statistic, power in ((mean, 1.0), (variance, 2.0)):
        if statistic is not None:
            label = ledger.unify(label, statistic.labels[0], value.reasons[1], "")
            target = times(flat, power)
            if statistic.parameter is not None and statistic.parameter not in ledger.used:
                ledger.rescale(statistic, target)
            elif power == 1.0:
                ledger.equate(statistic.scale, target)
    if mean is not None:
        laid = tuple(along(c, 1, value.ndim) for c in label)
        value = replace(value, labels=(value.labels[0], laid, *value.labels[2:]))
    inner = _absorb(call, value, call.get("eps"))
    result = _affine(call, inner, call.get("weight"), call.get("bias"), [1])
    return [result] * len(call.outputs)


@register_rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm", traits=("distinct",))
def _layer_norm(call: Call) -> Value | list[Value]:
    """Each entry depends on all along the normalized axes, so that no other axis may be nested in them."""
    value: Value = call["input"]
    axes = list(range(value.ndim - len(call["normalized_shape"]), value.ndim))
    value = call.ledger.alike_along(value, *axes)
    inner = views.unnest(call.ledger, _absorb(call, value, call.get("eps")), *axes)
    result = _affine(call, inner, call.get("weight"), call.get("bias"), axes)
    return [result] * len(call.outputs)


@register_rule("group_norm", "native_group_norm", traits=("distinct",))
def _group_norm(call: Call) -> Value | list[Value]:
    value: Value = call["input"]
    ledger = call.ledger
    groups = int(call.get("num_groups", call.get("group", 1)))
    n, channels, *space = value.shape
    value = views.unnest(ledger, value, *range(1, value.ndim))
    value = ledger.alike_along(value, *range(2, value.ndim))
    blocks = views.reshape(ledger, value, (n, groups, channels // groups, *space))
    ledger.observe(blocks)
    ledger.alike_along(blocks, 2)
    inner = _absorb(call, value, call.get("eps"))
    result = _affine(call, inner, call.get("weight"), call.get("bias"), [1])
    if len(call.outputs) == 1:
        return result
    if call.used - {0}:
        call.ledger.pin(value, "statistics of groups are read")
    return [result, *(pinned_value(shape, "statistics of groups") for shape in call.outputs[1:])]


@register_rule("_weight_norm", "_weight_norm_interface")
def _weight_norm(call: Call) -> Value | list[Value]:
    value, gain = call["v"], call["g"]
    axis = int(call.get("dim", 0))
    if axis == -1:  # one norm for all entries
        value = call.ledger.alike_along(value, *range(value.ndim))
    for term in value.scale[axis == -1 :]:
        if axis == -1 or term[1].shape[axis] == 1:  # a factor on all of v is what its own axis offers already
            call.ledger.pin_scale((term,))
    (_, gain), joined = join_labels(call, [value, gain], value.shape)
    return [replace(joined, scale=gain.scale)] * len(call.outputs)


@register_rule("cosine_similarity")
def _cosine(call: Call) -> Value:
    """Scales of both sides are gone; symmetric in the axis that is summed over."""
    ledger = call.ledger
    aligned, result = join_labels(
        call, [call["x1"], call["x2"]], np.broadcast_shapes(call["x1"].shape, call["x2"].shape)
    )
    axis = call.axis(of=result, default=1)
    for value in aligned:
        _absorb(call, ledger.alike_along(value, axis), call.get("eps", 1e-8))
    return views.drop(ledger, result, axis)


@register_rule("pairwise_distance")
def _pairwise(call: Call) -> Value:
    ledger = call.ledger
    shape = np.broadcast_shapes(call["x1"].shape, call["x2"].shape)
    aligned, result = join_labels(call, [call["x1"], call["x2"]], shape)
    ledger.equate(aligned[0].scale, aligned[1].scale)
    if call.get("eps", 1e-6) > 0:
        ledger.inexact += [v for _, v in aligned[0].scale]
    return views.drop(
        ledger, replace(result, scale=aligned[0].scale), result.ndim - 1, keep=bool(call.get("keepdim", False))
    )
