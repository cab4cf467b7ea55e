"""Rules for operators that act entry by entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Term, Value, pinned_value, varies
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.operators.rearranging import split
from tu_symmetry.symmetry.rules import GUARD, INACTIVE, RULES, SMALL, Call, register_rule


def join_labels(call: Call, values: Sequence[Value], shape: tuple[int, ...]) -> tuple[list[Value], Value]:
    """Align broadcast operands, unify their labels, and return them with an unscaled result."""
    ledger, ndim = call.ledger, len(shape)
    aligned = [views.pad_left(v, ndim) for v in _nest_parameters(ledger, values, ndim)]
    labels: list[Label] = []
    reasons: list[str] = []
    for axis in range(ndim):
        label: Label = ()
        reason, found = "", False
        for value in aligned:
            if value.shape[axis] == 1:
                continue
            if not found:
                label, reason, found = value.labels[axis], value.reasons[axis], True
            else:
                others = [*labels, *((),) * (ndim - axis)]
                label = ledger.unify(label, value.labels[axis], reason, value.reasons[axis], axis, others)
                reason = reason or value.reasons[axis]
        labels.append(label)
        reasons.append(reason)
    return aligned, Value(shape, tuple(labels), tuple(reasons))


def _nest_parameters(ledger: Ledger, values: Sequence[Value], ndim: int) -> list[Value]:
    """Nest the axes of parameters as their partners are nested (a bias for each packed member)."""
    found = []
    for value in values:
        offset = ndim - value.ndim
        for axis in range(value.ndim):
            spread = {
                j + ndim - other.ndim
                for other in values
                if other is not value and axis + offset >= ndim - other.ndim
                for c in other.labels[axis + offset - (ndim - other.ndim)]
                for j, n in enumerate(c.shape)
                if n > 1
            }
            outer = [k for k in range(value.ndim) if k != axis and k + offset in spread and value.shape[k] > 1]
            if outer and value.shape[axis] > 1:
                value = ledger.nest(value, axis, outer)
        found.append(value)
    return found


def is_fresh(ledger: Ledger, value: Value) -> bool:
    """Whether a value is a parameter that nothing has read yet."""
    return value.parameter is not None and value.parameter not in ledger.used


def elementwise(call: Call, *, homogeneous: bool = False, additive: bool = False) -> Value:
    """An operator that acts entry by entry on broadcast operands.

    Args:
        call: the call.
        homogeneous: scaling all tensor operands by c > 0 scales the result by c (relu, maximum); with several
            operands they must scale alike, but for those that are zero throughout.
        additive: as homogeneous, for sums.
    """
    aligned, result = join_labels(call, call.tensors, call.shape)
    if not (homogeneous or additive):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    aligned = [v for v, given in zip(aligned, call.tensors, strict=True) if id(given) not in call.zeros] or aligned
    first, *rest = aligned
    for value in rest:
        call.ledger.equate(first.scale, value.scale)
    simple = (v for v in aligned if all(len(varies(variable)) <= 1 for _, variable in v.scale))
    return replace(result, scale=next(simple, first).scale)


@register_rule("relu", "rrelu", "native_dropout", "hypot", "conj", "real", "imag", "copysign", "nan_to_num")
@register_rule("leaky_relu", traits=("injective",))
@register_rule("neg", traits=("injective", "of_statistics"))
@register_rule("abs", traits=("of_statistics",))
@register_rule("maximum", "minimum", "fmax", "fmin", traits=("combines",))
@register_rule("dropout", "feature_dropout", "alpha_dropout", "positive", traits=("moves", "same"))
@register_rule("float", "half", "double", traits=("moves", "same"))
def _homogeneous(call: Call) -> Value | list[Value]:
    value = elementwise(call, homogeneous=True)
    return [value] * len(call.outputs)


@register_rule(
    "contiguous clone detach alias to _to_copy type_as lift_fresh_copy lift_fresh",
    positions="keep",
    traits=("moves", "same"),
)
def _same(call: Call) -> Value | list[Value]:
    """The same entries, at another place or in another type (what becomes an integer loses its scale: see tracing)."""
    return [replace(call.tensors[0], parameter=None)] * len(call.outputs)


@register_rule("_assert_tensor_metadata", positions="keep", traits=("moves",))
def _metadata(call: Call) -> list[Value]:
    """A check of a type, which reads no entries."""
    return [pinned_value(shape, "a check") for shape in call.outputs]


@register_rule(
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__",
    traits=("combines",),
)
@register_rule(
    "exp gelu silu sigmoid tanh elu selu celu mish softplus hardswish hardsigmoid hardtanh relu6 log log1p expm1 "
    "sin cos tan atan erf softsign log_sigmoid hardshrink softshrink tanhshrink threshold ceil floor round frac "
    "atan2 sinh cosh asin acos logaddexp xlogy lerp fmod remainder heaviside logit erfinv special_erf "
    "floor_divide quick_gelu log2 log10 exp2 trunc fix bucketize digamma lgamma erfc acosh asinh atanh sinc "
    "special_expit isclose nextafter __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift float_power "
    "fake_quantize_per_tensor_affine",
)
def _inhomogeneous(call: Call) -> Value:
    return elementwise(call)


@register_rule("fake_quantize_per_channel_affine", traits=("combines",))
def _quantize(call: Call) -> Value:
    value: Value = call["self"]
    axis = call.axis("axis")
    frame = [n if k == axis else 1 for k, n in enumerate(value.shape)]
    laid = [views.reshape(call.ledger, call[n], frame) for n in ("scale", "zero_point")]
    return elementwise(replace_arguments(call, [value, *laid]))


@register_rule("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not", traits=("combines",))
@register_rule("sign", "sgn", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "angle", "is_nonzero")
def _scale_free(call: Call) -> Value:
    """Comparisons: with zero, and of two tensors that share their scale, no positive factor changes the result."""
    aligned, result = join_labels(call, call.tensors, call.shape)
    compared = call.name in ("eq", "ne", "lt", "le", "gt", "ge")
    if len(aligned) == 2:
        call.ledger.equate(aligned[0].scale, aligned[1].scale)
    elif compared and call.get("other") != 0:
        call.ledger.pin_scale(aligned[0].scale)
    return result


@register_rule("complex", "polar")
def _complex(call: Call) -> Value:
    """Parts that scale alike, or a modulus that does and an angle that does not."""
    first, second = call.tensors
    if call.operator == "aten.complex":
        return elementwise(call, additive=True)
    call.ledger.pin_scale(second.scale)
    aligned, result = join_labels(call, [first, second], call.shape)
    return replace(result, scale=aligned[0].scale)


@register_rule("item", "_local_scalar_dense", "equal", "is_nonzero")
@register_rule("_assert_async", "_assert_scalar", "sym_constrain_range_for_size")
def _item(call: Call) -> Value:
    """The program reads numbers and may branch on them, or checks them."""
    for value in call.tensors:
        call.ledger.pin(value, "read by the program")
    return pinned_value((), "read by the program")


@register_rule("empty_like", "new_empty")
@register_rule("ones_like", "full_like", "new_ones", "new_full", traits=("fills",))
@register_rule("zeros_like", "new_zeros", traits=("fills", "zeros"))
def _alike(call: Call) -> Value:
    name = call.name.removeprefix("new_").removesuffix("_like")
    held = {"zeros": 0.0, "ones": 1.0, "full": call.get("fill_value")}.get(name)
    return views.uniform(call.shape, float(held) if isinstance(held, (int, float)) else None)


@register_rule(
    "rand randn rand_like randn_like normal_functional uniform exponential log_normal",
    traits=("random",),
)
def _noise(call: Call) -> Value:
    """Independent entries: the noise has units of its own, which may be permuted like those of a parameter."""
    return views.noise(call.ledger, call.shape)


@register_rule("normal", "bernoulli")
def _noise_about(call: Call) -> Value:
    """Independent entries with parameters of their own: means and deviations move along with the noise."""
    noise = views.noise(call.ledger, call.shape)
    names = ("mean", "std", "p") if call.operator == "aten.normal" or "p" in call.arguments else ("self",)
    given = [call[n] for n in names if isinstance(call.get(n), Value)]
    if not given:
        return noise
    numbers = [call.get(n) for n in names if isinstance(call.get(n), (int, float))]
    homogeneous = call.operator == "aten.normal" and not any(numbers)
    (*aligned, _), result = join_labels(call, [*given, noise], call.shape)
    scaled = elementwise(replace_arguments(call, [replace(v, parameter=None) for v in aligned]), additive=homogeneous)
    return replace(result, scale=scaled.scale)


@register_rule("add", "sub", "rsub", traits=("combines", "shifts", "of_statistics"))
def _add(call: Call) -> Value:
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    if len(values) == 2:
        return elementwise(replace_arguments(call, values), additive=True)
    (value,) = values
    scalar = next((call[n] for n in ("self", "other") if isinstance(call.get(n), (int, float))), 0.0)
    if scalar == 0 or not value.scale:
        return replace(value, parameter=None)
    if 0 < scalar <= SMALL and call.name == "add" and id(value) in call.statistics:
        # an epsilon in a normalization written by hand
        call.ledger.inexact += [v for _, v in value.scale]
        return replace(value, parameter=None)
    return replace(call.ledger.unscaled(value), parameter=None)


def replace_arguments(call: Call, values: Sequence[Value]) -> Call:
    """The same call with these tensors as its only arguments."""
    return replace(call, arguments={str(k): v for k, v in enumerate(values)})


@register_rule("mul", "div", "true_divide", "divide", "multiply", traits=("combines", "of_statistics"))
def multiply(call: Call) -> Value:
    """Products and quotients: scales add and subtract."""
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    if "div" in call.operator and call.get("rounding_mode"):
        return elementwise(call)
    aligned, result = join_labels(call, values, call.shape)
    if len(values) == 1:
        scalar_first = not isinstance(call["self"], Value)
        sign = -1.0 if "div" in call.operator and scalar_first else 1.0
        return replace(result, scale=times(aligned[0].scale, sign))
    sign = -1.0 if "div" in call.operator else 1.0
    return replace(result, scale=call.ledger.merge((*aligned[0].scale, *times(aligned[1].scale, sign))))


def times(scale: tuple[Term, ...], factor: float) -> tuple[Term, ...]:
    """Multiply a log-scale by a number."""
    return tuple((factor * c, v) for c, v in scale)


@register_rule("pow", "square", "sqrt", traits=("of_statistics",))
@register_rule("rsqrt", "reciprocal")
def _power(call: Call) -> Value:
    values = call.tensors
    exponent = {"aten.square": 2.0, "aten.sqrt": 0.5, "aten.rsqrt": -0.5, "aten.reciprocal": -1.0}.get(call.operator)
    if exponent is None:
        exponent = call["exponent"]
        if len(values) > 1 or isinstance(exponent, Value) or not isinstance(call["self"], Value):
            return elementwise(call)
    _, result = join_labels(call, values, call.shape)
    return replace(result, scale=times(values[0].scale, float(exponent)))


@register_rule("addcmul", "addcdiv")
def _addcmul(call: Call) -> Value:
    name, factors = call.operator.replace("addc", ""), {"self": call["tensor1"], "other": call["tensor2"]}
    product = multiply(Call(call.ledger, name, factors, call.outputs, call.place))
    return elementwise(replace_arguments(call, [call["self"], product]), additive=True)


@register_rule("clamp", "clamp_min", "clamp_max", traits=("of_statistics",))
def _clamp(call: Call) -> Value:
    low, high = call.get("min"), call.get("max")
    if isinstance(low, Value) or isinstance(high, Value):
        return elementwise(call)
    guards = low is not None and (low <= INACTIVE or id(call["self"]) in call.statistics)
    if high is None and guards and 0 <= low <= GUARD:  # relu, or the guard of a norm
        if low > INACTIVE:
            call.ledger.inexact += [v for _, v in call["self"].scale]
        return elementwise(call, homogeneous=True)
    return elementwise(call)


@register_rule("_prelu_kernel", "prelu")
def _prelu(call: Call) -> Value:
    value, weight = call["self"], call["weight"]
    if call.operator == "aten.prelu" and value.ndim > 1 and weight.ndim == 1:
        weight = views.reshape(call.ledger, weight, (1, weight.shape[0], *[1] * (value.ndim - 2)))
    call.ledger.pin_scale(weight.scale)
    aligned, result = join_labels(call, [value, weight], call.shape)
    return replace(result, scale=aligned[0].scale)


@register_rule("where", "masked_fill", traits=("combines",))
def _where(call: Call) -> Value | list[Value]:
    if call.operator == "aten.where" and "self" not in call.arguments:
        return RULES["aten.nonzero_numpy"](replace(call, arguments={"self": call["condition"]}))  # type: ignore[return-value]
    if call.operator == "aten.masked_fill":
        condition, kept = call["mask"], [call["self"]]
        other = call["value"]
        fill = 0.0 if isinstance(other, Value) else float(other)
        kept += [other] if isinstance(other, Value) else []
    else:
        condition = call["condition"]
        kept = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
        fill = next((float(call[n]) for n in ("self", "other") if isinstance(call.get(n), (int, float))), 0.0)
    (_, *aligned), result = join_labels(call, [condition, *kept], call.shape)
    if fill not in (0.0, math.inf, -math.inf):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    aligned = [v for v, given in zip(aligned, kept, strict=True) if id(given) not in call.zeros] or aligned
    for value in aligned[1:]:
        call.ledger.equate(aligned[0].scale, value.scale)
    return replace(result, scale=aligned[0].scale if aligned else ())


@register_rule(
    "tanh_backward sigmoid_backward silu_backward gelu_backward softplus_backward elu_backward hardtanh_backward "
    "hardswish_backward mish_backward threshold_backward leaky_relu_backward",
)
def _derivative(call: Call) -> Value:
    """What arrives from behind, times the slope at what went in (or came out), of which a ReLU's asks the sign only."""
    (arriving, held), result = join_labels(call, call.tensors[:2], call.shape)
    if call.operator not in ("aten.threshold_backward", "aten.leaky_relu_backward") or call.get("threshold", 0) != 0:
        call.ledger.pin_scale(held.scale)
    return replace(result, scale=arriving.scale)


@register_rule("glu")
def _glu(call: Call) -> Value:
    axis = call.axis(default=-1)
    left, right = split(call, call["self"], axis, [call["self"].shape[axis] // 2] * 2)
    call.ledger.pin_scale(right.scale)
    _, result = join_labels(call, [left, right], call.shape)
    return replace(result, scale=left.scale)


@register_rule("fill")
@register_rule("zero", traits=("zeros",))
def _fill(call: Call) -> Value:
    filler = call.get("value")
    if isinstance(filler, Value):
        call.ledger.pin(filler, "fills a tensor")
    known = isinstance(filler, Value) and id(filler) in call.zeros  # torch 2.11 lifts `h[0] = 0.0` to a tensor
    zero = call.operator == "aten.zero" or filler == 0 or known
    written = call.get("self")
    scale = written.scale if zero and isinstance(written, Value) else ()  # zeros have any scale
    return replace(views.uniform(call.shape), scale=scale)


@register_rule("copy")
def _copy(call: Call) -> Value:
    """Whatever was there before."""
    return views.expand(call.ledger, replace(call["src"], parameter=None), call.shape)
