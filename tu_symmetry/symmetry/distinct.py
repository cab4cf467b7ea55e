"""At which units the entries of a tensor are different numbers, whatever the inputs are.

``argmax`` names a unit whatever the order of units only if no two entries are equal (as behind a ReLU): units are
pinned unless the operators' traits prove that entries differ for almost all weights.

A witness is a parameter of independent entries that, with everything else held fixed, moves the entry at each unit by
itself and strictly monotonically: a bias, for the outputs of its layer. It stays one under injective operators and in a
sum with what does not depend on it. What is different without one (outputs of a layer without bias, whose inputs are
different numbers, or not all zero) is different until it is summed.

For almost all weights a row of a table is not zero, nor is its sum with what is linear in weights that it does not
depend on, as a residual stream makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tu_symmetry.symmetry.algebra import Array, Proof, Value, among, moving, units_of

NOBODY = 0  # the witness of what is different by other reasons
PRODUCTS = ("linear", "matmul", "mm")  # of vectors along the last axis of the first tensor
ANYTHING = -1  # all bits: what a tensor may depend on of which nothing is known


def different(value: Value) -> Array:
    """The units at which the entries of a tensor differ."""
    return units_of([(p.units,) for p in value.proofs])


def dependence(values: Iterable[Value]) -> int:
    """What any of the tensors depends on."""
    seen = 0
    for value in values:
        seen |= value.depends
    return seen


def proven(
    name: str, traits: frozenset[str], operands: Mapping[str, Value], outputs: Sequence[Value], axes: Sequence[int]
) -> tuple[Proof, ...]:
    """What can be said of an operator's result.

    ``operands`` are its floating-point tensors by the names of the arguments. ``axes`` are those along which a
    ``distinct`` one normalizes: along others (the batch) each unit loses what is its own.
    """
    here = units_of([label for v in outputs for label in v.labels])
    found = _found(name, traits, operands, outputs[0], axes)
    kept = [Proof(p.units[among(p.units, here)], p.witness) for p in found]
    return tuple(p for p in kept if len(p.units))


def _found(
    name: str, traits: frozenset[str], operands: Mapping[str, Value], output: Value, axes: Sequence[int]
) -> Sequence[Proof]:
    values = list(operands.values())
    if not values:
        return []
    first = values[0]
    if traits & {"moves", "injective", "picks"} or ("shifts" in traits and len(values) == 1):
        return first.proofs
    if "pools" in traits:
        return _witnessed(first)
    if "shifts" in traits and len(values) == 2:
        return [*_shifted(first, values[1], output), *_shifted(values[1], first, output)]
    if not traits & {"spreads", "distinct"}:
        return []
    bias = operands.get("self" if {"mat1", "mat2"} <= operands.keys() else "bias")
    rest = [v for v in values if v is not bias]
    others = dependence(rest)
    found: list[Proof] = []
    if sum(v.depends for v in rest) == others:  # no two depend on the same
        if "distinct" in traits:
            own = [units_of([output.labels[k]]) for k in axes]
            found += [Proof(units[among(units, different(first))], NOBODY) for units in own]
        elif all(map(_all_different, rest)) or (name in PRODUCTS and first.nonzero and all(map(_is_weight, rest[1:]))):
            found.append(Proof(units_of(output.labels), NOBODY))
    if bias is not None and not bias.depends & others:
        # the bias lies along an axis of its length; along none where that does not tell which one it is
        wide = [n for n in bias.shape if n > 1]
        sides = zip(output.labels, output.shape, strict=True)
        along = [label for label, n in sides if [n] == wide and moving(label)]
        held = units_of(along if len(along) == 1 else [])
        found += [Proof(held, p.witness) for p in _witnessed(bias)]
    return found


def linear_in(name: str, traits: frozenset[str], operands: Mapping[str, Value], seen: Sequence[Value]) -> int:
    """The witnesses in each of which a result is linear; ``seen`` are all tensors that are read."""
    values = list(operands.values())
    if name in ("add", "sub") and len(values) == 2:
        return values[0].linear_in & values[1].linear_in
    passes = traits & {"moves", "picks", "spreads"} or name in ("mul", "sum", "mean", "neg")
    if not passes or operands.keys() & {"bias", "mat1", "batch1"}:
        return 0
    found = 0
    for value in (v for v in values if values.count(v) == 1):
        found |= value.linear_in & ~dependence(v for v in seen if v is not value)
    return found


def nonzero(
    name: str, traits: frozenset[str], operands: Mapping[str, Value], given: Mapping[str, Any], last: int
) -> bool:
    """Whether no vector along the last axis of a result, of length ``last``, is zero throughout."""
    first, *more = operands.values()
    if "same" in traits:
        return first.nonzero and first.shape[-1:] == (last,)
    if name in ("embedding", "rsqrt", "exp", "softmax"):
        return name != "embedding" or (first.nonzero and given["padding_idx"] < 0)
    if "bias" in operands and "spreads" in traits:
        return bool(operands["bias"].linear_in & ~dependence(v for v in operands.values() if v is not operands["bias"]))
    if name == "mul" and not more:
        return first.nonzero and isinstance(given["other"], (int, float)) and given["other"] not in (0, math.inf)
    if len(more) != 1 or name not in ("add", "mul", *PRODUCTS):
        return False
    (second,) = more
    pairs = ((first, second), (second, first)) if name in ("add", "mul") else ((first, second),)
    if name == "add":
        return any(a.nonzero and b.linear_in & ~a.depends for a, b in pairs)
    own = any(b.linear_in == b.depends and b.depends and not b.depends & a.depends for a, b in pairs)
    number = name == "mul" and (1,) in (first.shape[-1:], second.shape[-1:])
    return first.nonzero and second.nonzero and (own or number)


def _witnessed(value: Value) -> list[Proof]:
    return [p for p in value.proofs if p.witness != NOBODY]


def _shifted(value: Value, other: Value, output: Value) -> list[Proof]:
    """What of a term is still different once another one is added that does not depend on its witness."""
    proofs = [p for p in _witnessed(value) if not p.witness & other.depends]
    found = []
    for k in range(1, value.ndim + 1):
        own = units_of([value.labels[-k]])
        for proof in proofs:
            if len(own) and among(own, proof.units).all():
                found.append(Proof(units_of([output.labels[-k]]), proof.witness))
    return found


def _is_weight(value: Value) -> bool:
    return value.linear_in == value.depends and _all_different(value)


def _all_different(value: Value) -> bool:
    own = units_of(value.labels)
    return bool(len(own)) and bool(among(own, different(value)).all())
