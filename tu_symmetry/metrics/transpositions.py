"""Number of transpositions of many permutations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.metrics.base import BaseMetric
from tu_symmetry.symmetry.elements import check_permutation, transposition_count


class TranspositionCount(BaseMetric):
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
    total: Tensor
    permutations: Tensor

    def __init__(self, reduction: Literal["mean", "sum"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.reduction = reduction
        self.add_state("total", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("permutations", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

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
        self.total = self.total + transposition_count({name: p.cpu() for name, p in by_group.items()})
        self.permutations = self.permutations + 1

    def compute(self) -> Tensor:
        """NoT of all permutations so far: their mean, or their sum."""
        return self.total if self.reduction == "sum" else self.total.double() / self.permutations
