"""What many networks are aligned to when no network is given: their medoid, their running mean, their universe.

One definition of each, for networks in memory (:func:`~tu_symmetry.align`) as for files (``tu-symmetry align``):

``medoid``: the network with the least sum of distances to the others after matching. Matching all pairs is quadratic in
their number, so at most so many networks are compared, a fixed sample if there are more.

``mean``: one pass, each network matched to the mean of those aligned before it. (Further passes against the mean of all
change nothing: a network is a part of that mean, in the place that it has.) It needs the sum of the networks only.

``universe``: the sum of all pairwise objectives, ``(||sum W||^2 - sum ||W||^2) / 2`` (Crisostomi et al. 2024, C2M3,
eq. 5), which is consistent along every cycle of networks by construction. It starts at the running mean, by the solver
``frank_wolfe`` or ``descent``; by ``synchronized`` it starts at the relaxation of all networks together, which takes
four copies of all in memory, and ends up to a few percent higher on trained networks, lower on random ones. Then sweeps
of block-coordinate ascent: each network descends against the mean of all others from the permutation that it has, so
the sum never decreases, and a sweep that moves nothing ends them.

A permutation of all networks alike changes no distance: the one is chosen that leaves the first network as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.alignment.gram import families, resized, size_exponent, working
from tu_symmetry.alignment.matching import Solver, weight_matching
from tu_symmetry.alignment.relaxation import synchronized_frank_wolfe
from tu_symmetry.states import State
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation, compose, identity_permutation, invert
from tu_symmetry.symmetry.graph import SymmetryGraph

Consensual = Literal["mean", "universe"]
AlignSolver = Literal[Solver, "synchronized"]
Match = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], int], Permutation]


def medoid_candidates(count: int, candidates: int) -> list[int]:
    """Indices of the networks that are compared for a medoid: all, or a sample that depends on their number only."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")
    return sorted(order[:candidates].tolist())


def medoid_of(chosen: Sequence[int], distances: Mapping[tuple[int, int], float]) -> tuple[int, list[float]]:
    """The medoid of the candidates, and for each its distances to the others, summed.

    Args:
        chosen: indices of the candidates.
        distances: after matching, of each pair ``(i, j)`` with ``i < j``.
    """
    totals = [sum(distances[min(i, j), max(i, j)] for j in chosen if j != i) for i in chosen]
    return chosen[min(range(len(chosen)), key=totals.__getitem__)], totals


