"""What each hidden unit reads: its incoming weights, one row for each unit of a permutation group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember


def incoming_weights(graph: SymmetryGraph, group: PermutationGroup, state: Mapping[str, Tensor]) -> Tensor:
    """Weights that make the units of a group: of the first parameter whose leading axis they index.

    Where no parameter has them on its leading axis, the first parameter that they index will do.

    Args:
        graph: the symmetry graph.
        group: one of its permutation groups.
        state: state dict, or a stack of states with leading sample axes.

    Returns:
        Float64 ``[*samples, *group.shape, weights]`` on the CPU. The order of the weights is that of the tensor's
        other axes.
    """
    return unit_rows(graph, group, incoming_member(graph, group), state)


def incoming_member(graph: SymmetryGraph, group: PermutationGroup) -> PermutationMember:
    """The member of a group that :func:`incoming_weights` reads."""
    order = {name: k for k, name in enumerate(graph.shapes)}
    members = [m for m in group.members if m.parameter not in graph.buffers and m.within_axis is None]
    return min(members or group.members, key=lambda m: (m.axis != 0, order[m.parameter]))


def unit_rows(
    graph: SymmetryGraph, group: PermutationGroup, member: PermutationMember, state: Mapping[str, Tensor]
) -> Tensor:
    """The entries of one member's tensor that belong to each unit: float64 ``[*samples, *group.shape, entries]``."""
    tensor = state[member.parameter].detach().to("cpu", torch.float64)
    lead = tensor.ndim - len(graph.shapes[member.parameter])
    samples = tensor.shape[:lead]
    tensor = tensor.flatten(0, lead - 1) if lead else tensor.unsqueeze(0)
    axis = member.axis + 1
    if member.within_axis is None:
        rows = tensor.movedim(axis, 1)[:, member.index.reshape(-1)]
    else:
        assert member.within is not None
        blocks = member.within.reshape(-1, member.within.shape[-1])
        index = member.index.reshape(len(blocks), -1) if member.index.ndim > 2 else member.index.reshape(1, -1)
        moved = tensor.movedim((member.within_axis + 1, axis), (1, 2))
        parts = [
            moved[:, within][:, :, own].transpose(1, 2) for within, own in zip(blocks, index, strict=True)
        ]  # each [samples, units of the block, rows, ...]
        rows = torch.cat([p.flatten(2) for p in parts], dim=1)
    return rows.reshape(*samples, *group.shape, -1)
