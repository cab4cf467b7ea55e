"""Pairwise mutual information of networks, accumulated over batches."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from tu_symmetry.metrics.functional.diversity import pairwise_mutual_information


class PairwiseMutualInformation(Metric):
    """Mutual information of every pair of networks, in nats, averaged over the points.

    See :func:`~tu_symmetry.metrics.functional.pairwise_mutual_information`.

    Args:
        num_members: number of networks ``M``.
        reduction: ``"mean"`` over the pairs, or ``"none"`` for the symmetric matrix ``(M, M)``.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = PairwiseMutualInformation(2)
        >>> metric.update(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        >>> round(float(metric.compute()), 4)
        0.6931
    """

    is_differentiable = False
    full_state_update = False
    plot_lower_bound = 0.0
    total: Tensor
    points: Tensor

    def __init__(self, num_members: int, reduction: Literal["mean", "none"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_members < 2:
            raise ValueError(f"num_members must be at least 2 to form pairs, got {num_members}")
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
        self.num_members, self.reduction = num_members, reduction
        zeros = torch.zeros(num_members, num_members, dtype=torch.float64)
        self.add_state("total", default=zeros, dist_reduce_fx="sum")
        self.add_state("points", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, probs: Tensor) -> None:
        """Add the predictions of all networks on a batch.

        Args:
            probs: probabilities ``(M, B, C)``.

        Raises:
            ValueError: for another number of networks, or values that are no probabilities.
        """
        information = pairwise_mutual_information(probs)
        if len(probs) != self.num_members:
            raise ValueError(f"got the predictions of {len(probs)} networks, not of num_members={self.num_members}")
        self.total = self.total + information.to(self.total) * probs.shape[1]
        self.points = self.points + probs.shape[1]

    def compute(self) -> Tensor:
        """Matrix ``(M, M)`` or its mean over the pairs, in nats."""
        matrix = self.total / self.points
        return matrix if self.reduction == "none" else matrix.sum() / (self.num_members * (self.num_members - 1))
