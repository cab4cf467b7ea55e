"""Maximum mean discrepancy between posterior samples and a reference, with or without symmetries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.metrics.base import TwoSampleMetric, read, written
from tu_symmetry.metrics.functional.discrepancy import (
    Level,
    Reduction,
    maximum_mean_discrepancy,
    reduce_discrepancies,
    weight_vectors,
)
from tu_symmetry.metrics.functional.removal import Removal, RemovalName, removal
from tu_symmetry.metrics.functional.two_sample import DiscrepancyTest, Sizes, vectors_test
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.states import require_state
from tu_symmetry.symmetry.graph import SymmetryGraph


class MaximumMeanDiscrepancy(TwoSampleMetric):
    """Squared MMD between samples of a network's weights and a reference: plain, or after symmetry removal.

    See :func:`~tu_symmetry.metrics.functional.network_discrepancy`. With a ``graph`` it is the quantity that arXiv
    2310.08287 calls NS, "MMD computed after the removal of the symmetries". How that paper makes one number of its
    layers' values is not published; the mean over tensors is our choice.

    All samples are kept until :meth:`reset`: leave out what is not compared, and put large networks on the CPU.

    Args:
        graph: the symmetry graph; symmetries are removed as ``removed`` says. Only parameters are compared then,
            tied ones once, and not the running statistics.
        removed: what is removed with a graph, see :func:`~tu_symmetry.metrics.functional.removal`: by default what the
            paper removes (unit norm, then sorting). To align instead, pass ``removal("min_mass", align_to=state)``.
        parameters: what is compared, with a graph: names, patterns, or a predicate of the name.
        level: what is one vector: a ``"tensor"``, a ``"layer"`` (the tensors of one module) or the ``"network"``.
        reduction: ``"mean"``, ``"max"`` or ``"sum"`` over the tensors or layers.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = MaximumMeanDiscrepancy()
        >>> stack = {"weight": torch.arange(12.0).view(4, 3)}
        >>> metric.update(stack, reference=True)
        >>> metric.update({"weight": stack["weight"] + 50}, reference=False)
        >>> bool(metric.compute() > 0.1)
        True
    """

    layout: list[Tensor]

    def __init__(
        self,
        graph: SymmetryGraph | None = None,
        *,
        removed: RemovalName | Removal = "paper",
        parameters: Parameters | None = None,
        level: Level = "tensor",
        reduction: Reduction = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        reduce_discrepancies({"": torch.zeros((), device="cpu")}, reduction)  # refuses what is not known
        weight_vectors({}, parameters=parameters if graph is None else None, level=level)
        self.graph, self.counted = graph, parameters
        self.removed, self.level, self.reduction = removal(removed), level, reduction
        self.add_state("layout", default=[], dist_reduce_fx="cat")

    def update(self, states: Mapping[str, Tensor], reference: bool) -> None:
        """Add networks.

        Args:
            states: stacked states ``(S, ...)``; tensors that are not floating-point are left out.
            reference: whether they belong to the reference.

        Raises:
            ValueError: for states of another architecture, or of differing numbers of networks.
            SymmetryError: for states that the graph does not fit.
        """
        require_state(states, "states")
        floating = {name: t for name, t in states.items() if t.is_floating_point()}
        counts = {len(t) if t.ndim else 0 for t in floating.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"expected stacked states with one leading sample axis; its lengths are {sorted(counts)}")
        shapes = {name: list(t.shape[1:]) for name, t in floating.items()}
        first = read(self.layout).get("shapes", shapes)
        if shapes != first:
            odd = sorted(n for n in shapes.keys() | first.keys() if shapes.get(n) != first.get(n))
            raise ValueError(f"the states are of another architecture than the first ones; they differ in {odd}")
        vectors = weight_vectors(
            states, graph=self.graph, removed=self.removed, parameters=self.counted, level=self.level
        )
        if len(self.layout) == 0:
            widths = {name: v.shape[1] for name, v in vectors.items()}
            self.layout.append(written({"shapes": shapes, "widths": widths}).to(self.device))
        (self.reference if reference else self.samples).append(torch.cat(list(vectors.values()), dim=1))

    def compute(self) -> Tensor:
        """The squared MMD of all tensors or layers, reduced; about 0 for equal distributions, and then of either sign.

        Raises:
            ValueError: if there are no samples, or no reference.
        """
        return reduce_discrepancies(self.compute_by_part(), self.reduction)

    def compute_by_part(self) -> dict[str, Tensor]:
        """The squared MMD of each tensor or layer (``level``), of this process's samples.

        Raises:
            ValueError: if there are no samples, or no reference.
        """
        samples, reference = self._by_part()
        return {name: maximum_mean_discrepancy(own, reference[name]) for name, own in samples.items()}

    def compute_test(
        self,
        *,
        sizes: Sizes = "given",
        permutations: int = 199,
        bootstraps: int = 200,
        confidence: float = 0.95,
        groups: tuple[Tensor | None, Tensor | None] = (None, None),
        generator: torch.Generator | None = None,
    ) -> DiscrepancyTest:
        """The value with p-value, confidence interval and the names of what was aggregated, of all processes' samples.

        Args:
            sizes: see :func:`~tu_symmetry.metrics.functional.discrepancy_test`, also for what follows.
            permutations: number of relabelings.
            bootstraps: number of replicates.
            confidence: level of the interval.
            groups: for samples and reference the numbers of the runs that they come from, in the order of the updates
                (of rank 0 first).
            generator: source of all random choices; without one they cannot be repeated.

        Raises:
            ValueError: if there are no samples, or no reference.
        """
        with nullcontext() if self._is_synced else self.sync_context(should_sync=self._to_sync):
            return vectors_test(
                *self._by_part(),
                removed="nothing" if self.graph is None else self.removed.name,
                level=self.level,
                reduction=self.reduction,
                sizes=sizes,
                permutations=permutations,
                bootstraps=bootstraps,
                confidence=confidence,
                groups=groups,
                generator=generator,
            )

    def _by_part(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Samples and reference, by tensor or layer."""
        sets = self.sets()
        widths = read(self.layout)["widths"]
        samples, reference = (dict(zip(widths, rows.split(list(widths.values()), dim=1), strict=True)) for rows in sets)
        return samples, reference
