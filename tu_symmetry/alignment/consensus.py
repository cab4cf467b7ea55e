"""What networks are aligned to: one of them, a given one, their medoid, their running mean, or their universe.

``medoid`` is the network with the least sum of distances to the others after matching. Matching all pairs is quadratic
in their number, so at most so many networks are compared, a fixed sample if there are more.

``mean`` is one pass, in which each network is matched to the mean of those aligned before it. Further passes against
the mean of all change nothing, since a network is a part of that mean, in the place that it has.

``universe`` maximizes the sum of all pairwise objectives, ``(||sum W||^2 - sum ||W||^2) / 2`` (Crisostomi et al. 2024,
C2M3, eq. 5), which is consistent along every cycle of networks by construction. From the running mean on come sweeps of
block-coordinate ascent: each network descends against the mean of all others from the permutation that it has, so the
sum never decreases, and a sweep that moves nothing ends them.

A permutation of all networks alike changes no distance: the one is chosen that leaves the first network as it is.

Networks are read when their turn comes, and only the sum of them is kept. What takes long (matchings) is looked up in a
mapping and left there, so that a search that was interrupted goes further: everything else is computed again, in the
same order, and ends in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tu_symmetry.alignment.gram import exponent_of, parameter_sizes, resized
from tu_symmetry.alignment.matching import Matching, Progress, weight_matching
from tu_symmetry.states import State, as_given
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation, compose, identity_permutation, invert
from tu_symmetry.symmetry.graph import SymmetryGraph

Reference = Literal["first", "medoid", "mean", "universe"]
Match = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], int], Matching]
Kept = MutableMapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What networks are aligned to.

    Attributes:
        state: the network to match the others to; of a mean and a universe the mean of all that are aligned.
        index: its number among the networks; None for a mean, a universe and a given network.
        permutations: those that are known already: the identity of the network itself, all for a mean and a universe.
        iterations: passes over the networks.
        jobs: matchings that were made, from which the seeds of the next ones are counted.
        search: how it was found: ``candidates`` and ``totals`` of a medoid, ``sweeps`` and ``converged`` otherwise.
    """

    state: Mapping[str, Tensor]
    index: int | None = None
    permutations: Mapping[int, Permutation] = field(default_factory=dict)
    iterations: int = 1
    jobs: int = 0
    search: Mapping[str, Any] = field(default_factory=dict)


