"""Mass profiles: how the squared norm of a network varies with the scale of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from tu_symmetry.scaling.masses import MassTables
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True)
class MassProfile:
    """The mass along one scale direction for each group.

    Attributes:
        log_factors: natural-log factors, the same for every group.
        masses: group name to the squared L2 norm when all units of the group are scaled by each factor.
        mass: the squared norm of the network as given (factor one).
        minima: group name to the log-factor of least mass; infinite where the mass lies on one side only.
    """

    log_factors: Tensor
    masses: dict[str, Tensor]
    mass: float
    minima: dict[str, float]


def mass_profile(
    graph: SymmetryGraph, state: Mapping[str, Tensor], log_factors: Sequence[float] | Tensor
) -> MassProfile:
    """Squared L2 norm against a common factor on all units of each scale group (arXiv 2310.08287, section 6).

    Along a plain hidden layer the mass is ``a e^(2s) + b e^(-2s) + c`` for the natural-log factor ``s``, with its
    minimum at ``s = log(b / a) / 4``; a network in ``min_mass`` form has every profile's minimum at ``s = 0``.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: for a stack of states.
    """
    if graph.check_state(state):
        raise ValueError("mass_profile takes one state; unstack a stack of samples and profile each")
    tables = MassTables(graph, state)
    points = torch.as_tensor(log_factors, dtype=torch.float64, device="cpu")
    masses, minima, start = {}, {}, 0
    for group in graph.scales:
        direction = torch.zeros(tables.count, dtype=torch.float64, device="cpu")
        direction[start : start + group.size] = 1.0
        parts = tables.along(direction)
        exponents, weights = (
            torch.tensor(list(x), dtype=torch.float64, device="cpu") for x in (parts.keys(), parts.values())
        )
        masses[group.name] = torch.exp(weights.log() + 2 * points.unsqueeze(-1) * exponents).sum(-1)
        minima[group.name] = _minimum(exponents, weights)
        start += group.size
    return MassProfile(points, masses, tables.at(np.zeros(tables.count)).value, minima)


def _minimum(exponents: Tensor, weights: Tensor) -> float:
    """The zero of the derivative of ``sum w exp(2 c s)`` in s."""
    up, down = exponents > 0, exponents < 0
    rises, falls = bool((weights[up] > 0).any()), bool((weights[down] > 0).any())
    if not (rises and falls):
        return float("-inf") if rises else float("inf") if falls else 0.0
    terms = weights.log() + exponents.abs().log()

    def slope(s: float) -> float:
        moved = terms + 2 * exponents * s
        return float(torch.logsumexp(moved[up], 0) - torch.logsumexp(moved[down], 0))

    return float(brentq(slope, -400.0, 400.0, xtol=1e-14))
