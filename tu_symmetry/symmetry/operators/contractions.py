"""Rules for sums of products (linear maps, matrix products, einsum, attention), and for functions of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, nested_in, pinned_value, varies
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.operators.pointwise import elementwise, times
from tu_symmetry.symmetry.rules import Call, pin_axes, register_rule, unknown


def contract(call: Call, operands: Sequence[Value], letters: Sequence[str], output: str) -> Value:
    """A sum of products: axes that share a letter are indexed by the same units, and what is summed may not scale."""
    ledger = call.ledger
    every = "".join(dict.fromkeys("".join(letters)))
    place = {letter: k for k, letter in enumerate(every)}
    partners = [[(v, o) for v, o in zip(operands, letters, strict=True) if v is not value] for value in operands]
    fresh = [_nested(ledger, *given, output) for given in zip(operands, letters, partners, strict=True)]
    framed = [views.laid(v, [place[x] for x in own], len(every)) for v, own in zip(fresh, letters, strict=True)]
    nested = {x for v, own in zip(fresh, letters, strict=True) for k, x in enumerate(own) if nested_in(v.labels[k], k)}
    if ledger.linear:  # pairs of units are summed over, or one tensor's units remain; nothing else is a linear map
        for value, own in zip(operands, letters, strict=True):
            alone = [k for k, x in enumerate(own) if sum(x in o for o in letters) + (x in output) != 2]
            pin_axes(call, value, alone, "entries are summed, or have factors of their own")
    order = sorted(every, key=lambda x: (x in nested, x not in output, sum(x in own for own in letters) < 2))
    full = views.together(ledger, framed, [place[x] for x in order])
    full = replace(full, shape=tuple(max(n, 1) for n in full.shape))
    ledger.observe(full)
    scale = tuple(term for value in framed for term in value.scale)
    summed = [place[x] for x in every if x not in output]
    inside = tuple(t for t in scale if any(t[1].shape[k] > 1 for k in summed))
    rest = tuple(t for t in scale if all(t[1].shape[k] == 1 for k in summed))
    absorbs = any(
        (ledger.fresh(value) or given.sole)
        and any(all(v.shape[k] == 1 for k, x in enumerate(own) if x not in output) for _, v in value.scale)
        for given, value, own in zip(operands, fresh, letters, strict=True)
    )
    if inside and not absorbs:
        # what is summed over may scale alike: the factor passes on (or is one of a fresh parameter's outputs)
        wide = np.broadcast_shapes(*(v.shape for _, v in inside))
        factor = ledger.fresh_variables(tuple(1 if k in summed else n for k, n in enumerate(wide)))
        ledger.equate(inside, ((1.0, factor),))
        rest = (*rest, (1.0, factor))
    else:
        ledger.pin_scale(inside)
    result = replace(full, scale=ledger.merge(rest))
    depth = {k: max((len(varies(c)) for c in full.labels[k]), default=0) for k in summed}
    remaining = list(range(len(every)))
    for k in sorted(reversed(summed), key=lambda k: -depth[k]):  # units before the blocks that they are nested in
        result = views.drop(ledger, result, remaining.index(k))
        remaining.remove(k)
    result = views.permute(result, [remaining.index(place[x]) for x in output])
    return views.reshape(ledger, result, call.shape)


def _nested(ledger: Ledger, value: Value, own: str, partners: Sequence[tuple[Value, str]], output: str) -> Value:
    """A parameter with axes nested in one another, so that they have units of their own wherever they can."""
    wide = [k for k, n in enumerate(value.shape) if n > 1]
    batch = [k for k in wide if own[k] in output and any(own[k] in o for _, o in partners)]
    free = [k for k in wide if own[k] in output and k not in batch]
    for axis in wide:
        if axis in batch:
            continue
        sharing = [(v, o) for v, o in partners if own[axis] in o]
        met = {o[j] for v, o in sharing for c in v.labels[o.index(own[axis])] for j in varies(c)}
        beside = {o[j] for v, o in sharing for j, n in enumerate(v.shape) if n > 1}
        outer = [k for k in wide if k != axis and (own[k] in met or (k in batch and (not beside or own[k] in beside)))]
        if outer:
            value = ledger.nest(value, axis, outer)
    if len(free) > 1 and not batch:
        *outer, axis = ledger.nested_order(free)
        value = ledger.nest(value, axis, outer, guessed=True)
    return value


def add_bias(call: Call, result: Value, bias: Value | None, axis: int) -> Value:
    """Add a one-dimensional bias along an axis."""
    if bias is None:
        return result
    laid = views.reshape(call.ledger, bias, [bias.shape[0] if k == axis else 1 for k in range(result.ndim)])
    label = call.ledger.unify(result.labels[axis], laid.labels[axis], result.reasons[axis], laid.reasons[axis])
    call.ledger.equate(laid.scale, result.scale)
    return result.with_axis(axis, label=label)


def affine(call: Call) -> None:
    """A bias is added to all samples and positions."""
    value: Value = call.get("input", call.get("self", call.get("input1")))
    channel = 1 if "conv" in call.name and value.ndim > 1 else value.ndim - 1
    if call.get("bias") is not None:
        pin_axes(call, value, (k for k in range(value.ndim) if k != channel), "a bias is added to all positions")


@register_rule("linear", traits=("spreads",), linear=affine)
def _linear(call: Call) -> Value:
    value, weight = call.get("input", call.get("self")), call["weight"]
    lead = "abcdefgh"[: value.ndim - 1]
    result = contract(call, [value, weight], [lead + "y", "zy"], lead + "z")
    return add_bias(call, result, call.get("bias"), result.ndim - 1)


@register_rule("matmul", "mm", "bmm", "mv", "dot", "vdot", "_sparse_mm", traits=("spreads",))
def _matmul(call: Call) -> Value:
    a, b = call.tensors[:2]
    lead = "abcdefgh"[: max(a.ndim - 2, b.ndim - 2, 0)]
    rows, columns = "x" if a.ndim > 1 else "", "z" if b.ndim > 1 else ""
    left = lead[len(lead) - max(a.ndim - 2, 0) :] + rows + "y"
    right = lead[len(lead) - max(b.ndim - 2, 0) :] + "y" + columns
    return contract(call, [a, b], [left, right], lead + rows + columns)


@register_rule("addmm", "baddbmm", "_sparse_addmm", traits=("spreads",), linear=lambda call: _added(call))
def _addmm(call: Call) -> Value:
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    product = _matmul(call.on(*(call[n] for n in names)))
    return elementwise(call.on(call["self"], product), homogeneous=True)


@register_rule("einsum", traits=("spreads",))
def _einsum(call: Call) -> Value:
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    operands, letters = list(call["tensors"]), inputs.split(",")
    widths = [v.ndim - len(s.replace("...", "")) for v, s in zip(operands, letters, strict=True)]
    spare = "".join(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in inputs + output)
    dots = spare[: max((w for w, s in zip(widths, letters, strict=True) if "..." in s), default=0)]
    for k, width in enumerate(widths):
        letters[k] = letters[k].replace("...", dots[len(dots) - width :])
        if len(set(letters[k])) < len(letters[k]):  # a diagonal
            return unknown(call)
    if arrow:
        return contract(call, operands, letters, output.replace("...", dots))
    joined = inputs.replace(",", "").replace("...", "")
    return contract(call, operands, letters, dots + "".join(sorted(c for c in joined if joined.count(c) == 1)))


def _added(call: Call) -> None:
    value: Value = call.get("mat1", call.get("batch1"))
    pin_axes(call, value, range(value.ndim - 1), "something is added to all positions")


def _heads(call: Call) -> None:
    for value in call.tensors:
        units = value.ndim if value is call.get("attn_mask") else value.ndim - 1
        pin_axes(call, value, range(units), "a softmax reads what it becomes")


@register_rule("scaled_dot_product_attention", signs="follow", linear=_heads)
def _attention(call: Call) -> Value:
    query, key, value = call["query"], call["key"], call["value"]
    ledger = call.ledger
    lead = query.ndim - 2
    if call.get("enable_gqa", False) and key.shape[lead - 1] != query.shape[lead - 1]:
        count = query.shape[lead - 1] // key.shape[lead - 1]
        key, value = (views.copies(ledger, v, lead - 1, count, inner=True) for v in (key, value))
    letters = "abcdef"[:lead]
    shape = (*np.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])
    scored = replace(call, outputs=[shape])
    scores = contract(scored, [query, key], [letters + "xy", letters + "zy"], letters + "xz")
    scores = views.unnest(ledger, ledger.unscaled(scores), lead + 1)
    if isinstance(mask := call.get("attn_mask"), Value):
        scores = elementwise(scored.on(scores, mask))
    if call.get("is_causal", False):
        scores = views.mix(ledger, scores, (lead, lead + 1), "causal mask")
    return contract(call, [scores, value], [letters + "xz", letters + "zw"], letters + "xw")


@register_rule("bilinear", traits=("spreads",), linear=affine)
def _bilinear(call: Call) -> Value:
    a, b, weight = call["input1"], call["input2"], call["weight"]
    lead = "cdefgh"[: a.ndim - 1]
    result = contract(call, [a, weight, b], [lead + "x", "oxy", lead + "y"], lead + "o")
    return add_bias(call, result, call.get("bias"), result.ndim - 1)


@register_rule("embedding_bag", signs=lambda call: "pin" if call.get("mode", 0) == 2 else "follow")  # a maximum
def _bag(call: Call) -> list[Value]:
    call.pin("indices", "an index")
    for name in ("offsets", "per_sample_weights"):
        call.pin(name, name)
    row = views.at_first(call.ledger, views.mix(call.ledger, call["weight"], 0, "rows are looked up"), 0)
    laid = views.pad_left(row, len(call.shape))
    found = replace(laid, shape=call.shape, reasons=("looked up",) * (laid.ndim - row.ndim) + row.reasons)
    return [found, *(pinned_value(shape, "counts rows") for shape in call.outputs[1:])]


@register_rule("cdist", traits=("spreads",), signs="positive", linear=False)
def _distances(call: Call) -> Value:
    sides = [call["x1"], call["x2"]]
    ndim = len(call.shape)
    lead = "abcdef"[: ndim - 2]
    letters = [lead[ndim - v.ndim :] for v in sides]
    plain = [replace(v, scale=(), parameter=None) for v in sides]
    found = contract(call, plain, [letters[0] + "xm", letters[1] + "zm"], lead + "xz")
    # every row meets every row
    scales = [call.ledger.alike_along(views.pad_left(v, ndim), ndim - 1, ndim - 2).scale for v in sides]
    kept = [scale for v, scale in zip(sides, scales, strict=True) if not v.zero]
    if len(kept) == 2:
        call.ledger.equate(*kept)
    return replace(found, scale=kept[0] if kept else scales[0])


register_rule("outer", "ger", signs="follow")(lambda call: contract(call, call.tensors, ["x", "y"], "xy"))


@register_rule("kron", signs="follow")
def _kronecker(call: Call) -> Value:
    ndim = max(v.ndim for v in call.tensors)
    a, b = (views.pad_left(v, ndim) for v in call.tensors)
    shape = tuple(n for pair in zip(a.shape, b.shape, strict=True) for n in pair)
    product = contract(replace(call, outputs=[shape]), [a, b], ["abcd"[:ndim], "mnop"[:ndim]], "ambncodp"[: 2 * ndim])
    return views.reshape(call.ledger, product, call.shape)


def _matrix(call: Call) -> Value:
    """A matrix, or several, with rows that are the same for all columns, and columns that are for all rows."""
    value = call.tensors[0]
    return views.unnest(call.ledger, views.unnest(call.ledger, value, value.ndim - 1), value.ndim - 2)


@register_rule("linalg_inv", "inverse", signs="follow")
def _inverse(call: Call) -> Value:
    """The inverse of ``P A Q`` is ``Q^-1 A^-1 P^-1``: factors of rows divide columns, and those of columns rows."""
    value = _matrix(call)
    rows = value.ndim - 2
    terms = tuple((c, call.ledger.constant_along(v, rows) if v.shape[-1] > 1 else v) for c, v in value.scale)
    return views.swap(replace(value, scale=times(terms, -1.0)), rows, rows + 1)


@register_rule("linalg_solve", signs="follow")
def _solve(call: Call) -> Value:
    inverse, given = _inverse(call.on(call["A"])), call["B"]
    if given.ndim == 1 or given.shape == inverse.shape[:-1]:  # vectors
        given = views.reshape(call.ledger, given, (*given.shape, 1))
    return _matmul(call.on(inverse, given) if call.get("left", True) else call.on(given, inverse))


@register_rule("matrix_exp linalg_matrix_exp matrix_power linalg_matrix_power")
def _tied(call: Call) -> Value:
    """Rows and columns may move only alike, and do not scale."""
    value = call.ledger.unscaled(_matrix(call))
    rows, columns = value.ndim - 2, value.ndim - 1
    laid = views.swap(value, rows, columns)
    label = call.ledger.unify(laid.labels[columns], value.labels[columns], value.reasons[rows], value.reasons[columns])
    value = value.with_axis(columns, label=label)
    return value.with_axis(rows, label=views.swap(value, rows, columns).labels[rows])


@register_rule("linalg_det det linalg_slogdet slogdet logdet")
def _determinant(call: Call) -> list[Value]:
    """An odd permutation of the rows alone turns the sign; the logarithm of the modulus does not see it."""
    value = call.ledger.unscaled(_matrix(call)) if call.used <= {1} else _tied(call)
    return [views.drop(call.ledger, value, (value.ndim - 1, value.ndim - 2))] * len(call.outputs)


@register_rule("tril", "triu", signs="follow")
def _triangle(call: Call) -> Value:
    """Zeros at positions that rows and columns tell."""
    value: Value = call["self"]
    for axis in (value.ndim - 1, value.ndim - 2):
        value = views.unnest(call.ledger, views.pin_axis(call.ledger, value, axis, "half of a matrix"), axis)
    return value
