"""Frank-Wolfe on doubly stochastic matrices: a relaxation of weight matching that sees all groups at once.

Every group starts at the barycenter; the linear oracle is an assignment for each family. Matrices never multiply
tensors: an iteration needs the Gram matrices at one vertex (a permutation), and mixes them with those at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, flat_source
from tu_symmetry.alignment.gram import Family
from tu_symmetry.alignment.products import Orders, PairProducts
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.transfer import moved, numbers

Sources = Mapping[str, Tensor]  # of each group's units, where each comes from
_ITERATIONS = 50
_TOLERANCE = 1e-4
_LANDINGS = 3  # steps of full length after which the rest is left to a descent


class RelaxedPair:
    """A pair of networks with a doubly stochastic matrix on each group, at first the barycenter.

    Matrices, and similarities where products are not kept, are made of the vertices of the path.
    """

    def __init__(self, products: PairProducts) -> None:
        self.products, self.plan = products, products.plan
        self.path: list[tuple[float, Sources, Orders]] = []  # the vertices that a point is a mean of, with their shares
        self.rest = 1.0  # the barycenter's
        kept = self.plan.sizes if products.kept else ()
        self.similarities = {g: products.barycenter(g) for g in kept}  # three sums each

    def matrix(self, group: str) -> Tensor:
        """The doubly stochastic matrix of a group."""
        like, units = self.products.like, self.plan.sizes[group]
        made = torch.full((units, units), self.rest / units, dtype=like.dtype, device=like.device)
        for share, sources, _ in self.path:
            source = sources[group].to(like.device)
            made[torch.arange(units, device=like.device), source] += share
        return made

    def similarity(self, group: str) -> Sequence[Tensor]:
        """The three sums of a group at the matrices of all others."""
        return self.similarities.get(group) or self.products.mixed(group, self._points())

    def _points(self, sign: int = 1) -> list[tuple[float, Orders | None]]:
        """What the point is a mean of, as :meth:`.PairProducts.mixed` takes it."""
        points: list[tuple[float, Orders | None]] = [(sign * share, orders) for share, _, orders in self.path]
        return [*points, (sign * self.rest, None)] if self.rest else points

    def _pieces(self) -> list[list[Family]]:
        """Families whose matrices are in memory together."""
        return [self.plan.families] if self.products.kept else [[family] for family in self.plan.families]

    def vertex(self) -> tuple[Permutation, dict[str, Tensor], float, float]:
        """The best vertex for the gradient: as a permutation, as sources of units, the gain, and its scale."""
        permutation: Permutation = {}
        sources: dict[str, Tensor] = {}
        inside: list[float] = []
        best: list[float] = []
        for families in self._pieces():
            names = [group.name for family in families for group in family.groups]
            gradients = {g: (s[0] + s[1]).add_(s[2]) for g, s in ((g, self.similarity(g)) for g in names)}
            products = [torch.dot(g.reshape(-1), self.matrix(n).reshape(-1)) for n, g in gradients.items()]
            *here, values = moved([*gradients.values(), torch.stack(products)], torch.device("cpu"))
            inside += values.tolist()
            on_host = dict(zip(gradients, here, strict=True))
            del gradients, here
            for family in families:
                permutation.update(assign_family(family, on_host))
                for group in family.groups:
                    source = sources[group.name] = flat_source(group, permutation)
                    picked = on_host[group.name][torch.arange(len(source), device="cpu"), source]
                    best.append(float(picked.sum(dtype=torch.float64)))
        return permutation, sources, sum(best, -sum(inside)), sum(map(abs, best))

    def advance(self, sources: Sources, gap: float) -> float:
        """Move to the best point on the path to a vertex of positive ``gap``; returns the step's length in [0, 1].

        Along the path a tensor's part of the objective is bilinear in its two axes, so the objective is quadratic. Its
        curvature is the difference of one axis' similarities between the ends along that of its matrices.
        """
        orders = self.products.plan.orders(self.plan.moves, sources)
        device = self.products.like.device
        there = dict(zip(sources, moved(list(sources.values()), device), strict=True))
        rows = {group: torch.arange(len(source), device=device) for group, source in there.items()}
        ends: dict[str, Sequence[Tensor]] = {}
        parts = []
        for group in self.plan.sizes:
            if self.products.kept:
                ends[group] = self.products.sums(group, orders)
                change = ends[group][1] - self.similarities[group][1]
            else:
                (change,) = self.products.mixed(group, [(1.0, orders), *self._points(-1)], (1,))
            parts.append(change[rows[group], there[group]].sum(dtype=torch.float64))
            parts.append(torch.dot(change.reshape(-1), self.matrix(group).reshape(-1)).double())
        terms = numbers(parts)
        curvature = 0.0
        for picked, mean in zip(terms[::2], terms[1::2], strict=True):
            curvature += picked - mean
        ratio = 1.0 if curvature >= -gap / 2 else -gap / (2 * curvature)
        held = [(share * (1 - ratio), own, at) for share, own, at in self.path]
        self.path = [one for one in [*held, (ratio, sources, orders)] if one[0]]
        self.rest *= 1 - ratio
        for group in ends:
            for mixed, reached in zip(self.similarities[group][1:], ends[group][1:], strict=True):
                mixed.lerp_(reached, ratio)
        return ratio

    def permutation(self) -> Permutation:
        """The group permutation that is closest to the doubly stochastic matrices."""
        found: Permutation = {}
        for families in self._pieces():
            names = [group.name for family in families for group in family.groups]
            on_host = moved([self.matrix(name).double() for name in names], torch.device("cpu"))
            matrices = dict(zip(names, on_host, strict=True))
            found |= {n: p for family in families for n, p in assign_family(family, matrices).items()}
        return found


def frank_wolfe(products: PairProducts) -> tuple[Permutation, int]:
    """Maximize the matching objective over doubly stochastic matrices, then assign; and the number of iterations.

    It ends when the gap closes, or when a step has landed on a vertex for the third time: a descent is cheaper there.
    """
    pair = RelaxedPair(products)
    landings = iteration = 0
    for iteration in range(1, _ITERATIONS + 1):
        vertex, sources, gap, scale = pair.vertex()
        if gap <= _TOLERANCE * scale:
            break
        landings += pair.advance(sources, gap) == 1
        if landings == _LANDINGS:
            return vertex, iteration
    return pair.permutation(), iteration
