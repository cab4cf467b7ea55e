"""Pairwise mutual information of networks, accumulated over batches."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.metrics.base import AverageMetric, BaseMetric
from tu_symmetry.metrics.functional.diversity import DiversitySummary, diversity_summary, pairwise_mutual_information
from tu_symmetry.plot import new_axes


class PairwiseMutualInformation(AverageMetric):
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

    plot_lower_bound = 0.0

    def __init__(self, num_members: int, reduction: Literal["mean", "none"] = "mean", **kwargs: Any) -> None:
        super().__init__(shape=(num_members, num_members), **kwargs)
        if num_members < 2:
            raise ValueError(f"num_members must be at least 2 to form pairs, got {num_members}")
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
        self.num_members, self.reduction = num_members, reduction

    def update(self, probs: Tensor) -> None:
        """Add the predictions of all networks on a batch.

        Args:
            probs: probabilities ``(M, B, C)``.

        Raises:
            ValueError: for another number of networks, or values that are no probabilities.
        """
        information, points = _information(probs, self.num_members), probs.shape[1]
        self.add(information.to(self.total) * points, points)

    def compute(self) -> Tensor:
        """Matrix ``(M, M)`` or its mean over the pairs, in nats."""
        matrix: Tensor = super().compute()
        return matrix if self.reduction == "none" else matrix.sum() / (self.num_members * (self.num_members - 1))

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """The matrix as an image, or one mean or several; returns figure and axes."""
        val = self.compute() if val is None else val
        if not isinstance(val, Tensor) or val.ndim != 2:
            return self._plot(val, ax)
        figure, ax = new_axes(ax)
        image = ax.imshow(val.detach().cpu().numpy())
        figure.colorbar(image, ax=ax, label="mutual information (nats)")
        ax.set(xlabel="network", ylabel="network")
        return figure, ax


class FunctionalDiversity(BaseMetric):
    """Pairwise mutual information of networks in and out of distribution: means, dispersion, correlation, collapse.

    See :func:`~tu_symmetry.metrics.functional.diversity_summary`. :meth:`compute` returns a dictionary with
    ``id_mean``, ``id_dispersion``, ``ood_mean``, ``ood_dispersion``, ``correlation``, ``rank_correlation``,
    ``collapsed`` and ``distinct``.

    Args:
        num_members: number of networks ``M``, at least 3.
        tolerance: mutual information up to which two networks count as one function, nats.
        kwargs: see :class:`torchmetrics.Metric`.
    """

    compares_sets = True
    id_total: Tensor
    ood_total: Tensor
    points: Tensor

    def __init__(self, num_members: int, tolerance: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_members < 3:
            raise ValueError(f"num_members must be at least 3 for dispersion and correlation, got {num_members}")
        self.num_members, self.tolerance = num_members, tolerance
        for name in ("id_total", "ood_total"):
            zeros = torch.zeros(num_members, num_members, dtype=torch.float64, device="cpu")
            self.add_state(name, default=zeros, dist_reduce_fx="sum")
        self.add_state("points", default=torch.zeros(2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, probs: Tensor, ood: bool) -> None:
        """Add the predictions of all networks on a batch.

        Args:
            probs: probabilities ``(M, B, C)``.
            ood: whether the batch is out of distribution.

        Raises:
            ValueError: for another number of networks, or values that are no probabilities.
        """
        added = _information(probs, self.num_members).to(self.id_total) * probs.shape[1]
        if ood:
            self.ood_total = self.ood_total + added
        else:
            self.id_total = self.id_total + added
        count = torch.tensor([0, probs.shape[1]] if ood else [probs.shape[1], 0], device=self.points.device)
        self.points = self.points + count

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Mutual information ``(M, M)`` in and out of distribution, in nats, of this process's points.

        Raises:
            ValueError: if there are no points of one of the two.
        """
        for count, what, flag in zip(self.points.tolist(), ("test", "out-of-distribution"), (False, True), strict=True):
            if not count:
                raise ValueError(f"no {what} predictions so far: call update(probs, ood={flag})")
        return self.id_total / self.points[0], self.ood_total / self.points[1]

    def summary(
        self, *, bootstraps: int = 200, confidence: float = 0.95, generator: torch.Generator | None = None
    ) -> DiversitySummary:
        """All of it, with an interval of the correlation, of this process's points."""
        return diversity_summary(
            *self.matrices(),
            tolerance=self.tolerance,
            bootstraps=bootstraps,
            confidence=confidence,
            generator=generator,
        )

    def compute(self) -> dict[str, Tensor]:
        """The numbers by name."""
        found = self.summary(bootstraps=0)
        names = ("id_mean", "id_dispersion", "ood_mean", "ood_dispersion", "correlation", "rank_correlation")
        values = {name: getattr(found, name) for name in (*names, "collapsed", "distinct")}
        return {name: torch.tensor(float(value), dtype=torch.float64, device="cpu") for name, value in values.items()}


def _information(probs: Tensor, members: int) -> Tensor:
    information = pairwise_mutual_information(probs)
    if len(probs) != members:
        raise ValueError(f"got the predictions of {len(probs)} networks, not of num_members={members}")
    return information
