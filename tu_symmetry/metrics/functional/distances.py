"""Distances of two sets of vectors, such as aligned networks, and of Gaussians by their moments."""

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
_COLUMNS = 2**16  # whose directions are drawn at a time


@dataclass(frozen=True)
class VectorDistances:
    """Distances of two sets of networks' vectors.

    Attributes:
        aligned_l2: mean L2 distance between a vector of one set and one of the other.
        within: the same inside each set.
        energy: ``2 E|X - Y| - E|X - X'| - E|Y - Y'|`` without bias, about 0 for equal distributions.
        sliced_wasserstein: 2-Wasserstein distance of random projections, root of the mean square over them.
    """

    aligned_l2: float
    within: tuple[float, float]
    energy: float
    sliced_wasserstein: float


def vector_distances(
    x: Tensor, y: Tensor, *, generator: torch.Generator | None = None, device: torch.device | None = None
) -> VectorDistances:
    """Distances of two sets of vectors ``(S, D)`` and ``(T, D)``; of aligned networks, up to their symmetries.

    Laws: symmetric; unchanged when both sets are translated; proportional to their scale. The vectors stay where they
    are, and 2**28 entries go to ``device`` at a time; ``generator`` draws the directions of the projections.
    """
    a, b = checked_samples(x, y)
    pooled = functools.reduce(torch.hypot, (pairwise_distances(torch.cat(block), 2) for block in _blocks(a, b, device)))
    projected = Projections(generator)
    for block in _blocks(a, b, device):
        projected.add(torch.cat(block))
    return pooled_distances(pooled, projected, len(a))


def pooled_distances(pooled: Tensor, projected: Projections, count_x: int) -> VectorDistances:
    """:func:`vector_distances` from the L2 distances of all pooled vectors ``(N, N)``, those of ``x`` first."""
    s, t = count_x, len(pooled) - count_x
    within = float(pooled[:s, :s].sum() / (s * (s - 1))), float(pooled[s:, s:].sum() / (t * (t - 1)))
    between = float(pooled[:s, s:].mean())
    return VectorDistances(
        aligned_l2=between,
        within=within,
        energy=2 * between - sum(within),
        sliced_wasserstein=float(projected.wasserstein(count_x)),
    )


class Projections:
    """Projections of pooled vectors on random unit directions, from their columns, part by part."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.source = own_generator(generator)
        self.sums: Tensor | None = None
        self.squares = torch.zeros(_PROJECTIONS, dtype=torch.float64, device="cpu")

    def add(self, columns: Tensor) -> None:
        """Add ``(N, columns)``."""
        for own in columns.split(_COLUMNS, 1):
            shape = (own.shape[1], _PROJECTIONS)
            directions = torch.randn(shape, generator=self.source, dtype=torch.float64, device=self.source.device)
            self.squares += directions.square().sum(0).cpu()
            part = own.double() @ directions.to(columns.device)
            self.sums = part if self.sums is None else self.sums + part

    def wasserstein(self, count_x: int) -> Tensor:
        """Root of the mean over the directions of the squared 2-Wasserstein distance of the projections.

        That is the integral of the squared difference of their quantile functions, exact for unequal sizes too.
        """
        assert self.sums is not None
        found = self.sums / self.squares.sqrt().to(self.sums.device)
        a, b = (part.sort(0).values for part in (found[:count_x], found[count_x:]))
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


def gaussian_wasserstein(x: Tensor, y: Tensor) -> Tensor:
    """2-Wasserstein distances ``[...]`` of Gaussians with equal means and covariances ``[..., d, d]``, in float64.

    ``W^2 = tr(X + Y - 2 (X^1/2 Y X^1/2)^1/2)`` is computed as the smallest ``|X^1/2 - Y^1/2 U|^2`` (Frobenius) over all
    rotations ``U``, since the trace cancels where the two are alike. It is a metric, unchanged when both are rotated.

    Covariances may be singular; eigenvalues that are negative within rounding error count as 0.
    """
    if x.ndim < 2 or y.ndim < 2 or not x.shape[-2] == x.shape[-1] == y.shape[-1] == y.shape[-2]:
        raise ValueError(
            f"covariances have the shapes {tuple(x.shape)} and {tuple(y.shape)}; both must be [..., d, d] of one d"
        )
    a, b = _root(x, "first"), _root(y, "second")
    left, _, right = torch.linalg.svd(b @ a)
    return (a - b @ (left @ right)).square().sum((-2, -1)).sqrt()


def _root(matrix: Tensor, which: str) -> Tensor:
    """Symmetric root of covariances ``[..., d, d]`` in float64; eigenvalues within rounding error of 0 are 0."""
    if not torch.isfinite(matrix).all():
        raise ValueError(f"the {which} covariance holds NaN or infinite values")
    rounding = torch.finfo(matrix.dtype if matrix.is_floating_point() else torch.float64).eps ** 0.5
    matrix = matrix.double()
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    if values.shape[-1] == 0:
        return matrix
    largest = values.abs().amax(-1, keepdim=True)
    asymmetric = ((matrix - matrix.mT).abs() > rounding * largest.unsqueeze(-1)).any()
    if bool(asymmetric) or bool((values < -rounding * largest).any()):
        raise ValueError(
            f"the {which} matrix is no covariance: it is not symmetric, or has an eigenvalue of "
            f"{float(values.min()):.3g} beside one of {float(values.max()):.3g}"
        )
    limit = 8 * torch.finfo(torch.float64).eps * largest
    return vectors * torch.where(values > limit, values, 0).sqrt().unsqueeze(-2) @ vectors.mT
