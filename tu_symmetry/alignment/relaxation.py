"""Frank-Wolfe on doubly stochastic matrices: a relaxation of weight matching that sees all groups at once.

Every group starts at the barycenter; the linear oracle is an assignment for each family. Matrices never multiply
tensors: an iteration needs the Gram matrices at one vertex (a permutation), and mixes them with those at hand.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tu_symmetry.alignment.assignment import assign_family, flat_source
from tu_symmetry.alignment.products import PairProducts
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.transfer import moved, numbers

_ITERATIONS = 50
_TOLERANCE = 1e-4
_LANDINGS = 3  # steps of full length after which the rest is left to a descent


class RelaxedPair:
    """A pair of networks with a doubly stochastic matrix on each group, at first the barycenter."""

    def __init__(self, products: PairProducts) -> None:
        self.products, self.plan = products, products.plan
        like = next(iter(products.reference.values()))
        self.matrices = {
            g: torch.full((n, n), 1.0 / n, dtype=like.dtype, device=like.device) for g, n in self.plan.sizes.items()
        }
        self.similarities = {g: products.barycenter(g) for g in self.plan.sizes}  # three sums each

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
                source = sources[group.name] = flat_source(group, permutation)
                picked = on_host[group.name][torch.arange(len(source), device="cpu"), source]
                best = float(picked.sum(dtype=torch.float64))
                gap += best
                scale += abs(best)
        return permutation, sources, gap, scale

    def advance(self, sources: Mapping[str, Tensor], gap: float) -> float:
        """Move to the best point on the path to a vertex of positive ``gap``; returns the step's length in [0, 1].

        Along the path a tensor's part of the objective is bilinear in its two axes, so the objective is quadratic. Its
        curvature is the difference of one axis' similarities between the ends along that of its matrices.
        """
        orders = self.products.plan.orders(self.plan.moves, sources)
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
