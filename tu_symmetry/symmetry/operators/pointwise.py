"""Rules for operators that act entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Term, Value, pinned_value, varies
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.rules import GUARD, INACTIVE, RULES, SMALL, Call, Parity, pin_axes, register_rule


def join_labels(ledger: Ledger, values: Sequence[Value], shape: tuple[int, ...]) -> tuple[list[Value], Value]:
    """Align broadcast operands, unify their labels, and return them with an unscaled result."""
    ndim = len(shape)
    aligned = [views.pad_left(v, ndim) for v in _nest_parameters(ledger, values, ndim)]
    return aligned, replace(views.together(ledger, aligned, range(ndim)), shape=shape)


def _nest_parameters(ledger: Ledger, values: Sequence[Value], ndim: int) -> list[Value]:
    """Nest the axes of parameters as their partners are nested (a bias for each packed member)."""
    found = []
    for value in values:
        offset = ndim - value.ndim
        for axis in range(value.ndim):
            spread: set[int] = set()
            for other in values:
                ahead = ndim - other.ndim
                if other is not value and axis + offset >= ahead:
                    spread |= {ahead + j for c in other.labels[axis + offset - ahead] for j in varies(c)}
            outer = [k for k in range(value.ndim) if k != axis and k + offset in spread and value.shape[k] > 1]
            if outer and value.shape[axis] > 1:
                value = ledger.nest(value, axis, outer)
        found.append(value)
    return found


def elementwise(call: Call, *, homogeneous: bool = False) -> Value:
    """An operator that acts entry by entry on broadcast operands.

    Args:
        call: the call.
        homogeneous: scaling all tensor operands by c > 0 scales the result by c (relu, maximum, sums); with several
            operands they must scale alike, but for those that are zero throughout.
    """
    aligned, result = join_labels(call.ledger, call.tensors, call.shape)
    if not homogeneous:
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    aligned = [v for v, given in zip(aligned, call.tensors, strict=True) if not given.zero] or aligned
    first, *rest = aligned
    for value in rest:
        call.ledger.equate(first.scale, value.scale)
    simple = (v for v in aligned if all(len(varies(variable)) <= 1 for _, variable in v.scale))
    return replace(result, scale=next(simple, first).scale)


def times(scale: tuple[Term, ...], factor: float) -> tuple[Term, ...]:
    """Multiply a log-scale by a number."""
    return tuple((factor * c, v) for c, v in scale)


@register_rule("relu rrelu hypot copysign nan_to_num")
@register_rule("native_dropout conj real imag complex", signs="follow", linear=False)
@register_rule("leaky_relu", traits=("injective",))
@register_rule("neg", traits=("injective", "of_statistics"), signs="follow", linear=True)
@register_rule("abs", traits=("of_statistics",), signs="even")
@register_rule("maximum minimum fmax fmin", traits=("combines",))
@register_rule("positive float half double", traits=("moves", "same"))
@register_rule("dropout feature_dropout", traits=("moves", "same"), linear=lambda call: _drops(call))
@register_rule("alpha_dropout", traits=("moves", "same"), signs="pin", linear=False)
def _homogeneous(call: Call) -> list[Value]:
    return [elementwise(call, homogeneous=True)] * len(call.outputs)


@register_rule(
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__", traits=("combines",)
)
@register_rule(
    "exp gelu silu sigmoid elu selu celu mish softplus hardswish hardsigmoid relu6 log log1p expm1 log_sigmoid "
    "threshold ceil floor atan2 acos logaddexp xlogy lerp fmod remainder heaviside logit floor_divide quick_gelu log2 "
    "log10 exp2 bucketize digamma lgamma erfc acosh special_expit isclose nextafter __lshift__ __rshift__ "
    "bitwise_left_shift bitwise_right_shift float_power fake_quantize_per_tensor_affine"
)
@register_rule(
    "tanh sin tan atan erf softsign hardshrink softshrink tanhshrink frac sinh asin erfinv special_erf asinh atanh",
    signs="odd",
)
@register_rule("round", "trunc", "fix", signs="odd")
@register_rule("cos", "cosh", "sinc", signs="even")
@register_rule("hardtanh", signs=lambda call: _of_interval(call.get("min_val", -1), call.get("max_val", 1)))
def _inhomogeneous(call: Call) -> Value:
    return elementwise(call)


register_rule(
    "contiguous clone detach alias to _to_copy type_as lift_fresh_copy lift_fresh",
    positions="keep",
    traits=("moves", "same"),
)(lambda call: call.tensors[0])
register_rule("_assert_tensor_metadata", positions="keep", traits=("moves",))(
    lambda call: [pinned_value(shape, "a check") for shape in call.outputs]
)
register_rule("copy", signs="follow", linear=True)(
    lambda call: views.expand(call.ledger, replace(call["src"], parameter=None), call.shape)
)
register_rule("polar", signs="follow")(lambda call: scaled_as_first(call, call["abs"], call["angle"]))
register_rule("glu", signs="follow")(
    lambda call: scaled_as_first(call, *views.split(call.ledger, call["self"], call.axis(default=-1)))
)


@register_rule("fake_quantize_per_channel_affine", traits=("combines",))
def _quantize(call: Call) -> Value:
    value, axis = call["self"], call.axis("axis")
    frame = [n if k == axis else 1 for k, n in enumerate(value.shape)]
    return elementwise(call.on(value, *(views.reshape(call.ledger, call[n], frame) for n in ("scale", "zero_point"))))


@register_rule("eq ne lt le gt ge logical_not bitwise_not", traits=("combines",))
@register_rule("sign sgn", signs="odd")
@register_rule("isnan isinf isfinite", signs="even")
@register_rule("isposinf isneginf signbit angle")
def _scale_free(call: Call) -> Value:
    """Comparisons: with zero, and of two tensors that share their scale, no positive factor changes the result."""
    aligned, result = join_labels(call.ledger, call.tensors, call.shape)
    if len(aligned) == 2:
        call.ledger.equate(aligned[0].scale, aligned[1].scale)
    elif call.name in ("eq", "ne", "lt", "le", "gt", "ge") and call.get("other") != 0:
        call.ledger.pin_scale(aligned[0].scale)
    return result


def scaled_as_first(call: Call, first: Value, second: Value) -> Value:
    """Two tensors, of which the second has to have no scale, and the first gives the result its own."""
    call.ledger.pin_scale(second.scale)
    aligned, result = join_labels(call.ledger, [first, second], call.shape)
    return replace(result, scale=aligned[0].scale)


@register_rule("_prelu_kernel", "prelu")
def _prelu(call: Call) -> Value:
    value, weight = call["self"], call["weight"]
    if call.name == "prelu" and value.ndim > 1 and weight.ndim == 1:
        weight = views.reshape(call.ledger, weight, (1, weight.shape[0], *[1] * (value.ndim - 2)))
    return scaled_as_first(call, value, weight)


@register_rule("item _local_scalar_dense equal is_nonzero _assert_async _assert_scalar sym_constrain_range_for_size")
def _item(call: Call) -> Value:
    for value in call.tensors:
        call.ledger.pin(value, "read by the program")
    return pinned_value((), "read by the program")


@register_rule("empty_like", "new_empty", signs="even", linear=True)
@register_rule("ones_like", "full_like", "new_ones", "new_full", traits=("fills",), signs="even", linear=True)
@register_rule("zeros_like", "new_zeros", traits=("fills", "zeros"), signs="even", linear=True)
def _alike(call: Call) -> Value:
    name = call.name.removeprefix("new_").removesuffix("_like")
    held = {"zeros": 0.0, "ones": 1.0, "full": call.get("fill_value")}.get(name)
    if call.ledger.linear and held != 0:
        return pinned_value(call.shape, "a constant")
    return views.uniform(call.shape, float(held) if isinstance(held, (int, float)) else None)


@register_rule("rand randn rand_like randn_like normal_functional uniform exponential log_normal", signs="even")
@register_rule("normal", "bernoulli")
def _noise(call: Call) -> Value:
    """Independent entries: the noise has units of its own; means and deviations that it is given move along with it."""
    noise = views.noise(call.ledger, call.shape)
    names = {"normal": ("mean", "std", "p"), "bernoulli": ("p",) if "p" in call.arguments else ("self",)}
    given = [call[n] for n in names.get(call.name, ()) if isinstance(call.get(n), Value)]
    return elementwise(call.on(*given, noise)) if given else noise


def _drops(call: Call) -> None:
    """Entries are dropped one by one while the network trains."""
    if call.get("train", True) and call.get("p", 0.5) > 0:
        pin_axes(call, call["input"], range(call["input"].ndim), "entries are dropped")


def _sums(call: Call) -> None:
    """What is the same for all positions along an axis is no unit's own share."""
    values = [(v, len(call.shape) - v.ndim) for v in call.tensors if not v.zero]
    number = next((a for a in (call.get("self"), call.get("other")) if isinstance(a, (int, float))), 0)
    for value, ahead in values:
        spread = [
            k for k in range(value.ndim) if any(k + ahead < gap or v.shape[k + ahead - gap] == 1 for v, gap in values)
        ]
        pin_axes(call, value, spread if number == 0 else range(value.ndim), "something is added to all positions")


