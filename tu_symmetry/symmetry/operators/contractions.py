"""Rules for sums of products: linear maps, matrix products, einsum, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Label, Value, pinned_value, varies
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.operators.pointwise import elementwise, is_fresh, replace_arguments
from tu_symmetry.symmetry.operators.rearranging import pin_tensor, repeat
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


def contract(call: Call, operands: Sequence[Value], letters: Sequence[str], output: str) -> Value:
    """A sum of products: the general form of linear maps, matrix products and einsum.

    Axes that share a letter are indexed by the same units. What is summed over must not scale. A parameter that comes
    here unused has its axes nested as :func:`_nested` tells. ``absorbs`` says that an operand is the view of a fresh
    parameter.
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

    fresh = [
        _nested(ledger, value, own, [(v, o) for v, o in zip(operands, letters, strict=True) if v is not value], output)
        for value, own in zip(operands, letters, strict=True)
    ]
    labels: dict[str, Label] = {}
    reasons: dict[str, str] = {}
    nested = {
        letter
        for value, own in zip(fresh, letters, strict=True)
        for k, letter in enumerate(own)
        if any(n > 1 for c in value.labels[k] for j, n in enumerate(c.shape) if j != k)
    }
    order = sorted(every, key=lambda x: (x in nested, x not in output, sum(x in own for own in letters) < 2))
    for letter in order:
        for value, own in zip(fresh, letters, strict=True):
            axis = own.find(letter)
            if axis < 0 or value.shape[axis] == 1:
                continue
            label = tuple(frame(c, own) for c in value.labels[axis])
            if letter in labels:
                others = [labels.get(x, ()) for x in every]
                labels[letter] = ledger.unify(
                    labels[letter], label, reasons[letter], value.reasons[axis], place[letter], others
                )
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
    absorbs = any(
        (is_fresh(ledger, value) or id(given) in call.sole)
        and any(all(v.shape[k] == 1 for k, x in enumerate(own) if x not in output) for _, v in value.scale)
        for given, value, own in zip(operands, fresh, letters, strict=True)
    )
    if inside and not absorbs:
        # what is summed over may scale alike: the factor passes on (or is one of a fresh parameter's outputs)
        common = [
            max(n) if k not in summed else 1 for k, n in enumerate(zip(*(v.shape for _, v in inside), strict=True))
        ]
        factor = ledger.fresh_variables(tuple(common))
        ledger.equate(inside, ((1.0, factor),))
        rest = (*rest, (1.0, factor))
    else:
        ledger.pin_scale(inside)
    result = replace(full, scale=ledger.merge(rest))
    remaining = list(every)
    for letter in sorted((every[k] for k in reversed(summed)), key=lambda x: -_depth(labels.get(x, ()))):
        result = views.drop(ledger, result, remaining.index(letter))  # units before the blocks that they are nested in
        remaining.remove(letter)
    result = views.permute(result, [remaining.index(x) for x in output])
    return views.reshape(ledger, result, call.shape) if result.shape != call.shape else result


def _nested(ledger: Ledger, value: Value, own: str, partners: Sequence[tuple[Value, str]], output: str) -> Value:
    """A parameter with axes nested in one another, so that they have units of their own wherever they can.

    * A letter that is shared with the output and another operand tells maps apart (packed layers, experts): all other
      axes are nested in it.
    * What is nested in another operand is nested likewise (the units of heads, which come in as ``[..., heads, units]``
      and are read by a weight ``[heads, units, outputs]``).
    * Of several axes that only the output shares (``[inputs, heads, units]``) the last is nested in the one before.
    """
    wide = [k for k, n in enumerate(value.shape) if n > 1]
    batch = [k for k in wide if own[k] in output and any(own[k] in o for _, o in partners)]
    free = [k for k in wide if own[k] in output and k not in batch]
    for axis in wide:
        if axis in batch:
            continue
        met = {
            o[j]
            for v, o in partners
            if own[axis] in o
            for c in v.labels[o.index(own[axis])]
            for j, n in enumerate(c.shape)
            if n > 1
        }
        beside = {o[j] for v, o in partners if own[axis] in o for j, n in enumerate(v.shape) if n > 1}
        outer = [k for k in wide if k != axis and (own[k] in met or (k in batch and (not beside or own[k] in beside)))]
        if outer:
            value = ledger.nest(value, axis, outer)
    if len(free) > 1 and not batch:
        *outer, axis = ledger.nested_order(free)
        value = ledger.nest(value, axis, outer, guessed=True)
    return value


def _depth(label: Label) -> int:
    """The number of axes that a label varies along."""
    return max((len(varies(component)) for component in label), default=0)


