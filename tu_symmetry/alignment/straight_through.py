"""Straight-through matching: the permutation whose midpoint network has the least loss.

A free copy of the weights is trained so that its projection onto the orbit of a network (the closest permuted network)
gives a low loss halfway to the reference; gradients pass the projection as if it were the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.barrier import Loss, interpolate, mean_loss
from tu_symmetry.alignment.gram import each_working
from tu_symmetry.alignment.matching import Matching, descend, inner_product, weight_distance, weight_matching
from tu_symmetry.alignment.products import MovePlan, WeightSimilarities
from tu_symmetry.alignment.repair import batchnorm_layers, reestimate_batchnorm
from tu_symmetry.evaluation import evaluating, forward, labeled_batches, on_device, reusable
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation
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
    epochs: int = 5,
    learning_rate: float = 1e-3,
) -> Matching:
    """Find the permutation of ``state`` that makes the network halfway to ``reference_state`` a good one.

    The method of Ainsworth et al. 2023, section 3.3: ``epochs`` passes of Adam on the free copy, over batches
    ``(inputs, targets)`` with a differentiable mean loss, with batch statistics where there is batch normalization. Of
    weight matching's permutation and those after each epoch the one with the least loss of the midpoint (with
    re-estimated statistics) is taken, so it is never worse than weight matching's. ``sweeps`` counts all projections'.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: an empty loader, or a loss that is not finite.
    """
    batches = reusable(dataloader)
    matched = weight_matching(graph, reference_state, state)
    if not graph.permutations:
        return matched
    anchor, device = on_device(reference_state)
    other = {n: t.to(device) for n, t in state.items()}
    free = {n: t.clone() for n, t in each_working(graph, anchor)}
    own = {n: t.to(free[n].dtype) for n, t in each_working(graph, other)}
    optimizer = torch.optim.Adam(list(free.values()), lr=learning_rate)
    plan = MovePlan.of(graph)
    normalizations = list(batchnorm_layers(model).values())

    def midpoint_loss(permutation: Permutation) -> float:
        middle = interpolate(anchor, permute_tensors(graph, permutation, other), 0.5)
        if normalizations:
            middle = reestimate_batchnorm(model, middle, batches)
        return mean_loss(model, middle, batches, loss)

    current, sweeps, converged = matched.permutation, matched.sweeps, matched.converged
    best, best_loss = current, midpoint_loss(current)
    for epoch in range(1, epochs + 1):
        with evaluating(model), torch.enable_grad():
            for module in normalizations:
                module.training = True
            for inputs, targets in labeled_batches(batches, device):
                similarities = WeightSimilarities(graph, free, own, plan)
                current, more, converged = descend(similarities, plan.families, current)
                sweeps += more
                middle = interpolate(anchor, permute_tensors(graph, current, other), 0.5)
                middle = {n: t.detach().clone() for n, t in middle.items()}  # running statistics are written to
                leaves = {n: middle[n].requires_grad_() for n in free}
                for name, leaf in leaves.items():
                    middle.update(dict.fromkeys(graph.aliases[name], leaf))
                value = loss(forward(model, middle, inputs), targets)
                if not torch.isfinite(value):
                    raise ValueError(
                        f"the loss of the midpoint network is {value.item()} in epoch {epoch}; a smaller learning_rate "
                        f"than {learning_rate} may help"
                    )
                gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
                for tensor, gradient in zip(free.values(), gradients, strict=True):
                    tensor.grad = None if gradient is None else 0.5 * gradient.to(tensor.dtype)
                optimizer.step()
        now = midpoint_loss(current)
        if now < best_loss:
            best, best_loss = current, now
    moved = permute_tensors(graph, best, state)
    return replace(
        matched,
        permutation=best,
        objective=inner_product(graph, reference_state, moved),
        sweeps=sweeps,
        converged=converged,
        distance_after=weight_distance(graph, reference_state, moved),
    )
