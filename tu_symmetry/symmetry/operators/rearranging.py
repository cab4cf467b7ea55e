"""Rules for operators that move data: views, slices, concatenations, indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, pinned_value
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


@register_rule(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze reshape_as view_as ravel squeeze_copy "
    "unsqueeze_copy view_copy",
    positions="keep",
    traits=("moves", "same"),
)
def _reshape(call: Call) -> Value:
    if call.operator == "aten.view" and "dtype" in call.arguments:
        return unknown(call)
    return views.reshape(call.ledger, call["self"], call.shape)


@register_rule(
    "permute transpose t swapaxes swapdims movedim moveaxis adjoint mT numpy_T transpose_copy permute_copy",
    positions="keep",
    traits=("moves",),
)
def _permute(call: Call) -> Value:
    value: Value = call["self"]
    n = value.ndim
    order = list(range(n))
    name = call.name.removesuffix("_copy")
    if name == "permute":
        order = [d % n for d in call["dims"]]
    elif name in ("movedim", "moveaxis"):
        source, target = call["source"], call["destination"]
        source, target = ([s] if isinstance(s, int) else list(s) for s in (source, target))
        rest = [d for d in range(n) if d not in {s % n for s in source}]
        placed: dict[int, int] = {t % n: s % n for s, t in zip(source, target, strict=True)}
        order = [placed[d] if d in placed else rest.pop(0) for d in range(n)]
    elif name == "numpy_T" or name == "t":
        order = order[::-1]
    else:
        a, b = (call.get(f"dim{k}", call.get(f"axis{k}", 0)) for k in (0, 1))
        if name in ("adjoint", "mT"):
            a, b = -1, -2
        order[a % n], order[b % n] = order[b % n], order[a % n]
    return views.permute(value, order)


@register_rule("expand", "expand_as", "broadcast_to", "expand_copy", positions="keep", traits=("moves",))
def _expand(call: Call) -> Value:
    return views.expand(call.ledger, call["self"], call.shape)


@register_rule("repeat", "tile", "repeat_interleave", traits=("moves",))
def repeat(call: Call) -> Value:
    """Copies along axes: their order does not matter.

    Copies of what holds no units, the network's input for one, stay where they are: a network that copies its input in
    evaluation may be given different ones in training (MIMO).
    """
    value: Value = call["self"]
    ledger = call.ledger
    if call.operator == "aten.repeat_interleave":
        count, axis = call["repeats"], call.arguments.get("dim")
        if not isinstance(count, int) or axis is None:
            return unknown(call)
        axis %= value.ndim
        inserted = views.reshape(ledger, value, (*value.shape[: axis + 1], 1, *value.shape[axis + 1 :]))
        wide = views.expand(ledger, inserted, (*value.shape[: axis + 1], count, *value.shape[axis + 1 :]))
        return views.reshape(ledger, wide, call.shape)
    counts = list(call.get("repeats", call.get("dims")))
    counts = [1] * (value.ndim - len(counts)) + counts
    value = views.pad_left(value, len(counts))
    for axis, count in enumerate(counts):
        if count > 1:
            if value.shape[axis] == 1:
                value = views.expand(ledger, value, value.with_axis(axis, size=count).shape)
            elif not any(value.labels):
                value = views.concatenate(ledger, [value] * count, axis)
            else:
                lead, rest = value.shape[:axis], value.shape[axis:]
                laid = views.reshape(ledger, value, (*lead, 1, *rest))
                wide = views.expand(ledger, laid, (*lead, count, *rest))
                value = views.reshape(ledger, wide, (*lead, count * rest[0], *rest[1:]))
    return value


@register_rule("diagonal", "diagonal_copy", "linalg_diagonal", "trace")
def _diagonal(call: Call) -> Value:
    """Entries whose positions along two axes go together; ``trace`` sums them up."""
    value: Value = call.get("self", call.get("A"))
    last = value.ndim - 1
    first, second = (call.get(name, default) for name, default in (("dim1", 0), ("dim2", 1)))
    if call.operator == "aten.linalg_diagonal":
        first, second = call.get("dim1", -2), call.get("dim2", -1)
    found = views.diagonal(call.ledger, value, first % value.ndim, second % value.ndim, int(call.get("offset", 0)))
    return views.drop(call.ledger, found, last - 1) if call.operator == "aten.trace" else found


@register_rule("broadcast_tensors")
def _broadcast(call: Call) -> list[Value]:
    return [views.expand(call.ledger, v, shape) for v, shape in zip(call.tensors, call.outputs, strict=True)]


@register_rule("cat", "concat", "concatenate")
def _cat(call: Call) -> Value:
    values = [v for v in call["tensors"] if v.shape != (0,)]
    if not values:
        return pinned_value(call.shape, "empty tensor")
    return views.concatenate(call.ledger, values, call.axis(of=values[0], default=0))


@register_rule("hstack", "vstack", "dstack", "column_stack", "row_stack")
def _stack_along(call: Call) -> Value:
    """Joined along an axis that tensors of fewer axes are given first."""
    name = call.name
    values: list[Value] = call["tensors"]
    ndim, axis = {"hstack": (1, -1), "column_stack": (2, 1), "dstack": (3, 2)}.get(name, (2, 0))
    frames = []
    for value in values:
        shape = value.shape
        if name == "column_stack" and len(shape) < 2:
            shape = (math.prod(shape), 1)
        elif name == "dstack" and len(shape) < 3:
            shape = (1, *shape, 1) if len(shape) == 1 else (*shape, *(1,) * (3 - len(shape)))
        elif len(shape) < ndim:
            shape = (1,) * (ndim - len(shape)) + shape
        frames.append(views.reshape(call.ledger, value, shape))
    if axis < 0:
        axis = 0 if frames[0].ndim == 1 else 1
    return views.concatenate(call.ledger, frames, axis)


@register_rule("stack")
def _stack(call: Call) -> Value:
    values = call["tensors"]
    axis = int(call.get("dim", 0)) % (values[0].ndim + 1)
    shape = (*values[0].shape[:axis], 1, *values[0].shape[axis:])
    return views.concatenate(call.ledger, [views.reshape(call.ledger, v, shape) for v in values], axis, nested=True)


def split(call: Call, value: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Cut a value into pieces along an axis."""
    starts = np.cumsum([0, *sizes])
    return [views.take(call.ledger, value, axis, np.arange(a, a + n)) for a, n in zip(starts, sizes, strict=False)]


