"""Which units of a tensor the example inputs read, and which they only cut off.

``pos[:n]`` adds the first rows of a table to ``n`` tokens. No output depends on the others, so that any order of them
leaves the outputs of the example as they are, and those of a longer sequence not. Such units are *unseen*: nothing is
known of them, and they are pinned.

A tensor that is only moved (viewed, cut, transposed, looked up at constant positions) is not read; what reads it is the
first other operator. All that is moved out of one tensor, its *origin*, is taken together: of the two halves of
``x1, x2 = h.chunk(2)`` each leaves out what the other reads. An operator that gives its units on (``2 * pos``) makes an
origin again. As an example, with eight rows in ``pos``::

    2 * pos          reads all of pos; the product has its rows for units
    (2 * pos)[:3]    moves the product; rows 3 to 7 are in nothing that is read, and are unseen
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tu_symmetry.symmetry.algebra import ZERO, Array, Value, among, distinct
from tu_symmetry.symmetry.ledger import Ledger

Origin = str | torch.fx.Node  # the name of a parameter, or what made a tensor
UNSEEN = "not read by the example inputs"


@dataclass
class Reading:
    """What one traced pass reads of each origin.

    Attributes:
        origins: of the nodes that are moved, the tensor that their entries come from.
        values: of an origin that is no parameter, its value.
        whole: origins that are read as they are.
        parts: of the others, units and scale variables of what is read.
    """

    origins: dict[torch.fx.Node, Origin] = field(default_factory=dict)
    values: dict[Origin, Value] = field(default_factory=dict)
    whole: set[Origin] = field(default_factory=set)
    parts: dict[Origin, list[tuple[Array, Array]]] = field(default_factory=lambda: defaultdict(list))

    def move(self, node: torch.fx.Node, source: torch.fx.Node, held: str | Value) -> None:
        """Entries of ``source`` (a parameter, by its name, or a value) come to stand at other places."""
        if source in self.origins:
            self.origins[node] = self.origins[source]
            return
        origin: Origin = held if isinstance(held, str) else source
        self.origins[node] = origin
        self.parts[origin]  # an origin with no part read yet
        if isinstance(held, Value):
            self.values[origin] = held

    def read(self, node: torch.fx.Node, held: str | Value | None) -> None:
        """An operator, or the end of the network, reads a tensor."""
        if node not in self.origins:
            self.whole.add(held if isinstance(held, str) else node)
        elif isinstance(held, Value):
            self.parts[self.origins[node]].append(_content(held))

    def contents(self, ledger: Ledger) -> Iterator[tuple[bool, _Content, _Content]]:
        """For each origin whether it is a parameter, and its units and scale variables: all, and those that are read."""
        for origin in dict.fromkeys((*self.parts, *(o for o in self.whole if isinstance(o, str)))):
            value = ledger.parameters.get(origin) if isinstance(origin, str) else self.values.get(origin)
            if value is not None:
                whole = _content(value)
                parts = zip(*self.parts.get(origin, []), strict=True)
                if origin not in self.whole:
                    units, variables = tuple(map(_joined, parts)) or (whole[0][:0], whole[1][:0])
                    yield isinstance(origin, str), whole, (_with_blocks(ledger, units), variables)
                else:
                    yield isinstance(origin, str), whole, whole


_Content = tuple[Array, Array]


def pin_unseen(ledger: Ledger, readings: list[Reading]) -> frozenset[str]:
    """Pin what some pass leaves out and no pass reads in full; returns the names of parameters that hold such units.

    Unseen rows of a parameter are scaled as those that are read (a table whose rows are added to a stream follows the
    stream's scales); unseen units of anything else not at all.
    """
    left_out: list[list[Array]] = [[], []]
    covered: list[list[Array]] = [[], []]
    for reading in readings:
        missed: list[list[Array]] = [[], []]
        present: list[list[Array]] = [[], []]
        for is_parameter, whole, read in reading.contents(ledger):
            for k in range(2):
                present[k].append(whole[k])
                if not (is_parameter and k):
                    missed[k].append(whole[k][~among(whole[k], read[k])])
        for k in range(2):
            gone = _joined(missed[k])
            here = _joined(present[k])
            left_out[k].append(gone)
            covered[k].append(here[~among(here, gone)])
    units, variables = (
        gone[~among(gone, _joined(seen))] for gone, seen in zip(map(_joined, left_out), covered, strict=True)
    )
    variables = variables[variables != ZERO]
    if len(units):
        ledger.pins.append((units, UNSEEN))
    if len(variables):
        ledger.pin_scale(((1.0, variables),))
    cut = {origin for reading in readings for origin in reading.parts.keys() - reading.whole if isinstance(origin, str)}
    partly = set()
    for name in sorted(cut & ledger.parameters.keys()):
        value = ledger.parameters[name]
        for axis, label in enumerate(value.labels):
            if any(among(c, units).any() for c in label):
                partly.add(name)
                for _, variable in value.scale:
                    ledger.constant_along(variable, axis)
    return frozenset(partly)


def _with_blocks(ledger: Ledger, units: Array) -> Array:
    """Units and the blocks that they stand in: a label does not name blocks that its units tell."""
    while True:
        held = [blocks[among(inner, units) & ~among(blocks, units)] for inner, blocks in ledger.nestings]
        held += [
            part[among(binding.units, units) & (part >= 0) & ~among(part, units)]
            for binding in ledger.bindings
            for part in binding.parts
        ]
        if not any(len(h) for h in held):
            return units
        units = _joined([units, *held])


def pin_what_could_meet(ledger: Ledger, name: str, shape: tuple[int, ...]) -> None:
    """Pin the units of every axis that an unread parameter could meet: as long as one of its own, or flattened into it.

    Other inputs may reach the parameter, and nothing tells where it then stands.
    """
    reason = f"could meet {name}, which the example inputs do not reach"
    for seen in list(ledger.seen):
        if could_meet(max(c.shape[seen.axis] for c in seen.label), shape):
            ledger.pin_label(seen.label, reason)


def could_meet(length: int, shape: tuple[int, ...]) -> bool:
    """Whether an axis of some length could be added to, multiplied by or contracted with a tensor of some shape."""
    flattened = len(shape) == 2 and shape[1] % length == 0  # a linear layer behind a flattening
    return length > 1 and (length in shape or flattened)


def _joined(arrays: Sequence[Array]) -> Array:
    return distinct(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)


def _content(value: Value) -> tuple[Array, Array]:
    """The units and the scale variables of a tensor."""
    empty = np.empty(0, dtype=np.int64)
    units = [c[c >= 0] for label in value.labels for c in label]
    return np.concatenate([empty, *units]), np.concatenate([empty, *(v.reshape(-1) for _, v in value.scale)])