def mean_square(call: Call, value: Value, axes: Sequence[int]) -> Value:
    """What orthogonal matrices may still mix, behind an operator that reads the mean square along some axes."""
    pin_axes(call, value, (k for k in range(value.ndim) if k not in axes), "a mean square is read")
    call.ledger.pin_scale(times(value.scale, 2.0))  # two, since a sign is free
    return replace(value, parameter=None)


def gained(call: Call, value: Value, gain: Value) -> Value:
    """What a gain along the last axis multiplies: matrices commute with one that has equal entries."""
    if gain.parameter is None:
        pin_axes(call, value, [value.ndim - 1], "entries have factors of their own")
    else:
        call.ledger.meet(value, gain.parameter)
    call.ledger.pin(gain, "a gain")
    return value


def _scales(call: Call) -> Value | None:
    """Where two tensors have positions, entries have factors of their own; a denominator is not linear."""
    for gain, value in (call.tensors, call.tensors[::-1]) if len(call.tensors) == 2 and call.name == "mul" else ():
        alone = gain.parameter is not None and gain.size > 1 and gain.size == gain.shape[-1]
        if alone and value.shape == call.shape and value.parameter is None and value.labels[-1]:
            return gained(call, value, gain)
    values = [(v, len(call.shape) - v.ndim) for v in call.tensors]
    for value, ahead in values:
        below = "div" in call.name and (value is call.get("other") or not isinstance(call.get("self"), Value))
        met = [
            k
            for k in range(value.ndim)
            if below or any(v is not value and k + ahead >= gap and v.shape[k + ahead - gap] > 1 for v, gap in values)
        ]
        pin_axes(call, value, met, "entries have factors of their own")
    return None