@register_rule(
    "chunk split split_with_sizes tensor_split split_copy unsafe_chunk unsafe_split",
    positions="keep",
    traits=("moves",),
)
def _split(call: Call) -> list[Value]:
    value = call["self"]
    axis = call.axis(default=0)
    return split(call, value, axis, [s[axis] for s in call.outputs])


@register_rule("view_as_complex")
def _view_as_complex(call: Call) -> Value:
    value: Value = call["self"]
    value = views.mix(call.ledger, value, value.ndim - 1, "real and imaginary part")
    return views.take(call.ledger, value, value.ndim - 1, 0)


@register_rule("view_as_real")
def _view_as_real(call: Call) -> Value:
    value = views.reshape(call.ledger, call["self"], (*call.shape[:-1], 1))
    return replace(value, shape=call.shape, reasons=(*value.reasons[:-1], "real and imaginary part"))


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
    if len(call.used) == value.shape[axis] > 1 and value.parameter not in (None, *call.ledger.used):
        for k in range(value.ndim):
            if k != axis and value.shape[k] > 1:
                value = call.ledger.nest(value, k, [axis])
        value = call.ledger.relabel(value, axis, (), views.SELECTED)
    return value


@register_rule("select", "select_copy", positions="keep", traits=("moves",))
def _select(call: Call) -> Value:
    axis = call.axis()
    index = call["index"]
    if not isinstance(index, int):
        return unknown(call)
    value = _with_pieces(call, axis)
    return views.take(call.ledger, value, axis, index % value.shape[axis])


@register_rule("slice", "narrow", "slice_copy", positions="keep", traits=("moves",))
def _slice(call: Call) -> Value:
    value = call["self"]
    axis = call.axis(default=0)
    if call.operator == "aten.narrow":
        start, step = int(call["start"]) % max(value.shape[axis], 1), 1
    else:
        start, step = call.get("start", 0), call.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        return unknown(call)
    if call.operator != "aten.narrow":
        start = slice(start, None, step).indices(value.shape[axis])[0]
    count = call.shape[axis]
    if count == value.shape[axis]:
        return replace(value, parameter=None)
    return views.take(call.ledger, value, axis, start + step * np.arange(count))


@register_rule("flip", "fliplr", "flipud", traits=("moves",))
def _flip(call: Call) -> Value:
    value: Value = call["self"]
    for dim in {"aten.fliplr": [1], "aten.flipud": [0]}.get(call.operator) or call.get("dims", []):
        axis = dim % value.ndim
        value = reorder(call, value, axis, np.arange(value.shape[axis])[::-1].copy())
    return replace(value, parameter=None)


