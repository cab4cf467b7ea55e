"""Mass profiles: how the squared norm of a network varies with the scale of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
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
    """

    log_factors: Tensor
    masses: dict[str, Tensor]
    mass: float


def mass_profile(
    graph: SymmetryGraph, state: Mapping[str, Tensor], log_factors: Sequence[float] | Tensor
) -> MassProfile:
    """Squared L2 norm against a common factor on all units of each scale group (arXiv 2310.08287, section 6).

    Along each group the mass is ``a e^(2s) + b e^(-2s) + c`` for a plain hidden layer, with its minimum at
    ``s = log(b / a) / 4``; a network in ``min_mass`` form has every profile's minimum at ``s = 0``.

    Args:
        graph: the symmetry graph.
        state: state dict.
        log_factors: where to evaluate, natural logarithms.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
    """
    graph.check_state(state)
    tables = MassTables(graph, state)
    points = torch.as_tensor(log_factors, dtype=torch.float64)
    masses, start = {}, 0
    for group in graph.scales:
        direction = torch.zeros(tables.count, dtype=torch.float64)
        direction[start : start + group.size] = 1.0
        masses[group.name] = torch.tensor([tables.value(s * direction) for s in points.tolist()], dtype=torch.float64)
        start += group.size
    return MassProfile(points, masses, tables.value(torch.zeros(tables.count, dtype=torch.float64)))
