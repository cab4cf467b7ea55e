"""Metrics that are means over what they have seen: points, permutations, networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.metrics.base import AverageMetric
from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation
from tu_symmetry.metrics.functional.representation import representation_costs
from tu_symmetry.scaling.canonical import Convention
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.symmetry.elements import check_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph


class _PointwiseMean(AverageMetric):
    """Mean over all points of a quantity whose mean over a batch :meth:`_batch_mean` computes."""

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    @staticmethod
    def _batch_mean(probs_a: Tensor, probs_b: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, probs_a: Tensor, probs_b: Tensor) -> None:
        """Add a batch.

        Args:
            probs_a: probabilities ``(B, C)``, or those of members ``(M, B, C)``, which are averaged over ``M`` first.
            probs_b: probabilities of the same points and classes; its number of members may differ.

        Raises:
            ValueError: if the shapes do not fit, or an argument holds something else than probabilities.
        """
        mean, points = self._batch_mean(probs_a, probs_b), probs_a.shape[-2]
        self.add(mean.to(self.total) * points, points)


class PredictiveAgreement(_PointwiseMean):
    """Share of points on which two predictives have the same most probable class.

    See :func:`~tu_symmetry.metrics.functional.predictive_agreement`.

    Args:
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = PredictiveAgreement()
        >>> metric.update(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]]))
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = True
    _batch_mean = staticmethod(predictive_agreement)


class PredictiveTotalVariation(_PointwiseMean):
    """Mean over the points of half the L1 distance between two predictives.

    See :func:`~tu_symmetry.metrics.functional.predictive_total_variation`.

    Args:
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = PredictiveTotalVariation()
        >>> metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.75, 0.25]]))
        >>> float(metric.compute())
        0.25
    """

    higher_is_better = False
    _batch_mean = staticmethod(predictive_total_variation)


class TranspositionCount(AverageMetric):
    """Number of transpositions (NoT) of permutations, for example those that align a posterior's samples.

    NoT is the least number of swaps of two units that makes up a permutation (arXiv 2401.00611, section 2); see
    :func:`~tu_symmetry.symmetry.elements.transposition_count`.

    Args:
        reduction: ``"mean"`` over the permutations, or their ``"sum"``.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = TranspositionCount()
        >>> metric.update({"hidden": torch.tensor([1, 0, 2])})
        >>> metric.update({"hidden": torch.tensor([1, 2, 0])})
        >>> float(metric.compute())
        1.5
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, reduction: Literal["mean", "sum"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.reduction = reduction

    def update(self, permutation: Mapping[str, Tensor] | Tensor) -> None:
        """Add one permutation.

        Args:
            permutation: group name to LongTensor, or one LongTensor ``[..., n]`` whose leading axes are independent
                permutations that make up one.

        Raises:
            SymmetryError: if it is no permutation.
        """
        by_group = {"permutation": permutation} if isinstance(permutation, Tensor) else permutation
        check_permutation(by_group)
        count = transposition_count({name: p.cpu() for name, p in by_group.items()})
        self.add(torch.tensor(count, device="cpu"), 1)

    def compute(self) -> Tensor:
        """NoT of all permutations so far: their mean, or their sum."""
        mean: Tensor = super().compute()
        return self.total.long() if self.reduction == "sum" else mean


class RepresentationCost(AverageMetric):
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

    def __init__(
        self,
        graph: SymmetryGraph,
        *,
        parameters: Parameters | None = None,
        normalizations: Convention = "leave",
        degenerate: Convention = "leave",
        **kwargs: Any,
    ) -> None:
        super().__init__(shape=(3,), **kwargs)
        self.graph, self.counted = graph, parameters
        self.normalizations, self.degenerate = normalizations, degenerate

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
        self.add(rows.sum(1), rows.shape[1])

    def compute(self) -> dict[str, Tensor]:
        """Means over the networks so far of ``mass``, ``minimal_mass`` and ``ratio``."""
        return dict(zip(("mass", "minimal_mass", "ratio"), super().compute(), strict=True))