def find_target(
    graph: SymmetryGraph,
    networks: Sequence[State],
    reference: Reference | Mapping[str, Tensor],
    match: Match,
    *,
    candidates: int = 16,
    max_iterations: int = 20,
    threads: int = 1,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Target:
    """Find what networks are to be aligned to; they are read when they are asked for, two at a time.

    Args:
        graph: the symmetry graph, verified.
        networks: a sequence of states.
        reference: what is looked for, or a network.
        match: ``(target, state, number)`` to a matching; of pairs, and of the running mean.
        candidates: bound on the networks that are compared for a medoid.
        max_iterations: bound on the sweeps of a universe.
        threads: networks that are matched at the same time.
        kept: what an earlier search has found, by ``distance/I/J``, ``mean/K`` and ``sweep/S/K``.
        progress: called after each network with ``{"step", "done", "total", "iteration"}``.
    """
    identity = identity_permutation(graph)
    if not isinstance(reference, str):
        return Target(reference)
    if reference == "first":
        return Target(networks[0], 0, {0: identity})
    kept = {} if kept is None else kept
    if reference == "medoid":
        return _medoid(graph, networks, match, candidates, threads, kept, progress)
    sweeps = max_iterations if reference == "universe" else 0
    return _consensus(graph, networks, match, sweeps, kept, progress)


def once(kept: Kept, key: str, compute: Callable[[], Any]) -> Any:
    """What an earlier run has found, or what is found now, which is kept."""
    if key not in kept:
        kept[key] = compute()
    return kept[key]


def bounded(function: Callable[[int], T], items: Sequence[int], threads: int) -> Iterator[tuple[int, T]]:
    """Results as they come, with never more than ``threads`` items begun; the first error ends it."""
    if threads <= 1:
        for item in items:
            yield item, function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        running: dict[Future[T], int] = {}
        waiting = iter(items)
        while True:
            while len(running) < threads and (following := next(waiting, None)) is not None:
                running[pool.submit(function, following)] = following
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def read(graph: SymmetryGraph, networks: Sequence[State], k: int) -> State:
    """One of the networks, which belongs to the graph."""
    state = networks[k]
    graph.check_state(state, name=f"states[{k}]")
    return state


def _medoid(
    graph: SymmetryGraph,
    networks: Sequence[State],
    match: Match,
    candidates: int,
    threads: int,
    kept: Kept,
    progress: Progress | None,
) -> Target:
    """Each pair of candidates is matched once; the sample of candidates depends on the number of networks only."""
    order = torch.randperm(len(networks), generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = sorted(order[:candidates].tolist())
    pairs = {(i, j): n for n, (i, j) in enumerate((i, j) for i in chosen for j in chosen if i < j)}
    found: dict[tuple[int, int], Permutation] = {}
    distances = {
        pair: float(kept[key]["distance"]) for pair in pairs if (key := "distance/{}/{}".format(*pair)) in kept
    }
    total, done = len(pairs) - len(distances), 0
    for i in chosen:
        partners = [b for a, b in pairs if a == i and (a, b) not in distances]
        target = read(graph, networks, i) if partners else {}

        def matching(j: int, i: int = i, target: Mapping[str, Tensor] = target) -> Matching:
            return match(target, read(graph, networks, j), pairs[i, j])

        for j, one in bounded(matching, partners, threads):
            found[i, j], distances[i, j] = one.permutation, one.distance_after
            kept[f"distance/{i}/{j}"] = {"distance": one.distance_after}
            done += 1
            if progress is not None:
                progress({"step": "comparing pairs", "done": done, "total": total, "iteration": 1})
    totals = [sum(distances[min(i, j), max(i, j)] for j in chosen if j != i) for i in chosen]
    best = chosen[min(range(len(chosen)), key=totals.__getitem__)]
    known = {best: identity_permutation(graph), **{j: p for (i, j), p in found.items() if i == best}}
    search = {"candidates": chosen, "totals": totals}
    return Target(networks[best], best, known, jobs=len(pairs), search=search)


def _consensus(
    graph: SymmetryGraph,
    networks: Sequence[State],
    match: Match,
    max_sweeps: int,
    kept: Kept,
    progress: Progress | None,
) -> Target:
    """The running mean, and sweeps from there; the sum is of floating-point tensors, in float64."""
    count = len(networks)
    like, exponent = _likeness(graph, networks)
    total: dict[str, Tensor] = {}
    held: list[Permutation] = []
    sweep, moved = 0, True

    def load(k: int) -> State:
        return resized(graph, networks[k], exponent) if exponent else networks[k]

    def mean_of_others(state: State, own: Mapping[str, Tensor], others: int) -> State:
        mean = dict(state)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                sums = total[name] - own[name].to(total[name].device) if own else total[name]
                mean[name] = (sums / others).to(torch.promote_types(tensor.dtype, torch.float32))
        return mean

    def enter(state: State, permutation: Permutation, own: Mapping[str, Tensor]) -> None:
        for name, tensor in permute_tensors(graph, permutation, state).items():
            if tensor.is_floating_point():
                change = tensor.double() - own[name] if own else tensor.double()
                total[name] = total[name] + change.to(total[name].device) if name in total else change
            else:
                total.setdefault(name, tensor)

    def first_pass(k: int) -> None:
        state, key = load(k), f"mean/{k}"
        if key not in kept:
            kept[key] = match(mean_of_others(state, {}, k), state, k).permutation if k else identity_permutation(graph)
        held.append(kept[key])
        enter(state, held[k], {})

    def improve(k: int) -> bool:
        """One step of a sweep; whether it has moved the network. One that did not move before is not even read."""
        key = f"sweep/{sweep}/{k}"
        if key in kept and not _differ(kept[key], held[k]):
            return False
        state = load(k)
        own = permute_tensors(graph, held[k], state)
        if key not in kept:
            others = mean_of_others(state, own, count - 1)
            found = weight_matching(graph, others, state, solver="descent", look_again=False, init=held[k])
            kept[key] = found.permutation
        old, held[k] = held[k], kept[key]
        if not _differ(held[k], old):
            return False
        enter(state, held[k], own)
        return True

    def tell(step: str, k: int) -> None:
        if progress is not None:
            progress({"step": step, "done": k + 1, "total": count, "iteration": sweep + 1})

    for k in range(count):
        first_pass(k)
        tell("aligning to the running mean", k)
    while sweep < max_sweeps and moved:
        sweep, moved = sweep + 1, False
        for k in range(count):
            moved |= improve(k)
            tell(f"aligning to all others, sweep {sweep}", k)
    back = invert(held[0])
    mean = permute_tensors(graph, back, {n: t / count if t.is_floating_point() else t for n, t in total.items()})
    mean = resized(graph, mean, -exponent) if exponent else mean
    return Target(
        as_given(like, {n: t.to(like[n].dtype) for n, t in mean.items()}),
        permutations={k: compose(back, permutation) for k, permutation in enumerate(held)},
        iterations=sweep + 1,
        search={"sweeps": sweep, "converged": sweep == 0 or not moved},
    )


def _differ(a: Permutation, b: Permutation) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


def _likeness(graph: SymmetryGraph, networks: Sequence[State]) -> tuple[State, int]:
    """A state without values of the first network's type and dtypes, and the power of two that all are divided by.

    It is 0 but where sums of squares of the weights would leave the range of their dtype.
    """
    like: State = {}
    sizes: list[float] = []
    for k in range(len(networks)):
        state = read(graph, networks, k)
        like = like or as_given(state, {n: t.new_empty(0) for n, t in state.items()})
        sizes += parameter_sizes(graph, state)
        del state  # before the next one is read
    return like, exponent_of(sizes)
