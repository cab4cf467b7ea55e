"""Distances of Gaussian distributions from their moments."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_wasserstein(x: Tensor, y: Tensor) -> Tensor:
    """2-Wasserstein distances ``[...]`` of Gaussians with equal means and covariances ``[..., d, d]``, in float64.

    ``W^2 = tr(X + Y - 2 (X^1/2 Y X^1/2)^1/2)`` is computed as the smallest ``|X^1/2 - Y^1/2 U|^2`` (Frobenius) over all
    rotations ``U``, since the trace cancels where the two are alike. It is a metric, unchanged when both are rotated.

    Args:
        x: covariances, which may be singular; eigenvalues that are negative within rounding error count as 0.
        y: covariances; batch dimensions are broadcast.

    Raises:
        ValueError: shapes that do not fit, NaN or infinite values, matrices that are no covariances.
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
