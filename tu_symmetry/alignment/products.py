"""Gram matrices of a pair of networks that are kept, and brought up to date by what changed.

A tensor that is moved along two axes has a Gram matrix between units along the one axis for every order of the other:
``sum_i <reference[i, j], state[order[i], k]>``. When few positions i change their order, only their part is made anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import flat_source
from tu_symmetry.alignment.gram import (
    Family,
    each_working,
    families,
    in_order,
    interact,
    member_gram,
    own_member,
    trainable_members,
    working,
)
from tu_symmetry.files import Views
from tu_symmetry.symmetry.action import Permuted, permute_axis, permute_tensors
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup
from tu_symmetry.transfer import moved, numbers

if TYPE_CHECKING:
    from typing import Self

Orders = Mapping[tuple[str, int], Tensor]
_MOST_AXES = 2
_MOSTLY_NEW = 0.8  # above this share of changed positions a product is computed anew


@dataclass
class MovePlan:
    """Which positions of which tensors the groups move.

    Left out are tensors that two groups move at the same positions, in some rows only, or along more than two axes.
    """

    families: list[Family]
    shapes: Mapping[str, tuple[int, ...]]
    # tensor to axis to (group, positions [units, copies]); every position is moved by one group at most
    moves: dict[str, dict[int, list[tuple[str, Tensor]]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # number of units of each group, blocks flattened

    @classmethod
    def of(cls, graph: SymmetryGraph) -> MovePlan:
        """Say for each tensor which positions move together, along each axis."""
        plan = cls(families(graph), graph.shapes)
        skipped: set[str] = set()
        for family in plan.families:
            for group in family.groups:
                plan.sizes[group.name] = math.prod(group.shape)
                for member in trainable_members(graph, group):
                    if member.within_axis is not None:
                        skipped.add(member.parameter)
                    part = own_member(member, family.below(group))
                    if part is not None:
                        index = part.index.reshape(-1, part.index.shape[-1])
                        axis_moves = plan.moves.setdefault(member.parameter, {}).setdefault(member.axis, [])
                        if any(torch.isin(index, other).any() for _, other in axis_moves):
                            skipped.add(member.parameter)
                        axis_moves.append((group.name, index))
        plan.moves = {n: m for n, m in plan.moves.items() if n not in skipped and len(m) <= _MOST_AXES}
        return plan

    def orders(self, tensors: Iterable[str], sources: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
        """The orders of positions along all moved axes of some tensors that groups' sources of units make."""
        found = {}
        for name in tensors:
            for axis, parts in self.moves[name].items():
                order = torch.arange(self.shapes[name][axis], device="cpu")
                for group, index in parts:
                    order[index.reshape(-1)] = index[sources[group]].reshape(-1)
                found[name, axis] = order
        return found


@dataclass
class Part:
    """One group's positions along one axis of a tensor that is moved along one or two axes."""

    tensor: str
    axis: int  # whose units are compared
    other: int | None  # the other moved axis
    index: Tensor  # positions of the units, [units, copies]
    left: Tensor | None = None  # the reference as [positions along other, everything else, units]; made when needed
    right: Tensor | None = None  # the state in the same layout
    order: Tensor | None = None  # of the other axis, at which the sum that this is a part of holds


