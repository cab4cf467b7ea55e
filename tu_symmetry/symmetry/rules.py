"""The table of rules: for each operator, how its outputs are indexed and scaled, given its inputs.

A rule receives a :class:`Call` and returns a :class:`~tu_symmetry.symmetry.algebra.Value` for each output. It makes its
demands through the call's ledger. An operator without a rule pins everything that it touches; :func:`register_rule`
adds a rule for an own operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tu_symmetry.symmetry.algebra import Ledger, Term, Value, along, pinned_value

Rule = Callable[["Call"], "Value | Sequence[Value]"]
RULES: dict[str, Rule] = {}

SMALL = 1e-3  # a constant below this that is added to a statistic is taken for a normalization's epsilon


def register_rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for one or more operators.

    Args:
        operators: names such as ``"aten.relu"`` or ``"mylib.swish"`` (namespace and name, without the overload; a
            trailing underscore of an in-place variant is covered too).

    Returns:
        A decorator for a function from a :class:`Call` to the output's value (or a list of values). Example::

            @register_rule("mylib.scaled_relu")
            def scaled_relu(call):
                return elementwise(call, homogeneous=True)
    """

    def add(rule: Rule) -> Rule:
        for operator in operators:
            RULES[operator if "." in operator else f"aten.{operator}"] = rule
        return rule

    return add


@dataclass
class Call:
    """One operator call of the traced graph.

    Attributes:
        ledger: where demands are made.
        operator: name, for example ``aten.relu``.
        arguments: by the schema's names; tensors are :class:`Value`, everything else is as in the graph.
        outputs: shapes of the outputs.
        place: name of the node, for reasons.
        used: positions of the outputs that something reads.
    """

    ledger: Ledger
    operator: str
    arguments: dict[str, Any]
    outputs: list[tuple[int, ...]]
    place: str
    used: frozenset[int] = frozenset((0,))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name, default)
        return default if value is None else value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs[0]

    @property
    def tensors(self) -> list[Value]:
        """All tensor arguments, lists flattened, in order."""
        found: list[Value] = []
        for argument in self.arguments.values():
            if isinstance(argument, Value):
                found.append(argument)
            elif isinstance(argument, (list, tuple)):
                found += [a for a in argument if isinstance(a, Value)]
        return found

    def axis(self, name: str = "dim", of: Value | None = None, default: int | None = None) -> int:
        value = of or self.tensors[0]
        axis = self.arguments.get(name, default)
        return int(axis) % max(value.ndim, 1)


# ---------------------------------------------------------------------------------------------------------------------
# elementwise


def _join_labels(call: Call, values: Sequence[Value], shape: tuple[int, ...]) -> tuple[list[Value], Value]:
    """Align broadcast operands, unify their labels, and return them with an unscaled result."""
    ledger, ndim = call.ledger, len(shape)
    aligned = [ledger.pad_left(v, ndim) for v in _nest_parameters(ledger, values, ndim)]
    labels, reasons = [], []
    for axis in range(ndim):
        label, reason, found = (), "", False
        for value in aligned:
            if value.shape[axis] == 1:
                continue
            if not found:
                label, reason, found = value.labels[axis], value.reasons[axis], True
            else:
                label = ledger.unify(label, value.labels[axis], reason, value.reasons[axis], axis)
                reason = reason or value.reasons[axis]
        labels.append(label)
        reasons.append(reason)
    return aligned, Value(shape, tuple(labels), tuple(reasons))


def _nest_parameters(ledger: Ledger, values: Sequence[Value], ndim: int) -> list[Value]:
    """Nest the axes of unused parameters as their partners are nested (a bias for each packed member)."""
    found = []
    for value in values:
        if is_fresh(ledger, value):
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
                    value = nest_axis(ledger, value, axis, outer)
        found.append(value)
    return found


def is_fresh(ledger: Ledger, value: Value) -> bool:
    """Whether a value is a parameter that nothing has read yet."""
    return value.parameter is not None and value.parameter not in ledger.used


def nest_axis(ledger: Ledger, value: Value, axis: int, outer: Sequence[int]) -> Value:
    """Give a fresh parameter's axis units and scales of its own for each position along the outer axes."""
    shape = tuple(n if k in outer or k == axis else 1 for k, n in enumerate(value.shape))
    units = ledger.fresh_units(math.prod(shape)).reshape(shape)
    value = ledger.relabel(value, axis, (units,))
    ledger.pin_scale(tuple(t for t in value.scale if all(t[1].shape[k] == 1 for k in range(value.ndim) if k not in outer)))
    terms = [(c, v) for c, v in value.scale if v.shape[axis] == 1]
    return ledger.rescale(value, (*terms, (1.0, ledger.fresh_variables(shape))))


def elementwise(call: Call, *, homogeneous: bool = False, additive: bool = False) -> Value:
    """An operator that acts entry by entry on broadcast operands.

    Args:
        call: the call.
        homogeneous: scaling all tensor operands by c > 0 scales the result by c (relu, maximum); with several
            operands they must scale alike.
        additive: as homogeneous, for sums.
    """
    aligned, result = _join_labels(call, call.tensors, call.shape)
    if not (homogeneous or additive):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    first, *rest = aligned
    for value in rest:
        call.ledger.equate(first.scale, value.scale)
    return replace(result, scale=first.scale)


@register_rule(
    "relu", "leaky_relu", "abs", "neg", "dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "detach",
    "alias", "to", "_to_copy", "type_as", "positive", "rrelu", "lift_fresh_copy", "lift_fresh", "native_dropout",
    "maximum", "minimum", "hypot", "conj", "real", "copysign", "nan_to_num", "float", "half", "double", "_assert_tensor_metadata",
)  # fmt: skip
def _homogeneous(call: Call) -> Value | list[Value]:
    if call.operator == "aten.type_as":
        call.arguments = {"self": call["self"]}
    value = elementwise(call, homogeneous=True)
    return [value] * len(call.outputs)


