"""Do all channels of a layer have the same posterior marginals? A permutation test on posterior samples.

Corollary of arXiv 2310.08287: they do, if the weights of each layer are initialized independently and alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tu_symmetry.alignment.removal import incoming_member, unit_rows
from tu_symmetry.metrics.functional.resampling import p_value
from tu_symmetry.states import States, as_stack, check_tensor, evenly
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import own_generator

_THRESHOLDS = 8
_UNITS, _WEIGHTS = 64, 16  # of each group and unit, that are tested


class HomogeneityTest(NamedTuple):
    """The statistic of one group of hidden units, and the probability under the null of one this large."""

    statistic: float
    p_value: float


def marginal_homogeneity(
    samples: Tensor, *, num_resamples: int = 199, generator: torch.Generator | None = None
) -> HomogeneityTest:
    """Test whether the units of a layer have identical marginals.

    *Null hypothesis*: the samples are independent, and their distribution does not change when the units are
    relabeled. Relabeling the units at random in each sample by itself then leaves the distribution of the statistic as
    it is, so that the p-value is exact. Samples of a chain that stays in one mode depend on each other: it is rejected.

    *Statistic* (Cramer-von Mises): with ``F_uk`` the empirical distribution function of weight ``k`` in unit ``u`` over
    the ``S`` samples and ``F_k`` that of all units pooled, the mean of ``S (F_uk - F_k)^2`` over units, weights and
    eight pooled quantiles. It depends on the ranks of each weight alone.

    Args:
        samples: weights ``[S, *blocks, units, weights]``; units are relabeled within each block.
        num_resamples: number of random relabelings; the least p-value is ``1 / (1 + num_resamples)``.
        generator: source of the relabelings; without one they cannot be repeated.
    """
    check_tensor(samples, "samples", "real")
    if samples.ndim < 3 or len(samples) < 2 or samples.shape[-2] < 2 or samples.shape[-1] == 0:
        raise ValueError(
            f"samples has the shape {tuple(samples.shape)}; expected (samples, units, weights) of at least 2 samples"
        )
    if not torch.isfinite(samples).all():
        raise ValueError("samples hold NaN or infinite values: a network among them has diverged")
    count, (units, weights) = len(samples), samples.shape[-2:]
    x = samples.detach().cpu().reshape(count, -1, units, weights)
    levels = torch.arange(1, _THRESHOLDS + 1, dtype=torch.float64, device="cpu") / (_THRESHOLDS + 1)
    ranked = x.movedim(2, 1).flatten(0, 1).sort(dim=0).values  # pooled over samples and units
    quantiles = ranked[(levels * (len(ranked) - 1)).long()]  # [thresholds, blocks, weights]
    below = x.unsqueeze(-1) <= quantiles.movedim(0, -1).unsqueeze(1)
    indicators = below.flatten(-2).float()  # [S, blocks, units, weights * thresholds]
    pooled = indicators.mean((0, 2), keepdim=True)[0]

    def statistic(values: Tensor) -> float:
        return float((count * (values.mean(0) - pooled).square()).mean(-1).double().mean())

    observed = statistic(indicators)
    null = torch.empty(num_resamples, dtype=torch.float64, device="cpu")
    source = own_generator(generator)
    for k in range(num_resamples):
        labels = torch.rand(indicators.shape[:3], generator=source, device=source.device).argsort(-1).cpu()
        null[k] = statistic(torch.take_along_dim(indicators, labels.unsqueeze(-1), dim=2))
    # sums of the same numbers in another order differ by rounding
    return HomogeneityTest(observed, p_value(null, observed, rounding=1e-5 * observed))


def unit_samples(graph: SymmetryGraph, states: States) -> dict[str, Tensor]:
    """What :func:`marginal_homogeneity` tests: each group's ``[S, *blocks, units, weights]`` in a list or a stack.

    Of 64 units at most, evenly spaced, these are 16 incoming weights at most, likewise, and the vectors that belong to
    the unit (biases, gains).

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: no leading sample axis, or several.
    """
    stack = as_stack(states)
    if graph.check_state(stack) != 1:
        raise ValueError("expected a list of states, or stacked ones with one leading sample axis")
    found = {}
    for group in graph.permutations:
        if group.size < 2:
            continue
        incoming = incoming_member(graph, group)
        rows = unit_rows(graph, group, incoming, stack)
        vectors = [
            unit_rows(graph, group, m, stack)
            for m in group.members
            if m is not incoming and m.parameter not in graph.buffers and len(graph.shapes[m.parameter]) == 1
        ]
        rows = torch.cat([rows[..., evenly(rows.shape[-1], _WEIGHTS)], *vectors], dim=-1)
        found[group.name] = rows[..., evenly(group.size, _UNITS), :]
    return found


@dataclass(frozen=True)
class LargestWeight:
    """Which unit of a group has the largest weight in each sample, how often each has it, and how likely that is."""

    index: Tensor
    counts: Tensor
    p_value: float


def largest_weights(
    graph: SymmetryGraph, states: States, *, num_resamples: int = 999, generator: torch.Generator | None = None
) -> dict[str, LargestWeight]:
    """Where the largest incoming weight of each group of more than one unit is in a list of states or a stack.

    For independent networks the unit is uniform (corollary of arXiv 2310.08287); a chain that stays with one order of
    the units keeps it.
    """
    return largest_test(graph, largest_units(graph, states), num_resamples=num_resamples, generator=generator)


def largest_units(graph: SymmetryGraph, states: States) -> dict[str, Tensor]:
    """The unit ``[S]`` with the largest incoming weight of each group of more than one unit."""
    stack = as_stack(states)
    if graph.check_state(stack) != 1:
        raise ValueError("expected a list of states, or stacked ones with one leading sample axis")
    rows = {g.name: unit_rows(graph, g, incoming_member(graph, g), stack) for g in graph.permutations if g.size > 1}
    return {name: found.amax(-1).flatten(1).argmax(1) for name, found in rows.items()}


def largest_test(
    graph: SymmetryGraph,
    units: Mapping[str, Tensor],
    *,
    num_resamples: int = 999,
    generator: torch.Generator | None = None,
) -> dict[str, LargestWeight]:
    """:func:`largest_weights` from the units ``[S]`` of each group: a Monte Carlo test of independent uniform ones."""
    source, found = own_generator(generator), dict[str, LargestWeight]()
    for group in graph.permutations:
        if (index := units.get(group.name)) is None:
            continue
        count = math.prod(group.shape)
        counts = torch.bincount(index, minlength=count)
        drawn = torch.randint(count, (num_resamples, len(index)), generator=source, device=source.device).cpu()
        expected = len(index) / count
        statistic = float((counts - expected).square().sum())
        ones = torch.ones(drawn.shape, device="cpu")
        by_draw = torch.zeros(num_resamples, count, device="cpu").scatter_add_(1, drawn, ones)
        null = (by_draw - expected).square().sum(1)
        found[group.name] = LargestWeight(index, counts, p_value(null, statistic, rounding=1e-6 * statistic))
    return found
