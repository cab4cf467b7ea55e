"""Unit norm for what makes each unit, front to back, as the released code of arXiv 2310.08287 does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tu_symmetry.scaling.masses import FAR, MassTables, filter_counts
from tu_symmetry.symmetry.action import largest_entry
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import ScaleGroup


def unit_scales(
    graph: SymmetryGraph, state: Mapping[str, Tensor], groups: Sequence[ScaleGroup], *, mean_square: bool
) -> tuple[Tensor, Tensor]:
    """Log-factors that give every unit's maker unit norm (or a mean square of one).

    What a normalization group multiplies gets a norm of one on average over its filters.

    A unit's makers are the matrices that grow with its factor or, where there are none (the affine parameters of a
    normalization), the first tensor that does, which is the gain. A maker's entries also depend on the factors of the
    units that feed it. Groups (the graph's scale groups, or these and its normalization groups) are therefore settled
    front to back: each by its first maker (in the state dict's order) that is fed by settled groups alone. Where groups
    only feed each other, the first takes the others as they are.

    Returns:
        Log-factors ``[count]``, and a mask ``[count]`` of the units whose maker is zero (their log-factor is zero).
    """
    whole = len(groups) > len(graph.scales)
    count = sum(g.size for g in groups)
    owner = torch.repeat_interleave(
        torch.arange(len(groups), device="cpu"), torch.tensor([g.size for g in groups], dtype=torch.long, device="cpu")
    )
    s, lost = torch.zeros(count, dtype=torch.float64, device="cpu"), torch.zeros(count, dtype=torch.bool, device="cpu")
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
        log_mass = _log_mass(graph, name, state[name], s, whole)[units]
        size = torch.ones_like(log_mass)
        if k >= len(graph.scales):
            size = filter_counts(graph, [name], count)[units]
        if mean_square:
            ones = {name: torch.ones(graph.shapes[name], device="cpu")}
            entries = MassTables(graph, ones, [name], normalizations=whole).at(np.zeros(count))
            size = torch.from_numpy(entries.grows)[units]
        lost[units] = log_mass == -math.inf
        s[units] = torch.where(lost[units], 0.0, 0.5 * (size.log() - log_mass))
    return s, lost


def _log_mass(graph: SymmetryGraph, name: str, tensor: Tensor, s: Tensor, whole: bool) -> Tensor:
    """Logarithms ``[count]`` of the mass of one tensor that grows with each factor, at log-factors ``s``."""
    exponent = 0
    if tensor.dtype == torch.float64:  # squares of single-precision weights always are in range
        exponent = math.frexp(largest_entry(tensor))[1]
        exponent = exponent if abs(exponent) > 300 else 0
        tensor = tensor * 2.0 ** -(exponent // 2) * 2.0 ** -(exponent - exponent // 2)
    tables = MassTables(graph, {name: tensor}, [name], normalizations=whole)
    if float(s.abs().max()) > FAR or exponent:
        logs = tables.log_grows(s.numpy())
    else:
        with np.errstate(divide="ignore"):
            logs = np.log(tables.at(s.numpy()).grows)
    return torch.from_numpy(logs) + 2 * exponent * math.log(2)


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
            numbers = (
                index if apart else torch.where(*torch.broadcast_tensors(own, index, torch.tensor(-1, device="cpu")))
            )
            found.update(padded[numbers.unique()].tolist())
    return found - {-1, group}
