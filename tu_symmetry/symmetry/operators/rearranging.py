"""Rules for operators that move data: views, slices, concatenations, shuffles, padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Array, Value, pinned_value
from tu_symmetry.symmetry.rules import Call, pin_axes, register_rule, unknown


@register_rule(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze reshape_as view_as ravel",
    positions="keep",
    traits=("moves", "same"),
)
def _reshape(call: Call) -> Value:
    if call.name == "view" and "dtype" in call.arguments:
        return unknown(call)
    return views.reshape(call.ledger, call["self"], call.shape)


@register_rule(
    "permute transpose t swapaxes swapdims movedim moveaxis adjoint mT numpy_T", positions="keep", traits=("moves",)
)
def permute(call: Call) -> Value:
    """Axes in another order, which the operator shows on a tensor of which the length of each axis is its number."""
    value, *given = call.arguments.values()
    numbered = torch.empty(tuple(range(value.ndim)), device="meta")
    return views.permute(value, getattr(torch.ops.aten, call.name)(numbered, *given).shape)


def _positions(call: Call, axis: int) -> Array:
    """The positions along an axis that the operator takes, which it shows on their numbers."""
    value, *given = call.arguments.values()
    numbers = torch.arange(value.shape[axis], device="cpu").reshape([-1 if k == axis else 1 for k in range(value.ndim)])
    return getattr(torch.ops.aten, call.name)(numbers, *given).flatten().numpy()


@register_rule("broadcast_tensors", signs="follow", linear=True)
@register_rule("expand", "expand_as", "broadcast_to", positions="keep", traits=("moves",))
def _expand(call: Call) -> list[Value]:
    return [views.expand(call.ledger, v, shape) for v, shape in zip(call.tensors, call.outputs, strict=False)]


@register_rule("repeat", "tile", "repeat_interleave", traits=("moves",))
def _repeat(call: Call) -> Value:
    value: Value = call["self"]
    ledger = call.ledger
    if call.name == "repeat_interleave":
        count, axis = call["repeats"], call.arguments.get("dim")
        if not isinstance(count, int) or axis is None:
            return unknown(call)
        return views.copies(ledger, value, axis % value.ndim, count, inner=True)
    counts = list(call.get("repeats", call.get("dims")))
    counts = [1] * (value.ndim - len(counts)) + counts
    value = views.pad_left(value, len(counts))
    for axis, count in enumerate(counts):
        if count > 1 and value.shape[axis] == 1:
            value = views.expand(ledger, value, value.with_axis(axis, size=count).shape)
        elif count > 1 and not any(value.labels):
            value = views.concatenate(ledger, [value] * count, axis)
        elif count > 1:
            value = views.copies(ledger, value, axis, count, inner=False)
    return value


@register_rule("diagonal", "linalg_diagonal", "trace", signs="follow")
def _diagonal(call: Call) -> Value:
    value: Value = call.get("self", call.get("A"))
    first, second = (-2, -1) if call.name == "linalg_diagonal" else (0, 1)
    first, second = call.get("dim1", first) % value.ndim, call.get("dim2", second) % value.ndim
    if call.get("offset", 0) != 0 or value.shape[first] != value.shape[second]:
        return unknown(call)
    found = views.diagonal(call.ledger, value, first, second)
    return views.drop(call.ledger, found, found.ndim - 1) if call.name == "trace" else found


@register_rule("stack", signs="follow", linear=True)
def _stack(call: Call) -> Value:
    values = call["tensors"]
    axis = int(call.get("dim", 0)) % (values[0].ndim + 1)
    shape = (*values[0].shape[:axis], 1, *values[0].shape[axis:])
    return views.concatenate(call.ledger, [views.reshape(call.ledger, v, shape) for v in values], axis, nested=True)


@register_rule("cat concat concatenate hstack vstack", signs="follow", linear=True)
def _cat(call: Call) -> Value:
    values = [v for v in call["tensors"] if v.shape != (0,)]
    if not values:
        return pinned_value(call.shape, "empty tensor")
    if "stack" not in call.name:
        return views.concatenate(call.ledger, values, call.axis(of=values[0], default=0))
    least = 1 if call.name == "hstack" else 2
    values = [views.pad_left(v, max(v.ndim, least)) for v in values]
    return views.concatenate(call.ledger, values, int(call.name == "hstack" and values[0].ndim > 1))


@register_rule("chunk split split_with_sizes tensor_split", positions="keep", traits=("moves",))
def _split(call: Call) -> list[Value]:
    axis = call.axis(default=0)
    return views.split(call.ledger, call["self"], axis, [s[axis] for s in call.outputs])


@register_rule("view_as_complex", "view_as_real", signs="follow")
def _view_as_complex(call: Call) -> Value:
    value, parts = call["self"], "real and imaginary part"
    last = value.ndim - 1
    if call.name == "view_as_complex":
        return views.at_first(call.ledger, views.mix(call.ledger, value, last, parts), last)
    value = views.reshape(call.ledger, value, (*value.shape, 1))
    return value.with_axis(last + 1, size=2, reason=parts)


@register_rule("unbind", positions="keep", traits=("moves",))
def _unbind(call: Call) -> list[Value]:
    axis = call.axis(default=0)
    value = _with_pieces(call, axis)
    return [
        views.take(call.ledger, value, axis, k) if k in call.used else pinned_value(shape, "not read")
        for k, shape in enumerate(call.outputs)
    ]


def _with_pieces(call: Call, axis: int) -> Value:
    """A tensor before pieces of it are read: if all are, each may have units of its own (experts, in a loop)."""
    value: Value = call["self"]
    if len(call.used) == value.shape[axis] > 1 and call.ledger.fresh(value):
        for k in range(value.ndim):
            if k != axis and value.shape[k] > 1:
                value = call.ledger.nest(value, k, [axis])
        value = call.ledger.relabel(value, axis, (), views.SELECTED)
    return value


@register_rule("select", positions="keep", traits=("moves",))
def _select(call: Call) -> Value:
    axis, index = call.axis(), call["index"]
    if not isinstance(index, int):
        return unknown(call)
    value = _with_pieces(call, axis)
    return views.take(call.ledger, value, axis, index % value.shape[axis])


@register_rule("slice", "narrow", positions="keep", traits=("moves",))
def _slice(call: Call) -> Value:
    value, axis = call["self"], call.axis(default=0)
    whole = call.shape[axis] == value.shape[axis]
    return value if whole else views.take(call.ledger, value, axis, _positions(call, axis))


@register_rule("flip", "fliplr", "flipud", "roll", "rot90", "fft_fftshift", "fft_ifftshift", traits=("moves",))
def _turn(call: Call) -> Value:
    if call.name == "roll" and not call.get("dims"):  # as if there were one axis
        return unknown(call)
    value = call["self"]
    for axis, size in enumerate(value.shape):
        positions = _positions(call, axis)
        if (positions != np.arange(size)).any():
            value = views.reorder(call.ledger, value, axis, positions)
    return permute(replace(call, arguments=call.arguments | {"self": value})) if call.name == "rot90" else value


@register_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", traits=("moves",))
def _shuffle(call: Call) -> Value:
    value, ledger = call["self"], call.ledger
    *lead, c, h, w = value.shape
    k = len(lead)
    if call.name == "channel_shuffle":
        g, (n, c, *space) = call["groups"], value.shape
        parts, order = (n, g, c // g, *space), (0, 2, 1, *range(3, value.ndim + 1))
    elif call.name == "pixel_shuffle":
        r = call["upscale_factor"]
        parts, order = (*lead, c // r**2, r, r, h, w), (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    else:
        r = call["downscale_factor"]
        parts, order = (*lead, c, h // r, r, w // r, r), (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return views.reshape(ledger, views.permute(views.reshape(ledger, value, parts), order), call.shape)


def _pads(call: Call) -> None:
    if call.get("value", 0) != 0:
        pin_axes(call, call["self"], range(call["self"].ndim), "padded with a number")


@register_rule(
    "pad constant_pad_nd reflection_pad2d replication_pad2d reflection_pad1d replication_pad1d",
    signs="follow",
    linear=_pads,
)
def _pad(call: Call) -> Value:
    result: Value = call["self"]
    pad, filler = call.get("pad", call.get("padding")), call.get("value", 0)
    constant = call.name in ("pad", "constant_pad_nd") and call.get("mode", "constant") == "constant"
    for k in range(len(pad) // 2):
        axis = result.ndim - 1 - k
        low, high = pad[2 * k], pad[2 * k + 1]
        if low == 0 and high == 0:
            continue
        if not result.labels[axis] or not constant:
            result = views.mix(call.ledger, result, axis, "padded")
            result = result.with_axis(axis, size=result.shape[axis] + low + high)
            continue
        if min(low, high) < 0:
            kept = np.arange(max(-low, 0), result.shape[axis] - max(-high, 0))
            result = views.take(call.ledger, result, axis, kept)
        blanks = [views.uniform(result.with_axis(axis, size=max(n, 0)).shape, float(filler)) for n in (low, high)]
        before, after = (replace(b, reasons=("padding",) * b.ndim) for b in blanks)
        pieces = [p for p in (before, result, after) if p is result or p.shape[axis] > 0]
        result = views.concatenate(call.ledger, pieces, axis) if len(pieces) > 1 else result
    if not call.ledger.keeps(filler):
        result = call.ledger.unscaled(result)
    return result
