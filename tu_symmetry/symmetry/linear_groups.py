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
        held: list[tuple[ScaleMember, list[list[int]]]] = []
        for member in group.members:
            if member.axis is None or member.buffer or abs(member.exponent) != 1:
                break
            terms = [t.index for t in graph.scale_terms[member.parameter] if t.exponent == member.exponent]
            own = [t.reshape(-1).numpy() for t in terms if t.numel() == t.shape[member.axis]]
            number = np.concatenate([np.empty(0, np.int64), *own]) - start
            entry = np.concatenate([np.empty(0, np.int64), *(np.arange(len(t)) for t in own)])
            entry, number = (part[(number >= 0) & (number < group.size)] for part in (entry, number))
            copies = np.bincount(number, minlength=group.size)
            if not copies[copies % 2 == 0].any():
                break  # no unit has pairs
            ends = np.cumsum(copies).tolist()
            ordered = entry[np.lexsort((entry, number))].tolist()
            held.append((member, [ordered[end - n : end] for end, n in zip(ends, copies.tolist(), strict=True)]))
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
        start += group.size
    return tuple(found)


def _oriented(ledger: Ledger, system: ScaleSystem, group: PermutationGroup) -> list[LinearMember]:
    """The members of a group with their exponents; none where its units have no factor of their own everywhere."""
    found: list[LinearMember] = []
    factors = set()
    for member in group.members:
        value = ledger.parameters[member.parameter]
        exponents = np.zeros(0)
        numbers = np.empty((0, member.index[..., 0].numel() * member.index.shape[-1]), np.int64)
        for exponent, variables in system.expand(value.scale, value.ndim):
            told = numbers_at(torch.from_numpy(np.where(variables == ZERO, -1, variables)), member)
            if told is not None:
                numbers = np.concatenate([numbers, told.T.reshape(1, -1).numpy()])
                exponents = np.append(exponents, exponent)
        columns: dict[float, list[int]] = defaultdict(list)
        for k, left in enumerate(np.split(numbers, member.index.shape[-1], axis=1)):
            left, units = left.copy(), np.arange(left.shape[1])
            for exponent, number in {*zip(exponents.tolist(), left[:, 0].tolist(), strict=True)}:
                same = (left == number) & (exponents == exponent)[:, None] & (left >= 0)
                for _ in range(same.sum(axis=0).min()):  # a factor that all units share says nothing of them
                    first = same.argmax(axis=0)
                    left[first, units], same[first, units] = -1, False
            if not ((left >= 0).sum(axis=0) == 1).all():
                return []
            first = (left >= 0).argmax(axis=0)
            if len({*exponents[first].tolist()}) > 1:
                return []
            factors.add(tuple(left[first, units].tolist()))
            columns[float(exponents[first[0]])].append(k)
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
