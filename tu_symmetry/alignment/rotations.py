"""Rotations of units that nothing but linear maps makes and reads: orthogonal Procrustes, beside signed permutations.

Units that what is fixed already makes or reads (tokens, pixels, classes) are rotated first, so that all others can be
matched behind them: of a residual stream that was rotated, no order of units speaks. What speaks for pairing two
attention heads, whatever rotations their units have gone through, is the sum of the singular values of the Gram matrix
between their units: what the best rotation gives. So heads are paired as blocks.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, flat_source
from tu_symmetry.alignment.gram import Family, member_gram, widened
from tu_symmetry.alignment.matching import Matching, Solver, inner_product, weight_distance, weight_matching
from tu_symmetry.alignment.signed import PairSigns, Search, signed_matching
from tu_symmetry.scaling.folding import foldable
from tu_symmetry.states import SymmetryWarning
from tu_symmetry.symmetry.action import compose_signed, linear_tensors, mix_axis, signed_tensors, unfolded
from tu_symmetry.symmetry.elements import Maps, SignedPermutation, closest_matrices
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import (
    Group,
    LinearGroup,
    LinearMember,
    PermutationGroup,
    PermutationMember,
    ScaleMember,
    SignGroup,
    some,
)

_MOST_SWEEPS = 20
_MOST_TURNS = 200
_SETTLED = 1e-6  # rotations that meet each other settle slowly: they go on below what a sweep has to gain


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
    that is left of these groups between two networks of least mass (:func:`~tu_symmetry.alignment.balanced`). Groups
    that act where norms are folded are searched if both networks' are (:func:`~tu_symmetry.fold_norms`).

    Law: the result is no farther from the reference than what it begins with (up to 1e-7 of the weights' squared
    norms).

    Raises:
        SymmetryError: as :func:`~tu_symmetry.weight_matching`.

    Warns:
        SymmetryWarning: groups that are not searched, because norms are not folded that could be.
    """
    match = signed_matching if signs else weight_matching
    found = match(graph, reference_state, state, solver=solver)
    pair = widened(graph, reference_state, state)
    free = tuple(g for g in graph.linears if not any(unfolded(graph, g, one) for one in pair))
    _say_unfolded(graph, [g for g in graph.linears if g not in free])
    graph = replace(graph, linears=free)
    if not signs:
        graph = replace(graph, signs=(), sign_terms={})
    if not graph.linears:
        return found
    search = Rotations(graph, *pair)
    results = [_result(search, found, {}, *search.rotated(found.element))]
    placed, first, told = search.placed()
    still = behind(graph, placed)
    while placed and len(results) <= _MOST_SWEEPS:
        element = match(still, pair[0], told, solver=solver).element
        if len(results) == 1:
            element, _, _ = Rotations(still, pair[0], told).rotated(element)
        turned = linear_tensors(graph, first, pair[1])
        element, maps, sweeps = Rotations(still, pair[0], turned).rotated(element)
        results.append(_result(search, found, first, element, maps, sweeps))
        if len(results) > 2 and results[-1].objective <= results[-2].objective + search.least:
            break
        first = {name: maps[name] @ own for name, own in first.items()}
        told = linear_tensors(graph, first, pair[1])
    return min(results, key=lambda result: result.distance_after)


def _say_unfolded(graph: SymmetryGraph, left: Sequence[LinearGroup]) -> None:
    """Warn of groups that stay out of a search, and need not."""
    groups = [g.name for g in left if all(foldable(graph, gain) for gain in g.constant)]
    if groups:
        warnings.warn(
            f"rotations of {some(groups)} are not searched: gains of normalizations multiply these units one by one. "
            "Fold them into what reads them, which changes no function: tu_symmetry.fold_norms(graph, state) for each "
            "network, before it is aligned",
            SymmetryWarning,
            stacklevel=4,
        )


