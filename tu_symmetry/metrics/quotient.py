"""Distances between two sets of networks on the quotient space, accumulated over updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import TwoSampleMetric
from tu_symmetry.metrics.functional.discrepancy import weight_vectors
from tu_symmetry.metrics.functional.quotient import vector_distances
from tu_symmetry.metrics.functional.removal import Removal, removal
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.symmetry.graph import SymmetryGraph


class QuotientDistance(TwoSampleMetric):
    """Aligned L2, energy and sliced Wasserstein distances between posterior samples and a reference.

    See :func:`~tu_symmetry.metrics.functional.quotient_distances`. :meth:`compute` returns a dictionary with
    ``aligned_l2``, ``energy`` and ``sliced_wasserstein``. The vectors of all networks are kept until :meth:`reset`.

    Args:
        graph: the symmetry graph of the networks.
        align_to: the network that all others are aligned to, after both have minimal mass; the same in all processes.
        removed: another removal, in place of ``align_to``.
        parameters: what counts, see :func:`~tu_symmetry.canonicalize`.
        projections: number of directions of the sliced Wasserstein distance.
        seed: seed of the projections.
        kwargs: see :class:`torchmetrics.Metric`.

    Raises:
        ValueError: neither or both of ``align_to`` and ``removed``.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        align_to: Mapping[str, Tensor] | None = None,
        *,
        removed: Removal | None = None,
        parameters: Parameters | None = None,
        projections: int = 128,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (align_to is None) == (removed is None):
            raise ValueError("give the network to align to (align_to), or a removal (removed), and not both")
        self.graph, self.counted = graph, parameters
        self.removed = removal("min_mass", align_to=align_to) if removed is None else removed
        self.projections, self.seed = projections, seed

    def update(self, states: Mapping[str, Tensor], reference: bool) -> None:
        """Add stacked networks ``(S, ...)``, of the reference or not.

        Raises:
            SymmetryError: states that the graph does not fit.
            ValueError: no leading sample axis, or several.
        """
        if self.graph.check_state(states) != 1:
            raise ValueError("expected stacked states with one leading sample axis")
        vectors = weight_vectors(
            states, graph=self.graph, removed=self.removed, parameters=self.counted, level="network"
        )
        (self.reference if reference else self.samples).append(vectors["network"])

    def compute(self) -> dict[str, Tensor]:
        """The distances by name.

        Raises:
            ValueError: if there are no samples, or no reference.
        """
        found = vector_distances(
            *self.sets(),
            removed=self.removed.name,
            projections=self.projections,
            generator=torch.Generator().manual_seed(self.seed),
        )
        names = ("aligned_l2", "energy", "sliced_wasserstein")
        return {name: torch.tensor(getattr(found, name), dtype=torch.float64, device="cpu") for name in names}