@register_rule("linear", traits=("spreads",))
def _linear(call: Call) -> Value:
    value, weight = call.get("input", call.get("self")), call["weight"]
    lead = "abcdefgh"[: value.ndim - 1]
    if weight.ndim == 1:
        return contract(call, [value, weight], [lead + "y", "y"], lead)
    result = contract(call, [value, weight], [lead + "y", "zy"], lead + "z")
    return add_bias(call, result, call.get("bias"), result.ndim - 1)


def add_bias(call: Call, result: Value, bias: Value | None, axis: int) -> Value:
    """Add a one-dimensional bias along an axis."""
    if bias is None:
        return result
    frame = [1] * result.ndim
    frame[axis] = bias.shape[-1]
    laid = views.reshape(call.ledger, bias, frame)
    label = call.ledger.unify(result.labels[axis], laid.labels[axis], result.reasons[axis], laid.reasons[axis])
    call.ledger.equate(laid.scale, result.scale)
    return result.with_axis(axis, label=label)


@register_rule("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "_sparse_mm", traits=("spreads",))
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


@register_rule("addmm", "baddbmm", "addbmm", "addmv", "_sparse_addmm", traits=("spreads",))
def _addmm(call: Call) -> Value:
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    if call.operator in ("aten.addbmm", "aten.addmv"):
        return unknown(call)
    product = _matmul(replace_arguments(call, [call[n] for n in names]))
    return elementwise(replace_arguments(call, [call["self"], product]), additive=True)


@register_rule("einsum", traits=("spreads",))
def _einsum(call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    operands = call["tensors"]
    inputs, arrow, output = equation.partition("->")
    specs = inputs.split(",")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    width = max(
        (v.ndim - len(s.replace("...", "")) for v, s in zip(operands, specs, strict=True) if "..." in s), default=0
    )
    dots = "".join(spare[:width])
    specs = [
        s.replace("...", dots[width - (v.ndim - len(s.replace("...", ""))) :] if "..." in s else "")
        for v, s in zip(operands, specs, strict=True)
    ]
    operands, specs = _without_repeats(call, operands, specs)
    joined = "".join(specs)
    output = output.replace("...", dots) if arrow else dots + "".join(sorted(c for c in joined if joined.count(c) == 1))
    return contract(call, operands, specs, output)


def _without_repeats(call: Call, operands: list[Value], specs: list[str]) -> tuple[list[Value], list[str]]:
    """Operands whose letters are all different: a letter that comes twice stands for the diagonal of its axes."""
    values, letters = [], []
    for value, own in zip(operands, specs, strict=True):
        for letter in dict.fromkeys(own):
            while own.count(letter) > 1:
                first = own.index(letter)
                second = own.index(letter, first + 1)
                value = views.diagonal(call.ledger, value, first, second)
                own = own[:first] + own[first + 1 : second] + own[second + 1 :] + letter
        values.append(value)
        letters.append(own)
    return values, letters


@register_rule("scaled_dot_product_attention")
def _attention(call: Call) -> Value:
    query, key, value = call["query"], call["key"], call["value"]
    ledger = call.ledger
    lead = query.ndim - 2
    if call.get("enable_gqa", False) and key.shape[lead - 1] != query.shape[lead - 1]:
        axis, count = lead - 1, query.shape[lead - 1] // key.shape[lead - 1]

        def repeated(v: Value) -> Value:
            arguments = {"self": v, "repeats": count, "dim": axis}
            shape = v.with_axis(axis, size=v.shape[axis] * count).shape
            return repeat(Call(ledger, "aten.repeat_interleave", arguments, [shape], call.place))

        key, value = repeated(key), repeated(value)
    letters = "abcdef"[:lead]
    shape = (*np.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])
    scores = contract(replace(call, outputs=[shape]), [query, key], [letters + "xy", letters + "zy"], letters + "xz")
    mask = call.get("attn_mask")
    scores = views.unnest(ledger, ledger.unscaled(scores), lead + 1)
    if isinstance(mask, Value):
        scores = elementwise(replace(call, arguments={"0": scores, "1": mask}, outputs=[shape]))
    if call.get("is_causal", False):
        scores = views.mix(ledger, views.mix(ledger, scores, lead, "causal mask"), lead + 1, "causal mask")
    return contract(call, [scores, value], [letters + "xz", letters + "zw"], letters + "xw")


@register_rule("bilinear", traits=("spreads",))
def _bilinear(call: Call) -> Value:
    a, b, weight = call["input1"], call["input2"], call["weight"]
    lead = "cdefgh"[: a.ndim - 1]
    result = contract(call, [a, weight, b], [lead + "x", "oxy", lead + "y"], lead + "o")
    return add_bias(call, result, call.get("bias"), result.ndim - 1)


@register_rule("embedding_bag")
def _bag(call: Call) -> list[Value]:
    """Sums, means and maxima of rows; the other outputs count the rows."""
    weight: Value = call["weight"]
    pin_tensor(call, call["indices"], "an index")
    for name in ("offsets", "per_sample_weights"):
        pin_tensor(call, call.get(name), name)
    table = views.mix(call.ledger, weight, 0, "rows are looked up")
    row = views.take(call.ledger, table, 0, 0)
    lead = len(call.outputs[0]) - row.ndim
    laid = views.pad_left(row, row.ndim + lead)
    found = replace(laid, shape=call.outputs[0], reasons=("looked up",) * lead + row.reasons)
    return [found, *(pinned_value(shape, "counts rows") for shape in call.outputs[1:])]


@register_rule("cdist", traits=("spreads",))
def _distances(call: Call) -> Value:
    """Distances between rows, symmetric in the columns."""
    ledger = call.ledger
    left, right = call["x1"], call["x2"]
    lead = "abcdef"[: len(call.shape) - 2]
    plain = [replace(v, scale=(), parameter=None) for v in (left, right)]
    letters = [lead[len(lead) - v.ndim + 2 :] for v in plain]
    found = contract(call, plain, [letters[0] + "xm", letters[1] + "zm"], lead + "xz")
    scales = []
    for value in (left, right):
        value = views.pad_left(value, len(call.shape))
        scales.append(ledger.alike_along(value, value.ndim - 1, value.ndim - 2).scale)  # every row meets every row
    if id(left) in call.zeros or id(right) in call.zeros:
        return replace(found, scale=scales[int(id(left) in call.zeros)])
    ledger.equate(scales[0], scales[1])
    return replace(found, scale=scales[0])


@register_rule("outer", "ger")
def _outer(call: Call) -> Value:
    return contract(call, call.tensors, ["x", "y"], "xy")


@register_rule("tensordot")
def _tensordot(call: Call) -> Value:
    a, b = call["self"], call["other"]
    left, right = list("abcdefgh"[: a.ndim]), list("ijklmnop"[: b.ndim])
    for i, j in zip(call["dims_self"], call["dims_other"], strict=True):
        right[j % b.ndim] = left[i % a.ndim]
    output = [x for x in left if x not in right] + [x for x in right if x not in left]
    return contract(call, [a, b], ["".join(left), "".join(right)], "".join(output))


@register_rule("kron")
def _kronecker(call: Call) -> Value:
    a, b = call.tensors
    ndim = max(a.ndim, b.ndim)
    a, b = (views.pad_left(v, ndim) for v in (a, b))
    first, second = "abcd"[:ndim], "mnop"[:ndim]
    shape = tuple(n for pair in zip(a.shape, b.shape, strict=True) for n in pair)
    joined = "".join(x + y for x, y in zip(first, second, strict=True))
    product = contract(replace(call, outputs=[shape]), [a, b], [first, second], joined)
    return views.reshape(call.ledger, product, call.shape)


@register_rule("_grouped_mm", "transformers.grouped_mm_fallback")
def _grouped(call: Call) -> Value:
    """Rows of one matrix by one matrix of several, which one is decided by offsets: experts share their units."""
    (a, b), ledger = call.tensors[:2], call.ledger
    fresh = is_fresh(ledger, b) or id(b) in call.sole
    pin_tensor(call, call.get("offs"), "offsets of experts")
    if a.ndim == 2 and b.ndim == 3:
        a = views.mix(ledger, a, 0, "rows are dealt out to experts")
        b = views.mix(ledger, b, 0, "experts are told apart by offsets")
        one = views.take(ledger, replace(b, parameter=None), 0, np.zeros(1, dtype=np.int64))
        flat = views.reshape(ledger, replace(one, parameter=None), one.shape[1:])
        sole = call.sole
        if fresh:  # a factor on all experts is what their outputs offer already
            ledger.pin_scale(tuple(t for t in flat.scale if t[1].size == 1))
            flat = replace(flat, scale=tuple(t for t in flat.scale if t[1].size > 1))
            sole = sole | {id(flat)}
        result = contract(replace(call, sole=sole), [a, flat], ["xy", "yz"], "xz")
    elif a.ndim == 3 and b.ndim == 3:
        result = contract(call, [a, b], ["exy", "eyz"], "exz")
    else:
        return unknown(call)
    bias = call.get("bias")
    pin_tensor(call, bias, "bias of experts")
    return replace(result, scale=()) if bias is not None else result
