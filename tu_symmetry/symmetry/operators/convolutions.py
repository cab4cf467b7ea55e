"""Rules for convolutions, pooling and resampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, pinned_value
from tu_symmetry.symmetry.operators.contractions import add_bias, contract
from tu_symmetry.symmetry.operators.pointwise import is_fresh
from tu_symmetry.symmetry.operators.rearranging import pin_tensor
from tu_symmetry.symmetry.rules import Call, register_rule


@register_rule(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    traits=("spreads",),
)
def _conv(call: Call) -> Value:
    value, weight = call["input"], call["weight"]
    ledger = call.ledger
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    groups = int(call.get("groups", 1))
    space = weight.ndim - 2
    batched = value.ndim == space + 2
    axis = 1 if batched else 0
    whole = [j for j in range(space) if groups == 1 and not transposed and _reads_whole(call, value, weight, axis, j)]
    if whole:
        return _folded(call, value, weight, axis, whole[0])
    if groups == 1 and _reads_single_positions(call, value, weight, axis):
        return _pointwise(call, value, weight, axis, transposed=transposed)
    value = views.mix(ledger, value, range(axis + 1, value.ndim), "spatial position")
    if batched and value.shape[0] > 1:
        value = views.unnest(ledger, views.unnest(ledger, value, 0), axis)
    for k in range(2, weight.ndim):
        if weight.labels[k]:
            ledger.pin_label(weight.labels[k], "kernel position")
            weight = ledger.relabel(weight, k, (), "kernel position")
    scale = []
    for c, v in weight.scale:
        if any(n > 1 for n in v.shape[2:]):
            ledger.pin_scale(((c, v),))
        else:
            scale.append((c, v))
    kernel = Value(
        (weight.shape[0], weight.shape[1]),
        tuple(tuple(c.reshape(c.shape[:2]) for c in lab) for lab in weight.labels[:2]),
        weight.reasons[:2],
        tuple((c, v.reshape(v.shape[:2])) for c, v in scale),
        weight.parameter if groups > 1 else None,
    )

    fresh = is_fresh(ledger, weight) or id(weight) in call.sole
    label, terms = views.channel(ledger, value, axis)
    channels = value.shape[axis]
    inputs = Value((channels,), (label,), (value.reasons[axis],), terms)
    if groups == 1:
        ledger.observe(kernel)
        spec = ("y", "yz" if transposed else "zy", "z")
    else:
        inputs = views.reshape(ledger, inputs, (groups, channels // groups))
        ledger.observe(inputs)
        kernel = _grouped(call, kernel, groups)
        spec = ("gy", "gyz" if transposed else "gzy", "gz")
    shape = tuple(
        n for n in ((groups,) if groups > 1 else ()) + (kernel.shape[-1] if transposed else kernel.shape[-2],)
    )
    sole = call.sole | {id(kernel)} if fresh else call.sole
    out = contract(replace(call, outputs=[shape], sole=sole), [inputs, kernel], [spec[0], spec[1]], spec[2])
    if groups > 1:
        out = views.reshape(ledger, out, (math.prod(out.shape),))
    bias = call.get("bias")
    if bias is not None:
        out = add_bias(call, out, bias, 0)
    frame = [1] * len(call.shape)
    frame[axis] = out.shape[0]
    laid = views.reshape(ledger, out, frame)
    reasons = tuple(
        laid.reasons[k] if k == axis else ("batch" if k < axis else "spatial position") for k in range(len(frame))
    )
    labels = list(laid.labels)
    if batched and value.shape[0] > 1:
        lead = value.labels[0]
        labels[0] = tuple(
            c[(slice(None),) + (slice(0, 1),) * (c.ndim - 1)].reshape(-1, *[1] * (len(frame) - 1)) for c in lead
        )
    return Value(call.shape, tuple(labels), reasons, laid.scale)


def _reads_single_positions(call: Call, value: Value, weight: Value, axis: int) -> bool:
    """Whether each position of the output reads one of the input, the same one, and positions are told apart at all."""
    if any(n != 1 for n in weight.shape[2:]) or call.shape[axis + 1 :] != value.shape[axis + 1 :]:
        return False

    def all_are(name: str, number: int) -> bool:
        given = call.get(name, number)
        return given == number if isinstance(given, (int, str)) else all(n == number for n in given)

    plain = all_are("stride", 1) and (all_are("padding", 0) or call.get("padding") in ("valid", "same"))
    told = value.labels[axis:]  # of channels and positions; these may be nested in the channels, which are summed over
    apart = all(
        n == 1 for k, label in enumerate(told, axis) for c in label for j, n in enumerate(c.shape) if j not in (k, axis)
    )
    return plain and all_are("output_padding", 0) and any(told[1:]) and apart


def _reads_whole(call: Call, value: Value, weight: Value, axis: int, j: int) -> bool:
    """Whether the kernel is as long as the input along its j-th axis, which holds units: these are summed over."""

    def at(name: str, default: int) -> int:
        given = call.get(name, default)
        if isinstance(given, str):
            return 0 if given == "valid" else -1
        return int(given) if isinstance(given, int) else int(given[j if len(given) > 1 else 0])

    k = axis + 1 + j
    same = weight.shape[2 + j] == value.shape[k] > 1 and at("padding", 0) == 0 and at("dilation", 1) == 1
    return same and any((c >= 0).any() for c in value.labels[k])


def _folded(call: Call, value: Value, weight: Value, axis: int, j: int) -> Value:
    """The convolution with an axis that is read whole among the channels (in TextCNN, the units of an embedding)."""

    def fold(tensor: Value, channels: int) -> Value:
        at = channels + 1 + j
        order = [*range(channels + 1), at, *(k for k in range(channels + 1, tensor.ndim) if k != at)]
        moved = views.permute(tensor, order)
        joined = moved.shape[channels] * moved.shape[channels + 1]
        shape = (*moved.shape[:channels], joined, *moved.shape[channels + 2 :])
        return views.reshape(call.ledger, moved, shape)

    def rest(given: Any) -> Any:
        listed = isinstance(given, (list, tuple)) and len(given) > 1
        return [n for k, n in enumerate(given) if k != j] if listed else given

    kernel = fold(weight, 1)
    call = _as_free(call, weight, kernel)
    lists = {n: rest(call.arguments[n]) for n in ("stride", "padding", "dilation") if n in call.arguments}
    shape = tuple(n for k, n in enumerate(call.shape) if k != axis + 1 + j)
    arguments = call.arguments | lists | {"input": fold(value, axis), "weight": kernel}
    found = _conv(replace(call, arguments=arguments, outputs=[shape]))
    return views.reshape(call.ledger, found, call.shape)


def _pointwise(call: Call, value: Value, weight: Value, axis: int, *, transposed: bool) -> Value:
    """A convolution with a kernel of one: a linear map of the channels at each position, which may move.

    In gMLP ``Conv1d(T, T, 1)`` maps the tokens of each feature: its "positions" are the features, hidden units.
    """
    lead, space = "n"[:axis], "abc"[: weight.ndim - 2]
    kernel = views.reshape(call.ledger, weight, weight.shape[:2])
    spec = [f"{lead}y{space}", "yz" if transposed else "zy"]
    product = contract(_as_free(call, weight, kernel), [value, kernel], spec, f"{lead}z{space}")
    return add_bias(call, product, call.get("bias"), axis)


def _as_free(call: Call, weight: Value, kernel: Value) -> Call:
    """The call with a kernel that nothing else reads, if it is made of a weight that nothing else reads."""
    free = is_fresh(call.ledger, weight) or id(weight) in call.sole
    return replace(call, sole=call.sole | {id(kernel)}) if free else call


def _grouped(call: Call, kernel: Value, groups: int) -> Value:
    """A grouped convolution's kernel as (group, rows, columns), its columns nested in the groups."""
    ledger = call.ledger
    rows, columns = kernel.shape
    owned = kernel.parameter
    own = ledger.parameters[owned] if owned is not None and owned not in ledger.used else None
    nested = ledger.fresh_units(groups * columns).reshape(groups, columns)
    variables = ledger.fresh_variables((groups, columns))
    wide_units = np.repeat(nested, rows // groups, axis=0)
    wide_variables = np.repeat(variables, rows // groups, axis=0)
    if own is not None and columns > 1:
        tail = (1,) * (len(own.shape) - 2)
        own = ledger.relabel(own, 1, (wide_units.reshape(rows, columns, *tail),))
        terms = tuple(t for t in own.scale if t[1].shape[1] == 1)
        own = ledger.rescale(own, (*terms, (1.0, wide_variables.reshape(rows, columns, *tail))))
        kernel = replace(
            kernel,
            labels=(kernel.labels[0], (wide_units,)),
            scale=(*(t for t in kernel.scale if t[1].shape[1] == 1), (1.0, wide_variables)),
        )
    return views.reshape(ledger, replace(kernel, parameter=None), (groups, rows // groups, columns))


@register_rule(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d",
    traits=("pools",),
)
@register_rule(
    "max_pool3d_with_indices max_pool2d_with_indices upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d _upsample_nearest_exact2d "
    "_upsample_bilinear2d_aa mean_pool fractional_max_pool2d _upsample_bicubic2d_aa",
)
def _pool(call: Call) -> Value | list[Value]:
    value: Value = call.get("self", call.get("input"))
    name = call.operator
    space = next(n for n in (1, 2, 3) if f"{n}d" in name)
    value = views.mix(call.ledger, value, range(value.ndim - space, value.ndim), "spatial position")
    result = replace(value, shape=call.shape, parameter=None)
    positions = replace(result, scale=())  # of the largest entries in each channel's image: no factor changes them
    return [result, positions][: len(call.outputs)]


@register_rule("grid_sampler")
def _sample(call: Call) -> Value:
    """Each channel at positions that are computed, for each sample its own."""
    value: Value = call["input"]
    pin_tensor(call, call["grid"], "positions in an image")
    value = views.mix(call.ledger, value, (0, *range(2, value.ndim)), "spatial position")
    return replace(value, shape=call.shape, parameter=None)


@register_rule("col2im")
def _fold(call: Call) -> Value:
    """Channels times kernel positions by windows, summed into an image."""
    value = views.mix(call.ledger, call["self"], call["self"].ndim - 1, "spatial position")
    value = views.take(call.ledger, value, value.ndim - 1, 0)
    lead, taps = value.shape[:-1], math.prod(call["kernel_size"])
    value = views.reshape(call.ledger, value, (*lead, value.shape[-1] // taps, taps))
    value = views.take(call.ledger, views.mix(call.ledger, value, value.ndim - 1, "kernel position"), value.ndim - 1, 0)
    return replace(views.reshape(call.ledger, value, (*value.shape, 1, 1)), shape=call.shape)


@register_rule("im2col")
def _unfold(call: Call) -> Value:
    value: Value = call["self"]
    batched = value.ndim == 4
    value = views.mix(call.ledger, value, range(value.ndim - 2, value.ndim), "spatial position")
    lead, channels = value.shape[: value.ndim - 3], value.shape[value.ndim - 3]
    taps = math.prod(call["kernel_size"])
    flat = views.take(call.ledger, views.take(call.ledger, value, value.ndim - 1, 0), value.ndim - 2, 0)
    wide = views.reshape(call.ledger, flat, (*lead, channels, 1, 1))
    blank = pinned_value((taps,), "kernel position")
    wide = replace(wide, shape=(*lead, channels, taps, 1), reasons=(*wide.reasons[:-2], *blank.reasons, ""))
    merged = views.reshape(call.ledger, wide, (*lead, channels * taps, 1))
    assert batched or len(lead) == 0
    return replace(merged, shape=call.shape)


@register_rule("unfold", traits=("moves",))
def _windows(call: Call) -> Value:
    value: Value = call["self"]
    axis = int(call["dimension"]) % value.ndim
    value = views.mix(call.ledger, value, axis, "windows are cut")
    frame = views.reshape(call.ledger, value, (*value.shape, 1)) if value.ndim else value
    return replace(frame, shape=call.shape)


@register_rule("torchvision.roi_align", "torchvision.roi_pool")
def _roi(call: Call) -> Value | list[Value]:
    """Each channel pooled over regions, of which each names its image."""
    value: Value = call["input"]
    pin_tensor(call, call["rois"], "regions of an image")
    for axis in (3, 2, 0):
        value = views.drop(call.ledger, views.mix(call.ledger, value, axis, "regions of an image"), axis, keep=True)
    result = replace(value, shape=call.shape, parameter=None)
    return [result, replace(result, scale=())][: len(call.outputs)]


@register_rule("torchvision.deform_conv2d")
def _deformed(call: Call) -> Value:
    """A convolution that reads at computed places; what is computed for each place does not permute."""
    for name in ("offset", "mask"):
        pin_tensor(call, call.get(name), "places of a deformable convolution")
    return _conv(replace(call, operator="aten.conv2d", arguments={**call.arguments, "groups": call.get("groups", 1)}))


@register_rule("torchvision.nms")
def _suppressed(call: Call) -> Value:
    """Positions of boxes, in order."""
    for value in call.tensors:
        call.ledger.pin(value, "positions of boxes are returned")
    return pinned_value(call.shape, "positions of boxes are returned")
