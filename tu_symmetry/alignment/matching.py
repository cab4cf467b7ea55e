"""Weight matching: the permutation that brings one network closest to another.

Coordinate descent solves one linear assignment for each group in turn and misses the optimum of residual nets from most
starts; Frank-Wolfe on doubly stochastic matrices finds planted permutations reliably, and is the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tu_symmetry.alignment.assignment import assign, assign_family, assign_pairs, family_value
from tu_symmetry.alignment.gram import Family, each_working, widened
from tu_symmetry.alignment.products import WeightSimilarities
from tu_symmetry.alignment.relaxation import frank_wolfe
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import SymmetryError, require_state
from tu_symmetry.symmetry.action import Permuted, permute_tensors
from tu_symmetry.symmetry.elements import (
    Maps,
    Permutation,
    SignedPermutation,
    Signs,
    check_permutation,
    identity_permutation,
)
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.transfer import numbers

Solver = Literal["frank_wolfe", "descent"]
_ROUNDING = 1e-7  # gains below this part of the summed similarities are not told from rounding
_MOST_SWEEPS = 100
_MOST_KEPT = 2**33  # bytes of two networks and their Gram matrices
_KEPT = 24  # bytes for each pair of units: six matrices in single precision


@dataclass(frozen=True, repr=False)
class Matching(Brief):
    """What matching found.

    Attributes:
        permutation: ``apply_permutation(graph, permutation, state)`` is close to the reference.
        objective: ``sum_T <reference_T, permuted_T>`` over parameters (weights), or the sum of matched activation
            similarities.
        sweeps: coordinate sweeps (or Frank-Wolfe iterations and sweeps together) that were made.
        converged: whether the last sweep changed nothing.
        distance_before: L2 distance between the two networks' parameters as given.
        distance_after: the same after the permutation.
        by_weights: in activation matching, groups that the data did not show, and that their weights decided.
        signs: which units turn their signs after the permutation; empty where only permutations were asked for.
        maps: the rotations of units after both; empty where these were not asked for.
    """

    permutation: Permutation
    objective: float
    sweeps: int
    converged: bool
    distance_before: float
    distance_after: float
    by_weights: tuple[str, ...] = ()
    signs: Signs = field(default_factory=dict)
    maps: Maps = field(default_factory=dict)

    @property
    def element(self) -> SignedPermutation:
        """The permutation and the signs."""
        return SignedPermutation(self.permutation, self.signs)


def check_pair(graph: SymmetryGraph, reference_state: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise unless the graph is verified and both are states of one network each, without NaN or infinite weights."""
    graph.require_verified()
    for name, one in (("reference_state", reference_state), ("state", state)):
        finite = False
        if not hasattr(one, "layouts"):  # a view is read once, as it is checked
            require_state(one, name)
            sums = [torch.isfinite(t.detach().sum()) for t in one.values() if not t.is_meta]
            finite = all(numbers(sums))  # a finite sum has finite terms only
        if graph.check_state(one, name=name, finite=not finite):
            raise SymmetryError(
                f"{name} is a stack of states with leading sample axes, and matching compares two networks; "
                "align(graph, states) matches all networks of a stack"
            )


