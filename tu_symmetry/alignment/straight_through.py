"""Straight-through matching: the network of an orbit whose midpoint with another network has the least loss.

A free copy of the weights is trained so that its projection onto the orbit of a network (the closest of those that
compute the same) gives a low loss halfway to the reference; gradients pass the projection as if it were the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.align import Over, check_over
from tu_symmetry.alignment.barrier import Loss, interpolate, mean_loss
from tu_symmetry.alignment.gram import each_working
from tu_symmetry.alignment.matching import Matching, descend, inner_product, weight_distance, weight_matching
from tu_symmetry.alignment.products import MovePlan, WeightSimilarities
from tu_symmetry.alignment.repair import batchnorm_layers, reestimate_batchnorm
from tu_symmetry.alignment.rotations import Rotations, behind, rotation_matching
from tu_symmetry.alignment.signed import Search, signed_matching
from tu_symmetry.evaluation import evaluating, forward, labeled_batches, on_device, reusable
from tu_symmetry.symmetry.action import linear_tensors, signed_tensors
from tu_symmetry.symmetry.elements import SignedPermutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness


@leaves_randomness
def straight_through_matching(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    loss: Loss,
    *,
    over: Sequence[Over] = ("permutations",),
    epochs: int = 5,
    learning_rate: float = 1e-3,
) -> Matching:
    """Find what moves ``state`` so that the network halfway to ``reference_state`` is a good one.

    The method of Ainsworth et al. 2023, section 3.3, ``over`` all symmetries that :func:`~tu_symmetry.align` takes but
    scales: ``epochs`` passes of Adam on the free copy, over batches ``(inputs, targets)`` with a differentiable mean
    loss, with batch statistics where there is batch normalization. At each step the projection goes on from where the
    last one was, by a sweep over the units (permutations: until nothing gains). Of the matching by weights that it
    begins with and what is there after each epoch, the one with the least loss of the midpoint (with re-estimated
    statistics) is taken.

    Law: the loss of the midpoint is no more than that of :func:`~tu_symmetry.weight_matching`,
    :func:`~tu_symmetry.alignment.signed_matching` or :func:`~tu_symmetry.alignment.rotation_matching`. ``sweeps``
    counts all projections', ``converged`` is theirs.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: an empty loader, a loss that is not finite, or symmetries that it is not for.
    """
    if "scales" in (over := check_over(over)):
        raise ValueError(
            "straight-through matching is over permutations, signs and rotations; scale both networks first "
            "(canonicalize), and leave scales out of over="
        )
    batches = reusable(dataloader)
    if "rotations" in over:
        found = rotation_matching(graph, reference_state, state, signs="signs" in over)
    elif "signs" in over:
        found = signed_matching(graph, reference_state, state)
    else:
        found = weight_matching(graph, reference_state, state)
    if not (found.permutation or found.signs or found.maps):
        return found
    anchor, device = on_device(reference_state)
    free = {n: t.clone() for n, t in each_working(graph, anchor)}
    optimizer = torch.optim.Adam(list(free.values()), lr=learning_rate)
    whole = anchor | _named(graph, free)
    other = {n: t.to(whole[n]) for n, t in state.items()}
    orbit = _Orbit(graph, over, whole, other, found)
    normalizations = list(batchnorm_layers(model).values())

    def midpoint_loss() -> float:
        middle = interpolate(anchor, orbit.moved(other), 0.5)
        if normalizations:
            middle = reestimate_batchnorm(model, middle, batches)
        return mean_loss(model, middle, batches, loss)

    best, best_loss = (orbit.element, orbit.maps), midpoint_loss()
    for epoch in range(1, epochs + 1):
        with evaluating(model), torch.enable_grad():
            for module in normalizations:
                module.training = True
            for inputs, targets in labeled_batches(batches, device):
                orbit.project()
                middle = interpolate(anchor, orbit.moved(other), 0.5)
                middle = {n: t.detach().clone() for n, t in middle.items()}  # running statistics are written to
                leaves = {n: middle[n].requires_grad_() for n in free}
                value = loss(forward(model, middle | _named(graph, leaves), inputs), targets)
                if not torch.isfinite(value):
                    raise ValueError(
                        f"the loss of the midpoint network is {value.item()} in epoch {epoch}; a smaller learning_rate "
                        f"than {learning_rate} may help"
                    )
                gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
                for tensor, gradient in zip(free.values(), gradients, strict=True):
                    tensor.grad = None if gradient is None else 0.5 * gradient.to(tensor.dtype)
                optimizer.step()
        now = midpoint_loss()
        if now < best_loss:
            best, best_loss = (orbit.element, orbit.maps), now
    orbit.element, orbit.maps = best
    moved = orbit.moved(state)
    return replace(
        found,
        permutation=orbit.element.permutation,
        signs=orbit.element.signs,
        maps=orbit.maps,
        objective=inner_product(graph, reference_state, moved),
        sweeps=orbit.sweeps,
        converged=orbit.converged,
        distance_after=weight_distance(graph, reference_state, moved),
    )


def _named(graph: SymmetryGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under all names that a state has for each."""
    return {alias: tensor for name, tensor in tensors.items() for alias in graph.aliases[name]}


