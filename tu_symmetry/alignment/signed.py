"""Signed permutations: the order and the signs of hidden units that bring one network closest to another.

A unit that may change its sign is paired by the magnitude of what speaks for it, and then takes the sign that it has:
one assignment finds both. Networks are first matched front to back, each group by those tensors alone whose other axes
are matched already, since random signs elsewhere hide everything.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, family_value, flat_source
from tu_symmetry.alignment.gram import (
    Family,
    each_working,
    families,
    member_gram,
    own_member,
    trainable_members,
    widened,
)
from tu_symmetry.alignment.matching import (
    Matching,
    Solver,
    check_pair,
    inner_product,
    weight_distance,
    weight_matching,
)
from tu_symmetry.symmetry.action import compose_signed, sign_tensors, signed_tensors
from tu_symmetry.symmetry.elements import SignedPermutation, Signs, identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember, numbers_at
from tu_symmetry.transfer import numbers

_ROUNDING = 1e-7  # gains below this part of the weights' squared norms are not told from rounding
_MOST_SWEEPS = 100
_MOST_SHARED = 3  # signs that all units of a family share, of which every choice is tried


def signed_matching(
    graph: SymmetryGraph,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    solver: Solver = "frank_wolfe",
    init: SignedPermutation | None = None,
) -> Matching:
    """Find the signed permutation of ``state`` that brings it closest to ``reference_state`` in weight space.

    It maximizes ``sum_T <reference_T, moved_T>`` over all parameters, by coordinate descent: over one group of units
    and their signs after the other, each exactly, and over signs that belong to no unit (those of whole blocks, which a
    GroupNorm has). It begins at what :func:`~tu_symmetry.weight_matching` finds with the ``solver``, and at a matching
    from front to back; the better end counts. With ``init`` it begins there alone.

    Law: the result is no farther from the reference than that of weight matching, or than ``init`` (up to 1e-7 of the
    weights' squared norms).

    Raises:
        SymmetryError: as :func:`~tu_symmetry.weight_matching`.
    """
    check_pair(graph, reference_state, state)
    wide = widened(graph, reference_state, state)
    search = Search(graph, *wide)
    identity = identity_permutation(graph)
    still: Signs = {g.name: torch.ones(g.size, dtype=torch.int64, device="cpu") for g in graph.signs}
    before = weight_distance(graph, reference_state, state)
    if init is not None:
        starts = [SignedPermutation(identity | init.permutation, still | init.signs)]
    else:
        plain = weight_matching(graph, *wide, solver=solver).permutation
        starts = [SignedPermutation(plain, still), search.front_to_back(SignedPermutation(identity, still))]
    found = [search.improved(start) for start in starts]
    element, sweeps, converged = max(found, key=lambda end: search.value(end[0]))
    moved = signed_tensors(graph, element, state)
    after = weight_distance(graph, reference_state, moved)
    objective = inner_product(graph, reference_state, moved)
    return Matching(element.permutation, objective, sweeps, converged, before, after, (), element.signs)


Own = tuple[int, ...]  # the numbers of signs of which each unit of a group has one
Sign = int | Own  # or of one that all units share


class PairSigns:
    """What speaks for pairing the units of one group, ``[units, units]`` each, by the signs that multiply it.

    ``best`` is the most that each pair can give. Signs that several parts have in common (a stream's, which also turns
    the gains of all norms that read it) are tried both ways, the others follow, each by itself.
    """

    def __init__(self, parts: Mapping[frozenset[Sign], Tensor], shared: Mapping[int, int], like: Tensor) -> None:
        def turned(key: frozenset[Sign], gram: Tensor) -> Tensor:
            return gram * math.prod(shared.get(sign, 1) for sign in key if isinstance(sign, int))

        plain = like.clone()
        own: list[tuple[frozenset[Own], Tensor]] = []
        for key, gram in parts.items():
            signs = frozenset(sign for sign in key if not isinstance(sign, int))
            if signs:
                own.append((signs, turned(key, gram)))
            else:
                plain += turned(key, gram)
        hubs: list[Own] = []
        while crowded := [sign for signs, _ in own if len(signs - set(hubs)) > 1 for sign in signs - set(hubs)]:
            hubs.append(max(crowded, key=crowded.count))
        self.hubs, self.choices = hubs, list(itertools.product((1, -1), repeat=min(len(hubs), _MOST_SHARED)))
        self.leaves: list[dict[Own, Tensor]] = []
        totals = []
        for choice in self.choices:
            held = dict(zip(hubs, choice, strict=False))
            total = plain.clone()
            leaves: dict[Own, Tensor] = {}
            for signs, gram in own:
                gram = gram * math.prod(held.get(sign, 1) for sign in signs if sign in hubs)
                free = [sign for sign in signs if sign not in hubs]
                if free:
                    leaves[free[0]] = leaves.get(free[0], 0) + gram
                else:
                    total += gram
            totals.append(sum((leaf.abs() for leaf in leaves.values()), total))
            self.leaves.append(leaves)
        self.totals = totals
        self.best = torch.stack(totals).amax(0) if len(totals) > 1 else totals[0]

    def signs(self, source: Tensor) -> dict[int, int]:
        """The signs of all units, by their numbers, where each unit comes from a ``source``."""
        rows = torch.arange(len(source), device="cpu")
        chosen = torch.stack([total[rows, source] for total in self.totals]).argmax(0).tolist()
        found: dict[int, int] = {}
        for row, (at, choice) in enumerate(zip(source.tolist(), chosen, strict=True)):
            for hub, sign in zip(self.hubs, self.choices[choice], strict=False):
                found[hub[row]] = sign
            for leaf, gram in self.leaves[choice].items():
                found[leaf[row]] = -1 if gram[row, at] < 0 else 1
        return found


class Search:
    """Two networks, of whose second the units and signs move."""

    def __init__(self, graph: SymmetryGraph, reference: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        self.graph, self.whole = graph, (reference, state)
        self.state = dict(each_working(graph, state))
        self.reference = {n: t.to(self.state[n]) for n, t in each_working(graph, reference)}
        self.families = families(graph)
        self.least = _ROUNDING * math.prod(inner_product(graph, one, one) ** 0.5 for one in self.whole)
        self.identity = identity_permutation(graph)
        self.twice = {  # tensors that one family moves along several axes
            name
            for family in self.families
            for name in family.tensors
            if len({m.axis for g in family.groups for m in g.members if m.parameter == name and m.within is None}) > 1
        }

    def value(self, element: SignedPermutation) -> float:
        """Inner product of the two networks, the second one moved."""
        return self.product(signed_tensors(self.graph, element, self.state))

    def product(self, moved: Mapping[str, Tensor]) -> float:
        """Inner product of some of the second network's tensors with the first one's."""
        return sum(numbers([(self.reference[n] * t).sum(dtype=torch.float64) for n, t in moved.items()]))

    def stays(self, step: SignedPermutation) -> bool:
        """Whether a step moves nothing."""
        turned = any(bool((signs < 0).any()) for signs in step.signs.values())
        return not turned and all(torch.equal(p, self.identity[name]) for name, p in step.permutation.items())

    def front_to_back(self, element: SignedPermutation) -> SignedPermutation:
        """Match each family by what only it and matched families move, first the family of which that is most."""
        moved = signed_tensors(self.graph, element, self.state)
        left = list(self.families)
        movers = Counter(t for family in left for t in family.tensors)  # families to come that move a tensor

        def known(family: Family) -> list[str]:
            return [t for t in family.tensors if movers[t] == 1]

        def share(family: Family) -> float:
            told, every = (sum(self.state[t].numel() for t in names) for names in (known(family), family.tensors))
            return told / max(every, 1)

        while left:
            family = max(left, key=share)
            told = known(family)
            once = [t for t in told if t not in self.twice]
            step = self.step(family, moved, once or told or family.tensors)
            left.remove(family)
            movers.subtract(family.tensors)
            moved = signed_tensors(self.graph, step, moved)
            element = compose_signed(self.graph, step, element)
        return element

    def improved(self, element: SignedPermutation, sweeps: int = _MOST_SWEEPS) -> tuple[SignedPermutation, int, bool]:
        """Coordinate descent until nothing gains: the element, the number of sweeps, and whether it converged."""
        for sweep in range(1, sweeps + 1):
            before = self.value(element)
            moved = signed_tensors(self.graph, element, self.state)
            for family in self.families:
                step = self.step(family, moved, family.tensors)
                if self.stays(step):
                    continue
                here = {n: moved[n] for n in moved if n in family.tensors or n in self.graph.sign_terms}
                there = signed_tensors(self.graph, step, here)
                if self.product(there) > self.product(here) + self.least:
                    moved, element = moved | there, compose_signed(self.graph, step, element)
            if any(f.coupled for f in self.families):
                reference, state = self.whole
                state = signed_tensors(self.graph, element, state)
                found = weight_matching(self.graph, reference, state, solver="descent", look_again=False)
                element = compose_signed(self.graph, SignedPermutation(found.permutation, {}), element)
            element = self._turned(element)
            if self.value(element) <= before + self.least:
                return element, sweep, True
        return element, sweeps, False

    def step(self, family: Family, moved: Mapping[str, Tensor], tensors: Collection[str]) -> SignedPermutation:
        """The order of a family's units, and the signs that they own or share, that pair them best by some tensors."""
        parts = {group.name: self.parts(family, group, moved, tensors) for group in family.groups}
        shared = {sign for held in parts.values() for key in held for sign in key if isinstance(sign, int)}
        trials = []
        for choice in itertools.product((1, -1), repeat=min(len(shared), _MOST_SHARED)):
            signs = dict(zip(sorted(shared), choice, strict=False))
            grams = {g.name: PairSigns(parts[g.name], signs, self.zeros(g)) for g in family.groups}
            best = {name: gram.best for name, gram in grams.items()}
            permutation = assign_family(family, best)
            trials.append((family_value(family, best, permutation)[0], permutation, grams, signs))
        _, permutation, grams, signs = max(trials, key=lambda trial: trial[0])
        for group in family.groups:
            signs |= grams[group.name].signs(flat_source(group, permutation))
        return SignedPermutation(self.identity | permutation, self.named(signs))

    def named(self, signs: Mapping[int, int]) -> Signs:
        """Signs by the names of their groups, for some of them by their numbers."""
        flat = torch.ones(sum(g.size for g in self.graph.signs), dtype=torch.int64, device="cpu")
        for number, sign in signs.items():
            flat[number] = sign
        parts = flat.split([g.size for g in self.graph.signs])
        return {g.name: part for g, part in zip(self.graph.signs, parts, strict=True)}

    def parts(
        self, family: Family, group: PermutationGroup, moved: Mapping[str, Tensor], tensors: Collection[str]
    ) -> dict[frozenset[Sign], Tensor]:
        """Gram matrices of a group, by the signs that multiply what they are made of."""
        found: dict[frozenset[Sign], Tensor] = {}
        for member in trainable_members(self.graph, group):
            part = own_member(member, family.below(group)) if member.parameter in tensors else None
            for key, columns in _columns(self.graph, part) if part is not None else ():
                gram = member_gram(columns, self.reference[member.parameter], moved[member.parameter])
                found[key] = found.get(key, self.zeros(group)) + gram.to("cpu", torch.float64)
        return found

    def zeros(self, group: PermutationGroup) -> Tensor:
        """A Gram matrix of a group's units that says nothing."""
        units = math.prod(group.shape)
        return torch.zeros(units, units, dtype=torch.float64, device="cpu")

    def _turned(self, element: SignedPermutation) -> SignedPermutation:
        """Turn signs, group by group, as long as that gains."""
        graph = self.graph
        moved = signed_tensors(graph, element, self.state)
        gains = {n: self.reference[n] * moved[n] for n in graph.sign_terms if n in moved}
        starts = np.cumsum([0, *(g.size for g in graph.signs)]).tolist()
        turned = True
        while turned:
            turned = False
            for group, start in zip(graph.signs, starts, strict=False):
                speaks = torch.zeros(group.size, dtype=torch.float64, device="cpu")
                times: Counter[str] = Counter()
                for name, term in ((n, t) for n in gains for t in graph.sign_terms[n]):
                    own = (term.index >= start) & (term.index < start + group.size)
                    if own.any():
                        times[name] += 1
                        sums = gains[name].double().sum_to_size(term.index.shape).cpu()
                        speaks.index_add_(0, term.index[own] - start, sums[own])
                against = torch.where(speaks < -self.least, -1, 1)
                if times and max(times.values()) > 1:  # they meet each other: one at a time
                    against = torch.where(torch.arange(group.size, device="cpu") == speaks.argmin(), against, 1)
                if not bool((against < 0).any()):
                    continue
                signs = {group.name: against}
                there = sign_tensors(graph, signs, {n: gains[n] for n in times})
                if sum(float(t.double().sum() - gains[n].double().sum()) for n, t in there.items()) <= self.least:
                    continue
                gains |= there
                element = compose_signed(graph, SignedPermutation(self.identity, signs), element)
                turned = True
        return element


def _columns(graph: SymmetryGraph, member: PermutationMember) -> Iterator[tuple[frozenset[Sign], PermutationMember]]:
    """The positions of a member by the signs that they turn with; none where signs and units do not go together."""
    held: dict[frozenset[Sign], list[int]] = {}
    terms = [t.index for t in graph.sign_terms.get(member.parameter, ())]
    along = [found for t in terms if (found := numbers_at(t, member)) is not None]
    whole = [int(t) for t in terms if t.numel() == 1]
    for column in range(member.index.shape[-1]):
        key: set[Sign] = set(whole)
        for at in (tuple(t[:, column].tolist()) for t in along):
            if len(set(at)) == len(at) > 1 and min(at) >= 0:
                key.add(at)
            elif len(set(at)) == 1 and at[0] >= 0:
                key.add(at[0])
        held.setdefault(frozenset(key), []).append(column)
    for signs, columns in held.items():
        yield signs, replace(member, index=member.index[..., columns])
