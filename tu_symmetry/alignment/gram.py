"""What a pair of networks says about a group: Gram matrices between the units of one and the units of the other.

The objective ``sum_T <reference_T, permuted_T>`` over all parameters T, seen from one group with all others held, is
linear in the permutation: ``sum_j G[j, p(j)]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember
from tu_symmetry.transfer import numbers

_ORDINARY = 2.0**30


@dataclass(eq=False)
class Family:
    """A root group and the groups nested in it (heads with their units).

    It is coupled if one tensor is moved in two ways that do not commute with taking a Gram matrix (along two axes, or
    by two nested groups at the same positions): the objective is then quadratic in the family's own permutation.
    """

    root: PermutationGroup
    children: tuple[PermutationGroup, ...]  # parents before the groups nested in them
    tensors: frozenset[str]  # parameters that the family moves
    coupled: bool
    neighbors: set[str] = field(default_factory=set)  # roots of families that move one of these tensors too

    @property
    def groups(self) -> tuple[PermutationGroup, ...]:
        """The root and all groups in it, parents first."""
        return (self.root, *self.children)

    @property
    def names(self) -> frozenset[str]:
        """Names of the root and of all groups in it."""
        return frozenset(g.name for g in self.groups)

    def below(self, group: PermutationGroup) -> tuple[PermutationGroup, ...]:
        """The groups of the family that are nested in one of them at any depth."""
        return tuple(g for g in self.children if is_below(g, group))


def families(graph: SymmetryGraph) -> list[Family]:
    """The families of a graph, in its order, with their neighborhoods. Buffers do not count."""
    found = []
    for group in (g for g in graph.permutations if g.parent is None):
        below = descendants(graph, group)
        members: dict[str, list[tuple[PermutationGroup, PermutationMember]]] = {}
        for g in (group, *below):
            for member in trainable_members(graph, g):
                members.setdefault(member.parameter, []).append((g, member))
        coupled = any(
            interact(a, b) and not (is_below(h, g) and _carries(a, b)) and not (is_below(g, h) and _carries(b, a))
            for on_tensor in members.values()
            for (g, a), (h, b) in itertools.combinations(on_tensor, 2)
        )
        found.append(Family(group, below, frozenset(members), coupled))
    for family in found:
        family.neighbors = {o.root.name for o in found if o is not family and o.tensors & family.tensors}
    return found


def descendants(graph: SymmetryGraph, group: PermutationGroup) -> tuple[PermutationGroup, ...]:
    """All groups nested in a group at any depth, parents first."""
    below: list[PermutationGroup] = []
    frontier = [group.name]
    while frontier:
        nested = [c for name in frontier for c in graph.children(name)]
        below += nested
        frontier = [c.name for c in nested]
    return tuple(below)


def is_below(group: PermutationGroup, ancestor: PermutationGroup) -> bool:
    """Whether a group is nested in another one at any depth."""
    return group.name.startswith(f"{ancestor.name}/")


def trainable_members(graph: SymmetryGraph, group: PermutationGroup) -> list[PermutationMember]:
    """The members of a group that are real parameters: similarities come from these, all other members follow."""
    return [m for m in group.members if m.parameter not in graph.buffers and graph.kinds.get(m.parameter) != "complex"]


def interact(a: PermutationMember, b: PermutationMember) -> bool:
    """Whether moving along ``b`` changes what ``a`` compares: another axis of the tensor, or some of the positions."""
    if a.parameter != b.parameter:
        return False
    if a.axis != b.axis or a.within_axis != b.within_axis:
        return True
    return bool(torch.isin(a.index.reshape(-1), b.index.reshape(-1)).any())


def own_member(member: PermutationMember, children: tuple[PermutationGroup, ...]) -> PermutationMember | None:
    """The positions of a group's member that belong to no nested group: they move with the block and keep slots."""
    if not children:
        return member
    covered = torch.zeros(int(member.index.max()) + 1, dtype=torch.bool, device="cpu")
    for child in children:
        for other in child.members:
            if other.parameter != member.parameter or not _carries(member, other):
                continue
            held = other.index if other.axis == member.axis else other.within
            if held is not None and (other.axis != member.axis or other.within_axis is None):
                covered[held[held < len(covered)]] = True
    free = ~covered[member.index]
    counts = free.sum(-1)
    if not free.any() or (counts != counts.reshape(-1)[0]).any():
        return None
    index = member.index[free].reshape(*member.index.shape[:-1], -1)
    return PermutationMember(member.parameter, member.axis, index, member.within_axis, member.within)


def _carries(outer: PermutationMember, inner: PermutationMember) -> bool:
    """Whether the blocks that ``outer`` moves hold the units of ``inner``: along its axis, or as its rows."""
    return outer.axis in (inner.axis, inner.within_axis)


def member_gram(member: PermutationMember, reference: Tensor, moved: Tensor) -> Tensor:
    """Inner products between all units of two tensors along one member's axis: ``[blocks * size, blocks * size]``."""
    return units_first(member, reference) @ units_first(member, moved).T


def units_first(member: PermutationMember, tensor: Tensor) -> Tensor:
    """The slices of a tensor that belong to each unit, of all blocks: ``[blocks * size, everything else]``."""
    if member.within_axis is None:
        return _slices(tensor, member.axis, member.index.reshape(-1, member.index.shape[-1]))
    assert member.within is not None
    index = member.index.reshape(-1, *member.index.shape[-2:])
    rows = member.within.reshape(len(index), -1)  # where the block's positions hold, along a second axis
    parts = [
        _slices(tensor.index_select(member.within_axis, block_rows.to(tensor.device)), member.axis, block_index)
        for block_index, block_rows in zip(index, rows, strict=True)
    ]
    return torch.cat(parts)


def _slices(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """``[units, everything else]`` for positions ``[units, copies]`` along an axis."""
    return in_order(tensor.movedim(axis, 0), 0, index.reshape(-1)).reshape(index.shape[0], -1)


def in_order(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """Positions along an axis; the tensor itself where these are all, in the order that they have."""
    if len(index) == tensor.shape[axis] and torch.equal(index, torch.arange(len(index), device="cpu")):
        return tensor
    return tensor.index_select(axis, index.to(tensor.device))


def each_working(
    graph: SymmetryGraph, state: Mapping[str, Tensor], names: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a state one after the other, some of them if ``names`` has any.

    float64 stays float64, everything else becomes float32 (half precision is too coarse to add up inner products).
    """
    for name in graph.shapes:
        if name not in graph.buffers and (not names or name in names):
            tensor = state[name].detach()
            if tensor.is_floating_point():
                yield name, working(tensor)


def working(tensor: Tensor) -> Tensor:
    """A tensor in the precision in which networks are compared."""
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def widened(graph: SymmetryGraph, *states: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], ...]:
    """States as they are; in double precision where squares of weights leave the range of single, or are lost in it."""
    tensors = (t for state in states for _, t in each_working(graph, state) if t.numel())
    ends = numbers([end for t in tensors for end in torch.aminmax(t)])
    sizes = (max(-low, high) for low, high in zip(ends[::2], ends[1::2], strict=True))
    if all(size == 0 or 1 / _ORDINARY < size < _ORDINARY for size in sizes):
        return states
    names = {a for n in graph.shapes if n not in graph.buffers for a in graph.aliases[n]}
    return tuple(
        {n: t.detach().double() if n in names and t.is_floating_point() else t for n, t in state.items()}
        for state in states
    )
