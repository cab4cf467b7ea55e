"""Rules for reductions, for what acts along an axis, and for what orders entries.

Positions carry the axis's label (``Value.points``), since they are renamed when units move, until a look-up undoes the
renaming, or any other operator pins.
"""

from __future__ import annotations

from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Value, among, moving, nested_in, pinned_value, units_of
from tu_symmetry.symmetry.distinct import different
from tu_symmetry.symmetry.operators.pointwise import elementwise, mean_square, times
from tu_symmetry.symmetry.rules import Call, pin_axes, register_rule

MATRIX_NORMS = ("linalg_norm", "linalg_matrix_norm", "nuclear_norm")


def _where(call: Call, value: Value, like: Value, axis: int, output: int = 1) -> Value:
    """The output with positions along ``axis`` of ``value``; its own axes are those of ``like``.

    Units are pinned where they differ from block to block (one list cannot name them) or where entries may be equal.
    """
    points: Label = ()
    label = value.labels[axis]
    if output in call.used and moving(label):
        units = units_of([label])
        if nested_in(label, axis) or not among(units, different(value)).all():
            reason = "positions are returned, and which unit comes first depends on the order of units"
            call.ledger.pin_label(label, reason)
        else:
            points = tuple(c.reshape(-1) for c in label)
    return replace(like, scale=(), parameter=None, points=points)


def _dims(call: Call, value: Value) -> list[int]:
    dims = call.arguments.get("dim", call.arguments.get("axis"))
    if dims is None and call.name == "linalg_matrix_norm":
        dims = [-2, -1]
    if dims is None or dims == []:
        return list(range(value.ndim))
    return sorted({d % value.ndim for d in ([dims] if isinstance(dims, int) else dims)})


def _summed(call: Call) -> None:
    pin_axes(call, call["self"], _dims(call, call["self"]), "summed over")


def _length(call: Call) -> Value:
    """A Euclidean norm, which orthogonal matrices keep."""
    value: Value = call.get("self", call.get("A"))
    euclidean = call.get("ord", call.get("p", 2)) in (2, "fro")
    mean_square(call, value, _dims(call, value) if euclidean else [])
    return pinned_value(call.shape, "a norm")


def _deviation(call: Call) -> Value:
    """A deviation from the mean, which matrices keep as they keep a layer norm."""
    value: Value = call["self"]
    if value.ndim and _dims(call, value) == [value.ndim - 1]:
        call.ledger.meet(mean_square(call, value, [value.ndim - 1]))
    else:
        mean_square(call, value, [])
    return pinned_value(call.shape, "a deviation")


@register_rule("mean sum", traits=("pools", "statistic"), signs="follow", linear=_summed)
@register_rule("amax amin", traits=("pools", "statistic"))
@register_rule("logsumexp", traits=("pools",))
@register_rule("max min linalg_norm linalg_matrix_norm std_mean aminmax median", traits=("statistic",))
@register_rule(
    "linalg_vector_norm", "frobenius_norm", traits=("statistic",), signs="even", linear=lambda call: _length(call)
)
@register_rule(
    "norm",
    traits=("statistic",),
    signs=lambda call: "pin" if isinstance(call.get("p"), str) else "even",
    linear=lambda call: _length(call),
)
@register_rule("std", traits=("statistic",), signs="positive", linear=_deviation)
@register_rule("var", traits=("statistic",), signs="follow", linear=_deviation)
@register_rule("var_mean", traits=("statistic",), signs="follow")
@register_rule("nansum", "nanmean", signs="follow")
@register_rule("count_nonzero any all _is_all_true _is_any_true", signs="even")
@register_rule("nanmedian kthvalue mode nuclear_norm prod")
def _reduce(call: Call) -> Value | list[Value]:
    value: Value = call.get("self", call.get("A"))
    name = call.name
    if name in ("max", "min") and isinstance(call.get("other"), Value):
        return elementwise(call, homogeneous=True)
    dims = _dims(call, value)
    if name in MATRIX_NORMS and len(dims) == 2:  # rows are the same for all columns, and columns for all rows
        value = views.unnest(call.ledger, views.unnest(call.ledger, value, dims[0]), dims[1])
    if name in ("logsumexp", "prod"):
        value = call.ledger.unscaled(value)
    counts = name in ("linalg_vector_norm", "linalg_norm", "norm") and call.get("ord", call.get("p", 2)) == 0
    if counts or name in ("any", "all", "_is_all_true", "_is_any_true", "count_nonzero"):
        value = replace(value, scale=())  # what is zero stays zero whatever the factor of each entry
    value = views.drop(call.ledger, value, dims, keep=len(call.shape) == value.ndim)
    found = replace(value, scale=times(value.scale, 2.0)) if name in ("var", "var_mean") else value
    if len(call.outputs) == 1:
        return found
    if name in (
        "max",
        "min",
        "median",
        "nanmedian",
        "kthvalue",
        "mode",
    ):  # the second output holds positions: they move with the units
        return [found, _where(call, call["self"], value, dims[0])]
    return [found, value]


