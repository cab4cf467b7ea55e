"""Rules for reductions, and for what acts along an axis."""

from __future__ import annotations

from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, pinned_value
from tu_symmetry.symmetry.operators.ordering import where
from tu_symmetry.symmetry.operators.pointwise import elementwise, times
from tu_symmetry.symmetry.rules import Call, register_rule

MATRIX_NORMS = ("linalg_norm", "linalg_matrix_norm", "nuclear_norm")


def _dims(call: Call, value: Value) -> list[int]:
    dims = call.arguments.get("dim", call.arguments.get("axis"))
    if dims is None and call.name == "linalg_matrix_norm":
        dims = [-2, -1]
    if dims is None or dims == []:
        return list(range(value.ndim))
    return sorted({d % value.ndim for d in ([dims] if isinstance(dims, int) else dims)})


@register_rule("mean sum amax amin", traits=("pools", "statistic"))
@register_rule("logsumexp", traits=("pools",))
@register_rule(
    "max min std var linalg_vector_norm norm frobenius_norm linalg_norm linalg_matrix_norm var_mean std_mean aminmax "
    "median",
    traits=("statistic",),
)
@register_rule("nansum nanmean nanmedian nuclear_norm count_nonzero prod any all _is_all_true _is_any_true")
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
    if name in ("max", "min", "median", "nanmedian"):  # the second output holds positions: they move with the units
        return [found, where(call, call["self"], value, dims[0])]
    return [found, value]


@register_rule("histc")
def _histogram(call: Call) -> Value:
    """How many entries lie in each interval."""
    value = call.ledger.unscaled(call["self"])
    views.drop(call.ledger, value, range(value.ndim))
    return pinned_value(call.shape, "intervals")


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", traits=("distinct",))
def _softmax(call: Call) -> Value:
    """Each entry depends on all along the axis, so that no other axis may be nested in it."""
    return views.unnest(call.ledger, call.ledger.unscaled(call["self"]), call.axis(default=-1))


@register_rule("cumsum cumprod logcumsumexp diff cummax cummin")
def _cumulative(call: Call) -> list[Value]:
    value = views.mix(call.ledger, call["self"], call.axis(default=-1), "accumulated along the axis")
    if call.name in ("cumprod", "logcumsumexp"):
        value = call.ledger.unscaled(value)
    value = replace(value, shape=call.shape)
    return [value, replace(value, scale=())][: len(call.outputs)]


@register_rule(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn "
    "fft_rfftn fft_irfftn"
)
def _fourier(call: Call) -> Value:
    """Linear along the transformed axes, whose positions are mixed."""
    value: Value = call["self"]
    axes = call.get(
        "dim", (-2, -1) if call.name.endswith("2") else range(value.ndim) if call.name.endswith("n") else -1
    )
    axes = [axis % value.ndim for axis in ([axes] if isinstance(axes, int) else axes)]
    return replace(views.mix(call.ledger, value, axes, "Fourier transform along the axis"), shape=call.shape)
