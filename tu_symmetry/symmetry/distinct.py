"""At which units the entries of a tensor are different numbers, whatever the inputs are.

``argmax`` over hidden units names one of them, whatever their order, as long as no two entries are equal: among equal
ones the first wins, and which is the first is a matter of order. Behind a ReLU, on a blank image, or where a sigmoid is
saturated, entries *are* equal. So the units are pinned, unless the entries are different for all inputs and almost all
weights. :class:`Distinct` proves that for a tensor by what operators do (their traits, :data:`~.rules.TRAIT_NAMES`).

A proof rests on a *witness*: a parameter (or noise) of independent continuous entries that, with everything else held
fixed, moves the entry at each unit by itself and strictly monotonically. A bias is one for the outputs of its layer. It
stays one under injective operators, and in a sum with whatever does not depend on it: ``h + W relu(h)`` has none where
``h`` and the rest share theirs, and ``h - relu(h)`` does have ties. What is different without a witness of that kind
(the outputs of a layer without bias, where its inputs are different numbers and so not all zero) is different until it
is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tu_symmetry.symmetry.algebra import Array, Value, among, distinct

NOBODY = 0  # the witness of what is different by other reasons


@dataclass(frozen=True)
class Proof:
    """Units at which entries differ, by the witness (a bit) that shows it."""

    units: Array
    witness: int


@dataclass
class Distinct:
    """Proofs for the tensors of one traced graph, and what each of them depends on (a set of witnesses, as bits)."""

    proofs: dict[torch.fx.Node, tuple[Proof, ...]] = field(default_factory=dict)
    depends: dict[torch.fx.Node, int] = field(default_factory=dict)
    _bits: dict[Any, int] = field(default_factory=dict)

    def source(self, node: torch.fx.Node, value: Value, key: Any) -> None:
        """A tensor of independent entries: a parameter, or noise."""
        bit = self._bits.setdefault(key, 1 << len(self._bits))
        self.depends[node] = bit
        self.proofs[node] = (Proof(_units(value), bit),)

    def units(self, node: torch.fx.Node) -> Array:
        """The units at which the entries of a tensor differ."""
        return _joined([p.units for p in self.proofs.get(node, ())])

    def piece(self, node: torch.fx.Node, source: torch.fx.Node) -> None:
        """One of the outputs of an operator."""
        self.depends[node] = self.depends.get(source, 0)
        self.proofs[node] = self.proofs.get(source, ())

    def overwrite(self, node: torch.fx.Node, new: torch.fx.Node, *, whole: bool) -> None:
        """A tensor that was written to: it is the new one, or holds it somewhere."""
        self.proofs[node] = self.proofs.get(new, ()) if whole else ()
        self.depends[node] = self._of([node, new])

    def follow(
        self,
        node: torch.fx.Node,
        traits: frozenset[str],
        operands: Mapping[str, tuple[torch.fx.Node, Value]],
        inputs: Sequence[torch.fx.Node],
        outputs: Sequence[Value],
        axes: Sequence[int] = (),
    ) -> None:
        """What can be said of an operator's result.

        Args:
            node: the operator.
            traits: the traits of the operator.
            operands: its floating-point tensors, by the names of the arguments (lists are left out).
            inputs: all nodes that it reads.
            outputs: its values.
            axes: along which it normalizes, for a ``distinct`` one. Along others the entries of a unit change by what
                is their own (a softmax over the batch takes each unit's bias away).
        """
        self.depends[node] = depends = self._of(inputs)
        if len(outputs) == 1 and "random" in traits:
            self.source(node, outputs[0], node)
            self.depends[node] |= depends
            return
        here = _joined([_units(v) for v in outputs])
        found = [
            Proof(kept, proof.witness)
            for proof in self._found(traits, operands, outputs[0], axes)
            if len(kept := proof.units[among(proof.units, here)])
        ]
        if found:
            self.proofs[node] = tuple(found)

    def _found(
        self,
        traits: frozenset[str],
        operands: Mapping[str, tuple[torch.fx.Node, Value]],
        output: Value,
        axes: Sequence[int],
    ) -> list[Proof]:
        values = list(operands.values())
        if not values:
            return []
        first, _ = values[0]
        if traits & {"moves", "injective", "picks"} or ("shifts" in traits and len(values) == 1):
            return list(self.proofs.get(first, ()))
        if "pools" in traits:
            return [p for p in self.proofs.get(first, ()) if p.witness != NOBODY]
        if "shifts" in traits and len(values) == 2:
            (a, x), (b, y) = values
            return [*self._shifted(a, x, b, output), *self._shifted(b, y, a, output)]
        if not traits & {"spreads", "distinct"}:
            return []
        bias = operands.get("self" if {"mat1", "mat2"} <= operands.keys() else "bias")
        rest = [(n, v) for n, v in values if bias is None or n is not bias[0]]
        found: list[Proof] = []
        if self._independent([n for n, _ in rest]):
            if "distinct" in traits:
                proven = self.units(first)
                found += [Proof(u[among(u, proven)], NOBODY) for u in (_units(output, k) for k in axes)]
            elif all(self._different(n, v) for n, v in rest):
                found.append(Proof(_units(output), NOBODY))
        if bias is not None and not self.depends.get(bias[0], 0) & self._of([n for n, _ in rest]):
            held = _along(bias[1], output)
            found += [Proof(held, p.witness) for p in self.proofs.get(bias[0], ()) if p.witness != NOBODY]
        return found

    def _shifted(self, node: torch.fx.Node, value: Value, other: torch.fx.Node, output: Value) -> list[Proof]:
        """What of a term is still different once another one is added that does not depend on its witness."""
        proofs = [
            p for p in self.proofs.get(node, ()) if p.witness != NOBODY and not p.witness & self.depends.get(other, 0)
        ]
        found = []
        for k in range(1, value.ndim + 1):
            own = _units(value, value.ndim - k)
            for proof in proofs:
                if len(own) and among(own, proof.units).all():
                    found.append(Proof(_units(output, output.ndim - k), proof.witness))
        return found

    def _different(self, node: torch.fx.Node, value: Value) -> bool:
        """Whether entries differ along every axis that has units, and there is one."""
        own = _units(value)
        return bool(len(own)) and bool(among(own, self.units(node)).all())

    def _of(self, nodes: Sequence[torch.fx.Node]) -> int:
        """What any of the tensors depends on."""
        seen = 0
        for node in nodes:
            seen |= self.depends.get(node, 0)
        return seen

    def _independent(self, nodes: Sequence[torch.fx.Node]) -> bool:
        seen = 0
        for node in nodes:
            own = self.depends.get(node, 0)
            if seen & own:
                return False
            seen |= own
        return True


def _along(bias: Value, output: Value) -> Array:
    """The units of the axis that a bias lies along; none where its length does not tell which one that is."""
    wide = [n for n in bias.shape if n > 1]
    axes = [k for k, n in enumerate(output.shape) if [n] == wide and len(_units(output, k))]
    return _units(output, axes[0]) if len(axes) == 1 else _joined([])


def _units(value: Value, axis: int | None = None) -> Array:
    labels = value.labels if axis is None else (value.labels[axis],)
    return _joined([c[c >= 0] for label in labels for c in label])


def _joined(arrays: Sequence[Array]) -> Array:
    return distinct(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)
