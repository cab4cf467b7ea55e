"""Third stage: the classes of one color, and the blocks that they stand in, become the nodes of a forest.

A node holds the units of one color as an array ``[*blocks, size]``: units of one block may be permuted, each block for
itself, and blocks move whole with the node that they belong to. What fits nowhere is pinned, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from tu_symmetry.symmetry.algebra import Array, Label, among, distinct, distinct_rows
from tu_symmetry.symmetry.extraction.classes import Classes
from tu_symmetry.symmetry.extraction.coloring import Coloring, Edges, Tag

Labels = Mapping[str, tuple[Label, ...]]
Pairs = dict[int, dict[int, Array]]
"""For each color and each color of blocks that it stands in: (unit, block) ``[n, 2]``."""


@dataclass(frozen=True, eq=False)
class Node:
    """Units of one color, which look alike, with the block structure that they stand in."""

    color: int
    units: Array  # classes ``[*blocks, size]``, ascending in each block, so that slots correspond between blocks
    parent: int | None = None  # color of the blocks

    @property
    def size(self) -> int:
        """Number of units in each block."""
        return int(self.units.shape[-1])


@dataclass(frozen=True, eq=False)
class Forest:
    """The nodes, parents first, and what came up while they were placed."""

    nodes: Mapping[int, Node]  # by color
    still: frozenset[int]  # colors whose units hold something pinned, and stay; what they hold may move
    reasons: Mapping[int, str]  # class to why it is pinned
    same: tuple[tuple[Array, Array], ...] = ()  # blocks of different colors that hold the same units: to be tied
    tags: tuple[Tag, ...] = ()  # blocks of one color that hold the same units, told apart by their order: to be tagged

    def proper(self, node: Node) -> bool:
        """Whether the units of a node may change places."""
        return node.size > 1 and node.color not in self.still

    def chain(self, node: Node | None) -> list[Node]:
        """A node, the node of the blocks that its units stand in, and so on."""
        return [] if node is None else _chain(self.nodes, node.color)

    def moving(self, node: Node | None) -> list[Node]:
        """Those of the chain that are groups of their own."""
        return [n for n in self.chain(node) if self.proper(n)]

    def below(self, node: Node, ancestor: Node) -> bool:
        """Whether a node is nested in another one, at whatever depth."""
        return any(n is ancestor for n in self.chain(node)[1:])

    def without(self, node: Node, reason: str, classes: Array) -> Forest:
        """The forest without a node of some classes and what is nested in it; the blocks that held it stay put."""
        kept = {color: n for color, n in self.nodes.items() if n is not node and not self.below(n, node)}
        held = {n.color for n in self.chain(node)[1:]}
        reasons = {**dict.fromkeys(classes.tolist(), reason), **self.reasons}  # the first reason counts
        return replace(self, nodes=kept, still=self.still | held, reasons=reasons)


def _chain(nodes: Mapping[int, Node], color: int | None) -> list[Node]:
    found = []
    while color is not None:
        found.append(nodes[color])
        color = found[-1].parent
    return found


def _present(labels: Labels, count: int, edges: Edges) -> Array:
    """Classes that index some parameter, free to move, and the blocks that hold such classes."""
    held = np.zeros(count, dtype=bool)
    for own in labels.values():
        for label in own:
            for component in label:
                held[component[component >= 0]] = True
    units = np.flatnonzero(held)
    while True:
        more = distinct(np.append(units, edges.parent[among(edges.child, units)]))
        if len(more) == len(units):
            return units
        units = more


def _by_color(units: Array, colors: Array) -> dict[int, Array]:
    order = units[np.argsort(colors[units], kind="stable")]
    found, starts = np.unique(colors[order], return_index=True)
    pieces = np.split(order, starts[1:]) if len(order) else []
    return {c: np.sort(own) for c, own in zip(found.tolist(), pieces, strict=True)}


def _pairs(edges: Edges, colors: Array) -> Pairs:
    found: Pairs = {}
    if not len(edges.child):
        return found
    pairs = distinct_rows(np.stack([edges.child, edges.parent], axis=1))
    kinds = colors[pairs]
    order = np.lexsort((kinds[:, 1], kinds[:, 0]))
    pairs, kinds = pairs[order], kinds[order]
    starts = np.flatnonzero((np.diff(kinds, axis=0) != 0).any(axis=1)) + 1
    for (child, parent), some in zip(kinds[[0, *starts]].tolist(), np.split(pairs, starts), strict=True):
        found.setdefault(child, {})[parent] = some
    return found


def _without_holders(pairs: Pairs) -> Pairs:
    """The pairs without those that say that a block stands in the blocks that it holds."""
    kept = {color: dict(outers) for color, outers in pairs.items()}
    held = Counter(outer for outers in pairs.values() for outer in outers)
    for inner in list(kept):
        for outer, own in list(kept[inner].items()):
            back = kept.get(outer, {}).get(inner)
            if back is None or len(back) > len(distinct(back[:, 0])):
                continue
            if len(own) == len(distinct(own[:, 0])) and held[inner] < held[outer]:
                continue  # one to one: what holds more kinds of blocks is the holder
            if len(distinct_rows(np.concatenate([back[:, ::-1], own]))) == len(back):
                del kept[inner][outer]
    return kept


class _Pinned(Exception):
    """The units of a color that is being placed cannot move, for a reason."""


def plant(labels: Labels, classes: Classes, coloring: Coloring) -> Forest:
    """Make the forest of all colors that index some parameter, and of the blocks that hold these."""
    return _Planting(labels, classes, coloring).forest()


class _Planting:
    def __init__(self, labels: Labels, classes: Classes, coloring: Coloring) -> None:
        self.count = classes.count
        self.colors = coloring.colors
        self.by_color = _by_color(_present(labels, classes.count, coloring.edges), coloring.colors)
        self.pairs = _without_holders(_pairs(coloring.edges, coloring.colors)) if self.by_color else {}
        self.reasons = dict(coloring.reasons)
        self.nodes: dict[int, Node] = {}
        self.done: set[int] = set()  # colors that have a node, or are pinned
        self.block_of: dict[int, Array] = {}  # color -> the block of each class
        self.same: list[tuple[Array, Array]] = []
        self.tags: list[Tag] = []

    def forest(self) -> Forest:
        pending = list(self.by_color)
        while pending:
            ready = [c for c in pending if all(p in self.done for p in self.pairs.get(c, {}) if p in self.by_color)]
            for color in ready:
                try:
                    self.nodes[color] = self._place(color, self.by_color[color], self.pairs.get(color, {}))
                except _Pinned as reason:
                    self._pin(color, str(reason))
                self.done.add(color)
            for color in pending if not ready else ():
                self._pin(color, "blocks within one another")
            pending = [c for c in pending if ready and c not in self.done]
        still: set[int] = set()
        for color in self.by_color:
            for outer in self.pairs.get(color, {}) if color not in self.nodes else ():
                if outer in self.nodes:
                    self._pin(outer, "holds a pinned part")
                    still |= {n.color for n in _chain(self.nodes, outer)}
        return Forest(self.nodes, frozenset(still), self.reasons, tuple(self.same), tuple(self.tags))

    def _pin(self, color: int, reason: str) -> None:
        for unit in np.flatnonzero(self.colors == color).tolist():
            self.reasons.setdefault(unit, reason)

    def _around(self, outer: int, block: Array) -> dict[int, Array]:
        found = {outer: block}
        for node in _chain(self.nodes, outer):
            if node.parent is not None:
                block = self.block_of[node.color][block]
                found[node.parent] = block
        return found

    def _place(self, color: int, units: Array, pairs: Mapping[int, Array]) -> Node:
        """The node of a color, nested in the innermost of the blocks that its units stand in."""
        blocks: dict[int, Array] = {}  # color of blocks -> the block of each class
        for outer, own in pairs.items():
            found = self._blocks_of(units, outer, own)
            if found is None:
                continue
            outer, block = found
            if outer in blocks and (blocks[outer] != block).any():
                raise _Pinned("nested in one group in two ways")
            blocks[outer] = block
        if not blocks:
            return Node(color, units)
        around = {outer: self._around(outer, block[units]) for outer, block in blocks.items()}
        for candidate in sorted(blocks, key=lambda c: -len(_chain(self.nodes, c))):
            ancestors = around[candidate]
            if all(c in ancestors and (ancestors[c] == b[units]).all() for c, b in blocks.items()):
                return self._nested(color, units, candidate, blocks[candidate])
        self._same_blocks([list(found.values()) for found in around.values()])
        raise _Pinned("nested in two groups at once")

    def _blocks_of(self, units: Array, outer: int, pairs: Array) -> tuple[int, Array] | None:
        """The color of blocks in which each unit stands once, starting from ``outer``, and the block of each class."""
        while True:
            node = self.nodes.get(outer)
            if node is None:
                raise _Pinned("nested in a pinned block")
            pairs = distinct_rows(pairs)
            counts = np.bincount(np.searchsorted(units, pairs[:, 0]), minlength=len(units))
            if node.units.size == 1:  # a block that is alone of its kind moves nowhere
                return None
            if (counts == 1).all():
                block = np.full(self.count, -1, dtype=np.int64)
                block[pairs[:, 0]] = pairs[:, 1]
                return outer, block
            alone = node.size == 1 and node.parent is not None  # the only one of its kind in its block
            if (counts != node.size).any() and not alone:
                if (counts == counts[0]).all():
                    self._tag_by_order(pairs, int(counts[0]))
                raise _Pinned("tied across a part of the blocks")
            if node.parent is None:
                return None
            pairs = np.stack([pairs[:, 0], self.block_of[outer][pairs[:, 1]]], axis=1)
            outer = node.parent

    def _nested(self, color: int, units: Array, outer: int, block: Array) -> Node:
        parent = self.nodes[outer]
        flat = parent.units.reshape(-1)
        place = np.full(self.count, -1, dtype=np.int64)
        place[flat] = np.arange(len(flat))
        slot = place[block[units]]
        counts = np.bincount(slot, minlength=len(flat))
        if (counts != counts[0]).any():
            raise _Pinned("blocks of different sizes")
        self.block_of[color] = block
        blocks = parent.units.shape if parent.size > 1 else parent.units.shape[:-1]
        return Node(color, units[np.argsort(slot, kind="stable")].reshape(*blocks, -1), outer)

    def _same_blocks(self, chains: list[list[Array]]) -> None:
        """Take down that blocks of different colors are one, where each of the one holds what one of the other does."""
        for chain in chains[1:]:
            for one, other in product(chains[0], chain):
                pairs = distinct_rows(np.stack([one, other], axis=1))
                if len(pairs) == len(distinct(one)) == len(distinct(other)) and (one != other).any():
                    self.same.append((pairs[:, 0], pairs[:, 1]))
                    break

    def _tag_by_order(self, pairs: Array, count: int) -> None:
        """Take down that blocks which hold the same units are told apart by their order, if it is the same for all."""
        outer, order = pairs[:, 1], np.tile(np.arange(count), len(pairs) // count)
        seen = distinct_rows(np.stack([outer, order], axis=1))
        if len(distinct(outer)) == len(seen):
            self.tags.append(Tag(seen[:, 0], seen[:, 1]))


def lost_blocks(nestings: list[tuple[Array, Array]], classes: Classes, colors: Array) -> Array:
    """Classes to be pinned: blocks that could change places and hold a unit in common that does not name its block."""
    if not nestings:
        return np.empty(0, dtype=np.int64)
    units, blocks = (classes.of[np.concatenate(side)] for side in zip(*nestings, strict=True))
    free = ~classes.fixed[blocks]
    rows = distinct_rows(np.stack([units[free], colors[blocks[free]], blocks[free]], axis=1))
    again = np.flatnonzero((rows[1:, :2] == rows[:-1, :2]).all(axis=1))
    return distinct(np.append(rows[again][:, 2], rows[again + 1][:, 2]))