@register_rule("roll", traits=("moves",))
def _roll(call: Call) -> Value:
    value: Value = call["self"]
    dims, shifts = call.get("dims", []), call["shifts"]
    shifts = [shifts] if isinstance(shifts, int) else shifts
    if not dims:  # as if it had one axis
        flat = views.reshape(call.ledger, value, (math.prod(value.shape),))
        flat = reorder(call, flat, 0, np.roll(np.arange(flat.shape[0]), shifts[0]))
        return views.reshape(call.ledger, flat, value.shape)
    for dim, shift in zip([dims] if isinstance(dims, int) else dims, shifts, strict=True):
        axis = dim % value.ndim
        value = reorder(call, value, axis, np.roll(np.arange(value.shape[axis]), shift))
    return replace(value, parameter=None)


@register_rule("fft_fftshift", "fft_ifftshift", traits=("moves",))
def _shift(call: Call) -> Value:
    """Rolled by half, which is the smaller half on the way there."""
    value: Value = call["self"]
    dims = call.get("dim", list(range(value.ndim)))
    for dim in [dims] if isinstance(dims, int) else dims:
        size = value.shape[dim]
        half = size // 2 if call.operator == "aten.fft_fftshift" else -(size // 2)
        value = reorder(call, value, dim % value.ndim, np.roll(np.arange(size), half))
    return replace(value, parameter=None)


@register_rule("rot90", traits=("moves",))
def _rotate(call: Call) -> Value:
    value: Value = call["self"]
    first, second = (d % value.ndim for d in call.get("dims", [0, 1]))
    for _ in range(int(call.get("k", 1)) % 4):
        value = reorder(call, value, second, np.arange(value.shape[second])[::-1].copy())
        order = list(range(value.ndim))
        order[first], order[second] = second, first
        value = views.permute(value, order)
    return replace(value, parameter=None)


def reorder(call: Call, value: Value, axis: int, positions: np.ndarray) -> Value:
    """Take all positions along an axis in another order."""
    moves = any(c.shape[axis] > 1 for label in value.labels for c in label)
    if moves or any(v.shape[axis] > 1 for _, v in value.scale):
        return views.take(call.ledger, value, axis, positions)
    return value


@register_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", traits=("moves",))
def _shuffle(call: Call) -> Value:
    value, ledger = call["self"], call.ledger
    if call.operator == "aten.channel_shuffle":
        n, c, *space = value.shape
        g = call["groups"]
        split_up = views.reshape(ledger, value, (n, g, c // g, *space))
        swapped = views.permute(split_up, (0, 2, 1, *range(3, value.ndim + 1)))
        return views.reshape(ledger, swapped, call.shape)
    *lead, c, h, w = value.shape
    k = len(lead)
    if call.operator == "aten.pixel_shuffle":
        r = call["upscale_factor"]
        parts = views.reshape(ledger, value, (*lead, c // r**2, r, r, h, w))
        order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    else:
        r = call["downscale_factor"]
        parts = views.reshape(ledger, value, (*lead, c, h // r, r, w // r, r))
        order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return views.reshape(ledger, views.permute(parts, order), call.shape)


def pin_tensor(call: Call, value: Any, reason: str) -> None:
    """Pin an argument, if it is a tensor that could move."""
    if isinstance(value, Value):
        call.ledger.pin(value, reason)


@register_rule("pad constant_pad_nd reflection_pad2d replication_pad2d reflection_pad1d replication_pad1d")
def _pad(call: Call) -> Value:
    value: Value = call["self"]
    pad = call.get("pad", call.get("padding"))
    filler = call.get("value", 0)
    mode = call.get("mode", "constant")
    result = value
    for k in range(len(pad) // 2):
        axis = value.ndim - 1 - k
        low, high = pad[2 * k], pad[2 * k + 1]
        if low == 0 and high == 0:
            continue
        if result.labels[axis] and call.operator in ("aten.pad", "aten.constant_pad_nd") and mode == "constant":
            size, extra = result.shape[axis], [low, high]
            if min(extra) < 0:
                result = views.take(call.ledger, result, axis, np.arange(max(-low, 0), size - max(-high, 0)))
            pieces = [result]
            for side, n in zip((0, 1), extra, strict=True):
                if n > 0:
                    shape = result.with_axis(axis, size=n).shape
                    blank = views.uniform(shape, 0.0 if filler is None else float(filler))
                    blank = replace(blank, reasons=("padding",) * len(shape))
                    pieces.insert(0 if side == 0 else len(pieces), blank)
            if len(pieces) > 1:
                result = views.concatenate(call.ledger, pieces, axis)
        else:
            result = views.mix(call.ledger, result, axis, "padded")
            result = result.with_axis(axis, size=result.shape[axis] + low + high)
    if filler not in (0, None, -math.inf, math.inf):
        result = call.ledger.unscaled(result)
    return replace(result, parameter=None)
