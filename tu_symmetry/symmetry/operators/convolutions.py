"""Rules for convolutions, pooling and resampling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, moving
from tu_symmetry.symmetry.operators.contractions import add_bias, affine, contract
from tu_symmetry.symmetry.rules import Call, register_rule


@register_rule(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    traits=("spreads",),
    linear=affine,
)
def _conv(call: Call) -> Value:
    value, weight = call["input"], call["weight"]
    ledger = call.ledger
    transposed = "transpose" in call.name or bool(call.get("transposed", False))
    groups = int(call.get("groups", 1))
    space = weight.ndim - 2
    axis = 1 if value.ndim == space + 2 else 0
    padding = np.broadcast_to(call.get("padding", 0), space).tolist()
    sizes = zip(padding, weight.shape[2:], value.shape[axis + 1 :], value.labels[axis + 1 :], strict=True)
    for k, (pad, taps, n, label) in enumerate(sizes):
        if groups == 1 and not transposed and pad in (0, "valid") and taps == n > 1 and moving(label):
            return _folded(call, axis, k, padding[:k] + padding[k + 1 :])
    if groups == 1 and _reads_single_positions(call, value, weight, axis):
        return _pointwise(call, value, weight, axis, transposed=transposed)
    value = views.mix(ledger, value, range(axis + 1, value.ndim), "spatial position")
    batched = axis == 1 and value.shape[0] > 1
    if batched:
        value = views.unnest(ledger, views.unnest(ledger, value, 0), axis)
    for k in range(2, weight.ndim):
        if weight.labels[k]:
            ledger.pin_label(weight.labels[k], "kernel position")
            weight = ledger.relabel(weight, k, (), "kernel position")
    for term in weight.scale:
        if any(n > 1 for n in term[1].shape[2:]):
            ledger.pin_scale((term,))
    terms = tuple(t for t in weight.scale if all(n == 1 for n in t[1].shape[2:]))
    kernel = views.arranged(replace(weight, scale=terms), (0, 1), lambda a: a.reshape(a.shape[:2]))
    kernel = replace(kernel, parameter=weight.parameter if groups > 1 else None)
    inputs = views.channel(ledger, value, axis)
    if groups == 1:
        ledger.observe(kernel)
        shape, letters, output = kernel.shape, ["y", "yz" if transposed else "zy"], "z"
    else:
        inputs = views.reshape(ledger, inputs, (groups, inputs.shape[0] // groups))
        ledger.observe(inputs)
        kernel = _grouped(call, kernel, groups)
        shape, letters, output = kernel.shape[1:], ["gy", "gyz" if transposed else "gzy"], "gz"
    width = shape[-1] if transposed else shape[0]
    shape = (width,) if groups == 1 else (groups, width)
    kernel = _as_free(call, weight, kernel)
    out = contract(replace(call, outputs=[shape]), [inputs, kernel], letters, output)
    out = add_bias(call, views.reshape(ledger, out, (math.prod(shape),)), call.get("bias"), 0)
    ndim = len(call.shape)
    laid = views.reshape(ledger, out, [out.shape[0] if k == axis else 1 for k in range(ndim)])
    reasons = (*["batch"] * axis, laid.reasons[axis], *["spatial position"] * (ndim - axis - 1))
    result = replace(laid, shape=call.shape, reasons=reasons)
    if batched:
        samples = (c[(slice(None),) + (slice(0, 1),) * (c.ndim - 1)] for c in value.labels[0])
        result = result.with_axis(0, label=tuple(c.reshape(-1, *[1] * (ndim - 1)) for c in samples))
    return result


def _reads_single_positions(call: Call, value: Value, weight: Value, axis: int) -> bool:
    """Whether each position of the output reads one of the input, the same one, and positions are told apart at all."""
    if any(n != 1 for n in weight.shape[2:]) or call.shape[axis + 1 :] != value.shape[axis + 1 :]:
        return False
    padding = {*np.ravel(call.get("padding", 0)).tolist(), *np.ravel(call.get("output_padding", 0)).tolist()}
    told = value.labels[axis:]  # of channels and positions; these may be nested in the channels, which are summed over
    apart = all(
        n == 1 for k, label in enumerate(told, axis) for c in label for j, n in enumerate(c.shape) if j not in (k, axis)
    )
    return padding <= {0, "valid", "same"} and any(told[1:]) and apart


def _folded(call: Call, axis: int, k: int, padding: list[int]) -> Value:
    """A kernel that spans an axis of units (in TextCNN, those of an embedding), which joins the channels."""

    def fold(value: Value, channels: int) -> Value:
        order = [j for j in range(value.ndim) if j != channels + 1 + k]
        value = views.permute(value, [*order[: channels + 1], channels + 1 + k, *order[channels + 1 :]])
        *lead, a, b = value.shape[: channels + 2]
        return views.reshape(call.ledger, value, (*lead, a * b, *value.shape[channels + 2 :]))

    kernel = _as_free(call, call["weight"], fold(call["weight"], 1))
    arguments = call.arguments | {"input": fold(call["input"], axis), "weight": kernel, "padding": padding}
    shape = (*call.shape[: axis + 1 + k], *call.shape[axis + 2 + k :])
    return views.reshape(call.ledger, _conv(replace(call, arguments=arguments, outputs=[shape])), call.shape)


def _pointwise(call: Call, value: Value, weight: Value, axis: int, *, transposed: bool) -> Value:
    lead, space = "n"[:axis], "abc"[: weight.ndim - 2]
    kernel = _as_free(call, weight, views.reshape(call.ledger, weight, weight.shape[:2]))
    spec = [f"{lead}y{space}", "yz" if transposed else "zy"]
    product = contract(call, [value, kernel], spec, f"{lead}z{space}")
    return add_bias(call, product, call.get("bias"), axis)


def _as_free(call: Call, weight: Value, kernel: Value) -> Value:
    """A kernel that nothing else reads, if it is made of a weight that nothing else reads."""
    return replace(kernel, sole=call.ledger.fresh(weight) or weight.sole)


def _grouped(call: Call, kernel: Value, groups: int) -> Value:
    """A grouped convolution's kernel as (group, rows, columns), its columns nested in the groups."""
    ledger = call.ledger
    rows, columns = kernel.shape
    units = np.repeat(ledger.fresh_units(groups * columns).reshape(groups, columns), rows // groups, axis=0)
    variables = np.repeat(ledger.fresh_variables((groups, columns)), rows // groups, axis=0)
    if ledger.fresh(kernel) and columns > 1:
        assert kernel.parameter is not None
        own = ledger.parameters[kernel.parameter]
        tail = (1,) * (own.ndim - 2)
        own = ledger.relabel(own, 1, (units.reshape(rows, columns, *tail),))
        terms = tuple(t for t in own.scale if t[1].shape[1] == 1)
        ledger.rescale(own, (*terms, (1.0, variables.reshape(rows, columns, *tail))))
        terms = tuple(t for t in kernel.scale if t[1].shape[1] == 1)
        kernel = replace(kernel, labels=(kernel.labels[0], (units,)), scale=(*terms, (1.0, variables)))
    return views.reshape(ledger, replace(kernel, parameter=None), (groups, rows // groups, columns))


@register_rule(
    "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", traits=("pools",)
)
@register_rule("max_pool3d_with_indices", "max_pool2d_with_indices", "fractional_max_pool2d")
@register_rule(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d",
    traits=("pools",),
    signs="follow",
)
@register_rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
    "upsample_linear1d upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    signs="follow",
)
def _pool(call: Call) -> list[Value]:
    value: Value = call.get("self", call.get("input"))
    space = next(n for n in (1, 2, 3) if f"{n}d" in call.name)
    value = views.mix(call.ledger, value, range(value.ndim - space, value.ndim), "spatial position")
    return _with_positions(call, value)


def _with_positions(call: Call, value: Value) -> list[Value]:
    """What is pooled, and where (in each channel's image) it was found, which no factor changes."""
    result = replace(value, shape=call.shape)
    return [result, replace(result, scale=())][: len(call.outputs)]


@register_rule("torchvision.roi_align", "grid_sampler", signs="follow")
@register_rule("torchvision.roi_pool")
def _sample(call: Call) -> list[Value]:
    value: Value = call["input"]
    call.pin("rois", "regions of an image")
    call.pin("grid", "positions in an image")
    return _with_positions(call, views.mix(call.ledger, value, (0, *range(2, value.ndim)), "regions of an image"))


@register_rule("col2im", signs="follow")
def _fold(call: Call) -> Value:
    ledger, value, taps = call.ledger, call["self"], math.prod(call["kernel_size"])
    value = views.at_first(ledger, views.mix(ledger, value, value.ndim - 1, "spatial position"), value.ndim - 1)
    *lead, rows = value.shape
    value = views.reshape(ledger, value, (*lead, rows // taps, taps))
    value = views.at_first(ledger, views.mix(ledger, value, value.ndim - 1, "kernel position"), value.ndim - 1)
    return replace(views.reshape(ledger, value, (*value.shape, 1, 1)), shape=call.shape)


@register_rule("im2col", signs="follow")
def _unfold(call: Call) -> Value:
    value: Value = call["self"]
    space = value.ndim - 2, value.ndim - 1
    flat = views.at_first(call.ledger, views.mix(call.ledger, value, space, "spatial position"), *space)
    taps = math.prod(call["kernel_size"])
    wide = views.reshape(call.ledger, flat, (*flat.shape, 1, 1))
    wide = wide.with_axis(flat.ndim, size=taps, reason="kernel position")
    *lead, channels = flat.shape
    return replace(views.reshape(call.ledger, wide, (*lead, channels * taps, 1)), shape=call.shape)


@register_rule("unfold", traits=("moves",))
def _windows(call: Call) -> Value:
    value: Value = call["self"]
    value = views.mix(call.ledger, value, int(call["dimension"]) % value.ndim, "windows are cut")
    return replace(views.reshape(call.ledger, value, (*value.shape, 1)), shape=call.shape)
