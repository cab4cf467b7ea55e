"""Rotations of units that nothing but linear maps makes and reads: orthogonal Procrustes, beside signed permutations.

What speaks for pairing two attention heads, whatever rotations their units have gone through, is the sum of the
singular values of the Gram matrix between their units: what the best rotation gives. So heads are paired as blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, flat_source
from tu_symmetry.alignment.gram import Family, member_gram, widened
from tu_symmetry.alignment.matching import Matching, Solver, inner_product, weight_distance, weight_matching
from tu_symmetry.alignment.signed import PairSigns, Search, signed_matching
from tu_symmetry.symmetry.action import compose_signed, linear_tensors, signed_tensors
from tu_symmetry.symmetry.elements import Maps, SignedPermutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import LinearGroup, PermutationGroup

_MOST_SWEEPS = 20


def rotation_matching(
    graph: SymmetryGraph,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    signs: bool = False,
    solver: Solver = "frank_wolfe",
) -> Matching:
    """Find the permutation, the signs and the rotations that bring ``state`` closest to ``reference_state``.

    It maximizes ``sum_T <reference_T, moved_T>`` over all parameters, from what :func:`~tu_symmetry.weight_matching`
    (or, with ``signs``, :func:`~tu_symmetry.alignment.signed_matching`) finds: over blocks of rotated units as wholes,
    over rotations by orthogonal Procrustes (Schonemann 1966), in closed form, and over all other groups, until nothing
    gains. General linear groups are searched for orthogonal matrices only, which keep the norms of weights, and are all
    that is left of these groups between two networks of least mass (:func:`~tu_symmetry.alignment.balanced`).

    Law: the result is no farther from the reference than what it begins with (up to 1e-7 of the weights' squared
    norms). In networks whose stream itself may be rotated it ends in an optimum that depends on the start.

    Raises:
        SymmetryError: as :func:`~tu_symmetry.weight_matching`.
    """
    if signs:
        found = signed_matching(graph, reference_state, state, solver=solver)
    else:
        found = weight_matching(graph, reference_state, state, solver=solver)
        graph = replace(graph, signs=(), sign_terms={})
    if not graph.linears:
        return found
    search = _Rotations(graph, *widened(graph, reference_state, state))
    best, maps, sweeps = search.rotated(found.element)
    moved = linear_tensors(graph, maps, signed_tensors(graph, best, state))
    return replace(
        found,
        permutation=best.permutation,
        signs=best.signs,
        maps=maps,
        objective=inner_product(graph, reference_state, moved),
        sweeps=found.sweeps + sweeps,
        distance_after=weight_distance(graph, reference_state, moved),
    )


class _Rotations(Search):
    """Two networks, of whose second the units, signs and rotations move."""

    def rotated(self, element: SignedPermutation) -> tuple[SignedPermutation, Maps, int]:
        """From an element to one that no step improves, with its rotations, and the number of sweeps."""
        still = {
            g.name: torch.eye(g.size, dtype=torch.float64, device="cpu").expand(g.shape) for g in self.graph.linears
        }
        best = element, still, self.value(element)
        for sweep in range(1, _MOST_SWEEPS + 1):
            for family in self.families:
                element = self._blocks(family, element)
            moved = signed_tensors(self.graph, element, self.state)
            maps = self._procrustes(moved)
            moved = linear_tensors(self.graph, maps, moved)
            for family in self.families:
                if not any(map(self._mixed, family.groups)):  # rotations permute as well
                    step = self.step(family, moved, family.tensors)
                    there = signed_tensors(self.graph, step, moved)
                    if self.product(there) > self.product(moved) + self.least:
                        moved, element = there, compose_signed(self.graph, step, element)
            value = self.product(moved)
            if value <= best[2] + self.least:
                return (*best[:2], sweep)
            best = element, maps, value
        return (*best[:2], _MOST_SWEEPS)

    def _procrustes(self, moved: Mapping[str, Tensor]) -> Maps:
        """The rotations of all groups, one after the other until nothing gains."""
        found: Maps = {}
        for _ in range(_MOST_SWEEPS):
            before = self.product(moved)
            for group in self.graph.linears:
                gram = self._gram(group, moved)
                blocks = torch.arange(len(gram), device="cpu")
                left, _, right = torch.linalg.svd(gram[blocks, :, blocks])
                rotation = (left @ right).reshape(group.shape)
                moved = linear_tensors(self.graph, {group.name: rotation}, moved)
                found[group.name] = rotation @ found[group.name] if group.name in found else rotation
            if self.product(moved) <= before + self.least:
                break
        return found

    def _gram(self, group: LinearGroup, moved: Mapping[str, Tensor]) -> Tensor:
        """Inner products between all units of all blocks, float64 ``[blocks, size, blocks, size]``."""
        shape = math.prod(group.blocks), group.size
        total = torch.zeros(math.prod(shape), math.prod(shape), dtype=torch.float64, device="cpu")
        for member in group.members:
            total += member_gram(member, self.reference[member.parameter], moved[member.parameter]).to(total)
        return total.reshape(*shape, *shape)

    def _mixed(self, group: PermutationGroup) -> bool:
        """Whether a linear group mixes what a group permutes."""
        return any(
            (m.parameter, m.axis) == (o.parameter, o.axis) and bool(torch.isin(m.index, o.index).any())
            for m in group.members
            for linear in self.graph.linears
            for o in linear.members
        )

    def _rotated(self, family: Family) -> list[tuple[LinearGroup, Tensor]]:
        """The linear groups whose blocks are units of a family's root, and which unit each block is of."""
        found = []
        for group in self.graph.linears:
            first = group.members[0]
            axis, held = (first.axis, first.index) if first.within is None else (first.within_axis, first.within)
            for member in family.root.members:
                if (member.parameter, member.axis) == (first.parameter, axis) and not family.root.blocks:
                    owner = torch.full((self.graph.shapes[member.parameter][member.axis],), -1, device="cpu")
                    owner[member.index] = torch.arange(family.root.size, device="cpu").unsqueeze(1)
                    units = owner[held.reshape(math.prod(group.blocks), -1)]
                    if bool((units == units[:, :1]).all()) and sorted(units[:, 0].tolist()) == list(range(len(units))):
                        found.append((group, units[:, 0]))
                    break
        return found

    def _blocks(self, family: Family, element: SignedPermutation) -> SignedPermutation:
        """Pair the blocks of a family whose units are rotated by what the best rotations give."""
        rotated = self._rotated(family)
        if not rotated or family.coupled or any(len(units) != family.root.size for _, units in rotated):
            return element
        moved = signed_tensors(self.graph, element, self.state)
        kept = replace(family, children=tuple(c for c in family.children if not self._mixed(c)))
        pairs = {
            g.name: PairSigns(self.parts(family, g, moved, family.tensors), {}, self.zeros(g)) for g in kept.groups
        }
        best = {name: pair.best.clone() for name, pair in pairs.items()}
        for group, units in rotated:
            gram = self._gram(group, moved).permute(0, 2, 1, 3)
            best[family.root.name][units.unsqueeze(1), units] += torch.linalg.svdvals(gram).sum(-1)
        permutation = assign_family(kept, best)
        signs: dict[int, int] = {}
        for own in kept.groups:
            signs |= pairs[own.name].signs(flat_source(own, permutation))
        step = SignedPermutation(self.identity | permutation, self.named(signs))
        return compose_signed(self.graph, step, element)