@register_rule("renorm")
def _renorm(call: Call) -> Value:
    """Each slice divided by its norm, over all other axes, if that is large."""
    value = call.ledger.unscaled(call["self"])
    return views.unnest(call.ledger, value, *(k for k in range(value.ndim) if k != call.axis()))


@register_rule("segment_reduce")
def _segments(call: Call) -> Value:
    value, *lengths = call.tensors
    for given in lengths:
        call.ledger.pin(given, "lengths of segments")
    if call["reduce"] == "prod" or call.get("initial", 0) != 0:
        value = call.ledger.unscaled(value)
    return replace(views.mix(call.ledger, value, range(call.axis("axis") + 1), "segments"), shape=call.shape)


@register_rule("histc")
def _histogram(call: Call) -> Value:
    value = call.ledger.unscaled(call["self"])
    views.drop(call.ledger, value, range(value.ndim))
    return pinned_value(call.shape, "intervals")


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", traits=("distinct",))
def _softmax(call: Call) -> Value:
    """Each entry depends on all along the axis, so that no other axis may be nested in it."""
    return views.unnest(call.ledger, call.ledger.unscaled(call["self"]), call.axis(default=-1))


@register_rule("cumsum", "diff", signs="follow")
@register_rule("cumprod logcumsumexp cummax cummin")
def _cumulative(call: Call) -> list[Value]:
    value = views.mix(call.ledger, call["self"], call.axis(default=-1), "accumulated along the axis")
    if call.name in ("cumprod", "logcumsumexp"):
        value = call.ledger.unscaled(value)
    value = replace(value, shape=call.shape)
    return [value, replace(value, scale=())][: len(call.outputs)]


@register_rule(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn "
    "fft_rfftn fft_irfftn",
    signs="follow",
)
def _fourier(call: Call) -> Value:
    value: Value = call["self"]
    axes = call.get("dim", {"2": (-2, -1), "n": range(value.ndim)}.get(call.name[-1], -1))
    axes = [axis % value.ndim for axis in ([axes] if isinstance(axes, int) else axes)]
    return replace(views.mix(call.ledger, value, axes, "Fourier transform along the axis"), shape=call.shape)


@register_rule("sort", positions="read")
def _ordered(call: Call) -> list[Value]:
    """Positions in ascending order: which rows come first tells how the units that they name are numbered."""
    value, ledger = call["self"], call.ledger
    if value.ndim != 1 or not value.points:
        ledger.pin_label(value.points, "ordered by its number")
        return _sort(call)
    rows = ledger.fresh_units(value.shape[0])
    ledger.orders.append((rows, units_of([value.points])))
    views.drop(ledger, value, 0)
    found = Value(value.shape, ((rows,),), ("",))
    return [replace(found, points=value.points), found]


@register_rule("topk", "argsort")
def _sort(call: Call) -> list[Value]:
    value: Value = call["self"]
    axis = call.axis(default=-1)
    ranked = views.drop(call.ledger, value, axis, keep=True).with_axis(axis, reason="positions are ranks")
    ranked = replace(ranked, shape=call.shape)
    if call.name == "argsort":
        return [_where(call, value, ranked, axis, output=0)]
    return [ranked, _where(call, value, ranked, axis)][: len(call.outputs)]


@register_rule("argmax", "argmin")
def _argmax(call: Call) -> Value:
    value: Value = call["self"]
    dim = call.arguments.get("dim")
    if dim is None:  # a position in the flattened tensor
        call.ledger.pin(value, "a position is returned")
        return pinned_value(call.shape, "a position is returned")
    axis = dim % max(value.ndim, 1)
    found = views.drop(call.ledger, value, axis, keep=bool(call.get("keepdim", False)))
    return _where(call, value, found, axis, output=0)


@register_rule("nonzero", "nonzero_numpy", "argwhere", "torchvision.nms")
def _nonzero(call: Call) -> list[Value]:
    """Positions along every axis (of boxes, whose sizes count), in order."""
    reason = "positions are returned in order"
    for value in call.tensors:
        call.ledger.pin(value if call.name == "torchvision.nms" else replace(value, scale=()), reason)
    return [pinned_value(shape, reason) for shape in call.outputs]
