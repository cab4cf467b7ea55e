"""Fourth stage: where the units of each node lie along the axes of the parameters.

A label says for every position along an axis which units it belongs to; read the other way round, it is the index of a
member. Copies of a unit are put in an order that corresponds between units: by the slot of the unit within the owner
(of a head: its query units, its value units), then by what else is there, then by position. Where units lie
differently, no permutation of the axis exchanges them: the node contradicts itself, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tu_symmetry.symmetry.algebra import Array, Label, distinct
from tu_symmetry.symmetry.extraction.classes import Ties
from tu_symmetry.symmetry.extraction.coloring import Hash, combined, roles
from tu_symmetry.symmetry.extraction.forest import Forest, Labels, Node
from tu_symmetry.symmetry.groups import PermutationMember
from tu_symmetry.symmetry.ledger import Ledger

Number = TypeVar("Number", np.int64, np.uint64)
SLOTS = 100_003  # slots of two units at one position make one number: more than there are slots in a unit


class Contradiction(Exception):
    """A node whose members contradict one another, and why: it is no group."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class Owned(NamedTuple):
    """What belongs to the units of a node: classes in ascending order, the unit's flat index, and the slot in it."""

    classes: Array
    unit: Array
    slot: Array

    def at(self, component: Array) -> tuple[Array, Array]:
        """Units, -1 for none and for fixed positions, and slots."""
        place = np.minimum(np.searchsorted(self.classes, component), len(self.classes) - 1)
        held = self.classes[place] == component
        return np.where(held, self.unit[place], -1), np.where(held, self.slot[place], 0)


class Lying(NamedTuple):
    """Which units of a node lie at each position of a label: their flat index, the slot, and a hash of what else."""

    owner: Array
    slot: Array
    rest: Hash