class PairProducts:
    """Gram matrices between a reference and a state.

    Of each group three sums are kept: over tensors that are moved along one axis, which never change, and over those
    that are moved along two, for the first and for the second of them. Where they would take too much memory nothing is
    ``kept``: each sum is made anew, of tensors that are read again.
    """

    def __init__(
        self, plan: MovePlan, reference: Mapping[str, Tensor], state: Mapping[str, Tensor], *, kept: bool = True
    ) -> None:
        self.plan, self.reference, self.state, self.kept = plan, reference, state, kept
        self.like = next(iter(reference.values())).new_empty(0)  # of the dtype and on the device of all
        self.parts: dict[tuple[str, int], list[Part]] = {(group, kind): [] for group in plan.sizes for kind in range(3)}
        for name, moves in plan.moves.items():
            for axis in (axes := sorted(moves)):
                other = next((a for a in axes if a != axis), None)
                kind = 0 if other is None else 1 if axis == axes[0] else 2
                for group, index in moves[axis]:
                    self.parts[group, kind].append(Part(name, axis, other, index))
        self._sums: dict[tuple[str, int], Tensor] = {}

    def sums(self, group: str, orders: Orders) -> Sequence[Tensor]:
        """The three sums of a group with the other axes in their order; not to be changed, and good until called again.

        A sum is brought up to date by the positions whose order has changed since, or computed anew if most have.
        """
        if not self.kept:
            return self.mixed(group, [(1.0, orders)])
        rows: list[Tensor] = []  # of operands: in the order of all positions, or those that have changed, new and old
        made: list[tuple[Part, Tensor, int]] = []
        for key in ((group, 1), (group, 2)):
            now = [(part, orders[part.tensor, part.other]) for part in self.parts[key]]  # type: ignore[index]
            changed = [_changed(part.order, order) for part, order in now]
            everything = sum(len(order) for _, order in now)
            anew = key not in self._sums or sum(map(len, changed)) > _MOSTLY_NEW * everything
            if anew:
                self._sums[key] = self._zeros(group)
            for (part, order), at in zip(now, changed, strict=True):
                if anew:
                    own = [order]
                elif len(at):
                    assert part.order is not None
                    own = [at, order[at], part.order[at]]
                else:
                    own = []
                made.append((part, self._sums[key], len(own)))
                rows += own
                part.order = order
        there = iter(moved(rows, self.like.device))
        for part, total, count in made:
            left, right = self._operands(part)
            if count == 1:
                _add_product(total, left, right.index_select(0, next(there)))
            elif count:
                at, new, old = (next(there) for _ in range(count))
                difference = right.index_select(0, new).sub_(right.index_select(0, old))
                _add_product(total, left.index_select(0, at), difference)
        return self._constant(group), self._sums[group, 1], self._sums[group, 2]

    def barycenter(self, group: str) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums of a group with the other axes' groups at their barycenters: every unit is the mean unit."""
        found = [self._zeros(group) for _ in range(2)]
        for total, kind in zip(found, (1, 2), strict=True):
            for part in self.parts[group, kind]:
                _add_product(total, *self._averaged(part))
        return self._constant(group), found[0], found[1]

    def mixed(
        self, group: str, points: Sequence[tuple[float, Orders | None]], kinds: Sequence[int] = (0, 1, 2)
    ) -> list[Tensor]:
        """Some of the three sums of a group, made anew, with the other axes at a weighted mean of orders.

        None stands for the barycenter.
        """
        found = [self._constant(group) if kind == 0 else self._zeros(group) for kind in kinds]
        for total, kind in ((total, kind) for total, kind in zip(found, kinds, strict=True) if kind):
            for part in self.parts[group, kind]:
                left, right = self._operands(part)
                mean: Tensor | None = None
                for share, orders in points:
                    if orders is None:
                        lefts, rights = self._averaged(part)
                        _add_product(total, lefts, share * rights)
                        continue
                    there = right.index_select(0, orders[part.tensor, part.other].to(right.device))  # type: ignore[index]
                    mean = there.mul_(share) if mean is None else mean.add_(there, alpha=share)
                if mean is not None:
                    _add_product(total, left, mean)
        return found

    def _averaged(self, part: Part) -> tuple[Tensor, Tensor]:
        """The operands with the groups of the other axis summed (left) and averaged (right) to one position each."""
        assert part.other is not None
        left, right = self._operands(part)
        rest = torch.ones(len(left), dtype=torch.bool, device="cpu")
        pieces = []
        for _, index in self.plan.moves[part.tensor][part.other]:
            place = index.reshape(-1).to(left.device)
            rest[index] = False
            units, mean = (t.index_select(0, place).unflatten(0, tuple(index.shape)) for t in (left, right))
            pieces.append((units.sum(0), mean.mean(0)))
        if rest.any():
            pieces.append((left[rest.to(left.device)], right[rest.to(right.device)]))
        lefts, rights = zip(*pieces, strict=True)
        return torch.cat(lefts), torch.cat(rights)

    def _constant(self, group: str) -> Tensor:
        if not self.kept:
            total = self._zeros(group)
            for part in self.parts[group, 0]:
                _add_product(total, *self._operands(part))
            return total
        if (group, 0) not in self._sums:
            total = self._zeros(group)
            pairs = [self._operands(part) for part in self.parts[group, 0]]
            if pairs:
                lefts, rights = zip(*pairs, strict=True)
                _add_product(total, torch.cat(lefts, 1), torch.cat(rights, 1))
            self._sums[group, 0] = total
        return self._sums[group, 0]

    def _zeros(self, group: str) -> Tensor:
        units = self.plan.sizes[group]
        return torch.zeros(units, units, dtype=self.like.dtype, device=self.like.device)

    def _operands(self, part: Part) -> tuple[Tensor, Tensor]:
        if not self.kept:
            return _layout(self.reference[part.tensor], part), _layout(self.state[part.tensor], part)
        if part.left is None or part.right is None:
            part.left, part.right = (_layout(s[part.tensor], part) for s in (self.reference, self.state))
        return part.left, part.right


