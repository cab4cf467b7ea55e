"""Minimization of an evidence within the bounds of its hyperparameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

DualOptimizer = Literal["l-bfgs-b", "adam"]
_GAIN = 1e-6  # nats, below which an optimum counts as found
_ABNORMAL = 2  # SciPy's status of L-BFGS-B whose line search has failed


class BoundReachedWarning(UserWarning):
    """A hyperparameter stopped at its bound; the message names it."""


@dataclass(frozen=True, eq=False)
class DualResult:
    """What an optimizer of the evidence found."""

    phi: Tensor  # the best hyperparameters seen
    objective: float  # negative log evidence there, less the hyperprior's log density (nats)
    history: list[float] = field(repr=False)  # the objective at every evaluation
    points: Tensor = field(repr=False)  # the hyperparameters there, ``[evaluations, hyperparameters]``
    converged: bool  # L-BFGS-B stopped by itself, or the last 10 % of Adam's steps gained under 1e-3 nats


def optimize(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    phi: Tensor,
    bounds: list[tuple[float, float]],
    names: tuple[str, ...],
    *,
    optimizer: DualOptimizer = "l-bfgs-b",
    num_steps: int = 1500,
    lr: float = 0.01,
) -> DualResult:
    """Minimize a function with its gradient within bounds."""
    if optimizer not in ("l-bfgs-b", "adam"):
        raise ValueError(f"optimizer={optimizer!r} is not known; choose 'l-bfgs-b' or 'adam'")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} has to be at least 1")
    limits = torch.tensor(bounds, dtype=torch.float64, device="cpu")
    start = phi.detach().double().clamp(limits[:, 0], limits[:, 1])
    history: list[float] = []
    points: list[Tensor] = []
    best: tuple[float, Tensor] = (math.inf, start)

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        nonlocal best
        value, gradient = objective(point)
        history.append(value)
        points.append(point.detach().clone())
        if value < best[0]:
            best = (value, points[-1])
        return value, gradient

    def function(values: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            value, gradient = evaluate(torch.from_numpy(values.copy()))
        except ValueError:  # singular there: the line search goes back
            return best[0] + 1e6 * (1 + abs(best[0])), np.zeros(len(values))
        return value, gradient.numpy()

    evaluate(start)
    if optimizer == "adam":
        leaf = start.clone()
        step = torch.optim.Adam([leaf], lr=lr)
        for _ in range(num_steps):
            leaf.grad = evaluate(leaf)[1]
            step.step()
            leaf.copy_(leaf.clamp(limits[:, 0], limits[:, 1]))
        evaluate(leaf)
        last = max(2, len(history) // 10)
        converged = len(history) > last and min(history[:-last]) - min(history[-last:]) < 1e-3
    else:
        left, again = num_steps, True
        while again:
            before = best[0]
            outcome = minimize(
                function,
                best[1].numpy(),
                jac=True,
                method="L-BFGS-B",
                bounds=limits.tolist(),
                options={"maxiter": left, "maxfun": 20 * left, "ftol": 1e-13, "gtol": 1e-6, "maxcor": 20},
            )
            left -= outcome.nit
            # Close to the optimum a line search can fail by rounding alone. The optimizer then starts again from
            # there without what it remembers of the curvature, until that gains nothing.
            gains = before - best[0] > _GAIN
            again = outcome.status == _ABNORMAL and left > 0 and gains
        converged = bool(outcome.success) or (outcome.status == _ABNORMAL and not gains)
    gradient = objective(best[1])[1]
    near = 1e-6 * (limits[:, 1] - limits[:, 0])
    low = (best[1] - limits[:, 0] < near) & (gradient > 1e-3)
    high = (limits[:, 1] - best[1] < near) & (gradient < -1e-3)
    stuck = [name for name, pushed in zip(names, (low | high).tolist(), strict=True) if pushed]
    if stuck:
        warnings.warn(
            f"{stuck} stand at a bound, and the evidence wants more: widen the bounds if they are not meant, or look "
            "whether the block has any effect on the outputs",
            BoundReachedWarning,
            stacklevel=3,
        )
    return DualResult(best[1], best[0], history, torch.stack(points), converged)
