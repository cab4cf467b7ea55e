"""Unit norm for what makes each unit, front to back, as the released code of arXiv 2310.08287 does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tu_symmetry.scaling.masses import MassTables, filter_counts
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import ScaleGroup


def unit_scales(
    graph: SymmetryGraph, state: Mapping[str, Tensor], groups: Sequence[ScaleGroup]
) -> tuple[Tensor, Tensor]:
    """Log-factors that give every unit's maker unit norm; over the filters of a normalization group on average.

    A unit's makers are the matrices that grow with its factor or, where there are none (the affine parameters of a
    normalization), the first tensor that does, which is the gain. A maker's entries also depend on the factors of the
    units that feed it. Groups (the graph's scale groups, or these and its normalization groups) are therefore settled
    front to back: each by its first maker (in the state dict's order) that is fed by settled groups alone. Where groups
    only feed each other, the first takes the others as they are.

    Returns:
        Log-factors ``[count]``, and a mask ``[count]`` of the units whose maker is zero (their log-factor is zero).
    """
    whole = len(groups) > len(graph.scales)
    sizes = torch.tensor([g.size for g in groups], dtype=torch.long, device="cpu")
    owner = torch.repeat_interleave(torch.arange(len(groups), device="cpu"), sizes)
    s = torch.zeros(len(owner), dtype=torch.float64, device="cpu")
    lost = torch.zeros(len(owner), dtype=torch.bool, device="cpu")
    candidates = [
        [(name, _feeding(graph, name, k, owner)) for name in _makers(graph, group)] for k, group in enumerate(groups)
    ]
    waiting = list(range(len(groups)))
    while waiting:
        open_ = set(waiting)
        ready = ((k, name) for k in waiting for name, feeding in candidates[k] if not feeding & open_)
        k, name = next(ready, (waiting[0], candidates[waiting[0]][0][0]))
        waiting.remove(k)
        units = owner == k
        tables = MassTables(graph, {name: state[name]}, [name], normalizations=whole)
        mass = torch.from_numpy(tables.at(s.numpy()).grows)[units]
        if not bool(torch.isfinite(mass).all()):
            raise SymmetryError(f"unit norm needs factors of {name!r} that leave the range of float64")
        size = torch.ones_like(mass)
        if k >= len(graph.scales):
            size = filter_counts(graph, [name], len(owner))[units]
        lost[units] = mass == 0
        s[units] = torch.where(lost[units], 0.0, 0.5 * (size.log() - mass.log()))
    return s, lost


def _makers(graph: SymmetryGraph, group: ScaleGroup) -> list[str]:
    """The matrices that grow with a group's factors, in the state dict's order; without any, the first that grows."""
    growing = {m.parameter for m in group.members if m.exponent > 0 and not m.buffer}
    ordered = [name for name in graph.shapes if name in growing]
    matrices = [n for n in ordered if max(graph.shapes[n], default=1) < math.prod(graph.shapes[n])]
    return matrices or ordered[:1]


def _feeding(graph: SymmetryGraph, name: str, group: int, owner: Tensor) -> set[int]:
    """The groups whose factors also multiply those entries of a tensor that grow with one group."""
    padded = torch.cat([owner, torch.tensor([-1], device="cpu")])  # the slot of -1 and of factors that are held
    terms = [(t.exponent, torch.where(t.index < len(owner), t.index, -1)) for t in graph.scale_terms[name]]
    found: set[int] = set()
    for own in (padded[index] == group for exponent, index in terms if exponent > 0):
        if not bool(own.any()):
            continue
        for _, index in terms:
            apart = all(a == 1 or b == 1 for a, b in zip(own.shape, index.shape, strict=True))
            numbers = index if apart else torch.where(own, index, -1)
            found.update(padded[numbers.unique()].tolist())
    return found - {-1, group}
