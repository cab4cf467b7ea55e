"""Frank-Wolfe on doubly stochastic matrices: a relaxation of weight matching that sees all groups at once.

Every group is relaxed to a doubly stochastic matrix, started at the barycenter (all entries equal). The linear oracle
is an assignment for each family. Each tensor is moved along ``k`` axes (mostly two), so the objective along a step is a
polynomial of degree ``k`` for a pair of networks and ``2 k`` for a set of networks: the best step has a closed form.

Matrices never multiply tensors. For a pair, an iteration needs the Gram matrices at one vertex (a permutation), one
product for each (tensor, axis), and mixes them with those at hand. For a set of networks, tensors moved by the matrices
of some of their axes are kept up to date: a step towards a vertex is a linear combination of such tensors and of copies
of them in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, flat_source
from tu_symmetry.alignment.gram import Family
from tu_symmetry.alignment.products import Axes, MovePlan, PairProducts, plan_moves
from tu_symmetry.symmetry.elements import Permutation, identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.transfer import moved, numbers

_ITERATIONS = 50
_TOLERANCE = 1e-4
_LANDINGS = 3  # steps of full length after which the rest is left to a descent


class _RelaxedNetwork:
    """One network with a doubly stochastic matrix on each group: its tensors, moved along every set of axes.

    Attributes:
        matrices: group to ``[units, units]`` float64 on the host.
    """

    def __init__(self, plan: MovePlan, state: Mapping[str, Tensor], *, fixed: bool = False) -> None:
        """Start at the barycenter, or with ``fixed`` at the identity."""
        self.plan, self.state = plan, state
        self.matrices = {
            g: torch.eye(n, dtype=torch.float64, device="cpu")
            if fixed
            else torch.full((n, n), 1.0 / n, dtype=torch.float64, device="cpu")
            for g, n in plan.sizes.items()
        }
        self.mixed: dict[str, dict[Axes, Tensor]] = {}
        for name in plan.moves:
            axes = plan.axes(name)
            kept: dict[Axes, Tensor] = {(): state[name]}
            for subset in _subsets(axes):
                before = kept[subset[:-1]]
                kept[subset] = before if fixed else self._averaged(name, before, subset[-1])
            self.mixed[name] = kept

    def _averaged(self, name: str, tensor: Tensor, axis: int) -> Tensor:
        """The barycenter's action: every unit becomes the mean unit."""
        result = tensor.clone()
        units_first = result.movedim(axis, 0)
        source = tensor.movedim(axis, 0)
        for _, index in self.plan.moves[name][axis]:
            place = index.to(tensor.device)
            units_first[place] = source[place].mean(0, keepdim=True).expand(*place.shape, *source.shape[1:])
        return result

    def gradients(self, references: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gram matrices of the references with this network, each axis against the others moved; on the host."""
        found: dict[str, Tensor] = {}
        for name, moves in self.plan.moves.items():
            axes = self.plan.axes(name)
            for axis in axes:
                others = tuple(a for a in axes if a != axis)
                pair = [t.movedim(axis, 0) for t in (references[name], self.mixed[name][others])]
                for group, index in moves[axis]:
                    a, b = (_rows(t, index) for t in pair)
                    gram = a @ b.T
                    found[group] = found[group] + gram if group in found else gram
        return {
            g: found[g].to("cpu", torch.float64) if g in found else torch.zeros(n, n, dtype=torch.float64, device="cpu")
            for g, n in self.plan.sizes.items()
        }

    def orders(self, sources: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """A vertex as an order of positions along each axis of each tensor."""
        return {
            name: {a: self.plan.order(name, a, t.shape[a], sources).to(t.device) for a in self.plan.moves[name]}
            for name, t in ((n, self.state[n]) for n in self.plan.moves)
        }

    def corner(self, name: str, orders: Mapping[int, Tensor], subset: Axes) -> Tensor:
        """A tensor with the vertex applied along some axes."""
        tensor = self.state[name]
        for axis in subset:
            tensor = tensor.index_select(axis, orders[axis])
        return tensor

    def bernstein(self, name: str, orders: Mapping[int, Tensor], subset: Axes) -> list[Tensor]:
        """Bernstein coefficients, in the step, of a tensor moved along ``subset`` on the path to a vertex."""
        degree = len(subset)
        coefficients = []
        for count in range(degree + 1):
            total: Tensor | None = None
            for at_vertex in itertools.combinations(subset, count):
                tensor = self.mixed[name][tuple(a for a in subset if a not in at_vertex)]
                for axis in at_vertex:
                    tensor = tensor.index_select(axis, orders[axis])
                total = tensor if total is None else total + tensor
            assert total is not None
            coefficients.append(total / math.comb(degree, count) if math.comb(degree, count) > 1 else total)
        return coefficients

    def step(self, sources: Mapping[str, Tensor], orders: Mapping[str, Mapping[int, Tensor]], ratio: float) -> None:
        """Move by ``ratio`` of the path to a vertex."""
        for group, source in sources.items():
            matrix = self.matrices[group]
            matrix.mul_(1 - ratio)
            matrix[torch.arange(len(source), device="cpu"), source] += ratio
        for name, kept in self.mixed.items():
            for subset in reversed(kept):  # the larger sets first: they read the smaller ones as they were
                if len(subset) == 1:
                    kept[subset].lerp_(self.corner(name, orders[name], subset), ratio)
                elif subset:
                    weights = [float(b(ratio)) for b in _bernstein_basis(len(subset))]
                    parts = self.bernstein(name, orders[name], subset)
                    kept[subset] = _total(w * p for w, p in zip(weights, parts, strict=True))

    def vertex(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float, float]:
        """The best vertex for a gradient: sources of units, the gain over the matrices, and its scale."""
        sources: dict[str, Tensor] = {}
        gap = scale = 0.0
        for family in self.plan.families:
            permutation = assign_family(family, gradients)
            for group in family.groups:
                source = flat_source(group, permutation)
                sources[group.name] = source
                best = float(gradients[group.name][torch.arange(len(source), device="cpu"), source].sum())
                gap += best - float((gradients[group.name] * self.matrices[group.name]).sum())
                scale += abs(best)
        return sources, gap, scale

    def permutation(self) -> Permutation:
        """The group permutation that is closest to the doubly stochastic matrices."""
        found: Permutation = {}
        for family in self.plan.families:
            found.update(assign_family(family, self.matrices))
        return found


class _RelaxedPair:
    """A pair of networks with a doubly stochastic matrix on each group, in the space of units alone.

    Every tensor is moved along at most two axes, so Gram matrices are affine in the matrices: on the path to a vertex
    they are mixtures of what they are at both ends, and only those of the vertex (a permutation) have to be computed.

    Attributes:
        matrices: group to ``[units, units]``.
        similarities: group to its three sums of Gram matrices (see :class:`PairProducts`).
    """

    def __init__(self, products: PairProducts) -> None:
        """Start at the barycenter."""
        self.products, self.plan = products, products.plan
        like = next(iter(products.reference.values()))
        self.matrices = {
            g: torch.full((n, n), 1.0 / n, dtype=like.dtype, device=like.device) for g, n in self.plan.sizes.items()
        }
        self.similarities = {g: products.barycenter(g) for g in self.plan.sizes}

    def vertex(self) -> tuple[Permutation, dict[str, Tensor], float, float]:
        """The best vertex for the gradient: as a permutation, as sources of units, the gain, and its scale."""
        gradients = {g: (s[0] + s[1]).add_(s[2]) for g, s in self.similarities.items()}
        inside = [torch.dot(g.reshape(-1), self.matrices[n].reshape(-1)) for n, g in gradients.items()]
        *here, matrices = moved([*gradients.values(), torch.stack(inside)], torch.device("cpu"))
        on_host = dict(zip(gradients, here, strict=True))
        permutation: Permutation = {}
        sources: dict[str, Tensor] = {}
        gap, scale = -sum(matrices.tolist()), 0.0
        for family in self.plan.families:
            permutation.update(assign_family(family, on_host))
            for group in family.groups:
                source = flat_source(group, permutation)
                sources[group.name] = source
                best = float(
                    on_host[group.name][torch.arange(len(source), device="cpu"), source].sum(dtype=torch.float64)
                )
                gap += best
                scale += abs(best)
        return permutation, sources, gap, scale

    def advance(self, sources: Mapping[str, Tensor], gap: float) -> float:
        """Move to the best point on the path to a vertex of positive ``gap``; returns the step's length in [0, 1].

        Along the path a tensor's part of the objective is bilinear in its two axes. The curvature is the difference of
        one axis' similarities between the ends, taken along the difference of that axis' matrices.
        """
        orders = self.products.orders(sources)
        ends = {g: self.products.sums(g, orders) for g in self.plan.sizes}
        device = next(iter(self.matrices.values())).device
        there = dict(zip(sources, moved(list(sources.values()), device), strict=True))
        rows = {group: torch.arange(len(source), device=device) for group, source in there.items()}
        parts = []
        for group, (_, first, _) in self.similarities.items():
            change = ends[group][1] - first
            parts.append(change[rows[group], there[group]].sum(dtype=torch.float64))
            parts.append(torch.dot(change.reshape(-1), self.matrices[group].reshape(-1)).double())
        terms = numbers(parts)
        curvature = 0.0
        for picked, mean in zip(terms[::2], terms[1::2], strict=True):
            curvature += picked - mean
        ratio = 1.0 if curvature >= -gap / 2 else -gap / (2 * curvature)
        for group, source in there.items():
            matrix = self.matrices[group].mul_(1 - ratio)
            matrix[rows[group], source] += ratio
            for mixed, end in zip(self.similarities[group][1:], ends[group][1:], strict=True):
                mixed.lerp_(end, ratio)
        return ratio

    def permutation(self) -> Permutation:
        """The group permutation that is closest to the doubly stochastic matrices."""
        on_host = moved([m.double() for m in self.matrices.values()], torch.device("cpu"))
        matrices = dict(zip(self.matrices, on_host, strict=True))
        return {n: p for family in self.plan.families for n, p in assign_family(family, matrices).items()}


def frank_wolfe(
    products: PairProducts,
    *,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Permutation, int]:
    """Maximize the matching objective of two networks over doubly stochastic matrices, then assign.

    The relaxation ends when the gap closes, or when a step has landed on a vertex for the third time: from there it
    goes on between permutations, and a descent does that at a lower cost. (On planted and on independent networks what
    descent makes of the third vertex is as good as what it makes of the last; the first and the second are worse.)

    Args:
        products: the pair of networks.
        progress: called after each iteration with ``{"iteration", "gap"}``, the gap relative to the objective.

    Returns:
        A permutation (of the groups that move a parameter), and the number of iterations.
    """
    plan = products.plan
    if any(len(axes) > 2 for axes in plan.moves.values()):
        return _frank_wolfe_on_tensors(plan, products.reference, products.state, progress)
    pair = _RelaxedPair(products)
    landings = iteration = 0
    for iteration in range(1, _ITERATIONS + 1):
        vertex, sources, gap, scale = pair.vertex()
        if progress is not None:
            progress({"iteration": iteration, "gap": gap / scale if scale else 0.0})
        if gap <= _TOLERANCE * scale:
            break
        landings += pair.advance(sources, gap) == 1
        if landings == _LANDINGS:
            return vertex, iteration
    return pair.permutation(), iteration


def _frank_wolfe_on_tensors(
    plan: MovePlan,
    reference: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    progress: Callable[[dict[str, Any]], None] | None,
) -> tuple[Permutation, int]:
    """As :func:`frank_wolfe`, for tensors that are moved along any number of axes."""
    network = _RelaxedNetwork(plan, state)
    landings = iteration = 0
    for iteration in range(1, _ITERATIONS + 1):
        sources, gap, scale = network.vertex(network.gradients(reference))
        if progress is not None:
            progress({"iteration": iteration, "gap": gap / scale if scale else 0.0})
        if gap <= _TOLERANCE * scale:
            break
        orders = network.orders(sources)
        along = Polynomial([0.0])
        for name in plan.moves:
            parts = network.bernstein(name, orders[name], plan.axes(name))
            for basis, part in zip(_bernstein_basis(len(parts) - 1), parts, strict=True):
                along = along + basis * float(torch.dot(reference[name].reshape(-1), part.reshape(-1)))
        ratio = _best_ratio(along)
        if ratio <= 0:
            break
        network.step(sources, orders, ratio)
        landings += ratio == 1
        if landings == _LANDINGS:
            break
    return network.permutation(), iteration


def synchronized_frank_wolfe(
    graph: SymmetryGraph,
    states: Sequence[Mapping[str, Tensor]],
    family_list: list[Family],
    *,
    threads: int = 1,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[list[Permutation], int]:
    """Maximize ``(||sum W||^2 - sum ||W||^2) / 2`` over doubly stochastic matrices of all networks, then assign.

    This is the sum of all pairwise matching objectives, written with the sum of the networks: an iteration costs as
    much as one of :func:`frank_wolfe` for each network. The first network stays as it is, which chooses among the
    equivalent optima. (The objective is that of Crisostomi et al. 2024, C2M3, eq. 5.)

    Args:
        graph: the symmetry graph.
        states: parameters of the networks, in the dtype to compute in; three more copies of them are held.
        family_list: the graph's families.
        threads: networks whose assignments are solved at the same time.
        progress: called after each iteration with ``{"iteration", "gap"}``.

    Returns:
        A permutation for each network, and the number of iterations.
    """
    plan = plan_moves(graph, family_list)
    networks = [_RelaxedNetwork(plan, state, fixed=k == 0) for k, state in enumerate(states)]
    free = networks[1:]

    def oracle(network: _RelaxedNetwork, totals: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float, float]:
        return network.vertex(network.gradients({n: t - network.mixed[n][plan.axes(n)] for n, t in totals.items()}))

    landings = iteration = 0
    with ThreadPoolExecutor(threads) as pool:
        for iteration in range(1, _ITERATIONS + 1):
            totals = {n: _total(network.mixed[n][plan.axes(n)] for network in networks) for n in plan.moves}
            found = list(pool.map(oracle, free, itertools.repeat(totals)))
            gap, scale = sum(f[1] for f in found), sum(f[2] for f in found)
            if progress is not None:
                progress({"iteration": iteration, "gap": gap / scale if scale else 0.0})
            if gap <= _TOLERANCE * scale:
                break
            orders = [network.orders(f[0]) for network, f in zip(free, found, strict=True)]
            ratio = _synchronized_step(plan, networks[0], free, orders)
            if ratio <= 0:
                break
            for network, (sources, _, _), order in zip(free, found, orders, strict=True):
                network.step(sources, order, ratio)
            landings += ratio == 1
            if landings == _LANDINGS:
                break
    identity = identity_permutation(graph)
    return [identity, *({**identity, **network.permutation()} for network in free)], iteration


def _synchronized_step(
    plan: MovePlan,
    fixed: _RelaxedNetwork,
    free: Sequence[_RelaxedNetwork],
    orders: Sequence[Mapping[str, Mapping[int, Tensor]]],
) -> float:
    """The step in [0, 1] that maximizes the synchronized objective, a polynomial."""
    objective = Polynomial([0.0])
    for name in plan.moves:
        axes = plan.axes(name)
        parts = torch.stack(  # [networks, coefficients, entries]
            [
                torch.stack(network.bernstein(name, order[name], axes)).flatten(1)
                for network, order in zip(free, orders, strict=True)
            ]
        )
        anchor = fixed.mixed[name][axes].reshape(1, -1)
        sums = parts.sum(0) + anchor
        crossed = (sums @ sums.T - (parts @ parts.mT).sum(0) - (anchor @ anchor.T)).double().cpu() / 2
        basis = _bernstein_basis(len(axes))
        for (i, a), (j, b) in itertools.product(enumerate(basis), repeat=2):
            objective = objective + a * b * float(crossed[i, j])
    return _best_ratio(objective)


def _best_ratio(objective: Polynomial) -> float:
    """Maximizer of a polynomial on [0, 1]; 0 where no point is better than 0."""
    roots = (complex(r) for r in objective.deriv().roots())
    candidates = [1.0, *(r.real for r in roots if abs(r.imag) < 1e-9 and 0 < r.real < 1)]
    best = max(candidates, key=lambda t: float(objective(t)))
    return best if float(objective(best)) > float(objective(0.0)) else 0.0


def _subsets(axes: Axes) -> Iterable[Axes]:
    for size in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, size)


def _rows(units_first: Tensor, index: Tensor) -> Tensor:
    flat = index.reshape(-1)
    if len(flat) != units_first.shape[0] or not torch.equal(flat, torch.arange(len(flat), device="cpu")):
        units_first = units_first.index_select(0, flat.to(units_first.device))
    return units_first.reshape(index.shape[0], -1)


def _total(tensors: Iterable[Tensor]) -> Tensor:
    first, *rest = tensors
    total = first.clone()
    for tensor in rest:
        total += tensor
    return total


def _bernstein_basis(degree: int) -> list[Polynomial]:
    t, rest = Polynomial([0.0, 1.0]), Polynomial([1.0, -1.0])
    return [math.comb(degree, k) * t**k * rest ** (degree - k) for k in range(degree + 1)]
