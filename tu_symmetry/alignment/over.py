"""Over which symmetries networks are aligned, one word for each kind, and how what moves them is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from torch import Tensor

from tu_symmetry.alignment.balance import balanced
from tu_symmetry.alignment.consensus import Descend, Match, Progress, Reference, Target, find_target, read
from tu_symmetry.alignment.matching import Solver, weight_matching
from tu_symmetry.alignment.moves import Move, move_tensors
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.rotations import rotation_matching
from tu_symmetry.alignment.signed import signed_matching
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.symmetry.graph import SymmetryGraph

Over = Literal["permutations", "signs", "scales", "rotations"]


def check_over(over: Sequence[Over]) -> tuple[Over, ...]:
    """Raise a ValueError unless these are symmetries that networks can be aligned over."""
    known = get_args(Over)
    if isinstance(over, str) or "permutations" not in over or not set(over) <= set(known):
        wrong = [] if isinstance(over, str) else [word for word in over if word not in known]
        said = f" ({', '.join(map(repr, wrong))} is none of them)" if wrong else ""
        raise ValueError(
            f"over={over!r}: pass 'permutations', and beside it what else may move networks, of 'signs', 'scales' and "
            f"'rotations'{said}, as over=('permutations', 'signs')"
        )
    return tuple(over)


@dataclass(frozen=True)
class Plan:
    """What networks are aligned to, and what brings each of them to its least mass before it is matched."""

    graph: SymmetryGraph
    target: Target
    scales: Sequence[Move]

    def move(self, k: int, state: Mapping[str, Tensor]) -> Move:
        """What moves the network ``k``, which is given again."""
        element, maps = self.target.found(k, move_tensors(self.graph, self.scales[k], state))
        return replace(self.scales[k], permutation=element.permutation, signs=element.signs, maps=maps)


def find_plan(
    graph: SymmetryGraph,
    networks: StateSource,
    reference: Reference | Mapping[str, Tensor],
    over: Sequence[Over] = ("permutations",),
    *,
    match: Match | None = None,
    solver: Solver = "frank_wolfe",
    progress: Progress = lambda at: None,
) -> Plan:
    """Find what networks, which are read two at a time, are aligned to; without a ``match``, by their weights."""
    scales = [Move()] * len(networks)
    if "scales" in over:
        for k in range(len(networks)):
            scales[k] = least_mass(graph, read(graph, networks, k), over)
            progress({"step": "finding least masses", "done": k + 1, "total": len(networks)})
        networks = networks.moved(graph, scales)
    if not isinstance(reference, str):
        reference = move_tensors(graph, least_mass(graph, reference, over), reference)
    own, descend = matchers(graph, over, solver)
    rotations = "rotations" in over
    target = find_target(
        graph, networks, reference, match or own, descend=descend, rotations=rotations, progress=progress
    )
    return Plan(graph, target, scales)


def least_mass(graph: SymmetryGraph, state: Mapping[str, Tensor], over: Sequence[Over]) -> Move:
    """What brings a network to its least mass over the scales, and over the linear maps where these move it too.

    Of all forms that are unique on an orbit of scales this is the one to match by weights: permutations, signs and
    rotations do not change a mass, so that it commutes with them, and no layer outweighs others by its scale alone.
    """
    if "scales" not in over:
        return Move()
    if "rotations" in over and any(not group.orthogonal for group in graph.linears):
        form = balanced(graph, state, certify=False)
        return Move(form.log_scale, form.maps)
    return Move(canonicalize(graph, state, certify=False).log_scale)


def matchers(
    graph: SymmetryGraph, over: Sequence[Over], solver: Solver = "frank_wolfe"
) -> tuple[Match, Descend | None]:
    """How two networks are matched by their weights, and how a match that is known is improved."""
    signs = "signs" in over
    if "rotations" in over:
        whole = partial(rotation_matching, graph, signs=signs, solver=solver)
        return whole, lambda target, state, init: whole(target, state)
    if not signs:
        return partial(weight_matching, graph, solver=solver), None
    return partial(signed_matching, graph, solver=solver), lambda target, state, init: signed_matching(
        graph, target, state, init=init
    )
