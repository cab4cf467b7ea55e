"""Second stage: classes of units are colored by everything that is demanded of them.

Two classes have one color if all demands treat them alike, as far as color refinement can tell (the one-dimensional
Weisfeiler-Leman test of graph isomorphism). Demands come as labels, so a class is colored by where it stands in them:

* in which label, as which component, and beside which fixed positions (the context of a :class:`Place`);
* at which fixed positions of the axis that its label is nested in, or in units of which color there (the relations);
* with which marks and tags.

All of it is added up, as hashes, over all places where the class stands; sums do not depend on the order of places.

As an example, ``c(cat([relu(a(x)), relu(b(x))]))`` with two units each. Rows of ``a`` are seen in one label, rows of
``b`` in another, and both as columns of ``c``::

    class        0 (a)           1 (a)           2 (b)           3 (b)
    seen in      a, ReLU, c      a, ReLU, c      b, ReLU, c      b, ReLU, c
    color        X               X               Y               Y

so that 0 and 1 may change places, 2 and 3 may, but 1 and 2 may not. With heads (blocks) in the label's other axis,
relations tell the colors of units from those of their blocks and back, until no color splits any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tu_symmetry.symmetry.algebra import Array, Label, distinct, distinct_rows
from tu_symmetry.symmetry.extraction.classes import Classes
from tu_symmetry.symmetry.ledger import Ledger, Seen

Hash = NDArray[np.uint64]


def mixed(x: Hash) -> Hash:
    """The splitmix64 finalizer: near numbers become far ones."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def combined(*parts: Array | Hash | int) -> Hash:
    """One hash of several numbers (or arrays that broadcast), which depends on their order."""
    total = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            total = mixed(total * np.uint64(3) + np.asarray(part).astype(np.uint64))
    return total


class Relation(NamedTuple):
    """How the label of an axis is nested: seen in which tensor (by number), along which other axis of it.

    Attributes:
        seen: position in the list of what was seen.
        axis: the axis that the label is nested in, below 64 (which is what torch allows).
    """

    seen: int
    axis: int

    @property
    def key(self) -> int:
        """A number of its own for each relation."""
        return self.seen * 64 + self.axis

    def of_part(self, part: int) -> int:
        """A number of its own for each component of the label of the outer axis, of which there are few."""
        return self.key * 8 + part


class Edges(NamedTuple):
    """Classes that stand in blocks: parallel arrays, sorted by child, then parent.

    Attributes:
        child: the class of the unit.
        parent: the class of its block.
        relation: where it stands so, see :meth:`Relation.of_part`.
    """

    child: Array
    parent: Array
    relation: Array


class Tag(NamedTuple):
    """Blocks that hold the same units, told apart by the order in which they stand in each unit.

    Attributes:
        units: one unit of the ledger for each block.
        order: a number for each of them.
    """

    units: Array
    order: Array


class Place(NamedTuple):
    """What classes meet somewhere: arrays that broadcast against each other.

    Attributes:
        component: classes (and codes of fixed positions, which stand for nothing here).
        context: what they meet there.
    """

    component: Array
    context: Hash


@dataclass(frozen=True, eq=False)
class Coloring:
    """The colors of all classes, and what was learned on the way.

    Attributes:
        colors: for each class a number from 0; those of one color look alike.
        edges: units in blocks.
        reasons: class to why it is pinned or told apart from others.
    """

    colors: Array
    edges: Edges
    reasons: Mapping[int, str]


