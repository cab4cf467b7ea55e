"""Do all channels of a layer have the same posterior marginals? A permutation test on posterior samples.

Corollary of arXiv 2310.08287: if the weights of each layer are initialized independently and with one distribution, the
posterior marginals of the weights of all channels of the layer are identical. What explores one mode only, or explores
modes in a fixed order, violates that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.resampling import p_value
from tu_symmetry.scaling.removal import incoming_member, unit_rows
from tu_symmetry.states import check_tensor, evenly
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import own_generator

Statistic = Literal["cramer_von_mises", "kolmogorov_smirnov"]


@dataclass(frozen=True)
class HomogeneityTest:
    """A test of one group of hidden units.

    Attributes:
        statistic: the observed statistic, at least 0; the larger, the more the units' marginals differ.
        p_value: probability under the null of a statistic this large, ``(1 + #{null >= observed})`` divided by
            ``1 + num_resamples``.
        null: statistics under random relabelings ``[num_resamples]``.
        deviation: each unit's share of the statistic ``[*blocks, units]``: the unit that deviates most is its maximum.
    """

    statistic: float
    p_value: float
    null: Tensor
    deviation: Tensor


def marginal_homogeneity(
    samples: Tensor,
    *,
    statistic: Statistic = "cramer_von_mises",
    num_resamples: int = 199,
    thresholds: int = 8,
    generator: torch.Generator | None = None,
) -> HomogeneityTest:
    """Test whether the units of a layer have identical marginals.

    *Null hypothesis*: the samples are independent, and their distribution does not change when the units are
    relabeled; every unit then has the same marginal in every weight. Under it the statistic has the same distribution
    after relabeling the units at random in each sample by itself, so that the p-value is exact for any number of
    samples. It is also rejected for samples that depend on each other, such as those of a chain that stays in one
    mode: this is the violation that the test is made for, and says nothing against the chain inside its mode.

    *Statistic*: with ``F_uk`` the empirical distribution function of weight ``k`` in unit ``u`` over the ``S`` samples
    and ``F_k`` that of all units pooled, the mean of ``S (F_uk - F_k)^2`` over units, weights and the pooled quantiles
    (Cramer-von Mises, sensitive to many small differences), or the maximum of ``sqrt(S) |F_uk - F_k|``
    (Kolmogorov-Smirnov, sensitive to a single unit). Both depend on the ranks of each weight alone.

    Args:
        samples: weights ``[S, *blocks, units, weights]``; units are relabeled within each block.
        statistic: ``"cramer_von_mises"`` or ``"kolmogorov_smirnov"``.
        num_resamples: number of random relabelings; the least p-value is ``1 / (1 + num_resamples)``.
        thresholds: number of pooled quantiles at which the distribution functions are compared.
        generator: source of the relabelings; without one they cannot be repeated.

    Raises:
        ValueError: for other shapes, fewer than two samples or units, NaN or infinite weights.
    """
    check_tensor(samples, "samples", "real")
    if samples.ndim < 3 or len(samples) < 2 or samples.shape[-2] < 2 or samples.shape[-1] == 0:
        raise ValueError(
            f"samples has the shape {tuple(samples.shape)}; expected (samples, units, weights) with at least 2 samples "
            "and 2 units"
        )
    if not torch.isfinite(samples).all():
        raise ValueError("samples hold NaN or infinite values: a network among them has diverged")
    if statistic not in ("cramer_von_mises", "kolmogorov_smirnov"):
        raise ValueError(f"statistic must be 'cramer_von_mises' or 'kolmogorov_smirnov', got {statistic!r}")
    count, blocks, units = len(samples), samples.shape[1:-2], samples.shape[-2]
    x = samples.detach().cpu().reshape(count, -1, units, samples.shape[-1])
    levels = torch.arange(1, thresholds + 1, dtype=torch.float64, device="cpu") / (thresholds + 1)
    ranked = x.movedim(2, 1).flatten(0, 1).sort(dim=0).values  # pooled over samples and units
    quantiles = ranked[(levels * (len(ranked) - 1)).long()]  # [thresholds, blocks, weights]
    below = x.unsqueeze(-1) <= quantiles.movedim(0, -1).unsqueeze(1)
    indicators = below.flatten(-2).float()  # [S, blocks, units, weights * thresholds]
    pooled = indicators.mean((0, 2), keepdim=True)[0]

    def differences(values: Tensor) -> Tensor:
        squares = count * (values.mean(0) - pooled).square()
        return squares.mean(-1) if statistic == "cramer_von_mises" else squares.amax(-1).sqrt()

    def summary(by_unit: Tensor) -> float:
        return float(by_unit.double().mean() if statistic == "cramer_von_mises" else by_unit.max())

    deviation = differences(indicators)
    observed = summary(deviation)
    null = torch.empty(num_resamples, dtype=torch.float64, device="cpu")
    source = own_generator(generator)
    for k in range(num_resamples):
        labels = torch.rand(indicators.shape[:3], generator=source, device=source.device).argsort(-1).cpu()
        null[k] = summary(differences(torch.take_along_dim(indicators, labels.unsqueeze(-1), dim=2)))
    p = p_value(null, observed, rounding=1e-5 * observed)  # of sums of the same numbers in another order
    return HomogeneityTest(observed, p, null, deviation.reshape(*blocks, units))


def unit_samples(
    graph: SymmetryGraph,
    states: Mapping[str, Tensor],
    *,
    max_units: int | None = 64,
    max_weights: int | None = 16,
) -> dict[str, Tensor]:
    """What :func:`marginal_homogeneity` tests for each group of hidden units: their weights in stacked states.

    These are the incoming weights of each unit, of which ``max_weights`` are taken in equal steps, and the vectors that
    belong to it (biases, gains). Of the units ``max_units`` are taken in equal steps.

    Args:
        graph: the symmetry graph.
        states: stacked states ``(S, ...)``.
        max_units: largest number of units of a group; None for all.
        max_weights: largest number of incoming weights of a unit; None for all.

    Returns:
        Group name to ``[S, *blocks, units, weights]``. Groups of heads (whose units are blocks of other groups) are
        included.

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: no leading sample axis, or several.
    """
    if graph.check_state(states) != 1:
        raise ValueError("expected stacked states with one leading sample axis")
    found = {}
    for group in graph.permutations:
        if group.size < 2:
            continue
        incoming = incoming_member(graph, group)
        rows = unit_rows(graph, group, incoming, states)
        vectors = [
            unit_rows(graph, group, m, states)
            for m in group.members
            if m is not incoming and m.parameter not in graph.buffers and len(graph.shapes[m.parameter]) == 1
        ]
        rows = torch.cat([rows[..., evenly(rows.shape[-1], max_weights)], *vectors], dim=-1)
        found[group.name] = rows[..., evenly(group.size, max_units), :]
    return found


@dataclass(frozen=True)
class LargestWeight:
    """Where the largest incoming weight of a group of hidden units is, over the samples.

    Attributes:
        index: number of the unit that has it, for each sample ``[S]`` (units of all blocks are numbered through).
        counts: how often each unit has it ``[units]``.
        p_value: probability of counts this uneven if all units are alike, by Monte Carlo.
    """

    index: Tensor
    counts: Tensor
    p_value: float


def largest_index(graph: SymmetryGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each group of more than one unit the number of the unit with the layer's largest incoming weight ``[S]``.

    The picture of arXiv 2310.08287's corollary: for independent networks the index is uniform, since relabeling the
    units of each changes nothing; a chain that stays with one order of the units keeps it.

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: no leading sample axis, or several.
    """
    if graph.check_state(states) != 1:
        raise ValueError("expected stacked states with one leading sample axis")
    return {
        g.name: unit_rows(graph, g, incoming_member(graph, g), states).amax(-1).flatten(1).argmax(1)
        for g in graph.permutations
        if g.size > 1
    }


def uniform_counts(
    index: Tensor, units: int, *, num_resamples: int = 999, generator: torch.Generator | None = None
) -> LargestWeight:
    """Test whether indices ``[S]`` are independent and uniform over ``units``, by Monte Carlo."""
    counts = torch.bincount(index, minlength=units)
    source = own_generator(generator)
    drawn = torch.randint(units, (num_resamples, len(index)), generator=source, device=source.device).cpu()
    expected = len(index) / units
    statistic = float((counts - expected).square().sum())
    ones = torch.ones(drawn.shape, device="cpu")
    by_draw = torch.zeros(num_resamples, units, device="cpu").scatter_add_(1, drawn, ones)
    null = (by_draw - expected).square().sum(1)
    return LargestWeight(index, counts, p_value(null, statistic, rounding=1e-6 * statistic))
