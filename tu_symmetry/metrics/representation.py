"""Mass of networks against the least that positive rescalings reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import BaseMetric
from tu_symmetry.metrics.functional.representation import representation_costs
from tu_symmetry.scaling.canonical import Convention
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.symmetry.graph import SymmetryGraph


class RepresentationCost(BaseMetric):
    """Mean mass, minimal mass and ratio of the two over networks.

    See :func:`~tu_symmetry.metrics.functional.representation_costs`. :meth:`compute` returns a dictionary with the
    means of ``mass``, ``minimal_mass`` and ``ratio`` (the mean of the networks' ratios).

    Args:
        graph: the symmetry graph of the networks.
        parameters: the tensors that count, as the regularizer counts them; see :func:`~tu_symmetry.canonicalize`.
        normalizations: what becomes of weights before a normalization; see :func:`~tu_symmetry.canonicalize`.
        degenerate: what becomes of dead units; see :func:`~tu_symmetry.canonicalize`.
        kwargs: see :class:`torchmetrics.Metric`.
    """

    higher_is_better = False
    total: Tensor
    networks: Tensor

    def __init__(
        self,
        graph: SymmetryGraph,
        *,
        parameters: Parameters | None = None,
        normalizations: Convention = "leave",
        degenerate: Convention = "leave",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.graph, self.counted = graph, parameters
        self.normalizations, self.degenerate = normalizations, degenerate
        self.add_state("total", default=torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("networks", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, states: Mapping[str, Tensor]) -> None:
        """Add a network, or stacked networks ``(S, ...)``.

        Raises:
            SymmetryError: states of another architecture, NaN or infinite weights.
        """
        costs = representation_costs(
            self.graph,
            states,
            parameters=self.counted,
            normalizations=self.normalizations,
            degenerate=self.degenerate,
        )
        rows = torch.stack([costs.mass, costs.minimal_mass, costs.ratio])
        self.total = self.total + rows.sum(1).to(self.total)
        self.networks = self.networks + rows.shape[1]

    def compute(self) -> dict[str, Tensor]:
        """Means over the networks so far of ``mass``, ``minimal_mass`` and ``ratio``."""
        mass, minimal, ratio = self.total / self.networks
        return {"mass": mass, "minimal_mass": minimal, "ratio": ratio}
