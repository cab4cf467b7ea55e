"""P1's corollary as a metric: do all channels of a layer have the same posterior marginals?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import BaseMetric, read, stacked, written
from tu_symmetry.metrics.functional.homogeneity import (
    HomogeneityTest,
    LargestWeight,
    Statistic,
    largest_index,
    marginal_homogeneity,
    uniform_counts,
    unit_samples,
)
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.graph import SymmetryGraph


class MarginalHomogeneity(BaseMetric):
    """P-value of the hypothesis that the units of every layer have identical posterior marginals.

    See :func:`~tu_symmetry.metrics.functional.marginal_homogeneity`. Each permutation group is tested by itself;
    :meth:`compute` returns the least p-value times the number of groups (Bonferroni), 1 at most, which is a valid
    p-value for all groups together. Small values mean that the samples violate the corollary of arXiv 2310.08287: they
    do not explore the equivalent modes evenly.

    Samples (a selection of weights) are kept until :meth:`reset`.

    Args:
        graph: the symmetry graph of the networks.
        statistic: ``"cramer_von_mises"`` or ``"kolmogorov_smirnov"``.
        num_resamples: number of random relabelings for each group.
        keep_largest: also keep which unit has each group's largest weight, for :meth:`largest_weights`.
        max_units: largest number of units of a group that are tested; None for all.
        max_weights: largest number of incoming weights of a unit that are tested; None for all.
        seed: seed of the relabelings.
        kwargs: see :class:`torchmetrics.Metric`.
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    layout: list[Tensor]
    samples: list[Tensor]
    largest: list[Tensor]

    def __init__(
        self,
        graph: SymmetryGraph,
        *,
        statistic: Statistic = "cramer_von_mises",
        num_resamples: int = 199,
        max_units: int | None = 64,
        max_weights: int | None = 16,
        keep_largest: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not any(g.size > 1 for g in graph.permutations):
            raise SymmetryError(f"{graph.architecture or 'the network'} has no group of interchangeable units to test")
        self.graph, self.statistic, self.num_resamples, self.seed = graph, statistic, num_resamples, seed
        self.max_units, self.max_weights = max_units, max_weights
        self.keep_largest = keep_largest
        self.units = {g.name: math.prod(g.shape) for g in graph.permutations if g.size > 1}
        for name in ("layout", "samples", "largest"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, states: Mapping[str, Tensor]) -> None:
        """Add stacked networks ``(S, ...)``.

        Raises:
            SymmetryError: states of another architecture, NaN or infinite weights.
            ValueError: no leading sample axis, or several.
        """
        rows = unit_samples(self.graph, states, max_units=self.max_units, max_weights=self.max_weights)
        if len(self.layout) == 0:
            self.layout.append(written({name: list(r.shape[1:]) for name, r in rows.items()}).to(self.device))
        self.samples.append(torch.cat([r.flatten(1) for r in rows.values()], dim=1))
        if self.keep_largest:
            index = largest_index(self.graph, states)
            self.largest.append(torch.stack([index[name] for name in self.units], dim=1))

    def compute(self) -> Tensor:
        """One p-value for all groups together."""
        tests = self.compute_by_group()
        return torch.tensor(
            min(1.0, len(tests) * min(t.p_value for t in tests.values())), dtype=torch.float64, device="cpu"
        )

    def compute_by_group(self) -> dict[str, HomogeneityTest]:
        """The test of each permutation group, on this process's samples.

        Raises:
            ValueError: if there are fewer than two samples.
        """
        if len(self.samples) == 0:
            raise ValueError("no samples so far: call update(stacked_states)")
        layout = read(self.layout)
        pieces = stacked(self.samples).split([math.prod(shape) for shape in layout.values()], dim=1)
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: marginal_homogeneity(
                piece.unflatten(1, shape),
                statistic=self.statistic,
                num_resamples=self.num_resamples,
                generator=generator,
            )
            for (name, shape), piece in zip(layout.items(), pieces, strict=True)
        }

    def largest_weights(self) -> dict[str, LargestWeight]:
        """Where the largest weight of each group is, of this process's samples; needs ``keep_largest``.

        Raises:
            ValueError: a metric without ``keep_largest``, or no samples.
        """
        if not self.keep_largest:
            raise ValueError("the indices were not kept: make the metric with keep_largest=True")
        if len(self.largest) == 0:
            raise ValueError("no samples so far: call update(stacked_states)")
        rows = stacked(self.largest)
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: uniform_counts(rows[:, k], units, generator=generator)
            for k, (name, units) in enumerate(self.units.items())
        }
