"""Metrics that are means over what they have seen: points, permutations, networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import AverageMetric
from tu_symmetry.metrics.functional.predictive import (
    pairwise_mutual_information,
    predictive_agreement,
    predictive_total_variation,
)
from tu_symmetry.metrics.functional.representation import representation_costs
from tu_symmetry.states import States
from tu_symmetry.symmetry.elements import check_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph


class _PointwiseMean(AverageMetric):
    """Mean over all points of a quantity whose mean over a batch :meth:`_batch_mean` computes."""

    @staticmethod
    def _batch_mean(probs_a: Tensor, probs_b: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, probs_a: Tensor, probs_b: Tensor) -> None:
        """Add probabilities ``(B, C)``, or those of members ``(M, B, C)``, which are averaged over ``M`` first."""
        mean, points = self._batch_mean(probs_a, probs_b), probs_a.shape[-2]
        self.add(mean.to(self.total) * points, points)


class PredictiveAgreement(_PointwiseMean):
    """Share of points on which two predictives have the same most probable class."""

    higher_is_better = True
    _batch_mean = staticmethod(predictive_agreement)


class PredictiveTotalVariation(_PointwiseMean):
    """Mean over the points of half the L1 distance between two predictives."""

    higher_is_better = False
    _batch_mean = staticmethod(predictive_total_variation)


class PairwiseMutualInformation(AverageMetric):
    """Mutual information of two networks in nats, averaged over all pairs of ``num_members`` and all points.

    See :func:`~tu_symmetry.metrics.functional.pairwise_mutual_information`, which gives the matrix of the pairs.
    """

    def __init__(self, num_members: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_members < 2:
            raise ValueError(f"num_members must be at least 2 to form pairs, got {num_members}")
        self.num_members = num_members

    def update(self, probs: Tensor) -> None:
        """Add the probabilities ``(M, B, C)`` of all networks on a batch."""
        information = pairwise_mutual_information(probs)
        members, points = probs.shape[:2]
        if members != self.num_members:
            raise ValueError(f"got the predictions of {members} networks, not of num_members={self.num_members}")
        self.add(information.to(self.total).sum() / (members * (members - 1)) * points, points)


class TranspositionCount(AverageMetric):
    """Mean number of transpositions (NoT) of permutations, for example those that align a posterior's samples.

    NoT is the least number of swaps of two units that makes up a permutation (arXiv 2401.00611, section 2).
    """

    higher_is_better = False

    def update(self, permutation: Mapping[str, Tensor]) -> None:
        """Add one permutation: group name to LongTensor."""
        check_permutation(permutation)
        count = transposition_count({name: p.cpu() for name, p in permutation.items()})
        self.add(torch.tensor(count, device="cpu"), 1)


class RepresentationCost(AverageMetric):
    """Means of ``mass``, ``minimal_mass`` and ``ratio`` (the mean of the networks' ratios) over networks.

    See :func:`~tu_symmetry.metrics.functional.representation_costs`.
    """

    higher_is_better = False

    def __init__(self, graph: SymmetryGraph, **kwargs: Any) -> None:
        super().__init__(shape=(3,), **kwargs)
        self.graph = graph

    def update(self, states: States) -> None:
        """Add a network, a list of networks, or stacked ones ``(S, ...)``."""
        costs = representation_costs(self.graph, states)
        rows = torch.stack([costs.mass, costs.minimal_mass, costs.ratio])
        self.add(rows.sum(1), rows.shape[1])

    def compute(self) -> dict[str, Tensor]:
        """The means by name."""
        return dict(zip(("mass", "minimal_mass", "ratio"), super().compute(), strict=True))
