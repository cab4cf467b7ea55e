"""Second stage: classes of units are colored by everything that is demanded of them.

Two classes have one color if all demands treat them alike, as far as color refinement can tell: a class is colored by
where it stands in labels, what stands beside it there, and which blocks it stands in. All of it is added up as hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tu_symmetry.symmetry.algebra import Array, Label, along, distinct, distinct_rows, tighten
from tu_symmetry.symmetry.extraction.classes import Classes, Ties
from tu_symmetry.symmetry.ledger import Ledger, Seen

Hash = NDArray[np.uint64]


def mixed(x: Hash) -> Hash:
    """The splitmix64 finalizer: near numbers become far ones. Arrays of no axes would warn that they overflow."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combined(*parts: Array | Hash | int) -> Hash:
    """One hash of several numbers (or arrays that broadcast), which depends on their order; it has an axis at least."""
    total = np.zeros(1, dtype=np.uint64)
    for part in parts:
        total = mixed(total * np.uint64(3) + np.asarray(part).astype(np.uint64))
    return total


class Edges(NamedTuple):
    """Classes (``child``) that stand in blocks (``parent``), and where: parallel arrays, sorted."""

    child: Array
    parent: Array
    relation: Array


class Tag(NamedTuple):
    """Blocks that hold the same units, one unit for each, told apart by the order in which they stand in each unit."""

    units: Array
    order: Array


@dataclass(frozen=True, eq=False)
class Coloring:
    """A color (from 0) for each class, units in blocks, and why a class is pinned or told apart from others."""

    colors: Array
    edges: Edges
    reasons: Mapping[int, str]


def distinct_seen(labels: Sequence[Seen], role: Hash) -> list[Seen]:
    """One of the labels each that demand the same, where units of one ``role`` are one."""
    known: dict[int, tuple[tuple[int, ...], bytes]] = {}

    def told(component: Array) -> tuple[tuple[int, ...], bytes]:
        if id(component) not in known:
            held = tighten(np.where(component >= 0, role[np.maximum(component, 0)], component.astype(np.uint64)))
            known[id(component)] = held.shape, sha256(np.ascontiguousarray(held).data).digest()
        return known[id(component)]

    found: dict[tuple[Any, ...], Seen] = {}
    for seen in labels:
        own = [told(component) for component in seen.label]
        outer = {k for shape, _ in own for k, n in enumerate(shape) if n > 1 and k != seen.axis}
        found.setdefault((seen.axis, *own, *((k, *map(told, seen.others[k])) for k in sorted(outer))), seen)
    return list(found.values())


def color(ledger: Ledger, labels: Sequence[Seen], classes: Classes, tags: Sequence[Tag], tag_of_unit: Hash) -> Coloring:
    """Color classes by all demands, then refine by the colors of blocks and of what these hold."""
    total = np.zeros(classes.count, dtype=np.uint64)
    found: list[Array] = [np.empty((0, 3), dtype=np.int64)]
    for number, seen in enumerate(labels):
        found += _stand(total, classes, number, seen, tag_of_unit if tags else None)
    reasons = dict(classes.pinned)
    for number, mark in enumerate(ledger.marks):
        for part in classes.resolve((mark.component,)):
            part, context = np.broadcast_arrays(part, combined(-1 - number, mark.tags))
            _add(total, part, context)
            for unit in distinct(part[part >= 0]).tolist():
                reasons.setdefault(unit, mark.reason)
    for number, tag in enumerate(tags):
        _add(total, classes.of[tag.units], combined(-1 - len(ledger.marks) - number, tag.order))
    edges = Edges(*distinct_rows(np.concatenate(found)).T)
    return Coloring(_refined(total, edges), edges, reasons)


def _add(total: Hash, component: Array, context: Hash) -> None:
    component, context = np.broadcast_arrays(component, context)
    moving = component >= 0
    np.add.at(total, component[moving], context[moving])


