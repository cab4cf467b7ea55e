"""Frank-Wolfe on doubly stochastic matrices: a relaxation of weight matching that sees all groups at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tu_symmetry.alignment.gram import Family, WeightVotes, trainable_members
from tu_symmetry.symmetry.elements import Permutation, identity_permutation
from tu_symmetry.symmetry.graph import PermutationMember, SymmetryGraph


def frank_wolfe(
    graph: SymmetryGraph,
    votes: WeightVotes,
    family_list: list[Family],
    *,
    max_iterations: int = 50,
    tolerance: float = 1e-4,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Permutation, int]:
    """Maximize the matching objective over doubly stochastic matrices, then assign.

    Each root group without nested groups is relaxed to a doubly stochastic matrix, started at the barycenter (all
    entries 1/n). The linear oracle is an assignment for each group. Along the step the objective is a polynomial of
    degree two (each tensor is moved along at most two relaxed axes), so the best step has a closed form. Families
    with nested groups stay at the identity here; the descent that follows moves them.

    Returns:
        A permutation, and the number of iterations.
    """
    relaxed = [f for f in family_list if not f.children and all(m.within_axis is None for m in f.root.members)]
    if not relaxed:
        return identity_permutation(graph), 0
    problem = _Relaxation(graph, votes, relaxed)
    current = {f.root.name: problem.barycenter(f.root.size) for f in relaxed}
    previous = problem.value(current)
    iteration = 0
    for iteration in range(1, max_iterations + 1):
        corner = {}
        gap = scale = 0.0
        for name, gradient in problem.gradients(current).items():
            vertex = _vertex(gradient)
            corner[name] = vertex
            gap += float((gradient * (vertex - current[name])).sum())
            scale += float((gradient * vertex).sum().abs())
        if gap <= tolerance * scale:
            break
        middle = problem.value({k: 0.5 * (current[k] + corner[k]) for k in current})
        full = problem.value(corner)
        step = _best_step(previous, middle, full)
        if step <= 0.0:
            break
        current = {k: (1 - step) * current[k] + step * corner[k] for k in current}
        value = problem.value(current)
        if progress is not None:
            progress({"iteration": iteration, "objective": value, "gap": gap})
        if value - previous <= 1e-7 * abs(value):
            previous = value
            break
        previous = value
    result = identity_permutation(graph)
    for name, matrix in current.items():
        _, columns = linear_sum_assignment(matrix.to("cpu", torch.float64).numpy(), maximize=True)
        result[name] = torch.from_numpy(columns.astype("int64"))
    return result, iteration


def _best_step(start: float, middle: float, end: float) -> float:
    """Maximizer on [0, 1] of the parabola through (0, start), (1/2, middle), (1, end)."""
    curvature = 2 * (start + end - 2 * middle)
    slope = end - start - curvature
    if curvature < 0:
        return min(max(-slope / (2 * curvature), 0.0), 1.0)
    return 1.0 if end > start else 0.0


def _vertex(gradient: Tensor) -> Tensor:
    rows, columns = linear_sum_assignment(gradient.to("cpu", torch.float64).numpy(), maximize=True)
    vertex = torch.zeros_like(gradient)
    vertex[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return vertex


class _Relaxation:
    """The relaxed objective ``sum_T <reference_T, (P on each axis) state_T>`` and its gradients."""

    def __init__(self, graph: SymmetryGraph, votes: WeightVotes, relaxed: list[Family]) -> None:
        self.votes = votes
        self.members: dict[str, list[tuple[str, PermutationMember]]] = {}
        for family in relaxed:
            for member in trainable_members(graph, family.root):
                self.members.setdefault(member.parameter, []).append((family.root.name, member))
        self.sizes = {f.root.name: f.root.size for f in relaxed}
        first = next(iter(self.members))
        self.like = votes.state[first]

    def barycenter(self, size: int) -> Tensor:
        return torch.full((size, size), 1.0 / size, dtype=self.like.dtype, device=self.like.device)

    @staticmethod
    def _mix(tensor: Tensor, member: PermutationMember, matrix: Tensor) -> Tensor:
        """A doubly stochastic matrix applied along one axis."""
        index = member.index.to(tensor.device)
        moved = tensor.movedim(member.axis, 0)
        rows = moved.index_select(0, index.reshape(-1)).reshape(index.shape[0], -1)
        mixed = (matrix @ rows).reshape(index.numel(), *moved.shape[1:])
        if index.numel() == moved.shape[0] and bool(
            (index.reshape(-1) == torch.arange(index.numel(), device=tensor.device)).all()
        ):
            return mixed.movedim(0, member.axis)
        result = moved.clone()
        result[index.reshape(-1)] = mixed
        return result.movedim(0, member.axis)

    def value(self, current: Mapping[str, Tensor]) -> float:
        total = 0.0
        for parameter, members in self.members.items():
            tensor = self.votes.state[parameter]
            for name, member in members:
                tensor = self._mix(tensor, member, current[name])
            total += float((self.votes.reference[parameter].double() * tensor.double()).sum())
        return total

    def gradients(self, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {
            name: torch.zeros(n, n, dtype=self.like.dtype, device=self.like.device) for name, n in self.sizes.items()
        }
        for parameter, members in self.members.items():
            reference = self.votes.reference[parameter]
            for name, member in members:
                tensor = self.votes.state[parameter]
                for other_name, other in members:
                    if other is not member:
                        tensor = self._mix(tensor, other, current[other_name])
                index = member.index.to(tensor.device)
                a = reference.movedim(member.axis, 0).index_select(0, index.reshape(-1)).reshape(index.shape[0], -1)
                b = tensor.movedim(member.axis, 0).index_select(0, index.reshape(-1)).reshape(index.shape[0], -1)
                found[name] += a @ b.T
        return found