def behind(graph: SymmetryGraph, placed: Sequence[LinearGroup]) -> SymmetryGraph:
    """A graph where nothing but some linear groups moves their units, and where these come last."""
    mixed: list[PermutationGroup | SignGroup] = [*graph.permutations, *graph.signs]
    still = graph._without({g: "rotations are more than orders and signs" for g in mixed if _met(g, placed)})
    return replace(still, linears=tuple(sorted(graph.linears, key=lambda g: g in placed)))


def _result(
    search: Rotations, start: Matching, first: Maps, element: SignedPermutation, maps: Maps, sweeps: int
) -> Matching:
    """What rotations, then an element and then rotations make of the second of two networks."""
    graph, (reference, state) = search.graph, search.whole
    whole = maps | {name: maps[name] @ own for name, own in first.items()}
    element = SignedPermutation(search.identity | element.permutation, search.named({}) | element.signs)
    moved = linear_tensors(graph, whole, signed_tensors(graph, element, state))
    return replace(
        start,
        permutation=element.permutation,
        signs=element.signs,
        maps=whole,
        objective=inner_product(graph, reference, moved),
        sweeps=start.sweeps + sweeps,
        distance_after=weight_distance(graph, reference, moved),
    )


def _met(group: PermutationGroup | SignGroup, linears: Sequence[LinearGroup]) -> bool:
    """Whether linear groups mix units of a group with each other (not within each, as those of heads are)."""
    pairs = ((m, o) for m in group.members for linear in linears for o in linear.members)
    return any((m.parameter, m.axis) == (o.parameter, o.axis) and _mixes(m, o) for m, o in pairs)


def _mixes(member: PermutationMember | ScaleMember, other: LinearMember) -> bool:
    if isinstance(member, ScaleMember):
        return True
    owner = torch.full((int(max(member.index.max(), other.index.max())) + 1,), -1, device="cpu")
    units = torch.arange(member.index[..., 0].numel(), device="cpu")
    owner[member.index] = units.reshape(*member.index.shape[:-1], 1)
    held = owner[other.index]
    return bool(((held != held[..., :1, :]) & (held >= 0)).any())