def _changed(before: Tensor | None, order: Tensor) -> Tensor:
    """Positions whose order has changed."""
    return torch.arange(len(order), device="cpu") if before is None else (order != before).nonzero().squeeze(1)


def _layout(tensor: Tensor, part: Part) -> Tensor:
    """``[positions of the other axis, everything else, units]``, contiguous (the tensor itself where it is that)."""
    units_last = tensor.movedim(part.axis, -1)
    if part.other is None:
        units_last = units_last.unsqueeze(0)
    else:
        units_last = units_last.movedim(part.other - (part.other > part.axis), 0)
    units_last = in_order(units_last, -1, part.index.T.reshape(-1))
    return units_last.reshape(units_last.shape[0], -1, len(part.index)).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the Gram matrix of ``left`` and ``right``, ``[..., units]`` each."""
    total.addmm_(left.reshape(-1, left.shape[-1]).T, right.reshape(-1, right.shape[-1]))


class Each(Views):
    """Some tensors of a state, each of them changed when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], names: Collection[str], change: Callable[[Tensor], Tensor]) -> None:
        self.state, self.change, self._held = state, change, dict.fromkeys(name for name in state if name in names)
        self.like = self[next(iter(self))].new_empty(0)

    def __getitem__(self, name: str) -> Tensor:
        return self.change(self.state[name].detach())


