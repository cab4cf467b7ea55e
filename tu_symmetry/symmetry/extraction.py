"""From a ledger of demands to permutation groups.

A symmetry is a bijection of hidden units that maps the labels of every tensor onto themselves and keeps units in
their blocks. Units are colored by everything that is demanded of them (color refinement, as for graph isomorphism);
units of one color and one block are interchangeable, and so are blocks of one color together with all that they hold.
Blocks form a forest: a head holds its query-key and its value units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tu_symmetry.symmetry.algebra import Array, Label, among, code, distinct, distinct_rows, tighten
from tu_symmetry.symmetry.graph import PermutationGroup, PermutationMember, Pin
from tu_symmetry.symmetry.ledger import Ledger

Hash = NDArray[np.uint64]
FAR = 1 << 40  # codes of pinned units lie beyond the codes of positions


def _mix(x: Hash) -> Hash:
    """The splitmix64 finalizer."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _combine(*parts: Array | Hash | int) -> Hash:
    total = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            total = _mix(total * np.uint64(3) + np.asarray(part).astype(np.uint64))
    return total


@dataclass
class _Classes:
    """Units after all ties: the class of each unit, and what each class was bound to."""

    of: Array
    count: int
    pinned: dict[int, str]
    bound: NDArray[np.int64]  # row in `tuples`, or -1
    tuples: NDArray[np.int64]

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
        fixed = self.fixed
        resolved = []
        for component in found:
            moving = component >= 0
            stuck = moving & fixed[np.where(moving, component, 0)]
            component = tighten(np.where(stuck, code(component + FAR), component))
            resolved.append(component)
        return tuple(c for c in resolved if c.size > 1 or len(resolved) == 1)

    @cached_property
    def fixed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.count, dtype=bool)
        if self.pinned:
            mask[np.fromiter(self.pinned, dtype=np.int64)] = True
        return mask


def _components(count: int, ties: list[tuple[Array, Array]]) -> tuple[int, Array]:
    if not ties:
        return count, np.arange(count, dtype=np.int64)
    a = np.concatenate([t[0].reshape(-1) for t in ties])
    b = np.concatenate([t[1].reshape(-1) for t in ties])
    graph = coo_array((np.ones(len(a), dtype=bool), (a, b)), shape=(count, count))
    n, labels = connected_components(graph, directed=False)
    return n, labels.astype(np.int64)


def resolve_classes(ledger: Ledger) -> _Classes:
    """Join tied units into classes and settle bindings of one unit to several (a flattened axis)."""
    arity = max((len(t) for _, t in ledger.bindings), default=1)
    keys = np.concatenate([u.reshape(-1) for u, _ in ledger.bindings]) if ledger.bindings else np.empty(0, np.int64)
    rows = np.empty((len(keys), arity), dtype=np.int64)
    start = 0
    for units, parts in ledger.bindings:
        for k in range(arity):
            rows[start : start + units.size, k] = parts[k].reshape(-1) if k < len(parts) else -1
        start += units.size
    ties, pins = list(ledger.ties), list(ledger.pins)
    while True:
        count, of = _components(max(ledger.units, 1), ties)
        pinned: dict[int, str] = {}
        for units, reason in pins:
            for c in distinct(of[units]).tolist():
                pinned.setdefault(c, reason)
        bound = np.full(count, -1, dtype=np.int64)
        if not len(keys):
            return _Classes(of, count, pinned, bound, np.zeros((0, arity), dtype=np.int64))
        classes = of[keys]
        resolved = np.where(rows >= 0, of[np.where(rows >= 0, rows, 0)], rows)
        changed = False
        order = np.argsort(classes, kind="stable")
        same = classes[order][1:] == classes[order][:-1]
        first, second = order[:-1][same], order[1:][same]
        for k in range(arity):
            x, y = rows[first, k], rows[second, k]
            rx, ry = resolved[first, k], resolved[second, k]
            tie = (x >= 0) & (y >= 0) & (rx != ry)
            if tie.any():
                ties.append((x[tie], y[tie]))
                changed = True
            clash = ((x >= 0) != (y >= 0)) | ((x < 0) & (y < 0) & (x != y))
            for side in (first[clash], second[clash]):
                changed |= _pin_rows(side, rows, of, pinned, pins, "factored in two ways")
        stuck = among(classes, np.fromiter(pinned, dtype=np.int64)) if pinned else np.zeros(len(classes), dtype=bool)
        for reason in {pinned[c] for c in classes[stuck].tolist()}:
            which = np.flatnonzero(stuck)[[pinned[c] == reason for c in classes[stuck].tolist()]]
            changed |= _pin_rows(which, rows, of, pinned, pins, reason)
        # a class that is bound and stands in a tuple itself would need substitution within substitution
        cyclic = among(resolved, classes) & (resolved >= 0)
        changed |= _pin_rows(np.flatnonzero(cyclic.any(axis=1)), rows, of, pinned, pins, "factored twice over")
        if not changed:
            bound[classes] = np.arange(len(classes))
            return _Classes(of, count, pinned, bound, resolved)