class Rotations(Search):
    """Two networks, of whose second the units, signs and rotations move."""

    def placed(self) -> tuple[list[LinearGroup], Maps, dict[str, Tensor]]:
        """Groups of units that what is fixed makes or reads, rotated one behind the other, and their rotations.

        The third result is the state with these units where something tells how they are rotated, and zeros elsewhere.
        """
        movers: dict[str, set[tuple[int, Group]]] = defaultdict(set)
        every: list[PermutationGroup | LinearGroup] = [*self.graph.permutations, *self.graph.linears]
        for group, member in ((g, m) for g in every for m in g.members):
            movers[member.parameter].add((member.axis, group))
        moved, found, maps = dict(self.state), list[LinearGroup](), Maps()
        told = dict(self.whole[1])
        left = [g for g in self.graph.linears if not g.blocks and g.subgroup != "complex"]
        while left:
            anchored = {
                group: [
                    m
                    for m in group.members
                    if all(
                        axis == m.axis or other in found or (isinstance(other, PermutationGroup) and _met(other, found))
                        for axis, other in movers[m.parameter]
                    )
                ]
                for group in left
            }
            best = max(left, key=lambda g: sum(moved[m.parameter].numel() for m in anchored[g]))
            if not anchored[best]:
                break
            left.remove(best)
            found.append(best)
            gram = self._gram(replace(best, members=tuple(anchored[best])), moved)[0, :, 0]
            maps[best.name] = closest_matrices(best, gram)
            moved = linear_tensors(self.graph, {best.name: maps[best.name]}, moved)
            turn, sizes, back = torch.linalg.svd(gram)
            part = (turn * (sizes > 1e-6 * sizes[0])) @ back
            for member in best.members:
                for name in self.graph.aliases[member.parameter]:
                    told[name] = mix_axis(told[name], member, part, len(self.graph.shapes[member.parameter]))
        return found, maps, told

    def rotated(
        self, element: SignedPermutation, sweeps: int = _MOST_SWEEPS, turns: int = _MOST_TURNS
    ) -> tuple[SignedPermutation, Maps, int]:
        """From an element to one that no step improves, with its rotations, and the number of sweeps."""
        still = {
            g.name: torch.eye(g.size, dtype=torch.float64, device="cpu").expand(g.shape) for g in self.graph.linears
        }
        best = element, still, self.value(element)
        for sweep in range(1, sweeps + 1):
            for family in self.families:
                element = self._blocks(family, element)
            moved = signed_tensors(self.graph, element, self.state)
            maps = self._procrustes(moved, turns)
            moved = linear_tensors(self.graph, maps, moved)
            for family in map(self._unmixed, self.families):
                if not self._mixed(family.root):
                    step = self.step(family, moved, family.tensors)
                    if self.stays(step):
                        continue
                    there = signed_tensors(self.graph, step, moved)
                    if self.product(there) > self.product(moved) + self.least:
                        moved, element = there, compose_signed(self.graph, step, element)
            value = self.product(moved)
            if value <= best[2] + self.least:
                return (*best[:2], sweep)
            best = element, maps, value
        return (*best[:2], sweeps)

    def _procrustes(self, moved: Mapping[str, Tensor], turns: int) -> Maps:
        """The rotations of all groups, one after the other until nothing gains."""
        found: Maps = {}
        for _ in range(turns):
            before = self.product(moved)
            for group in self.graph.linears:
                gram = self._gram(group, moved)
                blocks = torch.arange(len(gram), device="cpu")
                rotation = closest_matrices(group, gram[blocks, :, blocks].reshape(group.shape))
                moved = linear_tensors(self.graph, {group.name: rotation}, moved)
                found[group.name] = rotation @ found[group.name] if group.name in found else rotation
            if self.product(moved) <= before + _SETTLED * self.least:
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
        """Whether a linear group mixes what a group permutes (pairs of units do not: their blocks move whole)."""
        return _met(group, [g for g in self.graph.linears if g.subgroup != "complex"])

    def _unmixed(self, family: Family) -> Family:
        """A family without the groups inside it that rotations permute as well."""
        return replace(family, children=tuple(c for c in family.children if not self._mixed(c)))

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
                    every = units[:, 0].bincount(minlength=family.root.size) if bool((units >= 0).all()) else units[:0]
                    if bool((units == units[:, :1]).all()) and bool((every == every[:1]).all()) and len(every):
                        found.append((group, units[:, 0]))
                    break
        return found

    def _blocks(self, family: Family, element: SignedPermutation) -> SignedPermutation:
        """Pair the blocks of a family whose units are rotated by what the best rotations give."""
        rotated = self._rotated(family)
        if not rotated or family.coupled:
            return element
        moved = signed_tensors(self.graph, element, self.state)
        kept = self._unmixed(family)
        paired = {m.parameter for group, _ in rotated if group.subgroup == "complex" for m in group.members}
        told = [name for name in family.tensors if name not in paired]
        pairs = {g.name: PairSigns(self.parts(family, g, moved, told), {}, self.zeros(g)) for g in kept.groups}
        best = {name: pair.best.clone() for name, pair in pairs.items()}
        for group, units in rotated:
            gram = self._gram(group, moved).permute(0, 2, 1, 3)
            inside = units.argsort(stable=True).reshape(family.root.size, -1)  # the blocks of each unit of the root
            for own in inside.T:
                part = gram[own.unsqueeze(1), own]
                speaks = (closest_matrices(replace(group, blocks=part.shape[:2]), part) * part).sum((-2, -1))
                best[family.root.name] += speaks
        permutation = assign_family(kept, best)
        signs: dict[int, int] = {}
        for own in kept.groups:
            signs |= pairs[own.name].signs(flat_source(own, permutation))
        step = SignedPermutation(self.identity | permutation, self.named(signs))
        return compose_signed(self.graph, step, element)
