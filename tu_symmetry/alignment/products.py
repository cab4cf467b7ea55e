"""Gram matrices of a pair of networks that are kept, and brought up to date by what changed.

A tensor that is moved along two axes has a Gram matrix between units along the one axis for every order of the other:
``sum_i <reference[i, j], state[order[i], k]>`` over the positions i. It is a sum over positions, so when the order
changes at few of them, only their part is computed again. Relaxation and descent use the same matrices, one after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import flat_source
from tu_symmetry.alignment.gram import Family, WeightSimilarities, families, is_below, own_member, trainable_members
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.transfer import moved

Axes = tuple[int, ...]
_MOST_AXES = 2
_MOSTLY_NEW = 0.8  # above this share of changed positions a product is computed anew


@dataclass
class MovePlan:
    """Which positions of which tensors the groups move.

    Attributes:
        families: the families of groups.
        moves: tensor to axis to ``(group, positions [units, copies])``; every position is moved by one group at most.
        sizes: number of units of each group, blocks flattened.

    Tensors that do not fit are left out: two nested groups move them at the same positions, a group moves them in some
    rows only, or they are moved along more than two axes.
    """

    families: list[Family]
    moves: dict[str, dict[int, list[tuple[str, Tensor]]]]
    sizes: dict[str, int] = field(default_factory=dict)

    def axes(self, tensor: str) -> Axes:
        """The axes along which a tensor is moved."""
        return tuple(sorted(self.moves[tensor]))

    def order(self, tensor: str, axis: int, size: int, sources: Mapping[str, Tensor]) -> Tensor:
        """The order of positions along an axis that groups' sources of units make."""
        order = torch.arange(size, device="cpu")
        for group, index in self.moves[tensor][axis]:
            order[index.reshape(-1)] = index[sources[group]].reshape(-1)
        return order


def plan_moves(graph: SymmetryGraph, family_list: list[Family]) -> MovePlan:
    """Say for each tensor which positions move together, along each axis."""
    plan = MovePlan(family_list, {})
    skipped: set[str] = set()
    for family in family_list:
        for group in family.groups:
            plan.sizes[group.name] = math.prod(group.shape)
            below = tuple(g for g in family.children if is_below(g, group))
            for member in trainable_members(graph, group):
                if member.within_axis is not None:
                    skipped.add(member.parameter)
                part = own_member(member, below) if below else member
                if part is not None:
                    index = part.index.reshape(-1, part.index.shape[-1])
                    axis_moves = plan.moves.setdefault(member.parameter, {}).setdefault(member.axis, [])
                    if any(torch.isin(index, other).any() for _, other in axis_moves):
                        skipped.add(member.parameter)
                    axis_moves.append((group.name, index))
    plan.moves = {n: m for n, m in plan.moves.items() if n not in skipped and len(m) <= _MOST_AXES}
    return plan


@dataclass
class Part:
    """One group's positions along one axis of a tensor that is moved along one or two axes.

    Attributes:
        tensor: its name.
        axis: the axis whose units are compared.
        other: the other moved axis, or None.
        group: the group that moves the units.
        index: their positions ``[units, copies]``.
        second: whether the tensor has a part along an earlier axis too.
        left: the reference as ``[positions of the other axis, everything else, units]``; made when first needed.
        right: the state in the same layout.
        order: the order of the other axis at which the sum that it is a part of holds.
    """

    tensor: str
    axis: int
    other: int | None
    group: str
    index: Tensor
    second: bool
    left: Tensor | None = None
    right: Tensor | None = None
    order: Tensor | None = None