def _stand(total: Hash, classes: Classes, number: int, seen: Seen, tag_of_unit: Hash | None) -> list[Array]:
    """Add where classes stand in one label; returns the edges ``[n, 3]`` to the blocks that it is nested in."""
    components = classes.resolve(seen.label)
    others = {k: classes.resolve(label) for k, label in enumerate(seen.others) if k != seen.axis}
    edges: list[Array] = []
    for position, component in enumerate(components):
        context = combined(number, position)
        for other in components:
            if other is not component:
                context = combined(context, np.where(other < 0, other, 0))
        for k, size in enumerate(component.shape):
            if k == seen.axis or size == 1:
                continue
            met, found = _related(total, component, others.get(k, ()), k, number * 64 + k)  # torch allows 64 axes
            edges += found
            if tag_of_unit is not None:  # blocks that became one are told apart
                for outer in seen.others[k]:
                    met = combined(met, np.where(outer >= 0, tag_of_unit[np.where(outer >= 0, outer, 0)], 0))
            context = combined(context, met)
        if (component >= 0).any():
            _add(total, component, context)
    return edges


def _related(total: Hash, component: Array, outer: Label, axis: int, key: int) -> tuple[Hash, list[Array]]:
    """How the units of a component depend on the axis that they are nested in, which has the label ``outer``."""
    size = component.shape[axis]
    if not any((o >= 0).any() for o in outer):
        return combined(key, along(np.arange(size), axis, component.ndim)), []
    met: Hash = combined(key, _copies(component, outer, axis))
    edges: list[Array] = []
    for part, o in enumerate(outer):
        met = combined(met, np.where(o < 0, -o, 0))
        x, y = np.broadcast_arrays(component, o)
        both = (x >= 0) & (y >= 0) & (x != y)
        if both.any():
            pairs = distinct_rows(np.stack([x[both], y[both]], axis=1))
            of_part = np.full((len(pairs), 1), key * 8 + part, dtype=np.int64)  # a label has few components
            edges.append(np.concatenate([pairs, of_part], axis=1))
        stuck = (x < 0) & (y >= 0)
        if stuck.any():
            _add(total, y[stuck], combined(key, part, -x[stuck]))
    return met, edges


def _copies(component: Array, outer: Label, axis: int) -> Array:
    """Which copy of its block each position of an outer axis is, where copies of one block hold different units."""
    size = component.shape[axis]
    rank = np.zeros(size, dtype=np.int64)
    if not any(o.size > o.shape[axis] for o in outer):
        rows = np.stack([np.broadcast_to(o.reshape(-1), (size,)) for o in outer], axis=1)
        if len(distinct_rows(rows)) == size:
            return along(rank, axis, component.ndim)
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        inverse = inverse.reshape(-1)
        if len(first) < size and not (component == component.take(first[inverse], axis)).all():
            order = np.argsort(inverse, kind="stable")
            starts = np.searchsorted(inverse[order], np.arange(len(first)))
            rank[order] = np.arange(size) - starts[inverse[order]]
    return along(rank, axis, component.ndim)


def _refined(total: Hash, edges: Edges) -> Array:
    """Colors as small numbers: a class learns those of its blocks and of what it holds until none splits any more."""
    values, dense = np.unique(total, return_inverse=True)
    while len(edges.child):
        base = mixed(dense.astype(np.uint64))
        updated = base.copy()
        np.add.at(updated, edges.child, combined(base[edges.parent], edges.relation, 1))
        np.add.at(updated, edges.parent, combined(base[edges.child], edges.relation, 2))
        refined, dense = np.unique(updated, return_inverse=True)
        if len(refined) == len(values):
            break
        values = refined
    return dense.astype(np.int64)


def roles(ledger: Ledger, ties: Ties) -> Hash:
    """Colors of the ledger's units before ties: those with one color take the same part in all demands."""
    role = np.zeros(max(ledger.units, 1), dtype=np.uint64)
    for number, seen in enumerate(ledger.seen):
        for position, component in enumerate(seen.label):
            beside = (np.where(c < 0, c, 0) for c in seen.label if c is not component)
            _add(role, component, combined(number, position, *beside))
    for number, mark in enumerate(ledger.marks):
        _add(role, mark.component, combined(number, mark.tags, 7))
    links = [(x.reshape(-1), y.reshape(-1)) for x, y in ties]
    for units, parts in ledger.bindings:
        links += [(units.reshape(-1), part.reshape(-1)) for part in parts]
    if not links:
        return role
    left, right = (np.concatenate(side) for side in zip(*links, strict=True))
    which = np.repeat(np.arange(len(links)), [len(x) for x, _ in links])
    fixed = right < 0
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
