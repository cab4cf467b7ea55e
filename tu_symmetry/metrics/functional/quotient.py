"""Distances of two sets of networks on the quotient space: between functions up to symmetry, not between weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.discrepancy import checked_samples, pairwise_distances, weight_vectors
from tu_symmetry.metrics.functional.removal import Removal, removal
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.states import sample_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import own_generator

_ENTRIES = 2**28  # of the vectors that are on the device at a time


@dataclass(frozen=True)
class QuotientDistances:
    """Distances of two sets of networks after their symmetries were removed.

    Attributes:
        aligned_l2: mean L2 distance between a network of one set and one of the other, after alignment.
        within: the same inside each set.
        energy: energy distance ``2 E|X - Y| - E|X - X'| - E|Y - Y'|``, an estimate without bias, about 0 for equal
            distributions.
        sliced_wasserstein: 2-Wasserstein distance of random projections, root of the mean square over them.
        removed: what was removed, in words.
    """

    aligned_l2: float
    within: tuple[float, float]
    energy: float
    sliced_wasserstein: float
    removed: str


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Energy distance of two sets of vectors ``(S, D)`` and ``(T, D)``, the U-statistic.

    Laws: symmetric; unchanged when both sets are translated; proportional to their scale; mean 0 for equal
    distributions.

    Raises:
        ValueError: fewer than two vectors, or other lengths.
    """
    x, y = checked_samples(x, y)
    within_x, within_y, between = _mean_distances(x, y)
    return 2 * between - within_x - within_y


def sliced_wasserstein(
    x: Tensor,
    y: Tensor,
    *,
    projections: int = 128,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Sliced 2-Wasserstein distance of two sets of vectors ``(S, D)`` and ``(T, D)`` of any sizes.

    The root of the mean over random unit directions of the squared 2-Wasserstein distance of the projections, which
    is the integral of the squared difference of their quantile functions, exact for unequal sizes too.

    Args:
        x: vectors.
        y: vectors.
        projections: number of directions.
        generator: source of the directions; without one they cannot be repeated.
        device: where it is computed; without one where ``x`` is.

    Raises:
        ValueError: fewer than two vectors, other lengths, or no projections.
    """
    x, y = checked_samples(x, y)
    if projections < 1:
        raise ValueError(f"projections must be at least 1, got {projections}")
    source = own_generator(generator)
    directions = torch.randn(x.shape[1], projections, generator=source, dtype=torch.float64, device=source.device)
    directions, start = directions / directions.norm(dim=0), 0
    sums: list[Tensor] = []
    for block in _blocks(x, y, device):
        stop = start + block[0].shape[1]
        here = directions[start:stop].to(block[0].device)
        parts = [s.double() @ here for s in block]
        sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else parts
        start = stop
    a, b = (s.sort(0).values for s in sums)
    # both quantile functions are constant between the merged steps i / S and j / T
    steps = [torch.arange(1, n + 1, dtype=torch.float64, device="cpu") / n for n in (len(a), len(b))]
    edges = torch.cat(steps).sort().values
    widths = edges.diff(prepend=torch.zeros(1, dtype=torch.float64, device="cpu"))
    middles = edges - widths / 2
    rows = [torch.searchsorted(s, middles).clamp_max(len(s) - 1) for s in steps]
    squares = (a[rows[0].to(a.device)] - b[rows[1].to(b.device)]).square()
    return (widths.to(squares).unsqueeze(1) * squares).sum(0).mean().sqrt()


def quotient_distances(
    graph: SymmetryGraph,
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    *,
    removed: Removal | None = None,
    parameters: Parameters | None = None,
    projections: int = 128,
    generator: torch.Generator | None = None,
) -> QuotientDistances:
    """Aligned L2, energy and sliced Wasserstein distances of two sets of networks.

    Each network is brought to the minimal mass and aligned to one reference (the first network of ``y``), so that each
    distance is between representatives of the orbits: an upper bound of the distance between the orbits themselves.

    Args:
        graph: the symmetry graph.
        x: stacked states ``(S, ...)``.
        y: stacked states ``(T, ...)``.
        removed: another removal.
        parameters: what counts, see :func:`~tu_symmetry.canonicalize`.
        projections: number of directions of the sliced Wasserstein distance.
        generator: source of the projections.

    Raises:
        SymmetryError: states that the graph does not fit.
        ValueError: fewer than two networks.
    """
    if sample_count(x) < 2 or sample_count(y) < 2:
        raise ValueError(f"got {sample_count(x)} and {sample_count(y)} networks; at least two of each are needed")
    chosen = removed or removal("min_mass", align_to={name: t[0] for name, t in y.items()})
    vectors = [
        weight_vectors(s, graph=graph, removed=chosen, parameters=parameters, level="network")["network"]
        for s in (x, y)
    ]
    return vector_distances(*vectors, removed=chosen.name, projections=projections, generator=generator)


def vector_distances(
    x: Tensor,
    y: Tensor,
    *,
    removed: str = "nothing",
    projections: int = 128,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> QuotientDistances:
    """:func:`quotient_distances` of the aligned networks' vectors ``(S, D)`` and ``(T, D)``.

    ``device`` is where it is computed; without one that is where ``x`` is. The vectors stay where they are: columns of
    2**28 entries together go there at a time.
    """
    a, b = checked_samples(x, y)
    within_x, within_y, between = (float(mean) for mean in _mean_distances(a, b, device))
    return QuotientDistances(
        aligned_l2=between,
        within=(within_x, within_y),
        energy=2 * between - within_x - within_y,
        sliced_wasserstein=float(sliced_wasserstein(a, b, projections=projections, generator=generator, device=device)),
        removed=removed,
    )


def _mean_distances(x: Tensor, y: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean L2 distances of two different vectors of the first set, of the second, and of one of each."""
    s, t = len(x), len(y)
    parts = (pairwise_distances(torch.cat(block), 2) for block in _blocks(x, y, device))
    pooled = functools.reduce(torch.hypot, parts)
    return pooled[:s, :s].sum() / (s * (s - 1)), pooled[s:, s:].sum() / (t * (t - 1)), pooled[:s, s:].mean()


def _blocks(x: Tensor, y: Tensor, device: torch.device | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of both sets on the device."""
    device, width = device or x.device, max(1, _ENTRIES // (len(x) + len(y)))
    for a, b in zip(x.split(width, 1), y.split(width, 1), strict=True):
        yield a.to(device), b.to(device)