class PairProducts:
    """Gram matrices between a reference and a state.

    Of each group three sums are kept: over tensors that are moved along one axis, which never change, and over those
    that are moved along two, for the first and for the second of them.
    """

    def __init__(self, plan: MovePlan, reference: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        self.plan, self.reference, self.state = plan, reference, state
        self.parts: dict[str, list[Part]] = {group: [] for group in plan.sizes}
        for name, moves in plan.moves.items():
            axes = plan.axes(name)
            for axis in axes:
                other = next((a for a in axes if a != axis), None)
                for group, index in moves[axis]:
                    part = Part(name, axis, other, group, index, second=axis != axes[0])
                    self.parts[group].append(part)
        self._sums: dict[tuple[str, int], Tensor] = {}

    def orders(self, sources: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
        """Orders of positions, for the (tensor, axis) pairs all of whose groups are in ``sources``."""
        found = {}
        for name, moves in self.plan.moves.items():
            for axis, parts in moves.items():
                if all(group in sources for group, _ in parts):
                    found[name, axis] = self.plan.order(name, axis, self.state[name].shape[axis], sources)
        return found

    def sums(self, group: str, orders: Mapping[tuple[str, int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums of a group with the other axes in their order; not to be changed, and good until called again.

        A sum is brought up to date by the positions whose order has changed since, or computed anew if most have.
        """
        rows: list[Tensor] = []  # of operands: in the order of all positions, or those that have changed, new and old
        made: list[tuple[Part, Tensor, int]] = []
        for kind in (1, 2):
            parts = self._of_kind(group, kind)
            changed = [self._changed(part, orders[part.tensor, part.other]) for part in parts]  # type: ignore[index]
            new, all_ = sum(map(len, changed)), sum(len(self._operands(part)[0]) for part in parts)
            if (group, kind) not in self._sums or new > _MOSTLY_NEW * all_:
                self._sums[group, kind] = self._zeros(group)
                changed = []
            for k, part in enumerate(parts):
                order = orders[part.tensor, part.other]  # type: ignore[index]
                own = [order]
                if changed:
                    assert part.order is not None
                    own = [changed[k], order[changed[k]], part.order[changed[k]]] if len(changed[k]) else []
                made.append((part, self._sums[group, kind], len(own)))
                rows += own
                part.order = order
        there = iter(moved(rows, next(iter(self.reference.values())).device))
        for part, total, count in made:
            left, right = self._operands(part)
            if count == 1:
                _add_product(total, left, right.index_select(0, next(there)))
            elif count:
                at, now, before = (next(there) for _ in range(count))
                difference = right.index_select(0, now).sub_(right.index_select(0, before))
                _add_product(total, left.index_select(0, at), difference)
        return self._constant(group), self._sums[group, 1], self._sums[group, 2]

    def barycenter(self, group: str) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums of a group with the other axes' groups at their barycenters: every unit is the mean unit."""
        found = [self._zeros(group) for _ in range(2)]
        for total, kind in zip(found, (1, 2), strict=True):
            for part in self._of_kind(group, kind):
                _add_product(total, *self._averaged(part))
        return self._constant(group), found[0], found[1]

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

    def _of_kind(self, group: str, kind: int) -> list[Part]:
        return [p for p in self.parts[group] if kind == (0 if p.other is None else 2 if p.second else 1)]

    def _constant(self, group: str) -> Tensor:
        if (group, 0) not in self._sums:
            total = self._zeros(group)
            pairs = [self._operands(part) for part in self._of_kind(group, 0)]
            if pairs:
                lefts, rights = zip(*pairs, strict=True)
                _add_product(total, torch.cat(lefts, 1), torch.cat(rights, 1))
            self._sums[group, 0] = total
        return self._sums[group, 0]

    def _changed(self, part: Part, order: Tensor) -> Tensor:
        """Positions along the other axis whose order has changed."""
        return (
            torch.arange(len(order), device="cpu") if part.order is None else (order != part.order).nonzero().squeeze(1)
        )

    def _zeros(self, group: str) -> Tensor:
        units, like = self.plan.sizes[group], next(iter(self.reference.values()))
        return torch.zeros(units, units, dtype=like.dtype, device=like.device)

    def _operands(self, part: Part) -> tuple[Tensor, Tensor]:
        if part.left is None or part.right is None:
            part.left, part.right = (_layout(s[part.tensor], part) for s in (self.reference, self.state))
        return part.left, part.right


def _layout(tensor: Tensor, part: Part) -> Tensor:
    """``[positions of the other axis, everything else, units]``, contiguous (the tensor itself where it is that)."""
    units_last = tensor.movedim(part.axis, -1)
    if part.other is not None:
        units_last = units_last.movedim(part.other - (part.other > part.axis), 0)
    else:
        units_last = units_last.unsqueeze(0)
    flat = part.index.T.reshape(-1)
    if len(flat) != units_last.shape[-1] or not torch.equal(flat, torch.arange(len(flat), device="cpu")):
        units_last = units_last.index_select(-1, flat.to(tensor.device))
    return units_last.reshape(units_last.shape[0], -1, len(part.index)).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the Gram matrix of ``left`` and ``right``, ``[..., units]`` each."""
    total.addmm_(left.reshape(-1, left.shape[-1]).T, right.reshape(-1, right.shape[-1]))


class KeptSimilarities(WeightSimilarities):
    """As :class:`WeightSimilarities`, with Gram matrices that are kept from one call to the next.

    Attributes:
        plan: what moves what.
        products: the kept matrices.
    """

    def __init__(self, graph: SymmetryGraph, reference: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        super().__init__(graph, reference, state)
        self.plan = plan_moves(graph, families(graph))
        self.products = PairProducts(self.plan, self.reference, self.state)

    def grams(self, family: Family, permutation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`WeightSimilarities.grams`, in the dtype of the state."""
        if any(n not in self.plan.moves for n in family.tensors):
            return super().grams(family, permutation)
        groups = [f for f in self.plan.families if f.tensors & family.tensors]
        sources = {g.name: flat_source(g, permutation) for f in groups for g in f.groups}
        orders = {
            (name, axis): self.plan.order(name, axis, self.state[name].shape[axis], sources)
            for name in family.tensors
            for axis in self.plan.moves[name]
        }
        found = {}
        for group in family.groups:
            constant, first, second = self.products.sums(group.name, orders)
            found[group.name] = (constant + first).add_(second)
        return dict(zip(found, moved(list(found.values()), torch.device("cpu")), strict=True))