def _pin_rows(which: Array, rows: Array, of: Array, pinned: dict[int, str], pins: list, reason: str) -> bool:
    units = rows[which]
    units = units[units >= 0]
    units = units[[c not in pinned for c in of[units].tolist()]] if units.size else units
    if units.size:
        pins.append((units, reason))
    return bool(units.size)


@dataclass
class _Node:
    """A color: units that look alike, with the block structure that they stand in."""

    color: int
    units: Array  # [*blocks, size]
    parent: _Node | None = None
    name: str = ""
    members: list[PermutationMember] = field(default_factory=list)
    still: bool = False  # its units hold something that is pinned, and stay where they are; what they hold may move

    @property
    def proper(self) -> bool:
        return self.units.shape[-1] > 1 and not self.still

    @property
    def inner_blocks(self) -> tuple[int, ...]:
        """Shape of the blocks that units nested in this color have."""
        return self.units.shape if self.units.shape[-1] > 1 else self.units.shape[:-1]

    def hold_still(self) -> None:
        """Let this color, and every block around it, stay where it is."""
        node: _Node | None = self
        while node is not None:
            node.still, node = True, node.parent

    def group(self) -> _Node | None:
        """The nearest ancestor (or the color itself) that is a group of its own."""
        node: _Node | None = self
        while node is not None and not node.proper:
            node = node.parent
        return node


