"""Rules for functions of matrices: inverses, determinants, powers, triangles.

The inverse of ``P A Q`` is ``Q^-1 A^-1 P^-1``: its rows are indexed by the columns of ``A``, its columns by the rows.
Determinants, powers and exponentials stay what they are, or move along, if rows and columns are permuted alike.
"""

from __future__ import annotations

from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value
from tu_symmetry.symmetry.operators.contractions import contract
from tu_symmetry.symmetry.operators.pointwise import times
from tu_symmetry.symmetry.rules import Call, register_rule


def _matrix(call: Call, value: Value) -> Value:
    """A matrix, or several, with rows that are the same for all columns, and columns that are for all rows."""
    value = views.unnest(call.ledger, views.unnest(call.ledger, value, value.ndim - 1), value.ndim - 2)
    return replace(value, parameter=None)


def _swapped(value: Value) -> Value:
    return views.permute(value, [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2])


def _inverted(call: Call, value: Value) -> Value:
    """The inverse: factors of rows divide its columns, and those of columns its rows."""
    value = _matrix(call, value)
    terms = []
    for c, v in value.scale:
        if v.shape[-1] > 1:
            v = call.ledger.constant_along(v, value.ndim - 2)
        terms.append((c, v))
    return _swapped(replace(value, scale=times(tuple(terms), -1.0)))


def _tied(call: Call, value: Value) -> Value:
    """A matrix whose rows and columns may move only alike, and do not scale."""
    value = _matrix(call, value)
    call.ledger.pin_scale(value.scale)
    rows, columns = value.ndim - 2, value.ndim - 1
    laid = tuple(c.swapaxes(rows, columns) for c in value.labels[rows])
    label = call.ledger.unify(laid, value.labels[columns], value.reasons[rows], value.reasons[columns])
    labels = (*value.labels[:rows], tuple(c.swapaxes(rows, columns) for c in label), label)
    return replace(value, labels=labels, scale=())


@register_rule("linalg_inv", "inverse", "linalg_pinv", "pinverse")
def _inverse(call: Call) -> Value:
    value: Value = call.tensors[0]
    for other in call.tensors[1:]:
        call.ledger.pin(other, "a tolerance")
    if "pinv" in call.operator:
        return _swapped(_matrix(call, call.ledger.unscaled(value)))
    return _inverted(call, value)


@register_rule("linalg_solve")
def _solve(call: Call) -> Value:
    """The inverse times what is given."""
    matrix, given = call["A"], call["B"]
    inverse = _inverted(call, matrix)
    batch = "abcdef"[: len(call.shape)]
    if given.ndim == 1 or given.shape == matrix.shape[:-1]:
        lead = batch[: given.ndim - 1]
        return contract(call, [inverse, given], [lead[len(lead) - matrix.ndim + 2 :] + "xy", lead + "y"], lead + "x")
    lead = batch[: len(call.shape) - 2]
    own = [lead[len(lead) - v.ndim + 2 :] for v in (inverse, given)]
    if call.get("left", True):
        return contract(call, [inverse, given], [own[0] + "xy", own[1] + "yz"], lead + "xz")
    return contract(call, [given, inverse], [own[1] + "xy", own[0] + "yz"], lead + "xz")


@register_rule("linalg_det", "det", "linalg_slogdet", "slogdet", "logdet")
def _determinant(call: Call) -> Value | list[Value]:
    """An odd permutation of the rows alone turns the sign; the logarithm of the modulus does not see it."""
    value: Value = call.tensors[0]
    value = call.ledger.unscaled(value)
    value = _tied(call, value) if not (len(call.outputs) == 2 and call.used <= {1}) else _matrix(call, value)
    found = views.drop(call.ledger, views.drop(call.ledger, value, value.ndim - 1), value.ndim - 2)
    return [found] * len(call.outputs) if len(call.outputs) > 1 else found


@register_rule("linalg_matrix_exp", "matrix_exp", "linalg_matrix_power", "matrix_power")
def _power(call: Call) -> Value:
    return _tied(call, call.tensors[0])


@register_rule("tril", "triu")
def _triangle(call: Call) -> Value:
    """Zeros at positions that rows and columns tell."""
    value: Value = call["self"]
    for axis in (value.ndim - 1, value.ndim - 2):
        value = views.unnest(call.ledger, views.pin_axis(call.ledger, value, axis, "half of a matrix"), axis)
    return replace(value, fill=None)