class Reader:
    """Reads the members of nodes off the labels of the parameters, resolved into classes of some colors."""

    def __init__(self, ledger: Ledger, ties: Ties, labels: Labels, colors: Array, forest: Forest) -> None:
        self.ledger, self.ties, self.labels, self.colors, self.forest = ledger, ties, labels, colors, forest

    def members(self, order: Sequence[str]) -> dict[int, list[PermutationMember]]:
        """The members of each node that may move, by its color."""
        found: dict[int, list[PermutationMember]] = {}
        for name in order:
            for axis, label in enumerate(self.labels.get(name, ())):
                for color, member in self._along(name, axis, label):
                    found.setdefault(color, []).append(member)
        return found

    def _along(self, name: str, axis: int, label: Label) -> Iterator[tuple[int, PermutationMember]]:
        if not any((c >= 0).any() for c in label):
            return
        held = distinct(np.concatenate([c[c >= 0] for c in label]))
        label = tuple(np.broadcast_arrays(*label)) if len(label) > 1 else label
        colors = distinct(self.colors[held]).tolist()
        nodes = {n.color: n for color in colors for n in self.forest.moving(self.forest.nodes.get(color))}
        for node in nodes.values():
            for part in _parts(self._owned[node.color], label):
                member = self._member(node, name, axis, self._lying(node, label, part))
                if member is not None:
                    yield node.color, member

    # -- tables over all classes --------------------------------------------------------------------------------

    @cached_property
    def _owned(self) -> dict[int, Owned]:
        pieces: dict[int, list[Array]] = {}
        slots: dict[int, int] = {}
        for node in self.forest.nodes.values():
            inner = node.units.reshape(-1)
            for holder in filter(self.forest.proper, self.forest.chain(node)):
                count, per = holder.units.size, node.units.size // holder.units.size
                slot = np.zeros(per, dtype=np.int64)
                if holder is not node:
                    slot = slots.get(holder.color, 1) + np.arange(per)
                    slots[holder.color] = slots.get(holder.color, 1) + per
                found = np.stack([inner, np.repeat(np.arange(count), per), np.tile(slot, count)])
                pieces.setdefault(holder.color, []).append(found)
        whole = {color: np.concatenate(found, axis=1) for color, found in pieces.items()}
        return {color: Owned(*found[:, np.argsort(found[0])]) for color, found in whole.items()}

    @cached_property
    def _places(self) -> Array:
        places = np.arange(len(self.colors))
        for node in self.forest.nodes.values():
            places[node.units] = np.arange(node.size)
        return places

    @cached_property
    def _roles(self) -> Hash:
        return roles(self.ledger, self.ties)

    def _relative(self, component: Array) -> Hash:
        """Units by their color and their place in their block, everything else as it is."""
        unit = np.where(component >= 0, component, 0)
        return np.where(component >= 0, combined(self.colors[unit], self._places[unit]), combined(component))

    # -- one axis of one parameter ------------------------------------------------------------------------------

    def _lying(self, node: Node, label: Label, part: list[Array]) -> Lying:
        """For each position the unit of a node that it belongs to, its slot in the unit, and what else is there."""
        owned = self._owned[node.color]
        shape = label[0].shape
        owner = np.full(shape, -1, dtype=np.int64)
        slot = np.zeros(shape, dtype=np.int64)
        for component in part:
            component = np.broadcast_to(component, shape)
            unit, inner = owned.at(component)
            hit = unit >= 0
            owner[hit] = unit[hit]
            slot[hit] = slot[hit] * SLOTS + inner[hit]  # a position may hold several units of one block
        rest = np.zeros(shape, dtype=np.uint64)
        for component in label if len(label) > 1 else ():
            theirs, _ = owned.at(component)
            if any(component is mine for mine in part):
                foreign = theirs < 0
                rest = combined(rest, np.where(foreign, self._relative(component), 0) if foreign.any() else 0)
                continue
            block = np.where(owner >= 0, owner, 0)
            holds = np.zeros(shape, dtype=bool)  # it names the block that the unit stands in anyway
            for nested, outer in pairwise(self.forest.chain(node)):
                block = block // nested.size
                holds |= (owner >= 0) & (component == outer.units.reshape(-1)[block])
            rest = combined(rest, np.where(holds, 0, self._relative(component)))
            elsewhere = (theirs >= 0) & (owner >= 0) & (theirs // node.size != owner // node.size)
            if elsewhere.any():  # a unit of another block of this node
                rest = combined(rest, np.where(elsewhere, 1 + theirs // node.size, 0))
        return Lying(owner, slot, rest)

    def _member(self, node: Node, name: str, axis: int, lying: Lying) -> PermutationMember | None:
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
        """As :meth:`_member`, for units that lie elsewhere (or are others) in different rows of a second axis."""
        shape = lying.owner.shape

        def by_rows(array: NDArray[Number]) -> NDArray[Number]:
            return np.moveaxis(array, (rows_axis, axis), (0, 1)).reshape(shape[rows_axis], shape[axis])

        lines = Lying(by_rows(lying.owner), by_rows(lying.slot), by_rows(lying.rest))
        _, first, kind = np.unique(
            np.concatenate([lines.owner, lines.slot], axis=1), axis=0, return_index=True, return_inverse=True
        )
        kind = kind.reshape(-1)  # rows that hold the same units in the same slots are of one kind
        blocks = node.units.size // node.size
        grids: dict[int, Array] = {}
        rows: dict[int, Array] = {}
        for k, row in enumerate(first.tolist()):
            units = distinct(lines.owner[row][lines.owner[row] >= 0])
            if not len(units):
                continue
            block, *others = distinct(units // node.size).tolist()
            if others or block in rows:
                raise Contradiction(node, "rows of a parameter mix several blocks")
            if len(units) != node.size:
                _require_alike(node, lines)
                return None
            line = Lying(lines.owner[row] - block * node.size, lines.slot[row], lines.rest[row])

            def roles_in(row: int = row) -> Hash:
                return by_rows(self._roles_along(name, axis, shape))[row]

            grids[block] = _grid(node, line, roles_in, node.size)
            rows[block] = np.flatnonzero(kind == k)
            if len({grid.shape for grid in grids.values()}) > 1:
                raise Contradiction(node, "blocks of different sizes in a parameter")
        if len(rows) < blocks or len({len(r) for r in rows.values()}) != 1:
            raise Contradiction(node, "a parameter holds only some of the blocks")
        index, within = (np.stack([held[block] for block in range(blocks)]) for held in (grids, rows))
        return PermutationMember(
            name,
            axis,
            torch.from_numpy(index.reshape(*node.units.shape, -1)),
            rows_axis,
            torch.from_numpy(within.reshape(*node.units.shape[:-1], -1)),
        )

    def _roles_along(self, name: str, axis: int, shape: tuple[int, ...]) -> Hash:
        """For each position along a parameter's axis, what its units are tied to, in the resolved label's shape."""
        total = np.zeros((), dtype=np.uint64)
        for component in self.ledger.parameters[name].labels[axis]:
            for k, n in enumerate(shape):
                component = component.take([0], k) if n == 1 and component.shape[k] > 1 else component
            total = combined(total, np.where(component >= 0, self._roles[np.where(component >= 0, component, 0)], 0))
        return np.broadcast_to(total, shape)


def _parts(owned: Owned, label: Label) -> list[list[Array]]:
    """The components of a label that a node moves together, those of each part in one step."""
    if len(label) == 1:
        return [list(label)]
    parts: list[tuple[list[Array], Array]] = []
    for component in label:
        own, _ = owned.at(component)
        if not (own >= 0).any():
            continue
        for part, theirs in parts:
            x, y = np.broadcast_arrays(own, theirs)
            if not ((x >= 0) & (y >= 0) & (x != y)).any():
                part.append(component)
                break
        else:
            parts.append(([component], own))
    return [part for part, _ in parts]


def _require_alike(node: Node, lines: Lying) -> None:
    """Blocks that move along the rows need no move along this axis, if slots lie alike in each block's rows."""
    held = lines.owner >= 0
    present = np.flatnonzero(held.any(axis=1))
    block = lines.owner[present].max(axis=1)
    if (np.where(held[present], lines.owner[present], block[:, None]) == block[:, None]).all():
        rows_of = [present[block == b] for b in distinct(block)]
    else:  # a row holds units of several blocks
        rows_of = list(present)
    layouts = [np.where(held[rows], lines.slot[rows], -1) for rows in rows_of]
    if any(not np.array_equal(layout, layouts[0]) for layout in layouts[1:]):
        raise Contradiction(node, "blocks lie differently in the rows of a parameter")


def _grid(node: Node, lying: Lying, roles_of: Callable[[], Hash], count: int) -> Array:
    """Positions along an axis of each of ``count`` units, ``[units, copies]``, in an order that corresponds."""
    owner, slot, rest = lying
    held = np.flatnonzero((owner >= 0) & (owner < count))
    copies = np.bincount(owner[held], minlength=count)
    if (copies != copies[0]).any() or copies[0] == 0:
        raise Contradiction(node, "units with different numbers of positions in a parameter")
    grid = held[np.lexsort((held, rest[held], slot[held], owner[held]))].reshape(count, -1)
    if (slot[grid] != slot[grid[:1]]).any() or (rest[grid] != rest[grid[:1]]).any():
        raise Contradiction(node, "units that lie differently in a parameter")
    same = (slot[grid[0, 1:]] == slot[grid[0, :-1]]) & (rest[grid[0, 1:]] == rest[grid[0, :-1]])
    if same.any():  # several tensors' entries for one unit: which is which?
        role = roles_of()
        by_role = held[np.lexsort((held, role[held], rest[held], slot[held], owner[held]))].reshape(count, -1)
        if (role[by_role] != role[by_role[:1]]).any():
            raise Contradiction(node, "units whose copies cannot be told apart")
        if (role[grid] != role[grid[:1]]).any():  # the order in which they stand is another for each unit
            return by_role
    return grid
