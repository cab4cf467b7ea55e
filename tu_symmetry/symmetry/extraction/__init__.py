"""From a ledger of demands on units to permutation groups.

A symmetry is a bijection of hidden units that maps the labels of every tensor onto themselves and keeps units in their
blocks. It is found in stages, each a function of what the ones before it returned:

1. :func:`~.classes.resolve_classes`: tied units become classes;
2. :func:`~.coloring.color`: classes that no demand tells apart get one color;
3. :func:`~.forest.plant`: classes of one color become a node, nested in the blocks that they stand in;
4. :meth:`~.members.Reader.members`: for each node the axes of the parameters along which its units lie;
5. :func:`permutation_groups`: nodes with members get names, and the axes that no group moves are told, with reasons.

Stages 1 to 3 may bring up a demand that no rule has made (two kinds of blocks that hold the same units are one). It is
added, and they are run again; every time there are fewer classes or fewer free ones, so this ends. A node that turns
out in stage 4 not to be a group is left out, and members are read again.

As an example, ``c(relu(a(x)))`` with two hidden units. The rows of ``a.weight`` are units 0 and 1, the entries of
``a.bias`` 2 and 3, the columns of ``c.weight`` 4 and 5; columns of ``a`` (the input) and rows of ``c`` are pinned::

    ties       0 ~ 2, 1 ~ 3 (the bias is added), 0 ~ 4, 1 ~ 5 (c reads them)
    classes    A = {0, 2, 4}, B = {1, 3, 5}, and pinned ones
    colors     A and B stand in the same labels: one color
    forest     one node [A, B], in no block
    members    a.weight axis 0 [[0], [1]], a.bias axis 0 [[0], [1]], c.weight axis 1 [[0], [1]]
    group      "a", of size 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tu_symmetry.symmetry.algebra import Array, distinct
from tu_symmetry.symmetry.extraction.classes import FAR, Classes, resolve_classes
from tu_symmetry.symmetry.extraction.coloring import Coloring, Hash, Tag, color, combined
from tu_symmetry.symmetry.extraction.forest import Forest, Labels, lost_blocks, plant
from tu_symmetry.symmetry.extraction.members import Contradiction, Reader
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember, Pin
from tu_symmetry.symmetry.ledger import Ledger


def permutation_groups(ledger: Ledger, order: Sequence[str]) -> tuple[list[PermutationGroup], list[Pin]]:
    """The permutation groups, parents first, and the parameter axes that stay pinned.

    Args:
        ledger: what the operators demand; it is left as it is.
        order: names of the state dict's tensors, in order; decides names and the order of groups.
    """
    demands = _Demands.of(ledger)
    while True:
        found = _Found.by(ledger, demands)
        more = _further(ledger, demands, found)
        if more is None:
            break
        demands = more
    forest, members = _consistent(ledger, demands, found, order)
    return _named(forest, members, order), list(_pins(ledger, found.labels, forest, found.classes.count, order))


@dataclass(frozen=True, eq=False)
class _Demands:
    """The demands of the ledger that may become more while groups are found.

    Attributes:
        ties: pairs of arrays of units that are one.
        pins: units that stay where they are, and why.
        tags: blocks that are told apart.
        tag_of_unit: for each unit the hash of all its tags.
    """

    ties: tuple[tuple[Array, Array], ...]
    pins: tuple[tuple[Array, str], ...]
    tags: tuple[Tag, ...]
    tag_of_unit: Hash

    @classmethod
    def of(cls, ledger: Ledger) -> _Demands:
        return cls(tuple(ledger.ties), tuple(ledger.pins), (), np.zeros(max(ledger.units, 1), dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class _Found:
    """What the first three stages make of demands."""

    classes: Classes
    labels: Labels
    coloring: Coloring
    forest: Forest

    @classmethod
    def by(cls, ledger: Ledger, demands: _Demands) -> _Found:
        classes = resolve_classes(ledger.units, demands.ties, demands.pins, ledger.bindings)
        labels = {
            name: tuple(classes.resolve(label) for label in value.labels) for name, value in ledger.parameters.items()
        }
        coloring = color(ledger, classes, demands.tags, demands.tag_of_unit)
        return cls(classes, labels, coloring, plant(labels, classes, coloring))


def _further(ledger: Ledger, demands: _Demands, found: _Found) -> _Demands | None:
    """The demands with those that only came up when blocks were looked at; None if there are none."""
    unit = found.classes.representative
    same, tags = found.forest.same, found.forest.tags
    if same or tags:
        ties = tuple((unit[a], unit[b]) for a, b in same)
        all_tags, of_unit = demands.tags, demands.tag_of_unit
        for tag in tags:
            all_tags = (*all_tags, Tag(unit[tag.units], tag.order))
            of_class = np.zeros(found.classes.count, dtype=np.uint64)
            of_class[tag.units] = combined(len(all_tags), tag.order)
            of_unit = combined(of_unit, of_class[found.classes.of])
        return replace(demands, ties=(*demands.ties, *ties), tags=all_tags, tag_of_unit=of_unit)
    lost = lost_blocks(ledger.nestings, found.classes, found.coloring.colors)
    if len(lost):
        pin = (unit[lost], "holds units that other blocks hold too")
        return replace(demands, pins=(*demands.pins, pin))
    return None


def _consistent(
    ledger: Ledger, demands: _Demands, found: _Found, order: Sequence[str]
) -> tuple[Forest, dict[int, list[PermutationMember]]]:
    """The forest without the nodes whose members contradict one another, and the members of the others."""
    forest, colors = found.forest, found.coloring.colors
    while True:
        try:
            return forest, Reader(ledger, demands.ties, found.labels, colors, forest).members(order)
        except Contradiction as contradiction:
            node = contradiction.node
            forest = forest.without(node, contradiction.reason, np.flatnonzero(colors == node.color))


def _named(forest: Forest, members: dict[int, list[PermutationMember]], order: Sequence[str]) -> list[PermutationGroup]:
    """The nodes that move some parameter as groups, parents first."""
    rank = {name: k for k, name in enumerate(order)}

    def first(color: int) -> tuple[bool, int]:
        """The first member: the first parameter that units index along its first axis, or the first one at all."""
        return min((m.axis != 0, rank[m.parameter]) for m in members[color])

    moving = [node for node in forest.nodes.values() if forest.proper(node) and members.get(node.color)]
    names: dict[int, str] = {}
    groups = []
    for node in sorted(moving, key=lambda n: (len(forest.chain(n)), first(n.color))):
        outer = forest.group(forest.parent(node))
        parent = None if outer is None else names.get(outer.color, "")
        path = order[first(node.color)[1]].rpartition(".")
        names[node.color] = _unique(path[0] or path[2], parent, set(names.values()))
        groups.append(
            PermutationGroup(
                names[node.color], node.size, tuple(members[node.color]), parent, tuple(node.units.shape[:-1])
            )
        )
    return groups


def _unique(base: str, parent: str | None, taken: set[str]) -> str:
    """The name of the module whose output the units are, told apart from others by a number."""
    if parent is not None:
        own = base.rpartition(".")[2]
        base = f"{parent}/{own}"
    name, k = base, 2
    while name in taken:
        name, k = f"{base}-{k}", k + 1
    return name


def _pins(ledger: Ledger, labels: Labels, forest: Forest, count: int, order: Sequence[str]) -> Iterator[Pin]:
    """The axes of parameters that no group moves (or not all of), each with the first reason that is known."""
    free = np.zeros(count, dtype=bool)
    for node in forest.nodes.values():
        if forest.group(node) is not None:
            free[node.units.reshape(-1)] = True
    for name in order:
        value = ledger.parameters.get(name)
        if value is None:
            continue
        for axis, label in enumerate(labels[name]):
            if value.shape[axis] == 1:
                continue
            moving = np.zeros(value.shape[axis], dtype=bool)
            reason = value.reasons[axis]
            for component in label:
                lines = np.moveaxis(component, axis, -1).reshape(-1, component.shape[axis])
                hit = np.where(lines >= 0, free[np.where(lines >= 0, lines, 0)], False).any(axis=0)
                moving |= np.broadcast_to(hit, moving.shape)
                for entry in distinct(lines[(lines < 0) & (lines <= -1 - FAR)])[:1].tolist():
                    reason = reason or forest.reasons.get(-1 - entry - FAR, "")
                for entry in lines[(lines >= 0)][:1].tolist():
                    reason = reason or forest.reasons.get(entry, "")
            if not moving.all():
                yield Pin(name, axis, int((~moving).sum()), reason or "a single unit of its kind")