class WeightSimilarities:
    """What speaks for pairing the units of two networks, family by family, with the other families' permutations."""

    def __init__(
        self,
        graph: SymmetryGraph,
        reference: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        plan: MovePlan | None = None,
        *,
        kept: bool = True,
    ) -> None:
        """Take two sets of parameters, of one dtype each and on one device."""
        self.graph, self.reference, self.state, self.kept = graph, reference, state, kept
        self.plan = plan or MovePlan.of(graph)
        self.products = PairProducts(self.plan, reference, state, kept=kept)
        self.prices: dict[str, Tensor] = {}  # from assignments, to begin the next ones with

    @classmethod
    def of(
        cls, graph: SymmetryGraph, reference: Mapping[str, Tensor], state: Mapping[str, Tensor], *, kept: bool = True
    ) -> Self:
        """Take two state dicts; the computation runs on the device and in the dtype of the second."""
        names = {m.parameter for g in graph.permutations for m in trainable_members(graph, g)}
        if not kept:
            second = Each(state, names, working)
            return cls(graph, Each(reference, names, lambda t: working(t).to(second.like)), second, kept=False)
        own = dict(each_working(graph, state, names))
        other = each_working(graph, reference, own)
        return cls(graph, {n: t.to(own[n].device, own[n].dtype) for n, t in other}, own)

    def value(self, family: Family, permutation: Mapping[str, Tensor]) -> float:
        """Inner product of the family's tensors with all permutations applied."""
        there = self._moved(family.tensors, permutation, frozenset())
        return sum(numbers([(self.reference[n] * there[n]).sum(dtype=torch.float64) for n in family.tensors]))

    def grams(self, family: Family, permutation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each group of a family ``[blocks * size, blocks * size]`` on the host, other families' groups applied.

        Where a root moves a tensor along two axes, the other axis is in the order of ``permutation``.
        """
        if any(n not in self.plan.moves for n in family.tensors):
            return self.grams_anew(family, permutation)
        groups = [f for f in self.plan.families if f.tensors & family.tensors]
        sources = {g.name: flat_source(g, permutation) for f in groups for g in f.groups}
        orders = self.plan.orders(family.tensors, sources)
        found = {}
        for group in family.groups:
            constant, first, second = self.products.sums(group.name, orders)
            found[group.name] = (constant + first).add_(second)
        return dict(zip(found, moved(list(found.values()), torch.device("cpu")), strict=True))

    def grams_anew(self, family: Family, permutation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`grams`, without what is kept, in float64."""
        there = self._moved(family.tensors, permutation, family.names)
        found: dict[str, Tensor] = {}
        for group in family.groups:
            total: Tensor | None = None
            for member in trainable_members(self.graph, group):
                tensor = there[member.parameter]
                for other in group.members if not family.children else ():
                    if other.parameter == member.parameter and other.axis != member.axis:
                        ndim = len(self.graph.shapes[other.parameter])
                        tensor = permute_axis(tensor, other, permutation[group.name], ndim)
                part = own_member(member, family.below(group))
                if part is not None:
                    gram = member_gram(part, self.reference[member.parameter], tensor)
                    total = gram if total is None else total + gram
            units = self.plan.sizes[group.name]
            zeros = torch.zeros(units, units, dtype=torch.float64, device="cpu")
            found[group.name] = zeros if total is None else total.to(zeros)
        return found

    def blocks(
        self, family: Family, moving: str, permutation: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Pieces of a coupled family, float64 on the host: the root's ``[H, H]``, and ``[H, n, H, n]`` of its groups.

        Every tensor counts in one piece; one that several groups move counts for ``moving`` if that is among them.
        """
        root = family.root
        there = self._moved(family.tensors, permutation, family.names)
        own = torch.zeros(root.size, root.size, dtype=torch.float64, device="cpu")
        for member in trainable_members(self.graph, root):
            part = own_member(member, family.children)
            if part is not None:
                own += member_gram(part, self.reference[member.parameter], there[member.parameter]).to(own)
        inner: dict[str, Tensor] = {}
        direct = sorted((c for c in family.children if c.parent == root.name), key=lambda c: c.name != moving)
        counted: set[str] = set()
        for child in direct:
            heads, size = child.blocks[0], child.size
            total = torch.zeros(heads, size, heads, size, dtype=torch.float64, device="cpu")
            shared: set[str] = set()
            for member in trainable_members(self.graph, child):
                reference, tensor = self.reference[member.parameter], there[member.parameter]
                partners = [c for c in direct if c is not child and any(interact(member, m) for m in c.members)]
                if not partners:
                    total += member_gram(member, reference, tensor).to(total).reshape(total.shape)
                    continue
                if member.parameter in counted:
                    continue
                shared.add(member.parameter)
                for h in range(heads):  # the partners' inner order is the one that the block h is to receive
                    held = {c.name: permutation[c.name][h].expand(c.shape).clone() for c in partners}
                    arranged = permute_tensors(self.graph, held, {member.parameter: tensor})[member.parameter]
                    total[h] += member_gram(member, reference, arranged).to(total).reshape(total.shape)[h]
            counted |= shared
            inner[child.name] = total
        return own, inner

    def inside(self, family: Family, group: PermutationGroup, permutation: Mapping[str, Tensor]) -> Tensor:
        """Inner products ``[blocks, n, n]`` within the blocks of a deeper group, all other groups applied."""
        there = self._moved(family.tensors, permutation, frozenset((group.name,)))
        blocks = math.prod(group.blocks)
        total = torch.zeros(blocks, group.size, group.size, dtype=torch.float64, device="cpu")
        for member in trainable_members(self.graph, group):
            gram = member_gram(member, self.reference[member.parameter], there[member.parameter])
            pairs = gram.to(total).reshape(blocks, group.size, blocks, group.size)
            total += torch.diagonal(pairs, dim1=0, dim2=2).permute(2, 0, 1)
        return total

    def _moved(
        self, names: frozenset[str], permutation: Mapping[str, Tensor], held: frozenset[str]
    ) -> Mapping[str, Tensor]:
        """Some tensors of the state with all permutations applied but those of the groups in ``held``."""
        touching = {
            g.name: permutation[g.name]
            for g in self.graph.permutations
            if g.name not in held and any(m.parameter in names for m in g.members)
        }
        for name in list(touching):
            while name := name.rpartition("/")[0]:
                if name in permutation and name not in held:
                    touching[name] = permutation[name]
        if not self.kept:
            return Permuted(self.graph, touching, self.state)
        return permute_tensors(self.graph, touching, {name: self.state[name] for name in names})