class Consensus:
    """Networks on their way to a common mean or universe: the sum of the aligned ones, and what comes next.

    Example:
        >>> run = Consensus(graph, 5, "mean", "frank_wolfe", match, max_iterations=20)       # doctest: +SKIP
        >>> while not run.finished:                                                          # doctest: +SKIP
        ...     run.step(lambda k: states[k])
        >>> permutations = [run.permutation(k) for k in range(5)]                            # doctest: +SKIP

    Attributes:
        total: sums of floating-point tensors, float64; other tensors are the first network's.
        sweep: number of the pass, 0 for the first.
        done: networks of this pass that are done.
        moved: whether this pass has changed a permutation.
        iterations: passes of the relaxation of all networks together, if there was one.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        count: int,
        reference: Consensual,
        solver: AlignSolver,
        match: Match,
        *,
        max_iterations: int,
        threads: int = 1,
    ) -> None:
        """Begin.

        Args:
            graph: the symmetry graph.
            count: number of networks, at least two.
            reference: ``mean`` or ``universe``.
            solver: the solver of the first pass; ``synchronized`` for a universe only.
            match: ``(reference state, state, index)`` to a permutation, with that solver; for the running mean.
            max_iterations: bound on the sweeps of a universe.
            threads: networks whose assignments are solved at the same time in the relaxation.
        """
        self.graph, self.count = graph, count
        self.last_sweep = max_iterations if reference == "universe" else 0
        self.relaxed = solver == "synchronized"
        self.total: dict[str, Tensor] = {}
        self.sweep, self.done, self.moved, self.iterations = 0, 0, False, 0
        self._match, self._threads = match, threads
        self._start: list[Permutation] | None = None
        self._held: dict[int, Permutation] = {}

    @property
    def next_sweep(self) -> int:
        """The pass that the next step belongs to."""
        return self.sweep + (self.done == self.count)

    @property
    def finished(self) -> bool:
        """Whether there is no next step."""
        if self.done < self.count:
            return False
        return self.sweep == self.last_sweep or (self.sweep > 0 and not self.moved)

    @property
    def converged(self) -> bool:
        """Whether the last sweep moved nothing (True without sweeps)."""
        return self.sweep == 0 or not self.moved

    def permutation(self, k: int) -> Permutation:
        """What aligns a network to the first one as it is."""
        return compose(invert(self.held(0)), self.held(k))

    def held(self, k: int) -> Permutation:
        """The permutation with which a network is in the sum."""
        return self._held[k]

    def keep(self, k: int, permutation: Permutation, *, moved: bool) -> None:
        """Take note of a step (a subclass may write it down)."""
        self._held[k] = permutation

    def step(self, load: Callable[[int], State]) -> int:
        """Match the next network, and bring the sum up to date; returns its index.

        Args:
            load: gives the network with an index.
        """
        sweep = self.next_sweep
        k = self.done if sweep == self.sweep else 0
        state = load(k)
        old = self.held(k) if sweep else None
        new = self._matched(load, k, state, old)
        moved = old is None or any(not torch.equal(new[g], old[g]) for g in new)
        if moved:
            self._replace(state, new, old)
        self.moved = sweep > 0 and (moved or (self.moved and sweep == self.sweep))
        self.sweep, self.done = sweep, k + 1
        self.keep(k, new, moved=moved)
        return k

    def _matched(self, load: Callable[[int], State], k: int, state: State, old: Permutation | None) -> Permutation:
        """The network's new permutation; ``old`` is the one that it has, None in the first pass."""
        if old is not None:
            others = self._mean_of_others(state, old, self.count - 1)
            return weight_matching(self.graph, others, state, solver="descent", look_again=False, init=old).permutation
        if self.relaxed:
            if self._start is None:
                networks = _parameters(self.graph, [load(j) for j in range(self.count)])
                self._start, self.iterations = synchronized_frank_wolfe(
                    self.graph, networks, families(self.graph), threads=self._threads
                )
            return self._start[k]
        if k == 0:
            return identity_permutation(self.graph)
        return self._match(self._mean_of_others(state, None, k), state, k)

    def _mean_of_others(self, state: State, own: Permutation | None, count: int) -> State:
        """The mean of ``count`` networks in the sum, without the one whose permutation is given."""
        mine = {} if own is None else permute_tensors(self.graph, own, state)
        mean = dict(state)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                total = self.total[name] - mine[name].to(self.total[name].device) if mine else self.total[name]
                mean[name] = (total / count).to(torch.promote_types(tensor.dtype, torch.float32))
        return mean

    def _replace(self, state: State, new: Permutation, old: Permutation | None) -> None:
        before = {} if old is None else permute_tensors(self.graph, old, state)
        for name, tensor in permute_tensors(self.graph, new, state).items():
            if not tensor.is_floating_point():
                self.total.setdefault(name, tensor)
                continue
            change = tensor.double() - before[name] if before else tensor.double()
            total = self.total.get(name)
            self.total[name] = change if total is None else total + change.to(total.device)


def of_ordinary_size(graph: SymmetryGraph, members: Sequence[State]) -> list[State]:
    """The networks, divided by one power of two if sums of their squares would leave the range of their dtype."""
    exponent = size_exponent(graph, *members)
    return [resized(graph, m, exponent) for m in members] if exponent else list(members)


def _parameters(graph: SymmetryGraph, members: Sequence[State]) -> list[State]:
    """What the relaxation computes with: parameters in one dtype, on one device, of ordinary size."""
    members = of_ordinary_size(graph, members)
    first = working(graph, members[0])
    return [{n: t.to(first[n].device, first[n].dtype) for n, t in working(graph, m).items()} for m in members]