@register_rule(
    "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "mish", "softplus", "hardswish", "hardsigmoid", "hardtanh",
    "relu6", "exp", "log", "log1p", "expm1", "sin", "cos", "tan", "atan", "erf", "softsign", "log_sigmoid", "hardshrink",
    "softshrink", "tanhshrink", "threshold", "ceil", "floor", "round", "frac", "atan2", "sinh", "cosh", "asin", "acos",
    "logaddexp", "xlogy", "lerp", "fmod", "remainder", "heaviside", "logit", "erfinv", "special_erf",
    "logical_and", "logical_or", "bitwise_and", "bitwise_or", "floor_divide", "quick_gelu", "log2", "log10", "exp2",
)  # fmt: skip
def _inhomogeneous(call: Call) -> Value:
    return elementwise(call)


@register_rule("sign", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_not", "bitwise_not", "sgn")
def _scale_free(call: Call) -> Value:
    aligned, result = _join_labels(call, call.tensors, call.shape)
    if len(aligned) > 1 or call.operator not in ("aten.sign", "aten.sgn", "aten.isnan", "aten.isinf"):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
    return result


@register_rule("ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
               "new_full", "new_empty")  # fmt: skip
def _alike(call: Call) -> Value:
    if "rand" in call.operator:
        return pinned_value(call.shape, "random numbers")
    return call.ledger.uniform(call.shape)


@register_rule("add", "sub", "rsub")
def _add(call: Call) -> Value:
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    if len(values) == 2:
        return elementwise(replace_arguments(call, values), additive=True)
    (value,) = values
    scalar = next((call[n] for n in ("self", "other") if isinstance(call.get(n), (int, float))), 0.0)
    if scalar == 0 or not value.scale:
        return replace(value, parameter=None)
    if abs(scalar) <= SMALL and call.operator == "aten.add":  # an epsilon in a normalization written by hand
        call.ledger.inexact += [v for _, v in value.scale]
        return replace(value, parameter=None)
    call.ledger.pin_scale(value.scale)
    return replace(value, scale=(), parameter=None)


def replace_arguments(call: Call, values: Sequence[Value]) -> Call:
    """The same call with these tensors as its only arguments."""
    return replace(call, arguments={str(k): v for k, v in enumerate(values)})


@register_rule("mul", "div", "true_divide", "divide", "multiply")
def _mul(call: Call) -> Value:
    values = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
    if "div" in call.operator and call.get("rounding_mode"):
        return elementwise(call)
    aligned, result = _join_labels(call, values, call.shape)
    if len(values) == 1:
        scalar_first = not isinstance(call["self"], Value)
        sign = -1.0 if "div" in call.operator and scalar_first else 1.0
        return replace(result, scale=_times(aligned[0].scale, sign))
    sign = -1.0 if "div" in call.operator else 1.0
    return replace(result, scale=call.ledger.merge((*aligned[0].scale, *_times(aligned[1].scale, sign))))


def _times(scale: tuple[Term, ...], factor: float) -> tuple[Term, ...]:
    return tuple((factor * c, v) for c, v in scale)


@register_rule("pow", "square", "sqrt", "rsqrt", "reciprocal")
def _power(call: Call) -> Value:
    values = call.tensors
    exponent = {"aten.square": 2.0, "aten.sqrt": 0.5, "aten.rsqrt": -0.5, "aten.reciprocal": -1.0}.get(call.operator)
    if exponent is None:
        exponent = call["exponent"]
        if len(values) > 1 or isinstance(exponent, Value) or not isinstance(call["self"], Value):
            return elementwise(call)
    _, result = _join_labels(call, values, call.shape)
    return replace(result, scale=_times(values[0].scale, float(exponent)))


@register_rule("addcmul", "addcdiv")
def _addcmul(call: Call) -> Value:
    product = _mul(Call(call.ledger, "aten.mul" if "mul" in call.operator else "aten.div",
                        {"self": call["tensor1"], "other": call["tensor2"]}, call.outputs, call.place))  # fmt: skip
    return elementwise(replace_arguments(call, [call["self"], product]), additive=True)


@register_rule("clamp", "clamp_min", "clamp_max")
def _clamp(call: Call) -> Value:
    low, high = call.get("min"), call.get("max")
    if isinstance(low, Value) or isinstance(high, Value):
        return elementwise(call)
    if high is None and low is not None and 0 <= low <= 1e-5:  # relu, or the guard of a norm: inactive in practice
        return elementwise(call, homogeneous=True)
    return elementwise(call)


@register_rule("_prelu_kernel", "prelu")
def _prelu(call: Call) -> Value:
    value, weight = call["self"], call["weight"]
    if call.operator == "aten.prelu" and value.ndim > 1 and weight.ndim == 1:
        weight = call.ledger.reshape(weight, (1, weight.shape[0], *[1] * (value.ndim - 2)))
    call.ledger.pin_scale(weight.scale)
    aligned, result = _join_labels(call, [value, weight], call.shape)
    return replace(result, scale=aligned[0].scale)


@register_rule("where", "masked_fill")
def _where(call: Call) -> Value:
    if call.operator == "aten.masked_fill":
        condition, kept = call["mask"], [call["self"]]
        other = call["value"]
        fill = 0.0 if isinstance(other, Value) else float(other)
        kept += [other] if isinstance(other, Value) else []
    else:
        condition = call["condition"]
        kept = [call[n] for n in ("self", "other") if isinstance(call.get(n), Value)]
        fill = next((float(call[n]) for n in ("self", "other") if isinstance(call.get(n), (int, float))), 0.0)
    _, result = _join_labels(call, [condition, *kept], call.shape)
    aligned = [call.ledger.pad_left(v, len(call.shape)) for v in kept]
    if fill not in (0.0, math.inf, -math.inf):
        for value in aligned:
            call.ledger.pin_scale(value.scale)
        return result
    for value in aligned[1:]:
        call.ledger.equate(aligned[0].scale, value.scale)
    return replace(result, scale=aligned[0].scale if aligned else ())


@register_rule("glu")
def _glu(call: Call) -> Value:
    axis = call.axis(default=-1)
    left, right = split(call, call["self"], axis, [call["self"].shape[axis] // 2] * 2)
    call.ledger.pin_scale(right.scale)
    _, result = _join_labels(call, [left, right], call.shape)
    return replace(result, scale=left.scale)


@register_rule("fill", "zero", "bernoulli", "uniform", "normal")
def _fill(call: Call) -> Value:
    filler = call.get("value")
    if isinstance(filler, Value):
        call.ledger.pin(filler, "fills a tensor")
    if call.operator in ("aten.fill", "aten.zero"):
        return call.ledger.uniform(call.shape)
    return pinned_value(call.shape, "random numbers")


@register_rule("copy")
def _copy(call: Call) -> Value:
    value, source = call["self"], call["src"]
    _, result = _join_labels(call, [value, source], call.shape)
    return replace(result, scale=call.ledger.pad_left(source, len(call.shape)).scale)


# ---------------------------------------------------------------------------------------------------------------------
# moving data


@register_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as",
               "ravel", "squeeze_copy", "unsqueeze_copy", "view_copy")  # fmt: skip
def _reshape(call: Call) -> Value:
    if call.operator == "aten.view" and "dtype" in call.arguments:
        return unknown(call)
    return call.ledger.reshape(call["self"], call.shape)


@register_rule("permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "mT", "numpy_T",
               "transpose_copy", "permute_copy")  # fmt: skip
def _permute(call: Call) -> Value:
    value: Value = call["self"]
    n = value.ndim
    order = list(range(n))
    name = call.operator.removeprefix("aten.").removesuffix("_copy")
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
        a, b = (-1, -2) if name in ("adjoint", "mT") else (call.get("dim0", call.get("axis0", 0)),
                                                           call.get("dim1", call.get("axis1", 0)))  # fmt: skip
        order[a % n], order[b % n] = order[b % n], order[a % n]
    return call.ledger.permute(value, order)


@register_rule("expand", "expand_as", "broadcast_to", "expand_copy")
def _expand(call: Call) -> Value:
    return call.ledger.expand(call["self"], call.shape)


@register_rule("repeat", "tile", "repeat_interleave")
def _repeat(call: Call) -> Value:
    value: Value = call["self"]
    ledger = call.ledger
    if call.operator == "aten.repeat_interleave":
        count, axis = call["repeats"], call.arguments.get("dim")
        if not isinstance(count, int) or axis is None:
            return unknown(call)
        axis %= value.ndim
        inserted = ledger.reshape(value, (*value.shape[: axis + 1], 1, *value.shape[axis + 1 :]))
        wide = ledger.expand(inserted, (*value.shape[: axis + 1], count, *value.shape[axis + 1 :]))
        return ledger.reshape(wide, call.shape)
    counts = list(call.get("repeats", call.get("dims")))
    counts = [1] * (value.ndim - len(counts)) + counts
    value = ledger.pad_left(value, len(counts))
    for axis, count in enumerate(counts):
        if count > 1:
            if value.shape[axis] == 1:
                target = (*value.shape[:axis], count, *value.shape[axis + 1 :])
                value = ledger.expand(value, target)
            else:
                value = ledger.concatenate([value] * count, axis)
    return value


@register_rule("cat", "concat", "concatenate")
def _cat(call: Call) -> Value:
    values = [v for v in call["tensors"] if v.shape != (0,)]
    return call.ledger.concatenate(values, call.axis(of=values[0], default=0))


@register_rule("stack", "hstack", "vstack", "dstack", "column_stack")
def _stack(call: Call) -> Value:
    if call.operator != "aten.stack":
        return unknown(call)
    values = call["tensors"]
    axis = int(call.get("dim", 0)) % (values[0].ndim + 1)
    shape = (*values[0].shape[:axis], 1, *values[0].shape[axis:])
    return call.ledger.concatenate([call.ledger.reshape(v, shape) for v in values], axis)


def split(call: Call, value: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Cut a value into pieces along an axis."""
    starts = np.cumsum([0, *sizes])
    return [call.ledger.take(value, axis, np.arange(a, a + n)) for a, n in zip(starts, sizes, strict=False)]


@register_rule("chunk", "split", "split_with_sizes", "tensor_split", "split_copy", "unsafe_chunk", "unsafe_split")
def _split(call: Call) -> list[Value]:
    value = call["self"]
    axis = call.axis(default=0)
    return split(call, value, axis, [s[axis] for s in call.outputs])


@register_rule("unbind")
def _unbind(call: Call) -> list[Value]:
    value = call["self"]
    axis = call.axis(default=0)
    return [call.ledger.take(value, axis, k) for k in range(value.shape[axis])]


@register_rule("select", "select_copy")
def _select(call: Call) -> Value:
    value, axis = call["self"], call.axis()
    index = call["index"]
    if not isinstance(index, int):
        return unknown(call)
    return call.ledger.take(value, axis, index % value.shape[axis])


@register_rule("slice", "narrow", "slice_copy")
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
    return call.ledger.take(value, axis, start + step * np.arange(count))


@register_rule("flip", "roll")
def _reorder(call: Call) -> Value:
    value: Value = call["self"]
    dims = call.get("dims", [])
    if not dims:
        return unknown(call)
    for k, dim in enumerate(dims):
        axis = dim % value.ndim
        positions = np.arange(value.shape[axis])
        shift = call["shifts"][k] if "shifts" in call.arguments else 0
        positions = positions[::-1] if call.operator == "aten.flip" else np.roll(positions, shift)
        if value.labels[axis] or any(v.shape[axis] > 1 for _, v in value.scale):
            value = call.ledger.take(value, axis, positions.copy())
    return value


@register_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _shuffle(call: Call) -> Value:
    value, ledger = call["self"], call.ledger
    if call.operator == "aten.channel_shuffle":
        n, c, *space = value.shape
        g = call["groups"]
        split_up = ledger.reshape(value, (n, g, c // g, *space))
        swapped = ledger.permute(split_up, (0, 2, 1, *range(3, value.ndim + 1)))
        return ledger.reshape(swapped, call.shape)
    *lead, c, h, w = value.shape
    k = len(lead)
    if call.operator == "aten.pixel_shuffle":
        r = call["upscale_factor"]
        parts = ledger.reshape(value, (*lead, c // r**2, r, r, h, w))
        order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    else:
        r = call["downscale_factor"]
        parts = ledger.reshape(value, (*lead, c, h // r, r, w // r, r))
        order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return ledger.reshape(ledger.permute(parts, order), call.shape)


@register_rule("index", "index_select", "gather", "take_along_dim")
def _index(call: Call) -> Value:
    value: Value = call["self"]
    if call.operator == "aten.index_select":
        value = call.ledger.mix(value, call.axis(), "indexed")
        _pin_tensor(call, call["index"], "an index")
        return replace(value, shape=call.shape, parameter=None)
    if call.operator in ("aten.gather", "aten.take_along_dim"):
        return unknown(call)
    indices = call["indices"]
    used = [k for k, i in enumerate(indices) if i is not None]
    for k in used:
        _pin_tensor(call, indices[k], "an index")
        value = call.ledger.mix(value, k, "indexed")
    width = max(indices[k].ndim for k in used)
    contiguous = used == list(range(used[0], used[-1] + 1))
    start = used[0] if contiguous else 0
    kept = [k for k in range(value.ndim) if k not in used]
    # bring the kept axes into a frame without the indexed ones, then insert the index's own (pinned) axes
    source = call.ledger.permute(value, [*kept, *used])
    for _ in used:
        source = call.ledger.take(source, source.ndim - 1, 0)
    before = [k for k in kept if k < start] if contiguous else []
    at = len(before)
    frame = (*source.shape[:at], *[1] * width, *source.shape[at:])
    result = call.ledger.reshape(source, frame)
    labels = list(result.labels)
    reasons = list(result.reasons)
    for k in range(at, at + width):
        labels[k], reasons[k] = (), "indexed"
    return Value(call.shape, tuple(labels), tuple(reasons), result.scale)


def _pin_tensor(call: Call, value: Any, reason: str) -> None:
    if isinstance(value, Value):
        call.ledger.pin(value, reason)


@register_rule("pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d", "reflection_pad1d", "replication_pad1d")
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
                result = call.ledger.take(result, axis, np.arange(max(-low, 0), size - max(-high, 0)))
            pieces = [result]
            for side, n in zip((0, 1), extra, strict=True):
                if n > 0:
                    shape = (*result.shape[:axis], n, *result.shape[axis + 1 :])
                    blank = replace(pinned_value(shape, "padding"), labels=tuple(
                        () if j == axis else result.labels[j] for j in range(value.ndim)))  # fmt: skip
                    pieces.insert(0 if side == 0 else len(pieces), blank)
            if len(pieces) > 1:
                scale = result.scale
                if scale and any(v.shape[axis] == 1 for _, v in scale):
                    pieces = [replace(p, scale=scale) if p is not result else p for p in pieces]
                result = call.ledger.concatenate(pieces, axis)
        else:
            result = call.ledger.mix(result, axis, "padded")
            shape = (*result.shape[:axis], result.shape[axis] + low + high, *result.shape[axis + 1 :])
            result = replace(result, shape=shape)
    if filler not in (0, None, -math.inf, math.inf):
        call.ledger.pin_scale(result.scale)
        result = replace(result, scale=())
    return replace(result, parameter=None)


# ---------------------------------------------------------------------------------------------------------------------
# reductions and what acts along an axis


def _dims(call: Call, value: Value) -> list[int]:
    dims = call.arguments.get("dim", call.arguments.get("axis"))
    if dims is None or dims == []:
        return list(range(value.ndim))
    return sorted({d % value.ndim for d in ([dims] if isinstance(dims, int) else dims)})


@register_rule("mean", "sum", "amax", "amin", "max", "min", "std", "var", "linalg_vector_norm", "norm", "nansum", "median",
               "var_mean", "std_mean", "logsumexp", "prod", "any", "all", "frobenius_norm")  # fmt: skip
def _reduce(call: Call) -> Value | list[Value]:
    value: Value = call["self"]
    name = call.operator.removeprefix("aten.")
    if name in ("max", "min") and isinstance(call.get("other"), Value):
        return elementwise(call, homogeneous=True)
    dims = _dims(call, value)
    if name in ("logsumexp", "prod", "any", "all"):
        call.ledger.pin_scale(value.scale)
        value = replace(value, scale=())
    keep = len(call.outputs[0]) == value.ndim
    for axis in sorted(dims, reverse=True):
        value = call.ledger.drop(value, axis, keep=keep)
    value = replace(value, parameter=None)
    power = 2.0 if name in ("var", "var_mean") else 1.0
    first = replace(value, scale=_times(value.scale, power))
    if len(call.outputs) == 1:
        return first
    if name in ("max", "min", "median"):  # the second output holds positions: they move with the units
        return [first, pinned_value(call.outputs[1], "positions of a maximum")]
    return [first, value]


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin")
def _softmax(call: Call) -> Value:
    value: Value = call["self"]
    call.ledger.pin_scale(value.scale)
    return replace(value, scale=(), parameter=None)


@register_rule("cumsum", "cumprod", "logcumsumexp", "diff")
def _cumulative(call: Call) -> Value:
    value = call.ledger.mix(call["self"], call.axis(default=-1), "accumulated along the axis")
    if call.operator != "aten.cumsum":
        call.ledger.pin_scale(value.scale)
        value = replace(value, scale=())
    return replace(value, shape=call.shape)


@register_rule("argmax", "argmin", "argsort", "sort", "topk")
def _positions(call: Call) -> Sequence[Value]:
    call.ledger.pin(call["self"], "positions are returned")
    return [pinned_value(s, "positions are returned") for s in call.outputs]


# ---------------------------------------------------------------------------------------------------------------------
# contractions


def contract(
    call: Call, operands: Sequence[Value], letters: Sequence[str], output: str, *, absorbs: bool = False
) -> Value:
    """A sum of products: the general form of linear maps, matrix products and einsum.

    Axes that share a letter are indexed by the same units. What is summed over must not scale. A parameter that comes
    here unused and shares a letter with the output and another operand holds one map for each position of it (packed
    or batched layers): its other axes are then nested in that axis. ``absorbs`` says that an operand is the view of a
    fresh parameter.
    """
    ledger = call.ledger
    every = "".join(dict.fromkeys("".join(letters)))
    place = {letter: k for k, letter in enumerate(every)}
    sizes: dict[str, int] = {}
    for value, own in zip(operands, letters, strict=True):
        for letter, n in zip(own, value.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), n)

    def frame(array: np.ndarray, own: str) -> np.ndarray:
        """An array over an operand's axes, laid into the frame of all letters."""
        order = sorted(range(len(own)), key=lambda k: place[own[k]])
        shape = [1] * len(every)
        for k in order:
            shape[place[own[k]]] = array.shape[k]
        return array.transpose(order).reshape(shape)

    fresh: list[Value] = []
    for value, own in zip(operands, letters, strict=True):
        if is_fresh(ledger, value):
            others = [o for v, o in zip(operands, letters, strict=True) if v is not value]
            batch = [k for k, x in enumerate(own) if value.shape[k] > 1 and x in output and any(x in o for o in others)]
            for axis, n in enumerate(value.shape):
                if batch and axis not in batch and n > 1:
                    value = nest_axis(ledger, value, axis, batch)
        fresh.append(value)

    labels: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for value, own in zip(fresh, letters, strict=True):
        for axis, letter in enumerate(own):
            if value.shape[axis] == 1:
                continue
            label = tuple(frame(c, own) for c in value.labels[axis])
            if letter in labels:
                labels[letter] = ledger.unify(labels[letter], label, reasons[letter], value.reasons[axis], place[letter])
                reasons[letter] = reasons[letter] or value.reasons[axis]
            else:
                labels[letter], reasons[letter] = label, value.reasons[axis]
    full = Value(
        tuple(sizes[x] for x in every),
        tuple(labels.get(x, ()) for x in every),
        tuple(reasons.get(x, "") for x in every),
    )
    ledger.observe(full)
    scale = tuple((c, frame(v, own)) for value, own in zip(fresh, letters, strict=True) for c, v in value.scale)
    summed = [place[x] for x in every if x not in output]
    varying = [any(v.shape[k] > 1 for k in summed) for _, v in scale]
    inside = tuple(t for t, within in zip(scale, varying, strict=True) if within)
    rest = tuple(t for t, within in zip(scale, varying, strict=True) if not within)
    if inside and not absorbs and not any(is_fresh(ledger, v) for v in fresh):
        # what is summed over may scale alike: the common factor passes on (a fresh parameter would absorb it)
        common = [max(n) if k not in summed else 1 for k, n in enumerate(zip(*(v.shape for _, v in inside), strict=True))]
        factor = ledger.fresh_variables(tuple(common))
        ledger.equate(inside, ((1.0, factor),))
        rest = (*rest, (1.0, factor))
    else:
        ledger.pin_scale(inside)
    result = replace(full, scale=ledger.merge(rest))
    for axis in sorted(summed, reverse=True):
        result = ledger.drop(result, axis)
    remaining = [x for x in every if x in output]
    result = ledger.permute(result, [remaining.index(x) for x in output])
    return ledger.reshape(result, call.shape) if result.shape != call.shape else result


@register_rule("linear")
def _linear(call: Call) -> Value:
    value, weight = call.get("input", call.get("self")), call["weight"]
    lead = "abcdefgh"[: value.ndim - 1]
    if weight.ndim == 1:
        return contract(call, [value, weight], [lead + "y", "y"], lead)
    result = contract(call, [value, weight], [lead + "y", "zy"], lead + "z")
    return _add_bias(call, result, call.get("bias"), result.ndim - 1)


def _add_bias(call: Call, result: Value, bias: Value | None, axis: int) -> Value:
    if bias is None:
        return result
    frame = [1] * result.ndim
    frame[axis] = bias.shape[-1]
    laid = call.ledger.reshape(bias, frame)
    label = call.ledger.unify(result.labels[axis], laid.labels[axis], result.reasons[axis], laid.reasons[axis])
    call.ledger.equate(laid.scale, result.scale)
    return replace(result, labels=(*result.labels[:axis], label, *result.labels[axis + 1 :]))


@register_rule("matmul", "mm", "bmm", "mv", "dot", "inner")
def _matmul(call: Call) -> Value:
    a, b = call.tensors[:2]
    if call.operator == "aten.inner":
        return unknown(call)
    left, right = ("y", "yz") if a.ndim == 1 else ("xy", "y" if b.ndim == 1 else "yz")
    right = "y" if b.ndim == 1 else right
    lead_a, lead_b = max(a.ndim - 2, 0), max(b.ndim - 2, 0)
    alphabet = "abcdefgh"[: max(lead_a, lead_b)]
    left = alphabet[len(alphabet) - lead_a :] + left
    right = alphabet[len(alphabet) - lead_b :] + right
    output = alphabet + ("x" if a.ndim > 1 else "") + ("z" if b.ndim > 1 else "")
    return contract(call, [a, b], [left, right], output)


@register_rule("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(call: Call) -> Value:
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    if call.operator in ("aten.addbmm", "aten.addmv"):
        return unknown(call)
    product = _matmul(replace_arguments(call, [call[n] for n in names]))
    return elementwise(replace_arguments(call, [call["self"], product]), additive=True)


@register_rule("einsum")
def _einsum(call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    operands = call["tensors"]
    inputs, arrow, output = equation.partition("->")
    specs = inputs.split(",")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    width = max((v.ndim - len(s.replace("...", "")) for v, s in zip(operands, specs, strict=True) if "..." in s), default=0)
    dots = "".join(spare[:width])
    specs = [
        s.replace("...", dots[width - (v.ndim - len(s.replace("...", ""))) :] if "..." in s else "")
        for v, s in zip(operands, specs, strict=True)
    ]
    if any(len(set(s)) != len(s) for s in specs):
        return unknown(call)
    joined = "".join(specs)
    output = output.replace("...", dots) if arrow else dots + "".join(sorted(c for c in joined if joined.count(c) == 1))
    return contract(call, operands, specs, output)


@register_rule("scaled_dot_product_attention")
def _attention(call: Call) -> Value:
    query, key, value = call["query"], call["key"], call["value"]
    ledger = call.ledger
    lead = query.ndim - 2
    if call.get("enable_gqa", False) and key.shape[lead - 1] != query.shape[lead - 1]:
        axis, count = lead - 1, query.shape[lead - 1] // key.shape[lead - 1]
        key, value = (
            _repeat(Call(ledger, "aten.repeat_interleave", {"self": v, "repeats": count, "dim": axis},
                         [(*v.shape[:axis], v.shape[axis] * count, *v.shape[axis + 1 :])], call.place))
            for v in (key, value)
        )  # fmt: skip
    letters = "abcdef"[:lead]
    shape = (*np.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])
    scores = contract(replace(call, outputs=[shape]), [query, key], [letters + "xy", letters + "zy"], letters + "xz")
    mask = call.get("attn_mask")
    ledger.pin_scale(scores.scale)
    scores = replace(scores, scale=())
    if isinstance(mask, Value):
        scores = elementwise(replace(call, arguments={"0": scores, "1": mask}, outputs=[shape]))
    if call.get("is_causal", False):
        scores = ledger.mix(ledger.mix(scores, lead, "causal mask"), lead + 1, "causal mask")
    return contract(call, [scores, value], [letters + "xz", letters + "zw"], letters + "xw")


@register_rule("bilinear")
def _bilinear(call: Call) -> Value:
    a, b, weight = call["input1"], call["input2"], call["weight"]
    lead = "cdefgh"[: a.ndim - 1]
    result = contract(call, [a, weight, b], [lead + "x", "oxy", lead + "y"], lead + "o")
    return _add_bias(call, result, call.get("bias"), result.ndim - 1)


@register_rule("embedding")
def _embedding(call: Call) -> Value:
    weight: Value = call["weight"]
    _pin_tensor(call, call["indices"], "an index")
    table = call.ledger.mix(weight, 0, "rows are looked up")
    row = call.ledger.take(table, 0, 0)
    lead = len(call.shape) - row.ndim
    laid = call.ledger.pad_left(row, row.ndim + lead)
    return replace(laid, shape=call.shape, reasons=("looked up",) * lead + row.reasons)


# ---------------------------------------------------------------------------------------------------------------------
# convolutions, pooling, resampling


@register_rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(call: Call) -> Value:
    value, weight = call["input"], call["weight"]
    ledger = call.ledger
    transposed = "transpose" in call.operator or bool(call.get("transposed", False))
    groups = int(call.get("groups", 1))
    space = weight.ndim - 2
    batched = value.ndim == space + 2
    axis = 1 if batched else 0
    for k in range(axis + 1, value.ndim):
        value = ledger.mix(value, k, "spatial position")
    if batched and value.shape[0] > 1:
        value = ledger.unnest(value, 0)
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
    kernel = Value((weight.shape[0], weight.shape[1]), tuple(tuple(c.reshape(c.shape[:2]) for c in lab)
                   for lab in weight.labels[:2]), weight.reasons[:2],
                   tuple((c, v.reshape(v.shape[:2])) for c, v in scale), weight.parameter if groups > 1 else None)  # fmt: skip

    absorbs = is_fresh(ledger, weight)
    label, terms = ledger.channel(value, axis)
    channels = value.shape[axis]
    inputs = Value((channels,), (label,), (value.reasons[axis],), terms)
    if groups == 1:
        ledger.observe(kernel)
        spec = ("y", "yz" if transposed else "zy", "z")
    else:
        inputs = ledger.reshape(inputs, (groups, channels // groups))
        ledger.observe(inputs)
        kernel = _grouped(call, kernel, groups)
        spec = ("gy", "gyz" if transposed else "gzy", "gz")
    shape = tuple(
        n for n in ((groups,) if groups > 1 else ()) + (kernel.shape[-1] if transposed else kernel.shape[-2],)
    )
    out = contract(replace(call, outputs=[shape]), [inputs, kernel], [spec[0], spec[1]], spec[2], absorbs=absorbs)
    if groups > 1:
        out = ledger.reshape(out, (math.prod(out.shape),))
    bias = call.get("bias")
    if bias is not None:
        out = _add_bias(call, out, bias, 0)
    frame = [1] * len(call.shape)
    frame[axis] = out.shape[0]
    laid = ledger.reshape(out, frame)
    reasons = tuple(laid.reasons[k] if k == axis else ("batch" if k < axis else "spatial position") for k in range(len(frame)))
    labels = list(laid.labels)
    if batched and value.shape[0] > 1:
        lead = value.labels[0]
        labels[0] = tuple(c[(slice(None),) + (slice(0, 1),) * (c.ndim - 1)].reshape(-1, *[1] * (len(frame) - 1)) for c in lead)
    return Value(call.shape, tuple(labels), reasons, laid.scale)


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
        kernel = replace(kernel, labels=(kernel.labels[0], (wide_units,)),
                         scale=(*(t for t in kernel.scale if t[1].shape[1] == 1), (1.0, wide_variables)))  # fmt: skip
    return ledger.reshape(replace(kernel, parameter=None), (groups, rows // groups, columns))


@register_rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool3d_with_indices", "max_pool2d_with_indices",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_linear1d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "mean_pool",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "fractional_max_pool2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
def _pool(call: Call) -> Value | list[Value]:
    value: Value = call.get("self", call.get("input"))
    name = call.operator
    space = next(n for n in (1, 2, 3) if f"{n}d" in name)
    for axis in range(value.ndim - space, value.ndim):
        value = call.ledger.mix(value, axis, "spatial position")
    result = replace(value, shape=call.shape, parameter=None)
    return [result] * len(call.outputs)


@register_rule("grid_sampler", "im2col", "col2im")
def _unfold(call: Call) -> Value:
    if call.operator != "aten.im2col":
        return unknown(call)
    value: Value = call["self"]
    batched = value.ndim == 4
    for axis in range(value.ndim - 2, value.ndim):
        value = call.ledger.mix(value, axis, "spatial position")
    lead, channels = value.shape[: value.ndim - 3], value.shape[value.ndim - 3]
    taps = math.prod(call["kernel_size"])
    flat = call.ledger.take(call.ledger.take(value, value.ndim - 1, 0), value.ndim - 2, 0)
    wide = call.ledger.reshape(flat, (*lead, channels, 1, 1))
    blank = pinned_value((taps,), "kernel position")
    wide = replace(wide, shape=(*lead, channels, taps, 1), reasons=(*wide.reasons[:-2], *blank.reasons, ""))
    merged = call.ledger.reshape(wide, (*lead, channels * taps, 1))
    assert batched or len(lead) == 0
    return replace(merged, shape=call.shape)


@register_rule("unfold")
def _windows(call: Call) -> Value:
    value: Value = call["self"]
    axis = int(call["dimension"]) % value.ndim
    value = call.ledger.mix(value, axis, "windows are cut")
    frame = call.ledger.reshape(value, (*value.shape, 1)) if value.ndim else value
    return replace(frame, shape=call.shape)


# ---------------------------------------------------------------------------------------------------------------------
# normalizations


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
        laid = call.ledger.reshape(operand, frame)
        labels = list(value.labels)
        for axis in axes:
            labels[axis] = call.ledger.unify(labels[axis], laid.labels[axis], value.reasons[axis], laid.reasons[axis])
        if multiply:
            value = replace(value, labels=tuple(labels), scale=(*value.scale, *laid.scale))
        else:
            call.ledger.equate(laid.scale, value.scale)
            value = replace(value, labels=tuple(labels))
            if weight is None:
                call.ledger.pin_scale(laid.scale)
    return value


@register_rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm",
               "_native_batch_norm_legit_no_training")  # fmt: skip
def _batch_norm(call: Call) -> Value | list[Value]:
    value: Value = call["input"]
    ledger = call.ledger
    mean, variance = call.get("running_mean"), call.get("running_var")
    label, _ = ledger.channel(replace(value, scale=()), 1)
    terms = value.scale
    for axis in range(value.ndim):
        if axis != 1:
            terms = tuple((c, ledger._constant_along(v, axis)) for c, v in terms)
    value = replace(value, scale=terms)
    flat = tuple((c, v.reshape(-1) if v.size > 1 else np.repeat(v.reshape(-1), value.shape[1])) for c, v in terms)
    for statistic, power in ((mean, 1.0), (variance, 2.0)):
        if statistic is not None:
            ledger.unify(statistic.labels[0], label, "", value.reasons[1])
            target = _times(flat, power)
            if statistic.parameter is not None and statistic.parameter not in ledger.used:
                ledger.rescale(statistic, target)
            elif power == 1.0:
                ledger.equate(statistic.scale, target)
    inner = _absorb(call, value, call.get("eps"))
    result = _affine(call, inner, call.get("weight"), call.get("bias"), [1])
    return [result] * len(call.outputs)


@register_rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> Value | list[Value]:
    value: Value = call["input"]
    axes = list(range(value.ndim - len(call["normalized_shape"]), value.ndim))
    scale = value.scale
    for axis in axes:
        scale = tuple((c, call.ledger._constant_along(v, axis)) for c, v in scale)
    inner = _absorb(call, replace(value, scale=scale), call.get("eps"))
    result = _affine(call, inner, call.get("weight"), call.get("bias"), axes)
    return [result] * len(call.outputs)


@register_rule("group_norm", "native_group_norm")
def _group_norm(call: Call) -> Value:
    value: Value = call["input"]
    ledger = call.ledger
    groups = int(call.get("num_groups", call.get("group", 1)))
    n, channels, *space = value.shape
    for axis in range(2, value.ndim):
        value = replace(value, scale=tuple((c, ledger._constant_along(v, axis)) for c, v in value.scale))
    blocks = ledger.reshape(value, (n, groups, channels // groups, *space))
    ledger.observe(blocks)
    for _, v in blocks.scale:
        ledger._constant_along(v, 2)
    inner = _absorb(call, value, call.get("eps"))
    return _affine(call, inner, call.get("weight"), call.get("bias"), [1])


@register_rule("_weight_norm", "_weight_norm_interface")
def _weight_norm(call: Call) -> Value | list[Value]:
    value, gain = call["v"], call["g"]
    axis = int(call.get("dim", 0)) % value.ndim
    for term in value.scale:
        if term[1].shape[axis] == 1:  # a factor on all of v is what its own axis offers already
            call.ledger.pin_scale((term,))
    _, joined = _join_labels(call, [value, gain], value.shape)
    return [replace(joined, scale=gain.scale)] * len(call.outputs)


# ---------------------------------------------------------------------------------------------------------------------
# recurrent layers


@register_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> list[Value]:
    ledger = call.ledger
    if "data" in call.arguments and "batch_sizes" in call.arguments:
        return unknown(call)
    gates = {"aten.lstm": 4, "aten.gru": 3}.get(call.operator, 1)
    value: Value = call["input"]
    time = 1 if call["batch_first"] else 0
    value = ledger.mix(value, time, "time step") if value.ndim == 3 else ledger.mix(value, 0, "time step")
    directions = 2 if call["bidirectional"] else 1
    parameters: list[Value] = list(call["params"])
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    layers = int(call["num_layers"])
    each = len(parameters) // (layers * directions)
    label, terms = ledger.channel(value, value.ndim - 1)
    source = Value((value.shape[-1],), (label,), (value.reasons[-1],), terms)
    cells: list[Value] = []
    finals: list[Value] = []
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            w_ih, w_hh, *others = parameters[(layer * directions + direction) * each :][:each]
            biases = [b for b in others if b.ndim == 1]
            projection = next((b for b in others if b.ndim == 2), None)
            hidden = w_hh.shape[0] // gates
            units = ledger.fresh_units(hidden)
            slots = np.tile(units, gates), np.repeat(-1 - np.arange(gates), hidden)
            for w in (w_ih, w_hh, *biases):
                gate = tuple(along(s, 0, w.ndim) for s in slots) if gates > 1 else (along(units, 0, w.ndim),)
                ledger.pin_scale(w.scale if w is not w_ih else tuple(t for t in w.scale if t[1].shape[0] > 1))
                ledger.relabel(w, 0, gate)
            ledger.unify(w_ih.labels[1], (source.labels[0][0].reshape(1, -1),) if len(source.labels[0]) == 1 else
                         tuple(c.reshape(1, -1) for c in source.labels[0]), "", source.reasons[0])  # fmt: skip
            incoming = tuple((c, v.reshape(1, -1)) for c, v in source.scale)
            ledger.pin_scale((*(t for t in w_ih.scale if t[1].shape[1] > 1), *incoming))
            out = units
            if projection is not None:
                ledger.pin_scale(projection.scale)
                ledger.unify(projection.labels[1], (units.reshape(1, -1),))
                out = ledger.fresh_units(projection.shape[0])
                ledger.unify(projection.labels[0], (out.reshape(-1, 1),))
            ledger.unify(w_hh.labels[1], (out.reshape(1, -1),))
            cell = Value((hidden,), ((units,),), ("",))
            ledger.observe(cell)
            for state in states:
                _initial_state(call, state, layer * directions + direction, cell if state.shape[-1] == hidden else
                               Value((len(out),), ((out,),), ("",)))  # fmt: skip
            outs.append(Value((len(out),), ((out,),), ("",)))
            cells.append(cell)
        finals += outs
        source = outs[0] if directions == 1 else ledger.concatenate(outs, 0)
    frame = [1] * (len(call.outputs[0]) - 1) + [source.shape[0]]
    laid = ledger.reshape(source, frame)
    sequence = replace(laid, shape=call.outputs[0], reasons=("time step",) * (len(frame) - 1) + laid.reasons[-1:])
    return [sequence, *(_final_state(call, k, cells, finals) for k in range(1, len(call.outputs)))]


def _final_state(call: Call, position: int, cells: list[Value], outs: list[Value]) -> Value:
    """The states after the last step: indexed by the hidden units where there is one layer, pinned where several."""
    shape = call.outputs[position]
    states = outs if position == 1 else cells
    if len(states) > 1:
        reason = "final states of several layers are stacked"
        if position in call.used:
            for state in states:
                call.ledger.pin(state, reason)
        return pinned_value(shape, reason)
    return replace(call.ledger.reshape(states[0], [1] * (len(shape) - 1) + [states[0].shape[0]]), shape=shape)


def _initial_state(call: Call, state: Value, index: int, cell: Value) -> None:
    """An initial state is indexed by the hidden units, and must not scale."""
    call.ledger.pin_scale(state.scale)
    own = call.ledger.take(state, 0, index)
    for axis in range(own.ndim - 1):
        own = call.ledger.unnest(own, axis)
    frame = tuple(c.reshape([1] * (own.ndim - 1) + [-1]) for c in cell.labels[0])
    call.ledger.unify(own.labels[-1], frame, own.reasons[-1], "")


# ---------------------------------------------------------------------------------------------------------------------
# what has no rule


def unknown(call: Call) -> Any:
    """Claim nothing: everything that the operator touches is pinned."""
    reason = f"operator {call.operator} has no rule"
    for value in call.tensors:
        call.ledger.pin(value, reason)
    values = [pinned_value(s, reason) for s in call.outputs]
    return values[0] if len(values) == 1 else values
