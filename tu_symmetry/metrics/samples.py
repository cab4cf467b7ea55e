"""Metrics of sets of networks, whose weights are kept until a reset."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from tu_symmetry.metrics.base import BaseMetric, read, stacked, written
from tu_symmetry.metrics.functional.discrepancy import (
    Removal,
    RemovalName,
    mean_discrepancy,
    removal,
    weight_vectors,
)
from tu_symmetry.metrics.functional.homogeneity import HomogeneityTest, marginal_homogeneity, unit_samples
from tu_symmetry.processes import sharing
from tu_symmetry.states import States, SymmetryError, as_stack, require_state
from tu_symmetry.symmetry.graph import SymmetryGraph


class MaximumMeanDiscrepancy(BaseMetric):
    """Squared MMD between samples of a network's weights and a reference: plain, or after symmetry removal (NS).

    See :func:`~tu_symmetry.metrics.functional.network_discrepancy`, and
    :func:`~tu_symmetry.metrics.functional.discrepancy_test` for a p-value and an interval. All samples are kept until
    :meth:`reset`: put large networks on the CPU.
    """

    higher_is_better = False
    layout: list[Tensor]
    reference: list[Tensor]
    samples: list[Tensor]

    def __init__(
        self, graph: SymmetryGraph | None = None, *, removed: RemovalName | Removal = "paper", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.graph, self.removed = graph, removal(removed)
        for name in ("reference", "samples", "layout"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a batch belongs to one of the two sets."""
        raise NotImplementedError(
            f"{type(self).__name__} compares two sets and a batch belongs to one of them, so a batch has no value "
            "of its own: call update(...) for each batch, then compute()"
        )

    def update(self, states: States, reference: bool) -> None:
        """Add a list of states or a stack, of the reference or not; what is not floating-point is left out."""
        states = require_state(as_stack(states), "states")
        floating = {name: t for name, t in states.items() if t.is_floating_point()}
        counts = {len(t) if t.ndim else 0 for t in floating.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"expected stacked states with one leading sample axis; its lengths are {sorted(counts)}")
        shapes = {name: list(t.shape[1:]) for name, t in floating.items()}
        first = read(self.layout).get("shapes", shapes)
        if shapes != first:
            odd = sorted(n for n in shapes.keys() | first.keys() if shapes.get(n) != first.get(n))
            raise ValueError(f"the states are of another architecture than the first ones; they differ in {odd}")
        vectors = weight_vectors(states, graph=self.graph, removed=self.removed)
        if len(self.layout) == 0:
            widths = {name: v.shape[1] for name, v in vectors.items()}
            self.layout.append(written({"shapes": shapes, "widths": widths}).to(self.device))
        (self.reference if reference else self.samples).append(torch.cat(list(vectors.values()), dim=1))

    def compute(self) -> Tensor:
        """The squared MMD, mean over tensors; about 0 for equal distributions, and then of either sign."""
        for name, rows in (("reference", self.reference), ("samples", self.samples)):
            if len(rows) == 0:
                raise ValueError(f"no {name} so far: call update(states, reference={name == 'reference'})")
        widths = list(read(self.layout)["widths"].values())
        sets = (stacked(rows).split(widths, dim=1) for rows in (self.samples, self.reference))
        with sharing() if self._is_synced and self.process_group is None else nullcontext():
            return mean_discrepancy(list(zip(*sets, strict=True)))


class MarginalHomogeneity(BaseMetric):
    """P-value of the hypothesis that the units of every layer have identical posterior marginals.

    See :func:`~tu_symmetry.metrics.functional.marginal_homogeneity`. :meth:`compute` returns the least p-value of the
    permutation groups times their number (Bonferroni), 1 at most. Small values mean that the samples violate the
    corollary of arXiv 2310.08287: they do not explore the equivalent modes evenly. Samples are kept until
    :meth:`reset`.
    """

    higher_is_better = True
    layout: list[Tensor]
    samples: list[Tensor]

    def __init__(self, graph: SymmetryGraph, *, num_resamples: int = 199, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not any(g.size > 1 for g in graph.permutations):
            raise SymmetryError(f"{graph.architecture or 'the network'} has no group of interchangeable units to test")
        self.graph, self.num_resamples, self.seed = graph, num_resamples, seed
        for name in ("layout", "samples"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, states: States) -> None:
        """Add a list of networks, or stacked ones ``(S, ...)``."""
        rows = unit_samples(self.graph, states)
        if len(self.layout) == 0:
            self.layout.append(written({name: list(r.shape[1:]) for name, r in rows.items()}).to(self.device))
        self.samples.append(torch.cat([r.flatten(1) for r in rows.values()], dim=1))

    def compute(self) -> Tensor:
        """One p-value for all groups together."""
        tests = self.compute_by_group()
        least = min(t.p_value for t in tests.values())
        return torch.tensor(min(1.0, len(tests) * least), dtype=torch.float64, device="cpu")

    def compute_by_group(self) -> dict[str, HomogeneityTest]:
        """The test of each permutation group, on this process's samples."""
        if len(self.samples) == 0:
            raise ValueError("no samples so far: call update(stacked_states)")
        layout = read(self.layout)
        pieces = stacked(self.samples).split([math.prod(shape) for shape in layout.values()], dim=1)
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: marginal_homogeneity(piece.unflatten(1, shape), num_resamples=self.num_resamples, generator=generator)
            for (name, shape), piece in zip(layout.items(), pieces, strict=True)
        }
