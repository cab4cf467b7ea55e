"""Rules for functions of matrices: inverses, determinants, powers, triangles.

The inverse of ``P A Q`` is ``Q^-1 A^-1 P^-1``; what is no inverse moves if rows and columns are permuted alike.
"""

from __future__ import annotations

from dataclasses import replace

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value
from tu_symmetry.symmetry.operators.pointwise import times
from tu_symmetry.symmetry.rules import Call, register_rule


def _matrix(call: Call, value: Value) -> Value:
    """A matrix, or several, with rows that are the same for all columns, and columns that are for all rows."""
    return views.unnest(call.ledger, views.unnest(call.ledger, value, value.ndim - 1), value.ndim - 2)


def _tied(call: Call, value: Value) -> Value:
    """A matrix whose rows and columns may move only alike, and do not scale."""
    value = call.ledger.unscaled(_matrix(call, value))
    rows, columns = value.ndim - 2, value.ndim - 1
    laid = tuple(c.swapaxes(rows, columns) for c in value.labels[rows])
    label = call.ledger.unify(laid, value.labels[columns], value.reasons[rows], value.reasons[columns])
    return replace(value, labels=(*value.labels[:rows], tuple(c.swapaxes(rows, columns) for c in label), label))


@register_rule("linalg_inv", "inverse")
def _inverse(call: Call) -> Value:
    """The inverse: factors of rows divide its columns, and those of columns its rows."""
    value = _matrix(call, call.tensors[0])
    rows = value.ndim - 2
    terms = tuple((c, call.ledger.constant_along(v, rows) if v.shape[-1] > 1 else v) for c, v in value.scale)
    return views.swap(replace(value, scale=times(terms, -1.0)), rows, rows + 1)


@register_rule("linalg_det", "det", "linalg_slogdet", "slogdet", "logdet")
def _determinant(call: Call) -> list[Value]:
    """An odd permutation of the rows alone turns the sign; the logarithm of the modulus does not see it."""
    value = call.ledger.unscaled(call.tensors[0])
    value = _matrix(call, value) if len(call.outputs) == 2 and call.used <= {1} else _tied(call, value)
    return [views.drop(call.ledger, value, (value.ndim - 1, value.ndim - 2))] * len(call.outputs)


register_rule("linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power")(lambda call: _tied(call, call["self"]))


@register_rule("tril", "triu")
def _triangle(call: Call) -> Value:
    """Zeros at positions that rows and columns tell."""
    value: Value = call["self"]
    for axis in (value.ndim - 1, value.ndim - 2):
        value = views.unnest(call.ledger, views.pin_axis(call.ledger, value, axis, "half of a matrix"), axis)
    return value
