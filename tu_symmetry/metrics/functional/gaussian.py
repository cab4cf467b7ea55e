"""Distances of Gaussian distributions from their moments."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_wasserstein(x: Tensor, y: Tensor, *, difference: Tensor | None = None) -> Tensor:
    """2-Wasserstein distance of Gaussians with covariances ``[..., d, d]``, in the unit of their standard deviations.

    ``W^2 = |difference|^2 + tr(X + Y - 2 (X^1/2 Y X^1/2)^1/2)``. The second term is also the smallest
    ``|X^1/2 - Y^1/2 U|^2`` (Frobenius) over all rotations ``U``, and this is how it is computed, in float64: the trace
    is a small difference of large numbers where the two are alike (equal covariances of trace 1 would come out 1e-8
    apart), the norm is not, and with any ``U`` it is never too small.

    For example, two standard deviations in one dimension are as far apart as they differ; covariances that commute, as
    far as the roots of their eigenvalues.

    Laws: a metric (zero for equal ones alone, symmetric, triangle inequality); unchanged when both are rotated;
    ``gaussian_wasserstein(c**2 * x, c**2 * y)`` is ``|c|`` times that of ``x`` and ``y``; to a point
    (covariance 0) it is ``tr(X)^1/2``.

    Args:
        x: covariances, which may be singular; eigenvalues that are negative within rounding error count as 0.
        y: covariances; batch dimensions are broadcast.
        difference: the means', first minus second, ``[..., d]``; None where they are equal.

    Returns:
        Distances ``[...]``, float64.

    Raises:
        ValueError: no square matrices of one size, a difference of another length, NaN or infinite values, matrices
            that are not symmetric or have negative eigenvalues.
    """
    if x.ndim < 2 or y.ndim < 2 or not x.shape[-2] == x.shape[-1] == y.shape[-1] == y.shape[-2]:
        raise ValueError(
            f"covariances have the shapes {tuple(x.shape)} and {tuple(y.shape)}; both must be [..., d, d] of one d"
        )
    a, b = _root(x, "first"), _root(y, "second")
    left, _, right = torch.linalg.svd(b @ a)
    squared = (a - b @ (left @ right)).square().sum((-2, -1))
    if difference is not None:
        if difference.ndim < 1 or difference.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"difference has the shape {tuple(difference.shape)} for covariances of {x.shape[-1]} dimensions"
            )
        if not torch.isfinite(difference).all():
            raise ValueError("the difference of the means holds NaN or infinite values")
        squared = squared + difference.double().square().sum(-1)
    return squared.sqrt()


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
    if bool(((matrix - matrix.mT).abs() > rounding * largest.unsqueeze(-1)).any()):
        raise ValueError(f"the {which} covariance is not symmetric")
    if bool((values < -rounding * largest).any()):
        raise ValueError(
            f"the {which} covariance has an eigenvalue of {float(values.min()):.3g} beside one of "
            f"{float(values.max()):.3g}: it is no covariance"
        )
    limit = 8 * torch.finfo(torch.float64).eps * largest
    return vectors * torch.where(values > limit, values, 0).sqrt().unsqueeze(-2) @ vectors.mT