@register_rule("add", "sub", "rsub", traits=("combines", "shifts", "of_statistics"), signs="follow", linear=_sums)
def _add(call: Call) -> Value:
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    if len(values) == 2:
        return elementwise(call.on(*values), homogeneous=True)
    (value,) = values
    scalar = next((call[n] for n in ("self", "other") if isinstance(call.get(n), (int, float))), 0.0)
    if scalar == 0:
        return value
    if 0 < scalar <= SMALL and call.name == "add" and value.statistic and not call.ledger.signs:
        # a normalization by hand
        call.ledger.approximate(value)
        return value
    return call.ledger.unscaled(value)


@register_rule(
    "mul div true_divide divide multiply", traits=("combines", "of_statistics"), signs="follow", linear=_scales
)
def multiply(call: Call) -> Value:
    """Products and quotients: scales add and subtract."""
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    divides = "div" in call.name
    if divides and call.get("rounding_mode"):
        return elementwise(call)
    aligned, result = join_labels(call.ledger, values, call.shape)
    scales = [v.scale for v in aligned]
    if divides and isinstance(call["other"], Value):
        scales[-1] = times(scales[-1], -1.0)
    return replace(result, scale=scales[0] if len(scales) == 1 else call.ledger.merge((*scales[0], *scales[1])))


