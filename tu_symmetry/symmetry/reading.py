"""Which units of a tensor the example inputs read, and which they only cut off (rows beyond ``pos[:n]``).

No output depends on those: any order of them leaves the outputs as they are, and those of a longer sequence not. Nor is
anything known of where another example would cut: the whole axis is pinned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tu_symmetry.symmetry.algebra import Array, Value, among, distinct, units_of
from tu_symmetry.symmetry.ledger import Ledger

Node = torch.fx.Node
Origin = str | Node  # the name of a parameter, or what made a tensor
UNSEEN = "not read by the example inputs"


@dataclass
class Reading:
    """What one traced pass cuts out of each tensor.

    What is only moved (viewed, cut, looked up at constant positions) is read by the first other operator. All that is
    cut out of one tensor, its *origin*, is taken together: of ``x1, x2 = h.chunk(2)`` each leaves out what the other
    reads.
    """

    origins: dict[Node, Origin] = field(default_factory=dict)  # of the nodes that are moved
    values: dict[Origin, Value] = field(default_factory=dict)  # of the origins that are no parameters
    alone: dict[Node, tuple[Array, ...]] = field(default_factory=dict)  # units selected by their position
    whole: set[Origin] = field(default_factory=set)  # tensors that are read as they are
    parts: dict[Origin, list[Array]] = field(default_factory=lambda: defaultdict(list))  # units that are read of each

    def move(self, node: Node, source: Node, held: str | Value) -> None:
        """Entries of ``source`` (a parameter, by its name, or a value) come to stand at other places."""
        if source in self.alone:
            self.alone[node] = self.alone[source]
        origin: Origin = held if isinstance(held, str) else source
        if source not in self.origins and isinstance(held, Value):
            self.values[origin] = held
        self.origins[node] = self.origins.get(source, origin)

    def select(self, node: Node, units: Sequence[Array]) -> None:
        """Units that an operator selects by their positions, one at a time."""
        if node in self.origins and len(units):
            self.alone[node] = (*self.alone.get(node, ()), *units)

    def read(self, node: Node, held: str | Value) -> None:
        """An operator, or the end of the network, reads a tensor (a parameter, by its name, or a value)."""
        if node not in self.origins:
            self.whole.add(held if isinstance(held, str) else node)
        elif isinstance(held, Value):
            self.parts[self.origins[node]].append(units_of([*held.labels, self.alone.get(node, ())]))

    def cuts(self, ledger: Ledger, blocks: tuple[Array, Array]) -> Iterator[tuple[Origin, Value, Array]]:
        """Each origin that is read in pieces only, and the units of the pieces together."""
        for origin, parts in self.parts.items():
            value = ledger.parameters.get(origin) if isinstance(origin, str) else self.values.get(origin)
            if value is None or origin in self.whole:
                continue
            units = units_of(value.labels)
            if any(among(units, part).all() for part in parts):
                continue
            pieces = [units[among(units, _with_blocks(part, blocks))] for part in parts]
            if all(len(piece) < len(units) for piece in pieces):
                yield origin, value, distinct(np.concatenate(pieces))


def pin_unseen(ledger: Ledger, readings: Sequence[Reading]) -> frozenset[str]:
    """Pin every axis of which passes with one example cut off a part and throw it away; returns parameters with one.

    Factors along such an axis are equal. What one pass leaves out and another one cuts out (in training) is read.
    """
    blocks = _blocks(ledger)
    found = [cut for reading in readings for cut in reading.cuts(ledger, blocks)]
    read = units_of([tuple(pieces for _, _, pieces in found)] if len(readings) > 1 else [])
    partly = set()
    for origin, value, pieces in found:
        for axis, label in enumerate(value.labels):
            held = units_of([label])
            if (among(held, pieces) | among(held, read)).all():
                continue
            ledger.pins.append((held, UNSEEN))
            if isinstance(origin, str):
                partly.add(origin)
            ledger.alike_along(value, axis)
    return frozenset(partly)


def _blocks(ledger: Ledger) -> tuple[Array, Array]:
    """Units, in ascending order, and for each a block that it stands in, which no label need name."""
    pairs = [*ledger.nestings, *((binding.units, part) for binding in ledger.bindings for part in binding.parts)]
    units, blocks = (np.concatenate([np.empty(0, np.int64), *(pair[k] for pair in pairs)]) for k in (0, 1))
    order = np.argsort(units, kind="stable")
    order = order[blocks[order] >= 0]
    return units[order], blocks[order]


def _with_blocks(units: Array, blocks: tuple[Array, Array]) -> Array:
    found = new = units
    while len(new):
        start, end = (np.searchsorted(blocks[0], new, side) for side in ("left", "right"))
        many = end - start
        new = distinct(blocks[1][np.repeat(end - np.cumsum(many), many) + np.arange(many.sum())])
        new = new[~among(new, found)]
        found = distinct(np.concatenate([found, new]))
    return found


def pin_what_could_meet(ledger: Ledger, name: str, shape: tuple[int, ...]) -> None:
    """Pin the units of every axis that an unread parameter could meet: other inputs may reach the parameter."""
    reason = f"could meet {name}, which the example inputs do not reach"
    for seen in list(ledger.seen):
        if could_meet(max(c.shape[seen.axis] for c in seen.label), shape):
            ledger.pin_label(seen.label, reason)


def could_meet(length: int, shape: tuple[int, ...]) -> bool:
    """Whether an axis of some length could be added to, multiplied by or contracted with a tensor of some shape."""
    pieces = len(shape) == 2 and any(n % length == 0 for n in shape)  # what a layer makes, and behind a flattening
    return length > 1 and (length in shape or pieces)