def weight_distance(graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """L2 distance between the parameters of two states (buffers do not count, tied tensors count once)."""
    differences = ((p - q).reshape(-1) for p, q in _parameter_pairs(graph, *widened(graph, a, b)))
    return math.sqrt(sum(numbers([torch.dot(d, d) for d in differences])))


def inner_product(graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """``sum_T <a_T, b_T>`` over the parameters, each in the wider of the two dtypes, summed in float64."""
    return _inner_product(graph, *widened(graph, a, b))


def _inner_product(graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(numbers([torch.dot(p.reshape(-1), q.reshape(-1)) for p, q in _parameter_pairs(graph, a, b)]))


def _compared(graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, float, float]:
    """Inner product of two states' parameters, their distance, and the product of their norms, in one pass."""
    found: list[Tensor] = []
    for p, q in ((p.reshape(-1), q.reshape(-1)) for p, q in _parameter_pairs(graph, a, b)):
        difference = p - q
        found += [torch.dot(x, y) for x, y in ((p, q), (difference, difference), (p, p), (q, q))]
    terms = numbers(found)
    product, *squares = (sum(terms[k::4]) for k in range(4))
    distance, one, other = map(math.sqrt, squares)
    return product, distance, one * other


def _parameter_pairs(
    graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of two states on the device of the first, in the wider of their dtypes."""
    for (_, tensor), (_, other) in zip(each_working(graph, a), each_working(graph, b), strict=True):
        dtype = torch.promote_types(tensor.dtype, other.dtype)
        yield tensor.to(dtype), other.to(tensor.device, dtype)


def weight_matching(
    graph: SymmetryGraph,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    solver: Solver = "frank_wolfe",
    look_again: bool = True,
    init: Permutation | None = None,
    generator: torch.Generator | None = None,
) -> Matching:
    """Find the permutation of ``state`` that brings it closest to ``reference_state`` in weight space.

    It maximizes ``sum_T <reference_T, permuted_T>`` over all parameters (Ainsworth et al. 2023, section 3.2). Running
    statistics move with their channels, but do not count.

    ``frank_wolfe`` is a relaxation from the barycenter, assignment, and a descent. ``descent`` from ``init`` (or the
    identity) goes through one group after the other until none gains, and finds what start and order lead to; with
    ``look_again``, which takes a few times as long, it looks for a better optimum around each group. Groups come in a
    fixed order, or with a generator in another one in each sweep.

    Law: the result is no farther from the reference than what the search began with, ``init`` or the state as it is
    (up to 1e-7 of the weights' squared norms).

    Raises:
        SymmetryError: a state of another architecture, weights that are NaN, infinite, or so large that float64 does
            not hold their products, or an ``init`` that is no permutation.
        ValueError: an unknown solver, or ``init`` for one that has no start to choose.
    """
    if solver not in ("frank_wolfe", "descent"):
        raise ValueError(f"unknown solver {solver!r}: 'frank_wolfe' or 'descent'")
    if solver == "frank_wolfe" and init is not None:
        raise ValueError("init= is where solver='descent' starts; 'frank_wolfe' starts at the barycenter")
    kept = _fits(graph)
    if kept:  # views are read once
        reference_state, state = (dict(s) if hasattr(s, "layouts") else s for s in (reference_state, state))
    check_pair(graph, reference_state, state)
    if init is not None:
        check_permutation(init)
        init = {name: p.cpu() for name, p in init.items()}
    reference_state, state = widened(graph, reference_state, state)
    product, before, norms = _compared(graph, reference_state, state)
    if not graph.permutations:
        return Matching({}, product, 0, True, before, before)
    similarities = WeightSimilarities.of(graph, reference_state, state, kept=kept)
    permuted = permute_tensors if kept else Permuted

    def value(trial: Permutation) -> float:
        return _inner_product(graph, reference_state, permuted(graph, trial, state))

    identity = identity_permutation(graph)
    start = identity | (init or {})
    least = _ROUNDING * norms
    iterations = 0
    if solver == "frank_wolfe":
        relaxed, iterations = frank_wolfe(similarities.products)
        start = start | relaxed
    permutation, sweeps, converged = descend(similarities, similarities.plan.families, start, generator)
    if solver == "descent" and look_again:
        permutation, more = _look_again(similarities, start, permutation, value, least)
        sweeps += more
    objective, after, _ = _compared(graph, reference_state, permuted(graph, permutation, state))
    if solver == "frank_wolfe" and objective < product - least:  # it moved away: start from there
        permutation, more, converged = descend(similarities, similarities.plan.families, identity, generator)
        sweeps += more
        objective, after, _ = _compared(graph, reference_state, permuted(graph, permutation, state))
    if not math.isfinite(objective):
        raise SymmetryError("the products of these weights leave the range of float64, as those of diverged runs do")
    return Matching(permutation, objective, iterations + sweeps, converged, before, after)


def _fits(graph: SymmetryGraph) -> bool:
    """Whether two networks and all their Gram matrices are kept in memory; else one group's are, and a few tensors."""
    weights = sum(math.prod(graph.shapes[name]) for name in graph.shapes.keys() - graph.buffers)
    pairs = sum(math.prod(group.shape) ** 2 for group in graph.permutations)
    return 8 * weights + _KEPT * pairs <= _MOST_KEPT


def descend(
    similarities: WeightSimilarities,
    family_list: list[Family],
    start: Permutation,
    generator: torch.Generator | None = None,
    stale: Iterable[str] | None = None,
) -> tuple[Permutation, int, bool]:
    """Coordinate descent until nothing changes: the permutation, the number of sweeps, and whether it converged.

    A family is looked at again only if a neighbor moved; ``stale`` names those that may improve at the start, all if
    left out. With a generator each sweep has another order.
    """
    permutation = {k: v.clone() for k, v in start.items()}
    stale = {f.root.name for f in family_list} if stale is None else set(stale)
    for sweep in range(1, _MOST_SWEEPS + 1):
        order = list(range(len(family_list)))
        if generator is not None:
            order = torch.randperm(len(order), generator=generator, device="cpu").tolist()
        changed = False
        for family in (family_list[k] for k in order):
            if family.root.name not in stale:
                continue
            stale.discard(family.root.name)
            if _solve_family(similarities, family, permutation):
                changed = True
                stale |= family.neighbors
                if family.coupled:
                    stale.add(family.root.name)
        if not changed:
            return permutation, sweep, True
    return permutation, _MOST_SWEEPS, False


def _look_again(
    similarities: WeightSimilarities,
    start: Permutation,
    found: Permutation,
    value: Callable[[Permutation], float],
    least_gain: float,
) -> tuple[Permutation, int]:
    """One family after the other goes back to the start, and is matched after its neighbors; kept where that gains."""
    best, sweeps = value(found), 0
    family_list = similarities.plan.families
    for family in family_list:
        if all(torch.equal(found[g.name], start[g.name]) for g in family.groups):
            continue
        trial = found | {g.name: start[g.name] for g in family.groups}
        order = [f for f in family_list if f is not family] + [family]
        trial, more, _ = descend(similarities, order, trial, stale={family.root.name, *family.neighbors})
        sweeps += more
        if (now := value(trial)) > best + least_gain:
            found, best = trial, now
    return found, sweeps


def _solve_family(similarities: WeightSimilarities, family: Family, permutation: Permutation) -> bool:
    """Improve one family's part of ``permutation`` in place; returns whether it changed."""
    if family.coupled and family.children:
        return _solve_coupled(similarities, family, permutation)
    grams = similarities.grams(family, permutation)
    trial = assign_family(family, grams, similarities.prices)
    new, scale = family_value(family, grams, trial)
    now, _ = family_value(family, grams, permutation)
    if new - now <= _ROUNDING * scale:
        return False
    if family.coupled:  # the objective is quadratic in this permutation: take only true improvements
        now = similarities.value(family, permutation)
        if similarities.value(family, {**permutation, **trial}) <= now + 1e-9 * abs(now):
            return False
    permutation.update(trial)
    return True


def _solve_coupled(similarities: WeightSimilarities, family: Family, permutation: Permutation) -> bool:
    """Improve the groups of a coupled family one after the other."""
    changed = False
    for child in (c for c in family.children if c.parent == family.root.name):
        changed |= _solve_nested(similarities, family, child.name, permutation)
    for child in (c for c in family.children if c.parent != family.root.name):  # blocks within blocks, where they are
        grams = similarities.inside(family, child, permutation).numpy()
        found = permutation[child.name].reshape(len(grams), -1).clone()
        rows = np.arange(child.size)
        for block, gram in enumerate(grams):
            old, new = found[block].numpy(), assign(gram)
            gain = float(gram[rows, new].sum() - gram[rows, old].sum())
            if gain > _ROUNDING * float(np.abs(gram[rows, old]).sum() + np.abs(gram[rows, new]).sum()):
                found[block] = torch.from_numpy(new.astype(np.int64))
                changed = True
        permutation[child.name] = found.reshape(child.shape)
    return changed


def _solve_nested(similarities: WeightSimilarities, family: Family, moving: str, permutation: Permutation) -> bool:
    """Choose blocks and the inner order of one nested group together: inner assignments give the outer cost."""
    own, inner = similarities.blocks(family, moving, permutation)
    slots = np.arange(family.root.size)
    outer_cost = own.numpy().copy()
    for name, gram in inner.items():
        if name != moving:
            for h, held in enumerate(permutation[name]):
                units = torch.arange(len(held), device="cpu")
                outer_cost[h] += gram[h].permute(1, 0, 2)[:, units, held].sum(-1).numpy()
    grams = inner[moving].numpy().transpose(0, 2, 1, 3)
    best_inner, choice = assign_pairs(grams)
    total = outer_cost + best_inner
    _, new_outer = linear_sum_assignment(total, maximize=True)
    old_outer, old_inner = permutation[family.root.name].numpy(), permutation[moving].numpy()
    held_inner = grams[slots[:, None], old_outer[:, None], np.arange(grams.shape[-1]), old_inner].sum(-1)
    now = float((outer_cost[slots, old_outer] + held_inner).sum())
    gain = float(total[slots, new_outer].sum()) - now
    if gain <= _ROUNDING * float(np.abs(total[slots, new_outer]).sum() + abs(now)):
        return False
    permutation[family.root.name] = torch.from_numpy(new_outer.astype(np.int64))
    permutation[moving] = torch.from_numpy(choice[slots, new_outer])
    return True