def _of_power(call: Call) -> Parity:
    exponent = call.get("exponent")
    whole = isinstance(exponent, (int, float)) and exponent == int(exponent)
    return "pin" if not whole or not isinstance(call["self"], Value) else "odd" if exponent % 2 else "even"


@register_rule("pow", traits=("of_statistics",), signs=_of_power)
@register_rule("square", traits=("of_statistics",), signs="even")
@register_rule("sqrt", traits=("of_statistics",))
@register_rule("rsqrt")
@register_rule("reciprocal", signs="odd")
def _power(call: Call) -> Value:
    exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}.get(call.name, call.get("exponent"))
    if isinstance(exponent, Value) or not isinstance(call["self"], Value):
        return elementwise(call)
    _, result = join_labels(call.ledger, call.tensors, call.shape)
    return replace(result, scale=times(call["self"].scale, float(exponent)))


@register_rule("addcmul", "addcdiv", signs="follow")
def _addcmul(call: Call) -> Value:
    factors = {"self": call["tensor1"], "other": call["tensor2"]}
    product = multiply(Call(call.ledger, call.operator.replace("addc", ""), factors, call.outputs))
    return elementwise(call.on(call["self"], product), homogeneous=True)


def _of_interval(low: Any, high: Any) -> Parity:
    return "odd" if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low == -high else "pin"


@register_rule("clamp", traits=("of_statistics",), signs=lambda call: _of_interval(call.get("min"), call.get("max")))
@register_rule("clamp_min", "clamp_max", traits=("of_statistics",))
def _clamp(call: Call) -> Value:
    low, high = call.get("min"), call.get("max")
    if isinstance(low, Value) or high is not None or low is None or not 0 <= low <= GUARD:
        return elementwise(call)
    if low > INACTIVE:
        if not call["self"].statistic:
            return elementwise(call)
        call.ledger.approximate(call["self"])  # the guard of a norm
    return elementwise(call, homogeneous=True)


@register_rule("where", "masked_fill", traits=("combines",), signs="follow")
def _where(call: Call) -> Value | list[Value]:
    if call.name == "where" and "self" not in call.arguments:
        return RULES["aten.nonzero_numpy"](call)  # type: ignore[return-value]
    names = ("condition", "self", "other") if call.name == "where" else ("mask", "self", "value")
    condition, *given = (call[name] for name in names)
    kept = [v for v in given if isinstance(v, Value)]
    fill = next((float(v) for v in given if isinstance(v, (int, float))), 0.0)
    (_, *aligned), result = join_labels(call.ledger, [condition, *kept], call.shape)
    if not call.ledger.keeps(fill):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    aligned = [v for v, whole in zip(aligned, kept, strict=True) if not whole.zero] or aligned
    for value in aligned[1:]:
        call.ledger.equate(aligned[0].scale, value.scale)
    return replace(result, scale=aligned[0].scale if aligned else ())


@register_rule("fill", signs="follow")
@register_rule("zero", traits=("zeros",), signs="follow", linear=False)
def _fill(call: Call) -> Value:
    call.pin("value", "fills a tensor")
    filler, written = call.get("value"), call.get("self")
    # torch 2.11 fills by tensors
    zero = filler.zero if isinstance(filler, Value) else call.name == "zero" or filler == 0
    scale = written.scale if zero and isinstance(written, Value) else ()  # zeros have any scale
    return replace(views.uniform(call.shape), scale=scale)
