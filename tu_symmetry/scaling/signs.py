"""Canonical signs of hidden units."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tu_symmetry.symmetry.elements import Signs
from tu_symmetry.symmetry.graph import SymmetryGraph


def canonical_signs(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> Signs:
    """The signs that make the largest weights of hidden units positive.

    Among the largest entries that each unit has in each of its parameters, the largest ones of all of which every set
    of signs can be asked for are made positive: as many as there are signs, which they determine.

    Law: networks that differ by signs have the same form under :func:`~tu_symmetry.apply_signs`, and those that differ
    by a signed permutation the same up to a permutation, where no two of these entries have equal magnitudes.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: a state dict of one network.

    Returns:
        Group name to int64 ``[size]`` of 1 and -1, on the CPU.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: a stack of states.
    """
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("canonical_signs takes one state, this is a stack: call it for each of its networks")
    count = sum(g.size for g in graph.signs)
    held = [_largest(graph, state, name) for name in graph.sign_terms if name not in graph.buffers]
    values, rows = [v for own, _ in held for v in own], [r for _, own in held for r in own]
    basis: dict[int, int] = {}  # leading sign to a set of signs (bits), with a last bit: whether their product is -1
    for at in sorted(range(len(values)), key=lambda k: -abs(values[k])):
        row = int(values[at] < 0)
        for number in rows[at]:
            row ^= 2 << number
        while row > 1 and row.bit_length() in basis:
            row ^= basis[row.bit_length()]
        if row > 1:
            basis[row.bit_length()] = row
        if len(basis) == count:
            break
    turned = 0
    for lead in sorted(basis):  # the other signs of a row have lower numbers, and are known
        others = (basis[lead] & turned & ~1).bit_count() + (basis[lead] & 1)
        turned |= (others % 2) << (lead - 1)
    flat = torch.tensor([1 - 2 * (turned >> (k + 1) & 1) for k in range(count)], dtype=torch.int64, device="cpu")
    parts = flat.split([g.size for g in graph.signs]) if count else ()
    return {g.name: part for g, part in zip(graph.signs, parts, strict=True)}


def _largest(graph: SymmetryGraph, state: Mapping[str, Tensor], name: str) -> tuple[list[float], list[list[int]]]:
    """The largest entries of all signs in one tensor, and for each the numbers of the signs that turn it."""
    flat = state[name].detach().to("cpu", torch.float64).numpy().reshape(-1)
    shape = tuple(state[name].shape)
    terms = [np.broadcast_to(t.index.numpy(), shape).reshape(-1) for t in graph.sign_terms[name]]
    order = np.argsort(-np.abs(flat), kind="stable")
    firsts = []
    for term in terms:
        numbers, first = np.unique(term[order], return_index=True)
        firsts.append(order[first[numbers >= 0]])
    at = np.unique(np.concatenate(firsts))
    at = at[flat[at] != 0]
    return flat[at].tolist(), [[int(term[k]) for term in terms if term[k] >= 0] for k in at]
