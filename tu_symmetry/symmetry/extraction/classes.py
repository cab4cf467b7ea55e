"""First stage: from units to classes of units, by all ties and bindings.

Ties ``0 ~ 5`` and ``5 ~ 9`` make the class ``{0, 5, 9}``. Units 6 and 7 that are bound to the pairs (1, 8) and (2, 8)
(two entries of a flattened axis) make of a label ``[6, 7]`` two components, ``[1, 2]`` and ``[8, 8]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tu_symmetry.symmetry.algebra import Array, Label, among, distinct, tighten
from tu_symmetry.symmetry.ledger import Binding

FAR = 1 << 40  # codes of pinned units lie beyond the codes of positions
Ties = Sequence[tuple[Array, Array]]  # pairs of arrays of units that are one
Pins = Sequence[tuple[Array, str]]  # units that stay where they are, and why


@dataclass(frozen=True, eq=False)
class Classes:
    """Units after all ties."""

    of: Array  # the class of each unit
    count: int
    pinned: dict[int, str]  # class to reason
    bound: Array  # for each class its row in ``tuples``, -1 for a class that is not bound
    tuples: Array  # ``[bindings, factors]``, the classes (or codes) that a class stands for; -1 fills up

    def resolve(self, label: Label) -> Label:
        """Replace units by classes, bound classes by what they are bound to, pinned classes by far codes."""
        found: list[Array] = []
        for component in label:
            moving = component >= 0
            classes = np.where(moving, self.of[np.where(moving, component, 0)], component)
            rows = np.where(moving, self.bound[np.where(moving, classes, 0)], -1)
            if (rows >= 0).any():
                found.append(np.where(rows >= 0, self.tuples[rows, 0], classes))
                found += [np.where(rows >= 0, self.tuples[rows, k], -1) for k in range(1, self.tuples.shape[1])]
            else:
                found.append(classes)
        resolved = []
        for component in found:
            moving = component >= 0
            stuck = moving & self.fixed[np.where(moving, component, 0)]
            resolved.append(tighten(np.where(stuck, -1 - FAR - component, component)))
        return tuple(c for c in resolved if c.size > 1 or len(resolved) == 1)

    @cached_property
    def fixed(self) -> NDArray[np.bool_]:
        """For each class whether it is pinned."""
        mask = np.zeros(self.count, dtype=bool)
        mask[np.fromiter(self.pinned, dtype=np.int64)] = True
        return mask

    @cached_property
    def representative(self) -> Array:
        """For each class one of its units, the first."""
        return np.unique(self.of, return_index=True)[1]


def joined(count: int, ties: Ties) -> tuple[int, Array]:
    """Number of classes of ``count`` units under ties, and the class of each."""
    if not ties:
        return count, np.arange(count, dtype=np.int64)
    a, b = (np.concatenate([side.reshape(-1) for side in sides]) for sides in zip(*ties, strict=True))
    graph = coo_array((np.ones(len(a), dtype=bool), (a, b)), shape=(count, count))
    n, labels = connected_components(graph, directed=False)
    return n, labels.astype(np.int64)


def resolve_classes(count: int, ties: Ties, pins: Pins, bindings: Sequence[Binding]) -> Classes:
    """Join tied units into classes, and settle what units that stand for several stand for."""
    count = max(count, 1)
    keys, rows = _table(bindings)
    all_ties, all_pins = list(ties), list(pins)
    while True:
        number, of = joined(count, all_ties)
        pinned: dict[int, str] = {}
        known = np.zeros(number, dtype=bool)
        for units, reason in all_pins:  # the first reason counts
            found = distinct(of[units])
            pinned.update(dict.fromkeys(found[~known[found]].tolist(), reason))
            known[found] = True
        bound = np.full(number, -1, dtype=np.int64)
        if not len(keys):
            return Classes(of, number, pinned, bound, rows)
        classes = of[keys]
        resolved = np.where(rows >= 0, of[np.where(rows >= 0, rows, 0)], rows)
        more_ties, clashes = _agreement(classes, rows, resolved)
        wanted = [(clash, "factored in two ways") for clash in clashes]
        reasons = [pinned.get(c) for c in classes.tolist()]
        for reason in dict.fromkeys(r for r in reasons if r is not None):
            wanted.append((np.flatnonzero([r == reason for r in reasons]), reason))
        # a class that is bound and stands in a tuple itself would need substitution within substitution
        cyclic = (among(resolved, classes) & (resolved >= 0)).any(axis=1)
        wanted.append((np.flatnonzero(cyclic), "factored twice over"))
        more_pins = []
        for which, reason in wanted:
            units = rows[which][rows[which] >= 0]
            units = units[[c not in pinned for c in of[units].tolist()]] if units.size else units
            if units.size:
                more_pins.append((units, reason))
        if not more_ties and not more_pins:
            bound[classes] = np.arange(len(classes))
            return Classes(of, number, pinned, bound, resolved)
        all_ties += more_ties
        all_pins += more_pins


def _table(bindings: Sequence[Binding]) -> tuple[Array, Array]:
    """All bound units ``[n]``, and what each is bound to ``[n, arity]``, filled up with -1."""
    arity = max((len(parts) for _, parts in bindings), default=1)
    filled = [(*parts, *[np.full_like(units, -1)] * (arity - len(parts))) for units, parts in bindings]
    keys = np.concatenate([np.empty(0, np.int64), *(units for units, _ in bindings)])
    return keys, np.concatenate([np.empty((0, arity), np.int64), *(np.stack(parts, axis=1) for parts in filled)])


def _agreement(classes: Array, rows: Array, resolved: Array) -> tuple[list[tuple[Array, Array]], list[Array]]:
    """What bindings of one class demand: ties of their parts, and the rows in which parts do not go together."""
    order = np.argsort(classes, kind="stable")
    same = classes[order][1:] == classes[order][:-1]
    first, second = order[:-1][same], order[1:][same]
    ties: list[tuple[Array, Array]] = []
    clashes: list[Array] = []
    for k in range(rows.shape[1]):
        x, y = rows[first, k], rows[second, k]
        tie = (x >= 0) & (y >= 0) & (resolved[first, k] != resolved[second, k])
        if tie.any():
            ties.append((x[tie], y[tie]))
        clash = ((x >= 0) != (y >= 0)) | ((x < 0) & (y < 0) & (x != y))
        clashes += [first[clash], second[clash]]
    return ties, clashes
