"""The joint stationary point of weights and hyperparameters: a fixed-point iteration, extrapolated.

One step finds the weights that belong to the hyperparameters, and then the hyperparameters that belong to these
weights. Both lower one objective, so that an extrapolation can be judged by it and taken back.

What is returned is the best point that was seen. The last one can be worse: an extrapolation that no further step was
left to take back, or a bound that a hyperparameter was sent to. With the objectives 21.4, 20.7, 21.1 and three steps
allowed it is the second point, with the weights that were found there, and not converged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What one alternation found at a point.

    Attributes:
        objective: at the point, with the weights that belong to it.
        image: the hyperparameters that belong to these weights.
        undetermined: which hyperparameters are on their way to their upper bound, ever more slowly.
        weights: what belongs to the point, to be given back with the best one.
    """

    objective: float
    image: Tensor
    undetermined: Tensor
    weights: Any = None


class Alternation(NamedTuple):
    """The best point that was seen.

    Attributes:
        point: the point; its image where the iteration converged, whose objective is no higher.
        iterations: number of steps.
        change: largest difference between the point and its image.
        converged: whether that is below the tolerance, and no earlier point was better.
        best: number of the step that started at the point.
        objective: at the point.
        weights: what belongs to the point.
    """

    point: Tensor
    iterations: int
    change: float
    converged: bool
    best: int
    objective: float
    weights: Any


def alternate(
    step: Callable[[Tensor, float], Step],
    start: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    tolerance: float,
    accuracy: float,
    max_iterations: int,
    progress: Callable[[int, float, float], None] | None = None,
) -> Alternation:
    """Iterate ``point -> image`` with Anderson extrapolation where it lowers the objective.

    Args:
        step: from a point, and the accuracy to which the weights are wanted.
        start: first point, float64.
        low: lower bounds of the point.
        high: upper bounds.
        tolerance: largest change at convergence.
        accuracy: of the weights at convergence; they are found more roughly while the point still moves.
        max_iterations: largest number of steps.
        progress: called with number, change and objective after every step.

    Raises:
        ValueError: no iterations allowed.
    """
    if max_iterations < 1:
        raise ValueError(f"max_iterations={max_iterations} has to be at least 1")
    memory = _Extrapolation()
    found: Alternation | None = None
    held = torch.zeros_like(start, dtype=torch.bool)
    point, best, change = start, float("inf"), 1.0
    for iteration in range(1, max_iterations + 1):
        asked = max(accuracy, 0.01 * min(change, 1.0))
        value, image, undetermined, weights = step(point, asked)
        image = torch.where(held, point, image)
        change = float((image - point).abs().max())
        if progress is not None:
            progress(iteration, change, value)
        resolution = 1e-6 * abs(value) + asked**2  # of the objective: rounding, and weights that are found roughly
        if found is None or not value > found.objective + resolution:
            found = Alternation(point, iteration, change, False, iteration, value, weights)
        if change <= tolerance and asked <= accuracy:
            if found.best == iteration:
                return found._replace(point=image, converged=True)
            return found._replace(iterations=iteration)  # stationary, and worse than where it has been
        if iteration == max_iterations:
            break
        lost = undetermined & ~held
        if bool(lost.any()):  # to the bound at once, and for good
            memory, best, held = _Extrapolation(), float("inf"), held | lost
            point = torch.where(lost, high, image)
        elif value > best + 1e-9 * abs(best) and memory.points:
            point = memory.restart()  # the extrapolation was no good: go on from the last plain step
        else:
            best = value
            point = memory.next(point, image)
        point = torch.minimum(torch.maximum(point, low), high)
    assert found is not None
    return found._replace(iterations=max_iterations)


class _Extrapolation:
    """Anderson extrapolation of a fixed-point iteration (type II, few vectors), with a plain step to fall back on."""

    def __init__(self, memory: int = 4) -> None:
        self.memory = memory
        self.points: list[Tensor] = []
        self.images: list[Tensor] = []

    def next(self, point: Tensor, image: Tensor) -> Tensor:
        """The next point, from this one and its image."""
        self.points = [*self.points, point][-self.memory :]
        self.images = [*self.images, image][-self.memory :]
        if len(self.points) < 2:
            return image
        residuals = torch.stack(self.images) - torch.stack(self.points)
        differences = (residuals[1:] - residuals[:-1]).T
        weights = torch.linalg.lstsq(differences, residuals[-1].unsqueeze(-1), driver="gelsd").solution
        moves = (torch.stack(self.images)[1:] - torch.stack(self.images)[:-1]).T
        return image - (moves @ weights).squeeze(-1).clamp(-3.0, 3.0)

    def restart(self) -> Tensor:
        """Forget everything; the image of the last accepted point."""
        image = self.images[-1]
        self.points, self.images = [], []
        return image
