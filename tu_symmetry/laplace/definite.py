"""Cholesky factors of covariances, and a stated condition for those that have none, the same on every processor."""

from __future__ import annotations

import torch
from torch import Tensor

_SINGULAR = 10.0  # in units of n eps


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower Cholesky factor of a symmetric matrix ``[n, n]``, differentiable; None of one singular to rounding.

    A matrix is singular to rounding where it has no finite factor, or where the smallest eigenvalue at unit diagonal,
    by three steps of inverse iteration, is below ``10 n eps``: rounding moves it by about ``n eps``.
    """
    root, failed = torch.linalg.cholesky_ex(matrix)
    scale = matrix.detach().diagonal().sqrt().unsqueeze(-1)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(matrix), 1, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
    for _ in range(3):
        vector = scale * torch.cholesky_solve(scale * vector / vector.norm(), root.detach())
    limit = _SINGULAR * len(matrix) * torch.finfo(matrix.dtype).eps
    return root if bool((failed == 0) & (vector.norm() * limit <= 1)) else None  # NaN is no eigenvalue


def cholesky_of_one_plus(matrix: Tensor, rounding: float = 0.0) -> Tensor:
    """The lower Cholesky factor of ``1 + A``, which always exists, for a positive semidefinite ``A``; overwrites it.

    Where an entry of the diagonal is so large that the one is lost in its rounding, that rounding stands in its place;
    ``rounding`` is that of the entries, relative to the diagonal, where it is more than the dtype's.
    """
    rounding += _SINGULAR * len(matrix) * torch.finfo(matrix.dtype).eps
    diagonal = matrix.diagonal()
    diagonal.add_((rounding * diagonal).clamp(min=1))
    return torch.linalg.cholesky(matrix)
