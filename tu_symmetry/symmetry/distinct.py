"""At which units the entries of a tensor are different numbers, whatever the inputs are.

``argmax`` names a unit whatever the order of units only if no two entries are equal (as behind a ReLU): units are
pinned unless :class:`Distinct` proves by the operators' traits that entries differ for almost all weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tu_symmetry.symmetry.algebra import Array, Value, among, moving, units_of

Node = torch.fx.Node
Operands = Mapping[str, tuple[Node, Value]]
NOBODY = 0  # the witness of what is different by other reasons


@dataclass(frozen=True)
class Proof:
    """Units at which entries differ, by the witness (a bit) that shows it.

    A witness is a parameter (or noise) of independent continuous entries that, with everything else held fixed, moves
    the entry at each unit by itself and strictly monotonically: a bias, for the outputs of its layer. It stays one
    under injective operators and in a sum with what does not depend on it. What is different without one (outputs of a
    layer without bias, whose inputs are different numbers) is different until it is summed.
    """

    units: Array
    witness: int


@dataclass
class Distinct:
    """Proofs for the tensors of one traced graph, and what each of them depends on (a set of witnesses, as bits)."""

    proofs: dict[Node, tuple[Proof, ...]] = field(default_factory=dict)
    depends: dict[Node, int] = field(default_factory=dict)
    _bits: dict[Any, int] = field(default_factory=dict)

    def source(self, node: Node, value: Value, key: Any) -> None:
        """A tensor of independent entries: a parameter, or noise."""
        bit = self._bits.setdefault(key, 1 << len(self._bits))
        self.depends[node] = bit
        self.proofs[node] = (Proof(units_of(value.labels), bit),)

    def units(self, node: Node) -> Array:
        """The units at which the entries of a tensor differ."""
        return units_of([(p.units,) for p in self.proofs.get(node, ())])

    def piece(self, node: Node, source: Node) -> None:
        """One of the outputs of an operator."""
        self.depends[node] = self.depends.get(source, 0)
        self.proofs[node] = self.proofs.get(source, ())

    def overwrite(self, node: Node, new: Node, *, whole: bool) -> None:
        """A tensor that was written to: it is the new one, or holds it somewhere."""
        self.proofs[node] = self.proofs.get(new, ()) if whole else ()
        self.depends[node] = self._of([node, new])

    def follow(
        self, node: Node, traits: frozenset[str], operands: Operands, outputs: Sequence[Value], axes: Sequence[int]
    ) -> None:
        """What can be said of an operator's result.

        ``operands`` are its floating-point tensors by the names of the arguments. ``axes`` are those along which a
        ``distinct`` one normalizes: along others (the batch) each unit loses what is its own.
        """
        self.depends[node] = depends = self._of(node.all_input_nodes)
        if len(outputs) == 1 and "random" in traits:
            self.source(node, outputs[0], node)
            self.depends[node] |= depends
            return
        here = units_of([label for v in outputs for label in v.labels])
        found = [
            Proof(kept, proof.witness)
            for proof in self._found(traits, operands, outputs[0], axes)
            if len(kept := proof.units[among(proof.units, here)])
        ]
        if found:
            self.proofs[node] = tuple(found)

    def _found(self, traits: frozenset[str], operands: Operands, output: Value, axes: Sequence[int]) -> list[Proof]:
        values = list(operands.values())
        if not values:
            return []
        first, _ = values[0]
        if traits & {"moves", "injective", "picks"} or ("shifts" in traits and len(values) == 1):
            return list(self.proofs.get(first, ()))
        if "pools" in traits:
            return self._witnessed(first)
        if "shifts" in traits and len(values) == 2:
            (a, x), (b, y) = values
            return [*self._shifted(a, x, b, output), *self._shifted(b, y, a, output)]
        if not traits & {"spreads", "distinct"}:
            return []
        bias = operands.get("self" if {"mat1", "mat2"} <= operands.keys() else "bias")
        rest = [(n, v) for n, v in values if bias is None or n is not bias[0]]
        others = self._of([n for n, _ in rest])
        found: list[Proof] = []
        if sum(self.depends.get(n, 0) for n, _ in rest) == others:  # no two depend on the same
            if "distinct" in traits:
                proven = self.units(first)
                own = [units_of([output.labels[k]]) for k in axes]
                found += [Proof(units[among(units, proven)], NOBODY) for units in own]
            elif all(self._different(n, v) for n, v in rest):
                found.append(Proof(units_of(output.labels), NOBODY))
        if bias is not None and not self.depends.get(bias[0], 0) & others:
            # the bias lies along an axis of its length; along none where that does not tell which one it is
            wide = [n for n in bias[1].shape if n > 1]
            sides = zip(output.labels, output.shape, strict=True)
            along = [label for label, n in sides if [n] == wide and moving(label)]
            held = units_of(along if len(along) == 1 else [])
            found += [Proof(held, p.witness) for p in self._witnessed(bias[0])]
        return found

    def _witnessed(self, node: Node) -> list[Proof]:
        return [p for p in self.proofs.get(node, ()) if p.witness != NOBODY]

    def _shifted(self, node: Node, value: Value, other: Node, output: Value) -> list[Proof]:
        """What of a term is still different once another one is added that does not depend on its witness."""
        proofs = [p for p in self._witnessed(node) if not p.witness & self.depends.get(other, 0)]
        found = []
        for k in range(1, value.ndim + 1):
            own = units_of([value.labels[-k]])
            for proof in proofs:
                if len(own) and among(own, proof.units).all():
                    found.append(Proof(units_of([output.labels[-k]]), proof.witness))
        return found

    def _different(self, node: Node, value: Value) -> bool:
        """Whether entries differ along every axis that has units, and there is one."""
        own = units_of(value.labels)
        return bool(len(own)) and bool(among(own, self.units(node)).all())

    def _of(self, nodes: Sequence[Node]) -> int:
        """What any of the tensors depends on."""
        seen = 0
        for node in nodes:
            seen |= self.depends.get(node, 0)
        return seen
