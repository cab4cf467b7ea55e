"""Agreement and total variation of two predictive distributions, accumulated over batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import BaseMetric
from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation


class _PointwiseMean(BaseMetric):
    """Mean over all points of a quantity whose mean over a batch :meth:`_batch_mean` computes."""

    total: Tensor
    points: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("points", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

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
        mean = self._batch_mean(probs_a, probs_b)
        points = probs_a.shape[-2]
        self.total = self.total + mean.to(self.total) * points
        self.points = self.points + points

    def compute(self) -> Tensor:
        """The mean over all points so far, in [0, 1]."""
        return self.total / self.points


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
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

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
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    _batch_mean = staticmethod(predictive_total_variation)
