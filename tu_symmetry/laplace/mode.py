"""The weights that the evidence is evaluated at, and how well they solve their problem.

At ``tangent_mode`` they are ``theta* = argmin loss(h_theta) / v + 1/2 theta^T Lambda theta`` of the tangent linear
model ``h_theta(x) = f(x) + J(x) (theta - theta~)`` (Recommendation 1 of arXiv 2206.08900), at ``map`` ``theta~``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

EvaluateAt = Literal["tangent_mode", "map"]


@dataclass(frozen=True)
class Mode:
    """Where the solver stopped: weights ``theta``, their loss (nats, for unit noise), and how many directions it tried.

    ``gradient_norm`` is ``sqrt(g^T Sigma g)``, the distance to the mode in posterior standard deviations; ``gap`` how
    much lower the objective can be at these precisions, at most (nats), see :func:`duality_gap`; NaN where not known.
    """

    theta: Tensor
    loss: float
    gradient_norm: float
    iterations: int
    converged: bool
    gap: float = math.nan

    @classmethod
    def at(cls, point: Tensor, loss: float, evaluate_at: EvaluateAt) -> Mode:
        """The linearization point: the answer for ``map``, the start of the search for ``tangent_mode``."""
        found = evaluate_at == "map"
        return cls(point, loss, 0.0 if found else math.nan, 0, found, 0.0 if found else math.nan)


def duality_gap(gradient: Tensor, precision: Tensor) -> float:
    """``1/2 g^T Lambda^-1 g``: the objective of the tangent model lies no more than that above its minimum (nats).

    With ``r`` the gradient of the loss in the outputs, ``J^T r + Lambda theta = g``. The Fenchel dual of the objective
    takes at ``r`` the value ``objective - 1/2 g^T Lambda^-1 g``, and no dual value is above the minimum.
    """
    return 0.5 * float((gradient.double().square() / precision.double()).sum())
