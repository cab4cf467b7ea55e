"""Distances of two sets of networks on the quotient space: between functions up to symmetry, not between weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.discrepancy import checked_samples, pairwise_distances
from tu_symmetry.symmetry.randomness import own_generator

_ENTRIES = 2**28  # of the vectors that are on the device at a time
_PROJECTIONS = 128


@dataclass(frozen=True)
class VectorDistances:
    """Distances of two sets of networks' vectors.

    Attributes:
        aligned_l2: mean L2 distance between a vector of one set and one of the other.
        within: the same inside each set.
        energy: energy distance ``2 E|X - Y| - E|X - X'| - E|Y - Y'|``, an estimate without bias, about 0 for equal
            distributions.
        sliced_wasserstein: 2-Wasserstein distance of random projections, root of the mean square over them.
    """

    aligned_l2: float
    within: tuple[float, float]
    energy: float
    sliced_wasserstein: float


def vector_distances(
    x: Tensor,
    y: Tensor,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> VectorDistances:
    """Distances of two sets of vectors ``(S, D)`` and ``(T, D)``; of aligned networks, up to their symmetries.

    Laws: symmetric; unchanged when both sets are translated; proportional to their scale.

    Args:
        x: vectors; they stay where they are, and 2**28 entries go to ``device`` at a time.
        y: vectors.
        generator: source of the directions of the projections; without one they cannot be repeated.
        device: where it is computed; without one where ``x`` is.
    """
    a, b = checked_samples(x, y)
    s, t = len(a), len(b)
    pooled = functools.reduce(torch.hypot, (pairwise_distances(torch.cat(block), 2) for block in _blocks(a, b, device)))
    within = float(pooled[:s, :s].sum() / (s * (s - 1))), float(pooled[s:, s:].sum() / (t * (t - 1)))
    between = float(pooled[:s, s:].mean())
    return VectorDistances(
        aligned_l2=between,
        within=within,
        energy=2 * between - sum(within),
        sliced_wasserstein=float(_sliced_wasserstein(a, b, own_generator(generator), device)),
    )


def _sliced_wasserstein(x: Tensor, y: Tensor, source: torch.Generator, device: torch.device | None) -> Tensor:
    """Root of the mean over random unit directions of the squared 2-Wasserstein distance of the projections.

    That is the integral of the squared difference of their quantile functions, exact for unequal sizes too.
    """
    directions = torch.randn(x.shape[1], _PROJECTIONS, generator=source, dtype=torch.float64, device=source.device)
    directions = directions / directions.norm(dim=0)
    start = 0
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


def _blocks(x: Tensor, y: Tensor, device: torch.device | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of both sets on the device."""
    device, width = device or x.device, max(1, _ENTRIES // (len(x) + len(y)))
    for a, b in zip(x.split(width, 1), y.split(width, 1), strict=True):
        yield a.to(device), b.to(device)