def color(ledger: Ledger, classes: Classes, tags: Sequence[Tag], tag_of_unit: Hash) -> Coloring:
    """Color classes by all demands, then refine by the colors of blocks and of what these hold.

    Args:
        ledger: the demands.
        classes: the classes of its units.
        tags: the tags of blocks that became one class with others and are still told apart.
        tag_of_unit: for each unit of the ledger the hash of all tags that it has.
    """
    total = np.zeros(classes.count, dtype=np.uint64)
    found: list[Array] = []
    for number, seen in enumerate(ledger.seen):
        places, edges = _standing(classes, number, seen, tag_of_unit if tags else None)
        for place in places:
            _add(total, place)
        found += edges
    reasons = dict(classes.pinned)
    for number, mark in enumerate(ledger.marks):
        for part in classes.resolve((mark.component,)):
            place = Place(*np.broadcast_arrays(part, combined(-1 - number, mark.tags)))
            _add(total, place)
            for unit in distinct(place.component[place.component >= 0]).tolist():
                reasons.setdefault(unit, mark.reason)
    for number, tag in enumerate(tags):
        _add(total, Place(classes.of[tag.units], combined(-1 - len(ledger.marks) - number, tag.order)))
    edges_of = Edges(*(distinct_rows(np.concatenate(found)) if found else np.empty((0, 3), dtype=np.int64)).T)
    return Coloring(_refined(total, edges_of), edges_of, reasons)


def _add(total: Hash, place: Place) -> None:
    """Add what classes meet at a place to their hashes."""
    component, context = np.broadcast_arrays(*place)
    moving = component >= 0
    with np.errstate(over="ignore"):
        np.add.at(total, component[moving], context[moving])


def _standing(classes: Classes, number: int, seen: Seen, tag_of_unit: Hash | None) -> tuple[list[Place], list[Array]]:
    """Where classes stand in one label, and the edges ``[n, 3]`` from its units to the blocks that it is nested in."""
    components = classes.resolve(seen.label)
    others = {k: classes.resolve(label) for k, label in enumerate(seen.others) if k != seen.axis}
    places: list[Place] = []
    edges: list[Array] = []
    for position, component in enumerate(components):
        context = combined(number, position)
        for other in components:
            if other is not component:
                context = combined(context, np.where(other < 0, other, 0))
        for k, size in enumerate(component.shape):
            if k == seen.axis or size == 1:
                continue
            met, of_blocks, found = _related(component, others.get(k, ()), Relation(number, k))
            if tag_of_unit is not None:  # blocks that became one are told apart
                for outer in seen.others[k]:
                    met = combined(met, np.where(outer >= 0, tag_of_unit[np.where(outer >= 0, outer, 0)], 0))
            context = combined(context, met)
            places += of_blocks
            edges += found
        if (component >= 0).any():
            places.append(Place(component, context))
    return places, edges


def _related(component: Array, outer: Label, relation: Relation) -> tuple[Hash, list[Place], list[Array]]:
    """How the units of a component depend on the axis that they are nested in.

    Returns:
        What they meet there at its fixed positions; what its units meet in turn (blocks that hold fixed units are told
        apart by them); and the edges from the units to those that stand for their blocks.

    As an example, ``[[0, 1], [2, 3]]`` nested in an axis with the label ``[8, -1]``: 0 and 1 stand in the block 8, two
    edges, and 2 and 3 meet the fixed position -1.
    """
    size = component.shape[relation.axis]
    shape = [size if k == relation.axis else 1 for k in range(component.ndim)]
    if not any((o >= 0).any() for o in outer):
        return combined(relation.key, np.arange(size).reshape(shape)), [], []
    met: Hash = combined(relation.key, _copies(component, outer, relation.axis))
    places: list[Place] = []
    edges: list[Array] = []
    for part, o in enumerate(outer):
        met = combined(met, np.where(o < 0, -o, 0))
        x, y = np.broadcast_arrays(component, o)
        both = (x >= 0) & (y >= 0) & (x != y)
        if both.any():
            pairs = distinct_rows(np.stack([x[both], y[both]], axis=1))
            of_part = np.full((len(pairs), 1), relation.of_part(part), dtype=np.int64)
            edges.append(np.concatenate([pairs, of_part], axis=1))
        stuck = (x < 0) & (y >= 0)
        if stuck.any():
            places.append(Place(y[stuck], combined(relation.key, part, -x[stuck])))
    return met, places, edges


