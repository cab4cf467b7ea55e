"""Fourth stage: where the units of each node lie along the axes of the parameters.

A label says for every position along an axis which units it belongs to. Read the other way round, it says for every
unit of a node at which positions it lies: the index of a :class:`~tu_symmetry.symmetry.groups.PermutationMember`. As an
example, the columns of a linear layer behind a flatten of three channels (units 4, 5, 6) of two pixels each::

    label of the columns    [4, 4, 5, 5, 6, 6], beside the pixels [-1, -2, -1, -2, -1, -2]
    owner (flat index)      [0, 0, 1, 1, 2, 2]
    rest (what else)        pixel -1 or -2
    index [units, copies]   [[0, 1], [2, 3], [4, 5]]

Copies are put in an order that corresponds between units: by the slot of the unit within the owner (of a head: its
query units, its value units), then by what else is there, then by position. Where units lie differently (another number
of copies, other pixels), no permutation of the axis exchanges them: the node contradicts itself, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tu_symmetry.symmetry.algebra import Array, Label, distinct
from tu_symmetry.symmetry.extraction.coloring import Hash, combined, roles
from tu_symmetry.symmetry.extraction.forest import Forest, Labels, Node
from tu_symmetry.symmetry.groups import PermutationMember
from tu_symmetry.symmetry.ledger import Ledger

Number = TypeVar("Number", np.int64, np.uint64)


class Contradiction(Exception):
    """A node whose members contradict one another: it is no group.

    Attributes:
        node: that is to be left out.
        reason: why.
    """

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class Owned(NamedTuple):
    """What belongs to the units of a node: arrays over all classes.

    Attributes:
        unit: flat index into ``node.units`` of the unit that a class belongs to, -1 for none.
        slot: 0 for the unit itself, a number of its own for each of the classes that are nested in it.
    """

    unit: Array
    slot: Array


class Lying(NamedTuple):
    """Which units of a node lie at each position: arrays of one shape, that of a label.

    Attributes:
        owner: flat index of the unit, -1 for none.
        slot: the slot of the class within the unit, see :class:`Owned`.
        rest: hash of what else is there.
    """

    owner: Array
    slot: Array
    rest: Hash

    def at(self, row: int) -> Lying:
        """One row of all three."""
        return Lying(self.owner[row], self.slot[row], self.rest[row])


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads the members of nodes off the labels of the parameters.

    Attributes:
        ledger: with the parameters' own labels.
        ties: the ties of the ledger's units.
        labels: the labels of the parameters, resolved into classes.
        colors: the colors of the classes.
        forest: the forest of the nodes.
    """

    ledger: Ledger
    ties: Sequence[tuple[Array, Array]]
    labels: Labels
    colors: Array
    forest: Forest

    def members(self, order: Sequence[str]) -> dict[int, list[PermutationMember]]:
        """The members of each node that may move, by its color.

        Raises:
            Contradiction: for the first node whose units cannot be exchanged along some axis.
        """
        found: dict[int, list[PermutationMember]] = {}
        for name in order:
            for axis, label in enumerate(self.labels.get(name, ())):
                for color, member in self._along(name, axis, label):
                    found.setdefault(color, []).append(member)
        return found

    def _along(self, name: str, axis: int, label: Label) -> Iterator[tuple[int, PermutationMember]]:
        """The members of all nodes along one axis."""
        if not any((c >= 0).any() for c in label):
            return
        label = tuple(np.broadcast_arrays(*label)) if len(label) > 1 else label
        held = distinct(np.concatenate([c[c >= 0].reshape(-1) for c in label]))
        for node in self._nodes_over(distinct(self.colors[held]).tolist()):
            for part in _parts(self._owned[node.color].unit, label):
                member = self._member(node, name, axis, self._lying(node, label, part))
                if member is not None:
                    yield node.color, member

    def _nodes_over(self, colors: list[int]) -> list[Node]:
        """The nodes that units of these colors belong to, and those that these are nested in, as far as they move."""
        found: dict[int, Node] = {}
        for color in colors:
            for node in self.forest.chain(self.forest.nodes.get(color)):
                if self.forest.proper(node):
                    found[node.color] = node
        return list(found.values())

    # -- tables over all classes --------------------------------------------------------------------------------

    @cached_property
    def _owned(self) -> dict[int, Owned]:
        """For each node that moves, what belongs to its units."""
        table: dict[int, Owned] = {}
        for node in self.forest.nodes.values():
            if not self.forest.proper(node):
                continue
            owned = Owned(np.full(len(self.colors), -1, dtype=np.int64), np.zeros(len(self.colors), dtype=np.int64))
            count = node.units.size
            owned.unit[node.units.reshape(-1)] = np.arange(count)
            offset = 1
            for other in self.forest.nodes.values():
                if other is not node and self.forest.below(other, node):
                    per = other.units.size // count
                    inner = other.units.reshape(-1)
                    owned.unit[inner] = np.repeat(np.arange(count), per)
                    owned.slot[inner] = offset + np.tile(np.arange(per), count)
                    offset += per
            table[node.color] = owned
        return table

    @cached_property
    def _places(self) -> Array:
        """The place of each class in its block."""
        places = np.arange(len(self.colors))
        for node in self.forest.nodes.values():
            places[node.units] = np.arange(node.size)
        return places

    @cached_property
    def _roles(self) -> Hash:
        return roles(self.ledger, self.ties)

    def _relative(self, component: Array) -> Hash:
        """Units by their color and their place in their block, everything else as it is."""
        moving = component >= 0
        unit = np.where(moving, component, 0)
        return np.where(moving, combined(self.colors[unit], self._places[unit]), combined(component))

    def _holds(self, node: Node, component: Array, owner: Array) -> NDArray[np.bool_]:
        """Where a component names the block (at whatever depth) that the unit of a node stands in anyway."""
        found = np.zeros(owner.shape, dtype=bool)
        block = np.where(owner >= 0, owner, 0)
        chain = self.forest.chain(node)
        for inner, outer in pairwise(chain):
            block = block // inner.size
            found |= (owner >= 0) & (component == outer.units.reshape(-1)[block])
        return found

    # -- one axis of one parameter ------------------------------------------------------------------------------

    def _lying(self, node: Node, label: Label, part: list[Array]) -> Lying:
        """For each position the unit of a node that it belongs to, its slot in the unit, and what else is there."""
        unit, inner = self._owned[node.color]
        shape = label[0].shape
        owner = np.full(shape, -1, dtype=np.int64)
        slot = np.zeros(shape, dtype=np.int64)
        for component in part:
            component = np.broadcast_to(component, shape)
            hit = component >= 0
            hit = hit & (unit[np.where(hit, component, 0)] >= 0)
            owner[hit] = unit[component[hit]]
            slot[hit] = slot[hit] * SLOTS + inner[component[hit]]  # a position may hold several units of one block
        rest = np.zeros(shape, dtype=np.uint64)
        for component in label if len(label) > 1 else ():
            if any(component is mine for mine in part):
                mine = unit[np.where(component >= 0, component, 0)]
                foreign = ~((component >= 0) & (mine >= 0))
                rest = combined(rest, np.where(foreign, self._relative(component), 0) if foreign.any() else 0)
                continue
            rest = combined(rest, np.where(self._holds(node, component, owner), 0, self._relative(component)))
            theirs = np.where(component >= 0, unit[np.where(component >= 0, component, 0)], -1) // node.size
            elsewhere = (theirs >= 0) & (owner >= 0) & (theirs != owner // node.size)
            if elsewhere.any():  # a unit of another block of this node
                rest = combined(rest, np.where(elsewhere, 1 + theirs, 0))
        return Lying(owner, slot, rest)

    def _member(self, node: Node, name: str, axis: int, lying: Lying) -> PermutationMember | None:
        """Where the units of a node lie along an axis; None for blocks that need no move along it."""
        shape = lying.owner.shape
        nested = [k for k, n in enumerate(shape) if k != axis and n > 1]
        if len(nested) > 1:
            raise Contradiction(node, "nested along two axes of a parameter")
        if not nested:
            flat = Lying(lying.owner.reshape(-1), lying.slot.reshape(-1), lying.rest.reshape(-1))
            grid = _grid(node, flat, lambda: self._roles_along(name, axis, shape).reshape(-1), node.units.size)
            return PermutationMember(name, axis, torch.from_numpy(grid.reshape(*node.units.shape, -1)))
        return self._member_in_rows(node, name, axis, nested[0], lying)

    def _member_in_rows(
        self, node: Node, name: str, axis: int, rows_axis: int, lying: Lying
    ) -> PermutationMember | None:
        """As :meth:`_member`, for units that lie elsewhere (or are others) in different rows of a second axis.

        The weight ``[4, 2]`` of a convolution in two groups has in its rows 0 and 1 the two inputs of the first group,
        in its rows 2 and 3 those of the second one: blocks ``[[0, 1], [2, 3]]`` of units, ``within [[0, 1], [2, 3]]``
        the rows of each block, and ``index [[[0], [1]], [[0], [1]]]`` the columns in these rows.
        """
        shape = lying.owner.shape
        size, count = shape[axis], shape[rows_axis]

        def by_rows(array: NDArray[Number]) -> NDArray[Number]:
            return np.moveaxis(array, (rows_axis, axis), (0, 1)).reshape(count, size)

        lines = Lying(by_rows(lying.owner), by_rows(lying.slot), by_rows(lying.rest))
        _, first, kind = np.unique(
            np.concatenate([lines.owner, lines.slot], axis=1), axis=0, return_index=True, return_inverse=True
        )
        kind = kind.reshape(-1)  # rows that hold the same units in the same slots are of one kind
        blocks = node.units.size // node.size
        index: Array | None = None
        rows: list[Array | None] = [None] * blocks
        for k, row in enumerate(first.tolist()):
            line = lines.at(row)
            units = distinct(line.owner[line.owner >= 0])
            if not len(units):
                continue
            block, *others = distinct(units // node.size).tolist()
            if others or rows[block] is not None:
                raise Contradiction(node, "rows of a parameter mix several blocks")
            if len(units) != node.size:
                _require_alike(node, lines)
                return None

            def roles_in(row: int = row) -> Hash:
                return by_rows(self._roles_along(name, axis, shape))[row]

            grid = _grid(node, line._replace(owner=line.owner - block * node.size), roles_in, node.size)
            if index is None:
                index = np.zeros((blocks, *grid.shape), dtype=np.int64)
            if grid.shape != index.shape[1:]:
                raise Contradiction(node, "blocks of different sizes in a parameter")
            index[block] = grid
            rows[block] = np.flatnonzero(kind == k)
        held = [r for r in rows if r is not None]
        if index is None or len(held) < blocks or len({len(r) for r in held}) != 1:
            raise Contradiction(node, "a parameter holds only some of the blocks")
        return PermutationMember(
            name,
            axis,
            torch.from_numpy(index.reshape(*node.units.shape, -1)),
            rows_axis,
            torch.from_numpy(np.stack(held).reshape(*node.units.shape[:-1], -1)),
        )

    def _roles_along(self, name: str, axis: int, shape: tuple[int, ...]) -> Hash:
        """For each position along a parameter's axis, what its units are tied to, in the resolved label's shape."""
        total = np.zeros((), dtype=np.uint64)
        for component in self.ledger.parameters[name].labels[axis]:
            for k, n in enumerate(shape):
                component = component.take([0], k) if n == 1 and component.shape[k] > 1 else component
            total = combined(total, np.where(component >= 0, self._roles[np.where(component >= 0, component, 0)], 0))
        return np.broadcast_to(total, shape)


SLOTS = 100_003  # slots of two units at one position make one number: more than there are slots in a unit


def _parts(owner: Array, label: Label) -> list[list[Array]]:
    """The components of a label that a node moves together, those of each part in one step.

    A head and a unit in it name the same head twice: one step moves both. The entries of a flattened Gram matrix
    ``(h_i h_j)`` have a unit of one node for its row and one for its column: the rows are moved first, then the
    columns, and each step is a permutation of the whole axis.

    Args:
        owner: for each class the unit of the node that it belongs to, -1 for none.
        label: the label of the axis.
    """
    if len(label) == 1:
        return [list(label)]
    parts: list[list[Array]] = []
    owners: list[Array] = []
    for component in label:
        own = np.where(component >= 0, owner[np.where(component >= 0, component, 0)], -1)
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


def _require_alike(node: Node, lines: Lying) -> None:
    """Blocks that move along the rows need no move along this axis, if slots lie alike in each block's rows."""
    held = lines.owner >= 0
    present = np.flatnonzero(held.any(axis=1))
    block = lines.owner[present].max(axis=1)
    if (np.where(held[present], lines.owner[present], block[:, None]) == block[:, None]).all():
        rows_of = (present[block == b] for b in distinct(block))
        layouts = [np.where(held[rows], lines.slot[rows], -1) for rows in rows_of]
    else:  # a row holds units of several blocks
        layouts = [np.where(held[row], lines.slot[row], -1) for row in present]
    if any(not np.array_equal(layout, layouts[0]) for layout in layouts[1:]):
        raise Contradiction(node, "blocks lie differently in the rows of a parameter")


def _grid(node: Node, lying: Lying, roles_of: Callable[[], Hash], count: int) -> Array:
    """Positions along an axis of each of ``count`` units, ``[units, copies]``, in an order that corresponds."""
    owner, slot, rest = lying
    held = np.flatnonzero((owner >= 0) & (owner < count))
    order = held[np.lexsort((held, rest[held], slot[held], owner[held]))]
    copies = np.bincount(owner[held], minlength=count)
    if (copies != copies[0]).any() or copies[0] == 0:
        raise Contradiction(node, "units with different numbers of positions in a parameter")
    grid = order.reshape(count, -1)
    if (slot[grid] != slot[grid[:1]]).any() or (rest[grid] != rest[grid[:1]]).any():
        raise Contradiction(node, "units that lie differently in a parameter")
    same = (slot[grid[0, 1:]] == slot[grid[0, :-1]]) & (rest[grid[0, 1:]] == rest[grid[0, :-1]])
    if same.any():  # several tensors' entries for one unit: which is which?
        role = roles_of()
        order = held[np.lexsort((held, role[held], rest[held], slot[held], owner[held]))]
        by_role = order.reshape(count, -1)
        if (role[by_role] != role[by_role[:1]]).any():
            raise Contradiction(node, "units whose copies cannot be told apart")
        if (role[grid] != role[grid[:1]]).any():  # the order in which they stand is another for each unit
            return by_role
    return grid
