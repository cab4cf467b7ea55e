"""From a ledger that follows linear maps to the groups of units that matrices may mix.

Units that may be permuted, which no operator but linear ones has met, may be mixed. Which tensors are mixed by the
inverse, their scales tell: each unit of a general linear group has a factor of its own, which multiplies some tensors
and divides others. Where no factor is free but every sign is, the same tensor makes and reads units, and orthogonal
matrices remain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from tu_symmetry.symmetry.algebra import ZERO
from tu_symmetry.symmetry.extraction import permutation_groups
from tu_symmetry.symmetry.groups import LinearGroup, LinearMember, PermutationGroup, numbers_at, unique
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.scale_solver import ScaleSystem


def linear_groups(ledger: Ledger, order: Sequence[str], buffers: Collection[str]) -> tuple[LinearGroup, ...]:
    """The linear groups of a ledger that follows linear maps."""
    groups, _ = permutation_groups(ledger, order)
    outer = {g.parent for g in groups}
    systems = ScaleSystem(ledger), ScaleSystem(replace(ledger, kind="signs"))
    alike: dict[tuple[object, ...], list[list[LinearMember]]] = defaultdict(list)  # blocks of one group
    for group in groups:
        if group.size < 2 or group.name in outer or any(m.parameter in buffers for m in group.members):
            continue
        for orthogonal, system in enumerate(systems):
            members = _oriented(ledger, system, group)
            if members:
                shapes = [(m.parameter, m.axis, m.exponent, m.within_axis, m.index.shape) for m in members]
                alike[(orthogonal, group.size, *shapes)].append(members)
                break
    found: list[LinearGroup] = []
    for key, blocks in alike.items():
        members = [_stacked([held[k] for held in blocks]) for k in range(len(blocks[0]))]
        name = unique(members[0].parameter.rpartition(".")[0] or members[0].parameter, [g.name for g in found])
        shape = tuple(members[0].index.shape[:-2])
        found.append(LinearGroup(name, members[0].index.shape[-2], tuple(members), shape, bool(key[0])))
    return tuple(found)


def _oriented(ledger: Ledger, system: ScaleSystem, group: PermutationGroup) -> list[LinearMember]:
    """The members of a group with their exponents; none where its units have no factor of their own everywhere."""
    found: list[LinearMember] = []
    factors = set()
    for member in group.members:
        value = ledger.parameters[member.parameter]
        columns: dict[float, list[int]] = defaultdict(list)
        for exponent, variables in system.expand(value.scale, value.ndim):
            numbers = numbers_at(torch.from_numpy(np.where(variables == ZERO, -1, variables)), member)
            for k, column in enumerate([] if numbers is None else numbers.T.tolist()):
                if len(set(column)) > 1:  # a factor that all units share says nothing of them
                    factors.add(tuple(column))
                    columns[exponent].append(k)
        if sorted(k for held in columns.values() for k in held) != list(range(member.index.shape[-1])):
            return []
        for exponent, held in columns.items():
            own = member.parameter, member.axis, member.index[..., held], member.within_axis, member.within
            found.append(LinearMember(*own, exponent=exponent))
    one = next(iter(factors)) if len(factors) == 1 else ()
    whole = one and min(one) >= 0 and len(set(one)) == len(one) and all(abs(m.exponent) == 1 for m in found)
    return found if whole else []


def _stacked(blocks: Sequence[LinearMember]) -> LinearMember:
    """One member for those of several blocks."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    index = torch.stack([b.index for b in blocks])
    within = None if first.within is None else torch.stack([b.within for b in blocks if b.within is not None])
    return replace(first, index=index, within=within)