class _Orbit:
    """The networks that compute what another does, and the one of them that is about the closest to free weights.

    The free weights are read at each projection: what trains them changes them in place.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        over: Sequence[Over],
        free: Mapping[str, Tensor],
        other: Mapping[str, Tensor],
        start: Matching,
    ) -> None:
        self.graph = graph
        self.element, self.maps = start.element, start.maps
        self.sweeps, self.converged = start.sweeps, start.converged
        if "signs" not in over:
            graph = replace(graph, signs=(), sign_terms={})
        self.search: Search | None = None
        if start.maps:
            acting = [g for g in graph.linears if g.name in start.maps]
            self.placed = [g for g in acting if not g.blocks and g.subgroup != "complex"]
            still = behind(replace(graph, linears=tuple(acting)), self.placed)
            self.search = Rotations(still, free, other)
            self.inner = [{g.name for g in groups} for groups in (still.permutations, still.signs)]
            outer = (  # what moved rotated units before their rotation stays
                {n: t for n, t in part.items() if n not in names}
                for part, names in zip(self.element, self.inner, strict=True)
            )
            self.base = signed_tensors(graph, SignedPermutation(*outer), other)
        elif graph.signs:
            self.search = Search(graph, free, other)
        else:
            self.plan = MovePlan.of(graph)
            self.free, self.own = (dict(each_working(graph, weights)) for weights in (free, other))

    def moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A network in the place of ``other``, moved."""
        return linear_tensors(self.graph, self.maps, signed_tensors(self.graph, self.element, tensors))

    def project(self) -> None:
        """Move on towards the closest network: a sweep over all units, by permutations alone until nothing gains."""
        permutation, signs = self.element
        if self.search is None:
            similarities = WeightSimilarities(self.graph, self.free, self.own, self.plan)
            permutation, sweeps, self.converged = descend(similarities, self.plan.families, permutation)
        elif not isinstance(self.search, Rotations):
            (permutation, signs), sweeps, self.converged = self.search.improved(self.element, 1)
        else:
            inner = SignedPermutation(
                *({n: part[n] for n in names} for part, names in zip(self.element, self.inner, strict=True))
            )
            first = {g.name: self.maps[g.name] for g in self.placed}
            turned = linear_tensors(self.graph, first, self.base)
            self.search.state = dict(each_working(self.graph, turned))
            inner, maps, sweeps = self.search.rotated(inner, 1, 1)
            permutation, signs = permutation | inner.permutation, signs | inner.signs
            self.maps = maps | {name: maps[name] @ own for name, own in first.items()}
        self.element = SignedPermutation(permutation, signs)
        self.sweeps += sweeps