class Extraction:
    """Colors units, builds the forest of blocks, and reads off the groups."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._cached_key: list[int] = []
        self._cached_table: dict[int, tuple[Array, Array]] = {}
        self._places: Array = np.empty(0, dtype=np.int64)  # of each unit in its block
        self.duplicates: list[tuple[Array, Array]] = []  # blocks of different colors that hold the same units
        self.splits: list[tuple[Array, Array]] = []  # blocks of one color that hold the same units, told apart by a tag
        self.tags: list[tuple[Array, Array]] = []  # the same, of earlier rounds, by the ledger's units
        self._tag_of: Hash = np.zeros(max(ledger.units, 1), dtype=np.uint64)  # all tags of each of the ledger's units
        self._build()
        while self.duplicates or self.splits or self._lost_blocks():
            _, representative = np.unique(self.classes.of, return_index=True)
            ledger.ties += [(representative[a], representative[b]) for a, b in self.duplicates]
            for a, tag in self.splits:
                self.tags.append((representative[a], tag))
                of_class = np.zeros(self.classes.count, dtype=np.uint64)
                of_class[a] = _combine(len(self.tags), tag)
                self._tag_of = _combine(self._tag_of, of_class[self.classes.of])
            self.duplicates, self.splits = [], []
            self._build()

    def _build(self) -> None:
        ledger = self.ledger
        self.classes = resolve_classes(ledger)
        self.reasons = dict(self.classes.pinned)
        self.labels = {
            name: [self.classes.resolve(label) for label in value.labels] for name, value in ledger.parameters.items()
        }
        self.edges = np.empty((0, 3), dtype=np.int64)  # child, parent, relation
        self.colors = self._color()
        self.nodes = self._forest()

    def _lost_blocks(self) -> bool:
        """Pin blocks that could change places and hold a unit in common: its label does not say which of them is meant.

        Take ``y0 + y1``, the halves of a convolution in two groups. Its eight output channels have units of their own,
        from which the group can be told, so that the group does not stand in their label. The sum makes one unit of
        channel k of the one half and channel k of the other: should the groups change places, nothing would tell that
        these channels do so too. Blocks that cannot change places (queries and keys) need not be told apart by labels.
        """
        if not self.ledger.nestings:
            return False
        units, blocks = (self.classes.of[np.concatenate(side)] for side in zip(*self.ledger.nestings, strict=True))
        free = (self.classes.bound[units] < 0) & ~self.classes.fixed[units] & ~self.classes.fixed[blocks]
        rows = distinct_rows(np.stack([units[free], self.colors[blocks[free]], blocks[free]], axis=1))
        if len(rows) < 2:
            return False
        again = np.flatnonzero((rows[1:, :2] == rows[:-1, :2]).all(axis=1))
        lost = distinct(np.append(rows[again][:, 2], rows[again + 1][:, 2]))
        if len(lost):
            _, representative = np.unique(self.classes.of, return_index=True)
            self.ledger.pins.append((representative[lost], "holds units that other blocks hold too"))
        return bool(len(lost))

    # -- colors -------------------------------------------------------------------------------------------------

    def _color(self) -> Array:
        count = self.classes.count
        color = np.zeros(count, dtype=np.uint64)
        edges: list[Array] = []
        for seen, (label, axis, labels) in enumerate(self.ledger.seen):
            components = self.classes.resolve(label)
            others = {k: self.classes.resolve(lab) for k, lab in enumerate(labels) if k != axis}
            for r, component in enumerate(components):
                context = _combine(seen, r)
                for other in components:
                    if other is not component:
                        context = _combine(context, np.where(other < 0, other, 0))
                nested = [k for k in range(component.ndim) if k != axis and component.shape[k] > 1]
                for k in nested:
                    fixed, found = self._relation(color, component, others.get(k, ()), k, seen * 64 + k)
                    for outer in labels[k] if self.tags else ():  # blocks that became one are still told apart
                        fixed = _combine(fixed, np.where(outer >= 0, self._tag_of[np.where(outer >= 0, outer, 0)], 0))
                    context = _combine(context, fixed)
                    edges += found
                if not (component >= 0).any():
                    continue
                spread, ctx = np.broadcast_arrays(component, context)
                moving = spread >= 0
                with np.errstate(over="ignore"):
                    np.add.at(color, spread[moving], ctx[moving])
        for number, (component, positions, reason) in enumerate(self.ledger.marks):
            self._mark(color, component, _combine(-1 - number, positions), reason)
        for number, (units, tag) in enumerate(self.tags):
            with np.errstate(over="ignore"):
                np.add.at(color, self.classes.of[units], _combine(-1 - len(self.ledger.marks) - number, tag))
        if edges:
            self.edges = distinct_rows(np.concatenate(edges))
        return self._refine(color)

    def _mark(self, color: Hash, component: Array, tag: Hash, reason: str) -> None:
        """Tell apart units by what they meet: the fixed position in a block, the value of a constant."""
        for part in self.classes.resolve((component,)):
            spread, tags = np.broadcast_arrays(part, tag)
            moving = spread >= 0
            with np.errstate(over="ignore"):
                np.add.at(color, spread[moving], tags[moving])
            for unit in distinct(spread[moving]).tolist():
                self.reasons.setdefault(unit, reason)

    def _relation(
        self, color: Hash, component: Array, outer: Label, axis: int, relation: int
    ) -> tuple[Hash, list[Array]]:
        """How units depend on the axis they are nested in: through its fixed positions, or through its units."""
        size = component.shape[axis]
        shape = [size if k == axis else 1 for k in range(component.ndim)]
        if not outer or not any((o >= 0).any() for o in outer):
            return _combine(relation, np.arange(size).reshape(shape)), []
        fixed: Hash = np.asarray(relation).astype(np.uint64)
        found = []
        for part, o in enumerate(outer):
            fixed = _combine(fixed, np.where(o < 0, -o, 0))
            x, y = np.broadcast_arrays(component, o)
            both = (x >= 0) & (y >= 0) & (x != y)
            if both.any():
                pairs = distinct_rows(np.stack([x[both], y[both]], axis=1))
                tag = np.full((len(pairs), 1), relation * 8 + part, dtype=np.int64)
                found.append(np.concatenate([pairs, tag], axis=1))
            stuck = (x < 0) & (y >= 0)  # a block that holds fixed units is told apart by them
            if stuck.any():
                with np.errstate(over="ignore"):
                    np.add.at(color, y[stuck], _combine(relation, part, -x[stuck]))
        return fixed, found

    def _refine(self, color: Hash) -> Array:
        values, dense = np.unique(color, return_inverse=True)
        if not len(self.edges):
            return dense.astype(np.int64)
        child, parent, relation = self.edges.T
        while True:
            base = _mix(dense.astype(np.uint64))
            updated = base.copy()
            with np.errstate(over="ignore"):
                np.add.at(updated, child, _combine(base[parent], relation, 1))
                np.add.at(updated, parent, _combine(base[child], relation, 2))
            refined, dense = np.unique(updated, return_inverse=True)
            if len(refined) == len(values):
                return dense.astype(np.int64)
            values = refined

    # -- blocks -------------------------------------------------------------------------------------------------

    def _present(self) -> Array:
        """Classes that index some parameter, free to move."""
        held = np.zeros(self.classes.count, dtype=bool)
        for labels in self.labels.values():
            for label in labels:
                for component in label:
                    held[component[component >= 0]] = True
        units = np.flatnonzero(held)
        if len(self.edges):  # and the blocks that hold such units
            while True:
                more = distinct(np.append(units, self.edges[among(self.edges[:, 0], units), 1]))
                if len(more) == len(units):
                    break
                units = more
        return units

    def _pin_color(self, color: int, reason: str) -> None:
        for unit in np.flatnonzero(self.colors == color).tolist():
            self.reasons.setdefault(unit, reason)

    def _forest(self) -> list[_Node]:
        present = self._present()
        by_color: dict[int, Array] = {}
        if not len(present):
            return []
        order = present[np.argsort(self.colors[present], kind="stable")]
        colors, starts = np.unique(self.colors[order], return_index=True)
        for color, units in zip(colors.tolist(), np.split(order, starts[1:]), strict=True):
            by_color[color] = np.sort(units)
        edges: dict[int, dict[int, Array]] = {}
        if len(self.edges):
            pairs = distinct_rows(self.edges[:, :2])
            kinds = np.stack([self.colors[pairs[:, 0]], self.colors[pairs[:, 1]]], axis=1)
            order = np.lexsort((kinds[:, 1], kinds[:, 0]))
            pairs, kinds = pairs[order], kinds[order]
            starts = np.flatnonzero((np.diff(kinds, axis=0) != 0).any(axis=1)) + 1
            for (c, p), some in zip(kinds[[0, *starts]].tolist(), np.split(pairs, starts), strict=True):
                edges.setdefault(c, {})[p] = some
        self._drop_holders(edges)
        nodes: dict[int, _Node | None] = {}
        parent_of: dict[int, Array] = {}  # color -> parent unit of each unit (dense over classes)
        pending = list(by_color)
        while pending:
            ready = [c for c in pending if all(p in nodes for p in edges.get(c, {}) if p in by_color)]
            if not ready:
                for color in pending:
                    self._pin_color(color, "blocks within one another")
                break
            for color in ready:
                nodes[color] = self._place(color, by_color, edges.get(color, {}), nodes, parent_of)
            pending = [c for c in pending if c not in nodes]
        for color in by_color:
            if nodes.get(color) is None:  # what holds a pinned part cannot move
                for outer in edges.get(color, {}):
                    holder = nodes.get(outer)
                    if holder is not None:
                        self._pin_color(outer, "holds a pinned part")
                        holder.hold_still()
        return [n for n in nodes.values() if n is not None]

    @staticmethod
    def _drop_holders(edges: dict[int, dict[int, Array]]) -> None:
        """Forget that a block stands in the blocks that it holds.

        The weights of a normalization bind an entry of the queries to (dimension, head): this head is then named inside
        of the block of queries that is nested in it.
        """
        held = {color: sum(color in outers for outers in edges.values()) for color in edges}
        for inner in list(edges):
            for outer, pairs in list(edges[inner].items()):
                back = edges.get(outer, {}).get(inner)
                if back is None or len(back) > len(distinct(back[:, 0])):
                    continue
                if len(pairs) == len(distinct(pairs[:, 0])) and held[inner] < held[outer]:
                    continue  # one to one: what holds more kinds of blocks is the holder
                if len(distinct_rows(np.concatenate([back[:, ::-1], pairs]))) == len(back):
                    del edges[inner][outer]

    def _place(
        self,
        color: int,
        by_color: dict[int, Array],
        edges: dict[int, Array],
        nodes: dict[int, _Node | None],
        parent_of: dict[int, Array],
    ) -> _Node | None:
        units = by_color[color]
        direct: dict[int, Array] = {}
        for outer, pairs in edges.items():
            while outer is not None:
                node = nodes.get(outer)
                if node is None:
                    self._pin_color(color, "nested in a pinned block")
                    return None
                pairs = distinct_rows(pairs)
                counts = np.bincount(np.searchsorted(units, pairs[:, 0]), minlength=len(units))
                if node.units.size == 1:  # a block that is alone of its kind moves nowhere
                    break
                if (counts == 1).all():
                    owner = np.full(self.classes.count, -1, dtype=np.int64)
                    owner[pairs[:, 0]] = pairs[:, 1]
                    if outer in direct and (direct[outer] != owner).any():
                        self._pin_color(color, "nested in one group in two ways")
                        return None
                    direct[outer] = owner
                    break
                alone = node.units.shape[-1] == 1 and node.parent is not None  # the only one of its kind in its block
                if (counts != node.units.shape[-1]).any() and not alone:
                    if (counts == counts[0]).all():
                        self._split(pairs, int(counts[0]))
                    self._pin_color(color, "tied across a part of the blocks")
                    return None
                if node.parent is None:
                    break
                pairs = np.stack([pairs[:, 0], parent_of[outer][pairs[:, 1]]], axis=1)
                outer = node.parent.color
        for candidate in sorted(direct, key=lambda c: -self._depth(nodes[c])):
            if self._dominates(candidate, direct, nodes, parent_of, units):
                owner = direct[candidate]
                parent = nodes[candidate]
                assert parent is not None
                blocks = parent.units.reshape(-1)
                position = {u: k for k, u in enumerate(blocks.tolist())}
                slot = np.array([position[u] for u in owner[units].tolist()])
                counts = np.bincount(slot, minlength=len(blocks))
                if (counts != counts[0]).any():
                    self._pin_color(color, "blocks of different sizes")
                    return None
                parent_of[color] = owner
                nested = units[np.argsort(slot, kind="stable")].reshape(*parent.inner_blocks, -1)
                return _Node(color, nested, parent)
        if direct:
            owners = [owner[units] for owner in direct.values()]
            for other in owners[1:]:
                pairs = distinct_rows(np.stack([owners[0], other], axis=1))
                if len(pairs) == len(distinct(owners[0])) == len(distinct(other)):
                    self.duplicates.append((pairs[:, 0], pairs[:, 1]))
            self._pin_color(color, "nested in two groups at once")
            return None
        return _Node(color, units)

    def _split(self, pairs: Array, count: int) -> None:
        """Tell apart blocks that hold the same units by the order in which they stand, if it is the same for all."""
        outer, kind = pairs[:, 1], np.tile(np.arange(count), len(pairs) // count)
        seen = distinct_rows(np.stack([outer, kind], axis=1))
        if len(distinct(outer)) == len(seen):
            self.splits.append((seen[:, 0], seen[:, 1]))

    @staticmethod
    def _depth(node: _Node | None) -> int:
        depth = 0
        while node is not None:
            node, depth = node.parent, depth + 1
        return depth

    def _dominates(
        self,
        candidate: int,
        direct: dict[int, Array],
        nodes: dict[int, _Node | None],
        parent_of: dict[int, Array],
        units: Array,
    ) -> bool:
        """Whether all the other blocks of a color are the ancestors of the candidate's."""
        ancestors = {candidate: direct[candidate][units]}
        node, owner = nodes[candidate], direct[candidate][units]
        while node is not None and node.parent is not None:
            owner = parent_of[node.color][owner]
            node = node.parent
            ancestors[node.color] = owner
        return all(c in ancestors and (ancestors[c] == o[units]).all() for c, o in direct.items())

    # -- groups -------------------------------------------------------------------------------------------------

    def groups(self, order: list[str]) -> tuple[list[PermutationGroup], list[Pin]]:
        """The permutation groups, parents first, and the parameter axes that stay pinned.

        Args:
            order: names of the state dict's tensors, in order; decides names and the order of groups.
        """
        for node in self.nodes:
            self._sort_units(node)
        while True:  # a group whose members contradict one another is pinned, and everything is read off again
            for node in self.nodes:
                node.members = []
            try:
                for name in order:
                    for axis, label in enumerate(self.labels.get(name, [])):
                        self._read_axis(name, axis, label)
                break
            except _Contradiction as contradiction:
                gone = contradiction.node
                self._pin_color(gone.color, contradiction.reason)
                self.nodes = [n for n in self.nodes if n is not gone and not _is_below(n, gone)]
                if gone.parent is not None:
                    gone.parent.hold_still()
                self._cached_key = []
        rank = {name: k for k, name in enumerate(order)}
        proper = [n for n in self.nodes if n.proper and n.members]
        proper.sort(key=lambda n: (self._depth(n), min((m.axis != 0, rank[m.parameter]) for m in n.members)))
        taken: set[str] = set()
        groups = []
        for node in proper:
            outer = node.parent.group() if node.parent is not None else None
            node.name = _unique(_producer(node, rank), outer.name if outer is not None else None, taken)
            groups.append(
                PermutationGroup(
                    node.name,
                    node.units.shape[-1],
                    tuple(node.members),
                    outer.name if outer is not None else None,
                    tuple(node.units.shape[:-1]),
                )
            )
        return groups, list(self._pins(order))

    def _sort_units(self, node: _Node) -> None:
        """Order the units of each block by where they first stand, so that slots correspond between blocks."""
        flat = node.units.reshape(-1, node.units.shape[-1])
        flat.sort(axis=-1)

    def _read_axis(self, name: str, axis: int, label: Label) -> None:
        if not any((c >= 0).any() for c in label):
            return
        label = tuple(np.broadcast_arrays(*label)) if len(label) > 1 else label
        shape = label[0].shape
        nested = [k for k in range(len(shape)) if k != axis and shape[k] > 1]
        table = self._table
        held = distinct(np.concatenate([c[c >= 0].reshape(-1) for c in label]))
        for node in self._groups_over(distinct(self.colors[held]).tolist()):
            for part in self._parts(table[node.color][0], label):
                member = self._member(
                    node, name, axis, nested, *self._owners(node, table[node.color], label, part, shape)
                )
                node.members.append(member) if member is not None else None

    @staticmethod
    def _parts(index: Array, label: Label) -> list[list[Array]]:
        """The components of a label that a group moves together, those of each part in one step.

        A head and a unit in it name the same head twice: one step moves both. The entries of a flattened Gram matrix
        ``(h_i h_j)`` have a unit of one group for its row and one for its column: the rows are moved first, then the
        columns, and each step is a permutation of the whole axis.
        """
        if len(label) == 1:
            return [list(label)]
        parts: list[list[Array]] = []
        owners: list[Array] = []
        for component in label:
            own = np.where(component >= 0, index[np.where(component >= 0, component, 0)], -1)
            if not (own >= 0).any():
                continue
            for part, theirs in zip(parts, owners, strict=True):
                x, y = np.broadcast_arrays(own, theirs)
                if not ((x >= 0) & (y >= 0) & (x != y)).any():
                    part.append(component)
                    break
            else:
                parts.append([component])
                owners.append(own)
        return parts

    def _owners(
        self, node: _Node, table: tuple[Array, Array], label: Label, part: list[Array], shape: tuple[int, ...]
    ) -> tuple[Array, Array, Hash]:
        """For each position the unit of a group that it belongs to, its slot in the unit, and what else is there."""
        index, inner = table
        owner = np.full(shape, -1, dtype=np.int64)
        slot = np.zeros(shape, dtype=np.int64)
        for component in part:
            component = np.broadcast_to(component, shape)
            hit = component >= 0
            hit = hit & (index[np.where(hit, component, 0)] >= 0)
            owner[hit] = index[component[hit]]
            slot[hit] = slot[hit] * 100_003 + inner[component[hit]]  # a position may hold several units of one block
        rest = np.zeros(shape, dtype=np.uint64)
        for component in label if len(label) > 1 else ():
            if any(component is mine for mine in part):
                mine = index[np.where(component >= 0, component, 0)]
                foreign = ~((component >= 0) & (mine >= 0))
                rest = _combine(rest, np.where(foreign, self._relative(component), 0) if foreign.any() else 0)
                continue
            rest = _combine(rest, self._relative(component))
            size = node.units.shape[-1]
            theirs = np.where(component >= 0, index[np.where(component >= 0, component, 0)], -1) // size
            elsewhere = (theirs >= 0) & (owner >= 0) & (theirs != owner // size)
            if elsewhere.any():  # a unit of another block of this group
                rest = _combine(rest, np.where(elsewhere, 1 + theirs, 0))
        return owner, slot, rest

    def _relative(self, component: Array) -> Hash:
        """Units by their color and their place in their block, everything else as it is."""
        moving = component >= 0
        unit = np.where(moving, component, 0)
        return np.where(moving, _combine(self.colors[unit], self._places[unit]), _combine(component))

    def _groups_over(self, colors: list[int]) -> list[_Node]:
        """The groups that units of these colors belong to, and those that these are nested in."""
        by_color = {n.color: n for n in self.nodes}
        found: dict[int, _Node] = {}
        for color in colors:
            node = by_color.get(color)
            while node is not None:
                if node.proper:
                    found[node.color] = node
                node = node.parent
        return list(found.values())

    @property
    def _table(self) -> dict[int, tuple[Array, Array]]:
        """For each group: the flat index of the unit that a class belongs to, and its slot within that unit."""
        key = [id(n) for n in self.nodes]
        if self._cached_key == key and len(self._places):
            return self._cached_table
        table: dict[int, tuple[Array, Array]] = {}
        for node in self.nodes:
            if not node.proper:
                continue
            index = np.full(self.classes.count, -1, dtype=np.int64)
            slot = np.zeros(self.classes.count, dtype=np.int64)
            index[node.units.reshape(-1)] = np.arange(node.units.size)
            offset = 1
            for other in self.nodes:
                if other is not node and _is_below(other, node):
                    per = other.units.size // node.units.size
                    index[other.units.reshape(-1)] = np.repeat(np.arange(node.units.size), per)
                    slot[other.units.reshape(-1)] = offset + np.tile(np.arange(per), node.units.size)
                    offset += per
            table[node.color] = (index, slot)
        self._places = np.arange(self.classes.count)
        for node in self.nodes:
            self._places[node.units] = np.arange(node.units.shape[-1])
        self._cached_table, self._cached_key = table, key
        return table

    def _member(
        self, node: _Node, name: str, axis: int, nested: list[int], owner: Array, slot: Array, rest: Hash
    ) -> PermutationMember | None:
        size = owner.shape[axis]
        shape = owner.shape
        if not nested:
            grid = self._positions(
                node,
                owner.reshape(-1),
                slot.reshape(-1),
                rest.reshape(-1),
                lambda: self._roles_along(name, axis, shape).reshape(-1),
            )
            return PermutationMember(name, axis, torch.from_numpy(grid.reshape(*node.units.shape, -1)))
        if len(nested) > 1:
            raise _Contradiction(node, "nested along two axes of a parameter")
        (rows_axis,) = nested
        flat = [
            np.moveaxis(a, (rows_axis, axis), (0, 1)).reshape(owner.shape[rows_axis], size) for a in (owner, slot, rest)
        ]
        _, first, kind = np.unique(
            np.concatenate([flat[0], flat[1]], axis=1), axis=0, return_index=True, return_inverse=True
        )
        kind = kind.reshape(-1)
        units_per_block = node.units.shape[-1]
        blocks = node.units.size // units_per_block
        index: Array | None = None
        rows: list[Array | None] = [None] * blocks
        for k, row in enumerate(first.tolist()):
            here = distinct(flat[0][row][flat[0][row] >= 0]) // units_per_block
            if not len(here):
                continue
            block_ids = distinct(here).tolist()
            if len(block_ids) > 1 or rows[block_ids[0]] is not None:
                raise _Contradiction(node, "rows of a parameter mix several blocks")
            if len(distinct(flat[0][row][flat[0][row] >= 0])) != units_per_block:
                self._still(node, np.asarray(flat[0], np.int64), np.asarray(flat[1], np.int64))
                return None

            def roles(row: int = row) -> Hash:
                return np.moveaxis(self._roles_along(name, axis, shape), (rows_axis, axis), (0, 1)).reshape(-1, size)[
                    row
                ]

            positions = self._positions(
                node,
                flat[0][row] - block_ids[0] * units_per_block,
                flat[1][row],
                flat[2][row],
                roles,
                units_per_block,
            )
            if index is None:
                index = np.zeros((blocks, *positions.shape), dtype=np.int64)
            if positions.shape != index.shape[1:]:
                raise _Contradiction(node, "blocks of different sizes in a parameter")
            index[block_ids[0]] = positions
            rows[block_ids[0]] = np.flatnonzero(kind == k)
        if index is None or any(r is None for r in rows) or len({len(r) for r in rows if r is not None}) != 1:
            raise _Contradiction(node, "a parameter holds only some of the blocks")
        within = np.stack([r for r in rows if r is not None])
        shape = node.units.shape
        return PermutationMember(
            name,
            axis,
            torch.from_numpy(index.reshape(*shape, -1)),
            rows_axis,
            torch.from_numpy(within.reshape(*shape[:-1], -1)),
        )

    def _still(self, node: _Node, owner: Array, slot: Array) -> None:
        """Blocks that move along the rows need no move along this axis, if slots lie alike in each block's rows."""
        held = owner >= 0
        present = np.flatnonzero(held.any(axis=1))
        block = owner[present].max(axis=1)
        if (np.where(held[present], owner[present], block[:, None]) == block[:, None]).all():
            layouts = [np.where(held[rows], slot[rows], -1) for b in distinct(block) for rows in [present[block == b]]]
        else:  # a row holds units of several blocks
            layouts = [np.where(held[row], slot[row], -1) for row in present]
        if any(not np.array_equal(layout, layouts[0]) for layout in layouts[1:]):
            raise _Contradiction(node, "blocks lie differently in the rows of a parameter")

    def _positions(
        self,
        node: _Node,
        owner: Array,
        slot: Array,
        rest: Hash,
        roles: Callable[[], Hash],
        count: int | None = None,
    ) -> Array:
        """Positions along an axis of each unit, ``[units, copies]``, in an order that corresponds between units."""
        count = node.units.size if count is None else count
        held = np.flatnonzero((owner >= 0) & (owner < count))
        order = held[np.lexsort((held, rest[held], slot[held], owner[held]))]
        copies = np.bincount(owner[held], minlength=count)
        if (copies != copies[0]).any() or copies[0] == 0:
            raise _Contradiction(node, "units with different numbers of positions in a parameter")
        grid = order.reshape(count, -1)
        if (slot[grid] != slot[grid[:1]]).any() or (rest[grid] != rest[grid[:1]]).any():
            raise _Contradiction(node, "units that lie differently in a parameter")
        same = (slot[grid[0, 1:]] == slot[grid[0, :-1]]) & (rest[grid[0, 1:]] == rest[grid[0, :-1]])
        if same.any():  # several tensors' entries for one unit: which is which?
            role = roles()
            order = held[np.lexsort((held, role[held], rest[held], slot[held], owner[held]))]
            sorted_grid = order.reshape(count, -1)
            if (role[sorted_grid] != role[sorted_grid[:1]]).any():
                raise _Contradiction(node, "units whose copies cannot be told apart")
            if (role[grid] != role[grid[:1]]).any():  # the order in which they stand is another for each unit
                return sorted_grid
        return grid

    def _roles_along(self, name: str, axis: int, shape: tuple[int, ...]) -> Hash:
        """For each position along a parameter's axis, what its units are tied to, in the resolved label's shape."""
        total = np.zeros((), dtype=np.uint64)
        for component in self.ledger.parameters[name].labels[axis]:
            for k, n in enumerate(shape):
                component = component.take([0], k) if n == 1 and component.shape[k] > 1 else component
            total = _combine(total, np.where(component >= 0, self._roles[np.where(component >= 0, component, 0)], 0))
        return np.broadcast_to(total, shape)

    @cached_property
    def _roles(self) -> Hash:
        """Colors of the units before ties: those with one color take the same part in all demands.

        Ties make one class of the units of ``h`` and ``g`` wherever ``h + g`` is computed. In ``c(roll(cat([h, g])))``
        each class then has two positions along the columns of ``c``, and which of them holds ``h`` depends on the
        unit: columns ``[g3, h0, h1, h2, h3, g0, g1, g2]`` have the classes ``[3, 0, 1, 2, 3, 0, 1, 2]``. A column's
        role says that it was tied to a unit of ``h`` (or of ``g``), by the same tie and on the same side.
        """
        ledger = self.ledger
        role = np.zeros(max(ledger.units, 1), dtype=np.uint64)
        with np.errstate(over="ignore"):
            for seen, (label, _, _) in enumerate(ledger.seen):
                for r, component in enumerate(label):
                    context = _combine(seen, r, *(np.where(c < 0, c, 0) for c in label if c is not component))
                    spread, tag = np.broadcast_arrays(component, context)
                    np.add.at(role, spread[spread >= 0], tag[spread >= 0])
            for number, (component, positions, _) in enumerate(ledger.marks):
                spread, tag = np.broadcast_arrays(component, _combine(number, positions, 7))
                np.add.at(role, spread[spread >= 0], tag[spread >= 0])
            links = [(x.reshape(-1), y.reshape(-1)) for x, y in ledger.ties]
            for units, parts in ledger.bindings:
                links += [(units.reshape(-1), part.reshape(-1)) for part in parts]
            if not links:
                return role
            left, right = (np.concatenate(side) for side in zip(*links, strict=True))
            which = np.repeat(np.arange(len(links)), [len(x) for x, _ in links])
            bound = right < 0
            np.add.at(role, left[bound], _combine(which[bound], right[bound], 3))
            left, right, which = left[~bound], right[~bound], which[~bound]
            known = len(np.unique(role))
            while True:
                refined = _mix(role)
                np.add.at(refined, left, _combine(role[right], which, 1))
                np.add.at(refined, right, _combine(role[left], which, 2))
                role, before, known = refined, known, len(np.unique(refined))
                if known == before:
                    return role

    def _pins(self, order: list[str]) -> Iterator[Pin]:
        free = np.zeros(self.classes.count, dtype=bool)
        for node in self.nodes:
            if node.group() is not None:
                free[node.units.reshape(-1)] = True
        for name in order:
            value = self.ledger.parameters.get(name)
            if value is None:
                continue
            for axis, label in enumerate(self.labels[name]):
                if value.shape[axis] == 1:
                    continue
                moving = np.zeros(value.shape[axis], dtype=bool)
                reason = value.reasons[axis]
                for component in label:
                    lines = np.moveaxis(component, axis, -1).reshape(-1, component.shape[axis])
                    hit = np.where(lines >= 0, free[np.where(lines >= 0, lines, 0)], False).any(axis=0)
                    moving |= np.broadcast_to(hit, moving.shape)
                    for entry in distinct(lines[(lines < 0) & (lines <= -1 - FAR)])[:1].tolist():
                        reason = reason or self.reasons.get(-1 - entry - FAR, "")
                    for entry in lines[(lines >= 0)][:1].tolist():
                        reason = reason or self.reasons.get(entry, "")
                if not moving.all():
                    yield Pin(name, axis, int((~moving).sum()), reason or "a single unit of its kind")


class _Contradiction(Exception):
    def __init__(self, node: _Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


def _is_below(node: _Node, ancestor: _Node) -> bool:
    outer = node.parent
    while outer is not None:
        if outer is ancestor:
            return True
        outer = outer.parent
    return False


def _producer(node: _Node, rank: dict[str, int]) -> str:
    """The module whose output the units are: the first parameter that they index along its first axis."""
    first = min(node.members, key=lambda m: (m.axis != 0, rank[m.parameter]))
    path = first.parameter.rpartition(".")
    return path[0] or path[2]


def _unique(base: str, parent: str | None, taken: set[str]) -> str:
    if parent is not None:
        own = base.rpartition(".")[2]
        base = f"{parent}/{own}"
    name, k = base, 2
    while name in taken:
        name, k = f"{base}-{k}", k + 1
    taken.add(name)
    return name
