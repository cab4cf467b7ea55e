"""From a ledger that follows linear maps to the groups of units that matrices may mix.

Units that may be permuted, which no operator but linear ones has met, may be mixed. Which tensors are mixed by the
inverse, their scales tell: each unit of a general linear group has a factor of its own, which multiplies some tensors
and divides others. Where no factor is free but every sign is, the same tensor makes and reads units, and orthogonal
matrices remain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import torch

from tu_symmetry.symmetry.algebra import ZERO
from tu_symmetry.symmetry.extraction import permutation_groups
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import LinearGroup, LinearMember, PermutationGroup, ScaleMember, numbers_at, unique
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.scale_solver import ScaleSystem


def linear_groups(ledger: Ledger, order: Sequence[str], buffers: Collection[str]) -> tuple[LinearGroup, ...]:
    """The linear groups of a ledger that follows linear maps."""
    met = {f"{number} {gain}": value for (number, gain), value in ledger.met.items()}  # read as tensors of their own
    ledger = replace(ledger, parameters={**ledger.parameters, **met})
    groups, _ = permutation_groups(ledger, [*order, *met])
    outer = {g.parent for g in groups}
    systems = ScaleSystem(ledger), ScaleSystem(replace(ledger, kind="signs"))
    alike: dict[tuple[Any, ...], list[list[LinearMember]]] = defaultdict(list)  # blocks of one group
    for group in groups:
        if group.size < 2 or group.name in outer or any(m.parameter in buffers for m in group.members):
            continue
        for subgroup, system in zip(("general", "orthogonal"), systems, strict=True):
            members = _oriented(ledger, system, group)
            if members:
                gains = [m.parameter.partition(" ")[2] for m in members if m.parameter in met]
                members = [m for m in members if m.parameter not in met]
                shapes = [(m.parameter, m.axis, m.exponent, m.within_axis, m.index.shape) for m in members]
                kind = "centered" if "" in gains else subgroup
                alike[(kind, tuple(sorted({*gains} - {""})), group.size, *shapes)].append(members)
                break
    found: list[LinearGroup] = []
    for (subgroup, constant, *_), blocks in alike.items():
        members = [_stacked([held[k] for held in blocks]) for k in range(len(blocks[0]))]
        name = unique(members[0].parameter.rpartition(".")[0] or members[0].parameter, [g.name for g in found])
        shape = tuple(members[0].index.shape[:-2])
        found.append(LinearGroup(name, members[0].index.shape[-2], tuple(members), shape, subgroup, constant))
    return tuple(found)


def rotary_groups(graph: SymmetryGraph) -> tuple[LinearGroup, ...]:
    """Guesses: pairs of units that scale together in all that makes and reads them, as rotary positions make pairs.

    A complex number may multiply each pair, where what the pair goes through commutes with rotations.
    """
    found: list[LinearGroup] = []
    start = 0
    for group in graph.scales:
        numbers = np.arange(start, start + group.size)
        start += group.size
        held: list[tuple[ScaleMember, list[list[int]]]] = []
        for member in group.members:
            terms = [t.index for t in graph.scale_terms[member.parameter] if t.exponent == member.exponent]
            if member.axis is None or member.buffer or abs(member.exponent) != 1:
                break
            own = [t.reshape(-1).numpy() for t in terms if t.numel() == t.shape[member.axis]]
            held.append((member, [sorted(int(k) for t in own for k in np.flatnonzero(t == n)) for n in numbers]))
        else:
            pairs = [u for u in range(group.size) if all(at[u] and len(at[u]) % 2 == 0 for _, at in held)]
            members = tuple(
                LinearMember(
                    member.parameter,
                    member.axis,
                    torch.tensor([at[u] for u in pairs], device="cpu").reshape(len(pairs), -1, 2).mT,
                    exponent=member.exponent,
                )
                for member, at in held
                if pairs and member.axis is not None and len({len(at[u]) for u in pairs}) == 1
            )
            if members and len(members) == len(held) and len({m.exponent for m in members}) == 2:
                name = unique(group.name, [g.name for g in (*graph.linears, *found)])
                found.append(LinearGroup(name, 2, members, (len(pairs),), "complex"))
    return tuple(found)


def _oriented(ledger: Ledger, system: ScaleSystem, group: PermutationGroup) -> list[LinearMember]:
    """The members of a group with their exponents; none where its units have no factor of their own everywhere."""
    found: list[LinearMember] = []
    factors = set()
    for member in group.members:
        value = ledger.parameters[member.parameter]
        held = [Counter[tuple[float, int]]() for _ in range(member.index[..., 0].numel() * member.index.shape[-1])]
        for exponent, variables in system.expand(value.scale, value.ndim):
            numbers = numbers_at(torch.from_numpy(np.where(variables == ZERO, -1, variables)), member)
            for k, number in enumerate([] if numbers is None else numbers.T.flatten().tolist()):
                held[k][exponent, number] += number >= 0
        columns: dict[float, list[int]] = defaultdict(list)
        size = len(held) // member.index.shape[-1]
        for k in range(member.index.shape[-1]):
            own = held[k * size : (k + 1) * size]
            common = reduce(and_, own)  # a factor that all units share says nothing of them
            left = [[*(units - common).elements()] for units in own]
            if any(len(one) != 1 for one in left) or len({exponent for ((exponent, _),) in left}) > 1:
                return []
            factors.add(tuple(number for ((_, number),) in left))
            columns[left[0][0][0]].append(k)
        for exponent, copies in columns.items():
            place = member.parameter, member.axis, member.index[..., copies], member.within_axis, member.within
            found.append(LinearMember(*place, exponent=exponent))
    one = next(iter(factors)) if len(factors) == 1 else ()
    return found if one and len(set(one)) == len(one) and all(abs(m.exponent) == 1 for m in found) else []


def _stacked(blocks: Sequence[LinearMember]) -> LinearMember:
    """One member for those of several blocks."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    index = torch.stack([b.index for b in blocks])
    within = None if first.within is None else torch.stack([b.within for b in blocks if b.within is not None])
    return replace(first, index=index, within=within)
