"""At which units the entries of a tensor are different numbers, whatever the inputs are.

``argmax`` names a unit whatever the order of units only if no two entries are equal (as behind a ReLU): units are
pinned unless the operators' traits prove that entries differ for almost all weights.

A witness is a parameter of independent entries that, with everything else held fixed, moves the entry at each unit by
itself and strictly monotonically: a bias, for the outputs of its layer. It stays one under injective operators and in a
sum with what does not depend on it. What is different without one (outputs of a layer without bias, whose inputs are
different numbers) is different until it is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tu_symmetry.symmetry.algebra import Array, Proof, Value, among, moving, units_of

NOBODY = 0  # the witness of what is different by other reasons
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
    traits: frozenset[str], operands: Mapping[str, Value], outputs: Sequence[Value], axes: Sequence[int]
) -> tuple[Proof, ...]:
    """What can be said of an operator's result.

    ``operands`` are its floating-point tensors by the names of the arguments. ``axes`` are those along which a
    ``distinct`` one normalizes: along others (the batch) each unit loses what is its own.
    """
    here = units_of([label for v in outputs for label in v.labels])
    found = _found(traits, operands, outputs[0], axes)
    kept = [Proof(p.units[among(p.units, here)], p.witness) for p in found]
    return tuple(p for p in kept if len(p.units))


def _found(
    traits: frozenset[str], operands: Mapping[str, Value], output: Value, axes: Sequence[int]
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
        elif all(map(_all_different, rest)):
            found.append(Proof(units_of(output.labels), NOBODY))
    if bias is not None and not bias.depends & others:
        # the bias lies along an axis of its length; along none where that does not tell which one it is
        wide = [n for n in bias.shape if n > 1]
        sides = zip(output.labels, output.shape, strict=True)
        along = [label for label, n in sides if [n] == wide and moving(label)]
        held = units_of(along if len(along) == 1 else [])
        found += [Proof(held, p.witness) for p in _witnessed(bias)]
    return found


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


def _all_different(value: Value) -> bool:
    own = units_of(value.labels)
    return bool(len(own)) and bool(among(own, different(value)).all())
