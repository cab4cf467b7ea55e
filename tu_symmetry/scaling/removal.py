"""Removing symmetries from one network: scale first, then order.

After both steps two networks that differ by a symmetry alone have equal weights, so that distances between weight
vectors compare functions (arXiv 2310.08287: the NS variant of the maximum mean discrepancy).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.alignment.matching import weight_matching
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import PermutationGroup, SymmetryGraph

Key = Literal["max", "first", "mean", "median"]


def remove_symmetries(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    scale: Literal["min_mass", "unit_norm"] | None = "min_mass",
    sort: Key = "max",
    reference: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One representative of a network's orbit: canonical scale, then hidden units in canonical order.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict.
        scale: canonical scale, see :func:`canonicalize`; None leaves the scale as it is.
        sort: how units are ordered, descending: by their largest incoming weight (the paper's text), the first (its
            code), the mean or the median. Ties are broken by the units' remaining incoming weights, in order of size.
            Blocks (heads) are ordered after the units in them, by the sum of their keys.
        reference: a state dict to align to instead of sorting. Aligning is the better choice where nearby networks
            should stay nearby: sorting tears apart units whose keys are almost equal.

    Returns:
        A new state dict that computes the same function. Residual streams and other tied axes are ordered as one.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
    """
    graph.require_verified()
    graph.check_state(state)
    current = dict(state) if scale is None else canonicalize(graph, state, scale).state
    if reference is not None:
        target = reference if scale is None else canonicalize(graph, reference, scale).state
        return permute_tensors(graph, weight_matching(graph, target, current).permutation, current)
    for group in sorted(graph.permutations, key=lambda g: -len(g.blocks)):  # units in blocks before the blocks
        current = permute_tensors(graph, _order(graph, group, current, sort), current)
    return current


def _order(graph: SymmetryGraph, group: PermutationGroup, state: Mapping[str, Tensor], sort: Key) -> Permutation:
    """The element that sorts one group, descending."""
    keys = _keys(graph, group, state, sort)
    order = torch.arange(group.size).expand(group.shape).clone()
    for column in reversed(range(keys.shape[-1])):  # stable sorts, the first column last: lexicographic order
        column_keys = torch.gather(keys[..., column], -1, order)
        order = torch.gather(order, -1, column_keys.argsort(dim=-1, descending=True, stable=True))
    return {group.name: order}


def _keys(graph: SymmetryGraph, group: PermutationGroup, state: Mapping[str, Tensor], sort: Key) -> Tensor:
    """Sorting keys ``[*blocks, size, columns]``: of the first tensor whose leading axis the units index."""
    members = [m for m in group.members if m.parameter not in graph.buffers and m.within_axis is None] or list(
        group.members
    )
    member = min(members, key=lambda m: (m.axis != 0, list(graph.shapes).index(m.parameter)))
    tensor = state[member.parameter].detach().to("cpu", torch.float64)
    if member.within_axis is not None and member.within is not None and not group.blocks:  # a packed member's own rows
        tensor = tensor.index_select(member.within_axis, member.within.reshape(-1))
    tensor = tensor.movedim(member.axis, 0)
    rows = tensor[member.index.reshape(-1)].reshape(*group.shape, -1)
    ordered = rows.sort(dim=-1, descending=True).values
    first = {
        "max": ordered[..., :1],
        "first": rows[..., :1],
        "mean": rows.mean(-1, keepdim=True),
        "median": rows.median(-1, keepdim=True).values,
    }[sort]
    return torch.cat([first, ordered[..., : min(8, ordered.shape[-1])]], dim=-1)