def _copies(component: Array, outer: Label, axis: int) -> Array:
    """Which copy of its block each position of an outer axis is, where copies of one block hold different units.

    Columns with the blocks ``[8, 9, 8, 9]`` that hold the units ``[[0, 1], [2, 3], [4, 5], [6, 7]]``: 0 and 1 stand in
    the first copy of 8, 4 and 5 in the second one, and no unit of the one column moves to the other.
    """
    size = component.shape[axis]
    shape = [size if k == axis else 1 for k in range(component.ndim)]
    none = np.zeros(shape, dtype=np.int64)
    if any(o.size > o.shape[axis] for o in outer):
        return none
    rows = np.stack([np.broadcast_to(o.reshape(-1), (size,)) for o in outer], axis=1)
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    if len(first) == size or (component == component.take(first[inverse], axis)).all():
        return none
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(first)))
    rank = np.empty(size, dtype=np.int64)
    rank[order] = np.arange(size) - starts[inverse[order]]
    return rank.reshape(shape)


def _refined(total: Hash, edges: Edges) -> Array:
    """Colors as small numbers, after as many rounds of refinement along the edges as there is something to tell apart.

    In each round a class learns the colors of its blocks, and a block the colors of all that it holds.
    """
    values, dense = np.unique(total, return_inverse=True)
    if not len(edges.child):
        return dense.astype(np.int64)
    while True:
        base = mixed(dense.astype(np.uint64))
        updated = base.copy()
        with np.errstate(over="ignore"):
            np.add.at(updated, edges.child, combined(base[edges.parent], edges.relation, 1))
            np.add.at(updated, edges.parent, combined(base[edges.child], edges.relation, 2))
        refined, dense = np.unique(updated, return_inverse=True)
        if len(refined) == len(values):
            return dense.astype(np.int64)
        values = refined


def roles(ledger: Ledger, ties: Sequence[tuple[Array, Array]]) -> Hash:
    """Colors of the ledger's units before ties: those with one color take the same part in all demands.

    Ties make one class of the units of ``h`` and ``g`` wherever ``h + g`` is computed. In ``c(roll(cat([h, g])))`` each
    class then has two positions along the columns of ``c``, and which of them holds ``h`` depends on the unit: columns
    ``[g3, h0, h1, h2, h3, g0, g1, g2]`` have the classes ``[3, 0, 1, 2, 3, 0, 1, 2]``. A column's role says that it was
    tied to a unit of ``h`` (or of ``g``), by the same tie and on the same side.
    """
    role = np.zeros(max(ledger.units, 1), dtype=np.uint64)
    for number, seen in enumerate(ledger.seen):
        for position, component in enumerate(seen.label):
            beside = (np.where(c < 0, c, 0) for c in seen.label if c is not component)
            _add(role, Place(component, combined(number, position, *beside)))
    for number, mark in enumerate(ledger.marks):
        _add(role, Place(mark.component, combined(number, mark.tags, 7)))
    links = [(x.reshape(-1), y.reshape(-1)) for x, y in ties]
    for units, parts in ledger.bindings:
        links += [(units.reshape(-1), part.reshape(-1)) for part in parts]
    if not links:
        return role
    left, right = (np.concatenate(side) for side in zip(*links, strict=True))
    which = np.repeat(np.arange(len(links)), [len(x) for x, _ in links])
    fixed = right < 0
    with np.errstate(over="ignore"):
        np.add.at(role, left[fixed], combined(which[fixed], right[fixed], 3))
        left, right, which = left[~fixed], right[~fixed], which[~fixed]
        known = len(np.unique(role))
        while True:
            refined = mixed(role)
            np.add.at(refined, left, combined(role[right], which, 1))
            np.add.at(refined, right, combined(role[left], which, 2))
            role, before, known = refined, known, len(np.unique(refined))
            if known == before:
                return role
