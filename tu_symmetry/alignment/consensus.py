"""What networks are aligned to: one of them, a given one, their medoid, their running mean, or their universe.

Networks are read when their turn comes, and only sums of them are kept. A permutation of all networks alike changes
no distance: the one is chosen that leaves the first network as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.alignment.matching import Matching, Solver, inner_product
from tu_symmetry.alignment.moves import Move, move_tensors, moved
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.over import Descend, Match, Over, compared, matchers
from tu_symmetry.processes import by_first, shared
from tu_symmetry.states import State, as_given, read_once
from tu_symmetry.symmetry.action import compose_signed, invert_signed, signed_tensors
from tu_symmetry.symmetry.elements import SignedPermutation, identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

Reference = Literal["first", "medoid", "mean", "universe"]
Progress = Callable[[dict[str, Any]], None]  # is called with {"step", "done", "total"} after each network
_MOST_SWEEPS = 20  # of a universe
_LEAST_GAIN = 1e-6  # of a rotation in a sweep, relative to what it maximizes
_CANDIDATES = 16  # that are compared for a medoid


@dataclass(frozen=True)
class Target:
    """What networks are aligned to: a state, how they are matched to it, and the elements that are known already.

    Attributes:
        index: its number, if it is one of the networks.
        sweeps: of a universe, and whether the last one moved nothing.
        scales: what brings each network to the form in which it is matched.
    """

    graph: SymmetryGraph
    state: Mapping[str, Tensor]
    match: Match
    known: Mapping[int, Move] = field(default_factory=dict)
    index: int | None = None
    sweeps: int = 0
    converged: bool = True
    scales: Sequence[Move] = ()

    def move(self, k: int, state: Mapping[str, Tensor]) -> Move:
        """What moves the network ``k``, which is given again as it was."""
        scales = self.scales[k]
        move = self.known.get(k) or _move(self.match(self.state, moved(self.graph, scales, state)))
        if scales.signs:
            first = SignedPermutation(identity_permutation(self.graph), scales.signs)
            whole = compose_signed(self.graph, SignedPermutation(move.permutation, move.signs), first)
            move = replace(move, signs=whole.signs)
        return replace(move, log_scale=scales.log_scale, balance=scales.balance)


def _move(matching: Matching) -> Move:
    return Move(permutation=matching.permutation, signs=matching.signs, maps=matching.maps)


def _still(graph: SymmetryGraph) -> Move:
    return Move(permutation=identity_permutation(graph))


def find_target(
    graph: SymmetryGraph,
    networks: StateSource,
    reference: Reference | Mapping[str, Tensor],
    over: Sequence[Over] = ("permutations",),
    *,
    match: Match | None = None,
    solver: Solver = "frank_wolfe",
    progress: Progress = lambda at: None,
) -> Target:
    """Find what networks, which are read two at a time, are aligned to; without a ``match`` by their weights."""
    by_weights, descend = matchers(graph, over, solver)
    match = match or by_weights
    scales = [Move()] * len(networks)
    if {"scales", "rotations"} & set(over):
        scales = shared(
            len(networks),
            lambda k: compared(graph, read(graph, networks, k), over),
            progress=lambda done: progress({"step": "finding forms to compare", "done": done, "total": len(networks)}),
        )
        networks = networks.moved(graph, scales)
    if not isinstance(reference, str):
        target = Target(graph, moved(graph, compared(graph, reference, over), reference), match)
    elif reference == "first":
        target = Target(graph, read_once(networks.open(0)), match, {0: _still(graph)}, 0)
    elif reference == "medoid":
        target = _medoid(graph, networks, match, progress)
    else:
        sweeps = _MOST_SWEEPS if reference == "universe" else 0
        found = by_first(lambda: _consensus(graph, networks, descend, match, sweeps, "rotations" in over, progress))
        target = Target(graph, match=match, **found)
    return replace(target, scales=scales)


def read(graph: SymmetryGraph, networks: Sequence[State], k: int) -> State:
    """One of the networks, which belongs to the graph."""
    state = networks[k]
    graph.check_state(state, name=f"states[{k}]")
    return state


def _medoid(graph: SymmetryGraph, networks: Sequence[State], match: Match, progress: Progress) -> Target:
    """The network with the least sum of distances to the others after matching, among a sample of all."""
    order = torch.randperm(len(networks), generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = sorted(order[:_CANDIDATES].tolist())
    pairs = [(i, j) for i in chosen for j in chosen if i < j]
    matchings = shared(
        len(pairs),
        lambda k: match(*(read(graph, networks, one) for one in pairs[k])),
        progress=lambda done: progress({"step": "comparing pairs", "done": done, "total": len(pairs)}),
    )
    found = dict(zip(pairs, matchings, strict=True))
    totals = [sum(found[min(i, j), max(i, j)].distance_after for j in chosen if j != i) for i in chosen]
    best = chosen[min(range(len(chosen)), key=totals.__getitem__)]
    known = {j: _move(m) for (i, j), m in found.items() if i == best}
    return Target(graph, networks[best], match, known | {best: _still(graph)}, best)


def _consensus(
    graph: SymmetryGraph,
    networks: Sequence[State],
    descend: Descend,
    match: Match,
    max_sweeps: int,
    rotations: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Match each network to the running mean of those before it, then in sweeps to the mean of all others.

    The sweeps maximize the sum of all pairwise objectives, ``(||sum W||^2 - sum ||W||^2) / 2`` (Crisostomi et al. 2024,
    C2M3, eq. 5): each network descends from the permutation that it has, so the sum never decreases. They begin at the
    networks as they are where these lie closer together. Without sweeps it is the mean. Over rotations each network is
    matched anew, moves where that gains, and the first one stays where it is.
    """
    count = len(networks)
    like: State = {}
    total: dict[str, Tensor] = {}  # of floating-point tensors, in float64
    unmoved: dict[str, Tensor] = {}  # the same of the networks as they are
    held: list[Move] = []
    sweep, moved = 0, True

    def mean_of_others(state: State, own: Mapping[str, Tensor], others: int) -> State:
        mean = dict(state)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                sums = total[name] - own[name].to(total[name].device) if own else total[name]
                mean[name] = (sums / others).to(torch.promote_types(tensor.dtype, torch.float32))
        return mean

    def enter(sums: dict[str, Tensor], state: State, own: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            if tensor.is_floating_point():
                change = tensor.double() - own[name] if own else tensor.double()
                sums[name] = sums[name] + change.to(sums[name].device) if name in sums else change
            else:
                sums.setdefault(name, tensor)

    def improve(k: int) -> bool:
        """One step of a sweep; whether it has moved the network."""
        state = networks[k]
        own = move_tensors(graph, held[k], state)
        others = mean_of_others(state, own, count - 1)
        now = _move(descend(others, state, SignedPermutation(held[k].permutation, held[k].signs)))
        stays = all(torch.equal(p, held[k].permutation[name]) for name, p in now.permutation.items())
        stays = stays and all(bool((s == held[k].signs.get(name, 1)).all()) for name, s in now.signs.items())
        if rotations:
            before, after = (inner_product(graph, others, one) for one in (own, move_tensors(graph, now, state)))
            stays = after <= before + _LEAST_GAIN * abs(before)
        if stays:
            return False
        held[k] = now
        enter(total, move_tensors(graph, now, state), own)
        return True

    for k in range(count):
        state = read(graph, networks, k)
        like = like or as_given(state, {n: t.new_empty(0) for n, t in state.items()})
        others = mean_of_others(state, {}, k) if k else {}
        held.append(_move(match(others, state)) if k else _still(graph))
        enter(total, move_tensors(graph, held[k], state), {})
        enter(unmoved, state, {})
        del state, others  # before the next one is read
        progress({"step": "aligning to the running mean", "done": k + 1, "total": count})
    if inner_product(graph, unmoved, unmoved) > (1 + 1e-9) * inner_product(graph, total, total):
        total, held = unmoved, [_still(graph)] * count
    while sweep < max_sweeps and moved:
        sweep, moved = sweep + 1, False
        for k in range(1 if rotations else 0, count):
            moved |= improve(k)
            progress({"step": f"aligning to all others, sweep {sweep}", "done": k + 1, "total": count})
    elements = [SignedPermutation(move.permutation, move.signs) for move in held]
    back = invert_signed(graph, elements[0])
    placed = [compose_signed(graph, back, element) for element in elements]
    mean = signed_tensors(graph, back, {n: t / count if t.is_floating_point() else t for n, t in total.items()})
    return {
        "state": as_given(like, {n: t.to(like[n].dtype) for n, t in mean.items()}),
        "known": {k: Move(permutation=p, signs=s, maps=held[k].maps) for k, (p, s) in enumerate(placed)},
        "sweeps": sweep,
        "converged": sweep == 0 or not moved,
    }
