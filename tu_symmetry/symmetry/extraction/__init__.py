"""From a ledger of demands on units to permutation groups.

A symmetry is a bijection of hidden units that maps the labels of every tensor onto themselves and keeps units in their
blocks. Tied units become classes, classes of one color a node of a forest, nodes with members groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tu_symmetry.symmetry.algebra import distinct
from tu_symmetry.symmetry.extraction.classes import FAR, resolve_classes
from tu_symmetry.symmetry.extraction.coloring import Tag, color, combined, distinct_seen
from tu_symmetry.symmetry.extraction.forest import Forest, Labels, lost_blocks, plant
from tu_symmetry.symmetry.extraction.members import Contradiction, Reader
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember, Pin, unique
from tu_symmetry.symmetry.ledger import Ledger

Members = dict[int, list[PermutationMember]]


def permutation_groups(ledger: Ledger, order: Sequence[str]) -> tuple[list[PermutationGroup], list[Pin]]:
    """The permutation groups, parents first, and the parameter axes that stay pinned."""
    ties, pins, tags = list(ledger.ties), list(ledger.pins), list[Tag]()  # more come up when blocks are looked at
    tag_of_unit = np.zeros(max(ledger.units, 1), dtype=np.uint64)
    seen = list(ledger.seen)
    while True:
        classes = resolve_classes(ledger.units, ties, pins, ledger.bindings)
        seen = distinct_seen(seen, combined(classes.of, tag_of_unit))
        labels = {
            name: tuple(classes.resolve(label) for label in value.labels) for name, value in ledger.parameters.items()
        }
        coloring = color(ledger, seen, classes, tags, tag_of_unit)
        before = len(pins)
        for rows, units in ledger.orders:
            own = classes.of[rows]
            alike = len(distinct(own)) == len(own) and len(distinct(coloring.colors[own])) == 1
            if (classes.fixed[own].any() or not alike) and not classes.fixed[classes.of[units]].all():
                pins.append((units, "told by the order of rows"))
        if len(pins) > before:
            continue
        forest = plant(labels, classes, coloring)
        unit = classes.representative
        ties += [(unit[a], unit[b]) for a, b in forest.same]
        for tag in forest.tags:
            tags.append(Tag(unit[tag.units], tag.order))
            of_class = np.zeros(classes.count, dtype=np.uint64)
            of_class[tag.units] = combined(len(tags), tag.order)
            tag_of_unit = combined(tag_of_unit, of_class[classes.of])
        if forest.same or forest.tags:
            continue
        lost = lost_blocks(ledger.nestings, classes, coloring.colors)
        if not len(lost):
            break
        pins.append((unit[lost], "holds units that other blocks hold too"))
    while True:
        try:
            members = Reader(ledger, ties, labels, coloring.colors, forest).members(order)
            break
        except Contradiction as contradiction:  # the node is no group
            node = contradiction.node
            forest = forest.without(node, contradiction.reason, np.flatnonzero(coloring.colors == node.color))
    return _named(forest, members, order), list(_pins(ledger, labels, forest, classes.count, order))


def _named(forest: Forest, members: Members, order: Sequence[str]) -> list[PermutationGroup]:
    """The nodes that move some parameter as groups, parents first, named by the module whose output the units are."""
    rank = {name: k for k, name in enumerate(order)}

    def first(color: int) -> tuple[bool, int, int]:
        return min((m.axis != 0, rank[m.parameter], int(m.index.min())) for m in members[color])

    moving = [node for node in forest.nodes.values() if forest.proper(node) and members.get(node.color)]
    names: dict[int, str] = {}
    groups = []
    for node in sorted(moving, key=lambda n: (len(forest.chain(n)), first(n.color))):
        _, *outer = forest.moving(node)
        parent = names.get(outer[0].color, "") if outer else None
        path = order[first(node.color)[1]].rpartition(".")
        base = path[0] or path[2]
        base = base if parent is None else f"{parent}/{base.rpartition('.')[2]}"
        names[node.color] = unique(base, names.values())
        own = tuple(members[node.color])
        groups.append(PermutationGroup(names[node.color], node.size, own, parent, tuple(node.units.shape[:-1])))
    return groups


def _pins(ledger: Ledger, labels: Labels, forest: Forest, count: int, order: Sequence[str]) -> Iterator[Pin]:
    """The axes of parameters that no group moves (or not all of), each with the first reason that is known."""
    free = np.zeros(count, dtype=bool)
    for node in forest.nodes.values():
        if forest.moving(node):
            free[node.units.reshape(-1)] = True
    for name in (n for n in order if n in ledger.parameters):
        value = ledger.parameters[name]
        for axis, label in enumerate(labels[name]):
            size, reason = value.shape[axis], value.reasons[axis]
            if size == 1:
                continue
            moving = np.zeros(size, dtype=bool)
            for component in label:
                lines = np.moveaxis(component, axis, -1).reshape(-1, component.shape[axis])
                moving |= ((lines >= 0) & free[np.where(lines >= 0, lines, 0)]).any(axis=0)
                for entry in distinct(lines[lines <= -1 - FAR])[:1].tolist():
                    reason = reason or forest.reasons.get(-1 - entry - FAR, "")
                for entry in lines[(lines >= 0)][:1].tolist():
                    reason = reason or forest.reasons.get(entry, "")
            if not moving.all():
                yield Pin(name, axis, int((~moving).sum()), reason or "a single unit of its kind")
